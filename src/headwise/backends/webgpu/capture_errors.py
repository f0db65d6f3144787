"""What cannot be part of a capture."""

from __future__ import annotations

from typing import Any


class CaptureError(RuntimeError):
    """A step cannot be captured, or a captured step cannot be replayed so. The message says what to do."""


class ReadInCapture(CaptureError):
    """Elements were read back inside of a capture."""

    def __init__(self, operator: Any = None) -> None:
        super().__init__()
        self.operator = operator  # of PyTorch's operators `Array.__torch_dispatch__` knows which

    def __str__(self) -> str:
        return (
            f"headwise: {self.operator or 'this call'} reads elements back inside of a capture, and a replay runs no Python "
            "that could look at them. Keep them on the GPU (torch.where in place of `if`, x * mask in place of x[mask]), or "
            "read after the block and after a replay"
        )

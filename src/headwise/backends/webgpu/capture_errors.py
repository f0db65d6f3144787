"""What cannot be part of a capture."""

from __future__ import annotations

from typing import Any

import torch

from headwise.backends.webgpu import runtime


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


class Numbers:
    """Tensors of one element on the CPU that a block used: what they held is part of the recording."""

    def __init__(self) -> None:
        self._known: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def add(self, operator: str, x: torch.Tensor) -> None:
        self._known.append((operator, x.detach(), x.detach().clone()))

    def check(self) -> None:
        """An error if one of them holds something else now."""
        for operator, x, known in self._known:
            if not torch.equal(x, known) and not (x != x).all():
                raise CaptureError(
                    f"headwise: {operator} was captured with a tensor on the CPU that held {known.item()} and holds "
                    f"{x.item()} now; a replay would use the old number. Make it a tensor on webgpu before the block: pass "
                    "it to capture(…), or change it in place there"
                )


def note_number(operator: str, x: torch.Tensor) -> None:
    """An operator is about to use a number that is a tensor on the CPU."""
    device = runtime.process.device
    if device is not None and device.capture is not None:
        device.capture.numbers.add(operator, x)

"""Gated linear units (Shazeer, "GLU Variants Improve Transformer", 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.ops.glu import ACTIVATIONS, glu


class GLU(nn.Module):
    """`headwise.glu` with its activation: of two tensors, or of both halves of one.

    >>> nn.GLU("gelu_tanh")(torch.randn(4, 96), torch.randn(4, 96)).shape
    torch.Size([4, 96])
    """

    def __init__(self, activation: str = "silu", *, backend: str | None = None) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"GLU: activation is {activation!r}; it needs to be one of {', '.join(ACTIVATIONS)}")
        self.activation, self.backend = activation, backend

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return glu(gate, up, self.activation, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.activation!r}"


class GatedMLP(nn.Module):
    """The feed-forward half of a layer: ``down(activation(gate(x)) * up(x))``; gate and up are one matrix product.

    >>> nn.GatedMLP(64, 192)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self, dim: int, hidden: int, activation: str = "silu", *, bias: bool = False, backend: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=bias, device=device, dtype=dtype)
        self.glu = GLU(activation, backend=backend)
        self.down = nn.Linear(hidden, dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.glu(self.gate_up(x)))
        return out

"""Norms as modules."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from headwise.ops.add_rms_norm import add_rms_norm
from headwise.ops.layer_norm import layer_norm
from headwise.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """`headwise.rms_norm` over a last dimension of ``dim``, with its weight.

    elementwise_affine: False for no weight. weight_offset: added to the weight, which starts where their sum is one.

    >>> norm = nn.RMSNorm(64)
    >>> normed, h = norm(torch.randn(4, 64), torch.randn(4, 64))  # a residual: its sum comes back too
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, weight_offset: float = 0.0, *, elementwise_affine: bool = True,
        backend: str | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.eps, self.weight_offset, self.backend = dim, eps, weight_offset, backend
        weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.weight: nn.Parameter | None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x. With a residual: ``(norm of x + residual, x + residual)``, by one kernel.

        The sum has the residual's dtype; under autocast both are float32.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps, self.weight_offset, backend=self.backend)
        return add_rms_norm(
            x.to(residual.dtype), residual, self.weight, self.eps, self.weight_offset, backend=self.backend
        )

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, weight_offset={self.weight_offset}"


class LayerNorm(nn.Module):
    """`headwise.layer_norm` over a last dimension of ``dim``, with its weight and bias.

    elementwise_affine: False for neither. bias: False for a weight alone.

    >>> nn.LayerNorm(64, bias=False)(torch.randn(4, 64)).shape
    torch.Size([4, 64])
    """

    def __init__(
        self, dim: int, eps: float = 1e-5, *, elementwise_affine: bool = True, bias: bool = True,
        backend: str | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.eps, self.backend = dim, eps, backend
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            self.register_parameter(
                name, nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if wanted else None
            )
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, bias={self.bias is not None}"

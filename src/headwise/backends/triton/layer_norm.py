"""LayerNorm in Triton: the kernels of norm_forward.py and norm_backward.py, about the mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headwise.backends.triton.norm_backward import backward
from headwise.backends.triton.norm_forward import Norm, forward

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.layer_norm import LayerNorm, LayerNormBackward


def layer_norm_forward(gpu: Gpu, args: LayerNorm) -> tuple[Tensor, Tensor | None]:
    norm = Norm(args.x, weight=args.weight, bias=args.bias, eps=args.eps, centre=True)
    y, _, statistics = forward(gpu, norm, args.with_statistics)
    return y, statistics


def layer_norm_backward(gpu: Gpu, args: LayerNormBackward) -> tuple[Tensor, Tensor | None, Tensor | None]:
    norm = Norm(args.x, weight=args.weight, bias=args.bias, eps=args.eps, centre=True)
    return backward(gpu, norm, args.grad, None, args.statistics)

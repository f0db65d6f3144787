"""LayerNorm in Triton: the kernels of norm_forward.py and norm_backward.py, about the mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headwise.backends.norm import about_mean
from headwise.backends.triton.norm_backward import backward
from headwise.backends.triton.norm_forward import forward

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.layer_norm import LayerNorm, LayerNormBackward


def layer_norm_forward(gpu: Gpu, args: LayerNorm) -> tuple[Tensor, Tensor | None]:
    y, _, statistics = forward(gpu, about_mean(args, args.x), args.with_statistics)
    return y, statistics


def layer_norm_backward(gpu: Gpu, args: LayerNormBackward) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return backward(gpu, about_mean(args, args.x), args.grad, None, args.statistics)

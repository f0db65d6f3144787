"""RMSNorm in Triton: the kernels of norm_forward.py and norm_backward.py, about zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headwise.backends.norm import about_zero
from headwise.backends.triton.norm_backward import backward
from headwise.backends.triton.norm_forward import forward

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.rms_norm import RmsNorm, RmsNormBackward


def rms_norm_forward(gpu: Gpu, args: RmsNorm) -> tuple[Tensor, Tensor | None]:
    y, _, rstd = forward(gpu, about_zero(args, args.x), args.with_rstd)
    return y, rstd


def rms_norm_backward(gpu: Gpu, args: RmsNormBackward) -> tuple[Tensor, Tensor | None]:
    dx, dweight, _ = backward(gpu, about_zero(args, args.x), args.grad, None, args.rstd)
    return dx, dweight

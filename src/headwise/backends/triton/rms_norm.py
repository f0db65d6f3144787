"""RMSNorm in Triton: the kernels of norm_forward.py and norm_backward.py, about zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headwise.backends.triton.norm_backward import backward
from headwise.backends.triton.norm_forward import Norm, forward

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.rms_norm import RmsNorm, RmsNormBackward


def rms_norm_forward(gpu: Gpu, args: RmsNorm) -> tuple[Tensor, Tensor | None]:
    norm = Norm(args.x, weight=args.weight, eps=args.eps, weight_offset=args.weight_offset)
    y, _, rstd = forward(gpu, norm, args.with_rstd)
    return y, rstd


def rms_norm_backward(gpu: Gpu, args: RmsNormBackward) -> tuple[Tensor, Tensor | None]:
    norm = Norm(args.x, weight=args.weight, eps=args.eps, weight_offset=args.weight_offset)
    dx, dweight, _ = backward(gpu, norm, args.grad, None, args.rstd)
    return dx, dweight

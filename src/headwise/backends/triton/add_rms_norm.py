"""A sum and its RMSNorm in Triton: the kernels of norm_forward.py and norm_backward.py, of two tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headwise.backends.triton.norm_backward import backward
from headwise.backends.triton.norm_forward import Norm, forward

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.add_rms_norm import AddRmsNorm, AddRmsNormBackward


def add_rms_norm_forward(gpu: Gpu, args: AddRmsNorm) -> tuple[Tensor, Tensor | None, Tensor | None]:
    norm = Norm(args.x, args.residual, args.weight, eps=args.eps, weight_offset=args.weight_offset)
    return forward(gpu, norm, args.with_rstd)


def add_rms_norm_backward(gpu: Gpu, args: AddRmsNormBackward) -> tuple[Tensor, Tensor | None]:
    norm = Norm(args.h, weight=args.weight, eps=args.eps, weight_offset=args.weight_offset)
    dx, dweight, _ = backward(gpu, norm, args.grad, args.grad_h, args.rstd)
    return dx, dweight

"""A sum and its RMSNorm in Triton: the kernels of norm_forward.py and norm_backward.py, of two tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headwise.backends.norm import about_zero
from headwise.backends.triton.norm_backward import backward
from headwise.backends.triton.norm_forward import forward

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.add_rms_norm import AddRmsNorm, AddRmsNormBackward


def add_rms_norm_forward(gpu: Gpu, args: AddRmsNorm) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return forward(gpu, about_zero(args, args.x, args.residual), args.with_rstd)


def add_rms_norm_backward(gpu: Gpu, args: AddRmsNormBackward) -> tuple[Tensor, Tensor | None]:
    dx, dweight, _ = backward(gpu, about_zero(args, args.h), args.grad, args.grad_h, args.rstd)
    return dx, dweight

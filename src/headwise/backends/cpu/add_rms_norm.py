"""A sum and its RMS normalisation on the CPU: the blocks of rms_norm.py, with the sum made in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headwise.backends.cpu import rms_norm

if TYPE_CHECKING:
    from headwise.ops.add_rms_norm import AddRmsNorm, AddRmsNormBackward


def add_rms_norm_forward(args: AddRmsNorm) -> tuple[Tensor, Tensor, Tensor]:
    return rms_norm.forward(args.x, args.residual, args.weight, args.eps, args.weight_offset)


def add_rms_norm_backward(args: AddRmsNormBackward) -> tuple[Tensor, Tensor | None]:
    return rms_norm.backward(args.grad, args.grad_h, args.h, args.weight, args.rstd, args.eps, args.weight_offset)

"""Transpose of the last two dimensions, written out.

    y[..., j, i] = x[..., i, j]

No arithmetic is done, so the kernels know no dtypes: they move integers of 1, 2, 4 or 8 bytes (`layout.as_integers`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwise import layout
from headwise.ops import _checks
from headwise.ops._op import Described, Op, Saved


def transpose(x: Tensor, *, backend: str | None = None) -> Tensor:
    """``x`` (..., M, N) with its last two dimensions exchanged: (..., N, M), contiguous, always a copy.

    Any dtype of 1, 2, 4 or 8 bytes, any strides. Differentiable in ``x`` where its dtype is.

    >>> hw.transpose(torch.arange(6).reshape(2, 3))
    tensor([[0, 3],
            [1, 4],
            [2, 5]])
    """
    if isinstance(x, Tensor) and x.dtype.is_complex and x.is_conj():  # torch.compile does not trace is_conj
        x = x.resolve_conj()
    y: Tensor = _forward((x,), (), backend)
    return y


class Transpose(NamedTuple):
    x: Tensor


def _check(op: str, x: Tensor) -> Transpose:
    _checks.tensor(op, "x", x)
    _checks.at_least_dims(op, "x", x, 2)
    if x.dtype.itemsize not in layout.INTEGERS:
        raise TypeError(
            f"{op}: x has dtype {_checks.short(x.dtype)} of {x.dtype.itemsize} bytes; "
            "it needs a dtype of 1, 2, 4 or 8 bytes"
        )
    return Transpose(x)


def _describe(args: Transpose) -> Described:
    x = args.x
    sizes = {"M": x.shape[-2], "N": x.shape[-1], "bytes": x.dtype.itemsize}
    # Every backend computes in float32; what it has to judge here is the size of an element, not its dtype.
    return Described(x, sizes, dtype=torch.float32)


def _fake(args: Transpose) -> Tensor:
    x = args.x
    return x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2]))


def _differentiate(saved: Saved, grad: Tensor) -> tuple[Tensor]:
    return (saved.run(_forward, Transpose(grad)),)


_forward = Op(
    "transpose_forward", Transpose, public="transpose", check=_check, describe=_describe, fake=_fake,
    backward=_differentiate,
)  # fmt: skip

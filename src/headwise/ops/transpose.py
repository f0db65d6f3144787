"""Transpose of the last two dimensions, written out.

    y[..., j, i] = x[..., i, j]

No arithmetic is done, so the kernels know no dtypes: they move elements of 1, 2, 4 or 8 bytes, and are handed integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.backends import registry
from headwise.ops import _checks, _library

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def transpose(x: Tensor, *, backend: str | None = None) -> Tensor:
    """``x`` (..., M, N) with its last two dimensions exchanged: (..., N, M), contiguous, always a copy.

    Any dtype of 1, 2, 4 or 8 bytes, any strides. Differentiable in ``x`` where its dtype is.
    """
    return _forward(x, registry.choose(transpose_call(x), backend))


def transpose_call(x: Tensor) -> registry.Call:
    """Check the arguments of `transpose` and describe the call to the backends."""
    _checks.tensor("transpose", "x", x)
    _checks.at_least_dims("transpose", "x", x, 2)
    if x.dtype.itemsize not in _BITS:
        raise TypeError(
            f"transpose: x has dtype {_checks.short(x.dtype)} of {x.dtype.itemsize} bytes; "
            "it needs a dtype of 1, 2, 4 or 8 bytes"
        )
    # Every backend computes in float32; what it has to judge here is the size of an element, not its dtype.
    sizes = {"M": x.shape[-2], "N": x.shape[-1], "bytes": x.dtype.itemsize}
    return registry.Call("transpose", ("transpose_forward",), _checks.device_type(x), torch.float32, sizes)


def _run_forward(x: Tensor, backend: str) -> Tensor:
    bits = x.resolve_conj().resolve_neg().view(_BITS[x.dtype.itemsize])
    return registry.launcher(backend, "transpose_forward")(bits).view(x.dtype)


def _fake_forward(x: Tensor, backend: str) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2]))


def _save(ctx: Any, args: tuple[Any, ...], y: Tensor) -> None:
    ctx.backend = args[1]


def _differentiate(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
    return (None if grad is None else _forward(grad, ctx.backend)), None


_forward = _library.define(
    "transpose_forward",
    "(Tensor x, str backend) -> Tensor",
    run=_run_forward,
    fake=_fake_forward,
    save=_save,
    backward=_differentiate,
)

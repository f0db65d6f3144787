"""Checks that the attention ops share, and the flags they leave behind.

After these checks a call is: tensors of agreeing shapes, and `Flags`: how far left and right of its own position a query
looks, and the plain numbers. ``causal`` is gone: it is a band with right = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.ops import _checks

UNBOUNDED = -1
Window = tuple[int | None, int | None] | Sequence[int | None] | None


class Flags(NamedTuple):
    """The plain numbers of an attention call, as the kernels take them."""

    left: int  # keys from position p - left on; -1: unbounded
    right: int  # keys up to position p + right; -1: unbounded
    scale: float
    softcap: float  # 0.0: none
    deterministic: bool


def flags(
    op: str, q: Tensor, *, causal: bool, window: Window, scale: float | None, softcap: float | None,
    deterministic: bool | None,
) -> Flags:  # fmt: skip
    _checks.boolean(op, "causal", causal)
    left, right = _window(op, window)
    if causal:
        right = 0  # a window's right side is never negative, so "and j <= p" is all that is left of it
    if deterministic is None:
        deterministic = not q.is_cuda or torch.are_deterministic_algorithms_enabled()
    else:
        _checks.boolean(op, "deterministic", deterministic)
    return Flags(
        left,
        right,
        1.0 / math.sqrt(q.shape[-1]) if scale is None else _checks.positive(op, "scale", scale),
        0.0 if softcap is None else _checks.positive(op, "softcap", softcap),
        deterministic,
    )


def _window(op: str, window: Window) -> tuple[int, int]:
    if window is None:
        return UNBOUNDED, UNBOUNDED
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(
            f"{op}: window is {window!r}; it needs to be None or a pair (left, right), each a number of keys, "
            "or None or -1 for no bound"
        )
    sides = []
    for side, value in zip(("left", "right"), window, strict=True):
        if value is None:
            sides.append(UNBOUNDED)
            continue
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"{op}: window has {side}={value!r}; it needs to be a whole number, or None for no bound")
        if value < -1:
            raise ValueError(f"{op}: window has {side}={value}; it needs to be at least 0, or -1 for no bound")
        sides.append(value)  # type: ignore[arg-type]  # a SymInt while torch.compile traces
    return sides[0], sides[1]


def qkv(op: str, q: Any, k: Any, v: Any | None, count: int, letters: tuple[str, str, str]) -> None:
    """q, k and v (or only q and k): dtype, device, rank, head dims, grouped heads, last dim contiguous."""
    _operand(op, "q", q, q, count, letters[0])
    _operand(op, "k", k, q, count, letters[1])
    if v is not None:
        _operand(op, "v", v, q, count, letters[2])
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{op}: k has head dim {k.shape[-1]} and q has {q.shape[-1]}; they need to be equal")


def _operand(op: str, name: str, x: Any, q: Any, count: int, letters: str) -> None:
    _checks.floating(op, name, x)
    _checks.dims(op, name, x, count, letters)
    if x is not q:
        _checks.same_dtype(op, name, x, "q", q)
        _checks.same_device(op, name, x, "q", q)
    contiguous_last(op, name, x)


def grouped_heads(op: str, q_heads: int, k_heads: int) -> None:
    if k_heads == 0 or q_heads % k_heads != 0:
        raise ValueError(
            f"{op}: q has {q_heads} heads and k has {k_heads}; the heads of q need to be a multiple of those of k"
        )


def contiguous_last(op: str, name: str, x: Tensor) -> None:
    """The head dim: at least one element, next to each other."""
    length, stride = x.shape[-1], x.stride()[-1]
    if stride != 1 and length > 1:
        raise ValueError(
            f"{op}: {name} has stride {stride} in its last dim; it needs stride 1 there: call .contiguous()"
        )
    if length == 0:
        raise ValueError(f"{op}: {name} has shape {_checks.shape_of(x)}; its head dim needs to be at least 1")


def broadcastable(
    op: str, name: str, x: Any, wanted: tuple[int, int, int, int], q: Tensor, *, boolean: bool
) -> Tensor | None:
    """mask or bias as a 4-D view whose dims are 1 or those of ``(B, Hq, Sq, Sk)``; nothing is expanded."""
    if x is None:
        return None
    _checks.tensor(op, name, x)
    if boolean and x.dtype != torch.bool:
        raise TypeError(
            f"{op}: {name} has dtype {_checks.short(x.dtype)}; it needs to be bool (True = may attend); "
            "a float mask that is added belongs in bias"
        )
    if not boolean and x.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"{op}: {name} has dtype {_checks.short(x.dtype)}; it needs {_own_or_float32(q)}")
    _checks.same_device(op, name, x, "q", q)
    fits = x.dim() <= 4 and all(
        size == 1 or size == full for size, full in zip(reversed(x.shape), reversed(wanted), strict=False)
    )
    if not fits:
        text = ", ".join(str(s) for s in wanted)
        raise ValueError(
            f"{op}: {name} has shape {_checks.shape_of(x)}; it needs to broadcast to ({text}) = (B, Hq, Sq, Sk)"
        )
    return four_dims(x)


def four_dims(x: Tensor | None) -> Tensor | None:
    """mask or bias with its leading dims, of size 1, written out."""
    return x if x is None or x.dim() == 4 else x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def _own_or_float32(q: Tensor) -> str:
    return "float32" if q.dtype == torch.float32 else f"{_checks.short(q.dtype)} (that of q) or float32"


def per_head(op: str, sink: Any, q: Tensor, heads: int) -> None:
    if sink is None:
        return
    _checks.tensor(op, "sink", sink)
    if sink.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"{op}: sink has dtype {_checks.short(sink.dtype)}; it needs {_own_or_float32(q)}")
    _checks.shape(op, "sink", sink, (heads,), "(Hq,)")
    _checks.same_device(op, "sink", sink, "q", q)


def per_batch(op: str, name: str, lengths: Any, q: Tensor, batch: int) -> None:
    _checks.integer(op, name, lengths)
    _checks.shape(op, name, lengths, (batch,), "(B,)")
    _checks.same_device(op, name, lengths, "q", q)


def saved_results(
    op: str, grad_out: Any, grad_lse: Any | None, out: Any, lse: Any, q: Tensor,
    out_shape: tuple[int, ...], lse_shape: tuple[int, ...], letters: tuple[str, str],
) -> None:  # fmt: skip
    """What an explicit backward takes beyond the inputs of the forward."""
    for name, x in (("grad_out", grad_out), ("out", out)):
        _checks.floating(op, name, x)
        _checks.shape(op, name, x, out_shape, letters[0])
        _checks.same_dtype(op, name, x, "q", q)
        _checks.same_device(op, name, x, "q", q)
    statistics: list[tuple[str, Any]] = [("lse", lse)]
    if grad_lse is not None:
        statistics.append(("grad_lse", grad_lse))
    for name, x in statistics:
        _checks.floating(op, name, x)
        _checks.shape(op, name, x, lse_shape, letters[1])
        wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
        if x.dtype != wanted:
            raise TypeError(f"{op}: {name} has dtype {_checks.short(x.dtype)}; it needs {_checks.short(wanted)}")
        _checks.same_device(op, name, x, "q", q)


def needed_gradients(op: str, bias_grad: Any, bias: Any, sink_grad: Any, sink: Any) -> None:
    """A gradient that an explicit backward is asked for needs the argument it belongs to."""
    for of, needed, x in (("bias", bias_grad, bias), ("sink", sink_grad, sink)):
        _checks.boolean(op, f"need_{of}_grad", needed)
        if needed and x is None:
            raise ValueError(f"{op}: need_{of}_grad is True and {of} is None; it needs the {of} of the forward call")


def features(flags: Flags, **present: Any) -> tuple[str, ...]:
    """The names of what a call uses beyond plain full attention."""
    names = [name for name, value in present.items() if value is not None and value is not False]
    if flags.right == 0:
        names.append("causal")
    if flags.left != UNBOUNDED or flags.right > 0:
        names.append("window")
    if flags.softcap:
        names.append("softcap")
    return tuple(names)

"""What the attention ops are given, checked: the arguments objects, and the checks that they share.

After the checks a call is tensors of agreeing shapes and `Flags`: how far left and right of its own position a query looks,
and the plain numbers. ``causal`` is gone: it is a window with right = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from headwise import layout
from headwise.ops import _checks

UNBOUNDED = -1
Window = tuple[int | None, int | None] | Sequence[int | None] | None


class CommonOptions(TypedDict, total=False):
    """Keywords that every attention op has, for the overloads of those that may return the lse."""

    window: Window
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    backend: str | None


class DropoutOptions(TypedDict, total=False):
    """Keywords of those that may drop probabilities.

    The default of ``dropout`` is written 0 and not 0.0: with ``dynamic=True``, torch.compile would take a float for an
    input, find that it is a constant, and compile everything twice.
    """

    dropout: float
    dropout_seed: int | Tensor | None


class Flags(NamedTuple):
    """The plain numbers of an attention call, as the kernels take them."""

    left: int  # keys from position p - left on; -1: unbounded
    right: int  # keys up to position p + right; -1: unbounded
    scale: float
    softcap: float  # 0.0: none
    deterministic: bool
    dropout: float = 0.0  # 0.0: none
    unrounded: bool = False  # out, or dq, dk and dv, stay in the dtype of the sums: the caller adds more to them

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of out and of the gradients of q, k and v, which have this dtype."""
        return layout.statistics_dtype(dtype) if self.unrounded else dtype

    @property
    def dropped_below(self) -> int:
        """A probability is dropped if its 16 random bits are below this number (docs/contract.md)."""
        return min(round(self.dropout * 65536), 65535)

    @property
    def kept_scale(self) -> float:
        """What kept probabilities are multiplied with."""
        return 1.0 / (1.0 - self.dropout)


class Packing(NamedTuple):
    """Where the sequences of a packed batch begin and end."""

    cu_q: Tensor  # (sequences + 1,)
    cu_k: Tensor
    max_q: int  # the longest sequence, or more
    max_k: int


class Attention(NamedTuple):
    """Dense: q (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv). Packed: (Tq, Hq, D), (Tk, Hk, D), (Tk, Hk, Dv)."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # as given: `layout.four_dims` writes leading dims out
    bias: Tensor | None
    sink: Tensor | None
    kv_lengths: Tensor | None
    q_lengths: Tensor | None
    kv_starts: Tensor | None
    packing: Packing | None
    flags: Flags
    with_lse: bool = True
    dropout_seed: Tensor | None = None  # int64, beside q; there if flags.dropout is. See `SEED_NUMBERS`

    def packed(self, q: Tensor, k: Tensor, v: Tensor, *packing: Any) -> Attention:
        """The same of a packed batch, given the fields of its `Packing`."""
        return self._replace(q=q, k=k, v=v, q_lengths=None, kv_lengths=None, kv_starts=None, packing=Packing(*packing))


class AttentionBackward(NamedTuple):
    grad_out: Tensor
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    forward: Attention
    need_bias: bool
    need_sink: bool


class Decode(NamedTuple):
    """q (B, Hq, D) or (B, Hq, Sq, D); caches (B, Hk, C, D) and (B, Hk, C, Dv), or in pages of (pages, Hk, page_size, D)."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    kv_starts: Tensor | None
    block_table: Tensor | None
    sink: Tensor | None
    flags: Flags
    num_splits: int  # 0: chosen from the shapes
    values_in_keys: bool = False  # v_cache is k_cache[..., :Dv], the same memory
    with_lse: bool = True


class Probs(NamedTuple):
    q: Tensor
    k: Tensor
    rows: Tensor | None
    mask: Tensor | None
    bias: Tensor | None
    sink: Tensor | None
    kv_lengths: Tensor | None
    q_lengths: Tensor | None
    kv_starts: Tensor | None
    flags: Flags
    dropout_seed: Tensor | None = None


class ProbsBackward(NamedTuple):
    grad: Tensor
    probs: Tensor
    forward: Probs
    need_bias: bool
    need_sink: bool


def flags(
    op: str, q: Tensor, causal: bool, window: Window, scale: float | None, softcap: float | None,
    deterministic: bool = True, dropout: float = 0, unrounded: bool = False,
) -> Flags:  # fmt: skip
    _checks.boolean(op, "causal", causal)
    _checks.boolean(op, "deterministic", deterministic)
    left, right = _window(op, window)
    if causal:
        right = 0  # a window's right side is never negative, so "and j <= p" is all that is left of it
    return Flags(
        left,
        right,
        1.0 / math.sqrt(q.shape[-1]) if scale is None else _checks.positive(op, "scale", scale),
        0.0 if softcap is None else _checks.positive(op, "softcap", softcap),
        deterministic or torch.are_deterministic_algorithms_enabled(),
        _dropout_rate(op, dropout),
        unrounded,
    )


def _dropout_rate(op: str, dropout: Any) -> float:
    rate = _checks.number(op, "dropout", dropout)
    if not 0 <= rate < 1:
        raise ValueError(f"{op}: dropout is {dropout!r}; it needs to be at least 0 and below 1")
    return rate


# A call that is a part of a larger one drops what that drops: behind the seed there may be where its first batch entry and
# head lie, and where its first query and key do; a sixth number says that both are multiples of 16, where kernels may share
# counters. Kernels without these are compiled as if there were none. Not public.
SEED_NUMBERS = (1, 3, 5, 6)


def seed_beside(op: str, q: Any, dropout: Any, seed: Any) -> Any:
    """The seed of a call with dropout as a tensor beside q, drawn from PyTorch's generator of q's device if there is none.

    Nothing here waits for a GPU: the one launch that a draw or a constant takes is ordered like any other, and a CUDA graph
    captures it. A tensor, so that a new seed is data to all caches and compilers.
    """
    _dropout_rate(op, dropout)  # a call that will be refused draws nothing
    if isinstance(seed, Tensor) and seed.numel() in SEED_NUMBERS[1:]:
        raise ValueError(f"{op}: dropout_seed has shape {_checks.shape_of(seed)}; it needs one element")
    if isinstance(seed, Tensor) or not isinstance(q, Tensor):
        return seed
    on_webgpu = hasattr(q, "headwise_device")
    device = "cpu" if on_webgpu and q.is_meta else q.device  # a GPU that PyTorch does not know takes it from the CPU
    if seed is None:
        most = 2**32 - 1 if on_webgpu else 2**63 - 1  # WebGPU draws 32 bits at once
        return torch.randint(0, most, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        raise TypeError(f"{op}: dropout_seed is {seed!r}; it needs to be a whole number or a one-element int64 tensor")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{op}: dropout_seed is {seed}; it needs to fit 64 bits: at least -2**63 and below 2**63")
    return torch.full((1,), seed, dtype=torch.int64, device=device)  # type: ignore[arg-type]  # a SymInt while tracing


def given_seed(op: str, q: Any, dropout: Any, seed: Any) -> Any:
    """`seed_beside` for an explicit backward, which has to drop what the forward dropped."""
    if seed is None:
        raise ValueError(
            f"{op}: dropout is {dropout!r} and dropout_seed is None; it needs the seed of the forward call"
        )
    return seed_beside(op, q, dropout, seed)


def check_seed(op: str, seed: Any, q: Tensor) -> None:
    if seed is None:
        return
    _checks.tensor(op, "dropout_seed", seed)
    _checks.dtype(op, "dropout_seed", seed, torch.int64)
    if seed.numel() not in SEED_NUMBERS:
        raise ValueError(f"{op}: dropout_seed has shape {_checks.shape_of(seed)}; it needs one element")
    if not hasattr(q, "headwise_device"):
        _checks.same_device(op, "dropout_seed", seed, "q", q)


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
    """q, k and v (or only q and k): dtype, device, rank, head dims, last dim contiguous."""
    operand(op, "q", q, q, count, letters[0])
    operand(op, "k", k, q, count, letters[1])
    if v is not None:
        operand(op, "v", v, q, count, letters[2])
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{op}: k has head dim {k.shape[-1]} and q has {q.shape[-1]}; they need to be equal")


def operand(op: str, name: str, x: Any, q: Any, count: int, letters: str) -> None:
    _checks.floating(op, name, x)
    _checks.dims(op, name, x, count, letters)
    if x is not q:
        if x.dtype != q.dtype:
            raise TypeError(
                f"{op}: {name} has dtype {_checks.short(x.dtype)} and q has {_checks.short(q.dtype)}; they need to be of "
                f"one dtype: cast one of them, say q.to({name}.dtype) (under torch.autocast the op does it)"
            )
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


def optional_inputs(
    op: str, q: Tensor, k: Tensor, mask: Any, bias: Any, sink: Any, kv_lengths: Any, q_lengths: Any, kv_starts: Any
) -> None:
    """What dense q ``(B, Hq, Sq, D)`` and k may come with."""
    batch, heads, length, _ = q.shape
    scores = (batch, heads, length, k.shape[2])
    per_score(op, "mask", mask, scores, q)
    per_score(op, "bias", bias, scores, q)
    per_head(op, sink, q, heads)
    for name, lengths in (("kv_lengths", kv_lengths), ("q_lengths", q_lengths), ("kv_starts", kv_starts)):
        per_batch(op, name, lengths, q, batch)


def per_score(op: str, name: str, x: Any, scores: tuple[int, int, int, int], q: Tensor) -> None:
    """A mask or a bias: its dims are 1 or those of ``(B, Hq, Sq, Sk)``."""
    if x is None:
        return
    _checks.tensor(op, name, x)
    if name == "mask" and x.dtype != torch.bool:
        raise TypeError(
            f"{op}: mask has dtype {_checks.short(x.dtype)}; it needs to be bool (True = may attend); "
            "a float mask that is added belongs in bias"
        )
    if name == "bias":
        _checks.own_or_float32(op, name, x, "q", q)
    _checks.same_device(op, name, x, "q", q)
    fits = x.dim() <= 4 and all(
        size == 1 or size == full for size, full in zip(reversed(x.shape), reversed(scores), strict=False)
    )
    if not fits:
        hint = ""
        if tuple(x.shape) == (scores[0], scores[3]):
            hint = f"; a (B, Sk) {name} is {name}[:, None, None, :]"
        elif tuple(x.shape) == (scores[0], scores[2], scores[3]):
            hint = f"; a (B, Sq, Sk) {name} is {name}[:, None]"
        raise ValueError(
            f"{op}: {name} has shape {_checks.shape_of(x)}; it needs to broadcast to {_checks.tuple_text(scores)} = "
            f"(B, Hq, Sq, Sk){hint}"
        )


def per_head(op: str, sink: Any, q: Tensor, heads: int) -> None:
    if sink is None:
        return
    _checks.tensor(op, "sink", sink)
    _checks.own_or_float32(op, "sink", sink, "q", q)
    _checks.shape(op, "sink", sink, (heads,), "(Hq,)")
    _checks.same_device(op, "sink", sink, "q", q)


def per_batch(op: str, name: str, lengths: Any, q: Tensor, batch: int) -> None:
    if lengths is None:
        return
    _checks.integer(op, name, lengths)
    _checks.shape(op, name, lengths, (batch,), "(B,)")
    _checks.same_device(op, name, lengths, "q", q)


def saved_results(
    op: str, grad_out: Any, grad_lse: Any | None, out: Any, lse: Any, q: Tensor, out_shape: tuple[int, ...],
    lse_shape: tuple[int, ...], letters: tuple[str, str],
) -> None:  # fmt: skip
    """What an explicit backward takes beyond the inputs of the forward."""
    for name, x in (("grad_out", grad_out), ("out", out)):
        _checks.floating(op, name, x)
        _checks.shape(op, name, x, out_shape, letters[0])
        _checks.same_dtype(op, name, x, "q", q)
        _checks.same_device(op, name, x, "q", q)
    statistics: dict[str, Any] = {"lse": lse}
    if grad_lse is not None:
        statistics["grad_lse"] = grad_lse
    for name, x in statistics.items():
        _checks.floating(op, name, x)
        _checks.shape(op, name, x, lse_shape, letters[1])
        _checks.dtype(op, name, x, layout.statistics_dtype(q.dtype))
        _checks.same_device(op, name, x, "q", q)


def needed_gradients(op: str, bias_grad: Any, bias: Any, sink_grad: Any, sink: Any) -> None:
    """A gradient that an explicit backward is asked for needs the argument it belongs to."""
    for of, needed, x in (("bias", bias_grad, bias), ("sink", sink_grad, sink)):
        _checks.boolean(op, f"need_{of}_grad", needed)
        if needed and x is None:
            raise ValueError(f"{op}: need_{of}_grad is True and {of} is None; it needs the {of} of the forward call")


def gradients_asked_for(
    grads: Sequence[Any], bias: Tensor | None, need_bias: bool, need_sink: bool
) -> tuple[Tensor, ...]:
    """What an explicit backward returns: the gradients of q, k (and v), then of bias and sink if asked for."""
    *wanted, dbias, dsink = grads
    if need_bias and bias is not None:
        wanted.append(dbias)
    if need_sink:
        wanted.append(dsink)
    return tuple(wanted)


OPTIONAL_INPUTS = ("mask", "bias", "sink", "kv_lengths", "q_lengths", "kv_starts")


def features(args: Any) -> tuple[str, ...]:
    """The names of what a call uses beyond plain full attention."""
    flags: Flags = args.flags
    names = [name for name in OPTIONAL_INPUTS if getattr(args, name, None) is not None]
    if flags.right == 0:
        names.append("causal")
    if flags.left != UNBOUNDED or flags.right > 0:
        names.append("window")
    if flags.softcap:
        names.append("softcap")
    if flags.dropout:
        names.append("dropout")
    if flags.unrounded:
        names.append("unrounded")
    return tuple(names)

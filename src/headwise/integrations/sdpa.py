"""PyTorch's ``F.scaled_dot_product_attention``, served by Headwise.

    with headwise.integrations.sdpa.override():
        model(x)

or ``enable()`` and ``disable()`` for the whole program. Whoever calls the function through its module
(``torch.nn.functional``), `torch.nn.MultiheadAttention` included, gets ours; a name imported earlier (``from … import``)
stays PyTorch's. The function means what PyTorch documents: causal masks start at the top left corner.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from headwise.backends.registry import use_backend
from headwise.integrations._alignment import UNBOUNDED, aligned
from headwise.integrations._edges import with_positive_scale
from headwise.integrations._strides import with_contiguous_rows
from headwise.ops import _checks
from headwise.ops.attention import attention

__all__ = ["disable", "enable", "override", "register_flash_attention_impl", "scaled_dot_product_attention"]

PYTORCHS = torch._C._nn.scaled_dot_product_attention
_NAME = "scaled_dot_product_attention"
_lock = threading.Lock()
_overrides: list[Callable[..., Tensor]] = []  # blocks that are open, in the order in which they were entered
_enabled: Callable[..., Tensor] | None = None
_before: Any = None  # what was in place of ours; None: ours is not in place


@contextmanager
def override(*, backend: str | None = None, fallback: bool = False) -> Iterator[None]:
    """Within the block, ``F.scaled_dot_product_attention`` is ours, in every thread.

    backend   which backend of Headwise runs the calls; None: that of the tensors' device
    fallback  hand calls that we refuse to PyTorch's own function; False raises with our reason
    """
    serving = _serving(backend, fallback)
    with _lock:
        _overrides.append(serving)
        _put_in_place()
    try:
        yield
    finally:
        with _lock:
            _overrides.remove(serving)
            _put_in_place()


def enable(*, backend: str | None = None, fallback: bool = False) -> None:
    """From now on ``F.scaled_dot_product_attention`` is ours; arguments as in `override`, which goes before it."""
    global _enabled
    with _lock:
        _enabled = _serving(backend, fallback)
        _put_in_place()


def disable() -> None:
    """Undo `enable`."""
    global _enabled
    with _lock:
        _enabled = None
        _put_in_place()


def _put_in_place() -> None:
    """The newest override, else what is enabled, else what was there before all of them."""
    global _before
    ours = _overrides[-1] if _overrides else _enabled
    if ours is None:
        if _before is not None:
            F.scaled_dot_product_attention, _before = _before, None
        return
    if _before is None:
        _before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = ours


def register_flash_attention_impl() -> None:
    """Offer Headwise to ``torch.nn.attention.activate_flash_attention_impl("headwise")``: another way, on CUDA.

    That one replaces the kernels behind the calls that PyTorch sends to flash attention (16 bits, no mask) and no
    function; ``restore_flash_attention_impl`` undoes it. Once per process.
    """
    from headwise.integrations import _sdpa_registry

    _sdpa_registry.register()


def _serving(backend: str | None, fallback: bool) -> Callable[..., Tensor]:
    """What takes the place of PyTorch's function."""
    with use_backend(backend):  # an unknown name is refused here, not at the first call
        pass

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        tensors = (query, key, value, attn_mask)
        given_mask: Any = attn_mask
        bottom_right = False
        if has_torch_function(tensors):
            if _is_causal_bias(attn_mask):
                # Its own handler knows PyTorch's function alone, and its memory holds nothing.
                bottom_right = _is_bottom_right(attn_mask, is_causal, query, key)
                attn_mask, is_causal = None, True
                if has_torch_function(tensors[:3]):
                    attn_mask, is_causal, bottom_right = given_mask._materialize(query.device), False, False
                tensors = (query, key, value, attn_mask)
            if has_torch_function(tensors) and not query.is_nested:  # subclasses have a say of their own
                return handle_torch_function(
                    scaled_dot_product_attention, tensors, *tensors, dropout_p=dropout_p, is_causal=is_causal,
                    scale=scale, enable_gqa=enable_gqa,
                )  # fmt: skip
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, bottom_right, backend)
        if not fallback:
            return _attend(*arguments)
        try:
            return _attend(*arguments)
        except (NotImplementedError, TypeError, ValueError):
            if bottom_right:  # PyTorch's is_causal begins at the top left
                attn_mask, is_causal = given_mask._materialize(query.device), False
            return PYTORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return scaled_dot_product_attention


def attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """What ``F.scaled_dot_product_attention`` means, by Headwise's attention, or an error where that does not take it."""
    return _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, False, None)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool, bottom_right: bool, backend: str | None,
) -> Tensor:  # fmt: skip
    if q.is_nested or k.is_nested or v.is_nested:
        raise NotImplementedError(
            f"{_NAME}: nested tensors are not supported: headwise.attention_varlen takes x.values() and x.offsets()"
        )
    q, k, v = with_contiguous_rows(q, k, v)
    lead = None  # the dims before (L, E), where they are not (B, H)
    if not q.dim() == k.dim() == v.dim() == 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        q, k, v, attn_mask, lead = _batch_and_heads(q, k, v, attn_mask)
    if q.shape[1] == 0 and k.shape[1] <= 1 and v.shape[1] <= 1:
        out = q @ k.transpose(2, 3) @ v  # without heads there is nothing to compute
        return out if lead is None else out.reshape(*lead, *out.shape[-2:])
    if q.shape[1] != k.shape[1] or k.shape[1] != v.shape[1]:
        q, k, v = _heads(q, k, v, enable_gqa)
    columns = v.shape[3]
    if not q.shape[3] or not columns:
        q, k, v, scale = _with_a_column(q, k, v, scale)

    window = None
    if is_causal:
        queries, keys = q.shape[2], k.shape[2]
        if queries != keys and not bottom_right:
            is_causal = False
            given, window = aligned(queries, keys, 0, UNBOUNDED, 0)
            if given < keys:
                k, v = k[:, :, :given], v[:, :, :given]
                if attn_mask is not None and attn_mask.shape[-1] == keys:
                    attn_mask = attn_mask[..., :given]
    mask, bias = _mask_or_bias(attn_mask)
    q, scale = with_positive_scale(f"{_NAME}: scale", q, scale)
    options: Any = {"dropout": dropout_p} if 0.0 < dropout_p < 1.0 else {}
    out = attention(
        q, k, v, causal=is_causal, window=window, mask=mask, bias=bias, scale=scale, backend=backend, **options
    )
    if not options and dropout_p != 0.0:
        out = out * _kept(dropout_p)
    if not columns:
        out = out[..., :0]
    return out if lead is None else out.reshape(*lead, *out.shape[-2:])


def _kept(dropout_p: float) -> float:
    """What is left of a result by a dropout that our op does not take."""
    if dropout_p != 1.0:
        raise ValueError(f"{_NAME}: dropout_p is {dropout_p}; it needs to be from 0 to 1")
    return 0.0


def _with_a_column(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Head dims of 0 as 1: q and k get a column of zeros, which leaves the scores 0, and so may v."""
    if not q.shape[3] and not k.shape[3]:
        q, k, scale = F.pad(q, (0, 1)), F.pad(k, (0, 1)), 1.0
    return q, k, v if v.shape[3] else F.pad(v, (0, 1)), scale


def _is_causal_bias(attn_mask: Any) -> bool:
    from torch.nn.attention.bias import CausalBias

    return isinstance(attn_mask, CausalBias)


def _is_bottom_right(causal_bias: Any, is_causal: bool, query: Tensor, key: Tensor) -> bool:
    """Is a `CausalBias` of the alignment that is ours?"""
    from torch.nn.attention.bias import CausalVariant

    if is_causal:
        raise ValueError(f"{_NAME}: is_causal is True and attn_mask a CausalBias; it takes one of them")
    sizes = (causal_bias.seq_len_q, causal_bias.seq_len_kv)
    if sizes != (query.shape[-2], key.shape[-2]):
        raise ValueError(f"{_NAME}: attn_mask is a CausalBias of {sizes}; it needs {(query.shape[-2], key.shape[-2])}")
    return causal_bias.variant == CausalVariant.LOWER_RIGHT


def _mask_or_bias(attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if attn_mask is None:
        return None, None
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    if not attn_mask.is_floating_point():
        raise TypeError(
            f"{_NAME}: attn_mask has dtype {_checks.short(attn_mask.dtype)}; it needs bool, or float to be added"
        )
    return None, attn_mask


def _heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, S, D) with heads that broadcast, or with groups of query heads."""
    heads = [x.shape[1] for x in (q, k, v)]
    most = max(heads)
    if heads[0] == 1:  # one query head, many key heads
        q = q.expand(-1, most, -1, -1)
    if heads[1] != heads[2]:
        if 1 not in heads[1:]:
            raise NotImplementedError(
                f"{_NAME}: key has {heads[1]} heads and value {heads[2]}; Headwise needs as many of both: "
                "value.repeat_interleave(…, dim=-3) makes them so"
            )
        k, v = (x.expand(-1, max(heads[1:]), -1, -1) for x in (k, v))
    if q.shape[1] != k.shape[1] != 1 and not enable_gqa:
        raise ValueError(
            f"{_NAME}: query has {heads[0]} heads and key {k.shape[1]}; they need to be equal, or enable_gqa=True"
        )
    return q, k, v


def _batch_and_heads(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """Any dims before (L, E), as (B, H): they broadcast; the last of them are the heads."""
    if min(x.dim() for x in (q, k, v)) < 2:
        raise ValueError(f"{_NAME}: query has {q.dim()}, key {k.dim()}, value {v.dim()} dims; they need at least 2")
    rank = max(4, q.dim(), k.dim(), v.dim())
    wanted = max(q.dim(), k.dim(), v.dim()) - 2  # how many dims the result has before (L, Ev)
    q, k, v = (x.reshape((1,) * (rank - x.dim()) + tuple(x.shape)) for x in (q, k, v))
    outer = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (x.expand(*outer, *x.shape[-3:]) for x in (q, k, v))
    lead = (*outer, max(x.shape[-3] for x in (q, k, v)))[rank - 2 - wanted :]
    if rank == 4:
        return q, k, v, attn_mask, lead

    split, flat = len(outer), attn_mask  # the dims from there on count as heads
    if attn_mask is not None:
        dims = (1,) * (rank - attn_mask.dim()) + tuple(attn_mask.shape)
        split = _split(dims[:-2], (*outer, lead[-1]))
        flat = attn_mask.reshape(math.prod(dims[:split]), math.prod(dims[split:-2]), *dims[-2:])
    batch, inner = math.prod(outer[:split]), math.prod(outer[split:])
    q, k, v = (x.reshape(batch, inner * x.shape[-3], *x.shape[-2:]) for x in (q, k, v))
    return q, k, v, flat, lead


def _split(mask: tuple[int, ...], full: tuple[int, ...]) -> int:
    """Where to cut the leading dims in two groups, in each of which the mask is either broadcast or full."""
    for at in range(len(full) - 1, 0, -1):
        groups = ((mask[:at], full[:at]), (mask[at:], full[at:]))
        if all(group == whole or math.prod(group) == 1 for group, whole in groups):
            return at
    raise NotImplementedError(
        f"{_NAME}: attn_mask broadcasts over {mask} of the leading dims {full}; Headwise takes masks that are full or "
        "broadcast over each of two neighbouring groups of them: attn_mask.expand(…) makes it full"
    )


scaled_dot_product_attention = _serving(None, False)

"""Hugging Face Transformers: ``attn_implementation="headwise"``.

>>> import headwise.integrations.transformers as headwise_transformers
>>> headwise_transformers.register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="headwise")

Two functions go under that name: the attention itself, and the one that makes its masks. Transformers looks for both; with
the first alone it makes no mask at all, and padding would be attended to. docs/transformers.md says how each argument is
bridged.

>>> headwise_transformers.patch(model)

swaps norms, gated MLPs and the loss of a loaded model for our ops; ``unpatch`` undoes it, ``explain`` says what and why not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from headwise.integrations import _mask_rules
from headwise.integrations._compact_mask import BuiltMask, CompactMask, offsets_of
from headwise.integrations._patch import explain, patch, unpatch
from headwise.integrations._strides import with_contiguous_rows
from headwise.ops.attention import attention, attention_decode, attention_varlen

if TYPE_CHECKING:
    from headwise.distributed.models import ContextParallel

__all__ = ["NAME", "attention_forward", "context_parallel", "explain", "make_mask", "patch", "register", "unpatch"]

NAME = "headwise"
# New tokens over a cache, up to this many, take the kernels that split the keys.
DECODE_QUERIES = 16

# What Transformers may hand to an attention function, and this one has nothing for.
_UNSUPPORTED = {
    "indices": "the keys that a sparse indexer chose; load the model with attn_implementation='eager' or 'sdpa'",
    "block_indices": "the blocks that a sparse indexer chose; load the model with attn_implementation='eager' or 'sdpa'",
    "head_mask": "leave it out, or load the model with attn_implementation='eager'",
    "output_attentions": "load the model with attn_implementation='eager', or call headwise.attention_probs",
    "cache": "continuous batching keeps it in pages; use 'sdpa' under headwise.integrations.sdpa.override(), or "
    "'flash_attention_2' after headwise.integrations.flash_attn.install()",
}


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` known to Transformers: the attention and its masks. Idempotent."""
    if name.startswith("paged"):
        raise ValueError(
            f"register: name is {name!r}; continuous batching takes no implementation that is registered: choose 'sdpa' and "
            "run it under headwise.integrations.sdpa.override(), or 'flash_attention_2' after flash_attn.install()"
        )
    # Models ask for behaviour that is not ours by looking for these in the name.
    for taken in ("flash", "sdpa", "flex", "eager", "paged"):
        if taken in name:
            raise ValueError(
                f"register: name is {name!r}; it needs to be without {taken!r}, by which Transformers knows an "
                "implementation of its own"
            )
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)


def context_parallel(
    model: Any, mesh: Any, *, method: str = "auto", layout: str = "zigzag", averaged: bool = False
) -> ContextParallel:
    """A causal language model of Transformers over the ranks of a process group or of a DeviceMesh of one dimension.

    Every rank calls the model with the whole batch: input_ids, labels, a ``(B, S)`` attention_mask, position_ids that may
    start anew for packed documents (then no token sees past its document's start, also in models that do not read that in
    position_ids by themselves). The loss is that of the whole batch, the same on every rank; the logits are those of this
    rank's tokens. The gradients of the weights are each rank's part: `headwise.distributed.sum_gradients` makes them whole,
    or ``averaged=True`` where DDP or FSDP average them over the same ranks. ``remove()`` of the result undoes it.
    """
    from headwise.integrations import _context_parallel

    return _context_parallel.context_parallel(model, mesh, method=method, layout=layout, averaged=averaged)


def make_mask(
    batch_size: int, kv_length: int, q_length: int | None = None, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Any = None, attention_mask: Tensor | None = None, cache_position: Tensor | None = None,
    allow_is_causal_skip: bool = True, device: Any = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The mask of one forward pass, for all layers of a kind: a `CompactMask` where our flags can say it, else bools.

    q_length, q_offset  the queries of this call and the absolute position of the first one; an offset on the device comes
                        from a static cache. Older releases give the positions themselves, as ``cache_position``
    kv_length           keys that attention will see, the first at absolute position kv_offset
    mask_function       ``f(b, h, q, k)`` over absolute positions, see `_mask_rules`; None is causal
    attention_mask      ``(B, positions)`` bool, True for tokens and False for padding
    """
    from transformers import masking_utils

    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"headwise attention: attention_mask has shape {tuple(attention_mask.shape)}; a model needs (B, S), 1 for "
            "tokens and 0 for padding, or (B, 1, Sq, Sk): mask[:, None]"
        )
    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    rule = _mask_rules.read(mask_function)
    if cache_position is not None:
        place: dict[str, Any] = {"cache_position": cache_position}
        queries, device = cache_position.shape[0], cache_position.device
        packed = rule is not None and rule.sequences is not None
        # Without a static cache (its sign: no skipping) the last query is the last key.
        first = kv_length + kv_offset - queries if allow_is_causal_skip or packed else cache_position[0]
    else:
        assert q_length is not None
        place = {"q_length": q_length, "q_offset": q_offset, "device": device}
        queries, first = q_length, q_offset
    compact = None
    if rule is not None:
        compact = _compact(rule, batch_size, queries, first, kv_length, kv_offset, attention_mask, device)
    if compact is not None:
        return compact
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = masking_utils.sdpa_mask(
        batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, **place, **options,
    )  # fmt: skip
    assert mask is not None
    return mask.as_subclass(BuiltMask)


def _compact(
    rule: _mask_rules.Rule, batch: int, queries: int, first: int | Tensor, kv_length: int, kv_offset: int,
    attention_mask: Tensor | None, device: Any,
) -> CompactMask | None:  # fmt: skip
    """The mask of a rule for queries from absolute position ``first`` on, or None if our flags cannot say it."""
    left, right = None if rule.low is None else -rule.low, rule.high
    if (left is not None and left < 0) or (right is not None and right < 0):
        return None
    positions_matter = left is not None or right is not None
    keys, kv_lengths = kv_length, None
    if positions_matter:
        # The keys up to the last query's: those behind are the free end of a static cache.
        end = first + queries - kv_offset
        if isinstance(end, Tensor):
            if right != 0:
                return None  # kv_lengths would cut off keys that a query may see on its right
            kv_lengths = end.reshape(1).repeat(batch)
        elif end != kv_length and (right != 0 or end > kv_length or end < 0):
            return None
        elif right == 0 and queries <= DECODE_QUERIES and queries < kv_length:
            # Decoding: the lengths for all layers, and under torch.compile one graph for every fill of a static cache.
            kv_lengths = torch.full((batch,), end, device=device)
        else:
            keys = end
    padding = None
    if attention_mask is not None:
        padding = _padding(attention_mask, kv_length, kv_offset)[:, None, None, :]
    if rule.sequences is not None and (
        padding is not None or kv_lengths is not None or keys != kv_length or queries != keys
        or tuple(rule.sequences.shape) != (batch, queries)
    ):  # fmt: skip
        return None
    mask = CompactMask.of(
        (batch, 1, queries, kv_length), device, (left, right), keys, kv_lengths, padding, rule.sequences
    )
    if rule.sequences is not None and torch.compiler.is_compiling():
        mask.packed = offsets_of(rule.sequences, None)  # once for all layers of the graph
    return mask


def _padding(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """(B, Sk) bool: the part of a 2-D attention mask that speaks of the keys. Keys that it does not reach are not there."""
    missing = kv_length + kv_offset - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)


class _Visible(NamedTuple):
    """What a call's mask comes to, in the words of `headwise.attention`."""

    window: tuple[int | None, int | None]
    keys: int
    kv_lengths: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    is_causal: bool | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None, max_length_k: int | Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as Transformers calls it: q ``(B, Hq, Sq, D)``, k and v ``(B, Hk, Sk, D)``; out ``(B, Sq, Hq, Dv)``.

    A mask, where there is one, says all about who sees whom: ``sliding_window`` and ``is_causal`` are then said already.
    """
    for name, way in _UNSUPPORTED.items():
        if others.get(name) is not None and others[name] is not False:
            raise NotImplementedError(f"headwise attention: {name} is not supported: {way}")
    if isinstance(scaling, Tensor):
        raise NotImplementedError(
            "headwise attention: scaling is a tensor; it needs to be a number: multiply the queries by it, with scaling=1.0"
        )
    query, key, value = with_contiguous_rows(query, key, value)  # Inkling's keys come from a convolution
    sink = None if s_aux is None else _own_or_float32(s_aux, query)
    numbers: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sink": sink}
    if dropout > 0:
        numbers["dropout"] = dropout

    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        window = _window_beside_offsets(module, query, attention_mask, is_causal, sliding_window, position_bias)
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            raise ValueError(
                "headwise attention: one of cu_seq_lens_q and cu_seq_lens_k is None; both are needed, or neither"
            )
        longest = (_longest(max_length_q, query), _longest(max_length_k, key))
        return _packed(query, key, value, (cu_seq_lens_q, cu_seq_lens_k), longest, window, numbers), None

    if isinstance(attention_mask, CompactMask) and attention_mask.sequences is not None:
        packed = None if position_bias is not None else attention_mask.packing()
        if packed is None:
            attention_mask = attention_mask.built()
        elif not packed.whole_rows:
            offsets = (packed.cu_seqlens, packed.cu_seqlens)
            longest = (packed.max_seqlen, packed.max_seqlen)
            return _packed(query, key, value, offsets, longest, attention_mask.window, numbers), None

    seen = _visible(module, query, key, attention_mask, is_causal, sliding_window)
    bias = seen.bias
    if position_bias is not None:
        position_bias = _own_or_float32(position_bias[..., : seen.keys], query)
        bias = position_bias if bias is None else bias + position_bias
    if seen.keys != key.shape[2]:
        key, value = key[:, :, : seen.keys], value[:, :, : seen.keys]
    if _decodes(query, key, value, seen, bias, dropout):
        lengths = seen.kv_lengths
        if lengths is None:
            lengths = torch.full((query.shape[0],), key.shape[2], dtype=torch.int32, device=query.device)
        window = (seen.window[0], None)
        out = attention_decode(query, key, value, lengths, window=window, **numbers)
    else:
        out = attention(
            query, key, value, window=seen.window, mask=seen.mask, bias=bias, kv_lengths=seen.kv_lengths, **numbers
        )
    return out.transpose(1, 2).contiguous(), None


def _visible(
    module: torch.nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None,
    sliding_window: int | None,
) -> _Visible:  # fmt: skip
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        return _Visible(_window_without_mask(module, queries, keys, is_causal, sliding_window), keys)
    if isinstance(mask, CompactMask):
        batch, _, *made_for = mask.sizes
        if made_for != [queries, keys] or batch != query.shape[0]:
            raise ValueError(
                f"headwise attention: attention_mask is for (B, Sq, Sk) = {(batch, *made_for)}, and this layer has "
                f"{(query.shape[0], queries, keys)}"
            )
        padding = None if mask.padding is None else mask.padding[..., : mask.keys]
        return _Visible(mask.window, mask.keys, mask.kv_lengths, padding)
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise ValueError(
            f"headwise attention: attention_mask has {got}; an attention layer needs (B, 1 or Hq, Sq, Sk), bool (True = may "
            "attend) or float (added to the scores), or None: give a (B, S) mask to the model, not to a layer"
        )
    if isinstance(mask, BuiltMask):
        mask = mask.built()
    mask = mask[..., :keys]  # some models prepare one mask for the longest of their layers
    if mask.dtype == torch.bool:
        return _Visible((None, None), keys, mask=mask)
    if not mask.is_floating_point():
        raise TypeError(
            f"headwise attention: attention_mask (B, 1, Sq, Sk) has dtype {mask.dtype}; it needs to be bool (True = may "
            "attend) or float (added to the scores)"
        )
    return _Visible((None, None), keys, bias=_own_or_float32(mask, query))


def _window_without_mask(
    module: torch.nn.Module, queries: int, keys: int, is_causal: bool | None, sliding_window: int | None
) -> tuple[int | None, int | None]:
    """No mask was made: the layer is causal or not, by its own word, and all keys are there."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and queries > 1 and queries != keys:
        # PyTorch's attention would align the first query with the first key, flash attention the last with the last.
        raise ValueError(
            f"headwise attention: attention_mask is None in a causal layer with {queries} queries and {keys} keys, which "
            "does not say where the queries are; it needs a mask (register() makes them) or is_causal=False"
        )
    left = None
    if sliding_window is not None and sliding_window < keys:
        if not causal:
            raise NotImplementedError(
                "headwise attention: sliding_window without an attention_mask in a layer that is not causal (models "
                "disagree on its width); give the mask"
            )
        left = sliding_window - 1  # the window counts the query's own position
    return left, 0 if causal else None


def _window_beside_offsets(
    module: torch.nn.Module, query: Tensor, mask: Tensor | None, is_causal: bool | None, sliding_window: int | None,
    position_bias: Tensor | None,
) -> tuple[int | None, int | None]:  # fmt: skip
    """Who sees whom inside the sequences that cu_seq_lens names."""
    if position_bias is not None:
        raise NotImplementedError(
            "headwise attention: position_bias with cu_seq_lens_q: packed sequences have no bias; give packed "
            "position_ids, or a padded batch with an attention_mask"
        )
    if mask is None:
        return _window_without_mask(module, query.shape[2], query.shape[2], is_causal, sliding_window)
    if not isinstance(mask, CompactMask) or mask.padding is not None or mask.kv_lengths is not None:
        raise NotImplementedError(
            "headwise attention: attention_mask with cu_seq_lens_q: they say different things about the same tokens; leave "
            "the attention_mask out of a packed batch, or cu_seq_lens and max_length out of a padded one"
        )
    return mask.window


def _packed(
    query: Tensor, key: Tensor, value: Tensor, offsets: tuple[Tensor, Tensor], longest: tuple[int, int],
    window: tuple[int | None, int | None], numbers: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The rows of the batch end to end, cut into sequences by the offsets; out ``(B, Sq, Hq, Dv)``."""
    q, k, v = _end_to_end(query), _end_to_end(key), _end_to_end(value)
    out = attention_varlen(q, k, v, *offsets, *longest, window=window, **numbers)
    batch, _, tokens, _ = query.shape
    return out[None] if batch == 1 else out.unflatten(0, (batch, tokens))


def _end_to_end(x: Tensor) -> Tensor:
    """``(B, H, S, D)`` as ``(B · S, H, D)``. Packed batches are one row, and every view takes the host 2 µs."""
    return x[0].transpose(0, 1) if x.shape[0] == 1 else x.transpose(1, 2).flatten(0, 1)


def _longest(given: int | Tensor | None, tokens: Tensor) -> int:
    """A bound of the sequence lengths. A tensor is not read back: no sequence is longer than all of them."""
    return given if isinstance(given, int) else tokens.shape[0] * tokens.shape[2]


def _decodes(
    query: Tensor, key: Tensor, value: Tensor, seen: _Visible, bias: Tensor | None, dropout: float
) -> bool:  # fmt: skip
    """A few new tokens over a cache, and nothing that `attention_decode` has no argument for."""
    if bias is not None or seen.mask is not None or dropout > 0 or query.shape[2] > DECODE_QUERIES:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    left, right = seen.window
    one_sees_all = query.shape[2] == 1 and left is None and right is None  # its position does not matter
    return (right == 0 or one_sees_all) and key.shape[2] > query.shape[2]


def _own_or_float32(x: Tensor, query: Tensor) -> Tensor:
    return x if x.dtype in (query.dtype, torch.float32) else x.to(query.dtype)

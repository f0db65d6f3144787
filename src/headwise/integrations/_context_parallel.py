"""A causal language model of Transformers with its sequence sharded over ranks.

Every rank calls the model with the whole batch. A hook cuts input_ids, position_ids and labels (shifted first) to the rank's
tokens; the attention goes under a name of its own, whose masks say only how far a layer sees: which keys are padding, and
where packed documents begin, is read off the whole attention_mask and position_ids by the hook.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from headwise.distributed.models import ContextParallel, Sharding
from headwise.integrations import _mask_rules
from headwise.integrations._compact_mask import CompactMask, Packed
from headwise.integrations.transformers import _UNSUPPORTED, _own_or_float32

OP = "context_parallel"
_numbers = itertools.count()
IGNORED = -100
# Every layer of these mixes tokens by attention alone, which it looks up by name.
FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gpt_oss")


class _Attention:
    """What goes under the name, and what it has to know of the batch that is being computed."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding, self.name = sharding, f"headwise_context_{next(_numbers)}"
        self.mask: Tensor | None = None  # (B, 1, 1, S): which keys are tokens
        self.cu_seqlens: Tensor | None = None

    def forward(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        for name in (*_UNSUPPORTED, "position_bias", "cu_seq_lens_q", "cu_seq_lens_k"):
            if others.get(name) is not None and others[name] is not False:
                raise NotImplementedError(f"{OP}: {name} is not there across ranks")
        if not isinstance(attention_mask, CompactMask):
            raise NotImplementedError(
                f"{OP}: a layer's attention_mask is {type(attention_mask).__name__}; across ranks it needs to be made by "
                "Transformers' own mask functions: causal, sliding window or bidirectional"
            )
        out = self.sharding.attend(
            query, key, value, window=attention_mask.window, mask=attention_mask.padding, scale=scaling,
            cu_seqlens=None if attention_mask.packed is None else attention_mask.packed.cu_seqlens,
            softcap=softcap, sink=None if s_aux is None else _own_or_float32(s_aux, query), dropout=dropout,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    def make_mask(
        self, batch_size: int, kv_length: int, q_length: int | None = None, mask_function: Any = None,
        cache_position: Tensor | None = None, device: Any = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        from transformers import masking_utils

        rule = _mask_rules.read(mask_function or masking_utils.causal_mask_function)
        if rule is None:
            raise NotImplementedError(f"{OP}: a mask that is neither causal, a sliding window nor bidirectional")
        if cache_position is not None:
            q_length, device = cache_position.shape[0], cache_position.device
        # The rule's sequences are a guess from the positions of a shard: the hook has seen all of them.
        window = None if rule.low is None else -rule.low, rule.high
        mask = CompactMask.of(
            (batch_size, 1, q_length or kv_length, kv_length), device, window, kv_length, padding=self.mask
        )
        # On the mask and not on self: layers that are computed again in a backward get the mask of their own forward.
        mask.packed = None if self.cu_seqlens is None else Packed(self.cu_seqlens, 0, False)
        return mask

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        given: dict[str, Any] = kwargs | dict(zip(("input_ids",), args, strict=False))
        self.sharding.same_batch(lambda: _checked(module, args, given, self.sharding))
        tokens: Any = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        batch, total = tokens.shape[:2]
        positions, mask = given.get("position_ids"), given.pop("attention_mask", None)
        self.mask, self.cu_seqlens = None, None
        if mask is not None and not bool(mask.all()):
            self.mask = mask.bool()[:, None, None, :]
        if positions is None:
            positions = torch.arange(total, device=tokens.device).expand(batch, total)
        elif mask is None:
            self.cu_seqlens = _documents(positions)
        sharding = self.sharding
        given |= {"position_ids": sharding.cut(positions, -1), "use_cache": False}
        for name in ("input_ids", "inputs_embeds"):
            if given.get(name) is not None:
                given[name] = sharding.cut(given[name], 1)
        labels = given.get("labels")
        if labels is not None:
            following = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            count = given.get("num_items_in_batch")
            given["num_items_in_batch"] = (following != IGNORED).sum() if count is None else count
            given["labels"], given["shift_labels"] = sharding.cut(labels, 1), sharding.cut(following, 1)
        return (), given

    def after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        if getattr(result, "loss", None) is not None:
            result.loss = self.sharding.whole_loss(result.loss)
        return result


def _checked(
    module: nn.Module, args: tuple[Any, ...], given: dict[str, Any], sharding: Sharding
) -> dict[str, Tensor | None]:
    """The ints of a batch, which all ranks need to be given alike."""
    if len(args) > 1:
        raise TypeError(f"{OP}: the model is called with {len(args)} positional arguments; it needs keywords")
    if given.get("past_key_values") is not None:
        raise NotImplementedError(
            f"{OP}: past_key_values is given, and caches are not there across ranks: remove() first"
        )
    for name in ("logits_to_keep", "output_router_logits"):
        if given.get(name) or (name != "logits_to_keep" and getattr(module.config, name, False)):
            raise NotImplementedError(f"{OP}: {name} is given, and it is not there across ranks")
    if given.get("input_ids") is None and given.get("inputs_embeds") is None:
        raise ValueError(f"{OP}: the model is called without input_ids and inputs_embeds; it needs one of them")
    tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    sharding.check_tokens(tokens.shape[1])
    mask = given.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise NotImplementedError(f"{OP}: attention_mask has shape {tuple(mask.shape)}; it needs (B, S), of all tokens")
    names = ("input_ids", "attention_mask", "position_ids", "labels")
    return {f"fingerprint of {name}": given.get(name) for name in names}


def context_parallel(
    model: Any, mesh: Any, *, method: str = "auto", layout: str = "zigzag", averaged: bool = False
) -> ContextParallel:
    from transformers import AttentionInterface, AttentionMaskInterface

    kind = model.config.model_type
    if kind not in FAMILIES:
        raise NotImplementedError(
            f"{OP}: the model is a {kind}; layers that mix tokens in other ways than by attention would be wrong across "
            f"ranks, so it needs to be one that was tried: {', '.join(FAMILIES)}"
        )
    for module in model.modules():
        rope = getattr(module, "rope_type", None)
        for found in rope.values() if isinstance(rope, dict) else (rope,):
            if found in ("dynamic", "longrope"):
                raise NotImplementedError(
                    f"{OP}: the model has rotary positions of type {found!r}, whose angles depend on the length of what one "
                    "rank sees; across ranks it needs another type"
                )
    attention = _Attention(Sharding(mesh, method, layout, averaged))
    AttentionInterface.register(attention.name, attention.forward)
    AttentionMaskInterface.register(attention.name, attention.make_mask)
    former = model.config._attn_implementation
    model.set_attn_implementation(attention.name)
    handles = (
        model.register_forward_pre_hook(attention.before, with_kwargs=True),
        model.register_forward_hook(attention.after, with_kwargs=True),
    )
    return ContextParallel(attention.sharding, handles, lambda: model.set_attn_implementation(former))


def _documents(positions: Tensor) -> Tensor | None:
    """Where packed documents begin, from positions that start anew; None where nothing is packed."""
    breaks = positions.diff(dim=-1) != 1
    if not bool(breaks.any()):
        return None
    if positions.shape[0] != 1 and not bool((breaks == breaks[:1]).all()):
        raise NotImplementedError(
            f"{OP}: position_ids pack other documents in every row; it needs one row, or equal ones"
        )
    starts = torch.nonzero(breaks[0])[:, 0] + 1
    ends = starts.new_tensor([0]), starts, starts.new_tensor([positions.shape[-1]])
    return torch.cat(ends).to(torch.int32)

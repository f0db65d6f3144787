"""Which entries dropout struck, as flash_attn shows it: probabilities with a sign."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.integrations.flash_attn import _alibi
from headwise.layout import statistics_dtype
from headwise.ops.attention import attention_probs


def signed_probs(
    q: Tensor, k: Tensor, alibi_slopes: Tensor | None, window: tuple[int, int], options: dict[str, Any]
) -> Tensor:
    """``exp(s - max(s))`` ``(B, Hq, Sq, Sk)`` of a call with dropout, negative where it struck, in q's dtype.

    q ``(B, Hq, Sq, D)``, k ``(B, Hk, Sk, D)``; options: the flags of the call, its seed and lengths among them. As large as
    the scores: that is what was asked for.
    """
    q, k = q.detach(), k.detach()
    flags = {name: value for name, value in options.items() if name in ("q_lengths", "kv_lengths")} | {"window": window}
    dropout = {name: options[name] for name in ("dropout", "dropout_seed")}
    # Where every key has the same score no probability is too small to be told from a dropped one.
    level = attention_probs(q.new_zeros(*q.shape[:-1], 1), k.new_zeros(*k.shape[:-1], 1), **flags, **dropout)
    if alibi_slopes is not None and _alibi.reverses(alibi_slopes, window):
        level = _alibi.reversed_rows(level, flags.get("q_lengths"))
    bias = None if alibi_slopes is None else _alibi.square_bias(q, k, alibi_slopes, **flags)
    wide = statistics_dtype(q.dtype)
    probs = attention_probs(
        q.to(wide), k.to(wide), bias=bias, scale=options["scale"], softcap=options["softcap"], **flags
    )
    probs = probs / probs.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
    return torch.where(level == 0, -probs, probs).to(q.dtype)

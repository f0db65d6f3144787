"""``flash_attn.flash_attn_interface``: the functions that take q, k and v, dense and packed.

Layouts are ``(B, S, H, D)`` and ``(T, H, D)``; ours get transposed views. ``causal`` is aligned to the bottom right in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.integrations._edges import with_positive_scale
from headwise.integrations._strides import with_contiguous_rows
from headwise.integrations.flash_attn import _alibi, _dropped, _packed
from headwise.integrations.flash_attn._kvcache import flash_attn_with_kvcache
from headwise.integrations.flash_attn._options import softcap_or_none, window_of
from headwise.ops.attention import attention, attention_varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Attention of q ``(B, Sq, Hq, D)`` over k, v ``(B, Sk, Hk, D)``: out ``(B, Sq, Hq, D)``.

    window_size        keys from ``p - left`` to ``p + right``; -1: no bound
    softcap            0.0: none
    alibi_slopes       ``(Hq,)`` or ``(B, Hq)``: a bias of ``-slope · |p - j|``
    deterministic      False allows a faster backward whose sums come in any order, where there is one
    return_attn_probs  also the lse ``(B, Hq, Sq)``, and with dropout the probabilities ``(B, Hq, Sq, Sk)``, scaled so that
                       the largest of a row is 1, and negative where they were dropped; without dropout an empty ``(0,)``
    """
    q, k, v = _heads_first("flash_attn_func", q, k, v)
    q, softmax_scale = with_positive_scale("flash_attn_func: softmax_scale", q, softmax_scale)
    left, right = window_of(causal, window_size)
    options: dict[str, Any] = {
        "scale": softmax_scale, "softcap": softcap_or_none(softcap), "deterministic": deterministic,
        **_dropout(q, dropout_p, return_attn_probs or alibi_slopes is not None),
    }  # fmt: skip
    if alibi_slopes is not None:
        out, lse = _alibi.attend(q, k, v, alibi_slopes, (left, right), **options)
    elif not return_attn_probs:
        return attention(q, k, v, window=(left, right), **options).transpose(1, 2)
    else:
        out, lse = attention(q, k, v, window=(left, right), return_lse=True, **options)
    out = out.transpose(1, 2)
    if not return_attn_probs:
        return out
    return out, lse, _dropped.signed_probs(q, k, alibi_slopes, (left, right), options) if dropout_p else q.new_empty(0)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_func` of one tensor ``(B, S, 3, H, D)``."""
    q, k, v = _unpacked("flash_attn_qkvpacked_func", "qkv", qkv, "(B, S, 3, H, D)", 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_func` of q and one tensor ``(B, Sk, 2, Hk, D)``."""
    k, v = _unpacked("flash_attn_kvpacked_func", "kv", kv, "(B, Sk, 2, Hk, D)", 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention inside each sequence of a packed batch: q ``(Tq, Hq, D)``, k, v ``(Tk, Hk, D)``, out ``(Tq, Hq, D)``.

    With ``block_table`` ``(B, max_pages)`` k and v are pages ``(pages, page_size, Hk, D)``. The lse is ``(Hq, Tq)``.
    ALiBi and pages work on a padded copy of the batch, and probabilities ``(B, Hq, max_seqlen_q, max_seqlen_k)`` are of one.
    """
    q, softmax_scale = with_positive_scale("flash_attn_varlen_func: softmax_scale", q, softmax_scale)
    left, right = window_of(causal, window_size)
    max_seqlen_q, max_seqlen_k = int(max_seqlen_q), int(max_seqlen_k)
    options: dict[str, Any] = {
        "scale": softmax_scale, "softcap": softcap_or_none(softcap), "deterministic": deterministic,
        **_dropout(q, dropout_p, return_attn_probs or alibi_slopes is not None),
    }  # fmt: skip
    asks_for_probs = return_attn_probs and dropout_p > 0
    found: Tensor | tuple[Tensor, Tensor] | None = None
    if alibi_slopes is None and block_table is None:
        q, k, v = with_contiguous_rows(q, k, v)
        found = attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window=(left, right),
            return_lse=return_attn_probs, **options,
        )  # fmt: skip
        if not asks_for_probs:
            return (*found, q.new_empty(0)) if isinstance(found, tuple) else found

    total, batch = q.shape[0], cu_seqlens_q.shape[0] - 1
    q = _packed.padded(q, cu_seqlens_q, max_seqlen_q).transpose(1, 2)
    if block_table is None:
        k, v = (_packed.padded(x, cu_seqlens_k, max_seqlen_k).transpose(1, 2) for x in (k, v))
    else:
        pages = -(-max_seqlen_k // max(k.shape[1], 1))
        k, v = (_packed.from_pages(x, block_table[:batch, :pages]).transpose(1, 2) for x in (k, v))
    options |= {"q_lengths": _packed.lengths(cu_seqlens_q), "kv_lengths": _packed.lengths(cu_seqlens_k)}
    probs = q.new_empty(0)
    if asks_for_probs:
        probs = _dropped.signed_probs(q, k, alibi_slopes, (left, right), options)
    if isinstance(found, tuple):
        return (*found, probs)
    if alibi_slopes is not None:
        out, lse = _alibi.attend(q, k, v, alibi_slopes, (left, right), **options)
    else:
        out, lse = attention(q, k, v, window=(left, right), return_lse=True, **options)
    out = _packed.packed(out.transpose(1, 2), cu_seqlens_q, total)
    if not return_attn_probs:
        return out
    return out, _packed.packed(lse.transpose(1, 2), cu_seqlens_q, total, -torch.inf).t().contiguous(), probs


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` of one tensor ``(T, 3, H, D)``."""
    q, k, v = _unpacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(T, 3, H, D)", 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` of q and one tensor ``(Tk, 2, Hk, D)``."""
    k, v = _unpacked("flash_attn_varlen_kvpacked_func", "kv", kv, "(Tk, 2, Hk, D)", 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _heads_first(name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(B, S, H, D)`` as ``(B, H, S, D)``: views, where the head dim is contiguous."""
    if not q.dim() == k.dim() == v.dim() == 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"{name}: q, k, v have shapes {shapes}; they need 4 dimensions (B, S, H, D)")
    q, k, v = with_contiguous_rows(q, k, v)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _unpacked(name: str, argument: str, x: Tensor, letters: str, dims: int, count: int) -> tuple[Tensor, ...]:
    if x.dim() != dims or x.shape[-3] != count:
        raise ValueError(f"{name}: {argument} has shape {tuple(x.shape)}; it needs {letters}")
    return x.unbind(-3)


def _dropout(q: Tensor, dropout_p: float, same_again: bool) -> dict[str, Any]:
    """same_again: more than one op has to drop the same entries."""
    if not dropout_p:
        return {}
    if not 0.0 < dropout_p < 1.0:
        raise NotImplementedError(f"flash_attn: dropout_p is {dropout_p}; it needs to be at least 0 and below 1")
    seed = torch.randint(2**62, (1,), device=q.device) if same_again else None
    return {"dropout": dropout_p, "dropout_seed": seed}


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """How many keys are scaled alike in the probabilities of ``return_attn_probs``: all of a row, in each of our kernels.

    In flash_attn they are scaled by the maximum that the kernel had seen when it came to a block of this many keys; its
    own tests ask for the size to undo that.
    """
    return 2**31 - 1

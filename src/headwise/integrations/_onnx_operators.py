"""What the operators of ONNX mean, said in Headwise's ops. Nothing here imports onnx: inputs are tensors, or None.

Each function takes the node's inputs in order, which outputs are wanted, the backend, and the node's attributes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.integrations._alignment import UNBOUNDED, aligned
from headwise.integrations._edges import with_positive_scale
from headwise.ops.attention import attention, attention_probs
from headwise.ops.cross_entropy import cross_entropy
from headwise.ops.layer_norm import layer_norm
from headwise.ops.rms_norm import rms_norm
from headwise.ops.rope import rope

Inputs = Sequence[Tensor | None]
Outputs = Sequence[Tensor | None]

DOUBLE, PRECISIONS = 11, (None, 1, 10, 11, 16)  # ONNX's numbers of float64; of float32, float16, float64, bfloat16
_NO_LABEL = -(2**31)  # is outside of all classes
RAW, CAPPED, BIASED, PROBABILITIES = range(4)  # qk_matmul_output_mode


def _optional(inputs: Inputs, count: int) -> list[Any]:
    """With None for those left off at the end."""
    return [*inputs, *[None] * (count - len(inputs))]


# ---------------------------------------------------------------------------------------------------------- attention


def attention_node(
    inputs: Inputs, wanted: Sequence[bool], backend: str | None, *, is_causal: int = 0, scale: float | None = None,
    softcap: float = 0.0, q_num_heads: int | None = None, kv_num_heads: int | None = None,
    softmax_precision: int | None = None, qk_matmul_output_mode: int = RAW, left_window_size: int = UNBOUNDED,
    right_window_size: int = UNBOUNDED,
) -> Outputs:  # fmt: skip
    """Y, present_key, present_value, qk_matmul_output.

    Query i sits at position ``i + past length``, with ``nonpad_kv_seqlen`` at ``i + nonpad_kv_seqlen - Sq``.
    """
    q, k, v, attn_mask, past_k, past_v, nonpad = _optional(inputs, 7)
    if softmax_precision not in PRECISIONS:
        raise NotImplementedError(f"Attention: softmax_precision={softmax_precision} is not supported")
    if (past_k is None) != (past_v is None) or (past_k is not None and nonpad is not None):
        raise ValueError("Attention: past_key and past_value come together, and without nonpad_kv_seqlen")
    split = q.dim() == 3
    if split:  # (B, S, H·D) as (B, H, S, D): views
        q = q.unflatten(2, (q_num_heads, -1)).transpose(1, 2)
        k, v = (x.unflatten(2, (kv_num_heads, -1)).transpose(1, 2) for x in (k, v))
    offset = 0
    if past_k is not None:
        offset = past_k.shape[2]
        k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
    present, dtype = (k, v), q.dtype
    # V has a type of its own in ONNX, and K need not have Q's; the result has Q's.
    wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if softmax_precision == DOUBLE:
        wide = torch.float64
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if attn_mask is not None and attn_mask.is_floating_point() and attn_mask.dtype != torch.float32:
        attn_mask = attn_mask.to(wide)
    q, scale = with_positive_scale("Attention: scale", q, scale)

    window = (left_window_size, 0 if is_causal else right_window_size)
    flags: dict[str, Any] = {"scale": scale, "softcap": softcap or None, "backend": backend}
    k, v, options = _visible_keys(q, k, v, attn_mask, nonpad, offset, window)
    out = attention(q, k, v, **flags, **options).to(dtype)
    if split:
        out = out.transpose(1, 2).flatten(2)
    if len(wanted) < 4 or not wanted[3]:
        return out, *present
    if qk_matmul_output_mode == PROBABILITIES:
        probs = attention_probs(q, k, **flags, **options)
        scores = F.pad(probs, (0, present[0].shape[2] - probs.shape[3]))
    else:
        full = present[0].to(q.dtype)
        scores = _scores(q, full, scale, softcap if qk_matmul_output_mode != RAW else 0.0)
        if qk_matmul_output_mode == BIASED:
            scores = _biased(scores, attn_mask, nonpad, offset, window)
    return out, *present, scores.to(dtype)


def _visible_keys(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, nonpad: Tensor | None, offset: int, window: tuple[int, int]
) -> tuple[Tensor, Tensor, dict[str, Any]]:  # fmt: skip
    """The keys and values that are given to our attention, and what says who sees them."""
    if attn_mask is not None and attn_mask.shape[-1] < k.shape[2]:  # keys that the mask does not reach are not seen
        k, v = k[:, :, : attn_mask.shape[-1]], v[:, :, : attn_mask.shape[-1]]
    options: dict[str, Any] = {"window": window}
    if nonpad is not None:
        options["kv_lengths"] = nonpad
    else:
        keys = k.shape[2]
        given, options["window"] = aligned(q.shape[2], keys, offset, *window)
        if given < keys:
            k, v = k[:, :, :given], v[:, :, :given]
            attn_mask = None if attn_mask is None else attn_mask[..., :given]
        elif given > keys:
            k, v = (F.pad(x, (0, 0, 0, given - keys)) for x in (k, v))
            if attn_mask is None:
                attn_mask = torch.ones(keys, dtype=torch.bool, device=q.device)
            hidden = 0.0 if attn_mask.dtype == torch.bool else -torch.inf
            attn_mask = F.pad(attn_mask, (0, given - keys), value=hidden)
    if attn_mask is not None:
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    return k, v, options


def _scores(q: Tensor, k: Tensor, scale: float | None, softcap: float) -> Tensor:
    """The scaled products themselves: a result of that size is what was asked for."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))  # (B, Hk, Hq/Hk, Sq, D)
    scores = (grouped @ k.to(wide).transpose(2, 3).unsqueeze(2)).flatten(1, 2)
    scores = scores * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _biased(
    scores: Tensor, attn_mask: Tensor | None, nonpad: Tensor | None, offset: int, window: tuple[int, int]
) -> Tensor:
    """With the mask, and -inf where no key is seen."""
    queries, keys = scores.shape[2:]
    if attn_mask is not None:
        missing = keys - attn_mask.shape[-1]
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~F.pad(attn_mask, (0, missing), value=False), -torch.inf)
        else:
            scores = scores + F.pad(attn_mask, (0, missing), value=-torch.inf)
    key = torch.arange(keys, device=scores.device)
    first: Any = offset if nonpad is None else (nonpad - queries).reshape(-1, 1, 1, 1)
    position = torch.arange(queries, device=scores.device)[:, None] + first  # (Sq, 1) or (B, 1, Sq, 1)
    left, right = window
    hidden = torch.zeros_like(position - key, dtype=torch.bool)
    if nonpad is not None:
        hidden = hidden | (key >= nonpad.reshape(-1, 1, 1, 1))
    if left != UNBOUNDED:
        hidden = hidden | (key < position - left)
    if right != UNBOUNDED:
        hidden = hidden | (key > position + right)
    return scores.masked_fill(hidden, -torch.inf)


# ------------------------------------------------------------------------------------------------------ rotary, norms


def rotary_node(
    inputs: Inputs, wanted: Sequence[bool], backend: str | None, *, interleaved: int = 0, num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Outputs:  # fmt: skip
    x, cos, sin, position_ids = _optional(inputs, 4)
    split = x.dim() == 3
    if split:
        if not num_heads:
            raise ValueError("RotaryEmbedding: num_heads is 0; X of 3 dimensions (B, S, H·D) needs it")
        x = x.unflatten(2, (num_heads, -1)).transpose(1, 2)
    rotated = rotary_embedding_dim or x.shape[3]
    for name, table in (("cos_cache", cos), ("sin_cache", sin)):
        if 2 * table.shape[-1] != rotated:
            raise ValueError(
                f"RotaryEmbedding: {name} has {table.shape[-1]} columns; {rotated} elements need {rotated // 2} of them"
            )
    if position_ids is None:  # a row of angles for every token
        batch, length = cos.shape[:2]
        position_ids = torch.arange(batch * length, device=x.device).reshape(batch, length)
        cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
    if cos.dtype.itemsize < 4:
        cos, sin = cos.float(), sin.float()
    y = rope(x, cos, sin, position_ids, bool(interleaved), backend=backend)
    return (y.transpose(1, 2).flatten(2) if split else y,)


def rms_norm_node(
    inputs: Inputs, wanted: Sequence[bool], backend: str | None, *, axis: int = -1, epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Outputs:  # fmt: skip
    x, scale = _optional(inputs, 2)
    rows, dims = _rows(x, axis)
    return (rms_norm(rows, _flat("RMSNormalization: scale", scale, dims), epsilon, backend=backend).reshape(x.shape),)


def layer_norm_node(
    inputs: Inputs, wanted: Sequence[bool], backend: str | None, *, axis: int = -1, epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Outputs:  # fmt: skip
    """Y, Mean, InvStdDev."""
    x, scale, bias = _optional(inputs, 3)
    rows, dims = _rows(x, axis)
    weight = _flat("LayerNormalization: Scale", scale, dims)
    shift = None if bias is None else _flat("LayerNormalization: B", bias, dims)
    out = layer_norm(rows, weight, shift, epsilon, backend=backend).reshape(x.shape)
    if not any(wanted[1:]):
        return (out,)
    variance, mean = torch.var_mean(rows.to(torch.promote_types(x.dtype, torch.float32)), -1, correction=0)
    shape = (*x.shape[: x.dim() - len(dims)], *(1,) * len(dims))
    return out, mean.reshape(shape), torch.rsqrt(variance + epsilon).reshape(shape)


def _rows(x: Tensor, axis: int) -> tuple[Tensor, tuple[int, ...]]:
    """x with the dims from ``axis`` on as one, and those dims."""
    axis %= x.dim()
    dims = tuple(x.shape[axis:])
    return x.reshape(*x.shape[:axis], math.prod(dims)), dims


def _flat(name: str, weight: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A weight that broadcasts over the normalised dims, as one vector."""
    if math.prod(weight.shape[: max(weight.dim() - len(dims), 0)]) != 1:
        raise NotImplementedError(
            f"{name} has shape {tuple(weight.shape)}, which differs from row to row; it needs to broadcast to {dims}"
        )
    return weight.reshape(weight.shape[-len(dims) :]).expand(dims).reshape(-1)


# ------------------------------------------------------------------------------------------------------ cross-entropy


def cross_entropy_node(
    inputs: Inputs, wanted: Sequence[bool], backend: str | None, *, ignore_index: int | None = None,
    reduction: str = "mean",
) -> Outputs:  # fmt: skip
    """The loss, and log_prob of every class; classes are the second dimension. Without ignore_index nothing is ignored."""
    scores, labels, weights = _optional(inputs, 3)
    ignored = _NO_LABEL if ignore_index is None else ignore_index
    loss = _loss(scores.movedim(1, -1), labels, weights, ignored, reduction, backend).to(scores.dtype)
    if len(wanted) < 2 or not wanted[1]:
        return (loss,)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return loss, torch.log_softmax(scores.to(wide), 1).to(scores.dtype)  # an array of that size is what was asked for


def _loss(
    logits: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int, reduction: str, backend: str | None
) -> Tensor:  # fmt: skip
    """Weights of classes multiply the losses of our op. A label outside the classes has the loss NaN."""
    if weights is None:
        return cross_entropy(logits, labels, ignore_index, reduction, backend=backend)
    losses = cross_entropy(logits, labels, ignore_index, "none", backend=backend)
    weight = torch.where(labels != ignore_index, weights[labels.clamp(0, max(weights.shape[0] - 1, 0))], 0.0)
    losses = losses * weight
    if reduction == "none":
        return losses
    return losses.sum() / weight.sum() if reduction == "mean" else losses.sum()

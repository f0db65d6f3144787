"""`attention` and `attention_varlen` of some heads of a larger call: dropout drops what it drops there. With gradients.

Not public. seed: with the numbers of the first batch entry (or sequence) and head, see `_arguments.SEED_NUMBERS`.
"""

from __future__ import annotations

from torch import Tensor

from headwise.ops.attention import dense, varlen
from headwise.ops.attention._arguments import Window


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, dropout: float, seed: Tensor, window: Window, scale: float,
    softcap: float | None, deterministic: bool, backend: str | None, mask: Tensor | None = None,
    bias: Tensor | None = None, sink: Tensor | None = None, kv_lengths: Tensor | None = None,
    q_lengths: Tensor | None = None, kv_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = dense._forward(
        (q, k, v, mask, bias, sink, kv_lengths, q_lengths, kv_starts, seed),
        (False, window, scale, softcap, deterministic, dropout),
        backend, True,
    )  # fmt: skip
    return out, lse


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, *, dropout: float, seed: Tensor, window: Window,
    scale: float, softcap: float | None, deterministic: bool, backend: str | None, sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of sequences that have as many keys as queries."""
    out, lse = varlen._forward(
        (q, k, v, None, None, sink, None, None, None, cu_seqlens, cu_seqlens, seed),
        (longest, longest, False, window, scale, softcap, deterministic, dropout),
        backend, True,
    )  # fmt: skip
    return out, lse

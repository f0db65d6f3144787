"""Attention on the CPU, dense and packed: cut the call into problems of one geometry and put the results together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.cpu import attention_engine as engine
from headwise.backends.cpu.attention_band import Band
from headwise.backends.cpu.attention_flash import flash_whole
from headwise.backends.cpu.attention_problem import Problem, scores_slice

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags


class _Piece(NamedTuple):
    """A problem, and where its rows and keys lie in the tensors of the call."""

    problem: Problem
    batch: slice
    rows: slice
    keys: slice


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None,
    sink: Tensor | None, flags: Flags,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if sink is None and kv_lengths is None and not flags.softcap:
        done = flash_whole(next(_dense_pieces(q, k, v, mask, bias, None, flags)).problem)
        if done is not None:
            return done[0], done[1].contiguous()
    out = layout.empty_like_heads(q, v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=layout.lse_dtype(q.dtype))
    _forward_pieces(_dense_pieces(q, k, v, mask, bias, kv_lengths, flags), out, lse, sink)
    for b in _bad_lengths(kv_lengths, k.shape[2]):
        out[b], lse[b] = torch.nan, torch.nan
    return out, lse


def attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None, sink: Tensor | None, flags: Flags,
    need_bias_grad: bool, need_sink_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dbias = None
    if need_bias_grad and bias is not None:
        dbias = torch.zeros(bias.shape, dtype=layout.lse_dtype(q.dtype))
    grad_out, out = _contiguous_last(grad_out), _contiguous_last(out)
    pieces = _dense_pieces(q, k, v, mask, bias, kv_lengths, flags)
    if kv_lengths is None and q.numel() and k.numel():
        found = engine.backward(next(pieces).problem, grad_out, grad_lse, out, lse, dbias)
        dq, dk, dv = (_heads_inside(x, q.dtype) for x in found)
    else:
        dq, dk, dv = (layout.empty_heads_inside(x).zero_() for x in (q, k, v))
        _backward_pieces(pieces, grad_out, grad_lse, out, lse, dbias, dq, dk, dv)
    for b in _bad_lengths(kv_lengths, k.shape[2]):
        dq[b], dk[b], dv[b] = torch.nan, torch.nan, torch.nan
        if dbias is not None:
            dbias[b if dbias.shape[0] > 1 else 0] = torch.nan
    dsink = None
    if need_sink_grad and sink is not None:
        dsink = engine.sink_gradient(sink, grad_out, grad_lse, out, lse)
    return (
        dq,
        dk,
        dv,
        q.new_empty(0) if dbias is None else dbias.to(_dtype(bias, q)),
        q.new_empty(0) if dsink is None else dsink,
    )


def attention_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    sink: Tensor | None, flags: Flags,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=layout.lse_dtype(q.dtype))
    starts = _packed_offsets(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if starts is None:
        return out.fill_(torch.nan), lse.fill_(torch.nan)
    trailing = slice(starts[0][-1], None)
    lse[:, trailing] = -torch.inf
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    pieces = _packed_pieces(q, k, v, *starts, flags)
    _forward_pieces(pieces, out.transpose(0, 1)[None], lse[None], sink)
    out[trailing] = 0.0
    return out, lse


def attention_varlen_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, sink: Tensor | None, flags: Flags,
    need_sink_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    starts = _packed_offsets(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    well_formed = starts is not None
    dq, dk, dv = (torch.full(x.shape, 0.0 if well_formed else torch.nan, dtype=x.dtype) for x in (q, k, v))
    dsink = q.new_empty(0)
    grad_out, out = _contiguous_last(grad_out).transpose(0, 1)[None], _contiguous_last(out)
    q, k, v, out, dense_dq, dense_dk, dense_dv = (x.transpose(0, 1)[None] for x in (q, k, v, out, dq, dk, dv))
    lse, grad_lse = lse[None], None if grad_lse is None else grad_lse[None]
    if starts is not None:
        pieces = _packed_pieces(q, k, v, *starts, flags)
        _backward_pieces(pieces, grad_out, grad_lse, out, lse, None, dense_dq, dense_dk, dense_dv)
    if need_sink_grad and sink is not None:
        dsink = engine.sink_gradient(sink, grad_out, grad_lse, out, lse)
    return dq, dk, dv, dsink


def _dense_pieces(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, kv_lengths: Tensor | None, flags: Flags
) -> Iterator[_Piece]:
    everything, rows = slice(None), q.shape[2]
    if kv_lengths is None:
        band = Band(flags.left, flags.right, k.shape[2] - rows)
        yield _Piece(Problem(q, k, v, mask, bias, band, flags.scale, flags.softcap), everything, everything, everything)
        return
    for b, length in enumerate(kv_lengths.tolist()):
        keys = slice(0, max(0, min(length, k.shape[2])))
        of_b = slice(b, b + 1)
        mask_b, bias_b = (
            scores_slice(x if x is None or x.shape[0] == 1 else x[of_b], everything, keys) for x in (mask, bias)
        )
        band = Band(flags.left, flags.right, keys.stop - rows)
        problem = Problem(q[of_b], k[of_b, :, keys], v[of_b, :, keys], mask_b, bias_b, band, flags.scale, flags.softcap)
        yield _Piece(problem, of_b, everything, keys)


def _packed_pieces(
    q: Tensor, k: Tensor, v: Tensor, starts_q: list[int], starts_k: list[int], flags: Flags
) -> Iterator[_Piece]:
    for b in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        band = Band(flags.left, flags.right, (keys.stop - keys.start) - (rows.stop - rows.start))
        problem = Problem(q[:, :, rows], k[:, :, keys], v[:, :, keys], None, None, band, flags.scale, flags.softcap)
        yield _Piece(problem, slice(None), rows, keys)


def _forward_pieces(pieces: Iterator[_Piece], out: Tensor, lse: Tensor, sink: Tensor | None) -> None:
    # The sink shrinks the output: before it is rounded to 16 bits, not after.
    exact = out if sink is None else torch.empty_like(out, dtype=lse.dtype)
    for piece in pieces:
        engine.forward(piece.problem, *(x[piece.batch, :, piece.rows] for x in (exact, lse)))
    if sink is not None:
        engine.join_sink(exact, lse, sink)
        out.copy_(exact)


def _backward_pieces(
    pieces: Iterator[_Piece], grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor,
    dbias: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients of q, k and v where the pieces lie; add into dbias if given."""
    for piece in pieces:
        if piece.problem.q.numel() == 0 or piece.problem.k.numel() == 0:
            continue
        rows = (piece.batch, slice(None), piece.rows)
        piece_dbias = dbias
        if dbias is not None:
            piece_dbias = scores_slice(dbias if dbias.shape[0] == 1 else dbias[piece.batch], slice(None), piece.keys)
        found = engine.backward(
            piece.problem, grad_out[rows], None if grad_lse is None else grad_lse[rows], out[rows], lse[rows],
            piece_dbias,
        )  # fmt: skip
        dq[rows] = found[0]
        dk[piece.batch, :, piece.keys] = found[1]
        dv[piece.batch, :, piece.keys] = found[2]


def _contiguous_last(x: Tensor) -> Tensor:
    """Gradients and saved results may come with any strides (the gradient of a sum has only zeros)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads_inside(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x itself if it already is what a gradient should be, else a copy."""
    if x.dtype == dtype and x.transpose(1, 2).is_contiguous():
        return x
    return layout.empty_heads_inside(x.to(dtype)).copy_(x)


def _dtype(x: Tensor | None, otherwise: Tensor) -> torch.dtype:
    return otherwise.dtype if x is None else x.dtype


def _bad_lengths(kv_lengths: Tensor | None, limit: int) -> list[int]:
    if kv_lengths is None:
        return []
    return [b for b, length in enumerate(kv_lengths.tolist()) if not 0 <= length <= limit]


def _packed_offsets(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[list[int], list[int]] | None:
    """The offsets of both sides as lists, None if they make no sense."""
    both = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for starts, total, longest in zip(both, (q.shape[0], k.shape[0]), (max_seqlen_q, max_seqlen_k), strict=True):
        steps = [b - a for a, b in pairwise(starts)]
        if starts[0] != 0 or starts[-1] > total or any(step < 0 or step > longest for step in steps):
            return None
    return both

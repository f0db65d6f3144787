"""Attention on the CPU, dense and packed: the call is cut into problems of one geometry, whose results are put together."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.cpu import attention_engine as engine
from headwise.backends.cpu.attention_band import Band
from headwise.backends.cpu.attention_flash import flash_whole
from headwise.backends.cpu.attention_problem import ALL, Problem, Saved, scores_slice
from headwise.backends.cpu.dropout import of_flags

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Attention, AttentionBackward, Packing


Places: TypeAlias = slice | Tensor  # a range of tokens, or their indices


class _Piece(NamedTuple):
    """What one problem covers: what exists of a batch entry, packed sequences of one shape, or everything."""

    batch: slice = ALL
    rows: Places = ALL
    keys: Places = ALL
    number: int = 0  # of the (first) sequence or batch entry; with `first_key`, what dropout counts from
    first_key: int = 0
    sequences: int = 1  # of a packed batch: they are the batch of the problem

    def of_rows(self, x: Tensor) -> Tensor:
        return _take(x, self.batch, self.rows, self.sequences)

    def of_keys(self, x: Tensor) -> Tensor:
        return _take(x, self.batch, self.keys, self.sequences)


def _take(x: Tensor, batch: slice, places: Places, count: int) -> Tensor:
    """``(B, H, S, ·)``, or without the last dim: the part of a piece. A view, unless its places are given one by one."""
    if isinstance(places, Tensor):
        part = x[0].transpose(0, 1).index_select(0, places).transpose(0, 1)[None]
    else:
        part = x[batch, :, places]
    return part if count == 1 else part[0].unflatten(1, (count, part.shape[2] // count)).transpose(0, 1)


def _put(x: Tensor, batch: slice, places: Places, count: int, part: Tensor) -> None:
    """The reverse of `_take`."""
    if isinstance(places, Tensor):
        x[0].transpose(0, 1).index_copy_(0, places, part.transpose(1, 2).flatten(0, 1).to(x.dtype))
    else:
        _take(x, batch, places, count).copy_(part)


_EVERYTHING = _Piece()
_SHORT = 256  # tokens of a sequence


class _Call(NamedTuple):
    whole: Problem  # a packed batch as a batch of one
    pieces: list[_Piece]
    bad: list[slice]  # batch entries whose lengths make no sense: NaN

    @property
    def is_whole(self) -> bool:
        return len(self.pieces) == 1 and self.pieces[0] is _EVERYTHING

    @property
    def batch_of_sequences(self) -> _Piece | None:
        """The one piece of a packed call whose sequences have one shape and leave no token out."""
        piece = self.pieces[0] if len(self.pieces) == 1 and not self.bad else None
        if piece is None or piece is _EVERYTHING:
            return None
        tokens = slice(0, self.whole.q.shape[2]), slice(0, self.whole.k.shape[2])
        return piece if (piece.rows, piece.keys) == tokens else None

    def problem(self, piece: _Piece) -> Problem:
        q, k, v = piece.of_rows(self.whole.q), piece.of_keys(self.whole.k), piece.of_keys(self.whole.v)
        mask, bias = (self.of_scores(x, piece) for x in (self.whole.mask, self.whole.bias))
        band = self.whole.band._replace(offset=k.shape[2] - q.shape[2])
        dropout = self.whole.dropout
        if dropout is not None:
            dropout = dropout._replace(batch=dropout.batch + piece.number, key=dropout.key + piece.first_key)
        return self.whole._replace(q=q, k=k, v=v, mask=mask, bias=bias, band=band, dropout=dropout)

    @staticmethod
    def of_scores(x: Tensor | None, piece: _Piece) -> Tensor | None:
        """The part of a mask or bias that belongs to a piece. Packed calls have none."""
        if x is None:
            return None
        assert isinstance(piece.rows, slice)
        assert isinstance(piece.keys, slice)
        return scores_slice(x, piece.rows, piece.keys, piece.batch)


def attention_forward(args: Attention) -> tuple[Tensor, Tensor]:
    call, q, packing = _read(args), args.q, args.packing
    if call.is_whole and args.sink is None and not (args.flags.softcap or args.flags.dropout):
        done = flash_whole(call.whole)
        if done is not None:
            return done
    dtype = args.flags.result_dtype(q.dtype)
    batch = None if packing is None or args.sink is not None or args.flags.softcap else call.batch_of_sequences
    if batch is not None and not args.flags.dropout:
        done = flash_whole(call.problem(batch))
        if done is not None:
            return _packed(done[0], dtype), done[1].transpose(0, 1).flatten(1)
    if packing is None:
        out = layout.empty_like_heads(q, args.v.shape[3], dtype)
        lse = q.new_empty(q.shape[:3], dtype=layout.statistics_dtype(q.dtype))
    else:
        out = q.new_empty((*q.shape[:2], args.v.shape[2]), dtype=dtype)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=layout.statistics_dtype(q.dtype))
    if packing is not None or args.q_lengths is not None:  # there may be rows that no piece covers
        out.zero_()
        lse.fill_(-torch.inf)
    dense_out, dense_lse = _dense(out, packing), _dense_rows(lse, packing)
    for piece in call.pieces:
        # Views, or copies that have to be put back.
        parts = piece.of_rows(dense_out), piece.of_rows(dense_lse)
        engine.forward(call.problem(piece), args.sink, *parts)
        if isinstance(piece.rows, Tensor):
            for whole, part in zip((dense_out, dense_lse), parts, strict=True):
                _put(whole, piece.batch, piece.rows, piece.sequences, part)
    for entry in call.bad:
        dense_out[entry], dense_lse[entry] = torch.nan, torch.nan
    return out, lse


def attention_backward(args: AttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    forward, packing, call = args.forward, args.forward.packing, _read(args.forward)
    grad_out, out = (_dense(_contiguous_last(x), packing) for x in (args.grad_out, args.out))
    grad_lse = None if args.grad_lse is None else _dense_rows(args.grad_lse, packing)
    saved = Saved(grad_out, grad_lse, out, _dense_rows(args.lse, packing))
    dbias = _accumulator(call.whole.bias if args.need_bias else None, args.lse.dtype)
    dsink = _accumulator(forward.sink if args.need_sink else None, args.lse.dtype)
    dtype = forward.flags.result_dtype(forward.q.dtype)
    if call.is_whole:
        found = engine.backward(call.whole, forward.sink, saved, dbias, dsink)
        dq, dk, dv = (_heads_inside(x, dtype) for x in found)
    elif packing is not None and (batch := call.batch_of_sequences) is not None:
        of_rows = Saved(*(None if x is None else batch.of_rows(x) for x in saved))  # type: ignore[arg-type]
        found = engine.backward(call.problem(batch), forward.sink, of_rows, None, dsink)
        dq, dk, dv = (_packed(x, dtype) for x in found)
    else:
        dq, dk, dv = (_zeros_of_gradient(x, dtype) for x in (forward.q, forward.k, forward.v))
        grads = [_dense(x, packing) for x in (dq, dk, dv)]
        for piece in call.pieces:
            of_rows = Saved(*(None if x is None else piece.of_rows(x) for x in saved))  # type: ignore[arg-type]
            found = engine.backward(
                call.problem(piece), forward.sink, of_rows, call.of_scores(dbias, piece), dsink
            )  # fmt: skip
            for grad, places, x in zip(grads, (piece.rows, piece.keys, piece.keys), found, strict=True):
                _put(grad, piece.batch, places, piece.sequences, x)
        for entry in call.bad:
            for undefined in (*(grad[entry] for grad in grads), scores_slice(dbias, ALL, ALL, entry), dsink):
                if undefined is not None:
                    undefined.fill_(torch.nan)
    return dq, dk, dv, _like(dbias, forward.bias), _like(dsink, forward.sink)


def _read(args: Attention) -> _Call:
    q, k, v = (_dense(x, args.packing) for x in (args.q, args.k, args.v))
    mask, bias = layout.four_dims(args.mask), layout.four_dims(args.bias)
    band = Band(args.flags.left, args.flags.right, k.shape[2] - q.shape[2])
    dropout = of_flags(args.flags, args.dropout_seed)
    whole = Problem(q, k, v, mask, bias, band, args.flags.scale, args.flags.softcap, dropout)
    if args.packing is not None:
        sequences = _sequences(args.packing, q.shape[2], k.shape[2], may_gather=dropout is None)
        return _Call(whole, [], [ALL]) if sequences is None else _Call(whole, sequences, [])
    if args.q_lengths is None and args.kv_starts is None and args.kv_lengths is None:
        return _Call(whole, [_EVERYTHING], [])
    call = _Call(whole, [], [])
    rows, starts, stops = (
        [default] * q.shape[0] if lengths is None else lengths.tolist()
        for lengths, default in ((args.q_lengths, q.shape[2]), (args.kv_starts, 0), (args.kv_lengths, k.shape[2]))
    )
    for b in range(q.shape[0]):
        entry = slice(b, b + 1)
        if 0 <= rows[b] <= q.shape[2] and 0 <= starts[b] <= k.shape[2] and 0 <= stops[b] <= k.shape[2]:
            first = min(starts[b], stops[b])
            call.pieces.append(_Piece(entry, slice(rows[b]), slice(first, stops[b]), b, first))
        else:
            call.bad.append(entry)
    return call


def _sequences(packing: Packing, rows: int, keys: int, may_gather: bool) -> list[_Piece] | None:
    """Packed sequences, those of one shape together. None if the offsets make no sense.

    Neighbours of one shape are a view. Short ones that lie apart are gathered if ``may_gather``: a call of the kernel costs
    as much as some dozen tokens.
    """
    starts, lengths = [], []
    for offsets, total, longest in ((packing.cu_q, rows, packing.max_q), (packing.cu_k, keys, packing.max_k)):
        bounds = offsets.tolist()
        starts.append(bounds[:-1])
        lengths.append([b - a for a, b in pairwise(bounds)])
        if bounds[0] != 0 or bounds[-1] > total or any(not 0 <= n <= longest for n in lengths[-1]):
            return None
    members: dict[tuple[int, int], list[int]] = {}
    pieces = []
    number = 0
    for shape, run in groupby(zip(*lengths, strict=True)):
        count = sum(1 for _ in run)
        if may_gather and 0 < max(shape) <= _SHORT:
            members.setdefault(shape, []).extend(range(number, number + count))
        elif max(shape) > 0:
            pieces.append(_neighbours(starts, shape, number, count))
        number += count
    for shape, numbers in members.items():
        if numbers[-1] - numbers[0] + 1 == len(numbers):
            pieces.append(_neighbours(starts, shape, numbers[0], len(numbers)))
        else:
            places = [
                (torch.tensor([start[i] for i in numbers])[:, None] + torch.arange(n)).flatten()
                for start, n in zip(starts, shape, strict=True)
            ]
            pieces.append(_Piece(ALL, places[0], places[1], sequences=len(numbers)))
    return pieces


def _neighbours(starts: list[list[int]], shape: tuple[int, int], number: int, count: int) -> _Piece:
    of_q, of_k = (slice(start[number], start[number] + count * n) for start, n in zip(starts, shape, strict=True))
    return _Piece(ALL, of_q, of_k, number, sequences=count)


def _dense(x: Tensor, packing: Packing | None) -> Tensor:
    """Packed ``(T, H, D)`` as a view ``(1, H, T, D)``."""
    return x if packing is None else x.transpose(0, 1)[None]


def _packed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``(B, H, S, D)`` of sequences of one length as ``(T, H, D)``: a view, if its heads are inside already."""
    return x.transpose(1, 2).flatten(0, 1).to(dtype).contiguous()


def _dense_rows(lse: Tensor, packing: Packing | None) -> Tensor:
    return lse if packing is None else lse[None]


def _contiguous_last(x: Tensor) -> Tensor:
    """Gradients and saved results may have any strides: the gradient of a sum has only zeros."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _accumulator(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else torch.zeros(x.shape, dtype=dtype)


def _zeros_of_gradient(x: Tensor, dtype: torch.dtype) -> Tensor:
    return layout.empty_heads_inside(x, dtype).zero_() if x.dim() == 4 else torch.zeros(x.shape, dtype=dtype)


def _heads_inside(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, copied if its dtype or layout is not that of a gradient."""
    if x.dtype == dtype and x.transpose(1, 2).is_contiguous():
        return x
    return layout.empty_heads_inside(x.to(dtype)).copy_(x)


def _like(grad: Tensor | None, x: Tensor | None) -> Tensor | None:
    return None if grad is None or x is None else grad.to(x.dtype).reshape(x.shape)

"""Attention with heads exchanged for sequence: an all-to-all before it and one after it (Jacobs et al., "DeepSpeed Ulysses:
System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models", 2023).

Between the two a rank has the whole sequence of some heads, so it is one ordinary call of `attention` or of
`attention_varlen`. Rank r computes query heads ``r · Hq // ranks`` to ``(r + 1) · Hq // ranks`` and gets the key heads that
those read. A key head that is read on several ranks is sent to each of them (fewer key heads than ranks), and its gradients
are summed at home in float32, in the order of the ranks: they were not rounded before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise import layout as memory
from headwise.distributed.groups import Peers, exchange, same_backward
from headwise.distributed.ring import Call
from headwise.distributed.shards import Parts, joined, place, taken
from headwise.ops.attention import attention, attention_varlen, elsewhere, unrounded


class Heads(NamedTuple):
    first: int
    past: int


def heads_of(rank: int, ranks: int, q_heads: int, k_heads: int) -> tuple[Heads, Heads]:
    """The query heads of a rank, and the key heads that they read."""
    group, first, past = q_heads // k_heads, rank * q_heads // ranks, (rank + 1) * q_heads // ranks
    return Heads(first, past), Heads(first // group, -(-past // group) if past > first else first // group)


def even_groups(q: Heads, k: Heads, group: int) -> Iterator[tuple[slice, slice]]:
    """Local query and key heads in runs of which each has as many query heads for each key head: at most three."""
    first, key = q.first, k.first
    while first < q.past:
        if first % group == 0 and q.past - first >= group:
            past = q.past // group * group  # whole groups
        else:
            past = min(q.past, (first // group + 1) * group)  # a part of one
        last = -(-past // group)
        yield slice(first - q.first, past - q.first), slice(key - k.first, last - k.first)
        first, key = past, past // group


def attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sink: Tensor | None,
    lengths: dict[str, Tensor], cu_seqlens: Tensor | None, return_lse: bool, sharded: dict[str, bool],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``(out, lse)`` of this rank's queries. sharded: whether the rows of mask and bias are those of this rank."""
    peers, plan = call.peers, call.plan
    q_heads, k_heads = q.shape[1], k.shape[1]
    whose = [heads_of(rank, peers.ranks, q_heads, k_heads) for rank in range(peers.ranks)]
    mine, keys = whose[peers.rank]
    there = [(of_k, of_k, of_q) for of_q, of_k in whose]
    dtype = q.dtype
    k, v, q = _Exchange.apply(call, 0, there, (plan.of_k, plan.of_k, plan.of_q), True, k, v, q)
    if sink is not None and k.dtype != dtype:
        sink = sink.to(k.dtype)
    scores: dict[str, Tensor] = {}
    for name, x in (("mask", memory.four_dims(mask)), ("bias", memory.four_dims(bias))):
        if x is not None:
            if name == "bias":  # its gradient is summed over ranks
                x = x.to(memory.statistics_dtype(x.dtype))
            whole = _Rows.apply(x, call) if sharded[name] else x
            scores[name] = whole[:, mine.first : mine.past] if whole.shape[1] > 1 else whole
    own_sink = None if sink is None else sink[mine.first : mine.past]
    flags = {**call.options.flags, "window": (plan.left, plan.right)}
    outs, lses = [], []
    for of_q, of_k in even_groups(mine, keys, q_heads // k_heads):
        part: dict[str, Any] = {name: x[:, of_q] if x.shape[1] > 1 else x for name, x in scores.items()}
        part["sink"] = None if own_sink is None else own_sink[of_q]
        if call.options.dropping is not None:
            part |= call.options.dropping.at(q.device, 0, mine.first + of_q.start)
        out, lse = _attended(q[:, of_q], k[:, of_k], v[:, of_k], cu_seqlens, **part, **lengths, **flags)
        outs.append(out)
        lses.append(lse)
    if outs:
        out = torch.cat(outs, 1)
    else:  # no head is this rank's: zeros that depend on all inputs, so that the backward takes part in every exchange
        empty = sum(
            x[..., :0].sum()
            for x in (k, v, q, *scores.values(), *([] if own_sink is None else [own_sink]))
            if x.is_floating_point()
        )
        out = q.new_zeros(*q.shape[:3], v.shape[3]) + empty
    out = out.to(dtype)
    back = [of_q for of_q, _ in whose]
    if not return_lse:
        (found,) = _Exchange.apply(call, 1, [(of_q,) for of_q in back], (plan.of_q,), False, out)
        return found, None
    lse = torch.cat(lses, 1) if lses else out[..., 0].to(memory.statistics_dtype(out.dtype))
    there = [(of_q, of_q) for of_q in back]  # type: ignore[misc]
    lse, found = _Exchange.apply(call, 1, there, (plan.of_q, plan.of_q), False, lse[..., None], out)
    return found, lse[..., 0]


def _attended(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, **flags: Any) -> tuple[Tensor, Tensor]:
    if cu_seqlens is None:
        return _called(q, k, v, None, 0, **flags)
    longest = int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0
    outs, lses = [], []
    for entry in zip(q, k, v, strict=True):
        rows, keys, values = (x.transpose(0, 1) for x in entry)  # (S, H, D)
        out, lse = _called(rows, keys, values, cu_seqlens, longest, **flags)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def _called(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, longest: int, **flags: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` or `attention_varlen`."""
    if k.dtype != q.dtype:
        tensors = {name: x for name, x in flags.items() if isinstance(x, Tensor)}
        rest = {name: x for name, x in flags.items() if name not in tensors}
        out, lse = _Unrounded.apply(rest, tuple(tensors), longest, cu_seqlens, q, k, v, *tensors.values())
        return out, lse
    if "seed" in flags:
        if cu_seqlens is None:
            return elsewhere.attention(q, k, v, **flags)
        return elsewhere.attention_varlen(q, k, v, cu_seqlens, longest, **flags)
    if cu_seqlens is None:
        return attention(q, k, v, return_lse=True, **flags)
    return attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, return_lse=True, **flags)


class _Unrounded(torch.autograd.Function):
    """`_called` of 16-bit k and v that are given as float32: autograd gives a gradient the dtype of its tensor, and those of
    k and v, which are summed over ranks, stay float32.
    """

    @staticmethod
    def forward(
        ctx: Any, flags: dict[str, Any], names: tuple[str, ...], longest: int, cu_seqlens: Tensor | None, q: Tensor,
        k: Tensor, v: Tensor, *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        k, v = k.to(q.dtype), v.to(q.dtype)
        out, lse = _called(q, k, v, cu_seqlens, longest, **flags, **dict(zip(names, tensors, strict=True)))
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, *tensors)
        ctx.about = flags, names, longest
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens, *tensors = ctx.saved_tensors
        flags, names, longest = ctx.about
        needed = [name for name, need in zip(names, ctx.needs_input_grad[7:], strict=True) if need]
        given: dict[str, Any] = {**flags, **dict(zip(names, tensors, strict=True)), "grad_lse": grad_lse}
        given |= {f"need_{name}_grad": True for name in needed}
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        if cu_seqlens is None:
            found = unrounded.attention_backward(grad_out, q, k, v, out, lse, **given)
        else:
            found = unrounded.attention_varlen_backward(grad_out, q, k, v, out, lse, cu_seqlens, longest, **given)
        dq, dk, dv, *others = found
        of = dict(zip(sorted(needed), others, strict=True))  # that of bias comes before that of sink
        return None, None, None, None, dq.to(q.dtype), dk, dv, *(of.get(name) for name in names)


class _Exchange(torch.autograd.Function):
    """Shards of all heads ``(B, H, S_local, D)`` to the whole sequence of some heads, or back, in one message per rank."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, turn: int, whose: Sequence[tuple[Heads, ...]], parts: tuple[Parts, ...], to_heads: bool,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.about = call, turn, whose, parts, to_heads
        ctx.totals = [x.shape[1] for x in xs]
        ctx.dtypes = [x.dtype for x in xs]
        run = _to_heads if to_heads else _to_shards
        found = run(call.peers, whose, parts, xs, None)
        if not to_heads:
            return tuple(found)
        # Gradients of a head that several ranks have are summed: they come back in float32, as these tensors are then.
        several = (_on_several(whose, n, total) for n, total in enumerate(ctx.totals))
        return tuple(x.to(memory.statistics_dtype(x.dtype)) if on else x for x, on in zip(found, several, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, turn, whose, parts, to_heads = ctx.about
        same_backward(call.peers, call.number, turn)
        run = _to_shards if to_heads else _to_heads
        found = run(call.peers, whose, parts, grads, ctx.totals if to_heads else None)
        return None, None, None, None, None, *(x.to(dtype) for x, dtype in zip(found, ctx.dtypes, strict=True))


def _on_several(whose: Sequence[tuple[Heads, ...]], n: int, total: int) -> bool:
    return sum(heads[n].past - heads[n].first for heads in whose) > total


def _to_heads(
    peers: Peers, whose: Sequence[tuple[Heads, ...]], parts: tuple[Parts, ...], xs: Sequence[Tensor], _: Any
) -> list[Tensor]:
    rank = peers.rank
    sent = [_bytes([x[:, a:b] for x, (a, b) in zip(xs, heads, strict=True)]) for heads in whose]
    shapes = [
        [
            (x.shape[0], b - a, _length(part[r]), x.shape[3])
            for x, (a, b), part in zip(xs, whose[rank], parts, strict=True)
        ]
        for r in range(peers.ranks)
    ]
    received = _received(peers, sent, shapes, xs, "the exchange of sequence for heads")
    found = [
        x.new_empty(x.shape[0], b - a, sum(map(_length, part)), x.shape[3])
        for x, (a, b), part in zip(xs, whose[rank], parts, strict=True)
    ]
    for r, pieces in enumerate(received):
        for whole, rows, part in zip(found, pieces, parts, strict=True):
            place(whole, rows, part[r], 2)
    return found


def _to_shards(
    peers: Peers, whose: Sequence[tuple[Heads, ...]], parts: tuple[Parts, ...], xs: Sequence[Tensor],
    totals: Sequence[int] | None,
) -> list[Tensor]:  # fmt: skip
    """totals: heads in all, where a head may be on several ranks: those are summed, in float32."""
    rank = peers.rank
    sent = [_bytes([taken(x, part[r], 2) for x, part in zip(xs, parts, strict=True)]) for r in range(peers.ranks)]
    shapes = [
        [(x.shape[0], b - a, _length(part[rank]), x.shape[3]) for x, (a, b), part in zip(xs, heads, parts, strict=True)]
        for heads in whose
    ]
    received = _received(peers, sent, shapes, xs, "the exchange of heads for sequence")
    found = []
    for n, (x, part) in enumerate(zip(xs, parts, strict=True)):
        total = max(heads[n].past for heads in whose) if totals is None else totals[n]
        once = not _on_several(whose, n, total)
        dtype = x.dtype if once else memory.statistics_dtype(x.dtype)
        shard = x.new_zeros(x.shape[0], total, _length(part[rank]), x.shape[3], dtype=dtype)
        for heads, pieces in zip(whose, received, strict=True):
            shard[:, heads[n].first : heads[n].past] += pieces[n]
        found.append(shard.to(x.dtype))
    return found


def _bytes(xs: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in xs])


def _received(
    peers: Peers,
    sent: Sequence[Tensor],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    like: Sequence[Tensor],
    phase: str,
) -> list[list[Tensor]]:
    """From every rank, tensors of these shapes and of the dtypes of ``like``: wider ones first, so that all are aligned."""
    sizes = [[torch.Size(shape).numel() * x.element_size() for shape, x in zip(of, like, strict=True)] for of in shapes]
    messages = exchange(peers, sent, [sum(of) for of in sizes], phase)
    return [
        [
            part.view(x.dtype).view(shape)
            for part, x, shape in zip(message.split(size), like, of, strict=True)
        ]
        for message, size, of in zip(messages, sizes, shapes, strict=True)
    ]  # fmt: skip


def _length(part: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in part)


class _Rows(torch.autograd.Function):
    """The rows of all ranks of a mask or bias ``(B or 1, Hq or 1, S_local, Sk or 1)``; of the gradient each gets its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call) -> Tensor:
        ctx.call = call
        seen = x.view(torch.uint8) if x.dtype == torch.bool else x
        return joined(call.peers, seen, call.plan.of_q, 2).view(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        peers, of_q = ctx.call.peers, ctx.call.plan.of_q
        same_backward(peers, ctx.call.number, 2)
        sums = grad.to(memory.statistics_dtype(grad.dtype))
        shares = [taken(sums, part, 2).contiguous() for part in of_q]
        sizes = [shares[peers.rank].numel() * sums.element_size()] * peers.ranks
        sent = [share.view(-1).view(torch.uint8) for share in shares]
        total = torch.zeros_like(shares[peers.rank])
        for part in exchange(peers, sent, sizes, "the sum of the gradient of the bias"):
            total += part.view(sums.dtype).view_as(total)
        return total.to(grad.dtype), None

"""Attention with the keys brought to the queries, block by block or all at once, forward and backward.

ring    the blocks of keys and values go round, one rank further at each step, the next on its way while one is computed;
        partial results are merged by their log-sum-exp (Liu et al., "Ring Attention with Blockwise Transformers", 2023).
        Where that sends less, under windows and documents, each rank gets what it sees straight from its owner (`routes`).
gather  every rank gets all keys and values at once: fewer, larger messages, more memory, and nothing to merge.

In the backward the gradients of a block travel with it, in float32, and go home from the last rank that sees it, or straight
home from every rank that sees some of it; under gather they are summed by a reduce-scatter. What is summed was not rounded
before: rounded parts may cancel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise import layout as memory
from headwise.distributed.blocks import Gradients, Options, Partial, Plan, Scores, pieces
from headwise.distributed.groups import Exchange, Peers, connect, gather, same_backward, sum_parts
from headwise.distributed.routes import Segments, columns_of, count, route
from headwise.distributed.shards import Segment, place, taken


class Call(NamedTuple):
    peers: Peers
    plan: Plan
    options: Options
    method: str
    number: int  # of the call, the same on every rank

    @property
    def merges(self) -> bool:
        return self.method == "ring" and self.plan.ranks > 1

    @property
    def key_lengths(self) -> list[int]:
        """Of the shard of every rank."""
        return [sum(stop - start for start, stop in part) for part in self.plan.of_k]


def attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of this rank's queries."""
    out, lse = _Attention.apply(q, k, v, memory.four_dims(mask), memory.four_dims(bias), sink, call)
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sink: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        partial = Partial(call.plan, q, v.shape[3], sink, Scores(mask, bias), call.options, call.merges)
        queries = call.plan.of_q[call.plan.rank]
        for keys, block in _blocks(call, k, v):
            partial.add(pieces(call.plan, queries, keys), *_parted(block, k, v))
        out = memory.empty_like_heads(q, v.shape[3]).copy_(partial.out)
        ctx.save_for_backward(q, k, v, mask, bias, sink, out, partial.lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, partial.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, mask, bias, sink, out, lse = ctx.saved_tensors
        call = ctx.call
        same_backward(call.peers, call.number)
        gradients = Gradients(
            q, out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse, Scores(mask, bias),
            call.options, ctx.needs_input_grad[4], call.plan.ranks > 1,
        )  # fmt: skip
        if call.method == "ring":
            run = _direct_backward if route(call.plan).direct else _ring_backward
        else:
            run = _gather_backward
        dk, dv = _parted(run(call, k, v, gradients), k, v)
        dsink = gradients.of_sink(sink) if sink is not None and ctx.needs_input_grad[5] else None
        dbias = None if gradients.dbias is None else gradients.dbias.to(bias.dtype)
        return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, dbias, dsink, None


# A block is k and v (or their gradients) as one flat tensor: one message.


def _joined(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.detach().reshape(-1), v.detach().reshape(-1)])


def _parted(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v of a block of any length; the given ones say the other dimensions."""
    batch, heads, _, head_dim = k.shape
    value_dim = v.shape[3]
    length = block.numel() // max(batch * heads * (head_dim + value_dim), 1)
    sizes = [batch * heads * length * dim for dim in (head_dim, value_dim)]
    of_k, of_v = block.split(sizes)
    return of_k.view(batch, heads, length, head_dim), of_v.view(batch, heads, length, value_dim)


def _of_key(k: Tensor, v: Tensor) -> int:
    """Elements of one position."""
    return k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])


def _block_sizes(call: Call, k: Tensor, v: Tensor) -> list[int]:
    return [_of_key(k, v) * length for length in call.key_lengths]


def _blocks(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[tuple[Segment, ...], Tensor]]:
    """Blocks of keys and where they lie, every key in one of them."""
    if not call.merges:
        yield (Segment(0, call.plan.keys),), _gathered(call, k, v)
        return
    connect(call.peers, k.device)
    arriving = _direct if route(call.plan).direct else _ring
    for _, keys, block in arriving(call, k, v, "forward"):
        yield keys, block


def _gathered(call: Call, k: Tensor, v: Tensor) -> Tensor:
    """All keys and values in the order of the sequence."""
    parts = gather(call.peers, _joined(k, v), _block_sizes(call, k, v), "the gather of keys and values")
    whole = k.new_empty(k.shape[0] * k.shape[1] * call.plan.keys * (k.shape[3] + v.shape[3]))
    for owner, part in enumerate(parts):
        for source, target in zip(_parted(part, k, v), _parted(whole, k, v), strict=True):
            place(target, source, call.plan.of_k[owner], 2)
    return whole


def _ring(call: Call, k: Tensor, v: Tensor, direction: str) -> Iterator[tuple[int, Segments, Tensor]]:
    """The owner, the keys and the block of every step; a block sets out for the next rank before it is given to the caller.

    A block that nobody from here on sees does not arrive: it is empty, and `pieces` has nothing to do with it.
    """
    rank, ranks, far, sizes = call.plan.rank, call.plan.ranks, route(call.plan).far, _block_sizes(call, k, v)
    block = _joined(k, v)
    for step in range(ranks):
        owner, coming = (rank - step) % ranks, (rank - step - 1) % ranks
        exchange = Exchange(call.peers, f"step {step + 1} of {ranks} of the ring, {direction}")
        following = block.new_empty(0)
        if far[owner] > step:
            exchange.send(block, rank + 1)
        if far[coming] > step:
            following = exchange.receive(block, sizes[coming], rank - 1)
        exchange.start()
        yield owner, call.plan.of_k[owner], block
        exchange.wait()
        block = following


def _direct(call: Call, k: Tensor, v: Tensor, direction: str) -> Iterator[tuple[int, Segments, Tensor]]:
    """As `_ring`, but at step s a rank gets from the rank that is s behind it what it sees of its keys, and no other."""
    rank, ranks, of_key, way = call.plan.rank, call.plan.ranks, _of_key(k, v), route(call.plan)
    keys, block = call.plan.of_k[rank], _joined(k, v)
    for step in range(ranks):
        exchange = Exchange(call.peers, f"step {step + 1} of {ranks} of direct sends, {direction}")
        following, ahead, behind = block.new_empty(0), (rank + step + 1) % ranks, (rank - step - 1) % ranks
        if ahead != rank:
            seen = columns_of(call.plan.of_k[rank], way.seen[ahead][rank])
            if seen:
                exchange.send(_joined(taken(k, seen, 2), taken(v, seen, 2)), ahead)
            following = exchange.receive(block, of_key * way.sent(behind, rank), behind)
        exchange.start()
        yield (rank - step) % ranks, keys, block
        exchange.wait()
        keys, block = way.seen[rank][behind], following


def _ring_backward(call: Call, k: Tensor, v: Tensor, gradients: Gradients) -> Tensor:
    """The gradient of this rank's block. Each rank adds its term to what comes with a block and passes the sum on."""
    rank, ranks, far, sizes = call.plan.rank, call.plan.ranks, route(call.plan).far, _block_sizes(call, k, v)
    queries, nothing = call.plan.of_q[rank], gradients.dq.new_zeros(0)
    exchange, arriving, home = Exchange(call.peers, ""), nothing, nothing
    for step, (owner, keys, block) in enumerate(_ring(call, k, v, "backward")):
        here = far[owner] >= step
        own = nothing.new_zeros(sizes[owner] if here else 0)
        todo = pieces(call.plan, queries, keys)
        if here:
            gradients.add(todo, *_parted(block, k, v), *_parted(own, k, v))
        exchange.wait()
        total = own.add_(arriving) if here and step else own
        # Sums on their way and sums that are done leave in one batch, in which every rank takes part at every step: a send
        # never waits for a receive that comes after a later step.
        exchange = Exchange(call.peers, f"step {step + 1} of {ranks} of the ring of gradients")
        arriving, coming = nothing, (rank - step - 1) % ranks
        if far[owner] > step:
            exchange.send(total, rank + 1)
        elif here and step:
            exchange.send(total, owner)
        if far[coming] > step:
            arriving = exchange.receive(nothing, sizes[coming], rank - 1)
        if far[rank] == step:
            home = exchange.receive(nothing, sizes[rank], rank + step) if step else total
        exchange.start()
    exchange.wait()
    return home


def _direct_backward(call: Call, k: Tensor, v: Tensor, gradients: Gradients) -> Tensor:
    """Terms go straight to the owner of the keys, who adds them in the order of the steps."""
    rank, ranks, of_key, way = call.plan.rank, call.plan.ranks, _of_key(k, v), route(call.plan)
    mine, queries = call.plan.of_k[rank], call.plan.of_q[rank]
    home = gradients.dq.new_zeros(of_key * count(mine))
    exchange, arriving, columns = Exchange(call.peers, ""), home[:0], mine[:0]
    for step, (owner, keys, block) in enumerate(_direct(call, k, v, "backward")):
        own = home.new_zeros(block.numel()) if step else home
        gradients.add(pieces(call.plan, queries, keys), *_parted(block, k, v), *_parted(own, k, v))
        exchange.wait()
        _add_columns(_parted(home, k, v), _parted(arriving, k, v), columns)
        exchange = Exchange(call.peers, f"step {step + 1} of {ranks} of direct sends of gradients")
        if step:
            exchange.send(own, owner)
            sender = (rank + step) % ranks
            columns = columns_of(mine, way.seen[sender][rank])
            arriving = exchange.receive(home, of_key * count(columns), sender)
        exchange.start()
    exchange.wait()
    _add_columns(_parted(home, k, v), _parted(arriving, k, v), columns)
    return home


def _add_columns(totals: tuple[Tensor, ...], terms: tuple[Tensor, ...], columns: Segments) -> None:
    for total, term in zip(totals, terms, strict=True):
        column = 0
        for start, stop in columns:
            total[:, :, start:stop] += term[:, :, column : column + stop - start]
            column += stop - start


def _gather_backward(call: Call, k: Tensor, v: Tensor, gradients: Gradients) -> Tensor:
    whole, sizes = _gathered(call, k, v), _block_sizes(call, k, v)
    grads = gradients.dq.new_zeros(whole.numel())
    queries, dk, dv = call.plan.of_q[call.plan.rank], *_parted(grads, k, v)
    todo = pieces(call.plan, queries, (Segment(0, call.plan.keys),))
    gradients.add(todo, *_parted(whole, k, v), dk, dv)
    blocks = [_joined(*(taken(x, part, 2) for x in (dk, dv))) for part in call.plan.of_k]
    return sum_parts(call.peers, torch.cat(blocks), sizes, "the sum of the gradients of keys and values")

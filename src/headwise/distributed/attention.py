"""Attention over a sequence that is sharded over ranks, forward and backward.

ring    the blocks of keys and values go round, one rank further at each step, the next on its way while one is computed;
        partial results are merged by their log-sum-exp (Liu et al., "Ring Attention with Blockwise Transformers", 2023).
        A block goes no further than the last rank that sees any of it.
gather  every rank gets all keys and values at once: fewer, larger messages, more memory.

In the backward the gradients of a block travel with it, in float32, and go home from the last rank that sees it; under
gather they are summed by a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise import layout as memory
from headwise.distributed.blocks import Gradients, Options, Partial, Plan, pieces, reach
from headwise.distributed.groups import (
    Description,
    Exchange,
    Group,
    Peers,
    agree,
    flag_values,
    gather,
    peers_of,
    sum_parts,
)
from headwise.distributed.shards import Segment, check_layout, total_length
from headwise.ops import _checks
from headwise.ops.attention import _arguments
from headwise.ops.attention._arguments import Window
from headwise.ops.attention.dense import LETTERS

METHODS = ("ring", "gather")
OP = "context_parallel_attention"


def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group, *, method: str = "ring", layout: str = "zigzag",
    causal: bool = False, window: Window = None, mask: Tensor | None = None, bias: Tensor | None = None,
    kv_lengths: Tensor | None = None, q_lengths: Tensor | None = None, kv_starts: Tensor | None = None,
    scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None, dropout: float = 0,
    dropout_seed: int | Tensor | None = None, deterministic: bool = True, return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` over the whole sequence, of which q, k and v are this rank's shards: this rank's rows of the result.

    group          a process group, or a DeviceMesh of one dimension
    method         "ring": blocks of keys go round, two of them in memory; "gather": all keys on every rank
    layout         how q, k and v are sharded, as in `shard`: "zigzag" or "contiguous"
    other flags    as in `attention`, positions being those of the whole sequence; mask, bias, kv_lengths, q_lengths,
                   kv_starts and dropout are not there yet

    Every rank of the group calls it, and calls backward, in the same order. Arguments that differ between ranks are refused
    on all of them. The gradients of k and v come from the queries of all ranks; that of sink, as of every weight that all
    ranks hold, from the rank's own queries: sum it over ranks. Differentiable once.
    """
    peers = peers_of(OP, group)
    missing = {
        "mask": mask, "bias": bias, "kv_lengths": kv_lengths, "q_lengths": q_lengths, "kv_starts": kv_starts,
        "dropout": dropout or None, "dropout_seed": dropout_seed,
    }  # fmt: skip
    flags: list[_arguments.Flags] = []

    def check() -> Description:
        for name, value in missing.items():
            if value is not None:
                raise NotImplementedError(f"{OP}: {name} is given, and it is not there yet across ranks")
        flags.append(_check(q, k, v, sink, method, layout, return_lse, causal, window, scale, softcap, deterministic))
        return _describe(q, k, v, sink, flags[0], method, layout, return_lse, backend)

    lengths = agree(OP, peers, check)
    of_q, of_k = (list(of) for of in zip(*lengths, strict=True))
    plan = Plan(
        peers.rank, peers.ranks, total_length(OP, "q", of_q, layout), total_length(OP, "k and v", of_k, layout), layout,
        flags[0].left, flags[0].right,
    )  # fmt: skip
    options = Options(flags[0].scale, flags[0].softcap or None, flags[0].deterministic, backend)
    out, lse = _Attention.apply(q, k, v, sink, _Call(peers, plan, options, method, tuple(of_k)))
    return (out, lse) if return_lse else out


class _Call(NamedTuple):
    peers: Peers
    plan: Plan
    options: Options
    method: str
    key_lengths: tuple[int, ...]  # of the shard of every rank


def _check(
    q: Any, k: Any, v: Any, sink: Any, method: Any, layout: Any, return_lse: Any, causal: bool, window: Window,
    scale: float | None, softcap: float | None, deterministic: bool,
) -> _arguments.Flags:  # fmt: skip
    _arguments.qkv(OP, q, k, v, 4, LETTERS)
    batch, heads, _, head_dim = q.shape
    _checks.shape(OP, "k", k, (batch, k.shape[1], k.shape[2], head_dim), "(B, Hk, Sk, D)")
    _checks.shape(OP, "v", v, (batch, k.shape[1], k.shape[2], v.shape[3]), "(B, Hk, Sk, Dv)")
    _arguments.grouped_heads(OP, heads, k.shape[1])
    _arguments.per_head(OP, sink, q, heads)
    _checks.boolean(OP, "return_lse", return_lse)
    check_layout(OP, layout)
    if method not in METHODS:
        raise ValueError(f"{OP}: method is {method!r}; it needs to be one of {', '.join(map(repr, METHODS))}")
    return _arguments.flags(OP, q, causal, window, scale, softcap, deterministic)


def _describe(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, flags: _arguments.Flags, method: str, layout: str,
    return_lse: bool, backend: str | None,
) -> Description:  # fmt: skip
    differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sink))
    same = {
        "B, Hq, D": (*q.shape[:2], q.shape[3]), "Hk, Dv": (k.shape[1], v.shape[3]), "dtype": str(q.dtype),
        "device": q.device.type, "sink": None if sink is None else str(sink.dtype), "method": method, "layout": layout,
        "return_lse": return_lse, "backend": backend, "that a gradient is needed": differentiated, **flag_values(flags),
    }  # fmt: skip
    return Description(same, (q.shape[2], k.shape[2]))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: _Call) -> tuple[Tensor, Tensor]:
        partial = Partial(q, v.shape[3], sink)
        queries = call.plan.query_segments(call.plan.rank)
        for keys, block in _blocks(call, k, v):
            partial.add(pieces(call.plan, queries, keys), *_parted(block, k, v), call.options)
        out = memory.empty_like_heads(q, v.shape[3]).copy_(partial.out)
        ctx.save_for_backward(q, k, v, sink, out, partial.lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, partial.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        gradients = Gradients(q, out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse)
        run = _ring_backward if ctx.call.method == "ring" else _gather_backward
        dk, dv = _parted(run(ctx.call, k, v, gradients), k, v)
        dsink = gradients.of_sink(sink) if sink is not None and ctx.needs_input_grad[3] else None
        return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None


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


def _block_sizes(call: _Call, k: Tensor, v: Tensor) -> list[int]:
    return [k.shape[0] * k.shape[1] * length * (k.shape[3] + v.shape[3]) for length in call.key_lengths]


def _blocks(call: _Call, k: Tensor, v: Tensor) -> Iterator[tuple[tuple[Segment, ...], Tensor]]:
    """Blocks of keys and where they lie, every key in one of them."""
    if call.method == "gather":
        yield (Segment(0, call.plan.keys),), _gathered(call, k, v)
        return
    for owner, block in _ring(call, k, v):
        yield call.plan.key_segments(owner), block


def _gathered(call: _Call, k: Tensor, v: Tensor) -> Tensor:
    """All keys and values in the order of the sequence."""
    parts = gather(call.peers, _joined(k, v), _block_sizes(call, k, v))
    whole = k.new_empty(k.shape[0] * k.shape[1] * call.plan.keys * (k.shape[3] + v.shape[3]))
    for owner, part in enumerate(parts):
        for source, target in zip(_parted(part, k, v), _parted(whole, k, v), strict=True):
            row = 0
            for start, stop in call.plan.key_segments(owner):
                target[:, :, start:stop] = source[:, :, row : row + stop - start]
                row += stop - start
    return whole


def _ring(call: _Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The owner and the block of every step; a block sets out for the next rank before it is given to the caller.

    A block that nobody from here on sees does not arrive: it is empty, and `pieces` has nothing to do with it.
    """
    (rank, ranks), far, sizes = call.plan[:2], reach(call.plan), _block_sizes(call, k, v)
    block = _joined(k, v)
    for step in range(ranks):
        owner, coming = (rank - step) % ranks, (rank - step - 1) % ranks
        exchange, following = Exchange(call.peers), block.new_empty(0)
        if far[owner] > step:
            exchange.send(block, rank + 1)
        if far[coming] > step:
            following = exchange.receive(block, sizes[coming], rank - 1)
        exchange.start()
        yield owner, block
        exchange.wait()
        block = following


def _ring_backward(call: _Call, k: Tensor, v: Tensor, gradients: Gradients) -> Tensor:
    """The gradient of this rank's block. Each rank adds its term to what comes with a block and passes the sum on."""
    (rank, ranks), far, sizes = call.plan[:2], reach(call.plan), _block_sizes(call, k, v)
    queries, nothing = call.plan.query_segments(rank), gradients.dq.new_zeros(0)
    exchange, arriving, home = Exchange(call.peers), nothing, nothing
    for step, (owner, block) in enumerate(_ring(call, k, v)):
        here = far[owner] >= step
        own = nothing.new_zeros(sizes[owner] if here else 0)
        todo = pieces(call.plan, queries, call.plan.key_segments(owner))
        if here:
            gradients.add(todo, *_parted(block, k, v), *_parted(own, k, v), call.options)
        exchange.wait()
        total = arriving + own if here and step else own
        # Sums on their way and sums that are done leave in one batch, in which every rank takes part at every step: a send
        # never waits for a receive that comes after a later step.
        exchange, arriving, coming = Exchange(call.peers), nothing, (rank - step - 1) % ranks
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


def _gather_backward(call: _Call, k: Tensor, v: Tensor, gradients: Gradients) -> Tensor:
    whole, sizes = _gathered(call, k, v), _block_sizes(call, k, v)
    grads = gradients.dq.new_zeros(whole.numel())
    queries, dk, dv = call.plan.query_segments(call.plan.rank), *_parted(grads, k, v)
    todo = pieces(call.plan, queries, (Segment(0, call.plan.keys),))
    gradients.add(todo, *_parted(whole, k, v), dk, dv, call.options)
    blocks = []
    for owner in range(call.plan.ranks):
        held = [slice(start, stop) for start, stop in call.plan.key_segments(owner)]
        blocks.append(_joined(*(torch.cat([x[:, :, part] for part in held], 2) for x in (dk, dv))))
    return sum_parts(call.peers, torch.cat(blocks), sizes)

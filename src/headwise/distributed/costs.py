"""What context parallelism costs, on paper: bytes, messages and arithmetic of each method, and the time they take.

Bytes are those that a rank sends, of one call of `context_parallel_attention`, forward and (with a gradient) backward. The
model counts what has to be sent, from the same plan that the call follows: a ring whose blocks go only as far as they are
seen, or parts that go straight to the ranks that see them (`routes`), key heads that several ranks read. Tests compare it
with the bytes that the sockets of gloo processes have sent.

Time: a rank computes at ``flops``; its messages take ``latency`` each and ``bytes / bandwidth``. Sends of the ring overlap
with the arithmetic of the same step; a gather and an all-to-all come before and after it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from headwise import layout as memory
from headwise.distributed.blocks import Plan, pieces
from headwise.distributed.routes import Route, count, route
from headwise.distributed.shards import Segment
from headwise.distributed.ulysses import heads_of

METHODS = ("ring", "gather", "ulysses")
DECODE = ("gather", "scatter")  # how partial results of decoding are merged
BACKWARD = 2.5  # products of the backward over those of the forward
# How much slower a GPU with Hopper kernels computes unrounded results, which those do not write. A guess from how both kinds
# of kernels compare with FlashAttention-2 (docs/triton-attention.md); on other GPUs there is no difference.
UNROUNDED = 1.6


class Machine(NamedTuple):
    """Of one rank, as seen by the others."""

    flops: float  # per second, of attention in the dtype of its inputs
    bandwidth: float  # bytes per second that a rank sends
    latency: float  # seconds per message
    unrounded_slowdown: float = 1.0  # of arithmetic on 16-bit inputs whose results are merged or summed


# Rough: they decide between methods whose times differ by factors. docs/distributed.md has the figures and their sources.
CPU = Machine(5e10, 1e9, 3e-4)
NVLINK = Machine(5e14, 3.5e11, 1e-5, UNROUNDED)
INFINIBAND = Machine(5e14, 4.5e10, 2e-5, UNROUNDED)


class Sizes(NamedTuple):
    batch: int
    q_heads: int
    k_heads: int
    head_dim: int
    value_dim: int
    itemsize: int

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        return Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size())

    @property
    def statistics(self) -> int:
        """Bytes of one number of a partial result."""
        return max(memory.statistics_dtype(torch.float32).itemsize, self.itemsize)


class Cost(NamedTuple):
    """Of one rank and one call."""

    sent: int  # bytes
    messages: int
    pairs: int  # of a query and a key that are computed, all heads together
    memory: int  # bytes of keys, values and their gradients that others own
    home: int = 0  # bytes of the last sums of gradients, which nothing overlaps
    shared: bool = False  # key heads are on several ranks, which sum their gradients

    def flops(self, sizes: Sizes, gradient: bool) -> float:
        forward = 2.0 * self.pairs * (sizes.head_dim + sizes.value_dim)
        return forward * (1 + BACKWARD) if gradient else forward


def choose(sizes: Sizes, plan: Plan, machine: Machine, gradient: bool, scores: bool = False) -> str:
    """The method of the shortest time; of equals the one that is named first.

    scores: a mask or bias is given, which "ulysses" would have to bring together on every rank: it is left out.
    """
    return _choose(sizes, plan._replace(rank=0), machine, gradient, scores)


@functools.lru_cache(maxsize=256)
def _choose(sizes: Sizes, plan: Plan, machine: Machine, gradient: bool, scores: bool) -> str:
    if plan.ranks == 1:
        return "gather"
    known = [name for name in METHODS if not (name == "ulysses" and (scores or sizes.q_heads < plan.ranks))]
    return min(known, key=lambda name: slowest(name, sizes, plan, machine, gradient))


def machine_of(device: torch.device, one_host: bool) -> Machine:
    """Of ranks that compute on such a device. Between hosts a rank sends at the speed of its network."""
    if device.type == "cpu":
        return CPU
    return NVLINK if one_host else INFINIBAND


def slowest(method: str, sizes: Sizes, plan: Plan, machine: Machine, gradient: bool) -> float:
    """Seconds of the rank that takes the longest; of many ranks, of some."""
    some = range(0, plan.ranks, -(-plan.ranks // 16))
    return max(seconds(method, sizes, plan._replace(rank=rank), machine, gradient) for rank in {*some, plan.ranks - 1})


def seconds(method: str, sizes: Sizes, plan: Plan, machine: Machine, gradient: bool) -> float:
    """Of one call on this plan's rank."""
    return time_of(method, sizes, cost(method, sizes, plan, gradient), machine, gradient)


def time_of(method: str, sizes: Sizes, found: Cost, machine: Machine, gradient: bool) -> float:
    """Seconds of a rank."""
    slowdown = 1.0
    if sizes.itemsize < 4 and method == "ring":
        slowdown = machine.unrounded_slowdown
    elif sizes.itemsize < 4 and gradient and (method == "gather" or found.shared):  # the backward sums over ranks
        slowdown = (1 + BACKWARD * machine.unrounded_slowdown) / (1 + BACKWARD)
    computing = found.flops(sizes, gradient) * slowdown / machine.flops
    sending = found.sent / machine.bandwidth + found.messages * machine.latency
    if method != "ring":
        return computing + sending
    return max(computing, sending) + found.home / machine.bandwidth


def cost(method: str, sizes: Sizes, plan: Plan, gradient: bool) -> Cost:
    """What this plan's rank does."""
    run = {"ring": _ring, "gather": _gather, "ulysses": _ulysses}[method]
    return run(sizes, plan, gradient)


def of_decode(rows: int, width: int, itemsize: int, rank: int, ranks: int, way: str) -> Cost:
    """Merging partial results ``(rows, width)``, out and lse side by side, so that every rank has all of them.

    gather   every rank sends all of its own to every other one, and merges all rows: one exchange
    scatter  every rank merges some rows of all, then they are gathered: two exchanges, of fewer bytes from three ranks on
    """
    row, others = width * itemsize, ranks - 1
    if way == "gather":
        return Cost(others * rows * row, others, 0, others * rows * row)
    own = share_of(rows, rank, ranks)
    return Cost((rows - own + others * own) * row, 2 * others, 0, (others * own + rows - own) * row)


def of_loss(rows: int, numbers: int, hidden: int, rank: int, ranks: int, gradient: bool) -> Cost:
    """A loss whose classes are sharded: so many numbers of 4 bytes for each row are gathered, and the gradient of a hidden
    state of that size (0: none) is summed.
    """
    others, own = ranks - 1, share_of(rows * hidden, rank, ranks)
    gathered = 4 * others * rows * numbers
    if not (gradient and hidden):
        return Cost(gathered, others, 0, gathered)
    return Cost(gathered + 4 * (rows * hidden - own + others * own), 3 * others, 0, gathered)


def share_of(total: int, rank: int, ranks: int) -> int:
    """Of things that ranks share out evenly."""
    return (rank + 1) * total // ranks - rank * total // ranks


def way_of_decode(rows: int, width: int, itemsize: int, ranks: int, machine: Machine) -> str:
    """The one of the shorter time, the same on every rank."""

    def time(way: str) -> float:
        found = of_decode(rows, width, itemsize, 0, ranks, way)
        return found.sent / machine.bandwidth + found.messages * machine.latency

    return min(DECODE, key=time)


def of_causal(method: str, sizes: Sizes, tokens: int, ranks: int, gradient: bool) -> Cost:
    """`cost` in closed form, for causal attention of zigzag shards of one length: for more ranks than a plan is made for.

    ranks needs to divide half of the tokens and, for "ulysses", the query heads and be a multiple or a divisor of the key
    heads.
    """
    own, others, both = tokens // ranks, ranks - 1, sizes.head_dim + sizes.value_dim
    block = sizes.batch * sizes.k_heads * own * both
    pairs = sizes.batch * sizes.q_heads * (tokens * (tokens + 1) // 2) // ranks
    if method == "ring":
        sent = block * others * (sizes.itemsize * (1 + gradient) + sizes.statistics * gradient)
        sent += block * sizes.statistics * gradient  # home
        held = 2 * block * (sizes.itemsize + gradient * sizes.statistics)
        return Cost(sent, others * (1 + 2 * gradient) + gradient, pairs, held, block * sizes.statistics * gradient)
    if method == "gather":
        sent = block * others * (sizes.itemsize * (1 + gradient) + sizes.statistics * gradient)
        held = block * ranks * (sizes.itemsize + gradient * sizes.statistics)
        return Cost(sent, others * (1 + 2 * gradient), pairs, held)
    heads, key_heads = sizes.q_heads // ranks, max(sizes.k_heads // ranks, 1)
    shared = ranks > sizes.k_heads
    once = sizes.batch * own * (heads + key_heads) * both * sizes.itemsize
    grads = once + shared * sizes.batch * own * key_heads * both * (sizes.statistics - sizes.itemsize)
    sent = others * (once + gradient * grads)
    return Cost(sent, 2 * others * (1 + gradient), pairs, ranks * once * (1 + gradient), shared=shared)


def _ring(sizes: Sizes, plan: Plan, gradient: bool) -> Cost:
    way = route(plan)
    if way.direct:
        return _direct(sizes, plan, way, gradient)
    rank, ranks, far = plan.rank, plan.ranks, way.far
    elements = [_block(sizes, part) for part in plan.of_k]
    sent, messages = 0, 0
    for step in range(ranks):
        owner = (rank - step) % ranks
        if far[owner] > step:
            sent += elements[owner] * sizes.itemsize * (1 + gradient)
            messages += 1 + gradient
        if gradient and step and far[owner] >= step:  # its sum of gradients, onwards or home
            sent += elements[owner] * sizes.statistics
            messages += 1
        if gradient and not step and far[owner] > 0:
            sent += elements[owner] * sizes.statistics
            messages += 1
    held = 2 * max(elements) * (sizes.itemsize + gradient * sizes.statistics)
    home = max(elements) * sizes.statistics * gradient
    return Cost(sent, messages, _block_pairs(sizes, plan), held, home)


def _direct(sizes: Sizes, plan: Plan, way: Route, gradient: bool) -> Cost:
    given, taken = (
        [_block(sizes, way.seen[b][a]) for a, b in pairs if a != b]
        for pairs in ([(plan.rank, r) for r in range(plan.ranks)], [(r, plan.rank) for r in range(plan.ranks)])
    )
    sent = sum(given) * sizes.itemsize * (1 + gradient) + sum(taken) * sizes.statistics * gradient
    messages = sum(map(bool, given)) * (1 + gradient) + sum(map(bool, taken)) * gradient
    held = 2 * max(taken) * sizes.itemsize + (max(taken) + max(given)) * sizes.statistics * gradient
    home = max(*given, *taken) * sizes.statistics * gradient
    return Cost(sent, messages, _block_pairs(sizes, plan), held, home)


def _block_pairs(sizes: Sizes, plan: Plan) -> int:
    return sum(_pairs(plan, plan.of_q[plan.rank], part) for part in plan.of_k) * sizes.q_heads * sizes.batch


def _gather(sizes: Sizes, plan: Plan, gradient: bool) -> Cost:
    own, all_keys = _block(sizes, plan.of_k[plan.rank]), sum(_block(sizes, part) for part in plan.of_k)
    others = plan.ranks - 1
    sent = own * others * sizes.itemsize * (1 + gradient) + gradient * (all_keys - own) * sizes.statistics
    seen = _pairs(plan, plan.of_q[plan.rank], (Segment(0, plan.keys),))
    held = all_keys * (sizes.itemsize + gradient * sizes.statistics)
    return Cost(sent, others * (1 + 2 * gradient), seen * sizes.q_heads * sizes.batch, held)


def _ulysses(sizes: Sizes, plan: Plan, gradient: bool) -> Cost:
    whose = [heads_of(rank, plan.ranks, sizes.q_heads, sizes.k_heads) for rank in range(plan.ranks)]
    queries, keys = (count(parts[plan.rank]) for parts in (plan.of_q, plan.of_k))
    mine, sent = whose[plan.rank], 0
    shared = sum(of_k.past - of_k.first for _, of_k in whose) > sizes.k_heads
    wide = sizes.statistics // sizes.itemsize if shared else 1  # gradients of key heads that several ranks have
    both = sizes.head_dim + sizes.value_dim
    for rank, (of_q, of_k) in enumerate(whose):
        if rank == plan.rank:
            continue
        there = (of_q.past - of_q.first) * queries * sizes.head_dim + (of_k.past - of_k.first) * keys * both
        back = (mine[0].past - mine[0].first) * count(plan.of_q[rank]) * sizes.value_dim
        sent += there + back
        if gradient:
            sent += (mine[0].past - mine[0].first) * count(plan.of_q[rank]) * sizes.head_dim
            sent += (mine[1].past - mine[1].first) * count(plan.of_k[rank]) * both * wide
            sent += (of_q.past - of_q.first) * queries * sizes.value_dim
    total = sizes.batch * sizes.itemsize
    seen = _pairs(plan, (Segment(0, plan.queries),), (Segment(0, plan.keys),))
    heads, key_heads = (of.past - of.first for of in mine)
    held = (heads * plan.queries * both + key_heads * plan.keys * both) * total * (1 + gradient)
    return Cost(sent * total, 2 * (plan.ranks - 1) * (1 + gradient), seen * heads * sizes.batch, held, shared=shared)


def _block(sizes: Sizes, part: tuple[Segment, ...]) -> int:
    """Elements of keys and values."""
    return sizes.batch * sizes.k_heads * count(part) * (sizes.head_dim + sizes.value_dim)


def _pairs(plan: Plan, queries: tuple[Segment, ...], keys: tuple[Segment, ...]) -> int:
    """Visible pairs of a query and a key; where batch entries differ, as many as the first regions say on average."""
    total = 0
    for piece in pieces(plan, queries, keys):
        rows, columns = piece.rows.stop - piece.rows.start, piece.keys.stop - piece.keys.start
        total += _visible(rows, columns, *piece.window)
    entries = {(region.first, region.past) for region in plan.regions}
    return total // max(len(entries), 1)


def _visible(rows: int, columns: int, left: int | None, right: int | None) -> int:
    """The sum over rows of the keys up to the right bound less those before the left one; the ends are aligned."""
    shift = columns - rows
    seen = rows * columns if right is None else _clamped_sum(rows, shift + right + 1, columns)
    hidden = 0 if left is None else _clamped_sum(rows, shift - left, columns)
    return max(seen - hidden, 0)


def _clamped_sum(rows: int, start: int, most: int) -> int:
    """The sum of ``min(max(start + i, 0), most)`` over i from 0 to rows - 1."""
    first, last = max(0, -start), min(rows, most - start)  # i between them is not clamped
    between = max(0, last - first)
    linear = between * start + (first + last - 1) * between // 2 if between else 0
    return linear + max(0, rows - max(last, 0)) * most

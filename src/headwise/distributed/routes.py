"""Who sends which keys to whom: blocks that go round, or parts that go straight to the ranks that see them.

round    a block goes to the next rank at each step, no further than the last rank that sees any of it
direct   at step s a rank sends what rank + s sees of its keys, and nothing else, to rank + s. A window sees little of a
         block, and under zigzag shards it sees it on both sides of the ring: going round is a long way for that

The route is chosen from the plan alone, so every rank comes to the same one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from headwise.distributed.blocks import Plan, pieces
from headwise.distributed.shards import Segment

SAVES = 0.95  # direct sends are taken where the busiest rank sends less than this share of what goes round

Segments = tuple[Segment, ...]


class Route(NamedTuple):
    seen: tuple[tuple[Segments, ...], ...]  # seen[rank][owner]: which of the owner's keys the rank sees, in order
    far: tuple[int, ...]  # for the block of every rank: how many ranks further the last one sits that sees any of it
    direct: bool

    def sent(self, owner: int, rank: int) -> int:
        """Keys that go straight from their owner to a rank."""
        return 0 if owner == rank else count(self.seen[rank][owner])


def count(segments: Iterable[Segment]) -> int:
    return sum(stop - start for start, stop in segments)


def route(plan: Plan) -> Route:
    return _route(plan._replace(rank=0))


@functools.lru_cache(maxsize=64)
def _route(plan: Plan) -> Route:
    steps = range(plan.ranks)
    if not plan.packed:  # batch entries of other lengths: the longest first
        plan = plan._replace(regions=tuple(sorted(plan.regions, key=lambda region: -region.keys.stop)))
    seen = tuple(tuple(_seen(plan, rank, owner) for owner in steps) for rank in steps)
    far = tuple(max((s for s in steps if seen[(o + s) % plan.ranks][o]), default=0) for o in steps)
    found, lengths = Route(seen, far, True), [count(part) for part in plan.of_k]
    going_round = (sum(lengths[(r - s) % plan.ranks] for s in steps if far[(r - s) % plan.ranks] > s) for r in steps)
    straight = (sum(found.sent(owner, rank) for rank in steps) for owner in steps)
    return found._replace(direct=max(straight) < SAVES * max(going_round))


def _seen(plan: Plan, rank: int, owner: int) -> Segments:
    """The union of what the pieces read."""
    found: list[Segment] = []
    for keys in sorted(itertools.chain(*(_seen_of(plan, rank, part) for part in plan.of_k[owner]))):
        if found and keys[0] <= found[-1].stop:
            found[-1] = Segment(found[-1].start, max(found[-1].stop, keys[1]))
        else:
            found.append(Segment(*keys))
    return tuple(found)


def _seen_of(plan: Plan, rank: int, part: Segment) -> Iterable[tuple[int, int]]:
    """Of some keys, in any order. Late queries often see all of them, and then nobody else is asked."""
    found = set()
    for piece in pieces(plan, plan.of_q[rank][::-1], (part,)):
        found.add((piece.keys.start, piece.keys.stop))
        if (piece.keys.start, piece.keys.stop) == part:
            break
    return found


def columns_of(part: Segments, keys: Segments) -> Segments:
    """Where keys of the sequence lie in the shard that has them."""
    found, column = [], 0
    for start, stop in part:
        for first, past in keys:
            if max(first, start) < min(past, stop):
                found.append(Segment(max(first, start) - start + column, min(past, stop) - start + column))
        column += stop - start
    return tuple(found)

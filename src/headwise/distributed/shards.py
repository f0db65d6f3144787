"""Which positions of a sequence a rank holds.

contiguous  ``ranks`` chunks, one each
zigzag      ``2 · ranks`` chunks, rank r holds chunk r and chunk ``2 · ranks - 1 - r``: under a causal mask an early chunk,
            with few keys to see, goes with a late one that sees many, so that all ranks have the same work

Any length: chunks differ by one position at most, and may be empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.distributed.groups import Description, Group, Peers, agree, gather, peers_of
from headwise.ops import _checks

LAYOUTS = ("zigzag", "contiguous")


class Segment(NamedTuple):
    """The positions start to stop, which a shard holds next to each other."""

    start: int
    stop: int


def segments(total: int, rank: int, ranks: int, layout: str) -> tuple[Segment, ...]:
    if layout == "contiguous":
        return (_chunk(total, rank, ranks),)
    return _chunk(total, rank, 2 * ranks), _chunk(total, 2 * ranks - 1 - rank, 2 * ranks)


def shard_length(total: int, rank: int, ranks: int, layout: str) -> int:
    return sum(segment.stop - segment.start for segment in segments(total, rank, ranks, layout))


def check_layout(op: str, layout: Any) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: layout is {layout!r}; it needs to be one of {', '.join(map(repr, LAYOUTS))}")


def total_length(op: str, name: str, lengths: list[int], layout: str) -> int:
    """Of the whole sequence, from the length of every rank's shard of it."""
    total, ranks = sum(lengths), len(lengths)
    wanted = [shard_length(total, rank, ranks, layout) for rank in range(ranks)]
    if lengths != wanted:
        raise ValueError(
            f"{op}: the shards of {name} have lengths {lengths}, {total} together; as {layout} shards they need to have "
            f"{wanted}: cut them with headwise.distributed.shard"
        )
    return total


def shard(x: Tensor, group: Group, *, dim: int = -1, layout: str = "zigzag") -> Tensor:
    """This rank's part of x along ``dim``: of tokens, positions, labels, or anything else with the whole sequence.

    Labels of next tokens are shifted before they are sharded, not after. Differentiable.
    """
    _checks.tensor("shard", "x", x)
    check_layout("shard", layout)
    peers, dim = peers_of("shard", group), _dimension("shard", x, dim)
    parts = segments(x.shape[dim], peers.rank, peers.ranks, layout)
    return torch.cat([x.narrow(dim, part.start, part.stop - part.start) for part in parts], dim)


def shard_positions(total: int, group: Group, *, layout: str = "zigzag", device: Any = None) -> Tensor:
    """The positions ``(S_local,)`` of this rank's shard of a sequence of ``total`` tokens, as `rope` takes them."""
    _checks.whole("shard_positions", "total", total, 0)
    return shard(torch.arange(total, device=device), group, layout=layout)


def unshard(x: Tensor, group: Group, *, dim: int = -1, layout: str = "zigzag") -> Tensor:
    """The whole sequence, on every rank, from each one's `shard` of it. Not differentiable."""
    op, peers = "unshard", peers_of("unshard", group)

    def check() -> Description:
        _checks.tensor(op, "x", x)
        check_layout(op, layout)
        axis = _dimension(op, x, dim)
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{op}: x requires a gradient, and unshard has none yet: give it x.detach()")
        rest = tuple(x.shape[:axis]), tuple(x.shape[axis + 1 :])
        same = {"dim": axis, "layout": layout, "dtype of x": str(x.dtype), "shape of x beside dim": rest}
        return Description(same, (x.shape[axis],))

    lengths = [length for (length,) in agree(op, peers, check)]
    return unshard_parts(op, peers, x, lengths, dim % x.dim(), layout)


def unshard_parts(op: str, peers: Peers, x: Tensor, lengths: list[int], dim: int, layout: str) -> Tensor:
    """`unshard` for those who know the length of every shard."""
    total = total_length(op, "x", lengths, layout)
    moved = x.detach().movedim(dim, 0)
    rest = moved.shape[1:]
    parts = gather(peers, moved.reshape(-1), [length * rest.numel() for length in lengths])
    whole = moved.new_empty(total, *rest)
    for rank, part in enumerate(parts):
        rows = part.view(lengths[rank], *rest)
        for start, stop in segments(total, rank, peers.ranks, layout):
            whole[start:stop], rows = rows[: stop - start], rows[stop - start :]
    return whole.movedim(0, dim).contiguous()


def _chunk(total: int, index: int, count: int) -> Segment:
    return Segment(index * total // count, (index + 1) * total // count)


def _dimension(op: str, x: Tensor, dim: int) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{op}: dim is {dim!r}; it needs to be a dimension of x, which has shape {_checks.shape_of(x)}"
        )
    return dim % x.dim()

"""Which positions of a sequence a rank holds.

contiguous  ``ranks`` chunks, one each
zigzag      ``2 · ranks`` chunks, rank r holds chunk r and chunk ``2 · ranks - 1 - r``: under a causal mask an early chunk,
            with few keys to see, goes with a late one that sees many, so that all ranks have the same work

Any length: chunks differ by one position at most, and may be empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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


Parts = tuple[tuple[Segment, ...], ...]  # the segments of every rank


def segments(total: int, rank: int, ranks: int, layout: str) -> tuple[Segment, ...]:
    if layout == "contiguous":
        return (_chunk(total, rank, ranks),)
    return _chunk(total, rank, 2 * ranks), _chunk(total, 2 * ranks - 1 - rank, 2 * ranks)


def shard_length(total: int, rank: int, ranks: int, layout: str) -> int:
    return sum(segment.stop - segment.start for segment in segments(total, rank, ranks, layout))


def check_layout(op: str, layout: Any) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: layout is {layout!r}; it needs to be one of {', '.join(map(repr, LAYOUTS))}")


def parts_of(op: str, name: str, lengths: Sequence[int], layout: str) -> Parts:
    """The segments of every rank, from the length of every rank's shard.

    Contiguous shards may have any lengths, as those of a DTensor have; zigzag shards are those that `shard` cuts.
    """
    total, ranks = sum(lengths), len(lengths)
    if layout == "contiguous":
        stops = itertools.accumulate(lengths)
        return tuple((Segment(stop - length, stop),) for length, stop in zip(lengths, stops, strict=True))
    wanted = [shard_length(total, rank, ranks, layout) for rank in range(ranks)]
    if list(lengths) != wanted:
        raise ValueError(
            f"{op}: the shards of {name} have lengths {list(lengths)}, {total} together; as {layout} shards they need to "
            f"have {wanted}: cut them with headwise.distributed.shard"
        )
    return tuple(segments(total, rank, ranks, layout) for rank in range(ranks))


def shard(x: Tensor, group: Group, *, dim: int = -1, layout: str = "zigzag") -> Tensor:
    """This rank's part of x along ``dim``: of tokens, positions, labels, or anything else with the whole sequence.

    Labels of next tokens are shifted before they are sharded, not after. Differentiable.
    """
    _checks.tensor("shard", "x", x)
    check_layout("shard", layout)
    peers, dim = peers_of("shard", group), _dimension("shard", x, dim)
    return taken(x, segments(x.shape[dim], peers.rank, peers.ranks, layout), dim)


def shard_positions(total: int, group: Group, *, layout: str = "zigzag", device: Any = None) -> Tensor:
    """The positions ``(S_local,)`` of this rank's shard of a sequence of ``total`` tokens, as `rope` takes them."""
    _checks.whole("shard_positions", "total", total, 0)
    return shard(torch.arange(total, device=device), group, layout=layout)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # ranks talk about the call before it runs
def unshard(x: Tensor, group: Group, *, dim: int = -1, layout: str = "zigzag") -> Tensor:
    """The whole sequence, on every rank, from each one's `shard` of it.

    Not differentiable: what a gradient of the whole means depends on whether all ranks go on with the same loss or each with
    a part of it. x may not require a gradient; give it x.detach().
    """
    op, peers = "unshard", peers_of("unshard", group)

    def check() -> Description:
        _checks.tensor(op, "x", x)
        check_layout(op, layout)
        axis = _dimension(op, x, dim)
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{op}: x requires a gradient, and unshard has none: give it x.detach()")
        rest = tuple(x.shape[:axis]), tuple(x.shape[axis + 1 :])
        same = {"dim": axis, "layout": layout, "dtype of x": str(x.dtype), "shape of x beside dim": rest}
        return Description(same, (x.shape[axis],))

    lengths = [length for (length,) in agree(peers, check).lengths]
    return joined(peers, x.detach(), parts_of(op, "x", lengths, layout), dim % x.dim())


def joined(peers: Peers, x: Tensor, parts: Parts, dim: int) -> Tensor:
    """`unshard` for those who know what every rank holds."""
    moved = x.movedim(dim, 0)
    rest = moved.shape[1:]
    lengths = [sum(stop - start for start, stop in part) for part in parts]
    received = gather(peers, moved.reshape(-1), [length * rest.numel() for length in lengths], "joining shards")
    whole = moved.new_empty(sum(lengths), *rest)
    for part, length, rows in zip(parts, lengths, received, strict=True):
        place(whole, rows.view(length, *rest), part, 0)
    return whole.movedim(0, dim).contiguous()


def place(whole: Tensor, rows: Tensor, part: tuple[Segment, ...], dim: int) -> None:
    """The rows of a rank where they belong in the whole sequence along ``dim``."""
    row = 0
    for start, stop in part:
        whole.narrow(dim, start, stop - start).copy_(rows.narrow(dim, row, stop - start))
        row += stop - start


def taken(whole: Tensor, part: tuple[Segment, ...], dim: int) -> Tensor:
    """The rows of a rank out of the whole sequence; the opposite of `place`."""
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in part], dim)


def _chunk(total: int, index: int, count: int) -> Segment:
    return Segment(index * total // count, (index + 1) * total // count)


def _dimension(op: str, x: Tensor, dim: int) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{op}: dim is {dim!r}; it needs to be a dimension of x, which has shape {_checks.shape_of(x)}"
        )
    return dim % x.dim()

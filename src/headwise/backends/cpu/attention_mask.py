"""Which calls of PyTorch's kernel attention with a mask or bias is made of.

A mask is summed up tile by tile: hidden from all rows, open to all, or mixed. Hidden tiles are skipped, long open ranges go
without a mask, and rows that see nearly the same tiles make one block, because the kernel likes tall ones. The summary
takes two passes over the mask's bytes, a fortieth of the time of the attention that it saves work for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.backends.cpu.attention_band import Segment, segments
from headwise.backends.cpu.attention_problem import ALL, Problem
from headwise.layout import statistics_dtype

_TILE = 128  # rows and keys of a tile of the summary
_SUMMED_KEYS = 256  # for fewer keys than that there is nothing to skip
_SMALLEST_OPEN = 512  # keys of an open range that is worth a call of its own
_WASTE = 1.2  # how much more a block of rows may compute than its tiles need
_BAND_ROWS = 256  # of a block under a window or causal, where a taller one masks more, or with a large additive mask
_MASK_ELEMENTS = 1 << 22  # floats of additive mask alive at once
_SMALLEST_FULL = 256  # a shorter range that geometry shows in full is not worth a call of its own


class Range(NamedTuple):
    """Keys that a block of rows attends to in one call."""

    segment: Segment
    additive: bool  # does the call need a mask or bias of floats?


class Block(NamedTuple):
    batch: slice
    start: int  # rows
    stop: int
    ranges: list[Range]


class _Tiles(NamedTuple):
    """Of a row of tiles, as bits of an integer: those that some row sees of, and those that all rows see all of."""

    seen: int
    full: int


def masked_blocks(problem: Problem) -> Iterator[Block]:
    keys, band = problem.k.shape[2], problem.band
    for batch, tiles in _summaries(problem):
        floats = _floats_per_score(problem, batch)
        for start, stop, of_block in _blocks_of_rows(problem, tiles, floats):
            ranges = [
                Range(Segment(low, high, "full" if segment.kind == "full" else "partial"), additive)
                for segment in segments(start, stop, keys, band, _SMALLEST_FULL)
                for low, high, additive in _ranges(problem, of_block, segment)
            ]
            yield Block(batch, start, stop, list(_cut(ranges, _MASK_ELEMENTS // max(1, floats * (stop - start)))))


def _blocks_of_rows(problem: Problem, tiles: list[_Tiles], floats: int) -> Iterator[tuple[int, int, _Tiles]]:
    """Neighbouring rows that see about the same tiles, as many as their additive mask allows."""
    rows, keys, band = problem.q.shape[2], problem.k.shape[2], problem.band
    bounded = band.left >= 0 or band.right >= 0
    if len(tiles) == 1:
        limit = _BAND_ROWS if bounded else max(_BAND_ROWS, _MASK_ELEMENTS // max(1, floats * keys))
        for start in range(0, rows, limit):
            yield start, min(start + limit, rows), tiles[0]
        return
    start = 0
    while start < len(tiles):
        stop, union, needed = start + 1, tiles[start], tiles[start].seen.bit_count()
        while stop < len(tiles):
            more = _Tiles(union.seen | tiles[stop].seen, union.full & tiles[stop].full)
            height, width = stop + 1 - start, more.seen.bit_count()
            needed += tiles[stop].seen.bit_count()
            large = bounded or floats * height * width * _TILE**2 > _MASK_ELEMENTS
            if height * width > _WASTE * needed or (large and height * _TILE > _BAND_ROWS):
                break
            stop, union = stop + 1, more
        yield start * _TILE, min(stop * _TILE, rows), union
        start = stop


def _summaries(problem: Problem) -> Iterator[tuple[slice, list[_Tiles]]]:
    """Batch entries that see the same tiles, and what they see; one row of tiles where all rows see the same."""
    keys, mask = problem.k.shape[2], problem.mask
    everything = (1 << -(-keys // _TILE)) - 1
    if mask is None or keys <= _SUMMED_KEYS or mask.shape[3] == 1:
        yield ALL, [_Tiles(everything, everything if mask is None else 0)]
        return
    seen, full = _tile_map(mask)  # by batch entry, or one for all
    if all(seen[0] == other for other in seen) and all(full[0] == other for other in full):
        yield ALL, [_Tiles(*both) for both in zip(seen[0], full[0], strict=True)]
        return
    for b in range(len(seen)):
        yield slice(b, b + 1), [_Tiles(*both) for both in zip(seen[b], full[b], strict=True)]


def _tile_map(mask: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """For each batch entry and row of tiles, the tiles that are seen and those that are full. All heads together."""
    if mask.stride(2) == 0:
        mask = mask[:, :, :1]
    bytes_, (batch, _, rows, keys) = mask.view(torch.uint8), mask.shape
    found = []
    for reduce, beyond in ((torch.amax, 0), (torch.amin, 1)):
        by_key = torch.stack([reduce(bytes_[:, :, i : i + _TILE], (1, 2)) for i in range(0, rows, _TILE)], 1)
        tiles = reduce(F.pad(by_key, (0, -keys % _TILE), value=beyond).unflatten(2, (-1, _TILE)), -1)
        bits = [int("".join(map(str, reversed(row))), 2) for row in tiles.flatten(0, 1).tolist()]
        found.append([bits[b * tiles.shape[1] : (b + 1) * tiles.shape[1]] for b in range(batch)])
    return found[0], found[1]


def _ranges(problem: Problem, tiles: _Tiles, segment: Segment) -> Iterator[tuple[int, int, bool]]:
    """The seen ranges of a segment, and whether each needs an additive mask."""
    # A bias has to be added everywhere, and what geometry hides is hidden by an additive mask as well.
    never_open = problem.bias is not None or segment.kind != "full"
    low, high = segment.start // _TILE, -(-segment.stop // _TILE)
    kinds = [
        (tiles.seen >> i & 1) + (tiles.full >> i & 1 if not never_open else 0) for i in range(low, high)
    ]  # 0, 1, 2
    runs: list[list[int]] = []  # start, stop, kind
    for i, kind in enumerate(kinds, low):
        if runs and runs[-1][2] == kind:
            runs[-1][1] = i + 1
        else:
            runs.append([i, i + 1, kind])
    if sum(run[2] == 2 for run in runs) > 1 or any(run[2] == 1 for run in runs):
        for run in runs:
            if run[2] == 2 and (run[1] - run[0]) * _TILE < _SMALLEST_OPEN:
                run[2] = 1
    joined: list[list[int]] = []
    for start, stop, kind in runs:
        if joined and joined[-1][2] == kind:
            joined[-1][1] = stop
        else:
            joined.append([start, stop, kind])
    for start, stop, kind in joined:
        if kind:
            yield max(start * _TILE, segment.start), min(stop * _TILE, segment.stop), kind == 1


def _floats_per_score(problem: Problem, batch: slice) -> int:
    """Floats of additive mask that have to be made for a row and key of the problem; 0 if rows share them, or none are."""
    given = [x[batch] if x.shape[0] > 1 else x for x in (problem.mask, problem.bias) if x is not None]
    of_rows = any(x.shape[2] > 1 for x in given)
    as_it_is = problem.mask is None and given[0].dtype == statistics_dtype(problem.q.dtype)
    bounded = problem.band.left >= 0 or problem.band.right >= 0
    if not bounded and (as_it_is or not of_rows):
        return 0
    return max(x.shape[0] for x in given) * max(x.shape[1] for x in given)


def _cut(ranges: list[Range], most: int) -> Iterator[Range]:
    """The same ranges, those with an additive mask about ``most`` keys long at most."""
    for segment, additive in ranges:
        step = max(64, most) if additive else segment.stop
        for low in range(segment.start, segment.stop, step):
            yield Range(Segment(low, min(low + step, segment.stop), segment.kind), additive)

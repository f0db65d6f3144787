"""Which keys a block of queries sees: causal, windows and lengths as geometry, without looking at data.

Query row r sits at position ``p = r + offset`` and sees the keys from ``p - left`` to ``p + right``. The keys that a block
of rows sees fall into at most three ranges: the middle one is seen by all rows, the outer ones by some. Other keys are
never touched, whatever they hold.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Band(NamedTuple):
    left: int  # -1: unbounded
    right: int  # -1: unbounded
    offset: int  # position of query row 0


class Segment(NamedTuple):
    """Keys ``start`` to ``stop``, and how the rows of the block see them."""

    start: int
    stop: int
    kind: str  # "full": all rows see all keys; "diagonal": row i sees keys 0..i; "partial": as `hidden` says


def segments(start: int, stop: int, keys: int, band: Band, smallest_full: int = 1) -> list[Segment]:
    """The key ranges that rows ``start`` to ``stop`` see. A full range below ``smallest_full`` joins its neighbours."""
    first, last = start + band.offset, stop - 1 + band.offset  # positions
    low = 0 if band.left < 0 else max(0, first - band.left)
    high = keys if band.right < 0 else min(keys, last + band.right + 1)
    if low >= high:
        return []
    full_low = 0 if band.left < 0 else max(0, last - band.left)
    full_high = keys if band.right < 0 else min(keys, first + band.right + 1)
    # Causal: the full range ends before the first row's own key, so that the rest is a square with its diagonal.
    square = band.right == 0 and first >= 0 and last < keys and full_low <= first
    if square:
        full_high = first
    if full_low < full_high and (full_low, full_high) == (low, high):
        return [Segment(low, high, "full")]
    if full_high - full_low < smallest_full and not (square and low == full_low):
        return [Segment(low, high, "partial")]
    ranges = [
        Segment(low, min(full_low, high), "partial"),
        Segment(full_low, full_high, "full"),
        Segment(max(full_high, low), high, "diagonal" if square else "partial"),
    ]
    return [segment for segment in ranges if segment.start < segment.stop]


def hidden(start: int, stop: int, segment: Segment, band: Band, transposed: bool = False) -> Tensor:
    """bool ``(rows, keys)``, or ``(keys, rows)`` if transposed: what the rows do not see of the segment."""
    rows, keys = stop - start, segment.stop - segment.start
    return _hidden(rows, keys, start + band.offset - segment.start, band.left, band.right, transposed)


@lru_cache(maxsize=8)  # the same shape comes again and again along a band
def _hidden(rows: int, keys: int, first: int, left: int, right: int, transposed: bool) -> Tensor:
    """Row 0 sits ``first`` keys after key 0."""
    row, key = torch.arange(rows) + first, torch.arange(keys)
    row, key = (row[None, :], key[:, None]) if transposed else (row[:, None], key[None, :])
    unseen = torch.zeros((keys, rows) if transposed else (rows, keys), dtype=torch.bool)
    if left >= 0:
        unseen |= key < row - left
    if right >= 0:
        unseen |= key > row + right
    return unseen

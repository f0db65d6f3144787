"""Tile sizes of the attention kernels: read from data files, one per architecture, never searched in a user's process.

A file in tile_tables/ maps a kernel and a shape class to an `AttentionTile`. `headwise tune` measures candidates on the GPU
at hand and writes such a file; HEADWISE_TILES names one to use instead of ours.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from headwise.config import settings

TABLES = Path(__file__).parent / "tile_tables"
Table = dict[str, dict[str, dict[str, int]]]
_forced: dict[str, AttentionTile] = {}


class AttentionTile(NamedTuple):
    """Rows of queries and of keys that a program works on at once, its warps, and how many loads ahead it is."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0  # the most a thread may use; 0: as many as the compiler likes
    passes: int = 1  # 2: dk and dv one after the other
    bf16x3: bool = False  # float32 is split into three bfloat16 before the kernel (bf16x3.py)


def shape_class(bits: int, head_dim: int, banded: bool, dropout: bool = False) -> str:
    """``head_dim`` is a power of two; banded: causal or a window."""
    return f"{bits}-bit, head dim {head_dim}" + (", banded" if banded else "") + (", dropout" if dropout else "")


def tile(kernel: str, bits: int, head_dim: int, banded: bool, arch: str, dropout: bool = False) -> AttentionTile:
    """``head_dim``: the wider one of q and v, as it is."""
    return _forced.get(kernel) or _tile(kernel, bits, head_dim, banded, arch, dropout)


def covers(kernel: str, bits: int, head_dim: int, arch: str) -> bool:
    """Has the table of this architecture a tile for such heads at all?"""
    return shape_class(bits, 1 << (head_dim - 1).bit_length(), False) in table(arch)[kernel]


def is_forced(*kernels: str) -> bool:
    return any(kernel in _forced for kernel in kernels)


@contextmanager
def forced(kernel: str, tile: AttentionTile) -> Iterator[None]:
    """Within the block every call of ``kernel`` works in this tile, whatever the table says: for `headwise tune`."""
    _forced[kernel] = tile
    settings.changed()
    try:
        yield
    finally:
        del _forced[kernel]
        settings.changed()


@functools.cache
def _tile(kernel: str, bits: int, head_dim: int, banded: bool, arch: str, dropout: bool) -> AttentionTile:
    padded = max(16, 1 << (head_dim - 1).bit_length())
    rows = table(arch)[kernel]
    # Random bits need registers: some classes have another tile for dropout.
    for dropping in (True, False) if dropout else (False,):
        for name in (shape_class(bits, padded, banded, dropping), shape_class(bits, padded, False, dropping)):
            if name in rows:
                return AttentionTile(**rows[name])  # type: ignore[arg-type]  # JSON
    raise KeyError(f"the tile table of {arch} has no row for {kernel}, {shape_class(bits, padded, banded)}")


@functools.cache
def table(arch: str) -> Table:
    """Our table of this architecture, with the rows of the user's own file, if there is one, in place of ours."""
    rows: Table = _read(TABLES / f"{arch}.json")["tiles"]
    if settings.tiles is not None:
        for kernel, own in _read(Path(settings.tiles))["tiles"].items():
            rows.setdefault(kernel, {}).update(own)
    return rows


def forget() -> None:
    """Read the files again at the next call (after `settings.tiles` was changed)."""
    _tile.cache_clear()
    table.cache_clear()
    settings.changed()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        content["tiles"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the tile table {path} cannot be read: {error!r}") from error
    return content

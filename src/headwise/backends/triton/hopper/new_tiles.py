"""Tiles that have not run on a GPU yet, and which of them calls take by themselves.

They were compiled for sm_90 and run by `tests/gluon_on_cpu.py`; nobody has timed them. Whoever sees on a GPU that one is
right and faster adds its name to ``ENABLED``; nothing else has to change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from headwise.backends.triton.hopper.tiles import BackwardTile, ForwardRow, ForwardTile
from headwise.config import settings

ENABLED: frozenset[str] = frozenset()
_tried: frozenset[str] = frozenset()


class NewForward(NamedTuple):
    """For head dims of q and k that are multiples of 8 from the first to the last, and for those of v (None: the same)."""

    head_dims: tuple[int, int]
    value_dims: tuple[int, int] | None
    row: ForwardRow


class NewBackward(NamedTuple):
    head_dims: tuple[int, int]
    value_dims: tuple[int, int] | None
    tile: BackwardTile


def _one(tile: ForwardTile) -> ForwardRow:
    return ForwardRow(tile.d0 + tile.d1, tile, tile, tile, tile)


FORWARD: dict[str, NewForward] = {
    "forward 80": NewForward((72, 80), None, _one(ForwardTile(2, 128, 64, 16, 64, 16, 3, 3, 2))),
    "forward 160": NewForward((136, 160), None, _one(ForwardTile(2, 64, 128, 32, 128, 32, 3, 2, 1))),
    # 128 keys at once leave room for half of the output: it leaves in two pieces.
    "forward 192/128": NewForward(
        (136, 192), (72, 128), _one(ForwardTile(2, 128, 128, 64, 64, 64, 2, 2, 1, one_o=True))
    ),
}
BACKWARD: dict[str, NewBackward] = {
    "backward 80": NewBackward((72, 80), None, BackwardTile(128, 64, 128, 64, 16, 64, 16, 2, 2, 16, 2048, 512)),
    "backward 96": NewBackward((88, 96), None, BackwardTile(128, 64, 128, 64, 32, 64, 32, 2, 2, 16, 2048, 512)),
    "backward 160": NewBackward((136, 160), None, BackwardTile(64, 64, 192, 128, 32, 128, 32, 2, 1, 128, 2048, 512)),
    "backward 192/128": NewBackward(
        (136, 192), (72, 128), BackwardTile(64, 64, 192, 128, 64, 128, 0, 2, 1, 128, 2048, 512)
    ),
}
ALL = frozenset({*FORWARD, *BACKWARD})


@contextmanager
def trying(*names: str) -> Iterator[None]:
    """Within the block calls take these tiles, too: for tests and measurements."""
    global _tried
    unknown = set(names) - ALL
    if unknown:
        raise KeyError(f"no new tiles are called {sorted(unknown)}; there are {sorted(ALL)}")
    before, _tried = _tried, _tried | set(names)
    settings.changed()  # calls are recorded anew
    try:
        yield
    finally:
        _tried = before
        settings.changed()


def forward_name(head_dim: int, value_dim: int, enabled: bool = True) -> str | None:
    """Of the new tile for such heads, if there is one; unless ``enabled`` is False, only if calls take it."""
    return _name(FORWARD, head_dim, value_dim, enabled)


def backward_name(head_dim: int, value_dim: int, enabled: bool = True) -> str | None:
    return _name(BACKWARD, head_dim, value_dim, enabled)


def _name(
    table: Mapping[str, NewForward | NewBackward], head_dim: int, value_dim: int, enabled: bool
) -> str | None:  # fmt: skip
    for name, new in table.items():
        first, last = new.head_dims
        fits = first <= head_dim <= last
        if new.value_dims is None:
            fits = fits and value_dim == head_dim
        else:
            fits = fits and value_dim != head_dim and new.value_dims[0] <= value_dim <= new.value_dims[1]
        if fits and (not enabled or name in ENABLED or name in _tried):
            return name
    return None

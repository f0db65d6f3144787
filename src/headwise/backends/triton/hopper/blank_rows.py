"""Zero rows of a block in shared memory that nobody sees: they may hold NaN, and zero times NaN is NaN.

Shared memory holds columns of 64 elements (or all, if fewer), in groups of eight rows.
"""

from __future__ import annotations

from typing import Any

from headwise.backends.triton.hopper.gluon_names import constexpr_function, gl, gluon, reinterpret


@constexpr_function
def _layout(dim: int) -> Any:
    """Of a group of rows: one warp, eight elements to a thread."""
    width = min(dim, 64)
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [1, 1], [1, 0])


@gluon.jit
def _groups(values, ROWS: gl.constexpr, D: gl.constexpr):
    """``(groups, row)``: shared memory as groups of eight rows, one column of it after the other, and 0 to 7."""
    WIDTH: gl.constexpr = D if D < 64 else 64
    SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * WIDTH, 16, 2)
    groups = reinterpret(values, [values.shape[0] * D // WIDTH * (ROWS // 8), 8, WIDTH], SHARED)
    return groups, gl.arange(0, 8, gl.SliceLayout(1, _layout(D)))


@gluon.jit
def _keep(groups, at, group, seen, ROWS: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a group that are not ``seen``; ``seen``: (8, 1) bool."""
    COLUMNS: gl.constexpr = D // 64 if D > 64 else 1
    for column in gl.static_range(COLUMNS):
        piece = groups.index((at * COLUMNS + column) * (ROWS // 8) + group)
        x = piece.load(_layout(D))
        piece.store(gl.where(seen, x, 0.0).to(x.dtype))


@gluon.jit
def blank_outside(values, at, first, past, ROWS: gl.constexpr, D: gl.constexpr):
    """Zero the rows outside [first, past) of a block."""
    groups, row = _groups(values, ROWS, D)
    for group in range(0, ROWS // 8):
        if (group * 8 < first) | (group * 8 + 8 > past):
            here = ((row + group * 8 >= first) & (row + group * 8 < past))[:, None]
            _keep(groups, at, group, here, ROWS, D)


@gluon.jit
def blank_unseen(values, at, seen, half, members, step, ROWS: gl.constexpr, D: gl.constexpr):
    """Zero the keys that a packed mask hides from everybody. For ``seen`` and what follows it see `some_unseen`."""
    groups, row = _groups(values, ROWS, D)
    words = gl.load(seen + row // 2)
    for member in range(1, members):
        words = words | gl.load(seen + member * step + row // 2)
    words = words >> (half * 16)
    for group in range(0, ROWS // 8):
        here = (((words >> (2 * group + row % 2)) & 1) != 0)[:, None]
        _keep(groups, at, group, here, ROWS, D)


@gluon.jit
def blank_blind(values, at, lse, ROWS: gl.constexpr, D: gl.constexpr):
    """Zero the queries, or their gradients, that see nothing: their ``lse`` is +inf."""
    groups, row = _groups(values, ROWS, D)
    for group in range(0, ROWS // 8):
        here = (gl.load(lse + group * 8 + row) != float("inf"))[:, None]
        _keep(groups, at, group, here, ROWS, D)

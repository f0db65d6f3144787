"""TMA loads and stores of rows that end where their sequence ends."""

from __future__ import annotations

from headwise.backends.triton.hopper.gluon_names import gl, gluon, load_tile, store_tile

# Descriptors of packed tensors have two dims more, after whose last element an address comes round: (far, end of the
# sequence, far - length + row) is the row, and past the bounds of the third dim after the sequence's end. See `PackedBox`.
_FAR = gl.constexpr(2**30)


@gluon.jit
def load_rows(desc, batch, head, first, length, row, column, barrier, buffer, PACKED: gl.constexpr):
    """Rows ``row`` and on, columns ``column`` and on, of a sequence of ``length`` rows; zeros past its end.

    A packed sequence begins at the token ``first``; any other at the first one, and ends where the tensor ends.
    """
    if PACKED:
        load_tile(desc, [_FAR, first + length, _FAR - length + row, head, column], barrier, buffer)
    else:
        load_tile(desc, [batch, head, row, column], barrier, buffer)


@gluon.jit
def store_rows(desc, batch, head, first, length, row, column, buffer, PACKED: gl.constexpr):
    """The same the other way; nothing is written past the end."""
    if PACKED:
        store_tile(desc, [_FAR, first + length, _FAR - length + row, head, column], buffer)
    else:
        store_tile(desc, [batch, head, row, column], buffer)

"""Query positions that are not ours.

Here query ``i`` sits at position ``i + Sk - Sq``: bottom-right. Elsewhere it may sit at ``i + offset``: offset 0 is
top-left alignment, the length of a cache is ONNX's. The two differ by a constant, so a window of ours says the same.
"""

from __future__ import annotations

UNBOUNDED = -1


def aligned(queries: int, keys: int, offset: int, left: int, right: int) -> tuple[int, tuple[int, int]]:
    """How many keys to give to our attention, and the window, so that query i sees ``i+offset-left <= j <= i+offset+right``.

    -1 is unbounded. Fewer keys than there are: the others are seen by nobody. More: append keys and mask them out, which
    happens only where the left bound runs past the last key.
    """
    given = keys
    if right != UNBOUNDED:
        given = min(keys, queries + offset + right)
        if given <= 0:
            return 0, (UNBOUNDED, UNBOUNDED)
    if left != UNBOUNDED:
        given = max(given, queries + offset - left)
    shift = offset - (given - queries)  # their position less ours; from -right to left
    return given, (
        left - shift if left != UNBOUNDED else UNBOUNDED,
        right + shift if right != UNBOUNDED else UNBOUNDED,
    )

"""Numbers that another library's attention takes and our op, which wants them positive, does not."""

from __future__ import annotations

import math

from torch import Tensor


def with_positive_scale(what: str, q: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """Queries and a scale that is positive or None, with the same scores.

    what: the argument as its caller knows it. A scale of 0 makes all scores 0, so the result is the mean of what is seen.
    """
    if scale is None or (scale > 0 and scale != math.inf):
        return q, scale
    if not math.isfinite(scale):
        raise NotImplementedError(f"{what} is {scale}; it needs to be a finite number, or None for 1 / sqrt(head dim)")
    return (q * 0.0, 1.0) if scale == 0 else (-q, -scale)

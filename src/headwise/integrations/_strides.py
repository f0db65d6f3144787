"""Layouts that our ops refuse and other libraries take."""

from __future__ import annotations

from torch import Tensor


def with_contiguous_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same, copied where the last dim is not contiguous."""
    if q.stride()[-1] == k.stride()[-1] == v.stride()[-1] == 1:
        return q, k, v
    q, k, v = (x if x.stride()[-1] == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v

"""How results lie in memory."""

from __future__ import annotations

from torch import Tensor


def layouts(results: dict[str, Tensor]) -> dict[str, tuple[object, ...]]:
    """dtype, shape, and the strides that mean something."""
    return {
        name: (x.dtype, tuple(x.shape), [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1 and x.numel()])
        for name, x in results.items()
    }

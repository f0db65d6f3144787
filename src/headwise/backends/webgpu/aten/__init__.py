"""PyTorch's own operators on arrays.

Each module fills `array.OPERATORS` with one family. What is in none of them is taken apart by PyTorch's decompositions, and
what has none raises.
"""

from __future__ import annotations

from headwise.backends.webgpu.aten import (
    convolutions,
    counting,
    indexing,
    loading,
    making,
    optimizers,
    pointwise,
    products,
    random,
    recurrent,
    reductions,
    resampling,
    results,
    rows,
    sorting,
    transformer,
    views,
    wide,
    writing,
)
from headwise.backends.webgpu.aten.rest import missing

results.register()

__all__ = [
    "convolutions", "counting", "indexing", "loading", "making", "missing", "optimizers", "pointwise", "products", "random",
    "recurrent", "reductions", "resampling", "results", "rows", "sorting", "transformer", "views", "wide", "writing",
]  # fmt: skip

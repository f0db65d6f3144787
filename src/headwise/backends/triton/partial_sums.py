"""Sums of float32 partials, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.backends.triton.blocks import power_of_two

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu

_TILE = 1024


@triton.jit(do_not_specialize=["outer", "count", "inner"])
def _sum(partials, out, outer, count, inner, RESULTS: tl.constexpr, PARTIALS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * RESULTS + tl.arange(0, RESULTS)
    acc = tl.zeros([RESULTS, PARTIALS], tl.float32)
    for first in range(0, outer * inner, PARTIALS):
        j = first + tl.arange(0, PARTIALS)
        at = (j // inner * count.to(tl.int64) * inner + j % inner)[None, :] + (i * inner)[:, None]
        acc += tl.load(partials + at, mask=(i < count)[:, None] & (j < outer * inner)[None, :], other=0.0)
    tl.store(out + i, tl.sum(acc, 1).to(out.dtype.element_ty), mask=i < count)


def sum_partials(gpu: Gpu, partials: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """partials ``(outer, *shape, inner)`` summed over the first and the last dim."""
    outer, count, inner = partials.shape[0], math.prod(shape), partials.shape[-1]
    if outer * inner == 0:
        return gpu.zeros(shape, dtype)
    out = gpu.empty(shape, dtype)
    at_once = min(power_of_two(outer * inner), _TILE)
    results = _TILE // at_once
    if count:
        gpu.launch(_sum, (-(-count // results),), (partials, out), (outer, count, inner), (results, at_once))
    return out

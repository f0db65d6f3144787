"""Counters in memory that programs of a launch share, zero before it and zero again after it."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_LEAST = 1024  # so that few sizes do for all

_kept: dict[tuple[int, int], Tensor] = {}


def zeros(like: Tensor, count: int) -> Tensor:
    """At least ``count`` int32 zeros where ``like`` lies, for a launch on the current stream that leaves zeros behind.

    Launches on one stream come one after the other and share one array. A launch that is captured in a CUDA graph gets one
    of its own, zeroed by the graph itself. So does every launch where Inductor may be making graphs: its rounds before the
    capture allocate from the memory of the graph, and nothing of that may be kept.
    """
    if not like.is_cuda:  # the interpreter
        return like.new_zeros(count, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing() or "torch._inductor.cudagraph_trees" in sys.modules:
        return like.new_zeros(count, dtype=torch.int32)
    device = like.get_device()
    key = (device, torch._C._cuda_getCurrentRawStream(device))
    kept = _kept.get(key)
    if kept is None or kept.numel() < count:
        kept = _kept[key] = like.new_zeros(max(count, _LEAST), dtype=torch.int32)
    return kept

"""Counters in memory that programs of a launch share, zero before it and zero again after it."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_LEAST = 1024  # so that few sizes do for all
_PER_THREAD = 2  # cudaStreamPerThread

_kept: dict[tuple[int, int], Tensor] = {}


def zeros(like: Tensor, count: int) -> Tensor:
    """At least ``count`` int32 zeros where ``like`` lies, for a launch on the current stream that leaves zeros behind.

    Launches on one stream come one after the other and share one array, which is kept. Not so where that might not hold: a
    launch that is captured in a CUDA graph gets one of its own, zeroed by the graph itself; "per-thread default stream" is
    one name for many streams; and while Inductor makes graphs, its rounds before the capture allocate from the memory of
    the graph, so that nothing that is made then may be kept.
    """
    device = like.get_device()
    if device < 0:  # the interpreter
        return like.new_zeros(count, dtype=torch.int32)
    stream = torch._C._cuda_getCurrentRawStream(device)
    if (
        stream == _PER_THREAD
        or device != torch._C._cuda_getDevice()  # which is the one that is asked whether it captures
        or torch.cuda.is_current_stream_capturing()
    ):
        return like.new_zeros(count, dtype=torch.int32)
    kept = _kept.get((device, stream))
    if kept is None or kept.numel() < count:
        kept = like.new_zeros(max(count, _LEAST), dtype=torch.int32)
        if "torch._inductor.cudagraph_trees" not in sys.modules:
            _kept[device, stream] = kept
    return kept

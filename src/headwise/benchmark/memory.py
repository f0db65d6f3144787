"""The most memory a call holds beyond its inputs, its results included.

On the CPU it is the running sum of the allocations that PyTorch's profiler records. Other ways miss some of them:

* a `TorchDispatchMode` does not see what our operators allocate inside,
* the process's peak resident memory (VmHWM) misses a buffer that is allocated but not touched, and memory that malloc
  kept from an earlier call; it exists on Linux only, and a kernel may forbid its reset.

The profiler records every tensor allocation of the thread, those of C++ kernels included. It does not record the tiles
of the CPU backend's worker threads (a few megabytes each) or a math library's own buffers (a megabyte or two).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from headwise.benchmark.timing import Action


def peak_extra(action: Action, device: str) -> int:
    """Bytes held at the worst moment of one call of ``action``, beyond what was held before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if device == "webgpu":
        return _peak_of_pool(action)
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet_stderr():
        recorded.start()
    try:
        action()
    finally:
        with _quiet_stderr():
            recorded.stop()
    results = recorded.profiler.kineto_results if recorded.profiler is not None else None
    assert results is not None, "the profiler recorded nothing"
    changes = [e for e in results.events() if e.name() == "[memory]" and e.device_type() == DeviceType.CPU]
    held = peak = 0
    for event in sorted(changes, key=lambda e: e.start_ns()):
        held += event.nbytes()  # type: ignore[attr-defined]  # missing in PyTorch's stubs
        peak = max(peak, held)
    return peak


def _peak_of_pool(action: Action) -> int:
    """How much the pool of WebGPU buffers grows: it starts empty and frees nothing during the call."""
    from headwise.backends.webgpu import runtime

    device = runtime.device()
    device.synchronize()
    gc.collect()
    device.pool.trim()
    before = device.pool.allocated
    action()
    device.synchronize()
    return device.pool.allocated - before


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler's C++ code writes to stderr at each start and stop, in the middle of a progress bar."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)

"""The most memory a call holds beyond its inputs, its results included.

On the CPU this is the running sum of what PyTorch's allocator reports to the profiler. Other ways miss what matters:

* a `TorchDispatchMode` sees our operators from outside; what they allocate inside runs below it,
* the process's resident peak (VmHWM) misses a buffer that is allocated but not touched, and memory that malloc kept
  from an earlier call; it exists on Linux only, and a kernel may forbid its reset.

The profiler hears every tensor allocation of the thread, those of C++ kernels included, exactly and repeatably (the
CPU backend's worker threads it does not hear: each holds a few megabytes of tiles). It
does not hear what a math library takes from malloc for itself (a megabyte or two of packing buffers).
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
        _run_and_drop(action)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if device == "webgpu":
        return _peak_of_pool(action)
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet_stderr():
        recorded.start()
    try:
        _run_and_drop(action)
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
    """What the pool of WebGPU's buffers grew by: it begins empty and gives nothing back meanwhile."""
    from headwise.backends.webgpu import runtime

    device = runtime.device()
    device.synchronize()
    gc.collect()
    device.pool.trim()
    before = device.pool.allocated
    _run_and_drop(action)
    device.synchronize()
    return device.pool.allocated - before


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler's C++ side announces each start and stop on stderr, in the middle of a progress bar."""
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


def _run_and_drop(action: Action) -> None:
    action()

"""GPU time, measured with timestamp queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import wgpu

if TYPE_CHECKING:
    from headwise.backends.webgpu.runtime import OpenDevice

_MOST_PASSES = 512


class Timer:
    """See `OpenDevice.timed`."""

    def __init__(self, device: OpenDevice) -> None:
        if not device.capabilities.timestamps:
            raise RuntimeError(f"{device.capabilities.name} has no timestamp queries")
        self._gpu = device.gpu
        self._queries = self._gpu.create_query_set(type="timestamp", count=2 * _MOST_PASSES)
        self._passes = 0
        self.seconds = 0.0  # from the start of the first pass to the end of the last
        self.busy_seconds = 0.0  # within passes: without waits for the next submission

    def next_pass(self) -> dict[str, Any]:
        if self._passes == _MOST_PASSES:
            raise RuntimeError(f"more than {_MOST_PASSES} passes are timed at once; time fewer dispatches")
        first = 2 * self._passes
        self._passes += 1
        return {
            "query_set": self._queries,
            "beginning_of_pass_write_index": first,
            "end_of_pass_write_index": first + 1,
        }

    def finish(self) -> None:
        """Read the timestamps; they count nanoseconds."""
        if not self._passes:
            return
        count, usage = 2 * self._passes, wgpu.BufferUsage
        resolved = self._gpu.create_buffer(size=8 * count, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        encoder = self._gpu.create_command_encoder()
        encoder.resolve_query_set(self._queries, 0, count, resolved, 0)
        self._gpu.queue.submit([encoder.finish()])
        ticks = np.frombuffer(self._gpu.queue.read_buffer(resolved), np.uint64)
        self.seconds = float(int(ticks[-1]) - int(ticks[0])) * 1e-9
        self.busy_seconds = float(sum(int(end) - int(begin) for begin, end in ticks.reshape(-1, 2))) * 1e-9

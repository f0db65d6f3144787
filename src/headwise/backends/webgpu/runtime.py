"""The device: kernels, memory, and the recording of a step.

Dispatches are recorded into one command buffer and handed to the GPU when a result is read back, or when enough of them
have gathered: a dispatch costs the host microseconds, a submission and a readback hundreds. Pipelines are cached by
their rendered source, bind groups by what they bind; nothing is compiled or built twice.

Everything below is done under the device's lock: threads may call at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import wgpu

from headwise.backends.webgpu import adapter as adapters
from headwise.backends.webgpu import passes, shaders
from headwise.backends.webgpu.storage import OutOfMemory, Pool, Region, Storage, contiguous_strides

# Dispatches recorded before the GPU is given them: few enough that it does not wait for the host, many enough that
# submitting costs little each.
_MOST_RECORDED = 64
_MOST_STAGING = 1 << 28  # bytes of free staging buffers that are kept
_MOST_CACHED = 4096  # bind groups and parameter blocks
_MOST_PASSES_TIMED = 512


class DeviceLost(RuntimeError):
    """The GPU went away (a driver reset, a hang, an unplugged card). The next call opens it again."""


@dataclass
class Counts:
    """What crossed the bus and what was launched, since the process began."""

    uploads: int = 0
    uploaded_bytes: int = 0
    readbacks: int = 0
    read_bytes: int = 0
    dispatches: int = 0
    submissions: int = 0
    pipelines: int = 0


@dataclass(frozen=True)
class Kernel:
    """A compiled variant of a kernel family."""

    pipeline: Any
    layout: Any
    source: shaders.Source

    def __hash__(self) -> int:
        return id(self)


# A dispatch with all it needs: kernel, bind group, workgroups.
Prepared = tuple[Kernel, Any, tuple[int, ...]]


class Trace:
    """What a launcher does to the device, while it is traced."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.dispatches: list[tuple[Kernel, tuple[int, ...], bytes, list[tuple[Storage, int, int]]]] = []
        self.replayable = True  # nothing crossed the bus


class Device:
    def __init__(self, given: tuple[Any, adapters.Capabilities] | None = None, dialect: str = shaders.NAGA) -> None:
        """Of the best adapter here; or what is given: anything that is called as wgpu's device is, and what it can do."""
        self.gpu, self.capabilities = given or _open()
        self.dialect = dialect
        self.lock = threading.RLock()
        self.explained_loss = _ExplainedLoss(self)
        self.pool = Pool(self.gpu, self.capabilities.buffer_bytes, self.capabilities.name, self.flush)
        self.counts = Counts()
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._compiled: dict[str, Kernel] = {}
        self._parameters: dict[bytes, Any] = {}
        self._groups: dict[tuple[Any, ...], Any] = {}
        self._staging: dict[int, list[Any]] = {}
        self._encoder: Any = None
        self._pass: Any = None
        self._record: passes.Record  # into the open pass
        self.recording = 0  # number of the command buffer that is being recorded
        self._recorded = 0  # dispatches in it
        self._timer: _Timer | None = None
        self._bound_kernel: Kernel | None = None  # in the open pass
        self.trace: Trace | None = None
        self.plans: dict[Any, Any] = {}  # how to do a call again: see replay.py
        self.prepared: dict[Any, list[Prepared]] = {}  # what such a call dispatches, by what it binds
        if given is None:
            if self.capabilities.tier >= "C":
                self.capabilities = self._with_subgroups_tried(self.capabilities)
            self.capabilities = self.capabilities._replace(native_half=self._rounds_halves())
            self.counts = Counts()

    def _rounds_halves(self) -> bool:
        """Does the driver's own packing of float16 round to nearest even, as no specification asks of it?"""
        wrong = self.empty((1,), torch.int32)
        self.run(self.kernel("half_probe"), 1, (), result=wrong)
        return self.read(wrong).item() == 0

    def _with_subgroups_tried(self, capabilities: adapters.Capabilities) -> adapters.Capabilities:
        """Some drivers report no true size of a subgroup, and none promises the order of its lanes: ask a kernel."""
        result = self.empty((2,), torch.int32)
        self.run(self.kernel("subgroup_probe"), 1, (), result=result)
        size, out_of_order = self.read(result).tolist()
        if out_of_order or size < 4:
            return capabilities._replace(tier="B", subgroup_size=0)
        # Some compilers choose a width kernel by kernel: what counts is the smallest that the vendor's may choose.
        return capabilities._replace(
            subgroup_size=min(size, adapters.NARROWEST_SUBGROUP.get(capabilities.vendor, size))
        )

    # ------------------------------------------------------------------------------------------------------- kernels

    def kernel(self, name: str, **variant: Any) -> Kernel:
        """Kernel family ``name`` in one variant, compiled on first use."""
        key = (name, *variant.items())
        found = self._kernels.get(key)
        if found is None:
            source = shaders.render(name, dialect=self.dialect, native_half=self.capabilities.native_half, **variant)
            found = self._compiled.get(source.text) or self._compile(name, source)
            self._kernels[key] = self._compiled[source.text] = found
        return found

    def _compile(self, name: str, source: shaders.Source) -> Kernel:
        entries: list[dict[str, Any]] = [
            {"binding": 0, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": "uniform"}}
        ]
        for i, buffer in enumerate(source.buffers):
            kind = "storage" if buffer.written else "read-only-storage"
            entries.append({"binding": i + 1, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": kind}})
        if len(source.buffers) > self.capabilities.storage_buffers:
            raise RuntimeError(
                f"kernel {name} binds {len(source.buffers)} storage buffers; "
                f"WebGPU promises {self.capabilities.storage_buffers}"
            )
        layout = self.gpu.create_bind_group_layout(entries=entries)
        module = self.gpu.create_shader_module(label=name, code=source.text)
        pipeline = self.gpu.create_compute_pipeline(
            label=name,
            layout=self.gpu.create_pipeline_layout(bind_group_layouts=[layout]),
            compute={"module": module, "entry_point": "main"},
        )
        self.counts.pipelines += 1
        return Kernel(pipeline, layout, source)

    def run(
        self, kernel: Kernel, groups: int | tuple[int, ...], parameters: tuple[float, ...], **regions: Region
    ) -> None:
        """Record one dispatch.

        groups      workgroups: of a grid, or a plain number, which may be any size: the kernel sees it as ``group_id``
        parameters  values for the fields of ``params(…)`` in the shader, in their order
        regions     what is bound, by the names in the shader; where each begins is passed along by itself
        """
        if isinstance(groups, int):
            groups = spread(groups)
        if 0 in groups:
            return
        groups = (*groups, 1, 1)[:3]
        source = kernel.source
        if len(regions) != len(source.buffers):
            raise RuntimeError(f"{source.name} binds {[b.name for b in source.buffers]}, and was given {list(regions)}")
        bound, starts, storages = [], [], []
        for buffer in source.buffers:
            region = regions[buffer.name]
            binding, start = self._binding(source.name, region, buffer)
            bound.append(binding)
            starts.append(start)
            storages.append(region.storage)
            region.storage.last_use = self.recording
        data = source.pack(parameters, starts)
        if self.trace is not None:
            traced = [(storage, first, size) for storage, (_, first, size) in zip(storages, bound, strict=True)]
            self.trace.dispatches.append((kernel, groups, data, traced))
        self.dispatch(kernel, groups, data, bound)

    def dispatch(self, kernel: Kernel, groups: tuple[int, ...], data: bytes, bound: list[tuple[Any, int, int]]) -> None:
        """Record one dispatch of what is bound already, with packed parameters."""
        self.dispatch_prepared([self.prepare(kernel, groups, data, bound)])

    def prepare(
        self, kernel: Kernel, groups: tuple[int, ...], data: bytes, bound: list[tuple[Any, int, int]]
    ) -> Prepared:
        key = (kernel, data, *bound)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = self._bind_group(kernel, data, bound)
        return kernel, group, groups

    def keep_prepared(self, key: Any, dispatches: list[Prepared]) -> list[Prepared]:
        if len(self.prepared) >= _MOST_CACHED:
            self.prepared.clear()
        self.prepared[key] = dispatches
        return dispatches

    def dispatch_prepared(self, dispatches: list[Prepared]) -> None:
        """Record dispatches."""
        for kernel, group, groups in dispatches:
            if self._pass is None:
                self._begin_pass()
            if kernel is self._bound_kernel:
                self._record(None, group, groups)
            else:
                self._record(kernel.pipeline, group, groups)
                self._bound_kernel = kernel
            self._recorded += 1
            if self._recorded >= _MOST_RECORDED:
                self.flush()
        self.counts.dispatches += len(dispatches)

    def _binding(self, name: str, region: Region, buffer: shaders.Buffer) -> tuple[tuple[Any, int, int], int]:
        """What to bind, as (buffer, offset, size), and where in it the region begins, in items of the shader's array."""
        storage, itemsize = region.storage, region.dtype.itemsize
        first, size = 0, storage.size
        if size > self.capabilities.binding_bytes:
            low, high = region.span()
            first = low * itemsize // 256 * 256
            size = min(storage.size, -(-high * itemsize // 16) * 16) - first
            if size > self.capabilities.binding_bytes:
                raise OutOfMemory(
                    f"{name} would have to see {size} bytes of {buffer.name} at once; {self.capabilities.name} binds at "
                    f"most {self.capabilities.binding_bytes}. Split the call (a shorter sequence or row, fewer ids), or "
                    f"use backend='cpu'"
                )
        start = region.offset - first // itemsize
        if start % buffer.unit:
            raise RuntimeError(f"{buffer.name} begins at element {start}; the kernel needs a multiple of {buffer.unit}")
        return (storage.buffer, first, size), start // buffer.unit

    def _bind_group(self, kernel: Kernel, data: bytes, bound: list[tuple[Any, int, int]]) -> Any:
        if len(self._groups) >= _MOST_CACHED:
            self._groups.clear()
            self._parameters.clear()
            self.prepared.clear()
        uniform = self._parameters.get(data)
        if uniform is None:
            uniform = self.gpu.create_buffer_with_data(data=data, usage=wgpu.BufferUsage.UNIFORM)
            self._parameters[data] = uniform
        entries = [{"binding": 0, "resource": {"buffer": uniform, "offset": 0, "size": len(data)}}]
        for i, (buffer, offset, size) in enumerate(bound):
            entries.append({"binding": i + 1, "resource": {"buffer": buffer, "offset": offset, "size": size}})
        return self.gpu.create_bind_group(layout=kernel.layout, entries=entries)

    # ------------------------------------------------------------------------------------------------------- recording

    def _begin_pass(self) -> None:
        if self._encoder is None:
            self._encoder = self.gpu.create_command_encoder()
        timestamps = None if self._timer is None else self._timer.next_pass()
        self._pass = self._encoder.begin_compute_pass(timestamp_writes=timestamps)
        self._record = passes.recorder(self._pass)
        self._bound_kernel = None

    def _encode_outside_a_pass(self) -> Any:
        if self._pass is not None:
            self._pass.end()
            self._pass = None
        if self._encoder is None:
            self._encoder = self.gpu.create_command_encoder()
        return self._encoder

    def flush(self) -> None:
        """Hand what was recorded to the GPU. It does not wait."""
        if self._encoder is None:
            return
        encoder = self._encode_outside_a_pass()
        self._encoder = None
        self.recording += 1
        self._recorded = 0
        self.gpu.queue.submit([encoder.finish()])
        self.counts.submissions += 1

    def synchronize(self) -> None:
        """Wait until everything recorded so far is done."""
        with self.lock:
            done = self.empty((1,), torch.float32)
            self.read(done)

    # -------------------------------------------------------------------------------------------------------- memory

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Region:
        """Uninitialised memory. Strides, where given, are those of a dense layout of the shape."""
        count = 1
        for size in shape:
            count *= size
        # Whole vectors, so that kernels may write the last one in full.
        storage = self.pool.take(-(-count * dtype.itemsize // 16) * 16)
        if self.trace is not None:
            self.trace.storages.append(storage)
        return Region(storage, dtype, shape, contiguous_strides(shape) if strides is None else strides)

    def upload(self, tensor: torch.Tensor) -> Region:
        """A copy of a CPU tensor. Dense layouts keep their strides; a dim that was expanded is not stored twice."""
        shape, strides = tuple(tensor.shape), list(tensor.stride())
        kept = tensor
        for dim, stride in enumerate(strides):
            if stride == 0 and shape[dim] > 1:
                kept = kept.narrow(dim, 0, 1)
        if not _is_dense(kept):
            # Copied in the order in which it lies: heads that lie inside stay there.
            order = sorted(range(kept.dim()), key=lambda d: -kept.stride()[d])
            back = sorted(range(kept.dim()), key=lambda d: order[d])
            kept = kept.permute(order).contiguous().permute(back)
            strides = [0 if s == 0 and n > 1 else c for s, n, c in zip(strides, shape, kept.stride(), strict=True)]
        region = self.empty(tuple(kept.shape), tensor.dtype)
        flat = kept.as_strided((kept.numel(),), (1,)).detach()
        self._write(region.storage, _bytes_of(flat))
        return Region(region.storage, tensor.dtype, shape, strides)

    def _write(self, storage: Storage, data: Any) -> None:
        if self.trace is not None:
            self.trace.replayable = False
        nbytes = data.nbytes
        if nbytes == 0:
            return
        if storage.last_use == self.recording:
            self.flush()  # a write is done before the next submission, and this memory is still being read by it
        if nbytes % 4:
            data = np.concatenate([data, np.zeros(4 - nbytes % 4, np.uint8)])
        self.gpu.queue.write_buffer(storage.buffer, 0, data)
        self.counts.uploads += 1
        self.counts.uploaded_bytes += nbytes

    def read(self, region: Region) -> torch.Tensor:
        """The elements of a region as a CPU tensor, in the same layout. Waits for the GPU."""
        staging, tensor, size, skip = self._begin_read(region)
        if staging is not None:
            staging.map_sync("READ", 0, size)
            self._end_read(staging, tensor, size, skip)
        return tensor

    async def read_async(self, region: Region) -> torch.Tensor:
        """As `read`; other coroutines run while the GPU works."""
        with self.lock:
            staging, tensor, size, skip = self._begin_read(region)
        if staging is not None:
            await staging.map_async("READ", 0, size)
            with self.lock:
                self._end_read(staging, tensor, size, skip)
        return tensor

    def _begin_read(self, region: Region) -> tuple[Any, torch.Tensor, int, int]:
        if self.trace is not None:
            self.trace.replayable = False
        tensor = torch.empty_strided(region.shape, region.strides, dtype=region.dtype)
        if region.numel == 0:
            return None, tensor, 0, 0
        low, high = region.span()
        first = low * region.itemsize // 16 * 16
        size = -(-(high * region.itemsize - first) // 16) * 16
        staging = self._take_staging(size)
        encoder = self._encode_outside_a_pass()
        encoder.copy_buffer_to_buffer(region.storage.buffer, first, staging, 0, size)
        self.flush()
        self.counts.readbacks += 1
        self.counts.read_bytes += size
        return staging, tensor, size, low * region.itemsize - first

    def _end_read(self, staging: Any, tensor: torch.Tensor, size: int, skip: int) -> None:
        data = np.frombuffer(staging.read_mapped(0, size, copy=False), np.uint8)
        to = _bytes_of(tensor.as_strided((_span(tensor),), (1,)))
        to[:] = data[skip : skip + to.nbytes]
        staging.unmap()
        if sum(size * len(free) for size, free in self._staging.items()) + staging.size > _MOST_STAGING:
            staging.destroy()
        else:
            self._staging.setdefault(staging.size, []).append(staging)

    def _take_staging(self, size: int) -> Any:
        rounded = max(4096, 1 << (size - 1).bit_length()) if size < 1 << 26 else size
        free = self._staging.setdefault(rounded, [])
        if free:
            return free.pop()
        usage = wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.MAP_READ
        return self.gpu.create_buffer(size=rounded, usage=usage)

    # -------------------------------------------------------------------------------------------------------- timing

    @contextmanager
    def timed(self) -> Iterator[_Timer]:
        """Time of the GPU itself for what is recorded inside: ``timer.seconds``, after the block."""
        with self.lock:
            self.flush()
            self._timer = timer = _Timer(self)
            try:
                yield timer
                self.flush()
            finally:
                self._timer = None
            timer.finish()


def _open() -> tuple[Any, adapters.Capabilities]:
    adapter = adapters.choose()
    capabilities = adapters.capabilities(adapter)
    return adapters.open_device(adapter, capabilities), capabilities


class _Timer:
    def __init__(self, device: Device) -> None:
        if not device.capabilities.timestamps:
            raise RuntimeError(f"{device.capabilities.name} has no timestamp queries")
        self._device = device
        self._queries = device.gpu.create_query_set(type="timestamp", count=2 * _MOST_PASSES_TIMED)
        self._passes = 0
        self.seconds = 0.0  # from the begin of the first pass to the end of the last
        self.busy_seconds = 0.0  # inside of passes: waiting for the host to submit the next is left out

    def next_pass(self) -> dict[str, Any] | None:
        if self._passes == _MOST_PASSES_TIMED:
            raise RuntimeError(f"more than {_MOST_PASSES_TIMED} passes are timed at once; time fewer dispatches")
        first = 2 * self._passes
        self._passes += 1
        return {
            "query_set": self._queries,
            "beginning_of_pass_write_index": first,
            "end_of_pass_write_index": first + 1,
        }

    def finish(self) -> None:
        """First pass's begin to last pass's end; the clock ticks in nanoseconds."""
        if not self._passes:
            return
        gpu, count = self._device.gpu, 2 * self._passes
        usage = wgpu.BufferUsage
        resolved = gpu.create_buffer(size=8 * count, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        encoder = gpu.create_command_encoder()
        encoder.resolve_query_set(self._queries, 0, count, resolved, 0)
        gpu.queue.submit([encoder.finish()])
        ticks = np.frombuffer(gpu.queue.read_buffer(resolved), np.uint64)
        self.seconds = float(int(ticks[-1]) - int(ticks[0])) * 1e-9
        self.busy_seconds = float(sum(int(end) - int(begin) for begin, end in ticks.reshape(-1, 2))) * 1e-9


def spread(groups: int) -> tuple[int, int, int]:
    """A number of workgroups as a grid: one dimension holds 65535. The shader's ``group_id`` undoes this."""
    most = adapters.MOST_GROUPS
    if groups <= most:
        return groups, 1, 1
    rows = -(-groups // most)
    return -(-groups // rows), rows, 1


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or _span(tensor) == tensor.numel()


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _bytes_of(flat: torch.Tensor) -> Any:
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


# ------------------------------------------------------------------------------------------------------- one per process

_current: Device | None = None
_opening = threading.Lock()


def device() -> Device:
    """The device of this process, opened on first use, and again after it was lost."""
    global _current
    found = _current
    if found is None:
        with _opening:
            if _current is None:
                _current = Device()
            found = _current
    return found


@contextmanager
def current(device: Device) -> Iterator[None]:
    """Within the block this is the device of the process, and of all its threads."""
    global _current
    before, _current = _current, device
    try:
        yield
    finally:
        _current = before


def counts() -> Counts:
    """Uploads, readbacks, dispatches so far."""
    return replace(_current.counts) if _current is not None else Counts()


def forget(lost: Device | None = None) -> None:
    """Drop the device: the next call opens one anew. What lives on the old one cannot be used any more.

    ``lost``: only this one; somebody else may have opened another already.
    """
    global _current
    with _opening:
        if lost is None or _current is lost:
            _current = None


class _ExplainedLoss:
    """Turns the errors of a device that went away into one that says what to do."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is not None:
            self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Raises, if the device is lost; else the error may go its way."""
        if not isinstance(error, (wgpu.GPUError, RuntimeError)) or isinstance(error, DeviceLost):
            return
        if "lost" not in str(error).lower():
            return
        forget(self._device)
        raise DeviceLost(
            "the GPU was lost during this call (a driver reset, a kernel that ran too long, or a removed device). "
            "The next call opens it again; arrays that lived on it are gone, make them anew with headwise.webgpu.array"
        ) from error

"""The GPU: kernels, command buffers, uploads and readbacks.

Dispatches are collected in one command buffer, which is submitted when a result is read back or when it is full: a dispatch
costs the host about a microsecond, a submission and a readback hundreds. Pipelines are cached by their rendered source, bind
groups by what they bind (`OpenDevice.commands`).

All of this happens under the device's lock: any thread may call.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import wgpu

from headwise.backends.webgpu import adapter as adapters
from headwise.backends.webgpu import passes, shaders
from headwise.backends.webgpu.device import Binding, Device
from headwise.backends.webgpu.forks import Refusal
from headwise.backends.webgpu.shaders import Kernel
from headwise.backends.webgpu.storage import GpuMemory, Layout, Region, Storage
from headwise.backends.webgpu.timer import Timer

# Dispatches of a command buffer: few enough that the GPU does not wait for the host, enough to share the cost of submitting.
MOST_DISPATCHES = 64
_MOST_STAGING = 1 << 28  # bytes of free staging buffers that are kept
_MOST_COMMANDS = 4096  # lists of bind groups that are kept
_SCALARS = 1 << 16  # bytes of parameters that a command buffer brings along


class DeviceLost(RuntimeError):
    """The GPU went away (a driver reset, a hang, an unplugged card). The next call opens it again."""


@dataclass
class Counts:
    """Transfers and launches since the device was opened."""

    uploads: int = 0
    uploaded_bytes: int = 0
    readbacks: int = 0
    read_bytes: int = 0
    dispatches: int = 0
    submissions: int = 0
    pipelines: int = 0


# A dispatch ready to be encoded: handles of pipeline and bind group, workgroups.
Command = tuple[Any, Any, tuple[int, ...]]


class OpenDevice(Device):
    pool: GpuMemory

    def __init__(self, given: tuple[Any, adapters.Capabilities] | None = None, dialect: str = shaders.NAGA) -> None:
        """given: an object with the interface of wgpu's device, and its capabilities; the default is the best adapter."""
        self.gpu, self.capabilities = given or _open()
        self.dialect = dialect
        self.lock: Any = threading.RLock()
        self.pool = GpuMemory(self.gpu, self.capabilities.buffer_bytes, self.capabilities.name, self.flush)
        self.counts = Counts()
        self.encoding = passes.encoding(self.gpu)
        self.open_pass: Any = None  # its handle; None: there is none
        self.pending = 0  # dispatches in the command buffer
        self.capture: Any = None  # what records a step (capture.py)
        # Commands by the record and its buffers; the uniform buffer of each record.
        self.commands: dict[tuple[Any, ...], list[Command]] = {}
        self.uniforms: dict[Any, Any] = {}
        # Parameters of calls with scalars: written to one buffer when the command buffer is submitted.
        self._scalars = bytearray()
        self._scalar_buffer: Any = None
        self._layouts: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        # With the layout of their bind group, by source, and whether an offset of the parameters comes with the dispatch.
        self._pipelines: dict[tuple[str, bool], tuple[Any, Any]] = {}
        self._staging: dict[int, list[Any]] = {}
        self._encoder: Any = None
        self._pass: Any = None
        self._timer: Timer | None = None
        _opened.add(self)
        if given is None:
            if self.capabilities.tier >= "C":
                self.capabilities = self._with_subgroups_tried(self.capabilities)
            self.capabilities = self.capabilities._replace(native_half=self._rounds_halves())
            self.counts = Counts()

    def _rounds_halves(self) -> bool:
        """Does the driver's pack2x16float round to nearest even? WGSL does not require it."""
        wrong = self.empty((1,), torch.int32)
        self.run(self.kernel("half_probe"), 1, (), result=wrong)
        return self.read(wrong).item() == 0

    def _with_subgroups_tried(self, capabilities: adapters.Capabilities) -> adapters.Capabilities:
        """Probe the subgroup size, which some drivers report wrongly, and the order of lanes, which none guarantees."""
        result = self.empty((2,), torch.int32)
        self.run(self.kernel("subgroup_probe"), 1, (), result=result)
        size, out_of_order = self.read(result).tolist()
        if out_of_order or size < 4:
            return capabilities._replace(tier="B", subgroup_size=0)
        # Some compilers choose a size per kernel: what counts is the smallest that this vendor's may choose.
        return capabilities._replace(
            subgroup_size=min(size, adapters.NARROWEST_SUBGROUP.get(capabilities.vendor, size))
        )

    # ------------------------------------------------------------------------------------------------------- kernels

    def kernel(self, name: str, **variant: Any) -> Kernel:
        key = (name, *variant.items())
        found = self._kernels.get(key)
        if found is None:
            found = shaders.render(name, dialect=self.dialect, native_half=self.capabilities.native_half, **variant)
            self._kernels[key] = found
            self.pipeline(found)
        return found

    def pipeline(self, kernel: Kernel, at_offset: bool = False) -> tuple[Any, Any]:
        """The compiled kernel and the layout of its bind group."""
        found = self._pipelines.get((kernel.text, at_offset))
        if found is None:
            found = self._pipelines[kernel.text, at_offset] = self._compile(kernel, at_offset)
        return found

    def _compile(self, kernel: Kernel, at_offset: bool) -> tuple[Any, Any]:
        most = self.capabilities.storage_buffers
        if len(kernel.buffers) > most:
            raise RuntimeError(f"{kernel.name} binds {len(kernel.buffers)} storage buffers; WebGPU promises {most}")
        types = ["uniform", *("storage" if b.written else "read-only-storage" for b in kernel.buffers)]
        layout = self.gpu.create_bind_group_layout(
            entries=[
                {
                    "binding": i,
                    "visibility": wgpu.ShaderStage.COMPUTE,
                    "buffer": {"type": kind, "has_dynamic_offset": at_offset and i == 0},
                }
                for i, kind in enumerate(types)
            ]
        )
        pipeline = self.gpu.create_compute_pipeline(
            label=kernel.name,
            layout=self.gpu.create_pipeline_layout(bind_group_layouts=[layout]),
            compute={
                "module": self.gpu.create_shader_module(label=kernel.name, code=kernel.text),
                "entry_point": "main",
            },
        )
        self.counts.pipelines += 1
        return pipeline, layout

    # ------------------------------------------------------------------------------------------------- command buffers

    def dispatch(self, kernel: Kernel, groups: tuple[int, ...], parameters: bytes, bindings: list[Binding]) -> None:
        """Dispatch immediately: for probes, tests and benchmarks. Launchers are recorded (recorder.py)."""
        uniform = self.uniform(parameters)
        bound = [(binding.storage.buffer, binding.first, binding.size) for binding in bindings]
        pipeline, group, _ = self.command(kernel, groups, (uniform, 0, len(parameters)), bound)
        compute_pass, encoding = self.begin_pass(), self.encoding
        encoding.set_pipeline(compute_pass, pipeline)
        encoding.set_bind_group(compute_pass, 0, group, 0, encoding.no_offsets)
        encoding.dispatch(compute_pass, *groups)
        self.dispatched(1)

    def uniform(self, parameters: bytes, changes: bool = False) -> Any:
        usage = wgpu.BufferUsage.UNIFORM | (wgpu.BufferUsage.COPY_DST if changes else 0)
        return self.gpu.create_buffer_with_data(data=parameters, usage=usage)

    def command(
        self, kernel: Kernel, groups: tuple[int, ...], parameters: tuple[Any, int, int],
        bound: Sequence[tuple[Any, int, int]], at_offset: bool = False,
    ) -> Command:  # fmt: skip
        """parameters, and each of bound: buffer, first byte, bytes.

        at_offset: an offset of the parameters comes with the dispatch.
        """
        pipeline, layout = self.pipeline(kernel, at_offset)
        return self.encoding.handle(pipeline), self.encoding.bind_group(layout, (parameters, *bound)), groups

    def keep_commands(self, key: tuple[Any, ...], commands: list[Command]) -> None:
        if len(self.commands) >= _MOST_COMMANDS:
            self.commands.clear()
            self.uniforms.clear()
        self.commands[key] = commands

    def scalar_buffer(self) -> Any:
        if self._scalar_buffer is None:
            usage = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST
            self._scalar_buffer = self.gpu.create_buffer(size=_SCALARS, usage=usage)
        return self._scalar_buffer

    def place_scalars(self, parameters: bytes | bytearray) -> Any:
        """Where the parameters of a call will be in the buffer of scalars, as passes take it."""
        first = len(self._scalars)
        if first + len(parameters) > _SCALARS:
            self.flush()
            first = 0
        self._scalars += parameters
        return self.encoding.offset(first)

    def begin_pass(self) -> Any:
        """The handle of the open pass."""
        if self.open_pass is None:
            if self._encoder is None:
                self._encoder = self.gpu.create_command_encoder()
            timestamps = None if self._timer is None else self._timer.next_pass()
            self._pass = self._encoder.begin_compute_pass(timestamp_writes=timestamps)
            self.open_pass = self.encoding.handle(self._pass)
        return self.open_pass

    def dispatched(self, count: int) -> None:
        self.counts.dispatches += count
        self.pending += count
        if self.pending >= MOST_DISPATCHES:
            self.flush()

    def _encode_outside_a_pass(self) -> Any:
        if self._pass is not None:
            self._pass.end()
            self._pass = self.open_pass = None
        if self._encoder is None:
            self._encoder = self.gpu.create_command_encoder()
        return self._encoder

    def flush(self) -> None:
        """Submit the command buffer. Does not wait."""
        if self._encoder is None:
            return
        encoder = self._encode_outside_a_pass()
        self._encoder = None
        self.pool.submission += 1
        self.pending = 0
        if self._scalars:
            # The queue writes after what was submitted before, and before what is submitted next.
            self.gpu.queue.write_buffer(self._scalar_buffer, 0, self._scalars)
            self._scalars = bytearray()
        self.gpu.queue.submit([encoder.finish()])
        self.counts.submissions += 1

    def synchronize(self) -> None:
        """Wait until everything that was dispatched is done."""
        with self.lock:
            self.read(self.empty((1,), torch.float32))

    # -------------------------------------------------------------------------------------------------------- memory

    def layout(self, region: Region) -> Layout:
        """The layout of a region: the same object for equal layouts."""
        facts = (region.dtype, region.shape, region.strides, region.offset, region.storage.size)
        found = self._layouts.get(facts)
        if found is None:
            found = self._layouts[facts] = Layout(*facts)
        return found

    def upload(self, tensor: torch.Tensor, constant: bool = False) -> Region:
        """A copy of a CPU tensor. Dense layouts keep their strides; expanded dims stay expanded.

        constant: follows from shapes and options, so that a capture may hold it.
        """
        shape, strides = tuple(tensor.shape), list(tensor.stride())
        kept = tensor
        for dim, stride in enumerate(strides):
            if stride == 0 and shape[dim] > 1:
                kept = kept.narrow(dim, 0, 1)
        if not _is_dense(kept):
            # Copied in memory order: heads inside stay inside.
            order = sorted(range(kept.dim()), key=lambda d: -kept.stride()[d])
            back = sorted(range(kept.dim()), key=lambda d: order[d])
            kept = kept.permute(order).contiguous().permute(back)
            strides = [0 if s == 0 and n > 1 else c for s, n, c in zip(strides, shape, kept.stride(), strict=True)]
        flat = kept.as_strided((kept.numel(),), (1,)).detach()
        if self.capture is None:
            region = self.empty(tuple(kept.shape), tensor.dtype)
        else:
            region = self.capture._empty_for_upload(tuple(kept.shape), tensor.dtype, constant)
            self.capture._uploaded(region.storage, _bytes_of(flat))
        self._write(region.storage, _bytes_of(flat))
        return Region(region.storage, tensor.dtype, shape, strides)

    def _write(self, storage: Storage, data: Any) -> None:
        nbytes = data.nbytes
        if nbytes == 0:
            return
        if storage.busy_until == self.pool.submission:
            self.flush()  # a write runs before unsubmitted commands, and these may use this buffer
        self.write(storage, 0, data)

    def write(self, storage: Storage, first: int, data: Any) -> None:
        """Bytes into a buffer, after what was submitted and before what will be."""
        nbytes = len(data)
        if nbytes % 4:
            data = np.concatenate([np.frombuffer(data, np.uint8), np.zeros(4 - nbytes % 4, np.uint8)])
        self.gpu.queue.write_buffer(storage.buffer, first, data)
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

    # ------------------------------------------------------------------------------------------- timing, a lost device

    @contextmanager
    def timed(self) -> Iterator[Timer]:
        """GPU time of what is dispatched in the block: ``timer.seconds``, after it."""
        with self.lock:
            self.flush()
            self._timer = timer = Timer(self)
            try:
                yield timer
                self.flush()
            finally:
                self._timer = None
            timer.finish()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the lock; turn errors of a lost device into `DeviceLost`."""
        with self.lock:
            try:
                yield
            except BaseException as error:
                self.explain_loss(error)
                raise

    def explain_loss(self, error: BaseException) -> None:
        """Raise `DeviceLost` if that is what the error means."""
        if not isinstance(error, (wgpu.GPUError, RuntimeError)) or isinstance(error, DeviceLost):
            return
        if "lost" not in str(error).lower():
            return
        forget(self)
        raise DeviceLost(
            "the GPU was lost during this call (a driver reset, a kernel that ran too long, or a removed device). "
            "The next call opens it again; arrays that lived on it are gone, make them anew with headwise.webgpu.array"
        ) from error


def _open() -> tuple[Any, adapters.Capabilities]:
    process.started = True
    adapter = adapters.choose()
    capabilities = adapters.capabilities(adapter)
    return adapters.open_device(adapter, capabilities), capabilities


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or _span(tensor) == tensor.numel()


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _bytes_of(flat: torch.Tensor) -> Any:
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


# ------------------------------------------------------------------------------------------------------- one per process


class _Process:
    """The device of this process, and the lock under which it is opened."""

    device: OpenDevice | None = None
    opening: Any = threading.Lock()
    started = False  # is the driver loaded?


process = _Process()
_opened: weakref.WeakSet[OpenDevice] = weakref.WeakSet()


def device() -> OpenDevice:
    """The device of this process, opened on first use and again after a loss."""
    found = process.device
    if found is None:
        with process.opening:
            if process.device is None:
                process.device = OpenDevice()
            found = process.device
    return found


@contextmanager
def current(device: OpenDevice) -> Iterator[None]:
    """Within the block this is the device of the process, and of all its threads."""
    before, process.device = process.device, device
    try:
        yield
    finally:
        process.device = before


def counts() -> Counts:
    """Uploads, readbacks, dispatches so far."""
    return replace(process.device.counts) if process.device is not None else Counts()


def forget(lost: OpenDevice | None = None) -> None:
    """Drop the device: the next call opens one anew. Arrays on the old one cannot be used any more.

    ``lost``: drop only this one; another thread may have opened a new one already.
    """
    with process.opening:
        if lost is None or process.device is lost:
            process.device = None


def _refuse_in_child() -> None:
    if process.started:
        process.device, process.opening = None, Refusal()
        for device in _opened:
            device.lock = Refusal()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_child)

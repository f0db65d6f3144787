"""Record a launcher once, and replay what it did with other memory.

A launcher depends on shapes, strides, dtypes and plain numbers, never on elements. So it allocates and dispatches the same
for every call that agrees in these. It runs once, on stand-ins (storages without memory, one for each argument, as arguments
that share a buffer in one call may not in another). The caller keeps the record; a small op on arrays then costs the host
little more than its dispatch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from heapq import heappop
from typing import Any, NamedTuple

from torch import Tensor

from headwise.arguments import split, with_tensors
from headwise.backends.webgpu import runtime
from headwise.backends.webgpu.array import Array
from headwise.backends.webgpu.device import Binding, Device
from headwise.backends.webgpu.shaders import Kernel
from headwise.backends.webgpu.storage import Layout, Region, StandIns, Storage
from headwise.config import settings

_ALIGNMENT = 256  # of parameters in a uniform buffer
_MOST_KEPT = 4096

Launch = Callable[[Device, Sequence[Region | None]], Any]


def record(function: Callable[[Any, Any], Any], args: Any) -> Callable[..., Any]:
    """``run(*tensors)``: the launcher's results for tensors with the layouts of those in ``args``.

    Arrays stay where they are, and so do their results. CPU tensors are uploaded, and if there is no array among the
    arguments, the results are read back.
    """
    tensors, _, options = split(args)

    def launch(device: Device, regions: Sequence[Region | None]) -> Any:
        return function(device, with_tensors(options, regions))

    resident = [type(x) is Array for x in tensors if x is not None]
    if not all(resident):
        return _across_the_bus(launch, read_back=not any(resident))
    return Record(launch, tensors).replay


class Drawn(bytes):
    """Scalars that every replay of a capture makes anew: random draws.

    The first of them, `POSITION` bytes, say which draw it is: where they are equal, a draw is made a second time.
    """

    POSITION = 16
    again: Callable[[], bytes]

    @staticmethod
    def of(make: Callable[[], bytes]) -> Drawn:
        made = Drawn(make())
        made.again = make
        return made


class _Dispatch(NamedTuple):
    kernel: Kernel
    groups: tuple[int, ...]
    parameters: tuple[int, int]  # first byte in the record's uniform buffer, bytes
    bound: tuple[tuple[int, int, int], ...]  # number of the buffer, first byte, bytes


class Recording(Device):
    """Records what a launcher does."""

    pool: StandIns

    def __init__(self, device: runtime.OpenDevice) -> None:
        self.capabilities, self._device = device.capabilities, device
        self.pool = StandIns(device.capabilities.buffer_bytes, device.capabilities.name)
        self.dispatches: list[_Dispatch] = []
        self.parameters = bytearray()

    def kernel(self, name: str, **variant: Any) -> Kernel:
        return self._device.kernel(name, **variant)

    def dispatch(self, kernel: Kernel, groups: tuple[int, ...], parameters: bytes, bindings: list[Binding]) -> None:
        self.parameters += bytes(-len(self.parameters) % _ALIGNMENT)
        bound = tuple((storage.buffer, first, size) for storage, first, size in bindings)
        self.dispatches.append(_Dispatch(kernel, groups, (len(self.parameters), len(parameters)), bound))
        self.parameters += parameters


class Record:
    """What a launcher did: buffers by number, those of its arguments first."""

    def __init__(self, launch: Launch, arrays: Sequence[Array | None]) -> None:
        self._first = next(i for i, x in enumerate(arrays) if x is not None)
        device, *_ = (x._usable() for x in arrays if x is not None)
        with device.in_use():
            recording = Recording(device)
            stand_ins = [None if x is None else x._layout.on(recording.pool.stand_in(x._layout.size)) for x in arrays]
            given = len(recording.pool.sizes)
            made = launch(recording, stand_ins)
        self._sizes = tuple(recording.pool.sizes[given:])  # of the buffers it takes
        recording.parameters += bytes(-len(recording.parameters) % _ALIGNMENT)
        self._dispatches, self._parameters = recording.dispatches, bytes(recording.parameters)
        # Where the scalars of a call go, in the parameters of kernels that have some.
        self._places = [dispatch.parameters[0] for dispatch in self._dispatches if dispatch.kernel.scalars]
        self._one = isinstance(made, Region)
        results = (made,) if self._one else made
        self._results: list[tuple[int, Layout] | None] = [
            None if region is None else (region.storage.buffer, device.layout(region)) for region in results
        ]

    def replay(self, *arrays: Any, scalars: bytes | None = None) -> Any:
        """Take buffers, encode the dispatches, wrap the results. One function, for the speed of small ops.

        scalars: the first fields of the parameters of every kernel that has scalars.
        """
        device = arrays[self._first]._device
        if device is not _process.device:
            arrays[self._first]._usable()
        with device.lock:
            try:
                key: list[Any] = [self]
                storages, pool = [], device.pool
                for x in arrays:
                    if x is not None:
                        storages.append(x._storage)
                        key.append(x._storage.buffer)
                for size in self._sizes:
                    free = pool.free[size]
                    number, busy_until, buffer = heappop(free) if free else pool.fresh(size)
                    storage = Storage()
                    storage.size, storage.pool = size, pool
                    storage.number, storage.busy_until, storage.buffer = number, busy_until, buffer
                    storages.append(storage)
                    key.append(buffer)
                # The pool lends buffers in a steady order, so most combinations of them have been bound before.
                commands = device.commands.get(tuple(key)) or self._bind(device, tuple(key))
                if device.capture is not None:
                    device.capture._add(self, storages, scalars)
                _, _, set_pipeline, set_bind_group, dispatch, offsets, _ = device.encoding
                offset_count = 0
                if scalars is not None:
                    offset_count, offsets = 1, self._with_scalars(device, scalars)
                compute_pass = device.open_pass or device.begin_pass()
                for pipeline, group, (x, y, z) in commands:
                    set_pipeline(compute_pass, pipeline)
                    set_bind_group(compute_pass, 0, group, offset_count, offsets)
                    dispatch(compute_pass, x, y, z)
                count = len(commands)
                device.counts.dispatches += count
                device.pending += count
                if device.pending >= _MOST_DISPATCHES:
                    device.flush()
                outputs: list[Any] = []
                for result in self._results:
                    if result is None:
                        outputs.append(None)
                        continue
                    number, layout = result
                    made = _make_wrapper(Array, *layout.wrapper)
                    made._storage, made._layout, made._device = storages[number], layout, device
                    outputs.append(made)
                return outputs[0] if self._one else tuple(outputs)
            except BaseException as error:
                device.explain_loss(error)
                raise

    def _with_scalars(self, device: runtime.OpenDevice, scalars: bytes) -> Any:
        parameters = bytearray(self._parameters)
        for place in self._places:
            parameters[place : place + len(scalars)] = scalars
        return device.place_scalars(parameters)

    def _bind(self, device: runtime.OpenDevice, key: tuple[Any, ...]) -> list[runtime.Command]:
        at_offset = bool(self._places)
        uniform = device.scalar_buffer() if at_offset else device.uniforms.get(self)
        if uniform is None and self._parameters:
            uniform = device.uniforms[self] = device.uniform(self._parameters)
        buffers = key[1:]
        commands = [
            device.command(
                dispatch.kernel, dispatch.groups, (uniform, *dispatch.parameters),
                [(buffers[number], first, size) for number, first, size in dispatch.bound], at_offset,
            )
            for dispatch in self._dispatches
        ]  # fmt: skip
        device.keep_commands(key, commands)
        return commands


# Looked up once, for the speed of `replay`.
_process, _MOST_DISPATCHES = runtime.process, runtime.MOST_DISPATCHES
_make_wrapper = Tensor._make_wrapper_subclass


def _across_the_bus(launch: Launch, read_back: bool) -> Callable[..., Any]:
    # At most one record: its device may be lost, and another opened.
    records: weakref.WeakKeyDictionary[runtime.OpenDevice, Record] = weakref.WeakKeyDictionary()

    def run(*tensors: Any) -> Any:
        device = runtime.device()
        with device.in_use():
            arrays = [x if x is None or type(x) is Array else Array(device.upload(x), device) for x in tensors]
            record = records.get(device)
            if record is None:
                record = records[device] = Record(launch, arrays)
            results = record.replay(*arrays)
            if not read_back:
                return results
            if isinstance(results, Array):
                return results._read()
            return tuple([None if x is None else x._read() for x in results])

    return run


def replayed(function: Callable[..., Any], arrays: Sequence[Any], *options: Any, scalars: bytes | None = None) -> Any:
    """``function(device, *regions, *options)``, recorded and replayed: for PyTorch's own operators on arrays.

    scalars: numbers that are no part of the record, where its kernels have such.
    """
    key = (function, settings.changes, options, *[x._layout for x in arrays])
    kept = _kept.get(key)
    if kept is None:
        kept = Record(lambda device, regions: function(device, *regions, *options), arrays)
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[key] = kept
    return kept.replay(*arrays, scalars=scalars)


_kept: dict[tuple[Any, ...], Record] = {}

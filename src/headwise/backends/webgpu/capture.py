"""Record a training or decoding step once, and replay it with new inputs.

>>> with headwise.webgpu.capture(ids=ids, targets=targets) as step:
...     loss = train(ids, targets)      # runs as it always does, and is recorded
>>> step(ids=more_ids, targets=more_targets)
>>> loss.item()                         # of the replay

A replay encodes the dispatches of the block again, into one command buffer: no Python of the step runs. It reads and writes
the same memory: what the block wrote in place (weights, moments, a cache) goes on from where it is, and tensors that the
block made hold the results of the last replay. Their memory is private, lent from the device for as long as the capture or
one of them is there; what the block dropped is used again within it.

A number of Python's is part of the recording. Those of random draws are made anew for every replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from headwise.backends.webgpu import runtime
from headwise.backends.webgpu.array import Array
from headwise.backends.webgpu.capture_errors import CaptureError, Numbers
from headwise.backends.webgpu.capture_optimizers import Optimizers
from headwise.backends.webgpu.recorder import Drawn, Record
from headwise.backends.webgpu.shaders import Kernel
from headwise.backends.webgpu.storage import GpuMemory, Region, Storage, contiguous_strides
from headwise.backends.webgpu.torch_device import backward_in_this_thread

_Call = tuple[Record, tuple[Any, ...], bytes | None]  # with its buffers and its scalars


class Step(NamedTuple):
    """One dispatch of a capture."""

    kernel: Kernel
    groups: tuple[int, ...]
    parameters: tuple[int, int]  # first byte in the capture's parameters, bytes
    bound: tuple[tuple[Any, int, int], ...]  # buffer, first byte, bytes


class Draw(NamedTuple):
    """A random draw, which every replay makes anew."""

    places: list[int]  # of its number, in the capture's parameters; several where it was made again, in a checkpoint
    again: Any  # gives the next one; recorder.Drawn


class PrivateMemory(GpuMemory):
    """The memory of a capture: on loan from the device's pool until nobody refers to it any more."""

    def __init__(self, shared: GpuMemory) -> None:
        self._shared = shared
        super().__init__(shared._gpu, shared._most, shared._name, shared._submit, shared.submission)
        self._held: list[Storage] = []

    @property
    def submission(self) -> int:
        return self._shared.submission

    @submission.setter
    def submission(self, number: int) -> None:
        self._shared.submission = number

    def allocate(self, size: int) -> Any:
        storage = self._shared.take(size)
        self._held.append(storage)
        return storage.buffer

    def take_new(self, nbytes: int) -> Storage:
        """A buffer that nothing in the block has used."""
        size = self._size_of(nbytes)
        number, _, buffer = self.fresh(size)
        return self._lend(size, (number, self._held[-1].busy_until, buffer))

    def trim(self) -> None:
        self._shared.trim()

    @property
    def whole(self) -> GpuMemory:
        return self._shared


class Capture:
    """A step that was recorded: call it to replay it. Made by `headwise.webgpu.capture`."""

    def __init__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> None:
        self.inputs: dict[str, Array] = {}
        for name, x in {**{f"input {i}": x for i, x in enumerate(inputs)}, **named}.items():
            if not isinstance(x, Array):
                raise TypeError(
                    f"capture: {name} is {_described(x)}; it needs to be a tensor on webgpu, into which replays copy"
                )
            for other, y in self.inputs.items():
                if _overlap(x._region, y._region):
                    raise ValueError(f"capture: {name} and {other} share memory; a replay could not give them both")
            if any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
                raise ValueError(f"capture: {name} is expanded, its elements share memory; pass x.contiguous()")
            self.inputs[name] = x
        self._in_order = len(inputs)
        self._calls: list[_Call] = []
        self.kept: dict[int, Storage] = {}  # what the block used and did not make, and what it uploaded, by buffer
        self._content: dict[int, bytes] = {}  # of what it uploaded, by buffer
        self.numbers = Numbers()
        self._state = "new"

    # ------------------------------------------------------------------------------------------------------ recording

    def __enter__(self) -> Self:
        if self._state != "new":
            raise CaptureError("headwise: a capture records one block; make another for another")
        backward_in_this_thread()
        self.device = device = runtime.device()
        device.lock.acquire()  # other threads wait: what they compute is no part of the step
        try:
            if device.capture is not None:
                raise CaptureError("headwise: a capture inside of a capture")
            for x in self.inputs.values():
                x._usable()
            self._shared = device.pool
            self._memory = PrivateMemory(device.pool)
            self._optimizers = Optimizers(self._memory)
            device.pool, device.capture, self._state = self._memory, self, "recording"
        except BaseException:
            device.lock.release()
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        device = self.device
        device.pool, device.capture, self._state = self._shared, None, "failed"
        self._optimizers.recorded()
        try:
            if error is None:
                self._prepare()
                self._state = "ready"
        finally:
            self._calls = []
            device.lock.release()

    def _add(self, record: Record, storages: Sequence[Storage], scalars: bytes | None) -> None:
        """A call of the block: `Record.replay` tells."""
        for storage in storages:
            if storage.pool is not self._memory:
                self.kept[id(storage.buffer)] = storage
        self._calls.append((record, tuple([storage.buffer for storage in storages]), scalars))

    def _empty_for_upload(self, shape: tuple[int, ...], dtype: torch.dtype, constant: bool) -> Region:
        """Memory for a CPU tensor that the block uploads: every replay will see the same elements."""
        if math.prod(shape) > 1 and not constant:
            raise CaptureError(
                f"headwise: a tensor {shape} of {str(dtype).removeprefix('torch.')} goes from the CPU to webgpu inside of a "
                "capture, and every replay would see the same elements. Make it before the block; if it changes from step "
                "to step, pass it to capture(…)"
            )
        # New memory: what the block wrote before, a replay writes again.
        storage = self._memory.take_new(math.prod(shape) * dtype.itemsize)
        return Region(storage, dtype, shape, contiguous_strides(shape))

    def _uploaded(self, storage: Storage, content: Any) -> None:
        self.kept[id(storage.buffer)] = storage  # so that nothing else in the block gets it
        self._content[id(storage.buffer)] = bytes(content)

    def _prepare(self) -> None:
        """All dispatches with their bind groups, ready to be encoded."""
        parameters = bytearray()
        self.steps: list[Step] = []
        draws: dict[bytes, Draw] = {}
        for record, buffers, scalars in self._calls:
            base = len(parameters)
            parameters += record._parameters
            if scalars is not None:
                places = tuple([base + place for place in record._places])
                for place in places:
                    parameters[place : place + len(scalars)] = scalars
                if isinstance(scalars, Drawn):
                    draws.setdefault(scalars[: Drawn.POSITION], Draw([], scalars.again)).places.extend(places)
            for kernel, groups, (first, size), bound in record._dispatches:
                found = tuple([(buffers[number], start, count) for number, start, count in bound])
                self.steps.append(Step(kernel, groups, (base + first, size), found))
        self.parameters, self.draws = parameters, list(draws.values())
        self._uniform = self.device.uniform(bytes(parameters), changes=True) if parameters else None
        self._commands = []
        last = None
        for step in self.steps:
            # The variant with an offset is compiled already where a kernel has scalars.
            at_offset = step.kernel.scalars > 0
            pipeline, group, (x, y, z) = self.device.command(
                step.kernel, step.groups, (self._uniform, *step.parameters), step.bound, at_offset
            )
            # A pipeline stays set until another is.
            self._commands.append((None if pipeline is last else pipeline, group, int(at_offset), x, y, z))
            last = pipeline
        written = {
            id(buffer) for step in self.steps
            for (buffer, _, _), of in zip(step.bound, step.kernel.buffers, strict=True) if of.written
        }  # fmt: skip
        # What the block uploads and then changes is uploaded again before every replay.
        self.restored = [(self.kept[i], content) for i, content in self._content.items() if i in written]

    # -------------------------------------------------------------------------------------------------------- replays

    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> None:
        """Copy new elements into the inputs, and replay the step. It does not wait for the GPU."""
        self._ready("replay")
        device = self.device
        if device is not runtime.process.device:
            raise runtime.DeviceLost("the GPU of this capture was lost since; make arrays and capture anew")
        given = self._checked(inputs, named)
        with device.in_use():
            if device.capture is not None:
                raise CaptureError("headwise: a replay inside of a capture")
            self._optimizers.check()
            self.numbers.check()
            changed = {id(self.inputs[name]._storage) for name, x in given.items() if x is not self.inputs[name]}
            for name, x in given.items():
                if isinstance(x, Array) and x is not self.inputs[name] and id(x._storage) in changed:
                    given[name] = x.detach().clone()  # what it holds now, not what another input leaves there
            for name, x in given.items():
                self._copy(self.inputs[name], x)
            for storage, content in self.restored:
                device.flush()
                device.write(storage, 0, content)
            if self.draws:
                self._draw()
            self._encode()
            device.flush()

    replay = __call__

    def _ready(self, what: str) -> None:
        """An error, if there is no recorded step. what: is to be done with it."""
        if self._state != "ready":
            raise CaptureError(f"headwise: nothing to {what}: the capture is {self._state}")

    def _checked(self, inputs: Sequence[torch.Tensor], named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if len(inputs) > len(self.inputs):
            raise TypeError(f"replay: {len(inputs)} inputs; the step was captured with {len(self.inputs)}")
        given = dict(zip(self.inputs, inputs, strict=False))
        for name, x in named.items():
            if name in given or name not in self.inputs:
                raise TypeError(
                    f"replay: {name} was given {'twice' if name in given else 'and is none of the inputs'}; the step was "
                    f"captured with {', '.join(self.inputs) or 'no inputs'}"
                )
            given[name] = x
        missing = [name for name in self.inputs if name not in given]
        if missing:
            raise TypeError(f"replay: {', '.join(missing)} is missing; every input is given anew")
        for name, x in given.items():
            known = self.inputs[name]
            if not isinstance(x, torch.Tensor) or x.shape != known.shape or x.dtype != known.dtype:
                raise ValueError(f"replay: {name} is {_described(x)}; the step was captured with {_described(known)}")
        return given

    def _copy(self, target: Array, x: torch.Tensor) -> None:
        if x is target:
            return
        region = target._region
        nbytes, first = region.numel * region.itemsize, region.offset * region.itemsize
        if x.device.type == "cpu" and region.contiguous and nbytes and nbytes % 4 == first % 4 == 0:
            self.device.flush()  # a write runs before commands that were not submitted
            flat = x.detach().contiguous().view(-1).view(torch.uint8)
            self.device.write(region.storage, first, flat.numpy())
        else:
            with torch.no_grad():
                target.detach().copy_(x)

    def _draw(self) -> None:
        for places, again in self.draws:
            number = again()[: Drawn.POSITION]
            for place in places:
                self.parameters[place : place + len(number)] = number
        # From the first to the last of them: one write.
        every = [place for places, _ in self.draws for place in places]
        first, past = min(every), max(every) + Drawn.POSITION
        self.device.gpu.queue.write_buffer(self._uniform, first, self.parameters[first:past])

    def _encode(self) -> None:
        device = self.device
        if not self._commands:
            return
        compute_pass = device.begin_pass()
        _, _, set_pipeline, set_bind_group, dispatch, none, offset = device.encoding
        offsets = (none, offset(0))
        for pipeline, group, count, x, y, z in self._commands:
            if pipeline is not None:
                set_pipeline(compute_pass, pipeline)
            set_bind_group(compute_pass, 0, group, count, offsets[count])
            dispatch(compute_pass, x, y, z)
        device.counts.dispatches += len(self._commands)


def _overlap(a: Region, b: Region) -> bool:
    """Do they share elements? Parts of rows beside each other are not recognised, and pass."""
    if a.storage is not b.storage or not (a.contiguous and b.contiguous) or not (a.numel and b.numel):
        return False
    (a_first, a_past), (b_first, b_past) = ([place * x.itemsize for place in x.span()] for x in (a, b))
    return a_first < b_past and b_first < a_past


def _described(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return repr(x)
    return f"a tensor {tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')} on {x.device.type}"

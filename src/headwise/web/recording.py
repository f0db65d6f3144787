"""A device of WebGPU that computes nothing and writes down what it is told, without adapter and without driver.

>>> with recording(capabilities) as tape:
...     out = hw.softmax(hw.webgpu.array(x))
>>> program = tape.program({"probs": out})

The program then is a list of buffers with what is in them at first, a list of dispatches, and where the outputs lie. No
buffer is used twice for different things, so that all uploads can be done before the first dispatch, and the dispatches
run again and again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headwise.backends import registry
from headwise.backends.webgpu import runtime, shaders
from headwise.backends.webgpu.adapter import Capabilities
from headwise.backends.webgpu.array import Array
from headwise.backends.webgpu.storage import USAGE, Pool, Region
from headwise.config import settings


@dataclass(eq=False)
class Buffer:
    size: int  # bytes
    content: bytes | None = None  # what was uploaded; None: nothing, a kernel writes it
    random: torch.dtype | None = None  # whatever numbers of this dtype, in place of what was uploaded


class Shader(NamedTuple):
    name: str  # of the kernel family
    text: str
    writes: tuple[bool, ...]  # by binding, the parameters left out


class Binding(NamedTuple):
    buffer: Buffer
    first: int  # byte
    size: int


class Dispatch(NamedTuple):
    shader: Shader
    groups: tuple[int, ...]
    parameters: bytes
    bound: tuple[Binding, ...]


class Output(NamedTuple):
    """A result that lies densely in its buffer, from byte ``first`` on, in the order that its strides say."""

    buffer: Buffer
    first: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Program(NamedTuple):
    buffers: list[Buffer]  # in the order of their first use
    dispatches: list[Dispatch]
    outputs: dict[str, Output]
    prepared: int = 0  # so many dispatches make what the others work on; they are not timed


class Tape:
    """Stands where wgpu's device stands, and its queue, its command encoder and its pass: what is called is kept."""

    def __init__(self) -> None:
        self.queue = self
        self._dispatches: list[Dispatch] = []
        self._prepared = 0
        self._shader: Shader | None = None
        self._group: tuple[bytes, tuple[Binding, ...]] | None = None

    def program(self, outputs: Mapping[str, torch.Tensor]) -> Program:
        """All that was recorded so far; the outputs are arrays. One without elements is nobody's to compute: left out."""
        used = dict.fromkeys(binding.buffer for dispatch in self._dispatches for binding in dispatch.bound)
        found = {name: _output(name, x) for name, x in outputs.items() if x.numel()}
        for name, output in found.items():
            if output.buffer not in used:
                raise RuntimeError(f"no kernel writes {name}")
        return Program(list(used), list(self._dispatches), found, self._prepared)

    def prepared(self) -> None:
        """What was recorded so far is preparation."""
        self._prepared = len(self._dispatches)

    # ------------------------------------------------------------------------------ what wgpu's objects are called with

    def create_buffer(self, *, size: int, usage: int) -> Buffer:
        if usage != USAGE:
            raise RuntimeError("a readback inside of an op: a program runs from its inputs to its outputs")
        return Buffer(size)

    def create_buffer_with_data(self, *, data: Any, usage: int) -> Buffer:
        return Buffer(len(data), bytes(data))

    def create_bind_group_layout(self, *, entries: Sequence[Any]) -> tuple[bool, ...]:
        return tuple(entry["buffer"]["type"] == "storage" for entry in entries[1:])

    def create_pipeline_layout(self, *, bind_group_layouts: Sequence[tuple[bool, ...]]) -> tuple[bool, ...]:
        return bind_group_layouts[0]

    def create_shader_module(self, *, label: str, code: str) -> str:
        return code

    def create_compute_pipeline(self, *, label: str, layout: tuple[bool, ...], compute: Any) -> Shader:
        return Shader(label, compute["module"], layout)

    def create_bind_group(self, *, layout: Any, entries: Sequence[Any]) -> tuple[bytes, tuple[Binding, ...]]:
        parameters, *others = (entry["resource"] for entry in entries)
        return parameters["buffer"].content, tuple(Binding(r["buffer"], r["offset"], r["size"]) for r in others)

    def write_buffer(self, buffer: Buffer, offset: int, data: Any) -> None:
        buffer.content = bytes(data)

    def create_command_encoder(self) -> Tape:
        return self

    def begin_compute_pass(self, *, timestamp_writes: None) -> Tape:
        return self

    def set_pipeline(self, shader: Shader) -> None:
        self._shader = shader

    def set_bind_group(self, index: int, group: tuple[bytes, tuple[Binding, ...]]) -> None:
        self._group = group

    def dispatch_workgroups(self, *groups: int) -> None:
        assert self._shader is not None
        assert self._group is not None
        self._dispatches.append(Dispatch(self._shader, groups, *self._group))

    def end(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def submit(self, commands: Sequence[None]) -> None:
        pass


class _NewMemory(Pool):
    """Gives nothing a second time."""

    def _collect(self) -> None:
        pass


@contextmanager
def recording(capabilities: Capabilities) -> Iterator[Tape]:
    """Within the block, WebGPU is a device that can do ``capabilities`` and computes nothing."""
    tape = Tape()
    device = runtime.Device((tape, capabilities), shaders.TINT)
    device.pool = _NewMemory(tape, capabilities.buffer_bytes, capabilities.name, device.flush)
    registry.ask_again("webgpu")  # there may be no adapter here
    validate, settings.validate = settings.validate, False  # which reads values back
    try:
        with runtime.current(device), registry.use_backend("webgpu"):
            yield tape
    finally:
        settings.validate = validate
        registry.ask_again("webgpu")


def region(x: torch.Tensor) -> Region:
    """Where the elements of an array lie."""
    if not isinstance(x, Array):
        raise TypeError(f"{type(x).__name__} is not in the memory that was recorded")
    return x._region


def _output(name: str, x: torch.Tensor) -> Output:
    found = region(x)
    low, high = found.span()
    if high - low != found.numel:
        raise RuntimeError(f"{name} does not lie densely: shape {found.shape}, strides {found.strides}")
    return Output(found.storage.buffer, low * found.itemsize, found.dtype, found.shape, found.strides)

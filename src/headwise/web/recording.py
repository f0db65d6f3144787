"""A WebGPU device that computes nothing and records its commands. It needs no adapter and no driver.

>>> with recording(capabilities) as tape:
...     out = hw.softmax(hw.webgpu.array(x))
>>> program = tape.program({"probs": out})

A program is a list of buffers with their initial content, a list of dispatches, and the places of the outputs. No
buffer is reused, so all uploads can be done before the first dispatch, and the dispatches can be repeated.
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
from headwise.backends.webgpu.storage import USAGE, Region
from headwise.config import settings


@dataclass(eq=False)
class Buffer:
    size: int  # bytes
    content: bytes | None = None  # what was uploaded; None: nothing, a kernel writes it
    random: torch.dtype | None = None  # random numbers of this dtype replace what was uploaded


class Shader(NamedTuple):
    name: str  # of the kernel family
    text: str
    writes: tuple[bool, ...]  # by binding, without the parameters


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
    """A result that is dense in its buffer, from byte ``first`` on, in the order of its strides."""

    buffer: Buffer
    first: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Program(NamedTuple):
    buffers: list[Buffer]  # in the order of their first use
    dispatches: list[Dispatch]
    outputs: dict[str, Output]
    prepared: int = 0  # the first dispatches, which prepare the inputs of the others and are not timed


class Tape:
    """In place of wgpu's device, queue, command encoder and pass: it records the calls."""

    def __init__(self) -> None:
        self.queue = self
        self._dispatches: list[Dispatch] = []
        self._prepared = 0
        self._shader: Shader | None = None
        self._group: tuple[bytes, tuple[Binding, ...]] | None = None

    def program(self, outputs: Mapping[str, torch.Tensor]) -> Program:
        """All that was recorded so far. The outputs are arrays; those without elements are left out."""
        used = dict.fromkeys(binding.buffer for dispatch in self._dispatches for binding in dispatch.bound)
        found = {name: _output(name, x) for name, x in outputs.items() if x.numel()}
        for name, output in found.items():
            if output.buffer not in used:
                raise RuntimeError(f"no kernel writes {name}")
        return Program(list(used), list(self._dispatches), found, self._prepared)

    def prepared(self) -> None:
        """Marks what was recorded so far as preparation."""
        self._prepared = len(self._dispatches)

    # --------------------------------------------------------------------------------------------- the calls of wgpu

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
        bound = [entry["resource"] for entry in entries]
        (buffer, first, size), *others = [(r["buffer"], r["offset"], r["size"]) for r in bound]
        return buffer.content[first : first + size], tuple(Binding(*binding) for binding in others)

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


class _NothingFree(dict[int, list[Any]]):
    """The free buffers of a pool that never reuses one."""

    def __missing__(self, size: int) -> list[Any]:
        return []


@contextmanager
def recording(capabilities: Capabilities) -> Iterator[Tape]:
    """Within the block, the WebGPU device is a recording one with these capabilities."""
    tape = Tape()
    device = runtime.OpenDevice((tape, capabilities), shaders.TINT)
    device.pool.free = _NothingFree()
    registry.ask_again()  # there may be no adapter here
    validate, settings.validate = settings.validate, False  # which reads values back
    try:
        with runtime.current(device), registry.use_backend("webgpu"):
            yield tape
    finally:
        settings.validate = validate
        registry.ask_again()


def region(x: torch.Tensor) -> Region:
    """The region of an array."""
    if not isinstance(x, Array):
        raise TypeError(f"{type(x).__name__} is not in the memory that was recorded")
    return x._region


def _output(name: str, x: torch.Tensor) -> Output:
    found = region(x)
    low, high = found.span()
    if high - low != found.numel:
        raise RuntimeError(f"{name} does not lie densely: shape {found.shape}, strides {found.strides}")
    return Output(found.storage.buffer, low * found.itemsize, found.dtype, found.shape, found.strides)

"""A captured step as one file, for the page's ``step.js``.

    8 bytes        length of the header
    header         JSON: version, shaders, and the program as `programs.describe` writes it, with inputs, state and draws
    the rest       what was in the buffers when the file was written

A program of a step is run again and again: buffers that a run changes (weights, moments) keep what it left in them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import headwise
from headwise.backends.webgpu import adapter
from headwise.backends.webgpu.array import Array
from headwise.backends.webgpu.aten import random
from headwise.backends.webgpu.capture import Capture
from headwise.backends.webgpu.storage import Region, Storage
from headwise.web import programs
from headwise.web.recording import Binding, Buffer, Dispatch, Output, Program, Shader
from headwise.web.tiers import FLOOR_BINDING_BYTES

FORMAT = 1
_COUNTER = 8  # where the number of a draw is among its parameters


class _Draw(NamedTuple):
    """Parameters that count: the number of a random draw."""

    dispatch: int
    byte: int  # eight of them
    by: int  # after every run


def save(step: Capture, path: Path, outputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """See `headwise.webgpu.save_step`."""
    _check(step)
    buffers = _Buffers(step)
    parameters, draws = _draws(step)
    dispatches = [
        Dispatch(
            Shader(one.kernel.name, one.kernel.text, tuple(b.written for b in one.kernel.buffers)), one.groups,
            bytes(parameters[one.parameters[0] : sum(one.parameters)]),
            tuple(Binding(buffers.of(buffer, first + size), first, size) for buffer, first, size in one.bound),
        )
        for one in step.steps
    ]  # fmt: skip
    places = {
        kind: {name: buffers.place(kind, name, x) for name, x in tensors.items()}
        for kind, tensors in (("inputs", step.inputs), ("outputs", outputs), ("state", state))
    }
    data, shaders = programs.Data(), dict[str, Shader]()
    program = Program(list(buffers.known.values()), dispatches, places["outputs"])
    numbers = {buffer: i for i, buffer in enumerate(program.buffers)}
    header = programs.as_json(
        {
            "format": FORMAT,
            "version": headwise.__version__,
            "program": {
                **programs.describe(program, data, shaders),
                "inputs": programs.described_places(places["inputs"], numbers),
                "state": programs.described_places(places["state"], numbers),
                "draws": [draw._asdict() for draw in draws],
                "restored": [numbers[buffers.known[id(storage.buffer)]] for storage, _ in step.restored],
            },
            "shaders": programs.texts(shaders),
        }
    )
    header += b" " * (-len(header) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(header)) + header + data.content)


def _check(step: Capture) -> None:
    step._ready("save")
    has = step.device.capabilities
    portable = (
        has.subgroup_size == 0 and not has.native_half and has.binding_bytes <= FLOOR_BINDING_BYTES
        and has.workgroup_memory <= adapter.FLOOR_WORKGROUP_MEMORY
        and has.workgroup_threads <= adapter.FLOOR_WORKGROUP_THREADS
    )  # fmt: skip
    if not portable:
        raise ValueError(
            f"save_step: the step was captured with kernels for {has.name}, and other GPUs may not run them. Make the model "
            "and capture its step within `with headwise.webgpu.portable():`"
        )


class _Buffers:
    """The buffers of a step, by the order of their first use; with what is in them if the step did not make them."""

    def __init__(self, step: Capture) -> None:
        self.known: dict[int, Buffer] = {}
        self._step = step
        self._uploaded = {id(storage.buffer): content for storage, content in step.restored}

    def of(self, buffer: Any, least: int) -> Buffer:
        """least: bytes of it that are used."""
        found = self.known.get(id(buffer))
        if found is None:
            kept = self._step.kept.get(id(buffer))
            content = None if kept is None else self._content(kept)
            found = self.known[id(buffer)] = Buffer(buffer.size if kept is None else kept.size, content)
        assert least <= found.size
        return found

    def _content(self, storage: Storage) -> bytes:
        if id(storage.buffer) in self._uploaded:
            return self._uploaded[id(storage.buffer)]
        device = self._step.device
        with device.in_use():
            read = device.read(Region(storage, torch.uint8, (storage.size,), (1,)))
        return read.numpy().tobytes()

    def place(self, kind: str, name: str, x: torch.Tensor) -> Output:
        """Where a tensor lies."""
        if not isinstance(x, Array) or x._device is not self._step.device:
            raise TypeError(f"save_step: {name} of {kind} is no tensor on the webgpu device of the step")
        found = x._region
        if not found.contiguous:
            raise ValueError(
                f"save_step: {name} of {kind} has strides {found.strides}; it needs to be contiguous: make it so with "
                ".contiguous() before the capture, or in it"
            )
        first, nbytes = found.offset * found.itemsize, found.numel * found.itemsize
        if kind == "inputs" and (first % 4 or nbytes % 4):
            raise ValueError(
                f"save_step: {name} of inputs is {nbytes} bytes long and begins at byte {first} of its memory; a page "
                "writes whole words of four bytes: pad it, or make it int32 or float32"
            )
        buffer = self.known.get(id(found.storage.buffer))
        if buffer is None:
            if kind == "outputs":
                raise ValueError(f"save_step: no kernel of the step has to do with {name} of outputs")
            buffer = self.known[id(found.storage.buffer)] = Buffer(found.storage.size, self._content(found.storage))
        return Output(buffer, first, found.dtype, found.shape, found.strides)


def _draws(step: Capture) -> tuple[bytearray, list[_Draw]]:
    """The parameters of the next run, and where the numbers of draws are in them."""
    parameters, found = bytearray(step.parameters), []
    first = {one.parameters[0]: i for i, one in enumerate(step.steps)}
    seed, calls = struct.unpack("<QQ", bytes(random.stream.state().tolist()))
    for ahead, (places, again) in enumerate(step.draws):
        if again.generator is not None:
            raise ValueError(
                "save_step: the step draws from a generator of its own, which the file could not go on with"
            )
        for place in places:
            struct.pack_into("<QQ", parameters, place, seed, calls + ahead)
            found.append(_Draw(first[place], _COUNTER, len(step.draws)))
    return parameters, found

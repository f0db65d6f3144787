"""A recording: what a launcher did, step by step, on tensors without memory.

Each argument has a storage of its own, so a recording never depends on two arguments of the first call being the same
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise import arguments
from headwise.backends.triton import private
from headwise.backends.triton.gpu import ALIGNMENT, Descriptors, Facts, Gpu, Grid


class Place(NamedTuple):
    """Where a tensor of the launcher lies: bytes from the beginning of one piece of memory."""

    memory: int  # an argument, or what the launcher took, in order
    offset: int
    like: Tensor  # its shape, strides and dtype

    def of(self, base: Tensor) -> Tensor:
        """The tensor itself, given the one that begins where its memory does."""
        x = self.like
        first = base.storage_offset() * base.element_size() + self.offset
        made = torch.empty(0, dtype=x.dtype, device=base.device)
        return made.set_(base.untyped_storage(), first // x.element_size(), x.shape, x.stride())


class Take(NamedTuple):
    """Memory: a result, or scratch; filled with a value if one is given."""

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    value: float | None

    @property
    def bytes(self) -> int:
        last = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return 0 if 0 in self.shape else last * self.dtype.itemsize


class Counters(NamedTuple):
    memory: int
    size: int


class Call(NamedTuple):
    """A PyTorch function. One without results writes to its inputs."""

    function: Callable[..., Any]
    inputs: tuple[Place, ...]
    memory: tuple[int, ...]  # its results
    one: bool  # it returns a tensor, not a tuple


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, int, int]
    described: tuple[tuple[Place, Any] | None, ...]  # (tensor, box)
    tensors: tuple[Place | None, ...]
    tail: tuple[Any, ...]  # numbers and constants
    options: dict[str, Any]


Step = Take | Counters | Call | Launch


class Recording(Gpu):
    """A GPU on which nothing happens; what a launcher does is written down. No GPU is needed."""

    def __init__(self, facts: Facts, tf32: bool = False) -> None:
        super().__init__(facts, tf32)
        self.steps: list[Step] = []
        self.memory: list[Tensor | None] = []  # by number, what begins there; None: an argument that is not given
        self._numbers: dict[int, int] = {}  # of memory, by its storage
        self._offsets: list[int] = []  # of each memory's address, modulo the alignment

    def run(self, function: Callable[..., Any], args: Any, offsets: Sequence[int]) -> Any:
        """Run the launcher. ``offsets``: addresses of the tensors modulo the alignment."""
        stand_ins = []
        for x, offset in zip(arguments.tensors_of(args), offsets, strict=True):
            stand_in = None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self._new(stand_in, offset)
            stand_ins.append(stand_in)
        self.arguments = len(stand_ins)
        return function(self, arguments.with_tensors(args, stand_ins))

    def _new(self, x: Tensor | None, offset: int = 0) -> int:
        number = len(self.memory)
        self.memory.append(x)
        self._offsets.append(offset)
        if x is not None:
            self._numbers[x.untyped_storage()._cdata] = number
        return number

    def place(self, x: Tensor) -> Place:
        found = self._numbers.get(x.untyped_storage()._cdata)
        if found is None or not x.is_meta:
            raise RuntimeError(
                f"a launcher used memory ({tuple(x.shape)}, {x.dtype}) that is neither an argument nor taken from its gpu"
            )
        return Place(found, int(x.storage_offset()) * x.element_size(), x)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
        return self._take(shape, dtype, strides, None)

    def filled(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
        return self._take(shape, dtype, None, value)

    def _take(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None, value: float | None
    ) -> Tensor:
        if strides is None:
            x = torch.empty(tuple(shape), dtype=dtype, device="meta")
        else:
            x = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
        self.steps.append(Take(self._new(x), tuple(x.shape), x.stride(), dtype, value))
        return x

    def counters(self, count: int) -> Tensor:
        x = torch.empty(count, dtype=torch.int32, device="meta")
        self.steps.append(Counters(self._new(x), count))
        return x

    def aligned(self, x: Tensor) -> bool:
        return self._alignment(self.place(x)) == 0

    def _alignment(self, place: Place) -> int:
        return (self._offsets[place.memory] + place.offset) % ALIGNMENT

    def call(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        inputs = tuple(map(self.place, tensors))
        results = function(*tensors)
        made = results if isinstance(results, (tuple, list)) else (results,)
        storages = [x.untyped_storage()._cdata for x in made]
        own = len(set(storages)) == len(made) and not any(s in self._numbers for s in storages)
        if not own or any(x.storage_offset() for x in made):
            raise RuntimeError(f"{function} returned a view; a recorded call makes its own results")
        one = isinstance(results, Tensor)
        self.steps.append(Call(function, inputs, tuple(map(self._new, made)), one))
        return results

    def write(self, function: Callable[..., Any], *tensors: Tensor) -> None:
        self.steps.append(Call(function, tuple(map(self.place, tensors)), (), False))

    def launch(
        self, kernel: Any, grid: Grid, tensors: Sequence[Tensor | None], numbers: Sequence[Any] = (),
        constants: Sequence[Any] = (), *, warps: int = 4, stages: int = 3, registers: int = 0,
        descriptors: Descriptors = (),
    ) -> None:  # fmt: skip
        x, y, z = (*grid, 1, 1)[:3]
        described = tuple(None if d is None else (self.place(d[0]), d[1]) for d in descriptors)
        places = tuple(None if t is None else self.place(t) for t in tensors)
        tail, options = (*numbers, *constants), private.options(warps, stages, registers)
        self.steps.append(Launch(kernel, (x, y, z), described, places, tail, options))

    def sample(self, launch: Launch) -> list[Any]:
        """Arguments that Triton compiles the same kernel for as for the real ones."""
        boxes = [None if d is None else d[1].descriptor(d[0].like) for d in launch.described]
        pointers = []
        for p in launch.tensors:
            size = 0 if p is None else p.like.untyped_storage().nbytes()
            pointers.append(None if p is None else private.Pointer(p.like.dtype, self._alignment(p), size))
        return [*boxes, *pointers, *launch.tail]

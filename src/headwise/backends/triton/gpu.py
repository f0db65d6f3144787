"""What a launcher is given: the GPU it works for, its memory and its launches.

    def softmax_forward(gpu, args):
        y = gpu.empty(args.x.shape, args.x.dtype)
        gpu.launch(_softmax, grid, (args.x, y), numbers, constants)
        return y

A launcher is an ordinary function of shapes and plain numbers. `recorder.py` runs it once for a kind of call, on tensors
without memory, and replays what it did; in Triton's interpreter it runs at every call, on CPU tensors (`Interpreter`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headwise.backends.triton import matmul

ALIGNMENT = 16  # bytes; Triton compiles apart what is aligned to it, and TMA needs it
Grid = tuple[int, ...]


class Described(Protocol):
    """How a kernel reads or writes a tensor through TMA."""

    def descriptor(self, x: Tensor) -> Any: ...


Descriptors = Sequence[tuple[Tensor, Described] | None]


class Facts(NamedTuple):
    """What launchers ask of a GPU."""

    arch: str  # the tile table that fits it best
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int  # bytes that a program may have
    hip: bool = False


# GPUs that need not be here: for `explain --arch` and for ahead-of-time compilation.
KNOWN = {
    "sm_80": Facts("sm_80", (8, 0), 108, 163 << 10),
    "sm_86": Facts("sm_86", (8, 6), 84, 99 << 10),
    "sm_90": Facts("sm_90", (9, 0), 132, 227 << 10),
    "sm_100": Facts("sm_100", (10, 0), 148, 227 << 10),
    "gfx942": Facts("gfx942", (9, 4), 304, 64 << 10, hip=True),
}
# The interpreter shows the same code with any small number of multiprocessors.
_INTERPRETER = Facts("sm_80", (8, 0), 3, 228 << 10)


@functools.cache
def facts(device: int) -> Facts:
    """Of a GPU of this machine."""
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    capability, hip = torch.cuda.get_device_capability(device), torch.version.hip is not None
    return Facts(_arch(capability, hip), capability, properties.multi_processor_count, shared, hip)


def _arch(capability: tuple[int, int], hip: bool) -> str:
    if hip:
        return "gfx942"
    if capability[0] == 9:
        return "sm_90"
    if capability == (10, 0):
        return "sm_100"
    # 8.6, 8.9 and 12.0 are the consumer cards: 99 KB of shared memory where the others have 163 or more.
    return "sm_80" if capability in ((8, 0), (8, 7), (10, 3), (11, 0)) else "sm_86"


class Gpu:
    """The facts of a GPU; memory and launches are up to the subclass."""

    interpreted = False

    def __init__(self, facts: Facts, tf32: bool) -> None:
        self.facts, self.tf32 = facts, tf32  # tf32: may float32 products use it? PyTorch's switch
        self.arch, self.capability, self.multiprocessors, self.shared_memory, self.hip = facts

    def empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
        """Uninitialised memory, contiguous unless strides are given. The only way to get memory."""
        raise NotImplementedError

    def filled(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.filled(shape, 0, dtype)

    def counters(self, count: int) -> Tensor:
        """int32 zeros for a launch that leaves zeros behind. Later calls on the same stream get the same memory."""
        raise NotImplementedError

    def aligned(self, x: Tensor) -> bool:
        """Does ``x`` begin at a multiple of 16 bytes?"""
        raise NotImplementedError

    def call(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """A PyTorch function of these tensors. It makes its own results, whose metadata depends on metadata alone."""
        raise NotImplementedError

    def write(self, function: Callable[..., Any], *tensors: Tensor) -> None:
        """A PyTorch function of these tensors that writes to some of them; what it returns is dropped."""
        raise NotImplementedError

    def matmul(self, a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
        """``out = a @ b``, or ``out +=``, by PyTorch's matmul: float32 sums, and a float32 ``out`` of 16-bit inputs."""
        if a.shape[1] > 0:
            self.write(matmul.matmul_added if add else matmul.matmul, out, a, b)
        elif not add:
            self.write(torch.Tensor.zero_, out)

    def copy(self, x: Tensor, out: Tensor) -> None:
        """Copy, rounding to the dtype of ``out``; x may be broadcast."""
        self.write(torch.Tensor.copy_, out, x)

    def contiguous(self, x: Tensor) -> Tensor:
        return x if x.is_contiguous() else self.call(torch.Tensor.contiguous, x)

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        tensors: Sequence[Tensor | None],
        numbers: Sequence[Any] = (),
        constants: Sequence[Any] = (),
        *,
        warps: int = 4,
        stages: int = 3,
        registers: int = 0,
        descriptors: Descriptors = (),
    ) -> None:
        """Launch a kernel whose parameters are descriptors, tensors, numbers and constants, in this order.

        registers: the most that a thread may use (0: the compiler decides), for kernels that gain more from another
        program on the same multiprocessor.
        """
        raise NotImplementedError


class Interpreter(Gpu):
    """Triton's interpreter: everything is done at once, on CPU tensors."""

    interpreted = True

    def __init__(self, tf32: bool) -> None:
        super().__init__(_INTERPRETER, tf32)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
        if strides is None:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)

    def filled(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), value, dtype=dtype)

    def counters(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def aligned(self, x: Tensor) -> bool:
        return x.data_ptr() % ALIGNMENT == 0

    def call(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        return function(*tensors)

    def write(self, function: Callable[..., Any], *tensors: Tensor) -> None:
        function(*tensors)

    def launch(
        self, kernel: Any, grid: Grid, tensors: Sequence[Tensor | None], numbers: Sequence[Any] = (),
        constants: Sequence[Any] = (), *, warps: int = 4, stages: int = 3, registers: int = 0,
        descriptors: Descriptors = (),
    ) -> None:  # fmt: skip
        kernel[grid](*tensors, *numbers, *constants, num_warps=warps, num_stages=stages)

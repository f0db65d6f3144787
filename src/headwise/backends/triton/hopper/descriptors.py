"""Launches of Gluon kernels whose tensors are read and written through TMA descriptors.

A descriptor (address, sizes, strides, box) is 128 bytes that the driver encodes on the host and the launch copies into the
kernel's parameters, so that a captured CUDA graph holds it too. Encoding costs microseconds; here each is kept by the
address it was made for, since an allocator hands out the same addresses again and again.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from headwise.backends.triton import launch as launching
from headwise.backends.triton.hopper.gluon_names import TensorDescriptor, gl

_KEPT = 1024  # addresses per plan and tensor
_DIRECT = triton.__version__.startswith("3.6.")  # the release whose launcher `_direct` knows


class Described(Protocol):
    """How a kernel reads or writes a tensor."""

    def descriptor(self, x: Tensor) -> TensorDescriptor: ...


class Box(NamedTuple):
    """How a kernel reads or writes a tensor ``(B, H, S, D)``: so many rows of so many elements at once."""

    rows: int
    width: int

    def descriptor(self, x: Tensor) -> TensorDescriptor:
        # A dim of size 1 may have any stride, also one that TMA does not take.
        strides = [s if n > 1 else 8 for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
        layout = gl.NVMMASharedLayout(min(128, self.width * x.element_size()), 8 * x.element_size(), 4)
        return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, self.rows, self.width], layout)


class _Ready(NamedTuple):
    """A compiled kernel past the Python of Triton's launcher, and what it was compiled to know of its descriptors."""

    call: Any
    before: tuple[Any, ...]
    descriptors: list[dict[str, Any]]


# Kernels by all that a compiled one depends on.
_ready: dict[tuple[Any, ...], _Ready] = {}


class DescribedPlan:
    """A launch worked out but for its tensors; those of one plan differ in nothing but where they lie.

    Kernel parameters are in this order: descriptors, tensors, numbers, constants; descriptors and tensors may be None.
    """

    __slots__ = ("_aligned", "_maps", "_ready", "_tail", "boxes", "constants", "grid", "kernel", "numbers")

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], boxes: tuple[tuple[int, Described] | None, ...],
        numbers: tuple[int | float, ...], constants: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """``boxes``: which of the described tensors, and how; None where the kernel takes None."""
        self.kernel, self.grid, self.boxes, self.numbers, self.constants = kernel, grid, boxes, numbers, constants
        self._tail = (*numbers, *constants)
        self._ready: dict[Any, _Ready] = {}
        self._maps: list[dict[int, list[Any]]] = [{} for _ in boxes]
        # Tensors that Triton compiles apart where they are not aligned.
        parameters = kernel.params[len(boxes) : len(kernel.params) - len(self._tail)]
        unaligned = [p.do_not_specialize or p.do_not_specialize_on_alignment for p in parameters]
        self._aligned = tuple(place for place, indifferent in enumerate(unaligned) if not indifferent)

    def launch(self, described: tuple[Tensor, ...], tensors: tuple[Tensor | None, ...]) -> None:
        """On the current stream of the first tensor's device; ``described`` have one dtype and last dims without gaps."""
        device = described[0].get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self.launch(described, tensors)
            return
        key = (device, described[0].dtype, *[t if t is None else t.dtype for t in tensors])
        for place in self._aligned:
            t = tensors[place]
            if t is not None and t.data_ptr() % 16:
                self._the_long_way(described, tensors)
                return
        ready = self._ready.get(key)
        if ready is None:
            general = (id(self.kernel), *key, self.constants, *self._specialised())
            ready = _ready.get(general)
            if ready is None or launching._hooked():
                compiled = self._the_long_way(described, tensors)
                kept = _direct(compiled) if _DIRECT else None
                if kept is not None and not launching._hooked():
                    _ready[general] = self._ready[key] = kept
                return
            self._ready[key] = ready
        if launching._hooked():
            self._the_long_way(described, tensors)
            return
        arguments: list[Any] = []
        for place, box in enumerate(self.boxes):
            if box is None:
                arguments.append(None)
                continue
            x, kept_maps = described[box[0]], self._maps[place]
            address = x.data_ptr()
            encoded = kept_maps.get(address)
            if encoded is None:
                if len(kept_maps) >= _KEPT:
                    kept_maps.clear()
                encoded = kept_maps[address] = self._encode(ready, place, x)
            arguments += encoded
        arguments += [t if t is None else t.data_ptr() for t in tensors]
        stream = torch._C._cuda_getCurrentRawStream(device)
        ready.call(*self.grid, stream, *ready.before, *arguments, *self._tail)

    def _specialised(self) -> list[Any]:
        """What Triton makes of the numbers: all it may compile apart."""
        parameters = self.kernel.params[len(self.kernel.params) - len(self._tail) :]
        seen: list[Any] = []
        for parameter, n in zip(parameters, self.numbers, strict=False):
            apart = isinstance(n, int) and not parameter.do_not_specialize
            seen.append((type(n), isinstance(n, int) and not -(2**31) <= n < 2**31, apart and (n == 1, n % 16 == 0)))
        return seen

    def _the_long_way(self, described: tuple[Tensor, ...], tensors: tuple[Tensor | None, ...]) -> Any:
        """Triton's own launch, which compiles what is not compiled yet and tells those who listen."""
        descriptors = [b if b is None else b[1].descriptor(described[b[0]]) for b in self.boxes]
        return self.kernel[self.grid](*descriptors, *tensors, *self._tail, num_warps=4, enable_fp_fusion=True)

    def _encode(self, ready: _Ready, place: int, x: Tensor) -> list[Any]:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        box = self.boxes[place]
        assert box is not None
        before = sum(b is not None for b in self.boxes[:place])
        return list(make_tensordesc_arg(box[1].descriptor(x), ready.descriptors[before]))


def _direct(compiled: Any) -> _Ready | None:
    """How to launch what ``kernel[grid](...)`` returned, past the Python of its launcher."""
    launcher = compiled.run
    wrapped = launcher.launch  # encodes descriptors, then calls the C function in its closure
    cells = dict(zip(wrapped.__code__.co_freevars, wrapped.__closure__ or (), strict=True))
    if "launcher" not in cells or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    before = (compiled.function, *flags, None, None, compiled.packed_metadata, None, None, None)
    return _Ready(cells["launcher"].cell_contents, before, compiled.metadata.tensordesc_meta)

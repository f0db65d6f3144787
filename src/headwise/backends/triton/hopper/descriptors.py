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


class PackedBox(NamedTuple):
    """Rows of one sequence of ``(1, H, T, D)``: what is past its end is not read (zeros) and not written.

    Two dims go before the others, with steps so long that an address comes round: 2³⁰ (2³⁴ - s) + e s + (2³⁰ - n + i) s is
    (e - n + i) s modulo 2⁶⁴, and the third dim ends at 2³⁰: at i = n.
    """

    rows: int
    width: int

    def descriptor(self, x: Tensor) -> TensorDescriptor:
        _, heads, tokens, dim = x.shape
        _, head, token, _ = x.stride()
        # Where there is one of something, any step will do that TMA takes.
        head, token = head if heads > 1 else dim, token if tokens > 1 else dim
        endless = 0x7FFF0000
        layout = gl.NVMMASharedLayout(min(128, self.width * x.element_size()), 8 * x.element_size(), 5)
        return TensorDescriptor(
            x, [endless, endless, 2**30, heads, dim], [2**34 - token, token, token, head, 1],
            [1, 1, self.rows, 1, self.width], layout,
        )  # fmt: skip


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

    __slots__ = ("_launches", "_maps", "aligned", "boxes", "constants", "grid", "kernel", "numbers", "tail")

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], boxes: tuple[tuple[int, Described] | None, ...],
        numbers: tuple[int | float, ...], constants: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """``boxes``: which of the described tensors, and how; None where the kernel takes None."""
        self.kernel, self.grid, self.boxes, self.numbers, self.constants = kernel, grid, boxes, numbers, constants
        self.tail = (*numbers, *constants)
        self._launches: dict[Any, DescribedLaunch] = {}
        self._maps: list[dict[int, list[Any]]] = [{} for _ in boxes]
        # Tensors that Triton compiles apart where they are not aligned.
        parameters = kernel.params[len(boxes) : len(kernel.params) - len(self.tail)]
        unaligned = [p.do_not_specialize or p.do_not_specialize_on_alignment for p in parameters]
        self.aligned = tuple(place for place, indifferent in enumerate(unaligned) if not indifferent)

    def launch(self, described: tuple[Tensor, ...], tensors: tuple[Tensor | None, ...]) -> None:
        """On the current stream of the first tensor's device; ``described`` have one dtype and last dims without gaps."""
        dtypes = [t if t is None else t.dtype for t in tensors]
        self.bound(described[0].get_device(), described[0].dtype, *dtypes)(described, tensors)

    def bound(self, device: int, described: torch.dtype, *dtypes: torch.dtype | None) -> DescribedLaunch:
        """Launches of this plan on tensors of these dtypes; None where there is no tensor."""
        key = (device, described, *dtypes)
        known = self._launches.get(key)
        if known is None:
            known = self._launches[key] = DescribedLaunch(self, device, key)
        return known

    def encoded(self, ready: _Ready, described: tuple[Tensor, ...]) -> list[Any]:
        """The descriptors of these tensors as the kernel takes them."""
        arguments: list[Any] = []
        for place, box in enumerate(self.boxes):
            if box is None:
                arguments.append(None)
                continue
            x, kept = described[box[0]], self._maps[place]
            address = x.data_ptr()
            one = kept.get(address)
            if one is None:
                if len(kept) >= _KEPT:
                    kept.clear()
                one = kept[address] = self._encode(ready, place, x)
            arguments += one
        return arguments

    def specialised(self) -> list[Any]:
        """What Triton makes of the numbers: all it may compile apart."""
        parameters = self.kernel.params[len(self.kernel.params) - len(self.tail) :]
        seen: list[Any] = []
        for parameter, n in zip(parameters, self.numbers, strict=False):
            apart = isinstance(n, int) and not parameter.do_not_specialize
            seen.append((type(n), isinstance(n, int) and not -(2**31) <= n < 2**31, apart and (n == 1, n % 16 == 0)))
        return seen

    def the_long_way(self, described: tuple[Tensor, ...], tensors: tuple[Tensor | None, ...]) -> Any:
        """Triton's own launch, which compiles what is not compiled yet and tells those who listen."""
        descriptors = [b if b is None else b[1].descriptor(described[b[0]]) for b in self.boxes]
        return self.kernel[self.grid](*descriptors, *tensors, *self.tail, num_warps=4, enable_fp_fusion=True)

    def _encode(self, ready: _Ready, place: int, x: Tensor) -> list[Any]:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        box = self.boxes[place]
        assert box is not None
        before = sum(b is not None for b in self.boxes[:place])
        return list(make_tensordesc_arg(box[1].descriptor(x), ready.descriptors[before]))


class DescribedLaunch:
    """Launches of a plan with tensors on one device that differ in where they lie alone, not in their dtypes."""

    __slots__ = ("_device", "_encoded", "_key", "_plan", "_ready")

    def __init__(self, plan: DescribedPlan, device: int, key: tuple[Any, ...]) -> None:
        self._plan, self._device, self._key = plan, device, key
        self._ready: _Ready | None = None
        self._encoded: dict[tuple[int, ...], list[Any]] = {}  # descriptors by the addresses of all

    def __call__(self, described: tuple[Tensor, ...], tensors: tuple[Tensor | None, ...]) -> None:
        plan, device = self._plan, self._device
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(described, tensors)
            return
        addresses = [t if t is None else t.data_ptr() for t in tensors]
        for place in plan.aligned:
            address = addresses[place]
            if address is not None and address % 16:
                plan.the_long_way(described, tensors)
                return
        if launching._hooked():
            plan.the_long_way(described, tensors)
            return
        ready = self._ready
        if ready is None:
            general = (id(plan.kernel), *self._key, plan.constants, *plan.specialised())
            ready = self._ready = _ready.get(general)
            if ready is None:
                compiled = plan.the_long_way(described, tensors)
                kept = _direct(compiled) if _DIRECT else None
                if kept is not None:
                    _ready[general] = self._ready = kept
                return
        at = tuple([x.data_ptr() for x in described])
        encoded = self._encoded.get(at)
        if encoded is None:
            if len(self._encoded) >= _KEPT:
                self._encoded.clear()
            encoded = self._encoded[at] = plan.encoded(ready, described)
        stream = torch._C._cuda_getCurrentRawStream(device)
        ready.call(*plan.grid, stream, *ready.before, *encoded, *addresses, *plan.tail)


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

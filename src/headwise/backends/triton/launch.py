"""The one place that launches a Triton kernel.

Every kernel of this backend takes its arguments in one order: tensors (or None), numbers, constants.

Triton's own ``kernel[grid](...)`` binds, specialises and looks the arguments up anew at every call, which costs the host
tens of microseconds. Here the compiled kernel that it returns is kept, under everything it may depend on, and the next
call of the same kind hands the arguments straight to it.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from headwise.config import settings

_LIMIT = 4096  # a process that meets ever new sizes must not keep them all
_ALIGNMENT = 16  # bytes; Triton compiles apart what is aligned to it
_AMD = torch.version.hip is not None
_RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
_HOOKS = triton.knobs.runtime

# How a compiled kernel's launcher is called by Triton 3.6, and by 3.7 to 3.9: the parameters of its ``__call__``, the same
# on NVIDIA and AMD. What the second form names is passed in the same order in the first.
_GRID = ("self", "gridX", "gridY", "gridZ", "stream", "function")
_HOOKED = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
_FORMS = ((*_GRID, "args"), (*_GRID, *_HOOKED, "args"))


class _Ready(NamedTuple):
    """A compiled kernel, launched as ``call(x, y, z, stream, *before, *args)``, or with args as one tuple."""

    call: Any
    before: tuple[Any, ...]
    one_tuple: bool
    by_address: bool  # it depends on the tensors' dtypes and alignment alone, and takes one argument after the other
    kernel: Any  # kept so that nothing else can take its id, which is part of the key


# Threads share it without a lock: an entry is written in one step and depends on its key alone, so the worst that two
# threads can do to each other is to launch by the long way once more.
_ready: dict[tuple[Any, ...], _Ready] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor | None, ...], numbers: tuple[int | float, ...],
    constants: tuple[Any, ...], num_warps: int = 4, num_stages: int = 3, registers: int = 0,
) -> _Ready | None:  # fmt: skip
    """Launch on the current stream of the tensors' device. At least one tensor is not None.

    ``registers`` is the most that a thread may use (0: the compiler decides), for kernels that gain more from another
    program on the same multiprocessor. Returns what a launch of the same kind may use at once, if there is such a thing.
    """
    if settings.triton_interpret:
        _the_long_way(kernel, grid, (*tensors, *numbers, *constants), num_warps, num_stages, registers)
        return None
    addresses: list[int | None] = []
    kinds: list[Any] = []
    bits = 0  # of all the addresses together
    some: Tensor | None = None
    for tensor in tensors:
        if tensor is None:
            addresses.append(None)
            kinds.append(None)
        else:
            some = tensor
            address = tensor.data_ptr()
            addresses.append(address)
            kinds.append(tensor.dtype)
            bits |= address
    assert some is not None
    device = some.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, numbers, constants, num_warps, num_stages, registers)
        return None
    if bits % _ALIGNMENT:
        kinds += [address is not None and address % _ALIGNMENT == 0 for address in addresses]
    if _AMD:  # there Triton also compiles apart what 32-bit offsets reach
        kinds += [t is not None and t.untyped_storage().size() < 2**31 for t in tensors]
    # The numbers themselves, and not what Triton makes of them (equal to 1, a multiple of 16, more than 32 bits): this way
    # it does not matter what a release makes of them.
    # Their types too: 1 == 1.0.
    key = (id(kernel), device, num_warps, num_stages, registers, numbers, constants, *map(type, numbers), *kinds)
    ready = _ready.get(key)
    if ready is None or _hooked():
        compiled = _the_long_way(kernel, grid, (*tensors, *numbers, *constants), num_warps, num_stages, registers)
        if not _hooked():
            _keep(key, kernel, compiled)
        return None
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    if ready.one_tuple:
        ready.call(x, y, z, stream, *ready.before, (*addresses, *numbers, *constants))
    else:
        ready.call(x, y, z, stream, *ready.before, *addresses, *numbers, *constants)
    return ready


class Plan:
    """A launch worked out but for its tensors; the tensors of one plan differ in dtypes and in where they lie alone.

    Callers keep plans by what they were worked out from.
    """

    __slots__ = ("_launches", "constants", "grid", "kernel", "numbers", "registers", "stages", "tail", "warps")

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], numbers: tuple[int | float, ...], constants: tuple[Any, ...],
        warps: int, stages: int, registers: int = 0,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.warps, self.stages, self.registers = warps, stages, registers
        self.tail = (*numbers, *constants)
        self._launches: dict[Any, Launch] = {}

    def launch(self, *tensors: Tensor | None) -> None:
        """The first tensor is not None."""
        first: Tensor = tensors[0]  # type: ignore[assignment]
        self.bound(first.get_device(), *[t if t is None else t.dtype for t in tensors])(*tensors)

    def bound(self, device: int, *dtypes: torch.dtype | None) -> Launch:
        """Launches of this plan on tensors of these dtypes; None where there is no tensor."""
        known = self._launches.get((device, *dtypes))
        if known is None:
            there = tuple(i for i, dtype in enumerate(dtypes) if dtype is not None)
            known = self._launches[device, *dtypes] = Launch(self, device, there, len(dtypes))
        return known


class Launch:
    """Launches of a plan with tensors on one device that differ in where they lie alone, not in their dtypes."""

    __slots__ = ("_device", "_none", "_plan", "_ready", "_there")

    def __init__(self, plan: Plan, device: int, there: tuple[int, ...], count: int) -> None:
        """there: which of the ``count`` tensors are not None."""
        self._plan, self._device, self._there, self._none = plan, device, there, [None] * count
        self._ready: _Ready | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        addresses: list[int | None] = self._none.copy()  # type: ignore[assignment]
        bits = 0  # of all the addresses together
        for i in self._there:
            address = tensors[i].data_ptr()  # type: ignore[union-attr]
            bits |= address
            addresses[i] = address
        plan, ready, device = self._plan, self._ready, self._device
        if ready is None or bits % _ALIGNMENT or device != torch._C._cuda_getDevice() or _hooked():
            kept = launch(
                plan.kernel, plan.grid, tensors, plan.numbers, plan.constants, plan.warps, plan.stages, plan.registers
            )
            if kept is not None and kept.by_address and bits % _ALIGNMENT == 0:
                self._ready = kept
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        ready.call(*plan.grid, stream, *ready.before, *addresses, *plan.tail)


def _the_long_way(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], num_warps: int, num_stages: int, registers: int
) -> Any:
    options = {"maxnreg": registers} if registers and not _AMD else {}
    # Multiply-adds in one instruction are Triton's default up to 3.9, and no longer after it.
    return kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True, **options)


def _hooked() -> bool:
    """Does a profiler listen to launches? Only the long way tells it of them."""
    enter, leave = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook  # None, a function, or a list of them in ``calls``
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _keep(key: tuple[Any, ...], kernel: Any, compiled: Any) -> None:
    ready = _direct(kernel, compiled)
    if ready is not None:
        if len(_ready) >= _LIMIT:
            _ready.clear()
        _ready[key] = ready


def _direct(kernel: Any, compiled: Any) -> _Ready | None:
    """How to launch what ``kernel[grid](...)`` returned; None if Triton has changed so that we do not know."""
    try:
        launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        form = tuple(inspect.signature(type(launcher).__call__).parameters)
    except (AttributeError, TypeError, ValueError):
        return None
    if form not in _FORMS:
        return None
    no_hooks = (None, None, None)  # the launch's metadata, the hook before, the hook after
    flags = [getattr(launcher, name, None) for name in ("launch_cooperative_grid", "launch_pdl")]
    scratch = [getattr(launcher, f"{name}_scratch_size", 1) for name in ("global", "profile")]
    plain = inspect.isbuiltin(getattr(launcher, "launch", None)) and not any(scratch)
    if type(launcher).__name__ == "CudaLauncher" and plain and not getattr(launcher, "gsan_enabled", False):
        # Past the Python of ``__call__``, which costs as much as the rest of the launch.
        no_scratch = (None, None)
        if _RELEASE == (3, 6):
            return _Ready(launcher.launch, (function, *flags, *no_scratch, metadata, *no_hooks), False, True, kernel)
        if (3, 7) <= _RELEASE <= (3, 9):
            described = (launcher.arg_annotations, launcher.kernel_signature)
            return _Ready(
                launcher.launch, (function, *flags, metadata, *no_hooks, *no_scratch, *described), True, False, kernel
            )
    return _Ready(launcher, (function, metadata, *no_hooks), False, not _AMD, kernel)

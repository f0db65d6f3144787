"""Every private way into Triton, in one place.

Triton's own ``kernel[grid](…)`` binds, specialises and looks the arguments up anew at every call, which costs the host tens
of microseconds. A record keeps the compiled kernel and hands its arguments straight to the C function behind it. Seen in
Triton 3.6 and 3.7 to 3.9. In a release that looks different, `direct` says None and every launch takes Triton's own way:
slower for the host, the same results.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import triton

_HIP = torch.version.hip is not None
_RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
HOOKS = triton.knobs.runtime
_NOHOOKS = (None, None, None)  # the launch's metadata, the hook before, the hook after
_NO_SCRATCH = (None, None)  # global, profile


class Pointer:
    """What Triton takes for a tensor: a dtype and an address."""

    __slots__ = ("address", "dtype", "size")

    def __init__(self, dtype: torch.dtype, address: int, size: int) -> None:
        self.dtype, self.address, self.size = dtype, address, size

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        """On AMD, Triton compiles apart what 32-bit offsets reach."""
        return self.size


class Direct(NamedTuple):
    """A C function that launches: ``call(x, y, z, stream, *before, *arguments)``, or with the arguments as one tuple."""

    call: Any
    before: tuple[Any, ...]
    one_tuple: bool
    descriptors: Any  # what the kernel was compiled to know of each of its TMA descriptors


def compiled(kernel: Any, grid: tuple[int, ...], arguments: list[Any], options: dict[str, Any]) -> Any:
    """The compiled kernel for such arguments; nothing is launched."""
    return kernel.run(*arguments, grid=grid, warmup=True, **options)


def options(warps: int, stages: int, registers: int) -> dict[str, Any]:
    # Multiply-adds in one instruction are Triton's default up to 3.9, and no longer after it.
    chosen: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    if registers and not _HIP:
        chosen["maxnreg"] = registers
    return chosen


def hooked() -> bool:
    """Does a profiler listen to launches? Only Triton's own way tells it of them."""
    enter, leave = HOOKS.launch_enter_hook, HOOKS.launch_exit_hook  # None, a function, or a list of them in ``calls``
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def direct(compiled: Any) -> Direct | None:
    """How to launch a compiled kernel past the Python of Triton's launcher; None if this release is not known."""
    try:
        launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        scratch = [getattr(launcher, f"{name}_scratch_size") for name in ("global", "profile")]
        flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    except AttributeError:
        return None
    if type(launcher).__name__ != "CudaLauncher" or any(scratch) or getattr(launcher, "gsan_enabled", False):
        return None
    call, described = launcher.launch, getattr(compiled.metadata, "tensordesc_meta", None)
    if _RELEASE == (3, 6):
        if not inspect.isbuiltin(call):  # it encodes descriptors, then calls the C function in its closure
            cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
            if "launcher" not in cells:
                return None
            call = cells["launcher"].cell_contents
        return Direct(call, (function, *flags, *_NO_SCRATCH, metadata, *_NOHOOKS), False, described)
    if (3, 7) <= _RELEASE <= (3, 9) and inspect.isbuiltin(call) and not described:
        signature = (launcher.arg_annotations, launcher.kernel_signature)
        return Direct(call, (function, *flags, metadata, *_NOHOOKS, *_NO_SCRATCH, *signature), True, None)
    return None


def encoded(descriptor: Any, meta: Any) -> list[Any]:
    """A TMA descriptor as the C function takes it: 128 bytes that the driver encodes on the host."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return list(make_tensordesc_arg(descriptor, meta))

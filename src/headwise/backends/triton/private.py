"""Every private way into Triton, in one place.

Triton's own ``kernel[grid](…)`` binds, specialises and looks the arguments up anew at every call, which costs the host tens
of microseconds. A record keeps the compiled kernel and hands its arguments straight to the C function behind it. Seen in
Triton 3.6 and 3.7 to 3.9. In a release that looks different, `direct` says None and every launch takes Triton's own way:
slower for the host, the same results.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITCallable

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Facts

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
    _hash_in_full(kernel)
    return kernel.run(*arguments, grid=grid, warmup=True, **options)


def _hash_in_full(kernel: Any) -> None:
    """Let the name under which a kernel is kept on disk not depend on the kernels that were compiled before it.

    Triton hashes a kernel with the functions it calls and the constants that these read. But it takes a function's constants
    before it hashes the function, so those of one that was not hashed before are left out: a backward would be compiled
    anew in a process that ran the forward first. Hashed again and again, until nothing is added, they are all there. Seen
    in 3.6; where functions have no such attributes, a kernel may be compiled once more than needed, and nothing else.
    """
    if getattr(kernel, "hash", "known") is not None or not hasattr(kernel, "used_global_vals"):
        return
    functions = {
        id(x): (x, x.hash)
        for name, module in list(sys.modules.items())
        if name.startswith("headwise.backends.triton")
        for x in list(vars(module).values())
        if isinstance(x, JITCallable)
    }
    before = None
    while kernel.cache_key != before:
        before = kernel.cache_key
        kernel.hash = None
        for function, _ in functions.values():
            function.hash = None
    for function, hashed in functions.values():
        if hashed is not None:
            function.hash = hashed


class _NoGpu:
    """Says what the current GPU is, so that Triton's own binder compiles for it."""

    def __init__(self, facts: Facts) -> None:
        major, minor = facts.capability
        cuda, hip = GPUTarget("cuda", 10 * major + minor, 32), GPUTarget("hip", facts.arch, 64)
        self.target = hip if facts.hip else cuda

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # Triton keeps compiled kernels apart by device

    def get_current_stream(self, device: Any) -> int:
        return 0


def compiled_for(
    facts: Facts, kernel: Any, grid: tuple[int, ...], arguments: list[Any], options: dict[str, Any]
) -> bool:
    """Compile a kernel for a GPU that need not be here. False if it was compiled before, in any process."""
    hits: list[bool] = []

    def listen(**about: Any) -> None:
        hits.append(about["cache_hit"])

    before, listener = driver._active, triton.knobs.compilation.listener
    driver._active, triton.knobs.compilation.listener = _NoGpu(facts), listen
    try:
        compiled(kernel, grid, arguments, options)
    finally:
        driver._active, triton.knobs.compilation.listener = before, listener
    return not all(hits)  # not asked at all: this process has it


def cache_folder() -> str:
    """Where Triton keeps what it compiled."""
    return str(triton.knobs.cache.dir)


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

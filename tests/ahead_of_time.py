"""What a launcher launches, recorded and compiled for a GPU that need not be here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from headwise.arguments import tensors_of
from headwise.backends.triton import private
from headwise.backends.triton.gpu import KNOWN
from headwise.backends.triton.recording import Launch, Recording

# The release that the tiles and blocks were chosen with; of others it is only asked that they compile.
TUNED = triton.__version__.startswith("3.6.")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),  # consumer cards: 99 KB of shared memory
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class _NoGpu:
    """Says what the current GPU is, so that Triton's own binder compiles for it."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.arch]

    def get_current_device(self) -> str:
        return self.arch  # Triton keeps compiled kernels apart by device

    def get_current_stream(self, device: Any) -> int:
        return 0


class Recorded:
    """What ``launcher(gpu, args)`` launches on a GPU of this architecture."""

    def __init__(self, launcher: Callable[..., Any], args: Any, arch: str = "sm_90") -> None:
        self.arch, self._recording = arch, Recording(KNOWN[arch])
        self._recording.run(launcher, args, [0] * len(tensors_of(args)))
        self.launches = [step for step in self._recording.steps if isinstance(step, Launch)]

    def compiled(self, launch: Launch) -> Any:
        before = driver._active
        driver._active = _NoGpu(self.arch)
        try:
            return private.compiled(launch.kernel, launch.grid, self._recording.sample(launch), launch.options)
        finally:
            driver._active = before


def stack(kernel: Any, folder: Path) -> int:
    """Bytes of stack a thread has: what the registers do not hold. Other releases of Triton may need a few more."""
    return _usage(kernel, folder, "STACK") if TUNED else 0


def registers(kernel: Any, folder: Path) -> int:
    """Of a thread."""
    return _usage(kernel, folder, "REG")


def _usage(kernel: Any, folder: Path, resource: str) -> int:
    cuobjdump = Path(triton.__path__[0], "backends", "nvidia", "bin", "cuobjdump")
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run([cuobjdump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    return int(re.search(rf"{resource}:(\d+)", usage.stdout)[1])  # type: ignore[index]

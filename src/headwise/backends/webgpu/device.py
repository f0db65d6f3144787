"""A device as launchers use it: capabilities, kernels, memory and dispatches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from headwise.backends.webgpu import adapter
from headwise.backends.webgpu.shaders import Buffer, Kernel
from headwise.backends.webgpu.storage import OutOfMemory, Pool, Region, Storage, contiguous_strides


class Binding(NamedTuple):
    storage: Storage
    first: int  # byte
    size: int


class Device:
    """Either the GPU itself (`runtime.OpenDevice`), or what records a launcher (`recorder.Recording`)."""

    capabilities: adapter.Capabilities
    pool: Pool

    def kernel(self, name: str, **variant: Any) -> Kernel:
        """Kernel family ``name`` in one variant, compiled on first use."""
        raise NotImplementedError

    def dispatch(self, kernel: Kernel, groups: tuple[int, ...], parameters: bytes, bindings: list[Binding]) -> None:
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Region:
        """Uninitialised memory. Strides, where given, are those of a dense layout of the shape."""
        count = 1
        for size in shape:
            count *= size
        # Rounded up to whole vectors, so that kernels can write the last one in full.
        storage = self.pool.take(-(-count * dtype.itemsize // 16) * 16)
        return Region(storage, dtype, shape, contiguous_strides(shape) if strides is None else strides)

    def run(
        self, kernel: Kernel, groups: int | tuple[int, ...], parameters: tuple[float, ...], **regions: Region
    ) -> None:
        """Dispatch a kernel.

        groups      workgroups: a grid, or a plain number of any size, which the kernel sees as ``workgroup``
        parameters  values for the fields of ``params(…)`` in the shader, in their order
        regions     what is bound, by the names in the shader; their starts are passed as further parameters
        """
        if isinstance(groups, int):
            groups = spread(groups)
        if 0 in groups:
            return
        if len(regions) != len(kernel.buffers):
            raise RuntimeError(f"{kernel.name} binds {[b.name for b in kernel.buffers]}, and was given {list(regions)}")
        bindings, starts = [], []
        for buffer in kernel.buffers:
            binding, start = self._binding(kernel.name, regions[buffer.name], buffer)
            bindings.append(binding)
            starts.append(start)
        self.dispatch(kernel, (*groups, 1, 1)[:3], kernel.pack(parameters, starts), bindings)

    def _binding(self, kernel: str, region: Region, buffer: Buffer) -> tuple[Binding, int]:
        """What to bind, and where in it the region begins, in items of the shader's array."""
        storage, itemsize, most = region.storage, region.itemsize, self.capabilities.binding_bytes
        first, size = 0, storage.size
        if size > most:
            low, high = region.span()
            first = low * itemsize // 256 * 256
            size = min(storage.size, -(-high * itemsize // 16) * 16) - first
            if size > most:
                raise OutOfMemory(
                    f"{kernel} would have to see {size} bytes of {buffer.name} at once; {self.capabilities.name} binds at "
                    f"most {most}. Split the call (a shorter sequence or row, fewer ids), or use backend='cpu'"
                )
        start = region.offset - first // itemsize
        if start % buffer.unit:
            raise RuntimeError(f"{buffer.name} begins at element {start}; the kernel needs a multiple of {buffer.unit}")
        return Binding(storage, first, size), start // buffer.unit


def spread(groups: int) -> tuple[int, int, int]:
    """A number of workgroups as a grid: one dimension holds 65535. The shader's ``workgroup`` undoes this."""
    most = adapter.MOST_GROUPS
    if groups <= most:
        return groups, 1, 1
    rows = -(-groups // most)
    return -(-groups // rows), rows, 1

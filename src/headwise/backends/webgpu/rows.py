"""What the row kernels share on the host: tensors as matrices of rows, how rows map to threads (``wgsl/rows.wgsl``), and
pieces of tensors that are larger than a binding."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

THREADS = 256  # of a workgroup, unless a row needs more
LONGEST_THREADS = 1024  # of a workgroup that works on one long row, if the device allows it
ONE_READ = 32  # threads that share a row before any of them gets a second vector
VECTORS = 4  # of a thread, before more threads share a row
# 32-bit registers of a thread that may hold a row, by threads of a workgroup: a multiprocessor has 65536 in all.
REGISTERS = {256: 64, 512: 64, 1024: 32}

_SHARED = ("weight", "bias", "partials")  # tensors that have no entry per row


class RowTile(NamedTuple):
    """How rows map to threads: template variables of ``rows.wgsl``."""

    lanes: int
    threads: int
    held: int
    walks: bool

    @property
    def rows(self) -> int:
        """Rows of a workgroup."""
        return self.threads // self.lanes

    def blocks(self, width: int) -> int:
        return max(1, -(-width // (4 * self.lanes * self.held)))


def tile(device: Device, width: int, words: int) -> RowTile:
    """``words``: 32-bit registers for four columns of all tensors that are held."""
    return _tile(width, words, min(device.capabilities.workgroup_threads, LONGEST_THREADS))


@functools.lru_cache(maxsize=1024)
def _tile(width: int, words: int, most_threads: int) -> RowTile:
    vectors = max(1, -(-width // 4))
    lanes = _power_of_two(vectors) if vectors <= ONE_READ else max(ONE_READ, _power_of_two(-(-vectors // VECTORS)))
    if lanes <= THREADS:
        return RowTile(lanes, THREADS, -(-vectors // lanes), False)
    longest = RowTile(THREADS, THREADS, 1, True)
    for threads, registers in REGISTERS.items():
        if threads > most_threads:
            break
        most_held = max(1, registers // words)
        held = -(-vectors // threads)
        # Many vectors per thread are slower than twice as many threads.
        if held <= most_held and (held <= 2 * VECTORS or 2 * threads > most_threads):
            return RowTile(threads, threads, held, False)
        longest = RowTile(threads, threads, most_held, True)
    if -(-vectors // longest.lanes) <= longest.held:
        return longest._replace(held=-(-vectors // longest.lanes), walks=False)
    return longest


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def words(dtype: torch.dtype, tensors: int = 1) -> int:
    """32-bit registers for four columns of each of ``tensors`` tensors."""
    return dtype.itemsize * tensors


def softmax_words(dtype: torch.dtype) -> int:
    """The same for a softmax, which keeps values as float32 until the highest is known."""
    return max(4, words(dtype))


def as_rows(device: Device, x: Region) -> Region:
    """x ``(…, width)`` as ``(rows, width)``, the elements of a row side by side; copied only if the strides require it."""
    width = x.shape[-1]
    if x.contiguous:
        count = x.numel // width if width else 0
        return x if len(x.shape) == 2 else x.with_shape((count, width))
    shape, strides = merged(x)
    if width > 1 and (strides[-1] != 1 or shape[-1] % width):
        return copies.copied(device, x.with_shape(shape, strides)).with_shape((x.numel // width, width))
    if width == 1:
        if len(shape) == 1:
            return x.with_shape((shape[0], 1), (strides[0], 1))
    elif len(shape) == 1:  # rows follow each other
        return x.with_shape((shape[0] // width, width))
    elif len(shape) == 2 and shape[-1] == width:
        return x.with_shape(shape, strides)
    return copies.copied(device, x.with_shape(shape, strides)).with_shape((x.numel // width, width))


def merged(x: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of x with as few dims as possible, the elements in the same order."""
    shape, strides = [1], [1]
    for size, stride in zip(x.shape, x.strides, strict=True):
        if size == 1:
            continue
        if shape == [1]:
            shape, strides = [size], [stride]
        elif strides[-1] == size * stride:
            shape[-1] *= size
            strides[-1] = stride
        else:
            shape.append(size)
            strides.append(stride)
    return tuple(shape), tuple(strides)


def are_aligned(*matrices: Region) -> bool:
    """Do all rows start at a multiple of four elements, and are they multiples of four long?"""
    for x in matrices:
        rows, width = x.shape
        if width % 4 or x.offset % 4 or (rows > 1 and x.strides[0] % 4):
            return False
    return True


class RowLayout(NamedTuple):
    """How the rows of a call's tensors map to threads and memory."""

    rows: int
    width: int
    seams: bool  # are there words that two rows share?
    tile: RowTile
    variant: dict[str, Any]  # the template variables of rows.wgsl
    strides: tuple[int, ...]  # from row to row, in the units of the kernel


def layout(device: Device, tile: RowTile, *matrices: Region) -> RowLayout:
    """The layout of inputs ``(rows, width)``; the result is contiguous."""
    rows, width = matrices[0].shape
    aligned = are_aligned(*matrices)
    dtype = matrices[0].dtype
    seams = not aligned and dtype.itemsize == 2 and width % 2 == 1
    variant = {
        "dtype": DTYPES[dtype], "lanes": tile.lanes, "threads": tile.threads, "held": tile.held, "walks": tile.walks,
        "subgroup": device.capabilities.subgroup_size, "aligned": aligned, "seams": seams,
        "whole": aligned and width > 0 and width % (4 * tile.lanes * tile.held) == 0,
    }  # fmt: skip
    unit = 4 if aligned else 1
    strides = tuple(x.strides[0] // unit if rows > 1 else 0 for x in matrices)
    return RowLayout(rows, width, seams, tile, variant, strides)


def pieces(device: Device, *tensors: Region) -> list[tuple[int, int]]:
    """``(first row, rows)`` to work on at once: all rows (the first dim of each), or as many as a kernel may bind."""
    most = device.capabilities.binding_bytes
    rows = tensors[0].shape[0]
    if all(x.storage.size <= most for x in tensors):
        return [(0, rows)]
    room = [
        (((most - 512) // x.itemsize - math.prod(x.shape[1:])) // x.strides[0] + 1) if x.strides[0] else rows
        for x in tensors
    ]
    most_rows = max(1, min(room))
    unit = 4 if most_rows >= 4 else 2 if most_rows >= 2 else 1  # so that 16-bit pieces are whole words
    # Equal pieces: a small one at the end would leave most of the GPU idle for as long as a row takes.
    count = max(1, -(-rows // (most_rows // unit * unit)))
    step = max(unit, -(-rows // (count * unit)) * unit)
    return [(start, min(step, rows - start)) for start in range(0, rows, step)]


def part(x: Region, first: int, rows: int) -> Region:
    return x if rows == x.shape[0] else x.narrow(0, first, rows)


class RowKernel(NamedTuple):
    """A row kernel and its tensors."""

    name: str
    layout: RowLayout
    variant: dict[str, Any]  # template variables of the kernel's own
    inputs: dict[str, Region]  # (rows, width), in the order of ``layout.strides``
    result: dict[str, Region]  # (rows, width), contiguous: one, or several, or none
    sides: dict[str, Region]  # with one entry per row; but all of those that are `_SHARED` is bound for every piece

    def run(self, device: Device, parameters: tuple[float, ...]) -> None:
        """Run on all rows, in as many pieces as needed."""
        for first, rows in self.pieces(device):
            self.run_piece(device, first, rows, -(-rows // self.layout.tile.rows), parameters)

    def pieces(self, device: Device) -> list[tuple[int, int]]:
        per_row = [x for name, x in self.sides.items() if name not in _SHARED]
        return pieces(device, *self.inputs.values(), *self.result.values(), *per_row)

    def run_piece(
        self, device: Device, first: int, rows: int, groups: int | tuple[int, ...], parameters: tuple[float, ...],
        **variant: Any,
    ) -> None:  # fmt: skip
        """Run on some rows, with a grid that the caller chooses."""
        at = self.layout
        bound = {name: part(x, first, rows) for name, x in (self.inputs | self.result).items()}
        for name, x in self.sides.items():
            bound[name] = x if name in _SHARED else part(x, first, rows)
        seams = {_seams_of(name): name for name in self.result} if at.seams else {}
        bound |= {seam: device.empty((rows,), torch.float32) for seam in seams}
        compiled = device.kernel(self.name, **at.variant, **self.variant, **variant)
        numbers = (rows, at.width, at.tile.blocks(at.width), *at.strides, *parameters)
        device.run(compiled, groups, numbers, **bound)
        for seam, name in seams.items():
            kernel = device.kernel("rows_seams", dtype=DTYPES[bound[name].dtype])
            device.run(kernel, -(-rows // 512), (rows, at.width), seams=bound[seam], y=bound[name])


def _seams_of(result: str) -> str:
    """The name of a result's seams in the kernel."""
    return "h_seams" if result == "h" else "seams"

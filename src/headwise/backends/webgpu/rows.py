"""What the row kernels share on the host: tensors as matrices of rows, how rows lie on threads (``wgsl/rows.wgsl``), and
the cutting of what one binding does not hold."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

THREADS = 256  # of a workgroup, where a row does not need more
LONGEST_THREADS = 1024  # of a workgroup that has a long row to itself, where the device has as many
ONE_READ = 32  # vectors of a row: so many threads share one before any of them gets a second vector
VECTORS = 4  # of a thread, before more threads share a row
# 32-bit registers that may hold a row, by threads of a workgroup: a multiprocessor has 65536 for all its threads.
REGISTERS = {256: 64, 512: 64, 1024: 32}

_WHOLE = ("weight", "parts")  # tensors that have no entry per row


class Tile(NamedTuple):
    """How rows lie on threads: template variables of ``rows.wgsl``."""

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


def tile(device: Device, width: int, words: int) -> Tile:
    """``words``: 32-bit registers that four columns take, of all tensors that are held."""
    return _tile(width, words, min(device.capabilities.workgroup_threads, LONGEST_THREADS))


@functools.lru_cache(maxsize=1024)
def _tile(width: int, words: int, most_threads: int) -> Tile:
    vectors = max(1, -(-width // 4))
    lanes = _power_of_two(vectors) if vectors <= ONE_READ else max(ONE_READ, _power_of_two(-(-vectors // VECTORS)))
    if lanes <= THREADS:
        return Tile(lanes, THREADS, -(-vectors // lanes), False)
    longest = Tile(THREADS, THREADS, 1, True)
    for threads, registers in REGISTERS.items():
        if threads > most_threads:
            break
        most_held = max(1, registers // words)
        held = -(-vectors // threads)
        # Twice as many threads are better than very many vectors for each.
        if held <= most_held and (held <= 2 * VECTORS or 2 * threads > most_threads):
            return Tile(threads, threads, held, False)
        longest = Tile(threads, threads, most_held, True)
    if -(-vectors // longest.lanes) <= longest.held:
        return longest._replace(held=-(-vectors // longest.lanes), walks=False)
    return longest


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def words(dtype: torch.dtype, tensors: int = 1) -> int:
    """Registers of four columns in as many tensors of a dtype."""
    return dtype.itemsize * tensors


def softmax_words(dtype: torch.dtype) -> int:
    """The same where the highest value is looked for first: until it is known, values wait as float32."""
    return max(4, words(dtype))


def as_rows(device: Device, x: Region) -> Region:
    """x ``(…, width)`` as ``(rows, width)``, the elements of a row side by side; copied only where strides ask for it."""
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
    """Shape and strides of x with as few dims as hold its elements in the same order."""
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
    """Do all rows begin at a multiple of four elements, and are they multiples of four long?"""
    for x in matrices:
        rows, width = x.shape
        if width % 4 or x.offset % 4 or (rows > 1 and x.strides[0] % 4):
            return False
    return True


class Layout(NamedTuple):
    """What a call of a row kernel knows of its tensors."""

    rows: int
    width: int
    seams: bool
    tile: Tile
    variant: dict[str, Any]  # the template variables of rows.wgsl
    strides: tuple[int, ...]  # from row to row, in the units of the kernel


def layout(device: Device, chosen: Tile, *matrices: Region) -> Layout:
    """The layout of inputs ``(rows, width)``; the result is contiguous."""
    rows, width = matrices[0].shape
    aligned = are_aligned(*matrices)
    dtype = matrices[0].dtype
    seams = not aligned and dtype.itemsize == 2 and width % 2 == 1
    variant = {
        "dtype": DTYPES[dtype], "lanes": chosen.lanes, "threads": chosen.threads, "held": chosen.held,
        "walks": chosen.walks, "subgroup": device.capabilities.subgroup_size, "aligned": aligned, "seams": seams,
        "whole": aligned and width > 0 and width % (4 * chosen.lanes * chosen.held) == 0,
    }  # fmt: skip
    unit = 4 if aligned else 1
    strides = tuple(x.strides[0] // unit if rows > 1 else 0 for x in matrices)
    return Layout(rows, width, seams, chosen, variant, strides)


def pieces(device: Device, *matrices: Region) -> list[tuple[int, int]]:
    """``(first row, rows)`` to work on at once: all, unless a kernel may not bind as much."""
    most = device.capabilities.binding_bytes
    rows = matrices[0].shape[0]
    if all(x.storage.size <= most for x in matrices):
        return [(0, rows)]
    room = [(((most - 512) // x.itemsize - x.shape[1]) // x.strides[0] + 1) if x.strides[0] else rows for x in matrices]
    most_rows = max(1, min(room))
    unit = 4 if most_rows >= 4 else 2 if most_rows >= 2 else 1  # of 16 bits, whole words
    # As many rows in each: a few left over would keep few of the GPU's processors busy for as long as a row takes.
    count = max(1, -(-rows // (most_rows // unit * unit)))
    step = max(unit, -(-rows // (count * unit)) * unit)
    return [(start, min(step, rows - start)) for start in range(0, rows, step)]


def part(x: Region, first: int, rows: int) -> Region:
    return x if rows == x.shape[0] else x.narrow(0, first, rows)


def run(
    device: Device, kernel: str, at: Layout, parameters: tuple[float, ...], variant: dict[str, Any],
    matrices: dict[str, Region], name: str, y: Region | None, sides: dict[str, Region],
) -> None:  # fmt: skip
    """Run a row kernel over all rows, in as many pieces as bindings ask for.

    variant    template variables of the kernel's own
    matrices   inputs ``(rows, width)``, in the order of ``at.strides``
    name, y    what is written, ``(rows, width)``, contiguous, if it is more than sides
    sides      tensors with one entry per row; ``weight`` is seen whole by every piece
    """
    written = () if y is None else (y,)
    for first, rows in pieces(device, *matrices.values(), *written):
        groups = -(-rows // at.tile.rows)
        run_piece(device, kernel, at, first, rows, groups, parameters, variant, matrices, name, y, sides)


def run_piece(
    device: Device, kernel: str, at: Layout, first: int, rows: int, groups: int | tuple[int, ...],
    parameters: tuple[float, ...], variant: dict[str, Any], matrices: dict[str, Region], name: str, y: Region | None,
    sides: dict[str, Region],
) -> None:  # fmt: skip
    """`run` on some rows, on a grid of the caller's."""
    bound = {key: part(x, first, rows) for key, x in matrices.items()}
    for key, x in sides.items():
        bound[key] = x if key in _WHOLE else part(x, first, rows)
    if y is not None:
        bound[name] = part(y, first, rows)
        if at.seams:
            bound["seams"] = device.empty((rows,), torch.float32)
    compiled = device.kernel(kernel, **at.variant, **variant)
    blocks = at.tile.blocks(at.width)
    device.run(compiled, groups, (rows, at.width, blocks, *at.strides, *parameters), **bound)
    if y is not None and at.seams:
        sew(device, at.width, bound["seams"], bound[name])


def sew(device: Device, width: int, seams: Region, y: Region) -> None:
    """Write the words of y that two rows share."""
    rows = y.shape[0]
    kernel = device.kernel("rows_seams", dtype=DTYPES[y.dtype])
    device.run(kernel, -(-rows // 512), (rows, width), seams=seams, y=y)

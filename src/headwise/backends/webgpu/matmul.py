"""Matrix products on WebGPU: ``wgsl/matmul.wgsl``, for launchers of ops that have a linear layer in them."""

from __future__ import annotations

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

TILE_M, TILE_N = 64, 128
# Products that are added up in one chain. A float32 sum of tens of thousands in one chain loses a digit.
CHAIN = 512


def matmul(device: Device, a: Region, b: Region, dtype: torch.dtype, bias: Region | None = None) -> Region:
    """a ``(M, K)`` times b ``(K, N)``, plus bias ``(N,)``, in a new contiguous tensor; summed in float32, rounded once.

    float32, float16 or bfloat16, each of its own; a transposed matrix is a view with its strides exchanged. a and b may have
    a first dim of as many matrices.
    """
    out = device.empty((*a.shape[:-1], b.shape[-1]), dtype)
    matmul_into(device, a, b, out, bias=bias)
    return out


def matmul_into(
    device: Device, a: Region, b: Region, out: Region, *, add: bool = False, bias: Region | None = None
) -> None:
    """The same into ``out`` (M, N), whose rows are dense; its last row may be followed by padding to 16 bytes alone.

    add: to what is there; ``out`` is float32 then.
    """
    if 0 in out.shape:
        return
    a, b = _readable(device, a), _readable(device, b)
    if out.dtype == torch.float32:
        _windows(device, a, b, out, add, bias)
        return
    if add:
        raise NotImplementedError(f"adding to a matrix of {out.dtype}: it would be rounded more than once")
    if a.shape[-1] <= CHAIN and _lines_of_vectors(out, 0) and all(copies.fits(device, x) for x in (a, b, out)):
        _dispatch(device, a, b, out, False, bias)
        return
    sums = device.empty(out.shape, torch.float32)
    _windows(device, a, b, sums, False, bias)
    round_into(device, sums, out)


def round_into(device: Device, x: Region, y: Region) -> None:
    """Round x, float32, into y of the same shape; both contiguous. y may be followed by padding to 16 bytes alone."""
    kernel = device.kernel("round_rows", dtype=DTYPES[y.dtype])
    vectors = -(-x.numel // 4)
    most = (device.capabilities.binding_bytes - 512) // 16
    for start in range(0, vectors, most):
        count = min(most, vectors - start)
        source, target = (r.with_shape((4 * vectors,)).narrow(0, 4 * start, 4 * count) for r in (x, y))
        device.run(kernel, -(-count // 256), (1, count, count, count), x=source, y=target)


def transposed(x: Region) -> Region:
    return x.permuted((1, 0))


def _readable(device: Device, x: Region) -> Region:
    """x itself if the elements of its rows or of its columns lie side by side, else a copy."""
    return x if _along_rows(x) or x.strides[-2] == 1 or x.shape[-2] == 1 else copies.copied(device, x)


def _along_rows(x: Region) -> bool:
    return x.strides[-1] == 1 or x.shape[-1] <= 1


def _lines_of_vectors(x: Region, lines: int) -> bool:
    """Do the lines of x (dim ``lines`` of a matrix counts them) begin and end at multiples of four elements?"""
    shape, strides = x.shape[-2:], x.strides[-2:]
    batch = len(x.shape) == 2 or x.shape[0] == 1 or x.strides[0] % 4 == 0
    return batch and x.offset % 4 == 0 and shape[1 - lines] % 4 == 0 and (shape[lines] == 1 or strides[lines] % 4 == 0)


def _windows(device: Device, a: Region, b: Region, out: Region, add: bool, bias: Region | None) -> None:
    """Halve what is larger than a binding, and a long chain of sums."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    up, along = len(a.shape) - 2, len(a.shape) - 1  # the dims of a matrix
    if up and a.shape[0] > 1 and not all(copies.fits(device, x) for x in (a, b, out)):
        first = a.shape[0] // 2
        for start, count in ((0, first), (first, a.shape[0] - first)):
            _windows(device, *(x.narrow(0, start, count) for x in (a, b, out)), add, bias)
        return
    of_k = not copies.fits(device, a) and a.strides[along] > a.strides[up]
    of_k = of_k or (not copies.fits(device, b) and b.strides[up] > b.strides[along])
    if of_k or k > CHAIN:
        first = CHAIN if k > CHAIN and not of_k else _half(k)
        if first < k:
            _windows(device, a.narrow(along, 0, first), b.narrow(up, 0, first), out, add, bias)
            _windows(device, a.narrow(along, first, k - first), b.narrow(up, first, k - first), out, True, None)
            return
    if not (copies.fits(device, a) and copies.fits(device, out)) and m > 1:
        first = _half(m)
        for start, count in ((0, first), (first, m - first)):
            _windows(device, a.narrow(up, start, count), b, out.narrow(up, start, count), add, bias)
        return
    if not copies.fits(device, b) and n > 1:
        first = _half(n)
        for start, count in ((0, first), (first, n - first)):
            part = None if bias is None else bias.narrow(0, start, count)
            _windows(device, a, b.narrow(along, start, count), out.narrow(along, start, count), add, part)
        return
    _dispatch(device, a, b, out, add, bias)


def _half(size: int) -> int:
    """About half, at the boundary of a tile or a vector where there is one."""
    unit = next((u for u in (TILE_N, TILE_M, 4) if size >= 2 * u), 1)
    return -(-size // (2 * unit)) * unit


def _dispatch(device: Device, a: Region, b: Region, out: Region, add: bool, bias: Region | None) -> None:
    (m, k), n = a.shape[-2:], b.shape[-1]
    batched = len(a.shape) == 3
    a_lines, b_lines = (0 if _along_rows(x) else 1 for x in (a, b))
    vectors = [_lines_of_vectors(x, lines) for x, lines in ((a, a_lines), (b, b_lines), (out, 0))]
    kernel = device.kernel(
        "matmul", a=DTYPES[a.dtype], b=DTYPES[b.dtype], bias="" if bias is None else DTYPES[bias.dtype],
        out=DTYPES[out.dtype], a_along="m" if a_lines else "k", b_along="k" if b_lines else "n",
        a_vectors=vectors[0], b_vectors=vectors[1], out_vectors=vectors[2], adds=add, batched=batched,
    )  # fmt: skip
    units = [4 if whole else 1 for whole in vectors]
    strides = [
        (x.strides[-2 + lines] if x.shape[-2 + lines] > 1 else 0) // unit
        for x, lines, unit in zip((a, b, out), (a_lines, b_lines, 0), units, strict=True)
    ]
    tiles = -(-m // TILE_M), -(-n // TILE_N)
    bound = {"a": a, "b": b, "out": out} | ({} if bias is None else {"bias": bias})
    count, batch = 1, []
    if batched:
        count = a.shape[0]
        batch = [*(x.strides[0] // unit for x, unit in zip((a, b, out), units, strict=True)), count]
    device.run(kernel, count * tiles[0] * tiles[1], (m, n, k, *strides, *tiles, *batch), **bound)

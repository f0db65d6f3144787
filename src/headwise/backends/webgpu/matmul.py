"""Matrix products on WebGPU: ``wgsl/matmul.wgsl``, for launchers of ops that have a linear layer in them.

A few rows go to ``wgsl/matmul_rows.wgsl``. Where workgroups are too few for the GPU, k is cut into splits, whose partials
``wgsl/matmul_sum.wgsl`` adds up in their order.
"""

from __future__ import annotations

import torch

from headwise.backends.webgpu import copies, matmul_plans
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

_UNITS = (128, 64, 4)  # where a matrix is cut that is larger than a binding


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
    if a.shape[0] > 1 and b.shape[-1] == 1 and len(a.shape) == 2 and bias is None and out.contiguous:
        # A column: the same as a row of the transposed product.
        a, b, out = transposed(b), transposed(a), out.with_shape((1, a.shape[0]))
    a, b = _readable(device, a), _readable(device, b)
    if out.dtype == torch.float32:
        _ranges(device, a, b, out, add, bias)
        return
    if add:
        raise NotImplementedError(f"adding to a matrix of {out.dtype}: it would be rounded more than once")
    if _lines_of_vectors(out, 0) and all(copies.fits(device, x) for x in (a, b, out)):
        _dispatch(device, a, b, out, False, bias)
        return
    sums = device.empty(out.shape, torch.float32)
    _ranges(device, a, b, sums, False, bias)
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


def _ranges(device: Device, a: Region, b: Region, out: Region, add: bool, bias: Region | None) -> None:
    """Halve what is larger than a binding."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    up, along = len(a.shape) - 2, len(a.shape) - 1  # the dims of a matrix
    if up and a.shape[0] > 1 and not all(copies.fits(device, x) for x in (a, b, out)):
        first = a.shape[0] // 2
        for start, count in ((0, first), (first, a.shape[0] - first)):
            some = [x.narrow(0, start, count) for x in (a, b, out)]
            _ranges(device, some[0], some[1], some[2], add, bias)
        return
    of_k = not copies.fits(device, a) and a.strides[along] > a.strides[up]
    of_k = of_k or (not copies.fits(device, b) and b.strides[up] > b.strides[along])
    if of_k and k > 1:
        first = _half(k)
        _ranges(device, a.narrow(along, 0, first), b.narrow(up, 0, first), out, add, bias)
        _ranges(device, a.narrow(along, first, k - first), b.narrow(up, first, k - first), out, True, None)
        return
    if not (copies.fits(device, a) and copies.fits(device, out)) and m > 1:
        first = _half(m)
        for start, count in ((0, first), (first, m - first)):
            _ranges(device, a.narrow(up, start, count), b, out.narrow(up, start, count), add, bias)
        return
    if not copies.fits(device, b) and n > 1:
        first = _half(n)
        for start, count in ((0, first), (first, n - first)):
            here = None if bias is None else bias.narrow(0, start, count)
            _ranges(device, a, b.narrow(along, start, count), out.narrow(along, start, count), add, here)
        return
    _dispatch(device, a, b, out, add, bias)


def _half(size: int) -> int:
    """About half, at the boundary of a tile or a vector where there is one."""
    unit = next((u for u in _UNITS if size >= 2 * u), 1)
    return -(-size // (2 * unit)) * unit


def _dispatch(device: Device, a: Region, b: Region, out: Region, add: bool, bias: Region | None) -> None:
    if not add and _few_rows(device, a, b, out, bias):
        return
    (m, k), n = a.shape[-2:], b.shape[-1]
    count = a.shape[0] if len(a.shape) == 3 else 1
    # The sum of partials goes over all elements in a row, in vectors.
    dense = out.contiguous and out.offset % 4 == 0 and m * n % 4 == 0
    tile, split = matmul_plans.plan_for(device.capabilities, m, n, k, count, dense)
    if split < k:
        splits = -(-k // split)
        partials = device.empty((count * splits, m, n), torch.float32)
        _tiles(device, tile, a, b, partials, False, None, split)
        _sum(device, partials, splits, out, add, bias)
    else:
        _tiles(device, tile, a, b, out, add, bias, k)


def _tiles(
    device: Device,
    tile: matmul_plans.GemmTile,
    a: Region,
    b: Region,
    out: Region,
    add: bool,
    bias: Region | None,
    split: int,
) -> None:
    (m, k), n = a.shape[-2:], b.shape[-1]
    batched, split_k = len(a.shape) == 3, split < k
    a_lines, b_lines = (0 if _along_rows(x) else 1 for x in (a, b))
    vectors = [_lines_of_vectors(x, lines) for x, lines in ((a, a_lines), (b, b_lines), (out, 0))]
    kernel = device.kernel(
        "matmul", a=DTYPES[a.dtype], b=DTYPES[b.dtype], bias="" if bias is None else DTYPES[bias.dtype],
        out=DTYPES[out.dtype], a_along="m" if a_lines else "k", b_along="k" if b_lines else "n",
        a_vectors=vectors[0], b_vectors=vectors[1], out_vectors=vectors[2], adds=add, batched=batched, split_k=split_k,
        tile=tile[:5], stages=tile.stages,
        chain=matmul_plans.CHAIN if out.dtype == torch.float32 and split > matmul_plans.CHAIN else 0,
    )  # fmt: skip
    units = [4 if whole else 1 for whole in vectors]
    strides = [
        (x.strides[-2 + lines] if x.shape[-2 + lines] > 1 else 0) // unit
        for x, lines, unit in zip((a, b, out), (a_lines, b_lines, 0), units, strict=True)
    ]
    tiles = -(-m // tile.m), -(-n // tile.n)
    bound = {"a": a, "b": b, "out": out} | ({} if bias is None else {"bias": bias})
    count, batch = 1, []
    if batched or split_k:
        count = a.shape[0] if batched else 1
        batch = [x.strides[0] // unit if len(x.shape) == 3 else 0 for x, unit in zip((a, b, out), units, strict=True)]
        batch.append(count)
    if split_k:
        splits = -(-k // split)
        count *= splits
        batch += [split, splits]
    device.run(kernel, count * tiles[0] * tiles[1], (m, n, k, *strides, *tiles, *batch), **bound)


def _few_rows(device: Device, a: Region, b: Region, out: Region, bias: Region | None) -> bool:
    """The product by the kernel for few rows, where it can."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    along_k = not _along_rows(b)
    whole = _lines_of_vectors(b, 1 if along_k else 0) and out.contiguous and out.offset % 4 == 0 and n % 4 == 0
    if len(a.shape) > 2 or m > matmul_plans.MOST_ROWS or k == 0 or not whole or (bias is not None and bias.offset % 4):
        return False
    if not _along_rows(a) or (along_k and not _lines_of_vectors(a, 0)):
        a = copies.copied(device, a)
    plan = matmul_plans.rows_for(m, k, along_k)
    groups = -(-n // plan.of_workgroup(along_k))
    split = matmul_plans.split_of_rows(k, groups, plan.step(along_k))
    splits = -(-k // split)
    written = out if splits == 1 else device.empty((splits, m, n), torch.float32)
    here = bias if splits == 1 else None
    kernel = device.kernel(
        "matmul_rows", a=DTYPES[a.dtype], b=DTYPES[b.dtype], bias="" if here is None else DTYPES[here.dtype],
        out=DTYPES[written.dtype], b_along="k" if along_k else "n", split_k=splits > 1, **plan._asdict(),
    )  # fmt: skip
    bound = {"a": a, "b": b, "out": written} | ({} if here is None else {"bias": here})
    a_stride = a.strides[0] if m > 1 else 0
    line = (b.strides[1] if n > 1 else 0) if along_k else (b.strides[0] if k > 1 else 0)
    parameters = (m, n, k, a_stride // (4 if along_k else 1), line // 4, split)
    device.run(kernel, groups * splits, parameters, **bound)
    if splits > 1:
        _sum(device, written, splits, out, False, bias)
    return True


def _sum(device: Device, partials: Region, splits: int, out: Region, add: bool, bias: Region | None) -> None:
    """Add up the partials of each matrix into out, contiguous."""
    matrices = partials.shape[0] // splits
    vectors = out.numel // 4 // matrices
    kernel = device.kernel(
        "matmul_sum", bias="" if bias is None else DTYPES[bias.dtype], out=DTYPES[out.dtype], adds=add
    )
    bound = {"partials": partials, "out": out} | ({} if bias is None else {"bias": bias})
    device.run(kernel, -(-vectors * matrices // 256), (vectors, splits, matrices, out.shape[-1]), **bound)

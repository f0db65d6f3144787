"""What the attention launchers share: the variant, parameters and small buffers of ``wgsl/scores.wgsl``, rows that kernels
can read four elements at a time, and the tiles of a packed batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags

LOG2E = 1.4426950408889634


class Variant(NamedTuple):
    """Template variables of ``scores.wgsl``: what a call pays for."""

    mask: bool
    bias: str  # dtype, or "" for none
    lengths: bool
    sink: bool
    cap: bool
    left: bool
    right: bool
    packed: bool


class Scores(NamedTuple):
    variant: Variant
    parameters: tuple[float, ...]  # in the order of `scores.fields`
    regions: dict[str, Region]  # mask, bias, aux, where there


def of_call(
    device: Device,
    q: Region,
    k: Region,
    mask: Region | None,
    bias: Region | None,
    kv_lengths: Region | None,
    sink: Region | None,
    flags: Flags,
    packed: bool = False,
) -> Scores:
    """Dense q ``(B, Hq, Sq, D)`` and k ``(B, Hk, Sk, D)``; packed ones as ``(1, H, T, D)`` views."""
    batch, heads, q_length, _ = q.shape
    key_heads, k_length = k.shape[1:3]
    # No side of the band need be longer than any distance there is: kernels add them to positions in 32 bits.
    farthest = q_length + k_length
    variant = Variant(
        mask=mask is not None,
        bias="" if bias is None else DTYPES[bias.dtype],
        lengths=kv_lengths is not None,
        sink=sink is not None,
        cap=flags.softcap > 0,
        left=flags.left >= 0,
        right=flags.right >= 0,
        packed=packed,
    )
    parameters: tuple[float, ...] = (
        batch, heads, heads // max(key_heads, 1), q_length, k_length, min(flags.left, farthest),
        min(flags.right, farthest), flags.scale, flags.softcap or 1.0,
    )  # fmt: skip
    regions: dict[str, Region] = {}
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None:
            parameters += tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.strides, strict=True))
            regions[name] = x
    if kv_lengths is not None or sink is not None:
        regions["aux"] = _aux(device, kv_lengths, sink, batch, heads, k_length)
    return Scores(variant, parameters, regions)


def _aux(device: Device, lengths: Region | None, sink: Region | None, batch: int, heads: int, longest: int) -> Region:
    aux = device.empty((batch + heads,), torch.int32)
    kernel = device.kernel(
        "attention_aux",
        lengths="" if lengths is None else DTYPES[lengths.dtype],
        sink="" if sink is None else DTYPES[sink.dtype],
    )
    given: dict[str, Region] = {}
    if lengths is not None:
        given["lengths"] = lengths
    if sink is not None:
        given["sink"] = sink
    # Without lengths, sinks come first.
    parameters = (
        0 if lengths is None else batch, heads, longest, 0 if lengths is None else lengths.strides[0],
        0 if sink is None else sink.strides[0],
    )  # fmt: skip
    device.run(kernel, -(-max(batch, heads) // 64), parameters, **given, aux=aux)
    return aux


def aligned(device: Device, x: Region) -> Region:
    """x ``(…, D)`` with rows that begin at a multiple of four elements and are zeros from D up to one.

    Most tensors are so already and are read where they lie; others (an odd head dim) are copied, O(S) of memory.
    """
    last = x.shape[-1]
    inner = zip(x.shape[:-1], x.strides[:-1], strict=True)
    if last % 4 == 0 and x.strides[-1] == 1 and x.offset % 4 == 0 and all(n == 1 or s % 4 == 0 for n, s in inner):
        return x
    return copies.copied(device, x, -(-last // 4) * 4)


def vectors(x: Region) -> tuple[int, ...]:
    """Strides of an aligned tensor's outer dims in vectors of four, as kernels count them."""
    return tuple(0 if n == 1 else s // 4 for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True))


def heads_outside(x: Region) -> Region:
    """Packed ``(T, H, D)`` seen as ``(1, H, T, D)``."""
    (tokens, heads, last), (of_token, of_head, of_element) = x.shape, x.strides
    return x.with_shape((1, heads, tokens, last), (0, of_head, of_token, of_element))


def bindable(device: Device, x: Region) -> Region:
    """x, copied where its elements lie too far apart to be bound as they are."""
    low, high = x.span()
    most = device.capabilities.binding_bytes
    if x.storage.size > most and (high - low) * x.itemsize > most - 512:
        return copies.copied(device, x)
    return x


def windows(device: Device, *tensors: Region) -> list[tuple[int, int]]:
    """``(first, past)`` along dim 2 of tensors of one head, ``(1, 1, S, ·)``: all, or as many rows as a kernel may bind.

    The rows of a window are to be made `bindable`."""
    length = rows = tensors[0].shape[2]
    for x in tensors:
        if x.storage.size > device.capabilities.binding_bytes:
            rows = min(rows, (device.capabilities.binding_bytes - 512) // (x.shape[3] * x.itemsize))
    rows = max(rows, 1)
    return [(first, min(first + rows, length)) for first in range(0, length, rows)] or [(0, length)]


class Bindable:
    """Parts of tensors where a kernel can bind them. Those that have to be copied for it are copied once: memory for each
    pair of windows would grow with the square of their number."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: dict[Any, Region] = {}

    def __call__(self, x: Region) -> Region:
        known = (x.storage, x.offset, x.shape, x.strides, x.dtype)
        if known not in self._made:
            self._made[known] = bindable(self._device, x)
        return self._made[known]

    def rows(self, x: Region, first: int, past: int) -> Region:
        """Some rows of a tensor ``(·, ·, S, ·)``."""
        return self(x if past - first == x.shape[2] else x.narrow(2, first, past - first))


def empty_sums(device: Device, result: Region, more: int = 0) -> Region:
    """Memory for sums that several dispatches make of the rows of a result: float32, and room for so many numbers more in
    each row."""
    return device.empty((*result.shape[:3], -(-result.shape[3] // 4) * 4 + more), torch.float32)


def round_rows(device: Device, sums: Region, result: Region) -> None:
    """Round the sums of one head, ``(1, 1, S, ·)``, into its result, whose rows are aligned."""
    sums = sums.narrow(3, 0, -(-result.shape[3] // 4) * 4)
    x, y = (r.with_shape(r.shape[2:], r.strides[2:]) for r in (sums, result))
    copies.round_rows(device, x, y)


def pieces(device: Device, batch: int, key_heads: int, *tensors: Region | None) -> list[tuple[int, int, int, int]]:
    """``(first batch entry, entries, first key head, key heads)`` to work on at once.

    All of it, unless a tensor is larger than a kernel may bind: then one key head of one batch entry after the other.
    """
    most = device.capabilities.binding_bytes
    if all(x is None or x.storage.size <= most for x in tensors):
        return [(0, batch, 0, key_heads)]
    return [(b, 1, h, 1) for b in range(batch) for h in range(key_heads)]


class Rows(NamedTuple):
    """Where a kernel writes rows of ``last`` elements, and how that becomes the result."""

    written: Region  # aligned
    result: Region  # what the caller gets


def empty_rows(
    device: Device, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> Rows:
    """Memory for a result ``shape`` in a dense layout; its rows are written padded first, where their size is no multiple
    of four. Call `finish` when the kernel is recorded."""
    result = device.empty(shape, dtype, strides)
    if shape[-1] % 4 == 0:
        return Rows(result, result)
    padded = device.empty((*shape[:-1], -(-shape[-1] // 4) * 4), dtype)
    return Rows(padded, result)


def finish(device: Device, rows: Rows) -> Region:
    """Bring padded rows into the layout of the result."""
    if rows.written is not rows.result:
        # The result may lie heads inside: its dims in the order they lie in memory make it a contiguous tensor.
        result = rows.result
        order = sorted(range(len(result.shape) - 1), key=lambda d: -result.strides[d])
        order.append(len(result.shape) - 1)
        source = rows.written
        seen = Region(
            source.storage, source.dtype, tuple(result.shape[d] for d in order), tuple(source.strides[d] for d in order)
        )
        copies.copy_into(device, seen, result.with_shape(seen.shape))
    return rows.result


def like_heads(x: Region, last: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape and strides of a result ``(B, H, S, last)`` in the layout of x, as `headwise.layout.empty_like_heads` has it."""
    batch, heads, length, dim = x.shape
    shape = (batch, heads, length, last)
    if not (dim == last and x.contiguous) and x.strides[1] < x.strides[2]:
        return shape, heads_inside(shape)
    return shape, None


def heads_inside(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of ``(B, H, S, D)`` stored as ``(B, S, H, D)``."""
    _, heads, length, last = shape
    return (length * heads * last, last, heads * last, 1)


def packed_tiles(
    device: Device,
    cu: Region,
    other_cu: Region,
    total: int,
    other_total: int,
    longest: int,
    other_longest: int,
    tile: int,
) -> tuple[Region, int]:
    """The list of ``wgsl/attention_tiles.wgsl`` for tiles of ``tile`` tokens, and how many entries it has."""
    sequences = cu.shape[0] - 1
    entries = total // tile + sequences + 1
    tiles = device.empty((entries, 8), torch.int32)
    kernel = device.kernel("attention_tiles", dtype=DTYPES[cu.dtype], other_dtype=DTYPES[other_cu.dtype])
    parameters: tuple[Any, ...] = (
        sequences, total, other_total, longest, other_longest, tile, entries, cu.strides[0], other_cu.strides[0],
    )  # fmt: skip
    device.run(kernel, 1, parameters, cu=cu, other_cu=other_cu, tiles=tiles)
    return tiles, entries

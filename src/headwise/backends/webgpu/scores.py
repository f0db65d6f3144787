"""What the attention launchers share: the variant, parameters and small buffers of ``wgsl/scores.wgsl``, aligned rows,
ranges of tensors that are larger than a binding, and the tiles of a packed batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.mask_words import PackedMask, packed_mask
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

_LENGTHS = ("kv_lengths", "q_lengths", "kv_starts")


class Variant(NamedTuple):
    """Template variables of ``scores.wgsl``: the features that a call uses."""

    mask: str  # "words" (mask_words.py), "bytes" as it was given, or "" for none
    bias: str  # dtype, or "" for none
    lengths: bool
    sink: bool
    cap: bool
    left: bool
    right: bool
    packed: bool
    dropout: int = 0  # numbers that are there for it: 1, the seed; 3, 5, 6: where the call lies, too (`SEED_NUMBERS`)
    bias_width: int = 1  # biases of neighbouring keys that a kernel reads at once


class Dropout(NamedTuple):
    """The fields of ``scores.wgsl`` that only dropout has."""

    below: int  # of 16 random bits, those that drop
    scale: float  # of what is kept
    seed: int  # index in aux of it and of where the call lies, in two words each
    batch: int = 0  # numbers of the first batch entry and head
    head: int = 0


class Numbers(NamedTuple):
    """The first fields of ``scores.wgsl``."""

    batch: int
    heads: int
    group: int  # query heads of a key head
    q_length: int
    k_length: int
    left: int
    right: int
    scale: float
    softcap: float
    extents: int  # index in aux of the lengths of the first batch entry
    sinks: int  # index in aux of the sink of the first head


class Scores(NamedTuple):
    """Which keys each query may see, and what is added to the logits."""

    variant: Variant
    numbers: Numbers
    mask: Region | None  # bytes
    words: PackedMask | None  # the mask, packed
    bias: Region | None
    aux: Region | None  # lengths, sinks and the seed of dropout, see attention_aux.wgsl
    dropout: Dropout | None

    @property
    def parameters(self) -> tuple[float, ...]:
        return (
            *self.numbers,
            *(self.dropout or ()),
            *(() if self.words is None else self.words.parameters),
            *(stride for x in self.pairs.values() for stride in x.broadcast_strides),
        )

    @property
    def pairs(self) -> dict[str, Region]:
        """Tensors with an entry for each query and key. (A packed mask has none for a key.)"""
        return {name: x for name, x in (("mask", self.mask), ("bias", self.bias)) if x is not None}

    @property
    def regions(self) -> dict[str, Region]:
        """All that kernels bind."""
        return self.tensors if self.aux is None else self.tensors | {"aux": self.aux}

    @property
    def tensors(self) -> dict[str, Region]:
        """Mask and bias as they are bound."""
        return self.pairs if self.words is None else self.pairs | {"mask": self.words.words}

    def with_pairs(self, pairs: dict[str, Region]) -> Scores:
        return self._replace(mask=pairs.get("mask"), bias=pairs.get("bias"))

    def mask_rows(self, first: int, past: int) -> Scores:
        """With no more of a packed mask than queries [first, past) need."""
        return self if self.words is None else self._replace(words=self.words.rows(first, past))

    def narrow(self, batch: int, batches: int, head: int, heads: int, group: int) -> Scores:
        """Those of some batch entries and query heads."""
        pairs = {
            name: x.narrow_broadcast(0, batch, batches).narrow_broadcast(1, head, heads)
            for name, x in self.pairs.items()
        }
        first = self.numbers
        numbers = first._replace(
            batch=batches, heads=heads, group=group, extents=first.extents + 4 * batch, sinks=first.sinks + head
        )
        dropout = self.dropout
        if dropout is not None:
            dropout = dropout._replace(batch=dropout.batch + batch, head=dropout.head + head)
        words = None if self.words is None else self.words.narrow(batch, batches, head, heads)
        return self._replace(numbers=numbers, dropout=dropout, words=words).with_pairs(pairs)

    def wide_biases(self, most: int) -> Variant:
        """The variant that reads up to ``most`` (1, 2, 4) biases at once, as their places allow."""
        width, bias = most, self.bias
        if bias is None or bias.shape[3] == 1 or bias.strides[3] != 1:
            return self.variant
        while any(place % width for place in (bias.offset, *bias.broadcast_strides[:3])):
            width //= 2
        return self.variant._replace(bias_width=width)

    def without_sink(self) -> Scores:
        aux = self.aux if self.variant.lengths or self.variant.dropout else None
        return self._replace(variant=self.variant._replace(sink=False), aux=aux)


def seed_numbers(args: Any) -> int:
    return 0 if args.dropout_seed is None else args.dropout_seed.numel


def describe(
    device: Device, args: Any, q: Region, k: Region, aux: Region | None = None, sink: bool = True, pack: bool = True
) -> Scores:
    """args: `Attention` or `Probs`. q ``(B, Hq, Sq, D)``, k ``(B, Hk, Sk, D)``; packed ones as ``(1, H, T, D)`` views.

    aux: memory for lengths and sinks, if the caller has it, and for a seed in its last words. sink: do the kernels read
    it? pack: the mask?
    """
    mask, bias = (None if x is None else x.with_leading(4) for x in (args.mask, args.bias))
    batch, heads, q_length, _ = q.shape
    key_heads, k_length = k.shape[1:3]
    flags, sink = args.flags, sink and args.sink is not None
    lengths = any(getattr(args, name) is not None for name in _LENGTHS)
    mask_storage = "" if mask is None else "words" if pack else "bytes"
    variant = Variant(
        mask_storage, "" if bias is None else DTYPES[bias.dtype], lengths, sink, flags.softcap > 0, flags.left >= 0,
        flags.right >= 0, getattr(args, "packing", None) is not None,
        seed_numbers(args),
    )  # fmt: skip
    # Kernels add both sides of the band to positions in 32 bits: no side needs to be longer than the longest distance.
    farthest = q_length + k_length
    numbers = Numbers(
        batch, heads, heads // max(key_heads, 1), q_length, k_length, min(flags.left, farthest),
        min(flags.right, farthest), flags.scale, flags.softcap or 1.0, 0, 4 * batch if lengths else 0,
    )  # fmt: skip
    words = packed_mask(device, mask) if pack and mask is not None else None
    mask = None if pack else mask
    dropout = None
    if lengths or sink or variant.dropout:
        if aux is None:
            aux = device.empty((numbers.sinks + heads + 2 * variant.dropout,), torch.int32)
        if variant.dropout:
            dropout = Dropout(flags.dropped_below, flags.kept_scale, aux.numel - 2 * variant.dropout)
        _write_aux(device, args, sink, numbers, dropout, aux)
        return Scores(variant, numbers, mask, words, bias, aux, dropout)
    return Scores(variant, numbers, mask, words, bias, None, None)


def _write_aux(device: Device, args: Any, sink: bool, numbers: Numbers, dropout: Dropout | None, aux: Region) -> None:
    given = {name: getattr(args, name) for name in (*_LENGTHS, "sink")}
    if not sink:
        given["sink"] = None
    dtypes = {name: "" if x is None else DTYPES[x.dtype] for name, x in given.items()}
    kernel = device.kernel("attention_aux", **dtypes, seed=seed_numbers(args))
    batch, heads = numbers.batch, numbers.heads
    strides = (0 if x is None else x.strides[0] for x in given.values())
    parameters = (batch, heads, numbers.k_length, numbers.q_length, numbers.sinks, *strides)
    bound = {name: x for name, x in given.items() if x is not None}
    if dropout is not None:
        seed = args.dropout_seed
        bound["seed"] = Region(seed.storage, torch.int32, (2 * seed.numel,), (1,), 2 * seed.offset)
        parameters = (*parameters, dropout.seed)
    device.run(kernel, -(-max(batch, heads) // 64), parameters, **bound, aux=aux)


def aligned(device: Device, x: Region) -> Region:
    """x ``(…, D)`` with rows that start at a multiple of four elements and are padded with zeros to one.

    Most tensors already are. Others (an odd head dim) are copied, which takes O(S) memory.
    """
    last = x.shape[-1]
    inner = zip(x.shape[:-1], x.strides[:-1], strict=True)
    if last % 4 == 0 and x.strides[-1] == 1 and x.offset % 4 == 0 and all(n == 1 or s % 4 == 0 for n, s in inner):
        return x
    return copies.copied(device, x, -(-last // 4) * 4)


def vectors(x: Region) -> tuple[int, ...]:
    """Strides of an aligned tensor's outer dims in vectors of four, as kernels count them."""
    return tuple(stride // 4 for stride in x.broadcast_strides[:-1])


def heads_outside(x: Region) -> Region:
    """Packed ``(T, H, D)`` seen as ``(1, H, T, D)``."""
    (tokens, heads, last), (of_token, of_head, of_element) = x.shape, x.strides
    return x.with_shape((1, heads, tokens, last), (0, of_head, of_token, of_element))


def bindable(device: Device, x: Region) -> Region:
    """x; or a copy, if its elements are too far apart to bind."""
    return x if copies.fits(device, x) else copies.copied(device, x)


def ranges(device: Device, *tensors: Region) -> list[tuple[int, int]]:
    """``(first, past)`` along dim 2 of tensors of one head, ``(1, 1, S, ·)``: all rows, or as many as a kernel may bind
    once they are `bindable`."""
    length = rows = tensors[0].shape[2]
    for x in tensors:
        if x.storage.size > device.capabilities.binding_bytes:
            rows = min(rows, (device.capabilities.binding_bytes - 512) // (x.shape[3] * x.itemsize))
    rows = max(rows, 1)
    return [(first, min(first + rows, length)) for first in range(0, length, rows)] or [(0, length)]


class Bindable:
    """`bindable` that copies each part of a tensor once: a copy for each pair of ranges would take memory that grows with
    the square of their number."""

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
    """Float32 memory for rows of a result that several dispatches sum up, with room for ``more`` numbers in each row."""
    return device.empty((*result.shape[:3], -(-result.shape[3] // 4) * 4 + more), torch.float32)


def round_rows(device: Device, sums: Region, result: Region) -> None:
    """Round the sums of one head, ``(1, 1, S, ·)``, into its result, whose rows are aligned."""
    sums = sums.narrow(3, 0, -(-result.shape[3] // 4) * 4)
    x, y = (r.with_shape(r.shape[2:], r.strides[2:]) for r in (sums, result))
    copies.round_rows(device, x, y)


def pieces(device: Device, batch: int, key_heads: int, *tensors: Region | None) -> list[tuple[int, int, int, int]]:
    """``(first batch entry, entries, first key head, key heads)`` to work on at once.

    The whole call; or each key head of each batch entry, if a tensor is larger than a kernel may bind.
    """
    most = device.capabilities.binding_bytes
    if all(x is None or x.storage.size <= most for x in tensors):
        return [(0, batch, 0, key_heads)]
    return [(b, 1, h, 1) for b in range(batch) for h in range(key_heads)]


class Rows(NamedTuple):
    """A result and where a kernel writes its rows: elsewhere, if they need padding."""

    written: Region  # aligned
    result: Region


def empty_rows(
    device: Device, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> Rows:
    """Memory for a result in a dense layout, `heads_inside` if strides are given. Rows whose length is no multiple of four
    are written padded: call `finish` after the kernel."""
    result = device.empty(shape, dtype, strides)
    if shape[-1] % 4 == 0:
        return Rows(result, result)
    padded = (*shape[:-1], -(-shape[-1] // 4) * 4)
    return Rows(device.empty(padded, dtype, None if strides is None else heads_inside(padded)), result)


def finish(device: Device, rows: Rows) -> Region:
    """Copy padded rows into the result."""
    if rows.written is not rows.result:
        last = len(rows.result.shape) - 1
        copies.copy_into(device, rows.written.narrow(last, 0, rows.result.shape[last]), rows.result)
    return rows.result


def like_heads(x: Region, last: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape and strides of a result ``(B, H, S, last)`` in the layout of x, as in `headwise.layout.empty_like_heads`."""
    batch, heads, length, dim = x.shape
    shape = (batch, heads, length, last)
    if not (dim == last and x.contiguous) and x.strides[1] < x.strides[2]:
        return shape, heads_inside(shape)
    return shape, None


def heads_inside(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of ``(B, H, S, D)`` stored as ``(B, S, H, D)``."""
    _, heads, length, last = shape
    return (length * heads * last, last, heads * last, 1)


class Side(NamedTuple):
    """One side of a packed batch: the queries or the keys."""

    cu: Region  # (sequences + 1)
    total: int  # tokens
    longest: int  # an upper bound on the length of a sequence


def packed_sides(packing: Any, q: Region, k: Region) -> tuple[Side, Side]:
    """Queries and keys, of ``(1, H, T, D)`` views."""
    return Side(packing.cu_q, q.shape[2], packing.max_q), Side(packing.cu_k, k.shape[2], packing.max_k)


def packed_tiles(device: Device, own: Side, other: Side, tile: int) -> tuple[Region, int]:
    """The list of ``wgsl/attention_tiles.wgsl`` for tiles of ``tile`` tokens of ``own``, and how many entries it has."""
    sequences = own.cu.shape[0] - 1
    entries = own.total // tile + sequences + 1
    tiles = device.empty((entries, 8), torch.int32)
    kernel = device.kernel("attention_tiles", dtype=DTYPES[own.cu.dtype], other_dtype=DTYPES[other.cu.dtype])
    parameters = (
        sequences, own.total, other.total, own.longest, other.longest, tile, entries, own.cu.strides[0],
        other.cu.strides[0],
    )  # fmt: skip
    device.run(kernel, 1, parameters, cu=own.cu, other_cu=other.cu, tiles=tiles)
    return tiles, entries

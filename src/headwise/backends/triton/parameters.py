"""What the attention kernels are launched with. Triton takes named tuples as kernel parameters: structs.

Triton compiles another kernel for every number in a struct that turns into 1 or into a multiple of 16, whatever
``do_not_specialize`` says. Sizes, which change from call to call, are therefore parameters of their own. Structs are not
nested in a parameter either: Triton 3.6 loses constants in them. So a kernel begins by putting its structs together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.triton.blocks import aligned_elements, block_of, check_row_strides, score_strides
from headwise.backends.triton.dropout import dropout_numbers
from headwise.backends.triton.scores import band_of, logit_unit, search_block
from headwise.backends.triton.tile_sizes import AttentionTile

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import Attention, Flags


_CONVERSIONS = 16384  # bytes in which tiles change their layout, at most
_ON_BLACKWELL = 24576  # the same there, and barriers


class Inputs(NamedTuple):
    """The tensors that every kernel of a call reads, in the order of its first parameters.

    q, k, v are ``(B, H, S, D)``; a packed batch is one entry of all tokens. The mask is in bytes: Triton 3.6 cannot
    compile loads of single bits in nested loops for AMD.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    sink: Tensor | None
    q_lengths: Tensor | None
    kv_lengths: Tensor | None
    kv_starts: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    seed: Tensor | None  # of dropout


class Sizes(NamedTuple):
    queries: Any  # rows of q in memory: Sq, or all tokens of a packed batch
    keys: Any
    heads: Any
    group: Any  # query heads per key head
    tiles: Any  # of a head
    sequences: Any  # of a packed batch
    longest_q: Any
    longest_k: Any
    left: Any  # the window
    right: Any


class DimStrides(NamedTuple):
    """Of one dim of each tensor."""

    q: Any = None
    k: Any = None
    v: Any = None
    mask: Any = None
    bias: Any = None
    out: Any = None
    grad: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None


class Parameters(NamedTuple):
    batch: DimStrides
    head: DimStrides
    row: DimStrides
    key: DimStrides  # of mask and bias
    scale: Any
    softcap: Any


class Variant(NamedTuple):
    """Constants that a kernel is compiled for."""

    LEFT: bool  # is the window bounded on this side?
    RIGHT: bool
    CAP: bool
    STARTS: bool  # are there kv_starts?
    D: int
    DV: int
    BLOCK_D: int  # padded to powers of two
    BLOCK_DV: int
    QUERIES: int  # of a tile
    KEYS: int
    ALIGN: int  # elements that all outer strides are a multiple of
    SEARCH: int  # see `packed_tile`
    PRECISION: str
    UNIT: float  # see scores.py


def inputs_of(gpu: Gpu, args: Attention) -> Inputs:
    sink, q_lengths, kv_lengths, kv_starts = (
        None if x is None else gpu.contiguous(x) for x in (args.sink, args.q_lengths, args.kv_lengths, args.kv_starts)
    )
    vectors = sink, q_lengths, kv_lengths, kv_starts
    if args.packing is None:
        mask, bias = layout.four_dims(args.mask), layout.four_dims(args.bias)
        return Inputs(args.q, args.k, args.v, as_bytes(mask), bias, *vectors, None, None, args.dropout_seed)
    q, k, v = (one_entry(x) for x in (args.q, args.k, args.v))
    cu_q, cu_k = gpu.contiguous(args.packing.cu_q), gpu.contiguous(args.packing.cu_k)
    return Inputs(q, k, v, None, None, *vectors, cu_q, cu_k, args.dropout_seed)


def one_entry(x: Tensor) -> Tensor:
    """A packed ``(T, H, D)`` as one batch entry ``(1, H, T, D)``."""
    return x.transpose(0, 1)[None]


def as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def tiles_of(length: int, tile: int, args: Attention) -> int:
    """Tiles of a head. Of a packed batch the most there can be: each sequence, and the rest, may end in a short one."""
    return -(-length // tile) + (0 if args.packing is None else args.packing.cu_q.shape[0])


def banded(flags: Flags) -> bool:
    return flags.left >= 0 or flags.right >= 0


def row_bytes(args: Attention, tile: AttentionTile) -> int:
    """Bytes of a row of q (or k) and one of v, as a kernel holds them."""
    element = 6 if tile.bf16x3 else args.q.element_size()
    return element * (block_of(args.q.shape[-1]) + block_of(args.v.shape[-1]))


def beside_bias(gpu: Gpu, tile: AttentionTile, bias: Tensor | None, streamed: int, held: int) -> AttentionTile:
    """The tile with fewer stages, if tiles of a float32 bias would not fit shared memory beside the others.

    streamed: bytes that are fetched for every stage. held: bytes that stay. Triton has a buffer less than stages, and one
    more of what the matrix units of Hopper and later read. On AMD GPUs it fetches no bias ahead.
    """
    if bias is None or bias.element_size() < 4 or gpu.hip:
        return tile
    operands_stay = gpu.capability >= (9, 0)
    while tile.stages > 1:
        ahead = tile.stages - 1
        needed = (ahead + operands_stay) * streamed + ahead * tile.queries * tile.keys * bias.element_size() + held
        others = _CONVERSIONS if not operands_stay else _ON_BLACKWELL if gpu.capability >= (10, 0) else 0
        if needed + others <= gpu.shared_memory:
            break
        tile = tile._replace(stages=ahead)
    return tile


def parameters(
    args: Attention, x: Inputs, tiles: int, tile: AttentionTile, precision: str, **others: Tensor
) -> tuple[tuple[Any, ...], Variant]:
    """``(numbers, variant)`` of a launch. ``others``: what the kernel reads and writes beside x, all ``(B, H, S, D)``."""
    flags, packing = args.flags, args.packing
    (_, heads, q_length, _), (_, key_heads, k_length, _) = x.q.shape, x.k.shape
    packed = (0, 0, 0) if packing is None else (packing.cu_q.shape[0] - 1, packing.max_q, packing.max_k)
    band = band_of(flags, q_length, k_length)
    dim, value_dim = args.q.shape[-1], args.v.shape[-1]
    rows = {"q": x.q, "k": x.k, "v": x.v, **others}
    check_row_strides(max(tile.queries, tile.keys), *rows.values())
    strides = {name: (*t.stride()[:3], None) for name, t in rows.items()}
    strides |= {name: score_strides(t) for name, t in (("mask", x.mask), ("bias", x.bias)) if t is not None}
    return (
        *Sizes(q_length, k_length, heads, heads // key_heads, tiles, *packed, *band),
        *(DimStrides(**{name: of_tensor[dim] for name, of_tensor in strides.items()}) for dim in range(4)),
        flags.scale,
        flags.softcap,
        dropout_numbers(flags, args.dropout_seed),
    ), Variant(
        flags.left >= 0, flags.right >= 0, flags.softcap > 0, x.kv_starts is not None, dim, value_dim, block_of(dim),
        block_of(value_dim),
        tile.queries, tile.keys, aligned_elements(*rows.values()), search_block(packed[0]), precision,
        logit_unit(args.q.dtype),
    )  # fmt: skip

"""Decoding in Triton: the keys are split over the machine, and the partials are merged in a fixed order.

A program serves all query heads of a key head (and all new tokens) with one read of its splits of the cache: they are the
rows of one tile. Splits are cut from each sequence's own keys, so a short sequence in a large cache still fills the
machine. "Flash-Decoding", Dao et al., 2023; pages as in Kwon et al., "PagedAttention", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.triton.blocks import aligned_elements, block_of, check_row_strides, power_of_two
from headwise.backends.triton.decode_kernel import DecodeSizes, DecodeVariant, decode_kernel
from headwise.backends.triton.decode_merge import merge_kernel
from headwise.backends.triton.parameters import DimStrides
from headwise.backends.triton.products import dot_precision, piece_of
from headwise.backends.triton.scores import logit_unit
from headwise.backends.triton.tile_sizes import AttentionTile

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import Decode

# A sequence alone is cut into about this many splits per multiprocessor, and no split is smaller than this many keys. The
# batch has no say: a sequence gives the same bits in any batch. How many splits a program has depends on it.
SPLITS_PER_MULTIPROCESSOR = 1
SMALLEST_SPLIT = 256
BUNDLE = 4
# Many rows of latent attention: the partials of small splits would be as many numbers as the cache.
LARGE_SPLIT = 1024
# The program that finishes last merges the partials of its rows, where they are no more numbers than this. Else a second
# kernel does, in the same order and bits.
MOST_MERGED = 16384

# Rows of a tile whose 512 float32 sums each, and nothing beside them, eight warps hold.
_LATENT_ROWS = {"sm_80": 32, "sm_86": 32, "sm_90": 64, "sm_100": 32, "gfx942": 16}
# Shared memory that the tiles of one program may take, in KB: two programs or more fit on a multiprocessor.
_SHARED_MEMORY = {"sm_80": 80, "sm_86": 48, "sm_90": 100, "sm_100": 100, "gfx942": 32}


def attention_decode(gpu: Gpu, args: Decode) -> tuple[Tensor, Tensor | None]:
    return decode_with(gpu, args, None, 0)


def decode_with(
    gpu: Gpu, args: Decode, tile: AttentionTile | None, splits_per_program: int
) -> tuple[Tensor, Tensor | None]:
    """Decode. A tile and a number of splits are for measuring and tests: None and 0 are what is best."""
    q, k, v, table, flags = args.q, args.k_cache, args.v_cache, args.block_table, args.flags
    one = q.unsqueeze(2) if q.dim() == 3 else q
    (batch, heads, queries, head_dim), value_dim, key_heads = one.shape, v.shape[3], k.shape[1]
    strides = layout.strides_like_heads(one, value_dim)
    shape = q.shape[:-1]
    dtype = flags.result_dtype(q.dtype)
    out = gpu.empty((*shape, value_dim), dtype, strides if one is q else (*strides[:2], 1))
    lse = gpu.empty(shape, torch.float32) if args.with_lse else None
    if 0 in shape:
        return out, lse
    group, element = heads // key_heads, q.element_size()
    block_d, block_dv = block_of(head_dim), block_of(value_dim)
    # float32 operands of such a width fit in no register file at once, and values of another width would be padded.
    latent = args.values_in_keys and element < 4 and block_dv == value_dim
    block_rest = block_of(head_dim - value_dim) if latent else 0
    width = block_dv + block_rest if latent else block_d + block_dv  # elements of a tile that belong to a key
    capacity = k.shape[2] * (1 if table is None else table.shape[1])
    given = tile
    tile = given or decode_tile(element, width, max(head_dim, value_dim), group * queries, gpu.arch)
    if latent and given is None:
        tile = latent_tile(tile, group * queries, gpu.arch)
    # In a paged cache rows are found from the beginning of their page.
    check_row_strides(max(tile.keys, 0 if table is None else k.shape[2]), k, v)
    row_blocks = -(-(group * queries) // tile.queries)
    splits = args.num_splits
    if splits == 0:
        span = capacity if flags.left < 0 else min(capacity, flags.left + queries)
        most = SPLITS_PER_MULTIPROCESSOR * gpu.multiprocessors // (key_heads * row_blocks)
        splits = min(most, -(-span // (SMALLEST_SPLIT if group * queries <= 16 or not latent else LARGE_SPLIT)))
    splits = max(1, min(splits, -(-capacity // tile.keys)))
    tiles = row_blocks * key_heads * batch
    single = latent and tile.queries > 16
    each = 1 if single else splits_per_program or splits_of_a_program(splits, tiles, gpu.multiprocessors)
    count = -(-splits // each)  # partials of a row
    per_bundle = -(-BUNDLE // each)
    if given is None:
        tile = for_programs_of(tile, each, count, width * element, gpu.arch)
    merged_rows, at_once = merge_tile(group * queries, tile.queries, block_dv, tile.warps)
    left = flags.left if flags.left < capacity - 1 else -1  # a window that reaches over the whole cache is none
    if table is not None and table.stride(1) != 1:
        table = gpu.contiguous(table)
    lengths, starts, sink = (
        None if x is None else gpu.contiguous(x) for x in (args.lengths, args.kv_starts, args.sink)
    )
    rows = batch * heads * queries
    partials = gpu.empty((rows * count * (value_dim + 2),), torch.float32) if count > 1 else None
    itself = merges_itself(gpu, merged_rows * count * value_dim, at_once, per_bundle)
    arrived = gpu.counters(tiles) if count > 1 and itself else None
    sizes = DecodeSizes(
        rows, queries, capacity, group, key_heads, row_blocks, k.shape[0], 0 if table is None else table.stride(0), splits,
        each, BUNDLE, left, 0,
    )  # fmt: skip
    variant = DecodeVariant(
        count == 1, single, left >= 0, True, starts is not None, flags.softcap > 0,
        0 if table is None else max(1, k.shape[2]),  # a cache without a single slot has no pages to look up
        head_dim, value_dim, block_d, block_dv, block_rest, tile.queries, tile.keys, tile.stages, piece_of(block_d, element),
        aligned_elements(one, k, v), dot_precision(gpu, q.dtype), logit_unit(q.dtype), merged_rows,
        max(at_once, per_bundle), per_bundle,
    )  # fmt: skip
    of_dims = [DimStrides(one.stride(i), k.stride(i), v.stride(i), out=strides[i]) for i in range(3)]
    gpu.launch(
        decode_kernel, (tiles * count,), (one, k, v, lengths, starts, table, sink, out, lse, partials, arrived),
        (*sizes, *of_dims, flags.scale, flags.softcap), (variant,),
        warps=tile.warps, stages=tile.stages, registers=tile.registers,
    )  # fmt: skip
    if partials is not None and arrived is None:
        gpu.launch(
            merge_kernel, (rows,), (partials, sink, out, lse), (rows, queries, heads, count, strides[:3]),
            (max(per_bundle, 16 if each == 1 else 8), variant), stages=1,
        )  # fmt: skip
    return out, lse


def merges_itself(gpu: Gpu, numbers: int, at_once: int, per_bundle: int) -> bool:
    """Does the program that finishes last merge? Not on AMD GPUs: its barrier does not wait for stores of other waves."""
    return numbers <= MOST_MERGED and at_once >= per_bundle and not gpu.hip


def splits_of_a_program(splits: int, tiles: int, processors: int) -> int:
    """All, a bundle or one: as many as leave enough programs; their results are added up in the same order anyway."""
    for each in (splits, BUNDLE):
        if 2 * tiles * -(-splits // each) >= 3 * processors:
            return each
    return 1


def for_programs_of(tile: AttentionTile, each: int, count: int, bytes_per_key: int, arch: str) -> AttentionTile:
    """The tile with what suits programs of so many splits and changes no bit: stages and registers."""
    if count == 1 and tile.keys * tile.stages * bytes_per_key <= _SHARED_MEMORY[arch] * 1024:
        return tile._replace(stages=tile.stages + 1)  # two programs per multiprocessor, and more of each under way
    if each > 1 and arch == "sm_90" and tile.warps == 4 and bytes_per_key <= 512:
        return tile._replace(registers=168)  # three programs per multiprocessor; nothing spills
    return tile


def merge_tile(rows: int, queries: int, block_dv: int, warps: int) -> tuple[int, int]:
    """Rows whose partials a program merges, and partials whose loads are under way together, as far as 64 registers go."""
    merged = min(queries, power_of_two(rows))
    return merged, max(1, min(16, 64 * 32 * warps // (merged * block_dv)))


def decode_tile(element_size: int, width: int, widest: int, rows: int, arch: str) -> AttentionTile:
    """Rows padded to what the matrix units take; keys and stages as shared memory allows.

    width: elements of a tile that belong to a key. widest: of the head dims.
    """
    room = 16384 // (min(block_of(widest), 512) * element_size)
    queries = min(max(16, power_of_two(rows)), max(16, min(room, 128 // element_size)))
    bytes_per_key = width * element_size
    # Four warps would run out of registers where there is more than this, float32 above all.
    warps = 4 if queries == 16 and bytes_per_key * element_size < 4096 else 8
    for keys, stages in ((64, 3), (32, 4), (32, 3), (16, 4), (16, 3), (16, 2)):
        if keys * (stages - 1) * bytes_per_key <= _SHARED_MEMORY[arch] * 1024:
            return AttentionTile(queries, keys, warps, stages)
    return AttentionTile(queries, 16, warps, 1)


def latent_tile(tile: AttentionTile, rows: int, arch: str) -> AttentionTile:
    """The same keys and stages for as many rows as registers hold: there is one key head, and the more rows share a read."""
    return tile._replace(queries=min(_LATENT_ROWS[arch], max(16, power_of_two(rows))), warps=8)

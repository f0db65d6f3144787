"""Attention backward on Hopper: which arrays it needs around its kernel, and the launches.

    prepare_rows: delta = rowsum(dO · O) - dlse
    kernel:       dK, dV, and sums of dQ in float32
    finish_dq:    dQ = scale · sums

The sums of dQ are added by all tiles of keys. With ``deterministic`` they take turns, in one order; otherwise whoever comes
first adds first. Tiles of a packed batch are found on the device. There are two kernels: one for heads up to 128, one for
wider ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.triton.attention_bias import bias_gradient
from headwise.backends.triton.blocks import aligned_elements, power_of_two
from headwise.backends.triton.hopper import dense_bias
from headwise.backends.triton.hopper.backward_kernel import backward_kernel
from headwise.backends.triton.hopper.backward_rows import RECORD, find_tiles, finish_dq, prepare_rows
from headwise.backends.triton.hopper.backward_schedule import Variant
from headwise.backends.triton.hopper.backward_wide_kernel import wide_backward_kernel
from headwise.backends.triton.hopper.coverage import (
    as_entries,
    backward_tile,
    covers_backward,
    heads_outside,
    strides_fit,
    unexpanded,
)
from headwise.backends.triton.hopper.descriptors import BiasBox, StatisticsBox, in_pieces
from headwise.backends.triton.hopper.mask_tiles import NO_STEPS, Folded, packed_mask
from headwise.backends.triton.hopper.tiles import BackwardTile
from headwise.backends.triton.parameters import inputs_of
from headwise.backends.triton.partial_sums import sum_partials
from headwise.backends.triton.scores import band_of, search_block

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import AttentionBackward

_LOG2E = 1.4426950408889634
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # of q, k, v, bias and sink


def backward(
    gpu: Gpu, args: AttentionBackward, tile: BackwardTile | None = None, *, folded: Folded | None = None
) -> Gradients | None:
    """None if the plain kernels are to do it. ``folded``: what is to be packed with the mask.

    A ``tile`` is for measuring and tests: the call is made in it, whether it would be chosen for such calls or not.
    """
    call, flags, packing = args.forward, args.forward.flags, args.forward.packing
    if tile is None:
        read = (call.q, call.k, call.v) if call.bias is None else (call.q, call.k, call.v, call.bias)
        if covers_backward(call) is not None or not all(map(gpu.aligned, read)):
            return None
        tile = backward_tile(
            call.q.shape[-1], flags.softcap > 0, call.bias is not None, masked=call.mask is not None,
            value_dim=call.v.shape[-1],
        )  # fmt: skip
    packed = packing is not None
    q, k, v = heads_outside(call)
    (batch, heads, all_rows, dim), (_, key_heads, all_keys, _), value_dim = q.shape, k.shape, v.shape[3]
    left, right = band_of(flags, all_rows, all_keys)
    # At the beginning of each sequence: rows that see nothing, and keys that nothing sees. The device knows those of a
    # packed batch.
    empty = max(0, all_rows - all_keys - right) if right >= 0 and not packed else 0
    hidden = max(0, all_keys - all_rows - left) if left >= 0 and not packed else 0
    rows, keys = all_rows - empty, all_keys - hidden

    results = _gradient(gpu, call.q, False), _gradient(gpu, call.k, hidden > 0), _gradient(gpu, call.v, hidden > 0)
    dq, dk, dv = (as_entries(x, packed) for x in results)
    grad_out, out = (as_entries(x, packed) for x in (args.grad_out, args.out))
    if not (gpu.aligned(grad_out) and strides_fit(grad_out)):
        grad_out = as_entries(gpu.call(_contiguous_copy, args.grad_out), packed)
    if out.stride(3) != 1:
        out = as_entries(gpu.contiguous(args.out), packed)
    lse, grad_lse, sink = (None if x is None else gpu.contiguous(x) for x in (args.lse, args.grad_lse, call.sink))

    unordered_from = tile.unordered_from if left < 0 and right < 0 else tile.banded_unordered_from
    longest = keys if packing is None else packing.max_k
    deterministic = flags.deterministic or longest < unordered_from  # where nothing would be gained, too
    row_blocks, tiles = -(-all_rows // tile.rows), -(-keys // tile.keys)
    if packing is not None:  # each sequence, and what is past the last, may end in a short one
        row_blocks, tiles = row_blocks + packing.cu_q.shape[0], tiles + packing.cu_q.shape[0]
    all_blocks = batch * row_blocks
    stats = gpu.empty((heads * all_blocks * 2, tile.rows), torch.float32)
    sums = gpu.empty((heads * all_blocks * tile.rows * tile.width,), torch.float32)
    turns = gpu.empty((heads * all_blocks,), torch.int32) if deterministic else None
    sink_partials = gpu.empty((1, heads, all_blocks), torch.float32) if args.need_sink else None
    tile_records = row_records = None
    if packing is not None:
        tile_records = gpu.empty((tiles + row_blocks, RECORD.value), torch.int32)
        row_records = tile_records[tiles:]
        sequences = packing.cu_q.shape[0] - 1
        gpu.launch(
            find_tiles,
            (tiles + row_blocks,),
            (gpu.contiguous(packing.cu_q), gpu.contiguous(packing.cu_k), tile_records, dk, dv),
            (
                tiles, sequences, rows, keys, packing.max_q, packing.max_k, left, right, key_heads * dim,
                key_heads * value_dim,
            ),
            (left >= 0, right >= 0, tile.rows, tile.keys, search_block(sequences)),
        )  # fmt: skip

    masked = None
    if call.mask is not None:
        upwards = deterministic and right >= 0 and left < 0
        masked = packed_mask(
            gpu, _cut_mask(call.mask, empty, hidden), rows, keys, (left, right), (tile.keys, tile.rows), keys_down=True,
            upwards=upwards, folded=folded,
        )  # fmt: skip
    blind = None  # blocks of queries of which some see nothing; the band has been seen to
    if call.mask is not None or call.bias is not None:
        blind = gpu.empty((heads * all_blocks,), torch.int32)
    row_stats = gpu.empty((batch, heads, all_rows, 4), torch.float32) if args.need_bias else None
    bias, bias_rows = unexpanded(call.bias), 0
    if bias is not None:
        bias_rows = tile.rows if bias.shape[2] > 1 else 1
    align = aligned_elements(out, grad_out, dq)
    gpu.launch(
        prepare_rows,
        (row_blocks * heads * batch,),
        (grad_out, grad_lse, out, lse, sink, row_records, stats, sums, turns, sink_partials, row_stats, blind),
        (rows, empty, heads, row_blocks, all_blocks, *out.stride()[:3], *grad_out.stride()[:3]),
        (value_dim, tile.width, power_of_two(tile.e0 + tile.e1), tile.rows, align),
    )
    wide = tile.width > 128
    described = []
    for x, count, widths in (
        (q[:, :, empty:], tile.rows, (tile.d0, tile.d1)), (k[:, :, hidden:], tile.keys, (tile.d0, tile.d1)),
        (v[:, :, hidden:], tile.keys, (tile.e0, tile.e1)), (grad_out[:, :, empty:], tile.rows, (tile.e0, tile.e1)),
        (dk[:, :, hidden:], tile.keys, (tile.d0, tile.d1)), (dv[:, :, hidden:], tile.keys, (tile.e0, tile.e1)),
    ):  # fmt: skip
        # The wide kernel has one box for all of a head, the other one a box for each piece of it.
        described.append(in_pieces(x, count, (power_of_two(sum(widths)), 0) if wide else widths, packed))
    (*of_inputs, of_dk, of_dv), seconds = zip(*described, strict=True)
    gpu.launch(
        wide_backward_kernel if wide else backward_kernel,
        (min(tiles * batch * key_heads, gpu.multiprocessors),),
        (
            sums, turns, gpu.counters(1), tile_records, *((None, None) if masked is None else masked[:2]), blind,
            None if blind is None else stats,
        ),
        (
            tiles, batch * key_heads,
            _heads_together(deterministic, left, right, tiles, row_blocks, batch * key_heads, gpu.multiprocessors),
            rows, keys, row_blocks, all_blocks, left, right, key_heads, heads // key_heads, flags.scale,
            2 * _LOG2E * flags.scale / flags.softcap if flags.softcap else _LOG2E * flags.scale, flags.softcap * _LOG2E,
            *(NO_STEPS if masked is None else masked.steps),
            *((0,) * 4 if bias is None else (int(bias.shape[0] > 1), int(bias.shape[1] > 1), empty, hidden)),
        ),
        (
            Variant(
                flags.softcap > 0, left >= 0, right >= 0, packed, heads > key_heads, deterministic, tile.rows, tile.keys,
                tile.width, tile.d0, tile.d1, tile.e0, tile.e1, tile.stages, tile.kv_stages, masked is not None, bias_rows,
            ),
        ),
        descriptors=(
            *of_inputs, (stats, StatisticsBox(tile.rows)), of_dk, of_dv,
            None if bias is None else (bias, BiasBox(bias_rows, tile.keys)), *(() if wide else seconds),
        ),
    )  # fmt: skip
    columns = 32 if tile.width * tile.rows == 64 * 64 else 64  # of a piece of dQ as the kernel adds it
    pieces = tile.rows * tile.width // (64 * columns)
    gpu.launch(
        finish_dq,
        (pieces * row_blocks * heads * batch,),
        (sums, turns, row_records, blind, None if blind is None else stats, dq),
        (rows, empty, heads, row_blocks, all_blocks, *dq.stride()[:3], flags.scale),
        (dim, tile.rows, columns, pieces, align),
    )
    dsink = None
    if call.sink is not None and sink_partials is not None:
        dsink = sum_partials(gpu, sink_partials, (heads,), call.sink.dtype)
    dbias = None
    if row_stats is not None:
        if dense_bias.covers(call):
            dbias = dense_bias.dense_bias_gradient(gpu, call, grad_out, row_stats)
        else:
            dbias = bias_gradient(gpu, call, inputs_of(gpu, call), grad_out, row_stats)
    return (*results, dbias, dsink)


def _cut_mask(mask: Tensor, empty: int, hidden: int) -> Tensor:
    """Without the rows that see nothing and the keys that nothing sees, by the band alone."""
    mask = unexpanded(mask)
    if mask.shape[2] > 1:
        mask = mask[:, :, empty:]
    return mask[..., hidden:] if mask.shape[3] > 1 else mask


def _gradient(gpu: Gpu, x: Tensor, zeros: bool) -> Tensor:
    """Memory for the gradient of q, k or v."""
    if zeros:
        return gpu.call(_zeros_heads_inside, x)
    return gpu.empty(x.shape, x.dtype, None if x.dim() == 3 else layout.empty_heads_inside(x).stride())


def _zeros_heads_inside(x: Tensor) -> Tensor:
    return layout.empty_heads_inside(x).zero_()


def _contiguous_copy(x: Tensor) -> Tensor:
    """TMA does not read at every address and stride; a new tensor is aligned."""
    return x.clone(memory_format=torch.contiguous_format)


def _heads_together(
    turns: bool, left: int, right: int, tiles: int, row_blocks: int, batch_heads: int, processors: int
) -> int:
    """How many key heads go side by side: all their first tiles, then all their second ones, and so on.

    As many as fill the GPU: what they share stays in the cache. Where tiles take turns, more, so that fewer of one head are
    there at the same time. Without a mask each block of queries is then visited in every second step only, which is what a
    turn takes; under a causal mask tiles follow each other through the blocks, and twice as many heads leave room for a tile
    that is late. A window spreads them by itself. Groups of heads are about the same size: a small one would leave
    processors idle at its end.
    """
    most = max(1, round(processors / tiles))
    if turns and left < 0:
        most = max(1, round(2 * processors / tiles)) if right >= 0 else max(most, round(2 * processors / row_blocks))
    return -(-batch_heads // max(1, round(batch_heads / most)))

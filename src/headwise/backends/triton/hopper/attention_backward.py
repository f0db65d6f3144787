"""Attention backward on Hopper: which arrays it needs around its kernel, and the launches.

    prepare: delta = rowsum(dO · O) - dlse        kernel: dK, dV, and sums of dQ in float32        finish: dQ = scale · sums

The sums of dQ are added by all tiles of keys. With ``deterministic`` they take turns, in one order;
otherwise whoever comes first adds first. Of a packed batch, tiles are found on the device. There are two kernels: one for
heads up to 128, one for wider ones.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.backends.triton.blocks import Strides, common_alignment
from headwise.backends.triton.hopper.attention_backward_kernel import backward_kernel
from headwise.backends.triton.hopper.attention_backward_rows import RECORD, finish, place, prepare
from headwise.backends.triton.hopper.attention_backward_wide_kernel import wide_backward_kernel
from headwise.backends.triton.hopper.backward_coverage import BackwardTile, covers_backward, tile_of
from headwise.backends.triton.hopper.descriptors import Box, DescribedPlan, PackedBox
from headwise.backends.triton.hopper.gluon_names import TensorDescriptor, gl
from headwise.backends.triton.launch import launch
from headwise.backends.triton.rows import multiprocessors
from headwise.backends.triton.scores import band_of

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags

_LOG2E = 1.4426950408889634
_ZEROS = 4096  # that a program of `prepare` writes at once


class Packed(NamedTuple):
    """Where the sequences of a packed batch lie, and how long they are at most."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int


def try_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    sink: Tensor | None, packed: Packed | None, flags: Flags, need_sink_grad: bool, dq: Tensor, dk: Tensor, dv: Tensor,
) -> Tensor | None:  # fmt: skip
    """`attention_backward` of a call without mask, bias and kv_lengths; None if the plain kernels are to do it."""
    reason = covers_backward(
        q.dtype, q.shape, k.shape, v.shape[3], (q.stride(), k.stride(), v.stride()), False, False, sink is not None,
        packed is not None, flags.right, flags.softcap,
    )  # fmt: skip
    if reason is not None or not all(map(_aligned, (q, k, v, dk, dv))):
        return None
    return attention_backward(
        grad_out, grad_lse, q, k, v, out, lse, sink, packed, flags, need_sink_grad, dq, dk, dv
    )  # fmt: skip


def _aligned(x: Tensor) -> bool:
    """Can TMA read x ``(B, H, S, D)``? Its address and all its strides but the last are multiples of 16 bytes."""
    step = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(
        n == 1 or (s % step == 0 and s > 0) for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)
    )


def attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    sink: Tensor | None, packed: Packed | None, flags: Flags, need_sink_grad: bool, dq: Tensor, dk: Tensor, dv: Tensor,
) -> Tensor:  # fmt: skip
    """Fill dq, dk and dv, all ``(B, H, S, D)`` (a packed batch has B = 1); return dsink, empty if it is not needed."""
    if not _aligned(grad_out):
        grad_out = grad_out.clone(
            memory_format=torch.contiguous_format
        )  # contiguous, it may still begin at an odd address
    left, right = band_of(flags, q.shape[2], k.shape[2])
    lse_rows, empty_rows = q.shape[2], 0
    if packed is not None:
        if packed.cu_q.data_ptr() != packed.cu_k.data_ptr():  # otherwise every row sees a key, and every key is seen
            for x in ((dq,) if right >= 0 else ()) + ((dk, dv) if left >= 0 else ()):
                x.zero_()
    else:
        # Rows that see nothing and keys that nothing sees stay outside: what they hold never meets a product.
        empty_rows = max(0, q.shape[2] - k.shape[2] - right) if right >= 0 else 0
        hidden_keys = max(0, k.shape[2] - q.shape[2] - left) if left >= 0 else 0
        if empty_rows:
            dq[:, :, :empty_rows].zero_()
            q, dq, grad_out, out = (x[:, :, empty_rows:] for x in (q, dq, grad_out, out))
        if hidden_keys:
            dk[:, :, :hidden_keys].zero_()
            dv[:, :, :hidden_keys].zero_()
            k, v, dk, dv = (x[:, :, hidden_keys:] for x in (k, v, dk, dv))
        if not q.numel() or not k.numel():
            for x in (dq, dk, dv):
                x.zero_()
            return q.new_empty(0)
    batch, heads, rows, dim = q.shape
    keys = k.shape[2]
    width, tile = tile_of(max(dim, v.shape[3]), flags.softcap > 0)
    unordered_from = tile.unordered_from if left < 0 and right < 0 else tile.banded_unordered_from
    if (keys if packed is None else packed.longest_k) < unordered_from:
        flags = flags._replace(deterministic=True)  # nothing would be gained
    sequences = 0 if packed is None else packed.cu_q.shape[0] - 1
    row_blocks, tiles = -(-rows // tile.rows), -(-keys // tile.keys)
    if packed is not None:  # each sequence, and what is past the last, may end in a short one
        row_blocks, tiles = row_blocks + sequences + 1, tiles + sequences + 1
    all_blocks = batch * row_blocks
    stats = q.new_empty((heads * all_blocks * 2, tile.rows), dtype=torch.float32)
    sums = q.new_empty(heads * all_blocks * tile.rows * width, dtype=torch.float32)
    turns = sink_parts = records = of_rows = None
    counters = q.new_empty(4 + heads * all_blocks if flags.deterministic else 4, dtype=torch.int32)
    ticket = counters[:4]
    if flags.deterministic:
        turns = counters[4:]
    if need_sink_grad and sink is not None:
        sink_parts = q.new_empty((batch, heads, row_blocks), dtype=torch.float32)
    if packed is not None:
        records = q.new_empty((tiles + row_blocks, RECORD.value), dtype=torch.int32)
        of_rows = records[tiles:]
        launch(
            place,
            (tiles + row_blocks, 1, 1),
            (packed.cu_q, packed.cu_k, records),
            (tiles, sequences, rows, keys, packed.longest_q, packed.longest_k, left, right),
            (left >= 0, right >= 0, tile.rows, tile.keys, 128 if sequences <= 128 else 1024),
        )
    align = common_alignment(q.element_size(), out.stride(), grad_out.stride(), dq.stride())
    launch(
        prepare,
        (row_blocks * heads * batch, 1, 1),
        (grad_out, grad_lse, out, lse, sink, of_rows, stats, sums, turns, ticket, sink_parts),
        (rows, heads, row_blocks, all_blocks, lse_rows, empty_rows, *out.stride()[:3], *grad_out.stride()[:3]),
        (v.shape[3], width, _power_of_two(width), tile.rows, _ZEROS, align),
    )  # fmt: skip
    plan = _plan(
        tile, width, tiles, row_blocks, packed is not None, q.shape, k.shape, v.shape[3], q.stride(), k.stride(), v.stride(),
        grad_out.stride(), dk.stride(), dv.stride(), left, right, flags, multiprocessors(q),
    )  # fmt: skip
    plan.launch((q, k, v, grad_out, stats, dk, dv), (sums, turns, ticket, records))
    columns = 32 if width * tile.rows == 64 * 64 else 64  # of a piece of dQ as the kernel adds it
    pieces = tile.rows * width // (64 * columns)
    launch(
        finish,
        (pieces * row_blocks * heads * batch, 1, 1),
        (sums, turns, of_rows, dq),
        (rows, heads, row_blocks, all_blocks, *dq.stride()[:3], flags.scale),
        (dim, tile.rows, columns, pieces, align),
    )
    if sink_parts is None or sink is None:
        return q.new_empty(0)
    return sink_parts.sum((0, 2)).to(sink.dtype)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def _plan(
    tile: BackwardTile, width: int, tiles: int, row_blocks: int, packed: bool, q_shape: tuple[int, ...],
    k_shape: tuple[int, ...], value_dim: int, q_strides: Strides, k_strides: Strides, v_strides: Strides,
    grad_strides: Strides, dk_strides: Strides, dv_strides: Strides, left: int, right: int, flags: Flags,
    processors: int,
) -> DescribedPlan:  # fmt: skip
    """The launch of the kernel. All the strides and dims are here because a plan keeps descriptors by address alone."""
    batch, heads, rows, _ = q_shape
    key_heads, keys = k_shape[1:3]
    cap = flags.softcap
    score_scale = 2 * _LOG2E * flags.scale / cap if cap else _LOG2E * flags.scale
    make = PackedBox if packed else Box
    of_rows, of_keys = make(tile.rows, _power_of_two(width)), make(tile.keys, _power_of_two(width))
    boxes = (of_rows, of_keys, of_keys, of_rows, _StatsBox(tile.rows), of_keys, of_keys)
    together = _heads_together(flags.deterministic, left, right, tiles, row_blocks, batch * key_heads, processors)
    return DescribedPlan(
        backward_kernel if width <= 128 else wide_backward_kernel,
        (min(tiles * batch * key_heads, processors), 1, 1),
        tuple(enumerate(boxes)),
        (tiles, batch * key_heads, together, rows, keys, row_blocks, batch * row_blocks, left, right, key_heads,
         heads // key_heads, flags.scale, score_scale, cap * _LOG2E),
        (cap > 0, left >= 0, right >= 0, packed, heads > key_heads, flags.deterministic,
         tile.rows, tile.keys, width, tile.stages, tile.kv_stages),
    )  # fmt: skip


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


class _StatsBox(NamedTuple):
    """One row of an array ``(N, rows)``."""

    rows: int

    def descriptor(self, x: Tensor) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), [self.rows, 1], [1, self.rows], gl.NVMMASharedLayout(0, 32, 2))

"""The launcher of the Hopper forward kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.triton.hopper.coverage import (
    as_entries,
    biased_tile,
    covers_forward,
    forward_tile,
    heads_outside,
    masked_tile,
    tiles_in_all,
    unexpanded,
)
from headwise.backends.triton.hopper.descriptors import BiasBox, in_pieces
from headwise.backends.triton.hopper.forward_kernel import forward_kernel
from headwise.backends.triton.hopper.forward_schedule import Variant
from headwise.backends.triton.hopper.mask_tiles import NO_STEPS, Folded, packed_mask
from headwise.backends.triton.hopper.tiles import ForwardTile
from headwise.backends.triton.scores import band_of

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import Attention

_LOG2E = 1.4426950408889634
_ROWS = 64  # queries of a consumer
# Heads of keys that are in use at once under a mask: as many as fit two thirds of the L2 cache, but not fewer than eight,
# whether they fit or not: D 256 with 16384 keys, 16 MB a head, did 581, 627, 660 and 670 TFLOP/s with 1, 2, 4 and 8 heads.
_L2_SHARE = 32 << 20
_HEADS_AT_ONCE = 8


def forward(
    gpu: Gpu, args: Attention, tile: ForwardTile | None = None, *, folded: Folded | None = None
) -> tuple[Tensor, Tensor] | None:
    """(out, lse), or None if the plain kernel is to do it. ``folded``: what is to be packed with the mask.

    A ``tile`` is for measuring and tests: the call is made in it, whether it would be chosen for such calls or not.
    """
    if tile is None:
        read = (args.q, args.k, args.v) if args.bias is None else (args.q, args.k, args.v, args.bias)
        if covers_forward(args) is not None or not all(map(gpu.aligned, read)):
            return None
        tile = _chosen_tile(gpu, args)
    q, k, v = heads_outside(args)
    (batch, heads, q_length, _), (_, key_heads, k_length, _), value_dim = q.shape, k.shape, v.shape[3]
    packing, flags = args.packing, args.flags
    is_packed = packing is not None
    if packing is None:
        out = described_out = gpu.empty((*q.shape[:3], value_dim), q.dtype, layout.strides_like_heads(q, value_dim))
        lse = gpu.empty((batch, heads, q_length), torch.float32)
        cu_q = cu_k = None
        packed = (0, 0, 0)
    else:
        out = gpu.empty((q_length, heads, value_dim), q.dtype)
        described_out = as_entries(out, True)
        lse = gpu.empty((heads, q_length), torch.float32)
        cu_q, cu_k = gpu.contiguous(packing.cu_q), gpu.contiguous(packing.cu_k)
        packed = (cu_q.shape[0] - 1, packing.max_q, packing.max_k)
    sink = None if args.sink is None else gpu.contiguous(args.sink)
    kv_lengths = None if args.kv_lengths is None else gpu.contiguous(args.kv_lengths)

    tiles = -(-q_length // (_ROWS * tile.consumers))
    works = tiles * heads * batch  # of a packed batch, at least so many: the kernel counts them
    left, right = band_of(flags, q_length, k_length)
    # There may be keys before the first query's window. As it depends on which length is larger, and not on by how much, a
    # cache that grows compiles another kernel once, at its first step past a prefill.
    unseen = left >= 0 and k_length > q_length
    logit_scale, cap_scale = flags.scale * _LOG2E, 1.0
    if flags.softcap:
        logit_scale, cap_scale = flags.softcap * _LOG2E, 2.0 * _LOG2E * flags.scale / flags.softcap
    masked = None
    if args.mask is not None:
        masked = packed_mask(
            gpu, args.mask, q_length, k_length, (left, right), (_ROWS * tile.consumers, tile.keys), folded=folded
        )  # fmt: skip
    bias, bias_rows = unexpanded(args.bias), 0
    if bias is not None:
        bias_rows = _ROWS * tile.consumers if bias.shape[2] > 1 else 1
    gpu.launch(
        forward_kernel,
        (min(gpu.multiprocessors, works),),
        (
            lse, sink, kv_lengths, cu_q, cu_k, gpu.counters(1), *((None, None) if masked is None else masked[:2]),
        ),
        (
            q_length, k_length, heads, heads // key_heads, tiles, works, _heads_at_once(q, k), left, right, *packed,
            logit_scale, cap_scale, *(NO_STEPS if masked is None else masked.steps),
            *((0, 0) if bias is None else (int(bias.shape[0] > 1), int(bias.shape[1] > 1))),
        ),
        (
            Variant(
                has_left=left >= 0, has_right=right >= 0, has_cap=flags.softcap > 0, packed=is_packed,
                cut=is_packed or kv_lengths is not None or unseen, tile=tile,
                masked=masked is not None, mask_is_endless=masked is not None and masked.one_across,
                bias_rows=bias_rows,
            ),
        ),
        descriptors=(
            *in_pieces(q, _ROWS, (tile.d0, tile.d1), is_packed), *in_pieces(k, tile.keys, (tile.d0, tile.d1), is_packed),
            *in_pieces(v, tile.keys, (tile.e0, tile.e1), is_packed),
            *in_pieces(described_out, _ROWS, (tile.e0, 0 if tile.one_o else tile.e1), is_packed),
            None if bias is None else (bias, BiasBox(bias_rows, tile.keys)),
        ),
    )  # fmt: skip
    return out, lse


def _chosen_tile(gpu: Gpu, args: Attention) -> ForwardTile:
    q, _, v = heads_outside(args)
    banded = args.flags.left >= 0 or args.flags.right >= 0
    length = q.shape[2]
    if args.bias is not None:
        return biased_tile(q.shape[3], args.bias.element_size())
    if args.mask is not None:
        return masked_tile(q.shape[3])
    if args.packing is not None:  # what a sequence has, on average
        sequences = args.packing.cu_q.shape[0] - 1
        length = min(args.packing.max_q, -(-length // max(sequences, 1)))
    return forward_tile(
        q.shape[3], length, args.packing is not None, banded, tiles_in_all(q), gpu.multiprocessors, v.shape[3],
        capped=args.flags.softcap > 0,
    )  # fmt: skip


def _heads_at_once(q: Tensor, k: Tensor) -> int:
    """Query heads whose tiles are drawn together under a mask, in groups of about the same size."""
    all_heads = q.shape[0] * q.shape[1]
    fitting = max(_L2_SHARE // (4 * k.shape[2] * k.shape[3]), _HEADS_AT_ONCE) * (q.shape[1] // k.shape[1])
    groups = -(-all_heads // min(fitting, all_heads))
    return -(-all_heads // groups)

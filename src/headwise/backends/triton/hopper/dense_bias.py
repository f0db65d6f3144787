"""The gradient of a bias with a number for every query and key, beside the Hopper backward.

A program owns a tile of the bias and adds up, in order, what every batch entry and head that reads it has to add: two
products each, and the tile of the bias is loaded once. Nothing larger than the gradient itself is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from headwise import layout
from headwise.backends.triton.blocks import aligned_elements, head_start, load_rows, power_of_two
from headwise.backends.triton.products import dot_precision, product
from headwise.backends.triton.scores import LOG2E, band_of

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.attention._arguments import Attention

_QUERIES, _KEYS, _WARPS, _STAGES = 128, 64, 8, 2


def covers(args: Attention) -> bool:
    """Is the gradient of its bias made here? Others are made by the general bias-gradient kernel."""
    bias = layout.four_dims(args.bias)
    return args.mask is None and bias.shape[2] > 1 and bias.shape[3] > 1


@triton.jit(
    do_not_specialize=["rows", "keys", "k_tiles", "q_tiles", "heads", "group", "readers", "left", "right", "offset"]
)  # fmt: skip
def _dense_bias_gradient(
    q, k, v, bias, grad_out, stats, dbias,
    rows, keys, k_tiles, q_tiles, heads, group, readers, left, right, offset, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    g_b, g_h, g_s, b_b, b_h, b_s, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PER_BATCH: tl.constexpr,
    PER_HEAD: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``readers``: batch entries and heads that share a tile; stats: ``[B, H, rows, 4]``, lse in base 2 and delta first."""
    program = tl.program_id(0)
    k_first, q_first = program % k_tiles * KEYS, program // k_tiles % q_tiles * QUERIES
    owner = program // k_tiles // q_tiles
    row, key = q_first + tl.arange(0, QUERIES), k_first + tl.arange(0, KEYS)
    there, exists = row < rows, key < keys
    inside = there[:, None] & exists[None, :]
    own_head, own_batch = owner * 0, owner
    if PER_HEAD:
        own_head, own_batch = owner % heads, owner // heads
    within = tl.arange(0, QUERIES)[:, None] * b_s + tl.arange(0, KEYS)[None, :]
    b_base = bias + (own_batch.to(tl.int64) * b_b + own_head.to(tl.int64) * b_h + q_first.to(tl.int64) * b_s + k_first)
    added = tl.load(b_base + within, mask=inside, other=-float("inf")).to(tl.float32) * LOG2E
    visited = True
    if HAS_LEFT:
        visited &= k_first + KEYS - 1 >= q_first + offset - left
        added = tl.where(key[None, :] >= row[:, None] + offset - left, added, -float("inf"))
    if HAS_RIGHT:
        visited &= k_first <= q_first + QUERIES - 1 + offset + right
        added = tl.where(key[None, :] <= row[:, None] + offset + right, added, -float("inf"))
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    if visited:
        for reader in range(0, readers):
            head, batch = own_head, own_batch.to(tl.int64)
            if PER_HEAD and not PER_BATCH:
                batch += reader
            elif not PER_HEAD:
                head = own_head + reader % heads
                batch += reader // heads
            at_row = stats + ((batch * heads + head) * rows + row) * 4
            lse = tl.load(at_row, mask=there, other=float("inf"))
            q_base = head_start(q, q_b, q_h, batch, head, ALIGN) + q_first.to(tl.int64) * q_s
            g_base = head_start(grad_out, g_b, g_h, batch, head, ALIGN) + q_first.to(tl.int64) * g_s
            k_base = head_start(k, k_b, k_h, batch, head // group, ALIGN) + k_first.to(tl.int64) * k_s
            v_base = head_start(v, v_b, v_h, batch, head // group, ALIGN) + k_first.to(tl.int64) * v_s
            q_lane, k_lane = tl.arange(0, QUERIES), tl.arange(0, KEYS)
            q_tile = load_rows(q_base, q_lane, q_s, there, D, BLOCK_D, True)
            k_tile = load_rows(k_base, k_lane, k_s, exists, D, BLOCK_D, True)
            products = product(q_tile, tl.trans(k_tile), None, PRECISION)
            do_tile = load_rows(g_base, q_lane, g_s, there, D, BLOCK_D, True)
            v_tile = load_rows(v_base, k_lane, v_s, exists, D, BLOCK_D, True)
            dweights = product(do_tile, tl.trans(v_tile), None, PRECISION)
            delta = tl.load(at_row + 1, mask=there, other=0.0)
            weights = tl.exp2(products * (scale * LOG2E) + (added - lse[:, None]))
            # Rows that see nothing, and keys that nobody sees, may hold anything.
            seen = (lse != float("inf"))[:, None] & (added != -float("inf"))
            total += tl.where(seen, weights * (dweights - delta[:, None]), 0.0)
    out = dbias + (owner.to(tl.int64) * rows + q_first) * keys + k_first
    tl.store(out + tl.arange(0, QUERIES)[:, None] * keys + tl.arange(0, KEYS)[None, :], total, mask=inside)


def dense_bias_gradient(gpu: Gpu, args: Attention, grad_out: Tensor, stats: Tensor) -> Tensor:
    """In the shape and dtype of the bias, which `covers` said yes to."""
    assert args.bias is not None
    bias, (q, k, v) = layout.four_dims(args.bias), (args.q, args.k, args.v)
    (batch, heads, rows, dim), (_, key_heads, keys, _) = q.shape, k.shape
    per_batch, per_head = bias.shape[0] > 1, bias.shape[1] > 1
    owners = bias.shape[0] * bias.shape[1]
    k_tiles, q_tiles = -(-keys // _KEYS), -(-rows // _QUERIES)
    dbias = gpu.empty(args.bias.shape, args.bias.dtype)
    left, right = band_of(args.flags, rows, keys)
    strides = [0 if n == 1 else s for n, s in zip(bias.shape[:2], bias.stride()[:2], strict=True)]
    gpu.launch(
        _dense_bias_gradient, (k_tiles * q_tiles * owners,), (q, k, v, bias, grad_out, stats, dbias),
        (
            rows, keys, k_tiles, q_tiles, heads, heads // key_heads, batch * heads // owners, left, right, keys - rows,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad_out.stride()[:3], *strides, bias.stride(2),
            args.flags.scale,
        ),
        (
            dim, power_of_two(dim), _QUERIES, _KEYS, per_batch, per_head, left >= 0, right >= 0,
            aligned_elements(q, k, v, grad_out), dot_precision(gpu, q.dtype),
        ),
        warps=_WARPS, stages=_STAGES,
    )  # fmt: skip
    return dbias

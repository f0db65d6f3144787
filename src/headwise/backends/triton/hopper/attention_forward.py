"""The launcher of the Hopper forward kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.backends.triton.counters import zeros
from headwise.backends.triton.hopper import ForwardTile, Strides, covers_forward, forward_tile, tiles_in_all
from headwise.backends.triton.hopper.descriptors import Box, DescribedPlan, PackedBox
from headwise.backends.triton.hopper.forward_kernel import forward
from headwise.backends.triton.hopper.schedule import Variant
from headwise.backends.triton.rows import multiprocessors
from headwise.backends.triton.scores import band_of

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags

_LOG2E = 1.4426950408889634
_ROWS = 64
# Heads of keys that are in use at once under a mask: as many as fit two thirds of the L2 cache, but not fewer than eight,
# whether they fit or not: D 256 with 16384 keys, 16 MB a head, did 581, 627, 660 and 670 TFLOP/s with 1, 2, 4 and 8 heads.
_L2_SHARE = 32 << 20
_HEADS_AT_ONCE = 8
_SEARCH = 128
_ALIGNMENT = 16  # bytes: what TMA needs of an address

_Q, _K, _V, _OUT = range(4)


# What a model calls once it calls again and again: working a launch out costs as much as the launch.
@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: torch.dtype, q_shape: tuple[int, ...], k_shape: tuple[int, ...], value_dim: int, strides: tuple[Strides, ...],
    lengths: bool, sequences: int | None, max_q: int, max_k: int, flags: Flags, processors: int, tile: ForwardTile | None,
) -> DescribedPlan | None:  # fmt: skip
    """For q ``(B, Hq, Sq, D)`` and k ``(B, Hk, Sk, D)``; a packed batch of ``sequences`` is one entry of all tokens."""
    batch, heads, q_length, head_dim = q_shape
    key_heads, k_length = k_shape[1:3]
    packed = sequences is not None
    longest = min(max_q, q_length) if packed else q_length
    length = longest if not sequences else min(longest, -(-q_length // sequences))  # what a sequence has, on average
    if tile is None:
        reason = covers_forward(
            dtype, q_shape, k_shape, value_dim, strides, False, longest if packed else None, flags.right, flags.softcap
        )
        if reason is not None:
            return None
        banded = flags.left >= 0 or flags.right >= 0
        tile = forward_tile(head_dim, length, packed, banded, tiles_in_all(q_shape), processors)
    queries, group = _ROWS * tile.consumers, heads // key_heads
    tiles = -(-q_length // queries)
    works = tiles * heads * batch  # of a packed batch, at least so many: the kernel counts them
    # In groups of about the same size.
    fitting = max(_L2_SHARE // (4 * k_length * head_dim), _HEADS_AT_ONCE) * group
    groups = -(-batch * heads // min(fitting, batch * heads))
    at_once = -(-batch * heads // groups)
    left, right = band_of(flags, q_length, k_length)
    # There may be keys before the first query's window. As it depends on which length is larger, and not on by how much, a
    # cache that grows compiles another kernel once, at its first step past a prefill.
    unseen = left >= 0 and k_length > q_length
    unit, inner = flags.scale * _LOG2E, 1.0
    if flags.softcap:
        unit, inner = flags.softcap * _LOG2E, 2.0 * _LOG2E * flags.scale / flags.softcap
    box = PackedBox if packed else Box
    rows, keys = box(_ROWS, tile.d0), box(tile.keys, tile.d0)
    more_rows, more_keys = box(_ROWS, tile.d1), box(tile.keys, tile.d1)
    second = tile.d1 > 0
    return DescribedPlan(
        forward,
        (min(processors, works), 1, 1),
        (
            (_Q, rows), (_Q, more_rows) if second else None, (_K, keys), (_K, more_keys) if second else None,
            (_V, keys), (_V, more_keys) if second else None, (_OUT, rows),
            (_OUT, more_rows) if second and not tile.one_o else None,
        ),
        (
            q_length, k_length, heads, group, tiles, works, at_once, left, right, sequences or 0, max_q, max_k, unit, inner,
        ),
        Variant(
            has_left=left >= 0, has_right=right >= 0, has_cap=flags.softcap > 0, packed=packed,
            cut=packed or lengths or unseen, search=_SEARCH, **tile._asdict(),
        ),
    )  # fmt: skip


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, out_strides: Strides, kv_lengths: Tensor | None, sink: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, flags: Flags, tile: ForwardTile | None = None,
) -> Callable[..., bool] | None:  # fmt: skip
    """What launches such calls, given the tensors of the plain launcher, if these kernels take them; None if they do not.

    It returns whether it launched: TMA does not read at every address. A ``tile`` is for measuring and tests: the call is
    launched in it, whether it is chosen for such calls or not.
    """
    plan = _plan(
        q.dtype, q.shape, k.shape, v.shape[3], (q.stride(), k.stride(), v.stride(), out_strides),
        kv_lengths is not None, None if cu_q is None else cu_q.shape[0] - 1, max_q, max_k, flags, multiprocessors(q), tile,
    )  # fmt: skip
    if plan is None:
        return None
    others = [x if x is None else x.dtype for x in (sink, kv_lengths, cu_q, cu_k)]
    planned = plan.bound(q.get_device(), q.dtype, torch.float32, *others, torch.int32)

    def launch(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, bias: None, kv_lengths: Tensor | None,
        sink: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
    ) -> bool:  # fmt: skip
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) % _ALIGNMENT:
            return False
        planned((q, k, v, out), (lse, sink, kv_lengths, cu_q, cu_k, zeros(q, 1)))
        return True

    return launch

"""Which attention backwards the Hopper kernel takes: what it can do, and from where on it was measured to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

DTYPES = (torch.bfloat16, torch.float16)
# Below the first, the slope of tanh drowns in rounding; above the second, c · tanh(s / c) is off by c · 6e-8.
_LEAST_CAP, _WIDEST_CAP = 0.01, 256


class BackwardTile(NamedTuple):
    """How the kernel cuts its work for heads up to a width, and when it is worth it."""

    keys: int  # per tile
    rows: int  # of queries per step
    stages: int  # steps that are loaded ahead
    kv_stages: int  # tiles whose keys and values shared memory holds
    least_tiles: int  # over all heads of a call: smaller calls were not measured to gain
    unordered_from: int  # keys, from which on sums of dQ in any order (where that is allowed) are faster than turns
    banded_unordered_from: int  # the same under a causal mask or a window


# By the width that heads are filled up to. Measured on an H200: docs/hopper-attention-backward.md.
BACKWARD_TILES: dict[int, BackwardTile] = {
    64: BackwardTile(128, 128, 2, 2, 16, 2048, 2048),
    128: BackwardTile(128, 64, 2, 2, 16, 2048, 512),
    192: BackwardTile(64, 64, 2, 1, 128, 2048, 512),
    256: BackwardTile(64, 64, 2, 1, 128, 2048, 512),
}


def tile_of(head_dim: int, capped: bool) -> tuple[int, BackwardTile]:
    """The narrowest width that heads of this dim fit in, and how it is cut; a cap needs registers that 64 rows leave."""
    width = min(w for w in BACKWARD_TILES if w >= head_dim)
    tile = BACKWARD_TILES[width]
    return width, tile._replace(rows=64) if capped else tile


def covers_backward(
    dtype: torch.dtype, q_shape: tuple[int, ...], k_shape: tuple[int, ...], value_dim: int,
    strides: Sequence[tuple[int, ...]], masked: bool, lengths: bool, sink: bool, packed: bool, right: int, softcap: float,
) -> str | None:  # fmt: skip
    """Why the Hopper backward does not take a call of q ``(B, Hq, Sq, D)`` and k ``(B, Hk, Sk, D)``; None if it does.

    strides: of q, k and v, in elements. masked: there is a mask or a bias; lengths: there are kv_lengths.
    right, softcap: as in `Flags`.
    """
    head_dim = max(q_shape[3], value_dim)
    if dtype not in DTYPES:
        return f"it computes in bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if masked or lengths:
        return "it reads no mask, bias or kv_lengths"
    if head_dim > max(BACKWARD_TILES) or q_shape[3] % 8 or value_dim % 8:
        return f"its head dims are multiples of 8 up to {max(BACKWARD_TILES)}, and this one is {head_dim}"
    if value_dim != q_shape[3]:
        return f"not measured yet: v has head dim {value_dim} where q has {q_shape[3]}"
    if softcap > 0 and not _LEAST_CAP <= softcap <= _WIDEST_CAP:
        return f"its tanh is for caps from {_LEAST_CAP} to {_WIDEST_CAP}"
    if 0 in (*q_shape, *k_shape):
        return "there is nothing to do"
    if sink and (packed or (right >= 0 and q_shape[2] > k_shape[2] + right)):
        return "there may be rows that see nothing but the sink"
    if q_shape[1] * q_shape[0] * q_shape[2] >= 2**30 or k_shape[2] >= 2**30:
        return "it counts rows in 32 bits"
    for name, shape, of in zip("qkv", (q_shape, k_shape, k_shape), strides, strict=True):
        if any(n > 1 and (s % 8 or s <= 0) for n, s in zip(shape[:3], of[:3], strict=True)):
            return f"the strides of {name} are not multiples of 16 bytes: {tuple(of)} elements"
    _, tile = tile_of(head_dim, False)
    if -(-k_shape[2] // tile.keys) * k_shape[0] * k_shape[1] < tile.least_tiles:
        return f"it is for calls of at least {tile.least_tiles} tiles of {tile.keys} keys"
    return None

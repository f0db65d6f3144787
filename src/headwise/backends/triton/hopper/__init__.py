"""Attention kernels for Hopper GPUs (sm_90) in Triton Gluon: which calls they take, by measurement.

Nothing heavy is imported here: `headwise explain` asks the same questions without running anything.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
WIDEST_CAP = 256  # c · tanh(s / c) by way of exp(2 s / c) is off by c · 1e-7
Strides = tuple[int, ...]


class ForwardTile(NamedTuple):
    """What a program of the forward kernel works on at once. A head dim is cut into one or two powers of two."""

    consumers: int  # warpgroups that compute, of 64 queries each
    keys: int
    d0: int
    d1: int
    k_stages: int  # blocks of keys, and of values, that shared memory holds
    v_stages: int
    q_stages: int  # tiles of queries that it holds for each warpgroup
    one_o: bool = False  # the two pieces of the output leave through one buffer, one after the other
    # What of the next tile is under way before this one is stored: 0: nothing; 1: its first products; 2: these, and under a
    # causal mask they do not wait for the last products of this one. (Without a mask they never do, with a window always.)
    ahead: int = 1
    keys_first: bool = False  # a block of keys is loaded before the values of the block above it, as they are needed


class ForwardRow(NamedTuple):
    """A row of the table of measurements: the tiles for head dims up to ``widest``."""

    widest: int
    tile: ForwardTile
    short: ForwardTile  # for sequences of up to SHORT queries
    short_banded: ForwardTile  # under a causal mask or a window, for sequences of up to ``banded_up_to`` queries
    few: ForwardTile  # for longer sequences where there are few tiles: less than FEW for every multiprocessor
    # For sequences of up to SHORT queries, of up to MEDIUM under a causal mask or a window, if its queries are filled by
    # nearly whole sequences and there are MANY tiles for every multiprocessor. For packed batches, of which the kernel alone
    # knows the lengths, under a band, from where ``short_banded`` ends.
    wide: ForwardTile | None = None
    banded_up_to: int = 512


SHORT, MEDIUM = 512, 2048
FEW, MANY = 4, 16
# From so many tiles of 128 queries on, over all heads, and from so many queries of the longest sequence on, these kernels
# were measured to be faster than the plain one: 61 against 71 TFLOP/s with 64 tiles, 170 against 153 with 128 (D 128,
# causal, one sequence of 512 or 1024); 115 against 82 with 2048 tiles of sequences of 128.
LEAST_TILES = 128
LEAST_QUERIES = 128

# A head dim works in the first row that holds it: elements past it are read as zeros and not written. 96 and 192 are two
# pieces (64 + 32, 128 + 64): a quarter less arithmetic than padding to 128 and 256. Measured on an H200 with 16384 tokens
# and 2048 = heads · head dim; docs/hopper-attention.md has the figures.
_64_THREE = ForwardTile(3, 128, 64, 0, 4, 4, 2, ahead=2)
_64_TWO = ForwardTile(2, 128, 64, 0, 4, 4, 2, ahead=2)
_64_SHORT = ForwardTile(2, 64, 64, 0, 8, 8, 2, ahead=2)
_64_FOUR = ForwardTile(4, 64, 64, 0, 6, 6, 2, ahead=2)
_96 = ForwardTile(2, 128, 64, 32, 2, 3, 2)
_128 = ForwardTile(2, 128, 128, 0, 2, 2, 2, ahead=2)
_128_SHORT = ForwardTile(2, 64, 128, 0, 4, 4, 2, ahead=2)
_192 = ForwardTile(2, 64, 128, 64, 2, 2, 1)
_256 = ForwardTile(2, 64, 128, 128, 2, 2, 1, one_o=True)
FORWARD: tuple[ForwardRow, ...] = (
    ForwardRow(64, _64_THREE, _64_TWO, _64_SHORT, _64_TWO, _64_FOUR),
    ForwardRow(96, _96, _96, _96, _96),
    ForwardRow(128, _128, _128._replace(keys_first=True), _128_SHORT, _128, banded_up_to=1024),
    ForwardRow(192, _192, _192, _192, _192),
    ForwardRow(256, _256, _256, _256, _256),
)


def forward_row(head_dim: int) -> ForwardRow | None:
    return next((row for row in FORWARD if head_dim <= row.widest), None)


def forward_tile(head_dim: int, length: int, packed: bool, banded: bool, tiles: int, processors: int) -> ForwardTile:
    """For sequences of ``length`` queries (packed ones, on average), ``tiles`` tiles of 128 queries in all."""
    row = forward_row(head_dim)
    assert row is not None
    short = length <= (row.banded_up_to if banded else SHORT)
    if row.wide is not None and length <= (MEDIUM if banded else SHORT) and tiles >= MANY * processors:
        queries = 64 * row.wide.consumers
        padded = -(-length // queries) * queries
        if (not short) if packed else 8 * length >= 7 * padded:
            return row.wide
    if short:
        return row.short_banded if banded else row.short
    return row.few if tiles < FEW * processors else row.tile


@functools.cache
def missing(device: int) -> str | None:
    """What this GPU or this Triton lacks for these kernels; None if nothing."""
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None:
        return "the Hopper kernels are for NVIDIA GPUs"
    if (major, minor) != (9, 0):
        return f"the Hopper kernels are for sm_90, and this GPU is sm_{major}{minor}"
    if importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is None:
        return "the Hopper kernels need Triton 3.6 or newer (Gluon)"
    return None


def covers_forward(
    dtype: torch.dtype, q_shape: tuple[int, ...], k_shape: tuple[int, ...], value_dim: int,
    strides: Sequence[Strides], masked: bool, longest: int | None = None, right: int = -1, softcap: float = 0.0,
) -> str | None:  # fmt: skip
    """Why the Hopper forward does not take a call of q ``(B, Hq, Sq, D)`` and k ``(B, Hk, Sk, D)``; None if it does.

    strides: of q, k, v and, if it is there, the output, in elements. masked: there is a mask or a bias.
    longest: queries of the longest sequence of a packed batch. right, softcap: as in `Flags`.
    """
    batch, heads, queries, head_dim = q_shape
    keys = k_shape[2]
    if dtype not in DTYPES:
        return f"it computes in bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if masked:
        return "it reads no mask and no bias"
    if value_dim != head_dim:
        return f"it needs one head dim, and v has {value_dim} where q has {head_dim}"
    if forward_row(head_dim) is None or head_dim % 8:
        return f"its head dims are multiples of 8 up to {FORWARD[-1].widest}, and this one is {head_dim}"
    if keys == 0:
        return "there are no keys"
    if softcap > WIDEST_CAP:
        return f"its tanh is for caps up to {WIDEST_CAP}"
    if longest is None and right >= 0 and queries > keys + right:
        return "there are rows that see nothing, and its tiles multiply by values that they do not see"
    if (queries if longest is None else longest) < LEAST_QUERIES:
        return f"it was not measured with fewer than {LEAST_QUERIES} queries"
    if tiles_in_all(q_shape) < LEAST_TILES:
        return f"with fewer than {LEAST_TILES} tiles of 128 queries over all heads the plain kernel is faster"
    if batch * heads * queries >= 2**31 or (longest is not None and max(queries, keys) >= 2**30):
        return "it counts rows in 32 bits"
    for name, shape, of in zip(("q", "k", "v", "out"), (q_shape, k_shape, k_shape, q_shape), strides, strict=False):
        if any(n > 1 and (s % 8 or s <= 0) for n, s in zip(shape[:3], of[:3], strict=True)):
            return f"the strides of {name} are not multiples of 16 bytes: {tuple(of)} elements"
    return None


def tiles_in_all(q_shape: tuple[int, ...]) -> int:
    batch, heads, queries, _ = q_shape
    return -(-queries // 128) * batch * heads


def as_dense(packed: bool, q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Any, Any, int], tuple[Strides, ...]]:
    """What `covers_forward` asks of tensors: (shapes of q and k, head dim of v), and strides; packed ones in one batch."""
    if packed:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return (tuple(q.shape), tuple(k.shape), v.shape[3]), (q.stride(), k.stride(), v.stride())

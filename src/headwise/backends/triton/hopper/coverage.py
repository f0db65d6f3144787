"""Which attention calls the Hopper kernels take, by measurement, and in which tiles.

Nothing heavy is imported here: `headwise explain` asks the same questions without running anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.triton.hopper.tiles import BackwardTile, ForwardRow, ForwardTile

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Attention

_DTYPES = (torch.bfloat16, torch.float16)
# tanh(x) is 1 − 2/(1 + e²ˣ) here: above the second cap a logit is off by too much, and below the first the slope of the
# tanh drowns in rounding (backward).
_LEAST_CAP, _WIDEST_CAP = 0.01, 256


SHORT, MEDIUM = 512, 2048
FEW, MANY = 4, 16
# From so many tiles of 128 queries on, over all heads, and from so many queries of the longest sequence on, the forward was
# measured to be faster than the plain one: 61 against 71 TFLOP/s with 64 tiles, 170 against 153 with 128 (D 128, causal, one
# sequence of 512 or 1024); 115 against 82 with 2048 tiles of sequences of 128.
LEAST_TILES = 128
LEAST_QUERIES = 128
WIDEST_BIASED = 128
LONGEST_MASK = 2**21 - 64  # blocks of 64, whose numbers have 15 bits in the backward

# A head dim works in the first row that holds it: elements past it are read as zeros and not written. 80, 96, 160 and 192
# are two pieces (64 + 16, 64 + 32, 128 + 32, 128 + 64): padding 96 to 128 is a third more arithmetic. Measured
# on an H200 with 16384 tokens; docs/hopper-attention.md has the figures.
_64_THREE = ForwardTile(3, 128, 64, 0, 64, 0, 4, 4, 2, ahead=2)
_64_TWO = ForwardTile(2, 128, 64, 0, 64, 0, 4, 4, 2, ahead=2)
_64_SHORT = ForwardTile(2, 64, 64, 0, 64, 0, 8, 8, 2, ahead=2)
_64_FOUR = ForwardTile(4, 64, 64, 0, 64, 0, 6, 6, 2, ahead=2)
_80 = ForwardTile(2, 128, 64, 16, 64, 16, 3, 3, 2, ahead=2)
_96 = ForwardTile(2, 128, 64, 32, 64, 32, 2, 3, 2)
_128 = ForwardTile(2, 128, 128, 0, 128, 0, 2, 2, 2, ahead=2)
_128_SHORT = ForwardTile(2, 64, 128, 0, 128, 0, 4, 4, 2, ahead=2)
_160 = ForwardTile(2, 64, 128, 32, 128, 32, 2, 2, 2)
_192 = ForwardTile(2, 64, 128, 64, 128, 64, 2, 2, 1)
_256 = ForwardTile(2, 64, 128, 128, 128, 128, 2, 2, 1, one_o=True)
FORWARD: tuple[ForwardRow, ...] = (
    ForwardRow(64, _64_THREE, _64_TWO, _64_SHORT, _64_TWO, _64_FOUR),
    ForwardRow(80, _80, _80, _80, _80),
    ForwardRow(96, _96, _96, _96, _96),
    ForwardRow(128, _128, _128._replace(keys_first=True), _128_SHORT, _128, banded_up_to=1024),
    ForwardRow(160, _160, _160, _160, _160),
    ForwardRow(192, _192, _192, _192, _192),
    ForwardRow(256, _256, _256, _256, _256),
)
# For values narrower than keys, of these head dims. 128 keys at once leave room for half of the output: it leaves in two
# pieces.
UNEQUAL, UNEQUAL_VALUES = range(136, 193), range(72, 129)
FORWARD_UNEQUAL = ForwardTile(2, 128, 128, 64, 64, 64, 2, 2, 1, one_o=True, keys_first=True)
# With a mask: two warpgroups, so that its bits find registers.
_MASKED = {64: _64_TWO, 96: _96, 128: _128, 192: _192, 256: _256}


def masked_tile(head_dim: int) -> ForwardTile:
    return next(tile for widest, tile in _MASKED.items() if head_dim <= widest)


# With a bias, whose blocks lie in shared memory as well: for head dims up to so many, and elements of so many bytes.
_BIASED: dict[tuple[int, int], ForwardTile] = {
    (64, 2): ForwardTile(2, 128, 64, 0, 64, 0, 3, 3, 2, ahead=2, b_stages=2),
    (64, 4): ForwardTile(2, 64, 64, 0, 64, 0, 4, 4, 2, ahead=2, b_stages=2),
    (96, 2): ForwardTile(2, 64, 64, 32, 64, 32, 3, 3, 2, b_stages=2),
    (96, 4): ForwardTile(2, 64, 64, 32, 64, 32, 2, 2, 2, b_stages=2),
    (128, 2): ForwardTile(2, 64, 128, 0, 128, 0, 3, 3, 2, ahead=2, b_stages=2),
    (128, 4): ForwardTile(2, 64, 128, 0, 128, 0, 2, 2, 2, ahead=2, b_stages=2),
}


def biased_tile(head_dim: int, element: int) -> ForwardTile:
    """With a bias of elements of so many bytes."""
    return next(tile for (widest, size), tile in _BIASED.items() if head_dim <= widest and size == element)


def _bias_not_covered(args: Attention) -> str | None:
    """Why a bias is not read; None if it is, or if there is none."""
    if args.bias is None:
        return None
    bias = unexpanded(args.bias)
    if args.q.shape[-1] > WIDEST_BIASED:
        return f"it reads a bias beside head dims up to {WIDEST_BIASED}"
    if args.kv_lengths is not None:
        return "it reads no bias beside kv_lengths"
    if bias.shape[3] == 1:
        return "it reads no bias that is broadcast over the keys"
    step = 16 // bias.element_size()
    if bias.element_size() not in (2, 4) or bias.stride(3) != 1:
        return "it reads a bias of 16 or 32 bits whose keys are neighbours"
    if any(n > 1 and (s % step or s <= 0) for n, s in zip(bias.shape[:3], bias.stride()[:3], strict=True)):
        return f"the strides of the bias are not multiples of 16 bytes: {bias.stride()} elements"
    return None


# Heads work in the first one that is wide enough; the two pieces of 80 and 96 read no mask and no bias. Measured on an H200:
# docs/hopper-attention-backward.md.
BACKWARD: tuple[BackwardTile, ...] = (
    BackwardTile(128, 128, 64, 64, 0, 64, 0, 2, 2, 16, 2048, 2048),
    BackwardTile(128, 64, 128, 64, 16, 64, 16, 2, 2, 16, 2048, 512),
    BackwardTile(128, 64, 128, 64, 32, 64, 32, 2, 2, 16, 2048, 512),
    BackwardTile(128, 64, 128, 128, 0, 128, 0, 2, 2, 16, 2048, 512),
    BackwardTile(64, 64, 192, 128, 64, 128, 64, 2, 1, 128, 2048, 512),
    BackwardTile(64, 64, 256, 128, 128, 128, 128, 2, 1, 128, 2048, 512),
)
BACKWARD_UNEQUAL = BackwardTile(64, 64, 192, 128, 64, 128, 0, 2, 1, 128, 2048, 512)


def forward_tile(
    head_dim: int, length: int, packed: bool, banded: bool, tiles: int, processors: int, value_dim: int | None = None,
    *, capped: bool = False,
) -> ForwardTile:  # fmt: skip
    """For sequences of ``length`` queries (packed ones, on average), ``tiles`` tiles of 128 queries in all.

    value_dim: of v, if not that of q and k. capped: three warpgroups or more leave too few registers for that.
    """
    if value_dim not in (None, head_dim):
        return FORWARD_UNEQUAL
    row = next(row for row in FORWARD if head_dim <= row.widest)
    short = length <= (row.banded_up_to if banded else SHORT)
    if row.wide is not None and not capped and length <= (MEDIUM if banded else SHORT) and tiles >= MANY * processors:
        queries = 64 * row.wide.consumers
        padded = -(-length // queries) * queries
        if (not short) if packed else 8 * length >= 7 * padded:
            return row.wide
    if short:
        return row.short_banded if banded else row.short
    return row.few if capped or tiles < FEW * processors else row.tile


def backward_tile(
    head_dim: int, capped: bool, biased: bool = False, *, masked: bool = False, value_dim: int | None = None
) -> BackwardTile:
    """A cap needs registers that steps of 64 queries leave; a bias needs shared memory. value_dim: as in `forward_tile`."""
    if value_dim not in (None, head_dim):
        return BACKWARD_UNEQUAL
    whole = biased or masked
    tile = next(t for t in BACKWARD if head_dim <= t.d0 + t.d1 and not (whole and t.d0 == 64 and t.d1 > 0))
    if biased:
        return tile._replace(rows=64, kv_stages=2 if tile.width <= 64 else 1)
    return tile._replace(rows=64) if capped else tile


def covers_forward(args: Attention) -> str | None:
    """Why the Hopper forward does not take a call; None if it does."""
    q, k, _ = heads_outside(args)
    _, _, queries, _ = q.shape
    keys, right, packed = k.shape[2], args.flags.right, args.packing is not None
    reason = _not_covered(args, FORWARD[-1].widest)
    if reason is not None:
        return reason
    if args.flags.softcap > _WIDEST_CAP:
        return f"its tanh is for caps up to {_WIDEST_CAP}"
    if (reason := _bias_not_covered(args)) is not None:
        return reason
    if args.mask is not None and args.kv_lengths is not None:
        return "it reads no mask beside kv_lengths"
    if args.mask is not None and max(queries, keys) > LONGEST_MASK:
        return f"it reads masks of up to {LONGEST_MASK} tokens"
    if not packed and args.mask is None and args.bias is None and right >= 0 and queries > keys + right:
        return "there are rows that see nothing, and its tiles multiply by values that they do not see"
    if (queries if args.packing is None else min(args.packing.max_q, queries)) < LEAST_QUERIES:
        return f"it was not measured with fewer than {LEAST_QUERIES} queries"
    if tiles_in_all(q) < LEAST_TILES:
        return f"with fewer than {LEAST_TILES} tiles of 128 queries over all heads the plain kernel is faster"
    if q.shape[:3].numel() >= 2**31 or (packed and max(queries, keys) >= 2**30):
        return "it counts rows in 32 bits"
    return None


def covers_backward(args: Attention) -> str | None:
    """Why the Hopper backward does not take the gradients of a call; None if it does."""
    q, k, v = heads_outside(args)
    reason = _not_covered(args, BACKWARD[-1].width)
    if reason is not None:
        return reason
    if (reason := _bias_not_covered(args)) is not None:
        return reason
    if args.bias is not None and args.flags.softcap > 0:
        return "it reads no bias beside a cap"
    if args.kv_lengths is not None:
        return "it reads no kv_lengths"
    if args.flags.softcap > 0 and not _LEAST_CAP <= args.flags.softcap <= _WIDEST_CAP:
        return f"its tanh is for caps from {_LEAST_CAP} to {_WIDEST_CAP}"
    if q.shape[:3].numel() >= 2**30 or k.shape[2] >= 2**30:
        return "it counts rows in 32 bits"
    if args.mask is not None and max(q.shape[2], k.shape[2]) > LONGEST_MASK:
        return f"it counts blocks and tiles of a mask in 16 bits, of up to {LONGEST_MASK} tokens"
    tile = backward_tile(q.shape[3], False, value_dim=v.shape[3])
    if -(-k.shape[2] // tile.keys) * k.shape[0] * k.shape[1] < tile.least_tiles:
        return f"it is for calls of at least {tile.least_tiles} tiles of {tile.keys} keys"
    return None


def _not_covered(args: Attention, widest: int) -> str | None:
    """What both directions refuse."""
    q, k, v = heads_outside(args)
    head_dim, value_dim = q.shape[3], v.shape[3]
    if q.dtype not in _DTYPES:
        return f"it computes in bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
    for name in ("q_lengths", "kv_starts"):
        if getattr(args, name) is not None:
            return f"it reads no {name} yet"
    if args.flags.dropout:
        return "it drops no probabilities"
    if args.flags.unrounded:
        return "it writes results in the dtype of q, and those of this call stay float32"
    if value_dim != head_dim:
        if head_dim not in UNEQUAL or value_dim not in UNEQUAL_VALUES or value_dim % 8:
            return (
                f"it needs one head dim, or {UNEQUAL[0]} to {UNEQUAL[-1]} of q with {UNEQUAL_VALUES[0]} to "
                f"{UNEQUAL_VALUES[-1]} of v, and v has {value_dim} where q has {head_dim}"
            )
        if args.mask is not None:
            return "it reads no mask beside v of another head dim than q"
    if head_dim > widest or head_dim % 8:
        return f"its head dims are multiples of 8 up to {widest}, and this one is {head_dim}"
    if q.numel() == 0 or k.numel() == 0:
        return "there are no queries or no keys"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not strides_fit(x):
            return f"the strides of {name} are not multiples of 16 bytes: {x.stride()} elements"
    return None


def unexpanded(x: Tensor | None) -> Any:
    """A mask or a bias in four dims, those that only repeat it (steps of 0) of size 1."""
    if x is None:
        return None
    x = layout.four_dims(x)
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]


def strides_fit(x: Tensor) -> bool:
    """May TMA read x ``(B, H, S, D)``? All strides but the last are multiples of 16 bytes, and elements are neighbours."""
    return x.stride(3) == 1 and all(
        n == 1 or (s % 8 == 0 and s > 0) for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)
    )


def tiles_in_all(q: Tensor) -> int:
    """Of 128 queries, over all heads of q ``(B, H, S, D)``."""
    return -(-q.shape[2] // 128) * q.shape[0] * q.shape[1]


def heads_outside(args: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as ``(B, H, S, D)``; a packed batch is one entry of all tokens."""
    packed = args.packing is not None
    return as_entries(args.q, packed), as_entries(args.k, packed), as_entries(args.v, packed)


def as_entries(x: Tensor, packed: bool) -> Tensor:
    """``(B, H, S, D)``, or a packed ``(T, H, D)`` as ``(1, H, T, D)``."""
    return x.transpose(0, 1)[None] if packed else x

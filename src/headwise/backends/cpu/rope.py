"""Rotary position embedding on the CPU: blocks of heads of a batch entry, float32 inside.

Pairs of neighbours are complex numbers: PyTorch multiplies those in one pass, where every second element of a row would
be read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise import layout
from headwise.backends.cpu.memory import huge_pages
from headwise.backends.cpu.row_blocks import BLOCK
from headwise.backends.cpu.threads import Shared, in_threads

if TYPE_CHECKING:
    from headwise.ops.rope import Rope

_ELEMENTS = BLOCK // 4  # of a block


class _Angles(NamedTuple):
    """Of every token: ``(B, S, R)``, or ``(1, S, R)`` where batch entries share them."""

    cos: Tensor
    sin: Tensor
    turns: Tensor | None  # cos + i sin, for pairs of neighbours
    outside: Tensor | None  # (B or 1, S): which positions are in no table; None: all are

    def of(self, batch: int, tokens: slice) -> _Angles:
        batch = batch if self.cos.shape[0] > 1 else 0
        return _Angles(*(None if t is None else t[batch, tokens] for t in self))  # type: ignore[arg-type]


def rope_forward(args: Rope) -> tuple[Tensor, ...]:
    return _rotated(args, inverse=False)


def rope_backward(args: Rope) -> tuple[Tensor, ...]:
    return _rotated(args, inverse=True)


def _rotated(args: Rope, inverse: bool) -> tuple[Tensor, ...]:
    ys = tuple(huge_pages(x.new_empty_strided(x.shape, layout.strides_like_heads(x, x.shape[-1]))) for x in args.xs)
    if all(x.numel() == 0 for x in args.xs):
        return ys
    angles = _angles(args, inverse)
    jobs = [(x, y) for x, y in zip(map(_heads_outside, args.xs), map(_heads_outside, ys), strict=True) if x.numel() > 0]

    blocks = Shared(_blocks(jobs, angles))

    def work(thread: int, threads: int) -> None:
        for x, y, of_block in blocks:
            _rotate(x, y, of_block)

    in_threads(work, most=-(-sum(y.numel() for y in ys) // _ELEMENTS))
    return ys


def _heads_outside(x: Tensor) -> Tensor:
    """A packed ``(T, H, D)`` as ``(1, H, T, D)``."""
    return x if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0)


def _angles(args: Rope, inverse: bool) -> _Angles:
    x, (known, _) = _heads_outside(args.xs[0]), args.cos.shape
    outside: Tensor | None = None
    if args.positions is None:
        cos, sin = (table[: x.shape[2]].unsqueeze(0) for table in (args.cos, args.sin))
    else:
        positions = args.positions.view(-1, x.shape[2]).long() if args.positions.dim() == 1 else args.positions.long()
        bad = (positions < 0) | (positions >= known)
        tables = [args.cos, args.sin]
        if bool(bad.any()):
            outside, positions = bad, positions.masked_fill(bad, known)  # the row of NaN after the last one
            tables = [torch.cat([table, table.new_full((1, table.shape[1]), torch.nan)]) for table in tables]
        cos, sin = (t.index_select(0, positions.reshape(-1)).view(*positions.shape, t.shape[1]) for t in tables)
    cos, sin = (t.to(layout.statistics_dtype(x.dtype)) for t in (cos, sin))
    sin = sin.neg() if inverse else sin
    turns = torch.complex(cos.contiguous(), sin.contiguous()) if args.interleaved else None
    return _Angles(cos, sin, turns, outside)


def _blocks(jobs: list[tuple[Tensor, Tensor]], angles: _Angles) -> Iterator[tuple[Tensor, Tensor, _Angles]]:
    """x and y as ``(heads, tokens, D)`` of one batch entry: all heads of some tokens, which share their angles."""
    for x, y in jobs:
        batch, heads, tokens, dim = x.shape
        step = max(1, _ELEMENTS // (heads * dim))
        for b in range(batch):
            for first in range(0, tokens, step):
                some = slice(first, first + step)
                yield x[b, :, some], y[b, :, some], angles.of(b, some)


def _rotate(x: Tensor, y: Tensor, angles: _Angles) -> None:
    rotated, wide = 2 * angles.cos.shape[-1], angles.cos.dtype
    turned, target = x[..., :rotated], y[..., :rotated]
    if wide != x.dtype:
        # In the memory order of y: with heads inside, its rows of a token stay side by side.
        turned, target = torch.empty_like(target, dtype=wide).copy_(turned), torch.empty_like(target, dtype=wide)
    if angles.turns is None:
        (a, b), (ya, yb) = turned.chunk(2, -1), target.chunk(2, -1)
        torch.mul(a, angles.cos, out=ya).addcmul_(b, angles.sin, value=-1)
        torch.mul(b, angles.cos, out=yb).addcmul_(a, angles.sin)
    elif rotated > 0:
        turned = turned.contiguous()
        if turned.storage_offset() % 2:  # a complex number begins at an even element
            turned = turned.clone()
        pairs = turned.unflatten(-1, (-1, 2))
        target = torch.view_as_real(torch.view_as_complex(pairs) * angles.turns).flatten(-2)
    if target.data_ptr() != y.data_ptr():
        y[..., :rotated].copy_(target)
    y[..., rotated:].copy_(x[..., rotated:])
    if angles.outside is not None:
        y.masked_fill_(angles.outside.unsqueeze(-1), torch.nan)

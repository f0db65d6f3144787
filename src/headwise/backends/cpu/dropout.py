"""Which probabilities dropout drops, on the CPU: Philox 4x32-10 in int64 tensors.

docs/contract.md has the mapping. One counter of four words serves eight entries: queries i and i + 8, keys j, j + 1, j + 8
and j + 9. So whole squares of 16 × 16 entries are made, and what was not asked for is cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags

_WORD = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_STEP0, _STEP1 = 0x9E3779B9, 0xBB67AE85  # of the key, from round to round
_FLIP = 0x80008000 - (1 << 32)  # the sign bits of both halves: PyTorch compares signed numbers
_ALIKE = 16  # entries of one square along a side
_SQUARE = 8  # counters of one square along the queries; 4 along the keys


class Dropout(NamedTuple):
    """What dropout does to a problem; b, h, i and j of its first batch entry, head, query and key."""

    seed: int
    below: int  # of 16 random bits, those that drop
    scale: float  # of what is kept
    batch: int = 0
    head: int = 0
    row: int = 0
    key: int = 0


def of_flags(flags: Flags, seed: Tensor | None) -> Dropout | None:
    if seed is None:
        return None
    number, *first = seed.reshape(-1).tolist()
    return Dropout(number, flags.dropped_below, flags.kept_scale, *first[:4])


def kept(dropout: Dropout, heads: int, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """bool ``(heads, rows, keys)``: what is kept of the first batch entry. rows and keys: first, and past the last."""
    rows = rows[0] + dropout.row, rows[1] + dropout.row
    row, past_row = rows[0] // _ALIKE * _ALIKE, -(-rows[1] // _ALIKE) * _ALIKE
    i = torch.arange(row, past_row, _ALIKE)[:, None] + torch.arange(_SQUARE)  # bit 3 is clear
    words, first = _words(dropout, heads, i.flatten(), keys)
    squares = (past_row - row) // _ALIKE
    bits = torch.empty((heads, squares, 2, _SQUARE, *words[0].shape[2:3], 2, 4), dtype=torch.int32)
    for number, word in enumerate(words):
        bits[:, :, number // 2, :, :, number % 2] = word.unflatten(1, (squares, _SQUARE))
    found = _not_below(bits.flatten(1, 3), dropout)
    return found[:, rows[0] - row : rows[1] - row, first : first + keys[1] - keys[0]]


def kept_of_rows(dropout: Dropout, heads: int, rows: Tensor, keys: int) -> Tensor:
    """bool ``(heads, rows, keys)``: the same for rows anywhere, and the first keys."""
    rows = rows + dropout.row
    words, first = _words(dropout, heads, rows & ~8, (0, keys))
    low_row = ((rows & 8) == 0)[:, None, None]
    pair = [torch.where(low_row, words[n], words[n + 2]).to(torch.int32) for n in (0, 1)]
    return _not_below(torch.stack(pair, 3), dropout)[..., first : first + keys]


def _not_below(bits: Tensor, dropout: Dropout) -> Tensor:
    """bool ``(heads, rows, keys)`` from words ``(heads, rows, squares, 2, 4)``: an entry has the half of a word."""
    halves = bits.bitwise_xor_(_FLIP).view(torch.int16)  # even keys first: the low half, on all that PyTorch runs on
    return halves.flatten(2) >= dropout.below - 32768


def _words(dropout: Dropout, heads: int, i: Tensor, keys: tuple[int, int]) -> tuple[tuple[Tensor, ...], int]:
    """Four words ``(heads, i, squares, 4)`` for counters of queries, and where in a row of their entries the keys begin.

    Only the lower 32 bits of a word count. Products wrap at 64 bits, of which the upper 32 are those of the true product.
    """
    start = dropout.key + keys[0]
    first = start // _ALIKE * _ALIKE
    j = torch.arange(first, dropout.key + keys[1], _ALIKE)[:, None] + torch.arange(0, _SQUARE, 2)  # bits 0, 3 are clear
    c0, c2 = j[None, None], i[None, :, None, None]
    c1 = torch.arange(dropout.head, dropout.head + heads)[:, None, None, None]
    c3 = torch.full((), dropout.batch)
    k0, k1 = dropout.seed & _WORD, dropout.seed >> 32 & _WORD
    # The first two rounds multiply what depends on a query or on a key alone: small tensors, which broadcast.
    for _ in range(2):
        a, b = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((b >> 32) ^ c1 ^ k0) & _WORD, b, ((a >> 32) ^ c3 ^ k1) & _WORD, a
        k0, k1 = (k0 + _STEP0) & _WORD, (k1 + _STEP1) & _WORD
    shape = torch.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    c0, c1, c2, c3 = (x.expand(shape).clone(memory_format=torch.contiguous_format) for x in (c0, c1, c2, c3))
    for _ in range(8):
        a, b = c0.mul_(_M0), c2.mul_(_M1)
        c1.bitwise_xor_(b >> 32).bitwise_xor_(k0).bitwise_and_(_WORD)
        c3.bitwise_xor_(a >> 32).bitwise_xor_(k1).bitwise_and_(_WORD)
        c0, c1, c2, c3 = c1, b, c3, a
        k0, k1 = (k0 + _STEP0) & _WORD, (k1 + _STEP1) & _WORD
    return (c0, c1, c2, c3), start - first

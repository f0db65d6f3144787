"""Which probabilities dropout drops: Philox 4x32-10, in Python's own whole numbers as far as it goes, then in int64 tensors.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011. The mapping from (b, h, i, j) to a counter
and to 16 of its 128 bits is in docs/contract.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85  # of the key, from round to round


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four words of random bits for each counter of four words; int64 tensors that broadcast, of numbers below 2³²."""
    c0, c1, c2, c3 = counter
    for turn in range(10):
        k0, k1 = ((k + turn * step) & _WORD for k, step in zip(key, _STEPS, strict=True))
        (high0, low0), (high2, low2) = (_product(m, c) for m, c in zip(_MULTIPLIERS, (c0, c2), strict=True))
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
    return tuple(torch.broadcast_tensors(c0, c1, c2, c3))


def _product(multiplier: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two words, from products that 63 bits hold."""
    low, high = multiplier * (x & 0xFFFF), multiplier * (x >> 16)  # below 2⁴⁸
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & _WORD


def random_bits(seed: int, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The 16 random bits of each entry; the four int64 tensors broadcast."""
    words = philox((key & ~9, head, query & ~8, batch), (seed & _WORD, seed >> 32 & _WORD))
    number = (query >> 3 & 1) * 2 + (key >> 3 & 1)
    word = words[0]
    for i in (1, 2, 3):
        word = torch.where(number == i, words[i], word)
    return torch.where((key & 1) == 1, word >> 16, word & 0xFFFF)


def kept(
    dropout: float, seed: int | Tensor, shape: tuple[int, int, int, int], device: torch.device, first_batch: int = 0
) -> Tensor:
    """bool ``(B, Hq, Sq, Sk)``: the entries that dropout keeps. ``first_batch``: b of the first batch entry."""
    b, h, i, j = torch.meshgrid(*(torch.arange(n, device=device) for n in shape), indexing="ij")
    return random_bits(int(seed), b + first_batch, h, i, j) >= min(round(dropout * 65536), 65535)

"""Documents of different lengths in one batch without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where each document of a packed batch lies. The tokens of all of them are laid end to end, ``(T, …)``.

    >>> packing = nn.Packing.of([2, 3])
    >>> packing.cu_seqlens.tolist(), packing.longest, packing.positions.tolist()
    ([0, 2, 5], 3, [0, 1, 0, 1, 2])
    """

    cu_seqlens: Tensor  # (documents + 1,) int32: 0, then where each one ends
    longest: int
    positions: Tensor  # (T,) int64: 0 at the start of every document

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Self:
        """From the lengths of the documents, in order."""
        if not lengths or min(lengths) < 0:
            raise ValueError(
                f"Packing.of: lengths is {list(lengths)}; it needs the length of at least one document, none negative"
            )
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        positions = torch.cat([torch.arange(length) for length in lengths])
        return cls(ends.to(device), max(lengths), positions.to(device))

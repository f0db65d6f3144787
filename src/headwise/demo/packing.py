"""Packed batches with a fixed number of tokens, whatever the lengths of the documents.

An epoch is every byte of the text once: documents longer than the context are cut into pieces (at other places in every
epoch), the pieces are shuffled and laid end to end, and every step takes the next tokens of that stream. So a batch
depends on (seed, step) alone, and a resumed run sees the same batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from headwise import nn

IGNORED = -100  # the target of a document's last byte: the next byte is of another document


@dataclass(frozen=True)
class Packing(nn.Packing):
    """Where each document of a packed batch lies, and which keys a query sees."""

    _masks: dict[int | None, Tensor] = field(default_factory=dict, repr=False)

    def mask(self, window: int | None) -> Tensor:
        """(T, T) bool, for implementations without packed batches: which keys a query sees. Made once per window."""
        if window not in self._masks:
            rows = torch.arange(len(self.positions), device=self.positions.device)
            document = (rows[:, None] >= self.cu_seqlens[1:]).sum(1)
            seen = (document[:, None] == document[None, :]) & (rows[None, :] <= rows[:, None])
            if window is not None:
                seen &= rows[None, :] > rows[:, None] - window
            self._masks[window] = seen
        return self._masks[window]


class Batch(NamedTuple):
    ids: Tensor  # (T,) int64
    targets: Tensor  # (T,) int64: the byte that follows in the same document, IGNORED after its last
    packing: Packing


class _Piece(NamedTuple):
    """Bytes start to stop of the corpus; end is where their document ends."""

    start: int
    stop: int
    end: int


class Batches:
    """The packed batches of a training run: `batch(step)`."""

    def __init__(
        self,
        documents: Sequence[bytes],
        tokens: int,
        context: int,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.tokens, self.context, self.seed, self.device = tokens, context, seed, device
        self._corpus = _as_tensor(b"".join(documents))
        self._ends = list(accumulate(len(d) for d in documents))
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)  # a batch may span two epochs

    def batch(self, step: int) -> Batch:
        pieces = list(self._pieces(step * self.tokens))
        return _pack(self._corpus, pieces, self.device)

    def _pieces(self, position: int) -> Iterator[_Piece]:
        """The next ``tokens`` tokens of the stream; the rest of the last piece begins the next batch."""
        left = self.tokens
        while left:
            epoch, offset = divmod(position, len(self._corpus))
            starts, pieces = self._epoch(epoch)
            index = bisect_right(starts, offset) - 1
            piece = pieces[index]
            start = piece.start + offset - starts[index]
            stop = min(piece.stop, start + left)
            yield _Piece(start, stop, piece.end)
            left -= stop - start
            position += stop - start

    def _make_epoch(self, epoch: int) -> tuple[list[int], list[_Piece]]:
        """Where each piece of the epoch begins in the stream, and the pieces."""
        generator = torch.Generator().manual_seed(_mix(self.seed, epoch))
        pieces = []
        begin = 0
        for end in self._ends:
            first = end
            if end - begin > self.context:
                first = begin + int(torch.randint(1, self.context + 1, (), generator=generator))
            cuts = [begin, *range(first, end, self.context), end] if end > begin else []
            pieces += [_Piece(a, b, end) for a, b in pairwise(cuts)]
            begin = end
        pieces = [pieces[i] for i in torch.randperm(len(pieces), generator=generator).tolist()]
        starts = [0, *accumulate(p.stop - p.start for p in pieces)][:-1]
        return starts, pieces


def whole_batches(
    documents: Sequence[bytes], tokens: int, context: int, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Every byte of the documents once and in order, in batches of at most about ``tokens``: for an evaluation."""
    corpus = _as_tensor(b"".join(documents))
    pieces: list[_Piece] = []
    begin = 0
    for document in documents:
        end = begin + len(document)
        for start in range(begin, end, context):
            pieces.append(_Piece(start, min(start + context, end), end))
            if sum(p.stop - p.start for p in pieces) >= tokens:
                yield _pack(corpus, pieces, device)
                pieces = []
        begin = end
    if pieces:
        yield _pack(corpus, pieces, device)


def _pack(corpus: Tensor, pieces: list[_Piece], device: torch.device | str) -> Batch:
    ids = torch.cat([corpus[p.start : p.stop] for p in pieces])
    targets = torch.cat([_targets(corpus, p) for p in pieces])
    return Batch(ids.to(device), targets.to(device), Packing.of([p.stop - p.start for p in pieces], device))


def _targets(corpus: Tensor, piece: _Piece) -> Tensor:
    following = corpus[piece.start + 1 : min(piece.stop + 1, piece.end)]
    missing = (piece.stop - piece.start) - len(following)
    return torch.cat([following, following.new_full((missing,), IGNORED)])


def _as_tensor(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.int64)


def _mix(seed: int, epoch: int) -> int:
    """One seed from two numbers; the epochs of neighbouring seeds are independent."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) % (1 << 63)

"""Caches of keys and values for generation: one block of memory per sequence, or pages.

A step is: `extend` by the new tokens, which gives their positions; then every layer writes its keys and values, in
place, and attends over the first ``lengths`` positions. What lies beyond them is never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys ``(layers, B, Hk, capacity, D)`` and values ``(layers, B, Hk, capacity, Dv)``, allocated once.

    >>> cache = nn.KVCache(layers=1, batch=2, key_heads=2, capacity=64, head_dim=32)
    >>> cache.extend(5)  # positions of the new tokens; then every layer writes and attends
    tensor([[0, 1, 2, 3, 4],
            [0, 1, 2, 3, 4]])
    """

    def __init__(
        self, layers: int, batch: int, key_heads: int, capacity: int, head_dim: int, value_dim: int | None = None, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.capacity = capacity
        rows = (layers, *self._rows(batch, key_heads))
        self.keys = torch.empty((*rows, head_dim), device=device, dtype=dtype)
        self.values = torch.empty((*rows, head_dim if value_dim is None else value_dim), device=device, dtype=dtype)
        # Changed in place: a captured step goes on from there.
        self._lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.block_table: Tensor | None = None
        self.positions = torch.zeros((batch, 0), dtype=torch.int64, device=device)  # of the newest tokens
        self.counts: Tensor | None = None  # how many of them each sequence has; None: all
        self.first = True  # nothing lies before the newest tokens
        self._used = [0] * batch  # an upper bound of lengths, known without asking the device

    def _rows(self, batch: int, key_heads: int) -> tuple[int, ...]:
        return batch, key_heads, self.capacity

    @property
    def lengths(self) -> Tensor:
        """Valid positions of each sequence ``(B,)``: a copy, which later steps leave as it is."""
        return self._lengths.clone()

    @property
    def batch(self) -> int:
        return len(self._used)

    def extend(self, tokens: int, counts: Sequence[int] | Tensor | None = None) -> Tensor:
        """Make room for ``tokens`` more in every sequence: their positions ``(B, tokens)``.

        counts: for a batch padded on the right, how many of them are real in each sequence; the next step overwrites the
        others. As a tensor it is not read back, and the room of all of them counts as used.
        """
        known = [tokens] * self.batch if counts is None or isinstance(counts, Tensor) else [*map(int, counts)]
        if tokens < 0:
            raise ValueError(f"extend: tokens is {tokens}; it needs at least 0")
        if len(known) != self.batch or any(not 0 <= n <= tokens for n in known):
            raise ValueError(f"extend: counts is {known}; it needs {self.batch} numbers from 0 to {tokens}")
        if isinstance(counts, Tensor):
            counts = self._per_sequence("extend: counts", counts).clamp(0, tokens)
        self._reserve(tokens, known)
        new = torch.arange(tokens, device=self._lengths.device)
        self.positions = self._lengths[:, None].to(torch.int64) + new
        self.counts = None if counts is None else torch.as_tensor(counts).to(self._lengths)
        self._lengths += tokens if self.counts is None else self.counts
        self.first = not any(self._used)
        self._used = [used + n for used, n in zip(self._used, known, strict=True)]
        return self.positions

    def _per_sequence(self, name: str, numbers: Tensor) -> Tensor:
        if tuple(numbers.shape) != (self.batch,) or numbers.is_floating_point() or numbers.dtype == torch.bool:
            raise ValueError(
                f"{name} has shape {tuple(numbers.shape)} and dtype {str(numbers.dtype).removeprefix('torch.')}; it needs "
                f"({self.batch},) and whole numbers"
            )
        return numbers.to(self._lengths)

    def _reserve(self, tokens: int, counts: Sequence[int]) -> None:
        """Room for the real tokens; here for padding too, which is written like them."""
        needed = max(self._used, default=0) + tokens
        if needed > self.capacity:
            raise ValueError(
                f"KVCache: {needed} positions are needed; its capacity is {self.capacity}. Make a larger one, or `trim` it"
            )

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keys ``(B, Hk, S, D)`` and values ``(B, Hk, S, Dv)`` of the newest tokens, in place."""
        for name, new in (("k", k), ("v", v)):
            if (new.shape[0], new.shape[2]) != tuple(self.positions.shape):
                raise ValueError(
                    f"write: {name} has shape {tuple(new.shape)}; it needs (B, Hk, S, D) of {self.batch} sequences and the "
                    f"{self.positions.shape[1]} tokens that the cache was extended by"
                )
        rows, slots = self._places()
        for target, new in ((self.keys[layer], k), (self.values[layer], v)):
            target[rows, :, slots] = new.transpose(1, 2).to(target.dtype)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Row and slot of each of the newest tokens."""
        return torch.arange(self.batch, device=self._lengths.device)[:, None], self.positions

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as ``(B, Hk, capacity, D)``: the memory itself, or of pages a copy."""
        return self.keys[layer], self.values[layer]

    def trim(self, lengths: Tensor) -> None:
        """Forget what lies past ``lengths`` ``(B,)``: tokens that a larger model did not accept, say."""
        most = self._per_sequence("trim: lengths", lengths).clamp(min=0)
        self._lengths.copy_(torch.minimum(self._lengths, most))
        self._used = [int(n) for n in self._lengths.tolist()]

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self._lengths.zero_()
        self.positions = self.positions[:, :0]
        self.counts, self.first = None, True
        self._used = [0] * self.batch


class PagedKVCache(KVCache):
    """The same in pages: keys ``(layers, pages, Hk, page_size, D)``; a sequence holds as many as it needs.

    `release` gives the pages of a finished sequence to those that go on (Kwon et al., "Efficient Memory Management for Large
    Language Model Serving with PagedAttention", 2023).

    >>> model = nn.TransformerLM(nn.TransformerConfig(100, 64, 1, 2, positions=64))
    >>> cache = model.cache(2, 64, page_size=16)
    >>> cache.extend(20).shape
    torch.Size([2, 20])
    """

    def __init__(
        self, layers: int, batch: int, key_heads: int, pages: int, head_dim: int, value_dim: int | None = None, *,
        page_size: int = 64, max_pages: int | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """max_pages: of one sequence; None: all. It is the width of ``block_table``, which the decode kernel splits by."""
        self.pages, self.page_size, self.max_pages = pages, page_size, pages if max_pages is None else max_pages
        capacity = self.max_pages * page_size
        super().__init__(layers, batch, key_heads, capacity, head_dim, value_dim, device=device, dtype=dtype)
        self._free = list(range(pages - 1, -1, -1))
        self._held: list[list[int]] = [[] for _ in range(batch)]
        self.block_table = torch.full((batch, self.max_pages), pages, dtype=torch.int32, device=device)

    def _rows(self, batch: int, key_heads: int) -> tuple[int, ...]:
        """One page more than there are: padding that no page is held for is written there."""
        return self.pages + 1, key_heads, self.page_size

    def extend(self, tokens: int, counts: Sequence[int] | Tensor | None = None) -> Tensor:
        if self._lengths.device.type == "webgpu" and torch.get_device_module("webgpu").is_current_stream_capturing():
            raise RuntimeError(
                "PagedKVCache: it hands out pages on the CPU, which no replay of a captured step would do. Use a KVCache"
            )
        return super().extend(tokens, counts)

    def _reserve(self, tokens: int, counts: Sequence[int]) -> None:
        needed = [-(-(used + n) // self.page_size) for used, n in zip(self._used, counts, strict=True)]
        if max(needed, default=0) > self.max_pages:
            raise ValueError(
                f"PagedKVCache: a sequence needs {max(needed)} pages; each may have {self.max_pages} (max_pages) of "
                f"{self.page_size} positions"
            )
        missing = [max(0, n - len(held)) for n, held in zip(needed, self._held, strict=True)]
        if sum(missing) > len(self._free):
            raise ValueError(
                f"PagedKVCache: {sum(missing)} more pages are needed; {len(self._free)} of {self.pages} are free. "
                "`release` a sequence, or make a larger cache"
            )
        new: list[tuple[int, int, int]] = []  # sequence, place in its row, page
        for sequence, (held, more) in enumerate(zip(self._held, missing, strict=True)):
            for _ in range(more):
                new.append((sequence, len(held), self._free.pop()))
                held.append(new[-1][2])
        self._enter(new)

    def _enter(self, entries: list[tuple[int, int, int]]) -> None:
        """Into the block table; one that was handed out before keeps what it says."""
        assert self.block_table is not None
        if entries:
            rows, places, pages = torch.tensor(entries, dtype=torch.int64).to(self.block_table.device).T
            self.block_table = self.block_table.index_put((rows, places), pages.to(torch.int32))

    def _places(self) -> tuple[Tensor, Tensor]:
        assert self.block_table is not None
        at = (self.positions // self.page_size).clamp(max=self.max_pages - 1)
        pages = self.block_table.gather(1, at).to(torch.int64)
        if self.counts is not None:
            padding = torch.arange(pages.shape[1], device=pages.device) >= self.counts[:, None]
            pages = pages.masked_fill(padding, self.pages)
        return pages, self.positions % self.page_size

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        assert self.block_table is not None
        longest = max(map(len, self._held), default=0)
        table = self.block_table[:, :longest].to(torch.int64)
        keys, values = (
            x[layer][table].transpose(1, 2).flatten(2, 3) for x in (self.keys, self.values)
        )  # (B, pages, Hk, page_size, D) -> (B, Hk, pages · page_size, D)
        return keys, values

    def trim(self, lengths: Tensor) -> None:
        super().trim(lengths)
        gone: list[tuple[int, int, int]] = []
        for sequence, (used, held) in enumerate(zip(self._used, self._held, strict=True)):
            keep = -(-used // self.page_size)
            gone += [(sequence, place, self.pages) for place in range(keep, len(held))]
            self._free += held[keep:]
            del held[keep:]
        self._enter(gone)

    def release(self, sequence: int) -> None:
        """Empty one sequence: its pages are free."""
        lengths = self.lengths
        lengths[sequence] = 0
        self.trim(lengths)

    def reset(self) -> None:
        super().reset()
        self.trim(self.lengths)

"""A bool mask packed for the attention kernels: a bit for each query and key, and what is seen of each tile.

Made once per call, in one pass over the mask, and never for more heads, queries or keys than the mask has: dims that it is
broadcast over are read once. `wgsl/mask_words.wgsl` packs, `wgsl/mask_bits.wgsl` is how kernels read it.

    words:   of 32 keys of a query, the first key in the lowest bit
    states:  of every tile of 64 queries and 32 keys one bit each: is some of it seen, is all of it?

64 queries with their states are a block, so that a part of a mask that is larger than a binding is a range of blocks. The
words are an eighth of the mask's bytes, and the states a thousandth of the words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.storage import Region

QUERIES = 64  # of a block
_KEYS = 32  # of a word
_WORDS = 32  # described by a word of states


class PackedMask(NamedTuple):
    """Of a whole call, or of some of its batch entries, heads and queries."""

    words: Region  # (B, H, blocks, words of a block), each of the first three dims perhaps 1; int32
    first: int  # the query that the first block begins with
    queries: int  # of the mask, or 1
    keys: int  # of the mask, or 1

    @property
    def parameters(self) -> tuple[int, ...]:
        """The fields of ``mask_bits.wgsl``."""
        width, states = _widths(self.keys)
        some = min(self.queries, QUERIES) * width
        row, word = width * (self.queries > 1), int(self.keys > 1)
        of_batch, of_head, of_block, _ = self.words.broadcast_strides
        return of_batch, of_head, of_block, row, word, some, some + states, self.first

    def narrow(self, batch: int, batches: int, head: int, heads: int) -> PackedMask:
        """That of some batch entries and query heads."""
        words = self.words.narrow_broadcast(0, batch, batches).narrow_broadcast(1, head, heads)
        return self._replace(words=words)

    def rows(self, first: int, past: int) -> PackedMask:
        """What is read for queries [first, past): their blocks."""
        if self.queries == 1:
            return self
        block, blocks = first // QUERIES, -(-past // QUERIES)
        return self._replace(words=self.words.narrow_broadcast(2, block, blocks - block), first=block * QUERIES)

    def rows_at_once(self, most_bytes: int) -> int:
        """Queries whose blocks of one head fit into so many bytes, wherever they begin."""
        if self.queries == 1:
            return 1 << 31
        return max(most_bytes // (4 * self.words.shape[3]) - 1, 0) * QUERIES


def packed_mask(device: Device, given: Region) -> PackedMask:
    """Pack a mask ``(B, H, Sq, Sk)``, each dim perhaps 1, any strides."""
    mask = given.with_shape([1 if step == 0 else n for n, step in zip(given.shape, given.strides, strict=True)])
    mask = mask.with_shape(mask.shape, given.broadcast_strides)
    batch, heads, queries, keys = mask.shape
    width, states = _widths(keys)
    some = min(queries, QUERIES) * width  # where the states of a block begin; the last block may have fewer queries
    shape = (batch, heads, -(-queries // QUERIES), some + 2 * states)
    packed = PackedMask(device.empty(shape, torch.int32), 0, queries, keys)
    step = mask.strides[3]
    kernel = device.kernel("mask_words", neighbours=step == 1 and keys > 1, one_key=keys == 1)
    for source, target, before in _pieces(device, mask, packed.words):
        entries, blocks = target.shape[0] * target.shape[1], target.shape[2]
        of_source, of_target = source.broadcast_strides, target.broadcast_strides
        sizes = target.shape[1], blocks, source.shape[2], before, keys
        parameters = (*sizes, *of_source, width, some, states, *of_target[:3])
        device.run(kernel, entries * blocks * states, parameters, mask=source, words=target)
    return packed


def _widths(keys: int) -> tuple[int, int]:
    """Words of a query, and words of states of a block, of each of the two kinds."""
    width = -(-keys // _KEYS)
    return width, -(-width // _WORDS)


def _pieces(device: Device, mask: Region, words: Region) -> Iterator[tuple[Region, Region, int]]:
    """The mask, its words, and 0; or as many blocks of one head as a kernel may bind of both.

    Where that is not even one: some of its queries, and how many came before them.
    """
    if copies.fits(device, mask) and copies.fits(device, words):
        yield mask, words, 0
        return
    most = device.capabilities.binding_bytes - 512
    blocks = max(1, most // max(QUERIES * mask.shape[3], 4 * words.shape[3]))
    rows = min(blocks * QUERIES, max(1, most // mask.shape[3]))
    for b in range(mask.shape[0]):
        for h in range(mask.shape[1]):
            of_mask, of_words = (x.narrow(0, b, 1).narrow(1, h, 1) for x in (mask, words))
            for block in range(0, words.shape[2], blocks):
                count = min(blocks, words.shape[2] - block)
                past = min((block + count) * QUERIES, mask.shape[2])
                for row in range(block * QUERIES, past, rows):
                    source = of_mask.narrow(2, row, min(rows, past - row))
                    if not copies.fits(device, source):
                        source = copies.copied(device, source)
                    yield source, of_words.narrow(2, block, count), row - block * QUERIES

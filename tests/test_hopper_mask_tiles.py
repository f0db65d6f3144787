"""A mask as the Hopper kernels read it, made in Triton's interpreter: its bits, lists of blocks, and keys that are seen.

The lists of the backward are walked in test_hopper_interpreted.py; here are those of the forward.
"""

from __future__ import annotations

import direct_attention as direct
import pytest
import torch
from torch import Tensor

from headwise.config import settings

if not settings.triton_interpret:
    pytest.skip("for Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from headwise.backends.triton.gpu import Interpreter
from headwise.backends.triton.hopper.mask_tiles import HEADER, packed_mask

QUERIES, KEYS = 300, 400


def documents() -> Tensor:
    return torch.arange(QUERIES)[:, None] // 150 == torch.arange(KEYS) // 150


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5


MASKS = {
    "random": random(2, 2, QUERIES, KEYS),
    "causal": torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES),
    "documents": documents()[None, None].expand(1, 2, -1, -1),
    "padding": (torch.arange(KEYS) < torch.tensor([133, 400])[:, None])[:, None, None],
    "queries": random(QUERIES, 1),
    "heads": torch.tensor([True, False])[None, :, None, None],
}


def order_of(columns: Tensor) -> tuple[Tensor, Tensor]:
    """(word, bit) of columns of a block of 128: bits 2j and 2j + 1 of word t are columns 8j + 2t and 8j + 2t + 1."""
    return columns % 8 // 2, columns // 8 * 2 + columns % 2


@pytest.mark.parametrize(("block", "window"), [(128, (None, None)), (64, (None, 0)), (128, (60, 3))])
@pytest.mark.parametrize("name", MASKS)
def test_bits_and_lists_of_a_forward(name, block, window):
    mask = MASKS[name]
    band = tuple(-1 if side is None else side for side in window)
    packed = packed_mask(Interpreter(False), mask, QUERIES, KEYS, band, (128, block))
    full = mask.expand(2, 2, QUERIES, KEYS)
    visible = full & direct.visible_keys(QUERIES, KEYS, window=window)
    bits_batch, bits_head, bits_block, bits_row, lists_batch, lists_head, lists_tile, seen_at = packed.steps
    word, bit = order_of(torch.arange(KEYS) % 128)
    for b, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
        at = b * bits_batch + h * bits_head + torch.arange(KEYS) // 128 * bits_block + word
        words = packed.bits[at + torch.arange(QUERIES)[:, None] * bits_row]
        assert torch.equal((words >> bit) & 1 != 0, full[b, h])

        lists = packed.lists[b * lists_batch + h * lists_head :]
        anybody = visible[b, h].any(0)
        if name not in ("padding", "heads") or window == (None, None):  # one row for all knows nothing of the band
            assert torch.equal((lists[seen_at + torch.arange(KEYS) // 128 * 4 + word] >> bit) & 1 != 0, anybody)
        for tile in range(-(-QUERIES // 128)):
            rows = visible[b, h, tile * 128 : tile * 128 + 128]
            parts, whole = lists[tile * lists_tile : tile * lists_tile + HEADER].tolist()
            entries = lists[tile * lists_tile + HEADER :][: parts + whole].tolist()
            numbers = [entry >> 1 for entry in entries]
            assert len(set(numbers)) == len(numbers) > 0
            assert numbers[:parts] == sorted(numbers[:parts], reverse=True)
            for number, columns in enumerate(rows.split(block, 1)):
                if columns.any():
                    assert number in numbers
                if number in numbers[parts:]:
                    assert columns.all()
                    assert columns.shape[1] == block
                if columns.all() and columns.shape[1] == block:
                    assert number in numbers[parts:]
            if name == "random" and rows.any():
                hidden = [not anybody[n * block : n * block + block].all() for n in numbers]
                assert [bool(entry & 1) for entry in entries] == hidden

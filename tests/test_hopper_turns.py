"""Do tiles of a masked Hopper backward that take turns wait for each other? A simulation with the lists of real masks.

A program works on one tile of keys after the other, step by step; what a step adds to a block of dQ has to wait for the tile
before, and passing a turn on takes a part of a step. On an H200 blocks in another order once made a causal mask ten times
slower than the same work without it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from headwise.config import settings

if not settings.triton_interpret:
    pytest.skip("for Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from headwise.backends.triton.gpu import Interpreter
from headwise.backends.triton.hopper.attention_backward import _heads_together
from headwise.backends.triton.hopper.mask_tiles import HEADER, packed_mask

PROGRAMS, HEADS, LENGTH, KEYS, ROWS = 132, 128, 1024, 128, 64
PASSING = 0.6  # of a step: 1.3 of 2.2 µs at head dim 128


def lists_of(mask: Tensor, right: int, upwards: bool) -> list[list[tuple[int, int]]]:
    """(block, turn) of the steps of every tile."""
    packed = packed_mask(
        Interpreter(False), mask, LENGTH, LENGTH, (-1, right), (KEYS, ROWS), keys_down=True, upwards=upwards
    )
    per_tile = packed.steps[6]
    found = []
    for tile in range(LENGTH // KEYS):
        count = int(packed.lists[tile * per_tile])
        entries = packed.lists[tile * per_tile + HEADER :][:count].tolist()
        found.append([(entry & 0x7FFF, entry >> 16) for entry in entries])
    return found


def tickets(tiles: int, together: int, upwards: bool) -> Iterable[tuple[int, int]]:
    """(head, tile), as `_tile_of` has them."""
    for ticket in range(tiles * HEADS):
        first = ticket // (together * tiles) * together
        within = ticket % (together * tiles)
        width = min(together, HEADS - first)
        number = within // width
        yield first + within % width, tiles - 1 - number if upwards else number


def makespan(lists: list[list[tuple[int, int]]], right: int, upwards: bool) -> float:
    """Steps until all is done. A program draws its next ticket when the last two steps of a tile are loaded."""
    together = _heads_together(True, -1, right, len(lists), LENGTH // ROWS, HEADS, PROGRAMS)
    free = [0.0] * PROGRAMS
    draws = [(0.0, 0, program) for program in range(PROGRAMS)]
    passed: dict[tuple[int, int], tuple[int, float]] = {}
    for order, (head, tile) in enumerate(tickets(len(lists), together, upwards), PROGRAMS):
        _, _, program = heapq.heappop(draws)
        now = free[program]
        for block, turn in lists[tile]:
            turns, since = passed.get((head, block), (0, 0.0))
            assert turns == turn
            now = max(now + 1, since)
            passed[head, block] = turn + 1, now + PASSING
        free[program] = now
        heapq.heappush(draws, (now - 2, order, program))
    return max(free)


POSITION = torch.arange(LENGTH)
MASKS = {
    "all": torch.ones(LENGTH, LENGTH, dtype=torch.bool),
    "random": torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.9,
    "padding": (POSITION < LENGTH - 300)[None, :],
    "causal": POSITION[:, None] >= POSITION,
    "anti-causal": POSITION[:, None] <= POSITION,
    "window": (POSITION[:, None] - POSITION).abs() < 300,
    "documents": POSITION[:, None] // 256 == POSITION // 256,
    "causal in documents": (POSITION[:, None] // 700 == POSITION // 700) & (POSITION[:, None] >= POSITION),
}


@pytest.mark.parametrize("right", [-1, 0], ids=["", "under a causal band"])
@pytest.mark.parametrize("name", MASKS)
def test_turns_cost_little(name, right):
    upwards = right >= 0
    lists = lists_of(MASKS[name], right, upwards)
    work = HEADS * sum(map(len, lists)) / PROGRAMS
    assert makespan(lists, right, upwards) <= 1.25 * work


def test_an_order_that_serialises_is_found():
    """Blocks that need the mask first, as they lie on a diagonal: every tile then waits for the end of the one before."""
    lists = lists_of(MASKS["causal"], -1, False)
    for steps in lists:
        steps[:] = steps[-2:] + steps[:-2]
    assert makespan(lists, -1, False) > 2 * HEADS * sum(map(len, lists)) / PROGRAMS

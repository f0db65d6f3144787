"""Context parallelism: gloo processes against the oracle, and the geometry of blocks in one process."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from headwise import reference as oracle
from headwise import testing
from headwise.distributed.blocks import Options, Partial, Plan, pieces, reach
from headwise.reference.attention import visible_keys

RANK = Path(__file__).with_name("distributed_rank.py")
SECONDS = 120


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_agree_with_the_oracle(ranks, tmp_path):
    """`distributed_rank.main` in every process: attention with gradients, decoding, shards, refusals."""
    logs = [tmp_path / f"rank{rank}" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-W", "error", str(RANK), str(rank), str(ranks), str(tmp_path / "meeting")]
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = "\n".join(f"--- rank {rank}\n{log.read_text()}" for rank, log in enumerate(logs))
    assert [process.returncode for process in processes] == [0] * ranks, said
    assert said.count("all checks ran") == ranks, said


def _wait(processes):
    """Until all are done, one failed, or the time is over. The others of one that failed would wait for it."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes):
            time.sleep(2)  # for what the others have to say
            return
        time.sleep(0.1)


def _random_plan(draw):
    keys = draw.randrange(0, 30)
    sides = [draw.choice([-1, 0, draw.randrange(12)]) for _ in range(2)]
    return Plan(0, draw.randrange(1, 6), draw.randrange(0, 30), keys, draw.choice(["zigzag", "contiguous"]), *sides)


def test_pieces_are_what_can_be_seen():
    """Every visible pair of a query and a key is in one piece, and no other pair in any."""
    draw = random.Random(0)
    for _ in range(600):
        plan = _random_plan(draw)
        for rank in range(plan.ranks):
            queries = [p for a, b in plan.query_segments(rank) for p in range(a, b)]
            for owner in range(plan.ranks):
                keys = [j for a, b in plan.key_segments(owner) for j in range(a, b)]
                seen = torch.zeros(len(queries), len(keys), dtype=torch.int)
                for rows, columns, (left, right) in pieces(plan, plan.query_segments(rank), plan.key_segments(owner)):
                    part = seen[rows, columns]
                    part += visible_keys(
                        *part.shape, part.shape[0], 0, part.shape[1], -1 if left is None else left,
                        -1 if right is None else right, part.device,
                    )  # fmt: skip
                    assert all(side is None or side >= 0 for side in (left, right))
                expected = [
                    [(plan.left < 0 or j >= p - plan.left) and (plan.right < 0 or j <= p + plan.right) for j in keys]
                    for p in queries
                ]
                assert torch.equal(seen, torch.tensor(expected, dtype=torch.int).reshape(seen.shape)), plan


def test_blocks_go_no_further_than_they_are_seen():
    assert reach(Plan(0, 4, 40, 40, "contiguous", 3, 0)) == (1, 1, 1, 0)
    assert reach(Plan(0, 4, 40, 40, "contiguous", 12, 0)) == (2, 2, 1, 0)
    assert reach(Plan(0, 4, 40, 40, "contiguous", -1, 0)) == (3, 2, 1, 0)
    assert reach(Plan(0, 4, 40, 40, "zigzag", -1, 0)) == (3, 3, 3, 3)
    assert reach(Plan(0, 4, 40, 40, "contiguous", 0, 0)) == (0, 0, 0, 0)


def test_partial_results_are_float32():
    """Of bfloat16 inputs, over many blocks, before the one rounding at the end: as close as float32 attention is."""
    maker = testing.Maker(torch.bfloat16, torch.device("cpu"), 1)
    q, k, v = maker.normal(1, 4, 96, 16), maker.normal(1, 2, 96, 16), maker.normal(1, 2, 96, 16)
    plan = Plan(0, 1, 96, 96, "contiguous", -1, 0)
    partial = Partial(q, 16, None)
    for start in range(0, 96, 6):
        block = (plan.key_segments(0)[0]._replace(start=start, stop=start + 6),)
        todo = pieces(plan, plan.query_segments(0), block)
        partial.add(todo, k[:, :, start : start + 6], v[:, :, start : start + 6], Options(0.25, None, True, None))
    truth, plain = (
        oracle.attention(*(x.to(to) for x in (q, k, v)), causal=True)[0] for to in (torch.float64, torch.float32)
    )
    error = testing.compare("out", partial.out, truth, plain)
    assert error.ok, error

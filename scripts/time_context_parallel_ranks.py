"""What each rank of a context-parallel call computes, timed one rank after the other on one GPU: a row per rank as CSV.

``python scripts/time_context_parallel_ranks.py results.csv [--tokens 1048576] [--seconds 45]``

No rank sends anything here: its queries meet all keys as the method "gather" has them, or block by block as in the ring. The
cost model of `headwise.distributed.costs` counts the pairs of a query and a key; the rate is what those pairs took.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.distributed import costs
from headwise.distributed.blocks import Gradients, Options, Partial, Plan, Region, Scores, pieces
from headwise.distributed.shards import Segment, segments, taken

HEADS, KEY_HEADS, DIM = 8, 1, 128
COLUMNS = ("device", "tokens", "ranks", "layout", "method", "direction", "rank", "seconds", "pairs", "tflops")


def plan_of(tokens: int, ranks: int, layout: str, rank: int) -> Plan:
    parts = tuple(segments(tokens, r, ranks, layout) for r in range(ranks))
    whole = Segment(0, tokens)
    return Plan(rank, parts, parts, -1, 0, (Region(whole, whole),))


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    found = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return found, time.perf_counter() - begun


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, merges: bool) -> Partial:
    options = Options(DIM**-0.5, None, True, None)
    result = Partial(plan, q, DIM, None, Scores(), options, merges)
    blocks = plan.of_k if merges else ((Segment(0, plan.keys),),)
    for block in blocks:
        result.add(pieces(plan, plan.of_q[plan.rank], block), *(taken(x, block, 2) if merges else x for x in (k, v)))
    return result


def backward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, result: Partial, dk: Tensor, dv: Tensor) -> None:
    options = Options(DIM**-0.5, None, True, None)
    gradients = Gradients(q, result.out, result.lse, result.out, None, Scores(), options, False, merges=False)
    gradients.add(pieces(plan, plan.of_q[plan.rank], (Segment(0, plan.keys),)), k, v, dk, dv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--seconds", type=float, default=45.0, help="stop after that many")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(1, h, options.tokens, DIM, device=device, dtype=dtype) for h in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    end = time.perf_counter() + options.seconds
    sizes = costs.Sizes(1, HEADS, KEY_HEADS, DIM, DIM, q.element_size())
    todo = [("gather", "zigzag", 8, range(8)), ("gather", "zigzag", 64, range(0, 64, 4)),
            ("gather", "contiguous", 8, (0, 4, 7)), ("ring", "zigzag", 64, (31, 31))]  # fmt: skip  # the first compiles
    with options.path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        warm = plan_of(options.tokens, 64, "zigzag", 1)
        mine = taken(q, warm.of_q[1], 2)
        backward(warm, mine, k, v, forward(warm, mine, k, v, False), dk, dv)  # compiles
        for method, layout, ranks, which in todo:
            for rank in which:
                plan = plan_of(options.tokens, ranks, layout, rank)
                mine = taken(q, plan.of_q[rank], 2)
                pairs = costs.cost(method, sizes, plan, False).pairs
                directions = ["forward"]
                if method == "gather" and layout == "zigzag" and rank % (7 if ranks == 8 else 32) == 0:
                    directions.append("backward")
                for direction in directions:
                    if time.perf_counter() > end:
                        return
                    if direction == "forward":
                        found, seconds = timed(partial(forward, plan, mine, k, v, method == "ring"), device)
                    else:
                        _, seconds = timed(partial(backward, plan, mine, k, v, found, dk, dv), device)
                    flops = 4.0 * pairs * DIM * (costs.BACKWARD if direction == "backward" else 1.0)
                    rate = flops / seconds / 1e12
                    rows.writerow((name, options.tokens, ranks, layout, method, direction, rank, seconds, pairs, rate))
                    file.flush()


if __name__ == "__main__":
    main()

"""What each rank of a context-parallel call computes, timed one rank after the other on one GPU: a row per rank as CSV.

``python scripts/time_context_parallel_ranks.py results.csv [--tokens 1048576] [--seconds 45]``

No rank sends anything here: its queries meet all keys as the method "gather" has them, or block by block as in the ring. The
cost model of `headwise.distributed.costs` counts the pairs of a query and a key; the rate is what those pairs took, and
``modelled`` the seconds that the model says for them.

results  "rounded": in the dtype of the inputs, which the Hopper kernels write. "float32": of 16-bit inputs, for what is
         merged or summed over ranks; on a GPU with Hopper kernels the plain ones compute it. Rows of both for a rank say
         what the model's slowdown of such results should be

Every row is in the file when it is measured; the shortest come first.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.distributed import costs
from headwise.distributed.blocks import Gradients, Options, Partial, Plan, Region, Scores, pieces
from headwise.distributed.shards import Segment, segments, taken

HEADS, KEY_HEADS, DIM = 8, 1, 128
COLUMNS = (
    "device", "tokens", "ranks", "layout", "method", "direction", "results", "rank", "seconds", "modelled", "pairs",
    "tflops",
)  # fmt: skip


class Job(NamedTuple):
    method: str
    layout: str
    ranks: int
    which: tuple[int, ...]
    direction: str
    results: str


SOME, FEW = tuple(range(0, 64, 4)), (0, 31, 63)
JOBS = (
    Job("gather", "zigzag", 64, SOME, "forward", "rounded"),
    Job("gather", "zigzag", 64, FEW, "forward", "float32"),
    Job("gather", "zigzag", 64, FEW, "backward", "float32"),
    Job("gather", "zigzag", 64, FEW, "backward", "rounded"),
    Job("ring", "zigzag", 64, FEW, "forward", "float32"),
    Job("gather", "zigzag", 8, tuple(range(8)), "forward", "rounded"),
    Job("gather", "zigzag", 8, (0, 7), "backward", "float32"),
    Job("gather", "contiguous", 8, (0, 4, 7), "forward", "rounded"),
)


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


def forward(job: Job, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    options = Options(DIM**-0.5, None, True, None)
    result = Partial(plan, q, DIM, None, Scores(), options, job.results == "float32")
    blocks = plan.of_k if job.method == "ring" else ((Segment(0, plan.keys),),)
    for block in blocks:
        mine = (taken(x, block, 2) if job.method == "ring" else x for x in (k, v))
        result.add(pieces(plan, plan.of_q[plan.rank], block), *mine)
    return result


def backward(
    job: Job, plan: Plan, q: Tensor, k: Tensor, v: Tensor, result: Partial, dk: Tensor, dv: Tensor
) -> None:  # fmt: skip
    options, out = Options(DIM**-0.5, None, True, None), result.out.to(q.dtype)
    summed = job.results == "float32"
    gradients = Gradients(q, out, result.lse, out, None, Scores(), options, False, summed)
    gradients.add(pieces(plan, plan.of_q[plan.rank], (Segment(0, plan.keys),)), k, v, dk, dv)


def modelled(job: Job, sizes: costs.Sizes, found: costs.Cost, machine: costs.Machine) -> float:
    """Seconds of the arithmetic alone."""
    slowdown = machine.unrounded_slowdown if job.results == "float32" and sizes.itemsize < 4 else 1.0
    return (
        found.flops(sizes, False) * (costs.BACKWARD if job.direction == "backward" else 1.0) * slowdown / machine.flops
    )


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
    end, compiled = time.perf_counter() + options.seconds, set()
    sizes = costs.Sizes(1, HEADS, KEY_HEADS, DIM, DIM, q.element_size())
    machine = costs.machine_of(device, True)

    def prepared(job: Job, plan: Plan) -> Callable[[], Any]:
        mine = taken(q, plan.of_q[plan.rank], 2)
        if job.direction == "forward":
            return partial(forward, job, plan, mine, k, v)
        return partial(backward, job, plan, mine, k, v, forward(job, plan, mine, k, v), dk, dv)

    with options.path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for job in JOBS:
            for rank in job.which:
                plan = plan_of(options.tokens, job.ranks, job.layout, rank)
                run, kind = prepared(job, plan), (job.method, job.direction, job.results)
                if kind not in compiled:
                    compiled.add(kind)
                    run()
                _, seconds = timed(run, device)
                found = costs.cost(job.method, sizes, plan, False)
                flops = found.flops(sizes, False) * (costs.BACKWARD if job.direction == "backward" else 1.0)
                rows.writerow(
                    (
                        name, options.tokens, job.ranks, job.layout, job.method, job.direction, job.results, rank, seconds,
                        modelled(job, sizes, found, machine), found.pairs, flops / seconds / 1e12,
                    )
                )  # fmt: skip
                file.flush()
                if time.perf_counter() > end:
                    return


if __name__ == "__main__":
    main()

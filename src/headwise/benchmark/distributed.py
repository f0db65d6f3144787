"""``headwise bench --suite distributed``: context parallelism over gloo processes on this machine.

Bytes are those that the kernel has counted on the TCP connections of a rank (Linux); balance is the visible pairs of the
busiest rank over the mean; memory is the most that the busiest rank holds beyond its inputs. Each row says what is required
of it and whether that holds. Processes share the machine's cores, so seconds say little: a rank computes while others wait
for a core.
"""

from __future__ import annotations

import csv
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from headwise.benchmark.memory import peak_extra
from headwise.distributed import (
    context_parallel_attention,
    context_parallel_decode,
    costs,
    ring,
    shard,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_linear_cross_entropy,
)
from headwise.distributed.blocks import Gradients, Partial, Plan, Region
from headwise.distributed.groups import Exchange
from headwise.distributed.shards import Segment, segments

HEADS, KEY_HEADS, DIM = 8, 4, 32
WINDOW = 128
TIMEOUT = timedelta(seconds=120)
EXCESS = 0.05  # of bytes, over or under what the model counts
BALANCE = 1.1  # of the busiest rank over the mean, where shards are to be balanced
GROWTH = 1.15  # of a ring's memory on a rank when ranks and sequence grow together


class Job(NamedTuple):
    method: str
    layout: str  # "classes": of a vocabulary
    window: int | None
    backward: bool


JOBS = (
    *(Job(method, "zigzag", None, backward) for method in costs.METHODS for backward in (False, True)),
    *(Job(method, "contiguous", WINDOW, False) for method in costs.METHODS),
    Job("ring", "contiguous", None, False),
    *(Job("ring", "zigzag", WINDOW, backward) for backward in (False, True)),
    *(Job(name, "contiguous", None, False) for name in ("decode", "decode, many")),
    *(Job(name, "classes", None, True) for name in ("loss", "linear loss")),
)
SEQUENCES = {"decode": 64, "decode, many": 1024}  # of which each decodes a token
CLASSES, HIDDEN = 32, 64  # of a rank; of a token


@dataclass(frozen=True)
class Row:
    ranks: int
    tokens: int
    method: str
    layout: str
    window: int | None
    backward: bool
    sent: int  # bytes, of the rank that sent the most
    modelled: int
    balance: float
    memory: int  # bytes
    seconds: float
    requirement: str = ""
    outcome: str = ""  # "met" or "missed"

    @property
    def excess(self) -> float:
        return self.sent / self.modelled - 1 if self.modelled else 0.0


def measure(ranks: int, tokens_per_rank: int, repeats: int) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows of one group of processes, and what each rank of it did when, in a ring (`timeline`)."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "headwise.benchmark.distributed", str(rank), str(ranks), folder,
                 str(tokens_per_rank), str(repeats)],
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            codes = [process.wait(timeout=20 * TIMEOUT.total_seconds()) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError(f"of {ranks} processes, some failed: exit codes {codes}")
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    rows = [_row(ranks, tokens_per_rank * ranks, job, [one["jobs"][n] for one in told]) for n, job in enumerate(JOBS)]
    return rows, [one["timeline"] for one in told]


def _row(ranks: int, tokens: int, job: Job, of_ranks: list[dict[str, Any]]) -> Row:
    busiest = max(of_ranks, key=lambda one: one["sent"])
    pairs = [one["pairs"] for one in of_ranks]
    rounds = zip(*(one["seconds"] for one in of_ranks), strict=True)
    return Row(
        ranks, tokens, *job, busiest["sent"], busiest["modelled"], max(pairs) * len(pairs) / max(sum(pairs), 1),
        max(one["memory"] for one in of_ranks), statistics.median(map(max, rounds)),
    )  # fmt: skip


def judged(rows: list[Row]) -> list[Row]:
    """The rows with what is required of each; a ring's memory is compared with that of the fewest ranks."""
    fewest = min(row.ranks for row in rows)
    of_fewest = {(row.method, row.layout, row.window, row.backward): row for row in rows if row.ranks == fewest}
    found = []
    for row in rows:
        wanted = {f"within {EXCESS:.0%} of the model's bytes": abs(row.excess) <= EXCESS}
        if row.layout == "zigzag" and row.window is None:
            wanted[f"busiest rank ≤ {BALANCE} of the mean"] = row.balance <= BALANCE
        if row.method == "ring" and row.ranks > fewest:
            before = of_fewest[row.method, row.layout, row.window, row.backward]
            wanted[f"memory ≤ {GROWTH} of that of {fewest} ranks"] = row.memory <= GROWTH * before.memory
        outcome = "met" if all(wanted.values()) else "missed"
        found.append(replace(row, requirement="; ".join(wanted), outcome=outcome))
    return found


def write_csv(path: Path, rows: list[Row], device: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["device", *(field.name for field in fields(Row))])
        writer.writerows([device, *asdict(row).values()] for row in rows)


# --------------------------------------------------------------------------------------------------- in every process


def sent_bytes() -> int:
    """By all TCP connections of this process, as the kernel has counted them. Linux."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile, or no TCP
            continue
        total += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
    return total


def counted(run: Callable[[], object]) -> int:
    """The bytes that this process sends in a call that every process makes."""
    dist.barrier()
    before = sent_bytes()
    run()
    dist.barrier()
    time.sleep(0.05)  # until the last of it is acknowledged
    return sent_bytes() - before


def _rank(rank: int, ranks: int, folder: Path, tokens_per_rank: int, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    group, tokens = dist.group.WORLD, tokens_per_rank * ranks
    assert group is not None
    found = {"jobs": [_measured(rank, ranks, tokens, repeats, job, group) for job in JOBS]}
    (folder / f"{rank}.json").write_text(json.dumps({**found, "timeline": timeline(rank, ranks, tokens, group)}))
    dist.barrier()
    dist.destroy_process_group()


def _inputs(tokens: int, layout: str, group: dist.ProcessGroup) -> list[torch.Tensor]:
    whole = (torch.randn(1, heads, tokens, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    return [shard(x, group, dim=2, layout=layout).requires_grad_() for x in whole]


class Measured(NamedTuple):
    call: Callable[[], None]
    smallest: Callable[[], None]  # the same with next to nothing to send: what the comparison of arguments takes
    cost: costs.Cost


def _measured(rank: int, ranks: int, tokens: int, repeats: int, job: Job, group: dist.ProcessGroup) -> dict[str, Any]:
    make = _attention if job.method in costs.METHODS else _decode if job.method in SEQUENCES else _loss
    call, smallest, cost = make(rank, ranks, tokens, job, group)
    for run in (smallest, call):
        run()
    told = counted(smallest)
    sent, seconds = counted(call) - told, []
    for _ in range(repeats):
        dist.barrier()
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return {
        "sent": sent, "modelled": cost.sent, "pairs": cost.pairs, "seconds": seconds, "memory": peak_extra(call, "cpu"),
    }  # fmt: skip


def _attention(rank: int, ranks: int, tokens: int, job: Job, group: dist.ProcessGroup) -> Measured:
    q, k, v = _inputs(tokens, job.layout, group)
    parts = tuple(segments(tokens, r, ranks, job.layout) for r in range(ranks))
    whole, left = Segment(0, tokens), -1 if job.window is None else job.window
    plan = Plan(rank, parts, parts, left, 0, (Region(whole, whole),))
    few = torch.randn(1, 1, 1, 1)

    def call() -> None:
        with torch.set_grad_enabled(job.backward):
            out = context_parallel_attention(
                q, k, v, group, method=job.method, layout=job.layout, causal=True, window=(job.window, None)
            )
            assert isinstance(out, torch.Tensor)
            if job.backward:
                out.sum().backward()

    def smallest() -> None:
        context_parallel_attention(few, few, few, group, method="gather", layout="contiguous")

    return Measured(call, smallest, costs.cost(job.method, costs.Sizes.of(q, k, v), plan, job.backward))


def _decode(rank: int, ranks: int, tokens: int, job: Job, group: dist.ProcessGroup) -> Measured:
    """Of sequences with 16 positions on each rank."""
    count, room = SEQUENCES[job.method], 16
    lengths = torch.full((count,), room * ranks)

    def run(heads: int, dim: int) -> Callable[[], None]:
        q, cache = torch.randn(count, heads, dim), torch.randn(count, min(heads, KEY_HEADS), room, dim)

        def call() -> None:
            context_parallel_decode(q, cache, cache, lengths, group)

        return call

    rows, width = count * HEADS, DIM + 1
    way = costs.way_of_decode(rows, width, 4, ranks, costs.CPU)
    found = costs.of_decode(rows, width, 4, rank, ranks, way)
    return Measured(run(HEADS, DIM), run(1, 1), found._replace(pairs=rows * room))


def _loss(rank: int, ranks: int, tokens: int, job: Job, group: dist.ProcessGroup) -> Measured:
    linear = job.method == "linear loss"

    def run(rows: int) -> Callable[[], None]:
        targets = torch.arange(rows) % (CLASSES * ranks)
        hidden = torch.randn(rows, HIDDEN if linear else CLASSES).requires_grad_()
        weight = torch.randn(CLASSES, HIDDEN).requires_grad_()

        def call() -> None:
            if linear:
                vocabulary_parallel_linear_cross_entropy(hidden, weight, targets, group).backward()
            else:
                vocabulary_parallel_cross_entropy(hidden, targets, group).backward()

        return call

    found = costs.of_loss(tokens, 2, HIDDEN if linear else 0, rank, ranks, True)
    return Measured(run(tokens), run(1), found._replace(pairs=tokens * CLASSES))


# ------------------------------------------------------------------------------------------------ what overlaps with what


def timeline(rank: int, ranks: int, tokens: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """``(kind, start, stop)`` in seconds of one ring, forward and backward: computing, a message on its way, waiting."""
    events: list[tuple[str, float, float]] = []

    class Watched(Exchange):
        """A thread waits for the messages, to see when the last has come."""

        def start(self) -> None:
            super().start()
            begun, works = time.time(), list(self._works)

            def watch() -> None:
                for work in works:
                    work.wait()
                if works:
                    events.append(("sending", begun, time.time()))

            self._watcher = threading.Thread(target=watch)
            self._watcher.start()

        def wait(self) -> None:
            begun = time.time()
            if hasattr(self, "_watcher"):
                self._watcher.join()
            self._kept.clear()
            events.append(("waiting", begun, time.time()))

    def noted(add: Any) -> Any:
        def run(*args: Any) -> None:
            begun = time.time()
            add(*args)
            events.append(("computing", begun, time.time()))

        return run

    q, k, v = _inputs(tokens, "zigzag", group)
    real = Exchange, Partial.add, Gradients.add
    setattr(ring, "Exchange", Watched)  # noqa: B010  # a stand-in for the time of two calls
    setattr(Partial, "add", noted(real[1]))  # noqa: B010
    setattr(Gradients, "add", noted(real[2]))  # noqa: B010
    try:
        for _ in range(2):  # the first warms up
            events.clear()
            dist.barrier()
            begun = time.time()
            out = context_parallel_attention(q, k, v, group, method="ring", causal=True)
            assert isinstance(out, torch.Tensor)
            middle = time.time()
            out.sum().backward()
    finally:
        setattr(ring, "Exchange", real[0])  # noqa: B010
        setattr(Partial, "add", real[1])  # noqa: B010
        setattr(Gradients, "add", real[2])  # noqa: B010
    return {"begun": begun, "middle": middle, "events": list(events)}


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))

"""``headwise tune``: measure which tiles the attention kernels should use on this GPU, and write them to a table.

Headwise comes with tables and never searches in your process. This command is for a GPU that they were not measured on.
Use the file it writes by setting HEADWISE_TILES to its path.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from headwise.backends.triton import tile_sizes
from headwise.backends.triton.gpu import facts
from headwise.backends.triton.tile_sizes import AttentionTile
from headwise.benchmark import tuning
from headwise.benchmark.tuning import Outcome, ShapeClass
from headwise.cli import _terminal, env

_DEFAULT_JOBS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", action="append", help=f"only this kernel, of: {', '.join(tuning.KERNELS)}")
    parser.add_argument("--head-dim", action="append", type=int, help="only this head dim (default: 64, 128 and 256)")
    parser.add_argument("--bits", action="append", type=int, choices=tuning.BITS, help="only this width of a number")
    parser.add_argument("--quick", action="store_true", help="only tiles one step away from those in use now")
    parser.add_argument(
        "--all", action="store_true", help="every tile that may fit, instead of climbing from those in use"
    )
    parser.add_argument("--minutes", type=float, metavar="N", help="begin no new shape class after this long")
    parser.add_argument(
        "--jobs",
        type=int,
        default=_DEFAULT_JOBS,
        help="processes that compile; 0: none but this one (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the table, kept and added to (default: tiles-<architecture>.json)"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    wanted = _classes(args)
    if not torch.cuda.is_available():
        raise _terminal.UsageError("it measures on a GPU, and PyTorch sees none here")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = facts(torch.cuda.current_device())
    architecture = gpu.arch
    path: Path = args.out or Path(f"tiles-{architecture}.json")
    measured_on = _measured_on()
    outcomes: list[Outcome] = []
    started = time.monotonic()
    with _compilers(args.jobs) as compilers, _progress(args.json) as progress:
        task = progress.add_task("", total=None)
        for done, of in enumerate(wanted):
            if args.minutes is not None and time.monotonic() - started > 60 * args.minutes:
                break
            progress.update(task, description=f"{of} (class {done + 1} of {len(wanted)})", completed=0)
            bench = tuning.CallBench(of, device)
            outcome = tuning.tune_class(
                of,
                bench,
                tuning.grid(of, gpu.shared_memory, bench.current().bf16x3),
                tuning.QUICK if args.quick else tuning.EVERYTHING if args.all else tuning.CLIMB,
                lambda of, tiles: _screened(of, tiles, compilers),
                lambda: progress.advance(task),
            )
            outcomes.append(outcome)
            try:  # after every class: an interrupted run keeps its results
                tuning.write_table(path, architecture, measured_on, _rows([outcome]))
            except (OSError, ValueError) as error:
                raise _terminal.UsageError(f"--out {path}: {error}") from error
            del bench
            torch.cuda.empty_cache()
    if args.json:
        _terminal.print_json(_as_json(outcomes, architecture, measured_on, path))
    else:
        _print(outcomes, len(wanted), path)
    return 0


def _classes(args: argparse.Namespace) -> list[ShapeClass]:
    kernels = args.kernel or list(tuning.KERNELS)
    for kernel in kernels:
        if kernel not in tuning.KERNELS:
            raise _terminal.UsageError(f"--kernel {kernel} is not known; there are: {', '.join(tuning.KERNELS)}")
    head_dims = args.head_dim or list(tuning.COMMON_HEAD_DIMS)
    wanted = tuning.classes(kernels, head_dims, args.bits or tuning.BITS)
    if not wanted:
        known = sorted({d for kernel in kernels for d in tuning.KERNELS[kernel]})
        raise _terminal.UsageError(
            f"--head-dim {', '.join(map(str, head_dims))} has no class; there are: {', '.join(map(str, known))}"
        )
    return wanted


@contextmanager
def _compilers(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    if jobs <= 0:
        yield None
        return
    # "spawn": CUDA does not work in a forked process.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _screened(
    of: ShapeClass, tiles: list[AttentionTile], compilers: ProcessPoolExecutor | None
) -> tuple[list[AttentionTile], Counter[str]]:
    """The tiles that compile and run, and why the others do not; without compilers, all of them."""
    failed: Counter[str] = Counter()
    if compilers is None:
        return tiles, failed
    try:
        futures: dict[AttentionTile, Future[str]] = {
            tile: compilers.submit(tuning.try_small, of, tile) for tile in tiles
        }
        working = []
        for tile, future in futures.items():
            reason = future.result()
            if reason:
                failed[reason] += 1
            else:
                working.append(tile)
        return working, failed
    except BrokenProcessPool:
        # It is not known which tile killed the process, so the measuring process must not try any of them.
        raise _terminal.UsageError(
            f"a compiling process died at {of}; --jobs 0 tries the tiles in this process, one by one"
        ) from None


def _measured_on() -> str:
    facts = env.describe()
    versions = facts["versions"]
    gpu = facts["gpus"][0]["name"] if facts["gpus"] else "unknown"
    return f"{gpu}, Triton {versions['triton']}, PyTorch {versions['torch']}, {datetime.now(UTC).date().isoformat()}"


def _progress(quiet: bool) -> Progress:
    columns = (
        BarColumn(bar_width=30),
        TextColumn("{task.completed:.0f} tiles"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    disabled = quiet or not sys.stderr.isatty()
    return Progress(*columns, console=_terminal.progress_console(), transient=True, disable=disabled)


def _rows(outcomes: list[Outcome]) -> tile_sizes.Table:
    rows: tile_sizes.Table = {}
    for outcome in outcomes:
        rows.setdefault(outcome.of.kernel, {})[outcome.of.row] = tuning.table_row(outcome.best)
    return rows


def _print(outcomes: list[Outcome], wanted: int, path: Path) -> None:
    console = _terminal.console()
    table = _terminal.table("kernel", "class", "tile before", "tile now", "ms", "faster", "tried", "skipped")
    for column in (4, 5, 6, 7):
        table.columns[column].justify = "right"
    skipped: Counter[str] = Counter()
    for o in outcomes:
        skipped += o.skipped
        table.add_row(
            o.of.kernel,
            o.of.row,
            _brief(o.current),
            "the same" if o.best == o.current else Text(_brief(o.best), "bold green"),
            f"{o.best_s * 1e3:.3g}",
            f"{o.gain:.2f}×" if o.best != o.current else "",
            str(o.tried),
            str(o.skipped.total()),
        )
    console.print(table)
    console.print(Text("a tile: queries × keys, warps, stages", "dim"))
    for reason, count in skipped.most_common():
        console.print(Text(f"– {count} tiles skipped: {reason}", "dim"))
    if len(outcomes) < wanted:
        console.print(
            Text(f"{wanted - len(outcomes)} of {wanted} classes were not begun: --minutes was over", "yellow")
        )
    if outcomes:
        console.print(f"wrote {path}; to use it: HEADWISE_TILES={path}")


def _brief(tile: AttentionTile) -> str:
    limit = f", {tile.registers} registers" if tile.registers else ""
    twice = ", two passes" if tile.passes == 2 else ""
    return f"{tile.queries} × {tile.keys}, {tile.warps}, {tile.stages}{limit}{twice}"


def _as_json(outcomes: list[Outcome], architecture: str, measured_on: str, path: Path) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "measured_on": measured_on,
        "written": str(path) if outcomes else None,
        "use": f"HEADWISE_TILES={path}",
        "classes": [
            {
                "kernel": o.of.kernel,
                "class": o.of.row,
                "before": o.current._asdict(),
                "now": o.best._asdict(),
                "ms_before": o.current_s * 1e3,
                "ms_now": o.best_s * 1e3,
                "tried": o.tried,
                "skipped": dict(o.skipped),
            }
            for o in outcomes
        ],
    }

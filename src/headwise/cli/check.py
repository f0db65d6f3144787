"""``headwise check``: the conformance cases on this machine, every backend that runs here, against the error budget.

The budget comes from data (see `headwise.testing`): our error may be at most twice the error of plain PyTorch in the
same dtype, plus a rounding band. 100 % is the most that is allowed. Exit code 1: a case is over its budget; 2: the
command asks for something that is not here.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from headwise.backends.registry import BACKENDS, Unsupported, availability
from headwise.cases import SUITES
from headwise.cli import _terminal, env
from headwise.ops._checks import short
from headwise.testing import Case, Suite, TensorError, measure

MODES = ("eager", "shorter", "explicit", "compiled")
_FAILURES_SHOWN = 6  # per op and backend


class Job(NamedTuple):
    """One case, on one backend, in one dtype, run in one way."""

    suite: Suite
    backend: str
    case: Case
    dtype: torch.dtype
    # "shorter": as eager, but side outputs such as an lse get no gradient, so that backends do less
    mode: str  # "eager": gradients by autograd; "explicit": by the *_backward op; "compiled": through torch.compile

    def __str__(self) -> str:
        return f"{self.case.name}, {short(self.dtype)}" + (f", {self.mode}" if self.mode != "eager" else "")


class Worst(NamedTuple):
    job: Job
    error: TensorError


@dataclass
class Tally:
    """The results of one op on one backend."""

    op: str
    backend: str
    runs: int = 0
    cases: set[str] = field(default_factory=set)
    dtypes: dict[str, None] = field(default_factory=dict)  # in the order they were run
    worst: Worst | None = None
    failures: list[tuple[Job, str]] = field(default_factory=list)
    not_supported: dict[str, str] = field(default_factory=dict)  # case -> the backend's reason
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        self.runs += other.runs
        self.cases |= other.cases
        self.dtypes |= other.dtypes
        self.failures += other.failures
        self.not_supported |= other.not_supported
        self.seconds += other.seconds
        # "not <=": NaN counts as the worst
        if other.worst is not None and (self.worst is None or not other.worst.error.usage <= self.worst.error.usage):
            self.worst = other.worst


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", action="append", help="only this backend (may be repeated)")
    parser.add_argument("--op", action="append", help="only this op (may be repeated)")
    parser.add_argument("--dtype", action="append", help="only this dtype (may be repeated)")
    parser.add_argument(
        "--mode", action="append", choices=MODES, help="default: all but compiled (quick: eager and shorter)"
    )
    parser.add_argument("--quick", action="store_true", help="only the small cases")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="processes to share the cases (a GPU backend compiles for long)",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    jobs = list(_jobs(args))
    if not jobs:
        raise _terminal.UsageError("no case is left to run with these options")
    started = time.perf_counter()
    quiet = args.json or not sys.stderr.isatty()
    if args.jobs < 1:
        raise _terminal.UsageError(f"--jobs is {args.jobs}; it needs at least one process")
    tallies = _run(jobs, args.seed, args.jobs, quiet)
    ok = not any(tally.failures for tally in tallies)
    if args.json:
        _terminal.print_json(_as_json(tallies, args, ok))
    else:
        _print(_terminal.console(), tallies, time.perf_counter() - started)
    return 0 if ok else 1


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    modes = args.mode or (["eager", "shorter"] if args.quick else ["eager", "shorter", "explicit"])
    wanted = [_terminal.dtype(name) for name in args.dtype] if args.dtype else None
    for suite in _suites(args.op):
        for backend in _backends(args.backend):
            for case in suite.cases:
                if args.quick and "quick" not in case.tags:
                    continue
                dtypes = suite.dtypes[:1] if "dtype_free" in case.tags else suite.dtypes
                for dtype in dtypes:
                    if wanted is not None and dtype not in wanted:
                        continue
                    for mode in modes:
                        if mode == "explicit" and suite.explicit is None:
                            continue
                        if mode == "shorter" and not suite.side_outputs:
                            continue
                        yield Job(suite, backend, case, dtype, mode)


def _suites(names: list[str] | None) -> list[Suite]:
    for name in names or ():
        if name not in SUITES:
            raise _terminal.UsageError(f"--op {name} has no cases; there are: {', '.join(SUITES)}")
    return [suite for name, suite in SUITES.items() if not names or name in names]


def _backends(names: list[str] | None) -> list[str]:
    known = [row.name for row in BACKENDS]
    for name in names or ():
        if name not in known:
            raise _terminal.UsageError(f"--backend {name} is not known; there are: {', '.join(known)}")
        reason = availability(name)
        if reason is not None:
            raise _terminal.UsageError(f"--backend {name} does not run here: {reason}")
    if names:
        return [name for name in known if name in names]
    return [name for name in known if _not_checked(name) is None]


def _not_checked(backend: str) -> str | None:
    """Why a backend is left out unless it is named."""
    reason = availability(backend)
    if reason is None and backend == "webgpu":
        from headwise.backends.webgpu import runtime

        if runtime.device().capabilities.kind == "CPU":
            return "its adapter is software, which takes minutes; --backend webgpu checks it"
    return reason


def _with_progress(jobs: list[Job], quiet: bool) -> Iterator[Job]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=_terminal.progress_console(), transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=f"{job.suite.op:<16} {job.backend}")
            yield job
            progress.advance(task)


def _run(jobs: list[Job], seed: int, processes: int, quiet: bool) -> list[Tally]:
    tallies: dict[tuple[str, str], Tally] = {}
    for tally in _tally_each(jobs, seed, processes, quiet):
        tallies.setdefault((tally.op, tally.backend), Tally(tally.op, tally.backend)).add(tally)
    return list(tallies.values())


def _tally_each(jobs: list[Job], seed: int, processes: int, quiet: bool) -> Iterator[Tally]:
    """A tally of every job, in order."""
    if processes == 1:
        yield from (_tally(job, seed) for job in _with_progress(jobs, quiet))
        return
    # The processes share the cores: PyTorch in each would take all of them.
    threads = max(1, torch.get_num_threads() // processes)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        results = pool.map(_tally, jobs, itertools.repeat(seed), chunksize=max(1, min(8, len(jobs) // (4 * processes))))
        for _ in _with_progress(jobs, quiet):
            yield next(results)


def _tally(job: Job, seed: int) -> Tally:
    tally = Tally(job.suite.op, job.backend)
    started = time.perf_counter()
    _run_one(job, seed, tally)
    tally.seconds = time.perf_counter() - started
    return tally


def _run_one(job: Job, seed: int, tally: Tally) -> None:
    device = next(row.devices[0] for row in BACKENDS if row.name == job.backend)
    if job.mode == "compiled":
        torch.compiler.reset()  # otherwise later cases reach the limit on recompilations
    try:
        results = measure(
            job.suite,
            job.case,
            dtype=job.dtype,
            device=device,
            backend=job.backend,
            compiled=job.mode == "compiled",
            explicit=job.mode == "explicit",
            without_gradient=job.suite.side_outputs if job.mode == "shorter" else (),
            seed=seed,
        )
    except Exception as error:  # one case that raises is a failure; the others still run
        reason = _not_supported(error, job.backend)
        if reason is not None:
            tally.not_supported[job.case.name] = reason
        else:
            _count(tally, job)
            tally.failures.append((job, f"raised {type(error).__name__}: {error}"))
        return
    _count(tally, job)
    for result in results:
        if not result.ok:
            tally.failures.append((job, str(result)))
        # "not <=": NaN counts as the worst
        if tally.worst is None or not result.usage <= tally.worst.error.usage:
            tally.worst = Worst(job, result)


def _count(tally: Tally, job: Job) -> None:
    tally.runs += 1
    tally.cases.add(job.case.name)
    tally.dtypes[short(job.dtype)] = None


def _not_supported(error: Exception, backend: str) -> str | None:
    """The backend's reason, if the registry refused the call because the backend cannot run it."""
    _, refused, reason = str(error).partition(f"backend={backend!r} cannot run this call: ")
    return reason if refused and isinstance(error, Unsupported) else None


def _print(console: Console, tallies: list[Tally], seconds: float) -> None:
    table = _terminal.table("", "op", "backend", "cases", "runs", "budget used", "", "worst in")
    for column in (3, 4, 5):
        table.columns[column].justify = "right"
    for tally in tallies:
        passed = not tally.failures
        cases = f"{len(tally.cases)}" + (f" of {_total(tally)}" if tally.not_supported else "")
        usage = tally.worst.error.usage if tally.worst else math.nan
        where = f"{tally.worst.error.name} · {tally.worst.job}" if tally.worst and usage > 0 else ""
        table.add_row(
            _mark(tally),
            Text(tally.op, "bold"),
            tally.backend,
            cases,
            str(tally.runs),
            Text(_percent(usage), "" if passed else "red"),
            _bar(usage),
            Text(where, "dim"),
        )
    console.print(table)
    _print_reasons(console, tallies)
    for tally in tallies:
        for job, problem in tally.failures[:_FAILURES_SHOWN]:
            console.print(Text.assemble((f"✗ {tally.op} on {tally.backend} ({job}): ", "red"), problem))
        more = len(tally.failures) - _FAILURES_SHOWN
        if more > 0:
            console.print(Text(f"  … and {more} more: headwise check --op {tally.op} --json has them all", "dim"))
    runs, failed = sum(t.runs for t in tallies), sum(len(t.failures) for t in tallies)
    if failed:
        console.print(f"\n[bold red]{failed} violations[/bold red] in {runs} runs, {seconds:.1f} s.")
    else:
        console.print(f"[bold green]All {runs} runs are within their error budget[/bold green], {seconds:.1f} s.")


def _print_reasons(console: Console, tallies: list[Tally]) -> None:
    checked = {tally.backend for tally in tallies}
    for row in BACKENDS:
        reason = _not_checked(row.name)
        if reason is not None and row.name not in checked:
            console.print(Text(f"– {row.name} was not checked: {reason}", "dim"))
    for tally in tallies:
        for reason in sorted(set(tally.not_supported.values())):
            count = sum(r == reason for r in tally.not_supported.values())
            console.print(Text(f"– {tally.op} on {tally.backend}: {count} cases not covered: {reason}", "dim"))


def _mark(tally: Tally) -> Text:
    if tally.failures:
        return Text("✗", "bold red")
    return Text("✓", "bold green") if tally.runs else Text("–", "dim")


def _total(tally: Tally) -> int:
    return len(tally.cases | set(tally.not_supported))


def _percent(usage: float) -> str:
    if math.isnan(usage):
        return ""
    if usage == 0:
        return "exact"
    if math.isinf(usage):
        return "wrong"
    return f"{100 * usage:.0f} %" if usage < 10 else "> 999 %"


def _bar(usage: float, width: int = 10) -> Text:
    """The share of the budget that is used up."""
    if math.isnan(usage):
        return Text("")
    filled = min(width, math.ceil(width * min(usage, 1.0)))
    colour = "green" if usage <= 0.8 else "yellow" if usage <= 1 else "red"
    return Text.assemble(("━" * filled, colour), ("╌" * (width - filled), "bright_black"))


def _as_json(tallies: list[Tally], args: argparse.Namespace, ok: bool) -> dict[str, Any]:
    return {
        "ok": ok,
        "quick": args.quick,
        "seed": args.seed,
        "environment": env.describe(),
        "results": [_tally_json(tally) for tally in tallies],
    }


def _tally_json(tally: Tally) -> dict[str, Any]:
    worst = None
    if tally.worst is not None:
        error = tally.worst.error
        worst = {
            **_job_json(tally.worst.job),
            "tensor": error.name,
            # JSON has no infinity: null, with the problem beside it
            "usage": error.usage if math.isfinite(error.usage) else None,
            "problem": error.problem or None,
            "error_l2": error.error_l2,
            "budget_l2": error.budget_l2,
            "error_max": error.error_max,
            "budget_max": error.budget_max,
        }
    return {
        "op": tally.op,
        "backend": tally.backend,
        "ok": not tally.failures,
        "cases": len(tally.cases),
        "runs": tally.runs,
        "dtypes": list(tally.dtypes),
        "worst": worst,
        "failures": [{**_job_json(job), "problem": problem} for job, problem in tally.failures],
        "not_supported": tally.not_supported,
        "seconds": round(tally.seconds, 3),
    }


def _job_json(job: Job) -> dict[str, str]:
    return {"case": job.case.name, "dtype": short(job.dtype), "mode": job.mode}

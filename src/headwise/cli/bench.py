"""``headwise bench``: ours against peers, measured in one run on results that were checked first.

``headwise bench report`` draws one HTML page from the results, and with ``--base REV`` of what became slower since.

A case whose result fails its error budget is refused: no time of it is reported, and the exit code is 1. A missed
target is reported and does not change the exit code: a time depends on the machine. The protocol is in bench/README.md.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from headwise.backends.registry import availability
from headwise.benchmark import means, report, roofs
from headwise.benchmark.case import OURS, BenchCase, BenchSuite, concerned, matches
from headwise.benchmark.requirements import Measurement
from headwise.benchmark.runner import NOTHING_CROSSED, CaseResult, Verdict, run_case
from headwise.benchmark.suites import SUITES, load
from headwise.cli import _bench_report, _terminal, env
from headwise.cli._bench_report import DEFAULT_FOLDER, DISTRIBUTED
from headwise.ops._checks import short

_WIDE = 110  # columns of a terminal with room for the whole table
_LEFT_OUT = ("20–80 %", "extra MiB")  # in narrower terminals
_BRIEF_DIRECTION = {"forward": "fwd", "backward": "bwd", "forward+backward": "fwd+bwd"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _bench_report.add_arguments(parser)
    _bench_report.add_choice(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"folder of the CSV (default: {DEFAULT_FOLDER}; quick: none)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture of the ratios (PNG)")
    parser.add_argument(
        "--plot-csv",
        type=Path,
        metavar="CSV",
        help="run nothing: draw the results of an earlier run, beside them or into --out",
    )
    parser.add_argument("--list", action="store_true", help="name the cases and their targets, run nothing")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    if args.action == "report":
        return _bench_report.write(args)
    if args.plot_csv is not None:
        return _plot_again(args.plot_csv, args.out, args.json)
    if args.suite == DISTRIBUTED:
        return _distributed(args)
    suite = _suite(args)
    every_case = suite.cases(args.quick)
    cases = _chosen(every_case, args)
    if args.list:
        _print_list(cases, args.json)
        return 0
    if suite.device == "cuda" and not torch.cuda.is_available():
        raise _terminal.UsageError(f"--suite {args.suite} needs a GPU that PyTorch sees, and there is none")
    if suite.device == "webgpu" and (missing := availability("webgpu")) is not None:
        raise _terminal.UsageError(f"--suite {args.suite}: {missing}")
    plan = replace(suite.plan, repeats=3, sample_s=0.002) if args.quick else suite.plan
    if args.repeats is not None:
        plan = replace(plan, repeats=args.repeats)
    known = [(suite.name, c.group, c.name, c.direction) for c in every_case]
    folder = args.out or (None if args.quick else DEFAULT_FOLDER)
    results: list[CaseResult] = []
    with _threads(args.threads or suite.threads):
        machine = _machine(suite)
        path = report.csv_path(folder, suite.name, machine) if folder is not None else None
        measured_roofs = roofs.measure(args.quick, suite.device) if suite.device != "cpu" else []
        rows = [report.roof_row(roof, suite.name, machine, args.quick) for roof in measured_roofs]
        for case in _with_progress(cases, quiet=args.json or not sys.stderr.isatty()):
            result = run_case(case, suite, plan, judged=not args.quick)
            results.append(result)
            rows += report.rows(result, suite.name, short(case.dtype or suite.dtype), machine, args.quick)
            if path is not None:  # after every case: an interrupted run keeps its results
                report.write_csv(path, rows, known)
    written = [path] if path is not None else []
    if args.plot is not None and _plot(rows, args.plot):
        written.append(args.plot)
    # Of the whole file where there is one: its groups may have been measured one by one.
    known_rows = report.read_csv(path) if path is not None else [report.as_text(row) for row in rows]
    found = means.found(suite.means, known_rows) if not args.quick else []
    if args.json:
        _terminal.print_json(_as_json(results, rows, machine, written) | {"means": [str(mean) for mean in found]})
    else:
        _print(_terminal.console(), results, suite, machine, measured_roofs, args.quick, written)
        for mean in found:
            _terminal.console().print(Text(str(mean)))
    return 0 if all(r.status == "ok" for r in results) else 1


def _distributed(args: argparse.Namespace) -> int:
    """Groups of 2 and 4 processes on this machine."""
    from headwise.benchmark import distributed

    given = {"--group": args.group, "--filter": args.filter, "--without": args.without, "--threads": args.threads,
             "--list": args.list, "--plot": args.plot}  # fmt: skip
    for name, value in given.items():
        if value:
            raise _terminal.UsageError(f"{name} is not for --suite {DISTRIBUTED}")
    rows = []
    for ranks in (2,) if args.quick else (2, 4):
        found, _ = distributed.measure(ranks, 256 if args.quick else 1024, args.repeats or (1 if args.quick else 5))
        rows += found
    rows = distributed.judged(rows)
    device = f"{env._cpu_model()} ({os.cpu_count()} cores), gloo"
    folder = args.out or (None if args.quick else DEFAULT_FOLDER)
    if folder is not None:
        distributed.write_csv(folder / "distributed-gloo.csv", rows, device)
    if args.json:
        _terminal.print_json({"device": device, "results": [{**asdict(row), "excess": row.excess} for row in rows]})
    else:
        table = _terminal.table("ranks", "method", "layout", "window", "direction", "MB sent", "over model", "balance",
                                "MB held", "ms", "required")  # fmt: skip
        for row in rows:
            table.add_row(
                str(row.ranks), row.method, row.layout, str(row.window or ""), "fwd+bwd" if row.backward else "fwd",
                f"{row.sent / 1e6:.2f}", f"{row.excess:+.1%}", f"{row.balance:.2f}", f"{row.memory / 1e6:.1f}",
                f"{row.seconds * 1e3:.0f}", row.outcome,
            )  # fmt: skip
        _terminal.console().print(table)
        _terminal.console().print(Text(f"{device}; the processes share the cores", "dim"))
    return 0 if all(row.outcome == "met" for row in rows) else 1


def _chosen(every_case: list[BenchCase], args: argparse.Namespace) -> list[BenchCase]:
    groups = list(dict.fromkeys(case.group for case in every_case))
    wanted = {name.lower() for name in args.group or groups}
    unknown = wanted - {group.lower() for group in groups}
    if unknown:
        raise _terminal.UsageError(f"--group {min(unknown)} is not known; there are: {', '.join(groups)}")
    cases = [case for case in every_case if case.group.lower() in wanted and matches(case, args.filter)]
    if not cases:
        raise _terminal.UsageError(f"--filter {args.filter!r} leaves no case of suite {args.suite}")
    peers = {peer.name.lower() for case in every_case for peer in case.peers}
    out = {name.lower() for name in args.without or ()}
    if out - peers:
        raise _terminal.UsageError(f"--without {min(out - peers)} is no peer; there are: {', '.join(sorted(peers))}")
    return [replace(case, peers=tuple(p for p in case.peers if p.name.lower() not in out)) for case in cases]


def _suite(args: argparse.Namespace) -> BenchSuite:
    if args.suite not in SUITES:
        raise _terminal.UsageError(f"--suite {args.suite} is not known; there are: {', '.join((*SUITES, DISTRIBUTED))}")
    if args.threads is not None and args.threads < 1:
        raise _terminal.UsageError(f"--threads {args.threads}: it needs at least 1")
    if args.repeats is not None and args.repeats < 1:
        raise _terminal.UsageError(f"--repeats {args.repeats}: it needs at least 1")
    return load(args.suite)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _machine(suite: BenchSuite) -> report.Machine:
    facts = env.describe()
    cpu = facts["cpu"]["model"]
    return report.Machine(
        device=suite.device,
        device_name=_device_name(suite.device, facts),
        cpu=cpu,
        threads=facts["cpu"]["threads"],
        torch=torch.__version__,
        headwise=facts["headwise"],
        python=facts["versions"]["python"],
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        triton=facts["versions"]["triton"] or "",
    )


def _device_name(device: str, facts: dict[str, Any]) -> str:
    if device == "webgpu":
        adapter = facts["webgpu"]["in_use"]
        return f"{adapter['name']} {adapter['driver']}"
    return facts["gpus"][0]["name"] if device == "cuda" else facts["cpu"]["model"]


def _with_progress(cases: list[BenchCase], quiet: bool) -> Iterator[BenchCase]:
    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=_terminal.progress_console(), transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.key)
            yield case
            progress.advance(task)


def _plot(rows: list[report.Row], path: Path) -> bool:
    try:
        from headwise.benchmark.plot import save_ratios

        return save_ratios([report.as_text(row) for row in rows], path)
    except ImportError as error:
        raise _terminal.UsageError(f"--plot needs matplotlib (pip install 'headwise[bench]'): {error}") from error


def _plot_again(csv: Path, folder: Path | None, as_json: bool) -> int:
    try:
        from headwise.benchmark.plot_rates import save_all

        rows = report.read_csv(csv)
        if not rows:
            raise _terminal.UsageError(f"--plot-csv {csv} holds no results of headwise bench")
        written = save_all(rows, folder or csv.parent, csv.stem)
    except ImportError as error:
        raise _terminal.UsageError(f"--plot-csv needs matplotlib (pip install 'headwise[bench]'): {error}") from error
    except OSError as error:
        raise _terminal.UsageError(f"--plot-csv {csv} cannot be read: {error}") from error
    if as_json:
        _terminal.print_json({"written": [str(path) for path in written]})
    else:
        for path in written:
            _terminal.console().print(f"wrote {path}")
    return 0


def _where(machine: report.Machine) -> str:
    threads = f" · {machine.threads} threads" if machine.device == "cpu" else ""
    return f"{machine.device_name}{threads} · torch {machine.torch} · {machine.date[:10]}"


def _print(
    console: Console,
    results: list[CaseResult],
    suite: BenchSuite,
    machine: report.Machine,
    measured_roofs: list[roofs.Roof],
    quick: bool,
    written: list[Path],
) -> None:
    console.print(f"[bold]headwise {machine.headwise} · suite {suite.name} · {short(suite.dtype)}[/bold]")
    console.print(Text(_where(machine), "dim"))
    if measured_roofs:
        console.print(Text(f"roofs of this machine: {', '.join(map(str, measured_roofs))}", "dim"))
    if quick:
        console.print(Text("Quick sizes: these numbers say that the harness runs, and nothing about speed.", "yellow"))
    for group in dict.fromkeys(result.case.group for result in results):
        of_group = [result for result in results if result.case.group == group]
        console.print(_table(group, of_group, suite.device != "cpu", console.width < _WIDE))
    for result in results:
        if result.status != "ok":
            console.print(Text.assemble((f"✗ {result.case.key}: {result.status}: ", "red"), result.detail))
        if result.note and not result.note.startswith(NOTHING_CROSSED):
            console.print(Text(f"! {result.case.key}: {result.note}", "yellow"))
        for peer, why in result.absent.items():
            console.print(Text(f"– {result.case.key}: {peer} is not here: {why}", "dim"))
    if any(result.note.startswith(NOTHING_CROSSED) for result in results):
        console.print(Text("where nothing else is said, no call uploaded or read back anything", "dim"))
    _print_summary(console, results)
    for path in written:
        console.print(Text(f"wrote {path}", "dim"))


def _table(group: str, results: list[CaseResult], in_tera: bool, narrow: bool) -> Table:
    """The results of one group. The unit in the header is that of the whole group."""
    unit = 1e12 if in_tera else 1e9
    rate = ("T" if in_tera else "G") + ("FLOP/s" if results[0].case.counts_flops else "B/s")
    columns = ("", "case", "", "ours ms", rate, "peer", "theirs ms", "ratio", "20–80 %", "extra MiB", "target")
    shown = [name for name in columns if not (narrow and name in _LEFT_OUT)]
    table = _terminal.table(*shown, title=group)
    table.padding = (0, 1, 0, 0)
    for column, name in zip(table.columns, shown, strict=True):
        column.no_wrap = name not in ("case", "target")
        column.justify = "left" if name in ("", "case", "peer", "target") else "right"
    for result in results:
        for cells in _cells(result, unit):
            table.add_row(*(cell for name, cell in zip(columns, cells, strict=False) if name in shown))
    return table


def _cells(result: CaseResult, unit: float) -> Iterator[tuple[str | Text, ...]]:
    """The lines of one case: one per peer; ours is in the first."""
    case = result.case
    ours = result.measurement(OURS)
    if result.status != "ok" or ours is None:
        yield Text("✗", "bold red"), case.name, _BRIEF_DIRECTION[case.direction], Text(result.status, "red")
        return
    others: list[Measurement | None] = [m for m in result.measurements if m.contender != OURS]
    for index, other in enumerate(others or [None]):
        first = index == 0
        verdicts = [
            v
            for v in result.verdicts
            if (_who(v) == OURS and first) or (other is not None and _who(v) == other.contender)
        ]
        of_time = [v for v in verdicts if _who(v) != OURS]
        ratio = other.ratio if other is not None else None
        extra = _number(ours.peak_extra_bytes / 2**20)
        yield (
            _mark(verdicts),
            case.name if first else "",
            _BRIEF_DIRECTION[case.direction] if first else "",
            _number(ours.seconds.median * 1e3) if first else "",
            _number(case.work / ours.seconds.median / unit) if first and case.work and case.timed != "host" else "",
            other.contender if other is not None else "",
            _number(other.seconds.median * 1e3) if other is not None else "",
            Text(f"{ratio.median:.2f}×{_in_any_order(other)}", _colour(of_time)) if ratio is not None else "",
            Text(f"{ratio.low:.2f}–{ratio.high:.2f}", "dim") if ratio is not None else "",
            f"{extra} : {_number(other.peak_extra_bytes / 2**20)}" if other is not None else extra,
            Text("\n").join(Text(v.requirement.brief, _colour([v])) for v in verdicts),
        )


def _in_any_order(other: Measurement | None) -> str:
    """The ratio to ours with deterministic=False, in brackets."""
    loose = other.ratio_any_order if other is not None else None
    return f" ({loose.median:.2f}×)" if loose is not None else ""


def _who(verdict: Verdict) -> str:
    return concerned(verdict.requirement)


def _print_summary(console: Console, results: list[CaseResult]) -> None:
    outcomes = [v.outcome for r in results for v in r.verdicts]
    met, missed = outcomes.count("met"), outcomes.count("missed")
    broken = sum(r.status != "ok" for r in results)
    parts = [(f"{len(results)} cases", "bold")]
    if met or missed:
        parts += [
            (", targets: ", ""),
            (f"{met} met", "green"),
            (f", {missed} missed", "red" if missed else ""),
        ]
    if broken:
        parts += [(", ", ""), (f"{broken} refused or broken", "bold red")]
    console.print(Text.assemble(*parts))
    legend = "ratio = their time / ours, median over paired rounds; extra = memory beyond the inputs, ours : theirs"
    if any(m.ratio_any_order is not None for r in results for m in r.measurements):
        legend += "; in brackets: / ours in any order"
    console.print(Text(legend, "dim"))
    if console.width < _WIDE:
        console.print(Text(f"too narrow for: {', '.join(_LEFT_OUT)} (--json has them)", "dim"))


def _print_list(cases: list[BenchCase], as_json: bool) -> None:
    if as_json:
        _terminal.print_json([{"case": c.key, "requirements": [str(r) for r in c.requirements]} for c in cases])
        return
    table = _terminal.table("case", "target")
    for case in cases:
        table.add_row(case.key, "; ".join(str(r) for r in case.requirements))
    _terminal.console().print(table)


def _mark(verdicts: list[Verdict]) -> Text:
    outcomes = {v.outcome for v in verdicts}
    if "missed" in outcomes:
        return Text("✗", "bold red")
    return Text("✓", "bold green") if "met" in outcomes else Text("·", "dim")


def _colour(verdicts: list[Verdict]) -> str:
    outcomes = {v.outcome for v in verdicts}
    return "red" if "missed" in outcomes else "green" if "met" in outcomes else ""


def _number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _as_json(
    results: list[CaseResult], rows: list[report.Row], machine: report.Machine, written: list[Path]
) -> dict[str, Any]:
    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    outcomes = [v.outcome for r in results for v in r.verdicts]
    return {
        "ok": all(r.status == "ok" for r in results),
        "machine": asdict(machine),
        "targets": {outcome: outcomes.count(outcome) for outcome in ("met", "missed", "not judged")},
        "written": [str(path) for path in written],
        "results": [{name: finite(getattr(row, name)) for name in report.COLUMNS} for row in rows],
    }

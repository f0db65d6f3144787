"""One case through the gate, the memory measurement and the clock."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from headwise.backends.registry import use_backend
from headwise.benchmark import correctness, memory, timing
from headwise.benchmark.case import (
    OURS,
    AtLeast,
    BenchCase,
    BenchSuite,
    Contender,
    Direction,
    PeakMemory,
    Requirement,
    Within,
)
from headwise.testing import Arguments, Maker, Outputs, TensorError, compare_all, upcast

Status = Literal["ok", "refused", "error"]
Outcome = Literal["met", "missed", "not judged"]


@dataclass(frozen=True)
class Measurement:
    """One contender of one case."""

    contender: str
    yardstick: bool
    seconds: timing.Spread
    rounds: int
    peak_extra_bytes: int
    ratio: timing.Spread | None  # its time over ours, paired by round; None for ours


@dataclass(frozen=True)
class Verdict:
    requirement: Requirement
    outcome: Outcome


@dataclass
class CaseResult:
    case: BenchCase
    status: Status = "ok"
    detail: str = ""  # why it was refused, or what broke
    errors: list[TensorError] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # peers this machine lacks, and why

    def measurement(self, contender: str) -> Measurement | None:
        return next((m for m in self.measurements if m.contender == contender), None)

    @property
    def budget_share(self) -> float:
        """The share of its error budget that our worst tensor takes."""
        return max((e.usage for e in self.errors), default=0.0)


@dataclass
class _Runner:
    """A contender with its inputs bound: `results` for the gate, `action` for clock and memory."""

    contender: Contender
    action: Callable[[], tuple[Tensor, ...]]
    results: Callable[[], Outputs]


def run_case(
    case: BenchCase,
    suite: BenchSuite,
    plan: timing.Plan,
    *,
    judged: bool = True,
    clock: timing.Clock | None = None,
) -> CaseResult:
    """Check, then measure, every contender of a case. Never raises: what breaks is the result.

    judged: whether the requirements are held against the outcome (not so at quick sizes, for which nobody stated them).
    """
    result = CaseResult(case)
    try:
        with use_backend(suite.backend):
            _run(result, suite, plan, judged, clock or timing.clock_for(suite.device))
    except Exception as error:  # one broken case must not cost the others of a long run
        result.status, result.detail = "error", f"{type(error).__name__}: {error}"
    gc.collect()
    return result


def _run(result: CaseResult, suite: BenchSuite, plan: timing.Plan, judged: bool, clock: timing.Clock) -> None:
    case = result.case
    maker = Maker(suite.dtype, torch.device(suite.device), seed=zlib.crc32(case.key.encode()))
    arguments = case.make(maker)
    runners, grad_out = _bind_all(result, arguments, maker)

    result.detail = _refusal(result, runners, arguments, grad_out)
    if result.detail:
        result.status = "refused"
        return
    peaks = {name: memory.peak_extra(r.action, suite.device) for name, r in runners.items()}
    seconds = timing.interleave({name: r.action for name, r in runners.items()}, clock, plan)
    for name, runner in runners.items():
        result.measurements.append(
            Measurement(
                contender=name,
                yardstick=runner.contender.yardstick,
                seconds=timing.Spread.of(seconds[name]),
                rounds=len(seconds[name]),
                peak_extra_bytes=peaks[name],
                ratio=None if name == OURS else timing.paired_ratio(seconds[name], seconds[OURS]),
            )
        )
    result.verdicts = [Verdict(r, _outcome(result, r) if judged else "not judged") for r in case.requirements]


def _bind_all(result: CaseResult, arguments: Arguments, maker: Maker) -> tuple[dict[str, _Runner], Tensor | None]:
    """Every contender this machine has, and the gradient of the output that all of them are given."""
    case = result.case
    grad_out: Tensor | None = None
    runners: dict[str, _Runner] = {}
    for contender in case.contenders():
        values: Arguments = arguments
        leaves: dict[str, Tensor] = {}
        if case.direction != "forward":
            values, leaves = correctness.with_leaves(arguments, case.differentiable)
        try:
            call = contender.prepare(values)
        except ImportError as error:
            if contender.name == OURS:
                raise
            result.absent[contender.name] = str(error)
            continue
        if case.direction != "forward" and grad_out is None:
            out = call().detach()
            # A scalar loss gets the gradient 1 that loss.backward() gives it.
            grad_out = maker.normal(*out.shape, dtype=out.dtype) if out.dim() else torch.ones_like(out)
        runners[contender.name] = _bind(case.direction, contender, call, leaves, grad_out)
    return runners, grad_out


def _bind(
    direction: Direction,
    contender: Contender,
    call: Callable[[], Tensor],
    leaves: dict[str, Tensor],
    grad_out: Tensor | None,
) -> _Runner:
    # A yardstick leaves some arguments unused (plain attention has no sink); nobody else may.
    targets = list(leaves.values())
    # The backward alone is timed on a graph that is kept, the same way for everybody.
    kept = call() if direction == "backward" else None

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (call(),)

    def backward() -> tuple[Tensor, ...]:
        assert kept is not None
        return torch.autograd.grad(kept, targets, grad_out, retain_graph=True, allow_unused=contender.yardstick)

    def forward_backward() -> tuple[Tensor, ...]:
        out = call()
        return (out.detach(), *torch.autograd.grad(out, targets, grad_out, allow_unused=contender.yardstick))

    gradients = [f"grad of {name}" for name in leaves]
    action, names = {
        "forward": (forward, ["out"]),
        "backward": (backward, gradients),
        "forward+backward": (forward_backward, ["out", *gradients]),
    }[direction]

    def results() -> Outputs:
        return dict(zip(names, action(), strict=True))

    return _Runner(contender, action, results)


def _refusal(result: CaseResult, runners: dict[str, _Runner], arguments: Arguments, grad_out: Tensor | None) -> str:
    """Why the case may not be reported; empty where all is well."""
    case = result.case
    ours = runners[OURS].results()
    picked = case.check.pick(ours)
    truth = case.check.compute(upcast(arguments, torch.float64), grad_out)
    plain = case.check.compute(arguments, grad_out)
    result.errors = compare_all(picked, truth, plain)
    failures = [str(e) for e in result.errors if not e.ok]
    if failures:
        return "outside the error budget: " + "; ".join(failures)
    del truth, plain, picked
    for name, runner in runners.items():
        if name == OURS or runner.contender.yardstick:
            continue
        difference = correctness.disagreement(ours, runner.results())
        if difference:
            return f"{name} computes something else: {difference}"
    return ""


def _outcome(result: CaseResult, requirement: Requirement) -> Outcome:
    match requirement:
        case AtLeast(ratio, peer):
            measured = result.measurement(peer)
            good = None if measured is None or measured.ratio is None else measured.ratio.median >= ratio
        case Within(factor, peer):
            measured = result.measurement(peer)
            good = None if measured is None or measured.ratio is None else measured.ratio.median >= 1 / factor
        case PeakMemory(limit):
            measured = result.measurement(OURS)
            good = None if measured is None else measured.peak_extra_bytes <= limit
    return "not judged" if good is None else "met" if good else "missed"

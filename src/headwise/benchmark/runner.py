"""Runs one case: checks its results, then measures memory and time."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.backends.registry import use_backend
from headwise.benchmark import correctness, inputs, memory, timing
from headwise.benchmark.case import ANY_ORDER, OURS, Absent, BenchCase, BenchSuite, Contender, OwnLeaves, concerned
from headwise.benchmark.requirements import Figures, Measurement, Requirement
from headwise.testing import Arguments, Maker, Outputs, TensorError, compare_all, upcast

Status = Literal["ok", "refused", "error"]
Outcome = Literal["met", "missed", "not judged"]


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
    absent: dict[str, str] = field(default_factory=dict)  # peers that did not run, and why
    note: str = ""  # about our own call
    input_bytes: int = 0  # of one set of inputs

    def measurement(self, contender: str) -> Measurement | None:
        return next((m for m in self.measurements if m.contender == contender), None)

    @property
    def budget_share(self) -> float:
        """The share of its error budget that our worst tensor takes."""
        return max((e.usage for e in self.errors), default=0.0)


Call = Callable[[], tuple[Tensor, ...]]
NOTHING_CROSSED = "per call: 0 uploads, 0 readbacks"  # how a note on resident arrays begins


@dataclass
class _Runner:
    """A contender with its inputs bound: a call per set of inputs, to be run inside `scope`."""

    contender: Contender
    calls: list[Call]
    names: list[str]  # of the tensors that a call gives
    scope: timing.Scope

    def once(self) -> Outputs:
        """The results on the first set of inputs."""
        with self.scope():
            return dict(zip(self.names, map(inputs.fetched, self.calls[0]()), strict=True))

    @property
    def calls_per_lap(self) -> int:
        # A self-timed call reports the time of one call.
        return 1 if isinstance(self.calls[0], timing.SelfTimed) else len(self.calls)

    def lap(self) -> timing.Action:
        """The call on every set of inputs in turn."""
        calls = self.calls
        if self.calls_per_lap == 1:
            return calls[0]

        def run() -> None:
            for call in calls:
                call()

        return run


def run_case(
    case: BenchCase,
    suite: BenchSuite,
    plan: timing.Plan,
    *,
    judged: bool = True,
    clock: timing.Clock | None = None,
) -> CaseResult:
    """Check, then measure, every contender of a case. Never raises: what breaks is the result.

    judged: whether the requirements are checked; they do not apply to quick sizes.
    """
    result = CaseResult(case)
    try:
        with use_backend(suite.backend):
            _run(result, suite, plan, judged, clock or timing.clock_for(suite.device, case.timed))
    except Exception as error:  # one broken case must not cost the others of a long run
        result.status, result.detail = "error", f"{type(error).__name__}: {error}"
    gc.collect()
    if suite.device == "cuda":
        torch.cuda.empty_cache()  # the next case may need that memory
    return result


def _run(result: CaseResult, suite: BenchSuite, plan: timing.Plan, judged: bool, clock: timing.Clock) -> None:
    case = result.case
    maker = inputs.maker(case.dtype or suite.dtype, suite.device, seed=zlib.crc32(case.key.encode()))
    arguments = case.make(maker)
    result.input_bytes = sum(x.nbytes for x in arguments.values() if isinstance(x, Tensor))
    sets = [inputs.placed(arguments, suite.device)]
    if case.timed not in ("host", "process"):  # whose time does not depend on the GPU's cache
        more = inputs.sets_needed(arguments, suite.device) - 1
        sets += [inputs.placed(case.make(maker), suite.device) for _ in range(more)]
    runners, grad_out = _bind_all(result, sets, maker)

    result.detail = _refusal(
        result,
        runners,
        inputs.checkable(arguments, suite.device),
        inputs.checkable(inputs.fetched(grad_out), suite.device),
    )
    if result.detail:
        result.status = "refused"
        return
    peaks = {}
    for name, runner in runners.items():
        fresh = isinstance(runner.calls[0], timing.SelfTimed) and runner.calls[0].fresh
        with runner.scope():
            peaks[name] = 0 if fresh else memory.peak_extra(runner.calls[0], suite.device)
    if suite.device == "webgpu":
        result.note = _traffic(runners[OURS])
    laps = {name: runner.lap() for name, runner in runners.items()}
    if case.timed == "graph" and suite.device == "cuda":
        laps = _captured(result, runners)
    if case.most_rounds is not None:
        plan = replace(plan, repeats=min(case.most_rounds, plan.repeats or case.most_rounds))
    if plan.most_calls is not None:
        plan = replace(plan, most_calls=max(1, plan.most_calls // len(sets)))
    lap_seconds = timing.interleave(laps, clock, plan, {name: r.scope for name, r in runners.items()})
    seconds = {name: [s / runners[name].calls_per_lap for s in of_lap] for name, of_lap in lap_seconds.items()}
    loose = seconds.get(ANY_ORDER)
    for name in laps:
        contender = runners[name].contender
        own = name == OURS or contender.variant
        result.measurements.append(
            Measurement(
                contender=name,
                yardstick=contender.yardstick,
                flops=case.flops if contender.flops is None else contender.flops,
                seconds=timing.Spread.of(seconds[name]),
                rounds=len(seconds[name]),
                peak_extra_bytes=peaks[name],
                ratio=None if name == OURS else timing.paired_ratio(seconds[name], seconds[OURS]),
                ratio_any_order=None if own or loose is None else timing.paired_ratio(seconds[name], loose),
                # False is said of gradients.
                deterministic=contender.deterministic
                if case.direction != "forward"
                else contender.deterministic or None,
                variant=contender.variant,
            )
        )
    result.verdicts = [Verdict(r, _outcome(result, r) if judged else "not judged") for r in case.requirements]


def _bind_all(result: CaseResult, sets: list[Arguments], maker: Maker) -> tuple[dict[str, _Runner], Tensor | None]:
    """Every contender that runs here, and the gradient of the output that all of them get with the first set."""
    case = result.case
    grads: list[Tensor] = []  # of the output, one per set
    runners: dict[str, _Runner] = {}
    for contender in case.contenders():
        scope = _scope(contender, case)
        try:
            with scope():
                calls = [_bind(case, contender, arguments, grads, i, maker) for i, arguments in enumerate(sets)]
        except Exception as error:  # packages fail to import in ways of their own
            if contender.name == OURS or contender.variant:
                raise
            expected = isinstance(error, ImportError | Absent)
            result.absent[contender.name] = str(error) if expected else f"{type(error).__name__}: {error}"
            continue
        gradients = [f"grad of {name}" for name in case.differentiable]
        forward = list(case.outputs)
        names = {"forward": forward, "backward": gradients, "forward+backward": [*forward, *gradients]}[case.direction]
        runners[contender.name] = _Runner(contender, calls, names, scope)
    return runners, grads[0] if grads else None


def _traffic(runner: _Runner) -> str:
    """The uploads, readbacks and dispatches of one call of ours."""
    from headwise.webgpu import counts

    before = counts()
    with runner.scope():
        runner.calls[0]()
    after = counts()
    names = ("uploads", "readbacks", "dispatches")
    return "per call: " + ", ".join(f"{getattr(after, name) - getattr(before, name)} {name}" for name in names)


def _scope(contender: Contender, case: BenchCase) -> timing.Scope:
    recorded = case.direction != "forward" or case.recorded

    @contextmanager
    def scope() -> Iterator[None]:
        with contender.scope(), torch.set_grad_enabled(recorded and not contender.explicit):
            yield

    return scope


def _bind(
    case: BenchCase, contender: Contender, arguments: Arguments, grads: list[Tensor], index: int, maker: Maker
) -> Call:
    """The call of a contender on set ``index`` of the inputs; the first contender draws the gradient of the output."""
    values, leaves = arguments, dict[str, Tensor]()
    if (case.direction != "forward" or case.recorded) and not contender.explicit:
        values, leaves = correctness.with_leaves(arguments, case.differentiable)
    call: Callable[[], Any] = contender.prepare(values)
    if isinstance(call, timing.SelfTimed):
        return call
    if case.direction == "forward":
        return call if len(case.outputs) > 1 else lambda: (call(),)
    out: Tensor = call()[0] if contender.explicit else call()
    if len(grads) == index:
        grads.append(_gradient(out, maker))
    if contender.explicit:
        return call
    # Only a yardstick may leave arguments unused (plain attention has no sink) or return another shape.
    targets, unused, grad_out = list(leaves.values()), contender.yardstick, grads[index]
    if isinstance(call, OwnLeaves):
        targets = list(call.leaves)
    if contender.yardstick and out.shape != grad_out.shape:
        grad_out = _gradient(out, maker)
    grad_out = _laid_out_like(out, grad_out)

    def backward() -> tuple[Tensor, ...]:
        # The graph is kept, for every contender.
        return torch.autograd.grad(out, targets, grad_out, retain_graph=True, allow_unused=unused)

    def forward_backward() -> tuple[Tensor, ...]:
        again = call()
        return (again.detach(), *torch.autograd.grad(again, targets, grad_out, allow_unused=unused))

    return backward if case.direction == "backward" else forward_backward


def _gradient(out: Tensor, maker: Maker) -> Tensor:
    """A random gradient of this output; 1 for a scalar loss, as loss.backward() has it."""
    return inputs.like(maker.normal(*out.shape, dtype=out.dtype), out) if out.dim() else torch.ones_like(out.detach())


def _laid_out_like(out: Tensor, grad: Tensor) -> Tensor:
    """The gradient with the strides of the output, as the next layer of a model returns it.

    Other strides may cost a copy that no model needs, and cuDNN in PyTorch 2.11 computes a wrong ``dq`` from them.
    """
    if not isinstance(out, Tensor) or out.stride() == grad.stride():
        return grad
    return torch.empty_like(out, requires_grad=False).copy_(grad)


def _captured(result: CaseResult, runners: dict[str, _Runner]) -> dict[str, timing.Action]:
    """Each contender's lap as the replay of a CUDA graph, which must give the result of the plain call."""
    laps: dict[str, timing.Action] = {}
    for name, runner in runners.items():
        try:
            with runner.scope():
                laps[name] = _capture(runner.lap(), runner.calls[0])
        except Exception as error:
            if name == OURS:
                raise
            result.absent[name] = f"cannot be captured in a CUDA graph: {type(error).__name__}: {error}"
    return laps


def _capture(lap: timing.Action, first: Call) -> timing.Action:
    expected = [x.clone() for x in first()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        lap()
    torch.cuda.current_stream().wait_stream(side)
    alone, graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(alone):
        replayed = first()
    alone.replay()
    difference = correctness.disagreement(
        {str(i): x for i, x in enumerate(replayed)}, {str(i): x for i, x in enumerate(expected)}
    )
    if difference:
        raise RuntimeError(f"the replay of a CUDA graph gives another result: {difference}")
    with torch.cuda.graph(graph):
        lap()
    return graph.replay


def _refusal(result: CaseResult, runners: dict[str, _Runner], arguments: Arguments, grad_out: Tensor | None) -> str:
    """Why the case is refused; empty if it is not."""
    case = result.case
    ours = runners[OURS].once()
    truth = case.check.compute(upcast(arguments, torch.float64), grad_out)
    plain = case.check.compute(arguments, grad_out)
    result.errors = compare_all(case.check.pick(ours), truth, plain)
    for name, runner in runners.items():
        errors = result.errors if name == OURS else []
        if runner.contender.variant:
            errors = compare_all(case.check.pick(runner.once()), truth, plain)
        failures = [str(e) for e in errors if not e.ok]
        if failures:
            return f"{f'{name} is ' if name != OURS else ''}outside the error budget: " + "; ".join(failures)
    del truth, plain
    for name, runner in runners.items():
        if name == OURS or runner.contender.yardstick:
            continue
        difference = correctness.disagreement(ours, runner.once())
        if difference:
            return f"{name} computes something else: {difference}"
    return ""


def _outcome(result: CaseResult, requirement: Requirement) -> Outcome:
    ours = result.measurement(OURS)
    assert ours is not None
    peer = result.measurement(concerned(requirement))
    good = requirement.met(Figures(ours, peer, result.case.bytes, result.input_bytes))
    return "not judged" if good is None else "met" if good else "missed"

"""Clocks, and rounds in which every contender takes its turn.

A machine drifts: it heats up, others use it, memory fragments. So contenders are never timed one after the other.
Each round times each contender once, in shuffled order. Ratios are taken within a round, then their median over rounds.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Action = Callable[[], object]


class SelfTimed:
    """A call that measures its own time: our clocks do not see the GPU queue or the process it uses."""

    # Every call starts from nothing, in a process of its own: there is nothing to warm up, and none of our memory in it.
    fresh: bool = False

    def __call__(self) -> Any:
        raise NotImplementedError

    def seconds(self, calls: int) -> float:
        """Seconds per call over ``calls`` calls in a row."""
        raise NotImplementedError


Scope = Callable[[], AbstractContextManager[Any]]

# What is timed, on a GPU (on the CPU all are the same):
#   device  the kernels: the queue is kept full, so that waiting for Python does not count
#   graph   the same, with the calls captured in a CUDA graph and replayed
#   calls   plain calls in a row, waiting for Python included
#   host    what a call costs in Python, the kernels not included
#   process the first call of a fresh process, or a whole one: the call times itself
Timed = Literal["device", "graph", "calls", "host", "process"]


class Clock(Protocol):
    def measure(self, action: Action, calls: int) -> float:
        """Seconds per call over ``calls`` calls in a row."""


class WallClock:
    """For the CPU, where a call is over when it returns."""

    def measure(self, action: Action, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            action()
        return (time.perf_counter() - start) / calls


class CudaClock:
    """Events on the stream: device time from the first kernel of the first call to the last kernel of the last.

    queue_first: the GPU sleeps until the host has queued the calls, so that the kernels are timed and not the Python
    that launches them.
    """

    def __init__(self, queue_first: bool) -> None:
        self._queue_first = queue_first
        self._host_s: dict[Action, float] = {}  # time to queue a call, as last measured

    def measure(self, action: Action, calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if self._queue_first:
            lead_s = min(1.25 * calls * self._host_s.get(action, 0.0) + 20e-6, _LONGEST_LEAD_S)
            torch.cuda._sleep(int(lead_s * _CYCLES_PER_S))
        start.record()
        before = time.perf_counter()
        for _ in range(calls):
            action()
        self._host_s[action] = (time.perf_counter() - before) / calls
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / calls


_CYCLES_PER_S = 2e9  # a slower GPU sleeps a little longer, which does no harm
_LONGEST_LEAD_S = 0.1


class HostClock:
    """The time to queue a call: the clock stops before the kernels are done."""

    def measure(self, action: Action, calls: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        seconds = (time.perf_counter() - start) / calls
        torch.cuda.synchronize()
        return seconds


# After idling, a GPU runs at a third of its clock for a tenth of a second: it is kept busy that long before a sample.
WEBGPU_WARM_UP_S = 0.12


class WebGpuClock:
    """Timestamps of the GPU: the time inside its compute passes, each of which holds up to 64 recorded dispatches."""

    def measure(self, action: Action, calls: int) -> float:
        from headwise.backends.webgpu import runtime

        device = runtime.device()
        warm = time.perf_counter() + (WEBGPU_WARM_UP_S if device.capabilities.kind != "CPU" else 0.0)
        device.synchronize()
        while time.perf_counter() < warm:
            for _ in range(calls):
                action()
            device.synchronize()
        with device.timed() as timer:
            for _ in range(calls):
                action()
        return timer.busy_seconds / calls


class WebGpuHostClock:
    """Plain calls in a row. wait: until the kernels of the last one are done."""

    def __init__(self, wait: bool) -> None:
        self._wait = wait

    def measure(self, action: Action, calls: int) -> float:
        from headwise.backends.webgpu import runtime

        device = runtime.device()
        device.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        if self._wait:
            device.synchronize()
        seconds = (time.perf_counter() - start) / calls
        device.synchronize()
        return seconds


def clock_for(device: str, timed: Timed = "device") -> Clock:
    if device == "webgpu":
        return WebGpuClock() if timed in ("device", "graph") else WebGpuHostClock(wait=timed == "calls")
    if device != "cuda":
        return WallClock()
    return HostClock() if timed == "host" else CudaClock(queue_first=timed != "calls")


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    repeats: int | None = None  # exactly this many rounds; None: as many as target_s holds, within the limits below
    target_s: float = 8.0
    cap_s: float = 90.0  # no round begins after this, once MIN_LONG_ROUNDS are done
    sample_s: float = 0.02  # a sample is as many calls as fill this; far above the clock's resolution
    most_calls: int | None = None  # in a sample; a GPU's queue holds about a thousand launches
    seed: int = 0


WARM_UPS = 2
MIN_ROUNDS, MIN_LONG_ROUNDS, MAX_ROUNDS = 7, 3, 30
LONG_ROUND_S = 6.0  # rounds longer than this are "long": three of them do


@dataclass(frozen=True)
class Spread:
    """A median with its 20th and 80th percentile."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        fifths = statistics.quantiles(values, n=5, method="inclusive")
        return Spread(statistics.median(values), fifths[0], fifths[3])


def interleave(
    actions: Mapping[str, Action], clock: Clock, plan: Plan, scopes: Mapping[str, Scope] | None = None
) -> dict[str, list[float]]:
    """Seconds per call of every action, one value per round, round by round; a sample is taken inside its scope."""
    order = random.Random(plan.seed)
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    scope_of: dict[str, Scope] = {name: (scopes or {}).get(name, nullcontext) for name in actions}
    with _no_garbage_collection():
        calls = {name: _calls_per_sample(action, clock, plan, scope_of[name]) for name, action in actions.items()}
        start = time.monotonic()
        rounds = plan.repeats or MAX_ROUNDS
        done = 0
        while done < rounds:
            for name in order.sample(list(actions), len(actions)):
                with scope_of[name]():
                    seconds[name].append(_measure(clock, actions[name], calls[name]))
            done += 1
            elapsed = time.monotonic() - start
            if plan.repeats is None:
                rounds = _rounds(elapsed / done, plan)
            if elapsed > plan.cap_s and done >= MIN_LONG_ROUNDS:
                break
    return seconds


def paired_ratio(theirs: list[float], ours: list[float]) -> Spread:
    """How many times as fast ours is, round by round: above 1, ours wins."""
    return Spread.of([t / o for t, o in zip(theirs, ours, strict=True)])


def _rounds(round_s: float, plan: Plan) -> int:
    least = MIN_LONG_ROUNDS if round_s > LONG_ROUND_S else MIN_ROUNDS
    return min(MAX_ROUNDS, max(least, int(plan.target_s / max(round_s, 1e-9))))


def _measure(clock: Clock, action: Action, calls: int) -> float:
    return action.seconds(calls) if isinstance(action, SelfTimed) else clock.measure(action, calls)


def _calls_per_sample(action: Action, clock: Clock, plan: Plan, scope: Scope) -> int:
    """Warms the action up, and finds how many calls fill a sample."""
    if isinstance(action, SelfTimed) and action.fresh:
        return 1
    seconds = 0.0
    with scope():
        for _ in range(WARM_UPS):
            seconds = _measure(clock, action, 1)
    calls = max(1, math.ceil(plan.sample_s / seconds)) if seconds > 0 else 1
    return calls if plan.most_calls is None else min(calls, plan.most_calls)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collects before the block and not inside: a collection would count as time of the contender that runs."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""What a benchmark case is: inputs, contenders, the work counted, and what is required of the outcome."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from headwise.benchmark.timing import Plan, Timed
from headwise.testing import Arguments, Maker, Outputs

Direction = Literal["forward", "backward", "forward+backward"]

# prepare(arguments) does what need not be timed (building a mask) and returns the call that is timed: it gives the
# output or, where the contender is `explicit`, the output and its gradients.
Prepare = Callable[[Arguments], Callable[[], Any]]

OURS = "headwise"


class Absent(Exception):
    """A peer that this machine lacks, or that cannot run this case. The message says why; the case runs without it."""


@dataclass(frozen=True)
class OwnLeaves:
    """A yardstick's call whose gradients go to tensors of its own, and not to the arguments of the case."""

    call: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]

    def __call__(self) -> Tensor:
        return self.call()


@dataclass(frozen=True)
class Contender:
    """Somebody who runs the case: ours, a peer with the same result, or a yardstick."""

    name: str
    prepare: Prepare
    # A yardstick is timed beside ours and computes something else: our own plain attention beside attention with a
    # softcap. Its result is not compared.
    yardstick: bool = False
    # The work of a yardstick where it is not that of the case; what its rate is counted from.
    flops: float | None = None
    # Entered around everything the contender does, outside the clock: what chooses a kernel of PyTorch, say.
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    # The call gives (output, *gradients) itself, with no need of autograd.
    explicit: bool = False


@dataclass(frozen=True)
class AtLeast:
    """Ours must be at least ``ratio`` times as fast as ``peer``."""

    ratio: float
    peer: str

    def __str__(self) -> str:
        return f"≥ {self.ratio:g}× as fast as {self.peer}"

    @property
    def brief(self) -> str:
        return f"≥ {self.ratio:g}×"


@dataclass(frozen=True)
class Within:
    """Ours may take at most ``factor`` times as long as ``peer`` (a yardstick)."""

    factor: float
    peer: str

    def __str__(self) -> str:
        return f"≤ {self.factor:g}× the time of {self.peer}"

    @property
    def brief(self) -> str:
        return f"≥ {1 / self.factor:.2f}×"


@dataclass(frozen=True)
class SameRate:
    """Ours must do at least ``share`` of the operations per second of ``peer``, a yardstick with work of its own."""

    share: float
    peer: str

    def __str__(self) -> str:
        return f"≥ {self.share:g} of the FLOP rate of {self.peer}"

    @property
    def brief(self) -> str:
        return f"≥ {self.share:g} of its rate"


@dataclass(frozen=True)
class PeakMemory:
    """Ours may hold at most ``limit`` bytes beyond its inputs, results included."""

    limit: int
    reason: str

    def __str__(self) -> str:
        return f"extra memory ≤ {self.reason}"

    @property
    def brief(self) -> str:
        return f"≤ {self.limit / 2**20:.4g} MiB"


@dataclass(frozen=True)
class Bandwidth:
    """Ours must move its counted bytes at ``terabytes`` per second or faster."""

    terabytes: float

    def __str__(self) -> str:
        return f"≥ {self.terabytes:.3g} TB/s"

    @property
    def brief(self) -> str:
        return str(self)


@dataclass(frozen=True)
class FlopRate:
    """Ours must do its counted operations at ``teraflops`` per second or faster."""

    teraflops: float

    def __str__(self) -> str:
        return f"≥ {self.teraflops:.3g} TFLOP/s"

    @property
    def brief(self) -> str:
        return str(self)


@dataclass(frozen=True)
class TimeLimit:
    """A call of ours may take at most ``microseconds``."""

    microseconds: float

    def __str__(self) -> str:
        return f"≤ {self.microseconds:g} µs"

    @property
    def brief(self) -> str:
        return str(self)


Requirement = AtLeast | Within | SameRate | PeakMemory | Bandwidth | FlopRate | TimeLimit


def concerned(requirement: Requirement) -> str:
    """The contender in whose line a requirement stands."""
    match requirement:
        case AtLeast(_, peer) | Within(_, peer) | SameRate(_, peer):
            return peer
    return OURS


class Check(Protocol):
    """The truth of a case, or of the part of its result that can be had in float64."""

    def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
        """The checked part by the oracle, in the dtype of ``arguments``; gradients too where ``grad_out`` is given."""

    def pick(self, results: Outputs) -> Outputs:
        """The same part of full results."""


@dataclass(frozen=True)
class BenchCase:
    name: str
    group: str
    direction: Direction
    make: Callable[[Maker], Arguments]
    ours: Prepare
    check: Check
    differentiable: tuple[str, ...] = ()
    peers: tuple[Contender, ...] = ()
    flops: float = 0.0  # arithmetic that the visible work needs; 0 where there is none to speak of
    bytes: float = 0.0  # what must be read and written at least once
    requirements: tuple[Requirement, ...] = ()
    dtype: torch.dtype | None = None  # None: the suite's
    explicit: bool = False  # ours gives (output, *gradients) itself
    timed: Timed = "device"
    # Whether the arithmetic or the memory is what the work is counted in; None: the arithmetic where there is any.
    counted: Literal["flops", "bytes"] | None = None

    @property
    def key(self) -> str:
        """Names the case within its suite."""
        return f"{self.group} / {self.name} / {self.direction}"

    @property
    def counts_flops(self) -> bool:
        return self.counted == "flops" or (self.counted is None and self.flops > 0)

    @property
    def work(self) -> float:
        """Operations, or bytes where memory is the limit."""
        return self.flops if self.counts_flops else self.bytes

    def contenders(self) -> tuple[Contender, ...]:
        return (Contender(OURS, self.ours, explicit=self.explicit), *self.peers)


@dataclass(frozen=True)
class BenchSuite:
    """A named list of cases on one device. ``cases(quick)`` makes them; quick ones are tiny."""

    name: str
    device: str
    dtype: torch.dtype
    cases: Callable[[bool], list[BenchCase]]
    backend: str | None = None  # the Headwise backend that every call of ours uses; None: automatic
    # The thread count the suite's requirements are stated for.
    threads: int | None = None
    plan: Plan = field(default_factory=Plan)


def matches(case: BenchCase, text: str | None) -> bool:
    """Whether every word of ``text`` occurs in the case's key."""
    return all(word.lower() in case.key.lower() for word in (text or "").split())

"""What a benchmark case is: inputs, contenders, the work counted, and what is required of the outcome."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from headwise.benchmark.requirements import Mean, PeerRequirement, Requirement
from headwise.benchmark.timing import Plan, Timed
from headwise.testing import Arguments, Maker, Outputs

Direction = Literal["forward", "backward", "forward+backward"]

# prepare(arguments) does the untimed work, such as building a mask, and returns the call to time. The call returns the
# output; if the contender is `explicit`, the output and its gradients.
Prepare = Callable[[Arguments], Callable[[], Any]]

OURS = "headwise"
ANY_ORDER = "headwise, any order"  # ours with deterministic=False


class Absent(Exception):
    """A peer is not installed or cannot run this case. The message says why; the case runs without it."""


@dataclass(frozen=True)
class OwnLeaves:
    """The call of a yardstick with its own leaf tensors in place of the arguments of the case."""

    call: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]

    def __call__(self) -> Tensor:
        return self.call()


@dataclass(frozen=True)
class Contender:
    """An implementation that runs the case: ours, a peer that computes the same result, or a yardstick."""

    name: str
    prepare: Prepare
    # A yardstick computes something else, such as our plain attention beside attention with a softcap. It is timed, but
    # its result is not compared.
    yardstick: bool = False
    # The work of a yardstick, if it differs from that of the case.
    flops: float | None = None
    # Entered around everything the contender does, outside the timed part: it may select a kernel of PyTorch.
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    # The call returns (output, *gradients), without autograd.
    explicit: bool = False
    # Does it sum in a fixed order, so that it gives the same bits every time? None: not known to us. False is said of
    # gradients.
    deterministic: bool | None = None
    # Ours with other options: its result is held to the error budget as well, and it is no peer.
    variant: bool = False


def our_yardstick(name: str, prepare: Any, *, flops: float | None = None, explicit: bool = False) -> Contender:
    """A call of ours that computes something else. Ours sums in a fixed order unless it is told otherwise."""
    return Contender(name, prepare, yardstick=True, flops=flops, explicit=explicit, deterministic=True)


def concerned(requirement: Requirement) -> str:
    """The contender that a requirement compares ours with; ours, if it compares with none."""
    return requirement.peer if isinstance(requirement, PeerRequirement) else OURS


class Check(Protocol):
    """Computes the true result of a case, or of a part of it where the whole is too large for float64."""

    def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
        """The checked part by the oracle, in the dtype of ``arguments``; with gradients if ``grad_out`` is given."""

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
    flops: float = 0.0  # operations, without those on masked pairs; 0: too few to count
    bytes: float = 0.0  # bytes that must be read or written at least once
    requirements: tuple[Requirement, ...] = ()
    dtype: torch.dtype | None = None  # None: the suite's
    explicit: bool = False  # ours returns (output, *gradients)
    outputs: tuple[str, ...] = ("out",)  # names of the results of a forward; more than one come as a tuple
    timed: Timed = "device"
    recorded: bool = False  # a forward that autograd records, as in training
    # Of our own call: True unless it is made with deterministic=False; None: other people's operators take part in it.
    deterministic: bool | None = True
    most_rounds: int | None = None  # for calls that take many seconds; None: as many as the suite's plan has
    # What the work is counted in; None: operations, if there are any.
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
        ours = Contender(OURS, self.ours, explicit=self.explicit, deterministic=self.deterministic)
        return (ours, *self.peers)


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
    means: tuple[Mean, ...] = ()  # required of many cases together


def matches(case: BenchCase, text: str | None) -> bool:
    """Whether every word of ``text`` occurs in the case's key."""
    return all(word.lower() in case.key.lower() for word in (text or "").split())

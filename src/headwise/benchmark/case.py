"""What a benchmark case is: inputs, contenders, the work counted, and what is required of the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from headwise.testing import Arguments, Maker, Outputs

Direction = Literal["forward", "backward", "forward+backward"]

# prepare(arguments) does what need not be timed (building a mask) and returns the call that is timed.
Prepare = Callable[[Arguments], Callable[[], Tensor]]

OURS = "headwise"


@dataclass(frozen=True)
class Contender:
    """Somebody who runs the case: ours, a peer with the same result, or a yardstick."""

    name: str
    prepare: Prepare
    # A yardstick is timed beside ours and computes something else: our own plain attention beside attention with a
    # softcap. Its result is not compared.
    yardstick: bool = False


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
class PeakMemory:
    """Ours may hold at most ``limit`` bytes beyond its inputs, results included."""

    limit: int
    reason: str

    def __str__(self) -> str:
        return f"extra memory ≤ {self.reason}"

    @property
    def brief(self) -> str:
        return f"≤ {self.limit / 2**20:.4g} MiB"


Requirement = AtLeast | Within | PeakMemory


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
    flops: float = 0.0  # arithmetic that the visible work needs; 0 where memory is the limit
    bytes: float = 0.0  # what must be read and written at least once
    requirements: tuple[Requirement, ...] = ()

    @property
    def key(self) -> str:
        """Names the case within its suite."""
        return f"{self.group} / {self.name} / {self.direction}"

    def contenders(self) -> tuple[Contender, ...]:
        return (Contender(OURS, self.ours), *self.peers)


@dataclass(frozen=True)
class BenchSuite:
    """A named list of cases on one device. ``cases(quick)`` makes them; quick ones are tiny."""

    name: str
    device: str
    dtype: torch.dtype
    cases: Callable[[bool], list[BenchCase]]
    backend: str | None = None  # the Headwise backend that every call of ours uses; None: automatic
    # The thread count the suite's requirements are stated for.
    threads: int | None = field(default=None)


def matches(case: BenchCase, text: str | None) -> bool:
    """Whether every word of ``text`` occurs in the case's key."""
    return all(word.lower() in case.key.lower() for word in (text or "").split())

"""What a case requires of ours, and whether what was measured meets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwise.benchmark import timing


@dataclass(frozen=True)
class Measurement:
    """One contender of one case."""

    contender: str
    yardstick: bool
    flops: float  # that of the case, unless it is a yardstick with its own work
    seconds: timing.Spread
    rounds: int
    peak_extra_bytes: int
    ratio: timing.Spread | None  # its time over ours, paired by round; None for ours
    ratio_any_order: timing.Spread | None = None  # over ours with deterministic=False, where that was timed as well
    deterministic: bool | None = None  # as of its contender
    variant: bool = False


@dataclass(frozen=True)
class Figures:
    """What a requirement is judged by."""

    ours: Measurement
    peer: Measurement | None  # what ours is compared with; None: it was not measured
    bytes: float  # that the case counts
    input_bytes: int  # of one set of inputs


class Requirement:
    """What is required of ours. Both texts are formats of the requirement; the brief one stands in a column of its peer."""

    text: ClassVar[str]
    brief_text: ClassVar[str] = ""  # "": the text

    def __str__(self) -> str:
        return self.text.format(self)

    @property
    def brief(self) -> str:
        return (self.brief_text or self.text).format(self)

    def met(self, figures: Figures) -> bool | None:
        """None: there is nothing to compare ours with."""
        raise NotImplementedError


@dataclass(frozen=True)
class PeerRequirement(Requirement):
    """A comparison of ours with ``peer``, another contender of the case."""

    bound: float
    peer: str
    any_order: bool = False  # judged by ours with deterministic=False: like beside like

    def __str__(self) -> str:
        return super().__str__() + self._order

    @property
    def brief(self) -> str:
        return super().brief + self._brief_order

    @property
    def _order(self) -> str:
        return ", in any order" if self.any_order else ""

    @property
    def _brief_order(self) -> str:
        return " any order" if self.any_order else ""

    def needed_ratio(self, ours: Measurement, peer: Measurement) -> float | None:
        """What the time of ``peer`` over ours must reach; None: the comparison is not about time."""
        return None

    def met(self, figures: Figures) -> bool | None:
        if figures.peer is None:
            return None
        ratio = figures.peer.ratio_any_order if self.any_order else figures.peer.ratio
        needed = self.needed_ratio(figures.ours, figures.peer)
        return None if ratio is None or needed is None else ratio.median >= needed


class AtLeast(PeerRequirement):
    """Ours must be at least ``bound`` times as fast as ``peer``."""

    text = "≥ {0.bound:g}× as fast as {0.peer}"
    brief_text = "≥ {0.bound:g}×"

    def needed_ratio(self, ours: Measurement, peer: Measurement) -> float:
        return self.bound


class Within(PeerRequirement):
    """Ours may take at most ``bound`` times as long as ``peer`` (a yardstick)."""

    text = "≤ {0.bound:g}× the time of {0.peer}"

    @property
    def brief(self) -> str:
        return f"≥ {1 / self.bound:.2f}×{self._brief_order}"

    def needed_ratio(self, ours: Measurement, peer: Measurement) -> float:
        return 1 / self.bound


class SameRate(PeerRequirement):
    """Ours must do a share, ``bound``, of the operations per second of ``peer``, a yardstick with work of its own."""

    text = "≥ {0.bound:g} of the FLOP rate of {0.peer}"
    brief_text = "≥ {0.bound:g} of its rate"

    def needed_ratio(self, ours: Measurement, peer: Measurement) -> float:
        return self.bound * peer.flops / ours.flops


class MemoryShare(PeerRequirement):
    """Ours may hold at most the share ``bound`` of what ``peer`` holds at its worst moment, the inputs included."""

    text = "memory ≤ {0.bound:g} of that of {0.peer}"
    brief_text = "≤ {0.bound:g} of its memory"

    def met(self, figures: Figures) -> bool | None:
        if figures.peer is None:
            return None
        held = figures.input_bytes
        return held + figures.ours.peak_extra_bytes <= self.bound * (held + figures.peer.peak_extra_bytes)


@dataclass(frozen=True)
class PeakMemory(Requirement):
    """Ours may hold at most ``limit`` bytes beyond its inputs, results included."""

    limit: int
    reason: str
    text = "extra memory ≤ {0.reason}"

    @property
    def brief(self) -> str:
        return f"≤ {self.limit / 2**20:.4g} MiB"

    def met(self, figures: Figures) -> bool:
        return figures.ours.peak_extra_bytes <= self.limit


@dataclass(frozen=True)
class Bandwidth(Requirement):
    """Ours must move its counted bytes at ``terabytes`` per second or faster."""

    terabytes: float
    text = "≥ {0.terabytes:.3g} TB/s"

    def met(self, figures: Figures) -> bool:
        return figures.bytes / figures.ours.seconds.median >= self.terabytes * 1e12


@dataclass(frozen=True)
class FlopRate(Requirement):
    """Ours must do its counted operations at ``teraflops`` per second or faster."""

    teraflops: float
    text = "≥ {0.teraflops:.3g} TFLOP/s"

    def met(self, figures: Figures) -> bool:
        return figures.ours.flops / figures.ours.seconds.median >= self.teraflops * 1e12


@dataclass(frozen=True)
class TimeLimit(Requirement):
    """A call of ours may take at most ``microseconds``."""

    microseconds: float
    text = "≤ {0.limit}"

    @property
    def limit(self) -> str:
        return f"{self.microseconds * 1e-6:g} s" if self.microseconds >= 1e6 else f"{self.microseconds:g} µs"

    def met(self, figures: Figures) -> bool:
        return figures.ours.seconds.median <= self.microseconds * 1e-6


@dataclass(frozen=True)
class Mean:
    """The geometric mean, over all cases of some groups in one direction, of the best peer's time over ours."""

    name: str
    direction: str
    groups: tuple[str, ...]
    peers: tuple[str, ...]
    bound: float
    any_order: bool = False  # of ours with deterministic=False

"""Finds the tile that a kernel should use: measures candidates on this GPU, one shape class after the other.

A candidate must give the same result as the tile in use now, and be faster by more than the error of the clock. What a
GPU cannot run (too much shared memory, too many registers) is skipped and counted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import headwise as hw
from headwise.backends.triton import tile_sizes
from headwise.backends.triton.gpu import facts
from headwise.backends.triton.tile_sizes import AttentionTile
from headwise.benchmark import timing

# kernel -> the head dims it has classes for
KERNELS: dict[str, tuple[int, ...]] = {
    "attention_forward": (16, 32, 64, 128, 256, 512),
    "attention_backward_queries": (16, 32, 64, 128, 256),
    "attention_backward_keys": (16, 32, 64, 128, 256),
}
COMMON_HEAD_DIMS = (64, 128, 256)
BITS = (16, 32)

# The call that stands for a class: B·S and H·D as in the benchmark's attention table.
TOKENS, MODEL_WIDTH, LENGTH = 16384, 2048, 4096

FINALISTS = 4
GAIN = 0.99  # a new tile takes at most this share of the current time
_FIELDS: dict[str, tuple[int, ...]] = {
    "queries": (16, 32, 64, 128, 256),
    "keys": (16, 32, 64, 128),
    "warps": (4, 8),
    "stages": (1, 2, 3, 4),
    "registers": (0, 128, 168),  # 128: two programs of 8 warps fit a multiprocessor; 168: three of 4
    "passes": (1, 2),
}
_REGISTERS, _OTHER_REGISTERS = 255, 55  # per thread: the most, and what addresses and operands take at least


class ShapeClass(NamedTuple):
    kernel: str
    bits: int
    head_dim: int
    banded: bool

    @property
    def row(self) -> str:
        """The name of the class in a table."""
        return tile_sizes.shape_class(self.bits, self.head_dim, self.banded)

    def __str__(self) -> str:
        return f"{self.kernel}, {self.row}"


def classes(kernels: Iterable[str], head_dims: Iterable[int], bits: Iterable[int]) -> list[ShapeClass]:
    """Every class of these that exists, causal and not."""
    return [
        ShapeClass(kernel, width, head_dim, banded)
        for kernel, width, head_dim, banded in product(kernels, bits, head_dims, (False, True))
        if head_dim in KERNELS[kernel]
    ]


class Search(NamedTuple):
    """How many steps around the fastest tile are tried, and how often the search may move to a faster one."""

    radius: int
    moves: int


CLIMB, QUICK, EVERYTHING = Search(2, 4), Search(1, 1), Search(99, 1)


def grid(of: ShapeClass, shared_memory: int, bf16x3: bool = False) -> list[AttentionTile]:
    """The tiles that a class could use."""
    tiles = [
        AttentionTile(**dict(zip(_FIELDS, values, strict=True)), bf16x3=bf16x3) for values in product(*_FIELDS.values())
    ]
    if of.kernel != "attention_backward_keys":  # only this kernel has two passes
        tiles = [t for t in tiles if t.passes == 1]
    if torch.version.hip is not None:  # ROCm cannot limit registers
        tiles = [t for t in tiles if t.registers == 0]
    return [t for t in tiles if _may_fit(of, t, shared_memory)]


def steps(a: AttentionTile, b: AttentionTile) -> int:
    """How many steps of the grid lie between two tiles."""
    return sum(
        abs(_nearest(values, getattr(a, name)) - _nearest(values, getattr(b, name))) for name, values in _FIELDS.items()
    )


def _nearest(values: tuple[int, ...], x: int) -> int:
    return min(range(len(values)), key=lambda i: abs(values[i] - x))


def _may_fit(of: ShapeClass, tile: AttentionTile, shared_memory: int) -> bool:
    """Whether registers and shared memory could suffice, by what a tile must hold at the very least."""
    element = 6 if tile.bf16x3 else of.bits // 8
    scores = tile.queries * tile.keys
    if of.kernel == "attention_backward_keys":
        sums, streamed = 2 // tile.passes * tile.keys * of.head_dim, 2 * tile.queries
    else:
        sums, streamed = tile.queries * of.head_dim, 2 * tile.keys
    in_flight = max(1, tile.stages - 1) * streamed * of.head_dim * element
    per_thread = (tile.registers or _REGISTERS) - _OTHER_REGISTERS
    return sums + scores <= tile.warps * 32 * per_thread and in_flight <= shared_memory


class Bench(Protocol):
    """Runs the call that stands for a class."""

    def current(self) -> AttentionTile:
        """The tile in use now."""

    def results(self, tile: AttentionTile) -> list[Tensor]:
        """What the call gives with this tile; raises where the GPU cannot run it."""

    def seconds(self, tiles: Sequence[AttentionTile], rounds: int) -> dict[AttentionTile, float]:
        """Median time of each, measured in turn."""


@dataclass
class Outcome:
    of: ShapeClass
    current: AttentionTile
    best: AttentionTile
    current_s: float
    best_s: float
    tried: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # why -> how many

    @property
    def gain(self) -> float:
        return self.current_s / self.best_s


# Called after every candidate.
Tick = Callable[[], None]
# Compiles candidates: those that run, and why the others do not.
Screen = Callable[[ShapeClass, list[AttentionTile]], tuple[list[AttentionTile], Counter[str]]]


def tune_class(
    of: ShapeClass,
    bench: Bench,
    tiles: Sequence[AttentionTile],
    search: Search = CLIMB,
    screen: Screen = lambda of, tiles: (tiles, Counter()),
    tick: Tick = lambda: None,
) -> Outcome:
    """The fastest of the tile in use and those of ``tiles`` that the search meets on its way from there."""
    current = bench.current()
    expected = bench.results(current)
    seconds = bench.seconds([current], 1)
    skipped: Counter[str] = Counter()
    seen, centre = {current}, current
    for _ in range(search.moves):
        near = [t for t in tiles if t not in seen and steps(t, centre) <= search.radius]
        seen.update(near)
        working, failed = screen(of, near)
        skipped += failed
        for tile in working:
            try:
                if difference(bench.results(tile), expected):
                    skipped["wrong result"] += 1
                else:
                    seconds.update(bench.seconds([tile], 1))
            except Exception as error:  # of the compiler, the driver or the GPU
                skipped[reason(error)] += 1
            tick()
        fastest = min(seconds, key=lambda tile: seconds[tile])
        if fastest == centre:
            break
        centre = fastest
    finalists = sorted(seconds, key=lambda tile: seconds[tile])[:FINALISTS]
    final = bench.seconds(list(dict.fromkeys([current, *finalists])), 9)
    best = min(final, key=lambda tile: final[tile])
    if final[best] > GAIN * final[current]:
        best = current
    return Outcome(of, current, best, final[current], final[best], len(seen) - 1, skipped)


def difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """0 if two results agree up to rounding, else their relative distance (NaN counts as infinite)."""
    for mine, other in zip(results, expected, strict=True):
        allowed = (64 if other.dtype == torch.float32 else 2) * torch.finfo(other.dtype).eps
        size, distance = other.double().norm().item(), (mine.double() - other.double()).norm().item()
        if not distance <= allowed * size:
            return math.inf if math.isnan(distance) or size == 0 else distance / size
    return 0.0


def reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".lower()
    for words, reason in (
        ("out of resource", "out of shared memory or registers"),
        ("resources", "too large to launch"),
    ):
        if words in text:
            return reason
    return type(error).__name__


class CallBench:
    """The call of a class on a device: causal where the class is banded, `attention` forward or its gradients."""

    def __init__(self, of: ShapeClass, device: torch.device, length: int = LENGTH, tokens: int = TOKENS) -> None:
        self._of, self._device = of, device
        dtype = torch.bfloat16 if of.bits == 16 else torch.float32
        heads = max(1, MODEL_WIDTH // of.head_dim)
        shape = (tokens // length, heads, length, of.head_dim)
        generator = torch.Generator(device).manual_seed(0)
        q, k, v, self._grad = (torch.randn(shape, generator=generator, dtype=dtype, device=device) for _ in range(4))
        self._leaves = [x.requires_grad_(of.kernel != "attention_forward") for x in (q, k, v)]
        self._kept: Tensor | None = None

    def current(self) -> AttentionTile:
        return tile_sizes.tile(*self._of, facts(self._device.index or 0).arch)

    def results(self, tile: AttentionTile) -> list[Tensor]:
        with tile_sizes.forced(self._of.kernel, tile):
            results = list(self._call())
            self._wait()
        return [x.detach() for x in results]

    def seconds(self, tiles: Sequence[AttentionTile], rounds: int) -> dict[AttentionTile, float]:
        @contextmanager
        def scope(tile: AttentionTile) -> Iterator[None]:
            with tile_sizes.forced(self._of.kernel, tile):
                yield

        by_name = {str(tile): tile for tile in tiles}
        plan = timing.Plan(repeats=rounds, sample_s=0.01, most_calls=50)
        measured = timing.interleave(
            dict.fromkeys(by_name, self._call),
            timing.clock_for(self._device.type),
            plan,
            {name: lambda tile=tile: scope(tile) for name, tile in by_name.items()},  # type: ignore[misc]
        )
        return {by_name[name]: timing.Spread.of(values).median for name, values in measured.items()}

    def _call(self) -> tuple[Tensor, ...]:
        if self._of.kernel == "attention_forward":
            with torch.no_grad():
                return (self._attention(),)
        if self._kept is None:
            self._kept = self._attention()
        return torch.autograd.grad(self._kept, self._leaves, self._grad, retain_graph=True)

    def _attention(self) -> Tensor:
        q, k, v = self._leaves
        out = hw.attention(q, k, v, causal=self._of.banded, backend="triton")
        assert isinstance(out, Tensor)
        return out

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def try_small(of: ShapeClass, tile: AttentionTile) -> str:
    """Compile and run a small call of the class on the current GPU; empty, or why it does not work.

    In a process of its own: the measuring process finds the compiled kernel in Triton's cache on disk, and is not
    affected by a kernel that breaks the state of the GPU.
    """
    try:
        CallBench(of, torch.device("cuda"), length=512, tokens=512).results(tile)
    except Exception as error:
        return reason(error)
    return ""


def table_row(tile: AttentionTile) -> dict[str, int]:
    """As in a table: without fields that have their default."""
    return {name: value for name, value in tile._asdict().items() if value != AttentionTile._field_defaults.get(name)}


def write_table(path: Path, architecture: str, measured_on: str, tiles: tile_sizes.Table) -> None:
    """Write a table; update the rows of an existing one, which must be of the same architecture."""
    rows: tile_sizes.Table = {}
    if path.exists():
        there = read_table(path)
        if there["architecture"] != architecture:
            raise ValueError(f"{path} is a table of {there['architecture']}, and this GPU needs {architecture}")
        rows = there["tiles"]
    for kernel, own in tiles.items():
        rows.setdefault(kernel, {}).update(own)
    content = {"architecture": architecture, "measured_on": measured_on, "tiles": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_table(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not {"architecture", "tiles"} <= content.keys():
        raise ValueError(f"{path} is no tile table: it has no architecture or no tiles")
    return content

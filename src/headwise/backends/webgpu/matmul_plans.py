"""Which kernel computes a product on WebGPU, and in which tiles: from sizes and limits alone."""

from __future__ import annotations

from typing import NamedTuple

from headwise.backends.webgpu.adapter import Capabilities

# Products that are added up in one chain. A float32 sum of tens of thousands in one chain loses a digit.
CHAIN = 512
MOST_ROWS = 4  # of the kernel for few rows

_LEAST_PART = 128  # products of a part of k that are worth a workgroup of their own
_MOST_PARTS = 32

# What the cost of a plan is worked out for: a large GPU (NVIDIA H200). A smaller one gets parts that it does not need, and
# loses a pass over a small result.
_PROCESSORS = 132
_PROLOGUE = 96  # products that beginning and ending a tile takes as long as
_BYTES = 4.7e-6  # of memory traffic, in products of a tile of 128 × 128
_LEAST = 4096  # area of a tile below which a processor waits for its memory


class Tile(NamedTuple):
    """Of `wgsl/matmul.wgsl`."""

    m: int
    n: int
    deep: int  # columns of a and rows of b in workgroup memory
    of_m: int  # of a thread
    of_n: int
    stages: int = 1  # times of them
    speed: float = 1.0  # of a large product, against the fastest tile

    @property
    def threads(self) -> int:
        return self.m // self.of_m * (self.n // self.of_n)

    @property
    def memory(self) -> int:
        return 16 * self.deep * self.stages * (self.m // 4 + self.n // 4 + 2)

    @property
    def step(self) -> int:
        return self.deep * self.stages

    def workgroups(self, m: int, n: int) -> int:
        return -(-m // self.m) * -(-n // self.n)


class Plan(NamedTuple):
    tile: Tile
    part: int  # products of a part of k; k itself: it is not cut


class Rows(NamedTuple):
    """Of `wgsl/matmul_rows.wgsl`."""

    rows: int
    threads: int
    lanes: int
    columns: int
    ahead: int

    def of_workgroup(self, along_k: bool) -> int:
        return self.columns * self.threads // self.lanes if along_k else 4 * self.lanes

    def step(self, along_k: bool) -> int:
        return 4 * self.lanes if along_k else self.threads // self.lanes


# Their speed is what an H200 does in float32, 4096 cubed.
_TILES = (
    Tile(128, 128, 8, 8, 8, stages=2),
    Tile(128, 128, 8, 8, 8, speed=0.85),  # for 16 KiB of workgroup memory
    Tile(128, 64, 16, 8, 8, speed=0.85),
    Tile(64, 64, 16, 8, 8, speed=0.8),
    Tile(32, 64, 16, 4, 8, speed=0.6),
    Tile(16, 64, 16, 4, 4, speed=0.4),
)
# Software: a kernel of many lines takes long to compile there.
_OF_SOFTWARE = (Tile(32, 32, 8, 4, 4),)


def plan_for(capabilities: Capabilities, m: int, n: int, k: int, batch: int, cut: bool) -> Plan:
    """The tile and the parts of k that cost least. cut: may k be cut?"""
    tiles = _OF_SOFTWARE if capabilities.kind == "CPU" else _TILES
    fitting = [
        t for t in tiles
        if t.threads <= capabilities.workgroup_threads and t.memory <= capabilities.workgroup_memory
    ]  # fmt: skip
    plans = [
        Plan(tile, part_of(k, parts, tile.step))
        for tile in fitting
        for parts in range(1, max(1, min(_MOST_PARTS, k // _LEAST_PART)) + 1 if cut else 2)
    ]
    return min(plans, key=lambda plan: _cost(plan, m, n, k, batch))


def part_of(k: int, parts: int, step: int) -> int:
    """Products of each of about so many parts: whole steps, or all of them; one at least."""
    wanted = -(-k // parts)
    return max(1, k if parts == 1 else min(k, -(-wanted // step) * step))


def _cost(plan: Plan, m: int, n: int, k: int, batch: int) -> float:
    """In products of a tile of 128 × 128 that two workgroups of a processor have in turn."""
    tile, parts = plan.tile, -(-k // plan.part)
    workgroups = tile.workgroups(m, n) * parts * batch
    area = tile.m * tile.n
    at_once = 256 // tile.threads * 2  # workgroups of a processor
    rounds, rest = divmod(workgroups, at_once * _PROCESSORS)
    busy = rounds * at_once * area + (max(_LEAST, -(-rest // _PROCESSORS) * area) if rest else 0)
    summed = (2 * parts + 1) * m * n * batch * _BYTES + 24 if parts > 1 else 0.0
    return busy / (2 * 128 * 128) * (plan.part + _PROLOGUE) / tile.speed + summed


def rows_for(m: int, k: int, along_k: bool) -> Rows:
    rows = 1 << (m - 1).bit_length()
    if along_k:
        return Rows(rows, 128, 128, 4, max(1, 2 // rows)) if k >= 4096 else Rows(rows, 128, 32, 4, 1)
    return Rows(rows, 256, 8, 4, max(1, 4 // rows))


def part_of_rows(k: int, groups: int, step: int) -> int:
    """Products of a part of k for a few rows: enough workgroups to keep memory busy."""
    return part_of(k, max(1, min(4 * _PROCESSORS // groups, k // (4 * step), _MOST_PARTS)), step)

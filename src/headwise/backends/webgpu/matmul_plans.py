"""Which kernel computes a product on WebGPU, and in which tiles: from sizes and limits alone."""

from __future__ import annotations

from typing import NamedTuple

from headwise.backends.webgpu.adapter import Capabilities

# Products that are added up in one chain. A float32 sum of tens of thousands in one chain loses a digit.
CHAIN = 512
MOST_ROWS = 4  # of the kernel for few rows

_LEAST_SPLIT = 128  # products of a split of k that are worth a workgroup of their own
_MOST_SPLITS = 32

# What the cost of a plan is worked out for: a large GPU (NVIDIA H200). A smaller one gets splits that it does not need, and
# loses a pass over a small result.
_PROCESSORS = 132
_PROLOGUE = 96  # products that beginning and ending a tile takes as long as
_BYTES = 4.7e-6  # of memory traffic, in products of a tile of 128 × 128
_LEAST = 4096  # area of a tile below which a processor waits for its memory


class GemmTile(NamedTuple):
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
    tile: GemmTile
    split: int  # products of a split of k; k itself: it is not cut


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
    GemmTile(128, 128, 8, 8, 8, stages=2),
    GemmTile(128, 128, 8, 8, 8, speed=0.85),  # for 16 KiB of workgroup memory
    GemmTile(128, 64, 16, 8, 8, speed=0.85),
    GemmTile(64, 64, 16, 8, 8, speed=0.8),
    GemmTile(32, 64, 16, 4, 8, speed=0.6),
    GemmTile(16, 64, 16, 4, 4, speed=0.4),
)
# Software: a kernel of many lines takes long to compile there.
_OF_SOFTWARE = (GemmTile(32, 32, 8, 4, 4),)


def plan_for(capabilities: Capabilities, m: int, n: int, k: int, batch: int, cut: bool) -> Plan:
    """The tile and the splits of k that cost least. cut: may k be cut?"""
    tiles = _OF_SOFTWARE if capabilities.kind == "CPU" else _TILES
    fitting = [
        t for t in tiles
        if t.threads <= capabilities.workgroup_threads and t.memory <= capabilities.workgroup_memory
    ]  # fmt: skip
    most = min(_most_splits(capabilities, m, n, batch), k // _LEAST_SPLIT) if cut else 1
    plans = [Plan(tile, split_of(k, splits, tile.step)) for tile in fitting for splits in range(1, max(1, most) + 1)]
    return min(plans, key=lambda plan: _cost(plan, m, n, k, batch))


def _most_splits(capabilities: Capabilities, m: int, n: int, batch: int) -> int:
    """Splits of k whose partials one kernel can bind."""
    return min(_MOST_SPLITS, capabilities.binding_bytes // (4 * m * n * batch))


def split_of(k: int, splits: int, step: int) -> int:
    """Products of each of at most so many splits: whole steps, or all of them; one at least."""
    wanted = -(-k // splits)
    return max(1, k if splits == 1 else min(k, -(-wanted // step) * step))


def _cost(plan: Plan, m: int, n: int, k: int, batch: int) -> float:
    """In products of a tile of 128 × 128 that two workgroups of a processor have in turn."""
    tile, splits = plan.tile, -(-k // plan.split)
    workgroups = tile.workgroups(m, n) * splits * batch
    area = tile.m * tile.n
    at_once = 256 // tile.threads * 2  # workgroups of a processor
    rounds, rest = divmod(workgroups, at_once * _PROCESSORS)
    busy = rounds * at_once * area + (max(_LEAST, -(-rest // _PROCESSORS) * area) if rest else 0)
    summed = (2 * splits + 1) * m * n * batch * _BYTES + 24 if splits > 1 else 0.0
    return busy / (2 * 128 * 128) * (plan.split + _PROLOGUE) / tile.speed + summed


def rows_for(m: int, k: int, along_k: bool) -> Rows:
    rows = 1 << (m - 1).bit_length()
    if along_k:
        return Rows(rows, 128, 128, 4, max(1, 2 // rows)) if k >= 4096 else Rows(rows, 128, 32, 4, 1)
    return Rows(rows, 256, 8, 4, max(1, 4 // rows))


def split_of_rows(k: int, groups: int, step: int) -> int:
    """Products of a split of k for a few rows: enough workgroups to keep memory busy. The partials are smaller than b."""
    return split_of(k, max(1, min(4 * _PROCESSORS // groups, k // (4 * step), _MOST_SPLITS)), step)

"""Tile sizes of the attention kernels: data in ``tiles.json``, never searched in a user's process.

The file maps a kernel and a class of adapters to a list of tiles, largest first. The first one is used that is meant for
the head dim, fits the adapter's limits and keeps the whole GPU busy; if none is listed, `default_forward` makes one from
the limits alone.

Classes, most specific first: ``"<vendor> subgroups"``, ``"subgroups"`` with them; ``"<vendor> plain"``, ``"plain"`` without.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwise.backends.webgpu.adapter import FLOOR_WORKGROUP_MEMORY, Capabilities
from headwise.config import settings

FILE = Path(__file__).with_name("tiles.json")
VENDORS = {0x10DE: "nvidia", 0x1002: "amd", 0x8086: "intel", 0x106B: "apple", 0x5143: "qualcomm", 0x13B5: "arm"}

# Rows that a float32 sum may add in one chain. The rounding error grows with the chain: for values with a mean of one
# standard deviation, 1024 rows take up to 1.2 times the error budget, and 512 take 0.6 of it.
CHAIN = 512

# Registers of a lane for q and out: more than this spills on some GPUs.
_MOST_REGISTERS = 160


class ForwardTile(NamedTuple):
    """Template variables of ``wgsl/attention_forward.wgsl``."""

    rows: int  # of queries that a team of lanes shares
    lanes: int  # of a team
    threads: int  # of a workgroup
    keys: int  # in workgroup memory
    unroll: int  # keys worked on at once
    apart: int = 1  # threads from one lane of a team to the next

    @property
    def queries(self) -> int:
        return self.threads // self.lanes * self.rows

    def memory(self, q_vectors: int, v_vectors: int, subgroups: bool, hides: bool = False) -> int:
        """Bytes of workgroup memory. hides: with a mask or bias."""
        of_a_key = sum(-(-vectors // self.lanes) * self.lanes for vectors in (q_vectors, v_vectors))
        exchanged = 0
        if not subgroups:
            numbers = self.rows - (self.rows == self.lanes) + 1  # products of rows, and weights
            exchanged = 4 * self.threads * (numbers * self.unroll + 1 + hides)
        return 16 * self.keys * of_a_key + exchanged

    def of_fours(self) -> ForwardTile:
        """With keys worked on at once that are vectors of four, if they were four or more: for biases."""
        unroll = self.unroll // 4 * 4 or self.unroll
        return self._replace(keys=self.keys // self.unroll * unroll, unroll=unroll)

    def registers(self, q_vectors: int, v_vectors: int) -> int:
        return 4 * self.rows * sum(-(-vectors // self.lanes) for vectors in (q_vectors, v_vectors))


_forced: dict[str, ForwardTile] = {}


@contextmanager
def forced(kernel: str, tile: ForwardTile) -> Iterator[None]:
    """Within the block every call of ``kernel`` uses this tile, whatever the file says: for measuring."""
    _forced[kernel] = tile
    settings.changed()  # records with other tiles must not be replayed
    try:
        yield
    finally:
        del _forced[kernel]
        settings.changed()


def forward(
    capabilities: Capabilities, bits: int, q_vectors: int, v_vectors: int, queries: int, heads: int, hides: bool
) -> ForwardTile:
    """The tile for rows of q and v of this many vectors, and ``queries`` rows in each of ``heads`` heads. hides: with a mask
    or bias."""
    return _forced.get("attention_forward") or _forward(capabilities, bits, q_vectors, v_vectors, queries, heads, hides)


@functools.lru_cache(maxsize=4096)
def _forward(
    capabilities: Capabilities, bits: int, q_vectors: int, v_vectors: int, queries: int, heads: int, hides: bool
) -> ForwardTile:
    subgroups = capabilities.tier >= "C"
    enough = busy(capabilities)
    known = [
        ForwardTile(**entry) for entry in listed("attention_forward", capabilities, bits, max(q_vectors, v_vectors))
    ]
    fitting = [
        tile
        for tile in known
        if tile.memory(q_vectors, v_vectors, subgroups, hides) <= capabilities.workgroup_memory
        and tile.threads <= capabilities.workgroup_threads
        and (not subgroups or tile.lanes * tile.apart <= capabilities.subgroup_size)
    ]
    if not fitting:
        tile = default_forward(capabilities, q_vectors, v_vectors, hides)
        smaller = tile.threads
        while smaller >= max(32, tile.lanes):
            fitting.append(tile._replace(threads=smaller))
            smaller //= 2
    return next((tile for tile in fitting if heads * -(-queries // tile.queries) >= enough), fitting[-1])


def chain(dtype: torch.dtype, rows: int) -> int:
    """Rows after which a sum over ``rows`` goes to memory and starts again; 0 for never, as always with 16 bits."""
    return CHAIN if dtype == torch.float32 and rows > CHAIN else 0


def default_forward(capabilities: Capabilities, q_vectors: int, v_vectors: int, hides: bool = False) -> ForwardTile:
    """A tile for any head dim up to 512 that fits every adapter of the tier."""
    subgroups = capabilities.tier >= "C"
    widest = max(q_vectors, v_vectors)
    most_lanes = min(capabilities.subgroup_size, 32) if subgroups else 32
    lanes = 4
    while lanes < most_lanes and -(-widest // lanes) > 4:
        lanes *= 2
    tile = ForwardTile(rows=4, lanes=lanes, threads=128 if subgroups else 64, keys=32, unroll=8 if subgroups else 4)
    while tile.rows > 1 and tile.registers(q_vectors, v_vectors) > _MOST_REGISTERS:
        tile = tile._replace(rows=tile.rows // 2)
    memory = min(capabilities.workgroup_memory, FLOOR_WORKGROUP_MEMORY)
    while tile.memory(q_vectors, v_vectors, subgroups, hides) > memory:
        if tile.keys > tile.unroll:
            tile = tile._replace(keys=tile.keys - tile.unroll)
        else:
            tile = tile._replace(keys=tile.unroll // 2, unroll=tile.unroll // 2)
    return tile


# ----------------------------------------------------------------------------------------------------------- the file


def listed(kernel: str, capabilities: Capabilities, bits: int, vectors: int) -> list[dict[str, Any]]:
    """The file's tiles for a kernel on this adapter and heads of ``vectors`` vectors of four, without their conditions."""
    for name in classes(capabilities):
        entries = table()["tiles"].get(kernel, {}).get(name, [])
        fitting = [e for e in entries if e["from"] <= 4 * vectors <= e["to"] and e.get("bits", bits) == bits]
        if fitting:
            return [{k: v for k, v in e.items() if k not in ("from", "to", "bits")} for e in fitting]
    return []


def classes(capabilities: Capabilities) -> list[str]:
    kind = "subgroups" if capabilities.tier >= "C" else "plain"
    return [f"{VENDORS.get(capabilities.vendor, 'other')} {kind}", kind]


def busy(capabilities: Capabilities) -> int:
    """Workgroups that keep the GPU busy. WebGPU does not tell the number of processors: the file has a guess."""
    guesses = table()["workgroups"]
    return int(guesses.get(VENDORS.get(capabilities.vendor, "other"), guesses["other"]))


@functools.lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content

"""A call like an earlier one is replayed: what a launcher did with shapes it has seen is kept as a list of allocations and
dispatches, and done again with other memory. A small op on arrays then costs the host little more than its dispatch.

A launcher is a function of shapes, strides, dtypes and plain numbers alone (it never looks at elements), so two calls that
agree in those record the same list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.webgpu.runtime import Device, Kernel, Trace
from headwise.backends.webgpu.storage import Region, Storage

_MOST_KEPT = 4096


class _Dispatch(NamedTuple):
    kernel: Kernel
    groups: tuple[int, ...]
    data: bytes
    bound: tuple[tuple[int, int, int], ...]  # (which storage, first byte, bytes)


class _Result(NamedTuple):
    storage: int
    like: Region


class Plan(NamedTuple):
    sizes: tuple[int, ...]  # bytes of every allocation
    dispatches: tuple[_Dispatch, ...]
    results: tuple[_Result, ...]
    kind: type | None  # of a sequence of results; None: one alone

    def replay(self, device: Device, storages: list[Storage]) -> list[Region]:
        """``storages``: those of the arguments. The new regions, in the order of the results."""
        take = device.pool.take
        for size in self.sizes:
            storages.append(take(size))
        for kernel, groups, data, bound in self.dispatches:
            bindings = []
            for which, first, size in bound:
                storage = storages[which]
                device.touch(storage)
                bindings.append((storage.buffer, first, size))
            device.dispatch(kernel, groups, data, bindings)
        return [result.like.on(storages[result.storage]) for result in self.results]


def plan_of(trace: Trace, given: list[Storage], results: Any) -> Plan | None:
    """A plan of what was traced; None where the launcher did more than allocate and dispatch."""
    if not trace.replayable:
        return None
    places: dict[int, int] = {}
    for i, storage in enumerate([*given, *trace.storages]):
        places.setdefault(id(storage), i)
    one = isinstance(results, Region)
    made = [results] if one else list(results)
    used = [s for *_, bound in trace.dispatches for s, _, _ in bound] + [region.storage for region in made]
    if any(id(storage) not in places for storage in used):
        return None  # memory that is neither an argument's nor this call's: something a launcher keeps for itself
    return Plan(
        tuple(storage.size for storage in trace.storages),
        tuple(
            _Dispatch(kernel, groups, data, tuple((places[id(s)], first, size) for s, first, size in bound))
            for kernel, groups, data, bound in trace.dispatches
        ),
        tuple(_Result(places[id(region.storage)], region.on(None)) for region in made),
        None if one else type(results),
    )


def keep(device: Device, key: Any, plan: Plan) -> None:
    if len(device.plans) >= _MOST_KEPT:
        device.plans.clear()
    device.plans[key] = plan

"""A call like an earlier one is replayed: what a launcher did with shapes it has seen is kept as a list of allocations and
dispatches, and done again with other memory. A small op on arrays then costs the host little more than its dispatch.

A launcher is a function of shapes, strides, dtypes and plain numbers alone (it never looks at elements), so two calls that
agree in those record the same list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.backends.webgpu.runtime import Device, Kernel, Prepared, Trace
from headwise.backends.webgpu.storage import Region, Storage, contiguous_strides

_MOST_KEPT = 4096


class _Dispatch(NamedTuple):
    kernel: Kernel
    groups: tuple[int, ...]
    data: bytes
    bound: tuple[tuple[int, int, int], ...]  # (which storage, first byte, bytes)


class Result(NamedTuple):
    storage: int  # which
    like: Region
    plain: bool  # contiguous, from the beginning of its memory


class Plan:
    """What a launcher did: what it allocated, what it dispatched, what it gave back."""

    __slots__ = ("dispatches", "kind", "results", "sizes")

    def __init__(
        self,
        sizes: tuple[int, ...],  # of every buffer it took
        dispatches: tuple[_Dispatch, ...],
        results: tuple[Result, ...],
        kind: type | None,  # of a sequence of results; None: one alone
    ) -> None:
        self.sizes, self.dispatches, self.results, self.kind = sizes, dispatches, results, kind

    def replay(self, device: Device, storages: list[Storage]) -> None:
        """``storages``: those of the arguments; what is taken is appended."""
        take = device.pool.take_again
        for size in self.sizes:
            storages.append(take(size))
        # Memory comes back from the pool in the order it went there: what is bound here was bound together before.
        key = (self, *[storage.buffer for storage in storages])
        prepared = device.prepared.get(key)
        if prepared is None:
            prepared = device.keep_prepared(key, [self._prepare(device, one, storages) for one in self.dispatches])
        device.dispatch_prepared(prepared)
        recording = device.recording
        for storage in storages:
            storage.last_use = recording

    def _prepare(self, device: Device, dispatch: _Dispatch, storages: list[Storage]) -> Prepared:
        bound = [(storages[which].buffer, first, size) for which, first, size in dispatch.bound]
        return device.prepare(dispatch.kernel, dispatch.groups, dispatch.data, bound)


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
        tuple(_result(places[id(region.storage)], region) for region in made),
        None if one else type(results),
    )


def _result(storage: int, region: Region) -> Result:
    plain = region.offset == 0 and region.strides == contiguous_strides(region.shape)
    return Result(storage, region.on(None), plain)


def keep(device: Device, number: int, plan: Plan) -> None:
    """Under the number of the call."""
    if len(device.plans) >= _MOST_KEPT:
        device.plans.clear()
    device.plans[number] = plan

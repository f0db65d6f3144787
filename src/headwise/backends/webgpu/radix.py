"""A stable radix sort of whole numbers (``wgsl/radix_sort.wgsl``): linear in their number."""

from __future__ import annotations

import torch

from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

RUN = 16  # neighbouring keys of a thread
_THREADS = 128  # of a workgroup


def sorted_ids(device: Device, ids: Region, classes: int, padding: int) -> tuple[Region, Region]:
    """Sorted ids, and the place of each. Ids outside of 0 … classes - 1, and the padding, become ``classes``."""
    return _sorted(device, {"ids": ids}, DTYPES[ids.dtype], (1, ids.shape[0]), classes.bit_length(), classes, padding)


def sorted_keys(device: Device, keys: Region, bits: int, places: Region | None = None) -> tuple[Region, Region]:
    """The sorted rows of keys ``(rows, count)``, words of which the lower ``bits`` count, and the place of each in its row.

    places: what each key brings along in place of its place.
    """
    given = {"keys": keys} if places is None else {"keys": keys, "places": places}
    rows, count = keys.shape
    return _sorted(device, given, "", (rows, count), bits, 0, 0)


def _sorted(
    device: Device,
    given: dict[str, Region],
    ids: str,
    shape: tuple[int, int],
    key_bits: int,
    classes: int,
    padding: int,
) -> tuple[Region, Region]:
    rows, count = shape
    # More bits per pass mean fewer passes and more workgroup memory.
    bits = 6 if device.capabilities.workgroup_memory >= 4 * 64 * (_THREADS + 1) else 4
    tiles = -(-count // (_THREADS * RUN))
    counts = device.empty((rows * 2**bits * tiles,), torch.int32)
    for shift in range(0, key_bits, bits):
        parameters = (rows, count, tiles, shift, classes, padding)
        read = {name: x for name, x in given.items() if name != "places"}
        variant = {"bits": bits, "threads": _THREADS, "run": RUN}
        step = device.kernel("radix_sort", step="count", ids=ids, placed=False, **variant)
        device.run(step, rows * tiles, parameters, counts=counts, **read)
        step = device.kernel("radix_sort", step="scan", ids="", placed=False, **variant)
        device.run(step, rows, parameters, counts=counts)
        step = device.kernel("radix_sort", step="scatter", ids=ids, placed="places" in given, **variant)
        keys, places = (device.empty(shape if rows > 1 else (count,), torch.int32) for _ in range(2))
        device.run(step, rows * tiles, parameters, counts=counts, sorted_keys=keys, sorted_places=places, **given)
        given, ids = {"keys": keys, "places": places}, ""
    return given["keys"], given["places"]

"""Which GPU WebGPU runs on, and what it can do.

Feature tiers:

A   what every WebGPU device has, and nothing else: 16 KiB of workgroup memory, 256 threads, 8 storage buffers
B   as A, with the f16 feature (no kernel needs it: built-ins of tier A pack and unpack 16-bit floats)
C   subgroups: threads of a row exchange numbers in registers instead of through workgroup memory

The highest tier that the adapter supports is used; ``HEADWISE_WEBGPU_TIER`` selects a lower one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import wgpu
from wgpu.backends.wgpu_native import extras

from headwise.config import settings

TIERS = "ABC"

# The limits that WebGPU guarantees (https://www.w3.org/TR/webgpu/#limits). Tier A exceeds only those on buffer sizes.
FLOOR_WORKGROUP_MEMORY = 16384
FLOOR_WORKGROUP_THREADS = 256
FLOOR_STORAGE_BUFFERS = 8
MOST_GROUPS = 65535  # in one dimension of a grid

_BEST_FIRST = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "CPU", "Unknown")

# Harmless messages that drivers print when they are loaded.
_NOISE = (b"XDG_RUNTIME_DIR", b"is not a conformant")

# The narrowest subgroup that a vendor's compilers choose, where it varies from kernel to kernel (Intel, AMD).
NARROWEST_SUBGROUP = {0x8086: 8, 0x1002: 32}


class NoAdapter(RuntimeError):
    """No GPU that WebGPU could run on. The message says what to install, or which adapters there are."""


class Capabilities(NamedTuple):
    name: str
    kind: str  # "DiscreteGPU", "IntegratedGPU", "CPU", …
    driver: str  # "Vulkan", "Metal", "D3D12"
    vendor: int  # PCI vendor id
    tier: str
    subgroup_size: int  # the smallest a kernel may meet; 0 below tier C
    workgroup_memory: int  # bytes
    workgroup_threads: int
    storage_buffers: int
    binding_bytes: int  # of a buffer that one kernel can see at once
    buffer_bytes: int  # of one allocation
    timestamps: bool
    native_half: bool = False  # does pack2x16float round to nearest even? Probed when the device opens


def summaries() -> list[str]:
    """All adapters of this machine, one line each: HEADWISE_WEBGPU_ADAPTER matches a part of such a line."""
    return [a.summary for a in _adapters()]


def _adapters() -> list[Any]:
    # No OpenGL: it does not support all of WebGPU, and opens a display connection. If wgpu was used before in this process,
    # its choice of backends stays.
    with suppress(RuntimeError):
        extras.set_instance_extras(backends=["Vulkan", "Metal", "DX12"])
    with _without_noise():
        return [a for a in wgpu.gpu.enumerate_adapters_sync() if a.info["backend_type"] != "OpenGL"]


@contextmanager
def _without_noise() -> Iterator[None]:
    """Hold back what drivers write to stderr within the block; afterwards print all of it but the noise."""
    try:
        sys.stderr.flush()
        screen = os.dup(2)
    except (OSError, AttributeError, ValueError):  # no stderr
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(screen, 2)
            os.close(screen)
            held.seek(0)
            for line in held:
                if not any(noise in line for noise in _NOISE):
                    os.write(2, line)


def choose() -> Any:
    """The adapter that was asked for, or the best there is: a discrete GPU first, software last."""
    adapters = _adapters()
    if not adapters:
        raise NoAdapter(
            "WebGPU found no adapter. It needs a driver for Vulkan, Metal or DX12; on a Linux machine without a GPU, "
            "software Vulkan works: install mesa-vulkan-drivers and libvulkan1"
        )
    wanted = settings.webgpu_adapter
    if wanted is not None:
        adapters = [a for a in adapters if wanted.lower() in a.summary.lower()] or _none_called(wanted, adapters)
    return min(adapters, key=lambda a: _BEST_FIRST.index(_kind(a)))


def _none_called(wanted: str, adapters: list[Any]) -> list[Any]:
    there = "; ".join(a.summary for a in adapters)
    raise NoAdapter(f"HEADWISE_WEBGPU_ADAPTER={wanted!r} names no adapter of this machine. There are: {there}")


def _kind(adapter: Any) -> str:
    kind = adapter.info["adapter_type"]
    return kind if kind in _BEST_FIRST else "Unknown"


def capabilities(adapter: Any) -> Capabilities:
    limits, info = adapter.limits, adapter.info
    tier = "C" if "subgroup" in adapter.features else "B" if "shader-f16" in adapter.features else "A"
    wanted = settings.webgpu_tier
    if wanted is not None:
        if wanted not in TIERS:
            raise ValueError(f"HEADWISE_WEBGPU_TIER={wanted!r} is no tier; there are: {', '.join(TIERS)}")
        if wanted > tier:
            raise ValueError(
                f"HEADWISE_WEBGPU_TIER={wanted!r} is more than this adapter has ({tier}): {adapter.summary}"
            )
        tier = wanted
    floor = tier < "C"
    # Adapters report any number here. A multiple of 256 keeps vectors of 16 bytes whole.
    binding = min(limits["max-storage-buffer-binding-size"], limits["max-buffer-size"]) // 256 * 256
    return Capabilities(
        name=info["device"],
        kind=_kind(adapter),
        driver=info["backend_type"],
        vendor=info["vendor_id"],
        tier=tier,
        subgroup_size=0 if floor else int(info.get("stackgroup_min_size") or info.get("subgroup_min_size") or 0),
        workgroup_memory=FLOOR_WORKGROUP_MEMORY if floor else limits["max-compute-workgroup-storage-size"],
        workgroup_threads=FLOOR_WORKGROUP_THREADS if floor else limits["max-compute-invocations-per-workgroup"],
        storage_buffers=FLOOR_STORAGE_BUFFERS,
        binding_bytes=min(binding, (settings.webgpu_binding_bytes or binding) // 256 * 256),
        buffer_bytes=limits["max-buffer-size"] // 256 * 256,
        timestamps="timestamp-query" in adapter.features,
    )


def open_device(adapter: Any, capabilities: Capabilities) -> Any:
    features = ["subgroup"] if capabilities.tier >= "C" else []
    if capabilities.timestamps:
        features.append("timestamp-query")
    limits = {
        "max-buffer-size": capabilities.buffer_bytes,
        "max-storage-buffer-binding-size": adapter.limits["max-storage-buffer-binding-size"],
        "max-compute-workgroup-storage-size": capabilities.workgroup_memory,
        "max-compute-invocations-per-workgroup": capabilities.workgroup_threads,
        "max-compute-workgroup-size-x": capabilities.workgroup_threads,
    }
    with _without_noise():
        return adapter.request_device_sync(required_features=features, required_limits=limits)

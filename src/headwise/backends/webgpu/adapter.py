"""Which GPU WebGPU runs on, and what it can do.

Feature tiers:

A   what every WebGPU device has, and nothing else: 16 KiB of workgroup memory, 256 threads, 8 storage buffers
B   as A, with the f16 feature (16-bit floats are packed in pairs and unpacked by built-ins of tier A, so nothing
    here needs it yet)
C   subgroups: threads of a row exchange numbers in registers instead of through workgroup memory

A tier above is used only where the adapter has it; ``HEADWISE_WEBGPU_TIER`` names a lower one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import wgpu
from wgpu.backends.wgpu_native import extras

from headwise.config import settings

TIERS = "ABC"

# The floor that WebGPU promises (https://www.w3.org/TR/webgpu/#limits); tier A asks for nothing more than sizes of buffers.
FLOOR_WORKGROUP_MEMORY = 16384
FLOOR_WORKGROUP_THREADS = 256
FLOOR_STORAGE_BUFFERS = 8
MOST_GROUPS = 65535  # in one dimension of a grid

_BEST_FIRST = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "CPU", "Unknown")


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
    native_half: bool = False  # does pack2x16float round to nearest even? Known once the device was asked


def summaries() -> list[str]:
    """All adapters of this machine, in a line each: what HEADWISE_WEBGPU_ADAPTER may name a part of."""
    return [a.summary for a in _adapters()]


def _adapters() -> list[Any]:
    # OpenGL is left out: it is no WebGPU in full, and asking for it starts a display connection. Whoever used wgpu before
    # us in this process has chosen already.
    with suppress(RuntimeError):
        extras.set_instance_extras(backends=["Vulkan", "Metal", "DX12"])
    return [a for a in wgpu.gpu.enumerate_adapters_sync() if a.info["backend_type"] != "OpenGL"]


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
    # A buffer or binding is no multiple of anything by itself; whole vectors of 16 bytes are all that kernels ask for.
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
    return adapter.request_device_sync(required_features=features, required_limits=limits)

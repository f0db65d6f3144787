"""The kinds of GPUs that programs are recorded for; the page takes the first that fits.

A browser tells the narrowest subgroup of its GPU (``adapter.info.subgroupMinSize``). All other limits are the floor
that every WebGPU device has. 16-bit floats need no tier of their own: every device can pack and unpack them.
"""

from __future__ import annotations

from typing import NamedTuple

from headwise.backends.webgpu import adapter

# https://www.w3.org/TR/webgpu/#limits
FLOOR_BINDING_BYTES = 1 << 27
FLOOR_BUFFER_BYTES = 1 << 28


class Tier(NamedTuple):
    name: str  # as in file names
    title: str
    subgroup: int  # narrowest subgroup it works with; 0: it needs none

    @property
    def capabilities(self) -> adapter.Capabilities:
        # Renderers in software are among those of the last two: their compilers take gigabytes and minutes for the large
        # tiles of products.
        return adapter.Capabilities(
            name=f"a browser's GPU, {self.title}",
            kind="CPU" if self.subgroup <= 4 else "Unknown",
            driver="WebGPU",
            vendor=0,
            tier="C" if self.subgroup else "A",
            subgroup_size=self.subgroup,
            workgroup_memory=adapter.FLOOR_WORKGROUP_MEMORY,
            workgroup_threads=adapter.FLOOR_WORKGROUP_THREADS,
            storage_buffers=adapter.FLOOR_STORAGE_BUFFERS,
            binding_bytes=FLOOR_BINDING_BYTES,
            buffer_bytes=FLOOR_BUFFER_BYTES,
            timestamps=False,
        )


# Best first. NVIDIA, AMD and most phones have subgroups of 32 or more, Intel of 8; Apple guarantees only 4.
TIERS = (
    Tier("subgroups-32", "subgroups of 32 or more", 32),
    Tier("subgroups-8", "subgroups of 8 or more", 8),
    Tier("subgroups-4", "subgroups of 4 or more", 4),
    Tier("plain", "no subgroups", 0),
)

"""What inductor, the default of `torch.compile`, is told about this device: that it has no code for it.

Inductor asks a device's module for four classes, and then for the names of its functions (`torch._inductor.codegen.common`:
a private way into PyTorch, seen in 2.13). If that changes, the error is inductor's own again, a KeyError.
"""

from __future__ import annotations

from typing import Any


class NoInductor:
    """In place of a code generator."""

    supports_caching = False

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "headwise: torch.compile has no inductor backend for webgpu; pass backend='aot_eager' to run the compiled "
            "graph, or capture the step with headwise.webgpu.capture"
        )


def announced(device: str) -> type[NoInductor]:
    from torch._inductor.codegen.common import DeviceOpOverrides, register_device_op_overrides

    register_device_op_overrides(device, DeviceOpOverrides())
    return NoInductor

"""Recording into a compute pass, the cheap way where there is one.

wgpu's methods ask for an error after every call, which costs more than the call; but what is wrong with a pass is told
when its command buffer is finished, and that is asked for. So a dispatch goes straight to wgpu-native, if this wgpu has it
in the shape known here, and by wgpu's own methods otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# pipeline (None: as before), bind group, workgroups
Record = Callable[[Any, Any, tuple[int, ...]], None]


def recorder(compute_pass: Any) -> Record:
    """What records dispatches into this pass."""
    library = _library(compute_pass)
    if library is None:
        return _through_methods(compute_pass)
    set_pipeline = library.wgpuComputePassEncoderSetPipeline
    set_bind_group = library.wgpuComputePassEncoderSetBindGroup
    dispatch = library.wgpuComputePassEncoderDispatchWorkgroups
    handle, no_offsets = compute_pass._internal, _nothing()

    def record(pipeline: Any, group: Any, groups: tuple[int, ...]) -> None:
        if pipeline is not None:
            set_pipeline(handle, pipeline._internal)
        set_bind_group(handle, 0, group._internal, 0, no_offsets)
        dispatch(handle, *groups)

    return record


def _through_methods(compute_pass: Any) -> Record:
    def record(pipeline: Any, group: Any, groups: tuple[int, ...]) -> None:
        if pipeline is not None:
            compute_pass.set_pipeline(pipeline)
        compute_pass.set_bind_group(0, group)
        compute_pass.dispatch_workgroups(*groups)

    return record


def _library(compute_pass: Any) -> Any:
    """wgpu-native as wgpu has loaded it; None where the pass is not its own, or wgpu is built another way."""
    if not hasattr(compute_pass, "_internal"):
        return None
    try:
        from wgpu.backends.wgpu_native import lib
    except ImportError:
        return None
    needed = ("SetPipeline", "SetBindGroup", "DispatchWorkgroups")
    return lib if all(hasattr(lib, f"wgpuComputePassEncoder{name}") for name in needed) else None


def _nothing() -> Any:
    from wgpu.backends.wgpu_native import ffi

    return ffi.NULL

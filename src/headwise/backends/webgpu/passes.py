"""Dispatching in a compute pass, by direct calls of wgpu-native where possible.

wgpu's own methods check for an error after every call, which costs more than the call. Errors in a pass are also reported
when its command buffer is finished, and checked then. So dispatches call wgpu-native directly if this wgpu has the functions
known here (seen in wgpu 0.19 to 0.32), and wgpu's methods otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple


class Encoding(NamedTuple):
    """How to dispatch. Passes, pipelines and bind groups are given as their handles."""

    handle: Callable[[Any], Any]  # of a pass, a pipeline or a bind group
    set_pipeline: Callable[[Any, Any], None]  # pass, pipeline
    # pass, 0, bind group, 0, no_offsets; or with one offset: pass, 0, bind group, 1, offset(bytes)
    set_bind_group: Callable[[Any, int, Any, int, Any], None]
    dispatch: Callable[[Any, int, int, int], None]  # pass, workgroups
    no_offsets: Any
    offset: Callable[[int], Any]  # of the parameters in their buffer; good until the next one is asked for


def encoding(gpu: Any) -> Encoding:
    """For the passes of this device."""
    library = _library(gpu)
    if library is None:
        return Encoding(
            handle=lambda x: x,
            set_pipeline=lambda compute_pass, pipeline: compute_pass.set_pipeline(pipeline),
            set_bind_group=lambda compute_pass, index, group, count, offsets: compute_pass.set_bind_group(
                index, group, *([offsets] if count else [])
            ),
            dispatch=lambda compute_pass, *groups: compute_pass.dispatch_workgroups(*groups),
            no_offsets=None,
            offset=lambda first: [first],
        )
    from wgpu.backends.wgpu_native import ffi

    one = ffi.new("uint32_t[1]")

    def offset(first: int) -> Any:
        one[0] = first
        return one

    return Encoding(
        handle=attrgetter("_internal"),
        set_pipeline=library.wgpuComputePassEncoderSetPipeline,
        set_bind_group=library.wgpuComputePassEncoderSetBindGroup,
        dispatch=library.wgpuComputePassEncoderDispatchWorkgroups,
        no_offsets=ffi.NULL,
        offset=offset,
    )


def _library(gpu: Any) -> Any:
    """wgpu-native as loaded by wgpu; None if the device is another library's, or wgpu is built differently."""
    if not hasattr(gpu, "_internal"):
        return None
    try:
        from wgpu.backends.wgpu_native import lib
    except ImportError:
        return None
    needed = ("SetPipeline", "SetBindGroup", "DispatchWorkgroups")
    return lib if all(hasattr(lib, f"wgpuComputePassEncoder{name}") for name in needed) else None

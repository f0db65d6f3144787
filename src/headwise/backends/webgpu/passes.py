"""Bind groups, and dispatching in a compute pass, by direct calls of wgpu-native where possible.

wgpu's own methods check for an error after every call, which costs more than the call. Errors in a pass are also reported
when its command buffer is finished, and checked then. So dispatches call wgpu-native directly if this wgpu has the functions
known here (seen in wgpu 0.19 to 0.32), and wgpu's methods otherwise.

A bind group is made with the check, which costs little beside it. What costs is what wgpu builds on the way, objects for
each binding: ten times as long as the call. Here one array takes the bindings of all, one group after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from headwise.backends.webgpu.adapter import FLOOR_STORAGE_BUFFERS

_MOST_BINDINGS = 1 + FLOOR_STORAGE_BUFFERS  # with the parameters


class Encoding(NamedTuple):
    """How to dispatch. Passes, pipelines and bind groups are given as their handles."""

    handle: Callable[[Any], Any]  # of a pass or a pipeline, which it does not keep alive
    # A new bind group: layout; buffer, first byte and bytes of each binding. It lives as long as its handle.
    bind_group: Callable[[Any, Sequence[tuple[Any, int, int]]], Any]
    set_pipeline: Callable[[Any, Any], None]  # pass, pipeline
    # pass, 0, bind group, 0, no_offsets; or with one offset: pass, 0, bind group, 1, offset(bytes)
    set_bind_group: Callable[[Any, int, Any, int, Any], None]
    dispatch: Callable[[Any, int, int, int], None]  # pass, workgroups
    no_offsets: Any
    offset: Callable[[int], Any]  # of the parameters in their buffer; good until the next one is asked for


def encoding(gpu: Any) -> Encoding:
    """For the passes of this device."""
    found = _library(gpu)
    if found is None:
        return Encoding(
            handle=lambda x: x,
            bind_group=partial(_bind_group, gpu),
            set_pipeline=lambda compute_pass, pipeline: compute_pass.set_pipeline(pipeline),
            set_bind_group=lambda compute_pass, index, group, count, offsets: compute_pass.set_bind_group(
                index, group, *([offsets] if count else [])
            ),
            dispatch=lambda compute_pass, *groups: compute_pass.dispatch_workgroups(*groups),
            no_offsets=None,
            offset=lambda first: [first],
        )
    from wgpu.backends.wgpu_native import ffi

    library, checked = found
    one = ffi.new("uint32_t[1]")

    def offset(first: int) -> Any:
        one[0] = first
        return one

    return Encoding(
        handle=attrgetter("_internal"),
        bind_group=_maker_of_bind_groups(gpu, library, checked),
        set_pipeline=library.wgpuComputePassEncoderSetPipeline,
        set_bind_group=library.wgpuComputePassEncoderSetBindGroup,
        dispatch=library.wgpuComputePassEncoderDispatchWorkgroups,
        no_offsets=ffi.NULL,
        offset=offset,
    )


def _bind_group(gpu: Any, layout: Any, bound: Sequence[tuple[Any, int, int]]) -> Any:
    entries = [
        {"binding": i, "resource": {"buffer": buffer, "offset": first, "size": size}}
        for i, (buffer, first, size) in enumerate(bound)
    ]
    return gpu.create_bind_group(layout=layout, entries=entries)


def _maker_of_bind_groups(gpu: Any, library: Any, checked: Any) -> Callable[[Any, Sequence[tuple[Any, int, int]]], Any]:
    from wgpu.backends.wgpu_native import ffi

    device, create, release = gpu._internal, checked.wgpuDeviceCreateBindGroup, library.wgpuBindGroupRelease
    descriptor = ffi.new("WGPUBindGroupDescriptor *")
    array = ffi.new("WGPUBindGroupEntry[]", _MOST_BINDINGS)  # zeros: neither a sampler nor a texture
    entries = [array[i] for i in range(_MOST_BINDINGS)]
    for i, entry in enumerate(entries):
        entry.binding = i

    def make(layout: Any, bound: Sequence[tuple[Any, int, int]]) -> Any:
        # The device's lock is held: nobody else fills the array.
        for entry, (buffer, first, size) in zip(entries, bound, strict=False):
            entry.buffer, entry.offset, entry.size = buffer._internal, first, size
        descriptor.layout, descriptor.entries, descriptor.entryCount = layout._internal, array, len(bound)
        return ffi.gc(create(device, descriptor), release)

    return make


def _library(gpu: Any) -> tuple[Any, Any] | None:
    """wgpu-native as loaded by wgpu, and the same with a check for errors after every call.

    None if the device is another library's, or wgpu is built differently.
    """
    if not hasattr(gpu, "_internal"):
        return None
    try:
        from wgpu.backends.wgpu_native import lib
        from wgpu.backends.wgpu_native._api import libf
    except ImportError:
        return None
    needed = [f"wgpuComputePassEncoder{name}" for name in ("SetPipeline", "SetBindGroup", "DispatchWorkgroups")]
    needed += ["wgpuDeviceCreateBindGroup", "wgpuBindGroupRelease"]
    return (lib, libf) if all(hasattr(of, name) for name in needed for of in (lib, libf)) else None

"""Tint, the WGSL compiler of browsers, from the package ``dawn-python``. It needs neither GPU nor driver.

>>> compile_with_tint(shaders.render("fill", dialect=shaders.TINT).text)

Two things are checked that naga lets pass: barriers that not all threads of a workgroup may reach, and the limits that
every WebGPU device has.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from pydawn import utils, webgpu

# What every WebGPU device has: https://www.w3.org/TR/webgpu/#limits
FLOOR = {
    "maxComputeWorkgroupStorageSize": 16384,
    "maxComputeInvocationsPerWorkgroup": 256,
    "maxComputeWorkgroupSizeX": 256,
    "maxStorageBuffersPerShaderStage": 8,
}


class TintError(Exception):
    """Tint refused a shader. The message is Tint's, with the line it means."""


def compile_with_tint(text: str, *, floor: bool = True) -> None:
    """Compile a compute shader with the entry point ``main``, or raise `TintError`.

    floor: it may need what every WebGPU device has, and no more; else its sizes are not judged.
    """
    device = _device()
    source = webgpu.WGPUShaderModuleWGSLDescriptor()
    source.chain.sType = webgpu.WGPUSType_ShaderSourceWGSL
    source.code, kept = _string(text)
    described = webgpu.WGPUShaderModuleDescriptor()
    described.nextInChain = ctypes.cast(ctypes.pointer(source), ctypes.POINTER(webgpu.struct_WGPUChainedStruct))
    webgpu.wgpuDevicePushErrorScope(device, webgpu.WGPUErrorFilter_Validation)
    module = webgpu.wgpuDeviceCreateShaderModule(device, described)
    error = utils.pop_error(device)
    del kept
    try:
        if error:
            raise TintError(error)
        if floor:
            _make_pipeline(device, module)
    finally:
        webgpu.wgpuShaderModuleRelease(module)


def _make_pipeline(device: Any, module: Any) -> None:
    """Where the sizes of a shader are held against the limits of a device."""
    try:
        pipeline = utils.create_compute_pipeline(device, None, {"module": module, "entry_point": "main"})
    except RuntimeError as refused:
        raise TintError(str(refused)) from refused
    webgpu.wgpuComputePipelineRelease(pipeline)


def _string(text: str) -> tuple[Any, Any]:
    """A string of the C interface and the memory it points to. Its length counts bytes, and comments are not all ASCII."""
    data = text.encode()
    kept = ctypes.create_string_buffer(data)
    view = webgpu.WGPUStringView()
    view.data = ctypes.cast(kept, ctypes.POINTER(ctypes.c_char))
    view.length = len(data)
    return view, kept


@functools.lru_cache(maxsize=1)
def _device() -> Any:
    """A device of Dawn's null backend: it checks what the others check, and hands nothing to a driver."""
    request, get_limits = webgpu.wgpuInstanceRequestAdapterF, webgpu.wgpuAdapterGetLimits

    def request_null(instance: Any, options: Any, callback: Any) -> Any:
        options.backendType = webgpu.WGPUBackendType_Null
        return request(instance, options, callback)

    def floor_limits(adapter: Any, limits: Any) -> Any:
        # pydawn asks for all that the adapter has: it is given less to ask for.
        status = get_limits(adapter, limits)
        for name, value in FLOOR.items():
            setattr(limits.contents.limits, name, value)
        return status

    webgpu.wgpuInstanceRequestAdapterF, webgpu.wgpuAdapterGetLimits = request_null, floor_limits
    try:
        adapter = utils.request_adapter_sync(power_preference=webgpu.WGPUPowerPreference_HighPerformance)
        return utils.request_device_sync(adapter, [webgpu.WGPUFeatureName_Subgroups])
    finally:
        webgpu.wgpuInstanceRequestAdapterF, webgpu.wgpuAdapterGetLimits = request, get_limits

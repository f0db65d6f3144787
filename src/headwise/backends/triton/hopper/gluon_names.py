"""Gluon under one set of names: what Triton 3.6 and its newer releases call differently stands here and nowhere else."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

RENAMED = gl.constexpr(hasattr(gl, "barrier"))  # a release after 3.6

# Waits for all warps of the partition it is called in.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# (descriptor, coordinates, barrier, shared memory) and (descriptor, coordinates, shared memory).
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
wait_for_stores = tma.store_wait
propagate_nan = gl.constexpr(tl.PropagateNan.ALL)  # of `gl.minimum`


class Members(dict[str, Any]):
    """The members of a named tuple of constants, and of tuples inside it.

    Since Triton 3.9 kernels see a tuple of Triton's own. (A class, because functions of constants may call no functions.)
    """

    def __init__(self, struct: Any) -> None:
        for name, value in zip(getattr(struct, "_fields", None) or struct.type.fields, struct, strict=True):
            if isinstance(value, (tuple, gl.tuple)):
                self.update(Members(value))
            else:
                self[name] = value.value if isinstance(value, gl.constexpr) else value


@gluon.jit
def reciprocal(x):
    """To a unit in the last place. A `/` costs four instructions more, for divisors that may be very large."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def log2(x):
    """To 2⁻²², one instruction where `gl.log2` is a polynomial."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def reinterpret(buffer, SHAPE, LAYOUT: gl.constexpr):
    """The same shared memory in another shape and layout."""
    if RENAMED:
        return buffer.reinterpret(buffer.dtype, SHAPE, LAYOUT)
    else:
        return buffer._reinterpret(buffer.dtype, SHAPE, LAYOUT)


__all__ = [
    "Members",
    "TensorDescriptor",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "log2",
    "mbarrier",
    "propagate_nan",
    "reciprocal",
    "reinterpret",
    "store_tile",
    "thread_barrier",
    "wait_for_stores",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

"""Every Triton kernel compiles for every kind of GPU it is meant for, here, without one."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headwise.backends.triton import cross_entropy, embedding, rms_norm, softmax, transpose

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}

# Arguments that are not bfloat16 pointers, 32-bit integers or constants.
FLOATS = {"eps", "weight_offset", "label_smoothing", "z_loss", "softcap"}
POINTERS = {
    "x", "y", "p", "g", "dx", "weight", "grad", "logits", "dlogits", "dweight", "rstd", "parts", "losses", "stats",
    "row_grads", "targets", "ids", "order",
}  # fmt: skip
FLOAT32 = {"rstd", "parts", "losses", "stats", "row_grads"}
INT64 = {"targets", "ids", "order"}

HELD = {"ROWS": 1, "COLUMNS": 4096}
KERNELS = {
    "softmax forward": (softmax._forward_held, HELD, 4),
    "softmax forward, long rows": (softmax._forward_long, {"BLOCK": 8192}, 16),
    "softmax backward": (softmax._backward_held, {"ROWS": 1, "COLUMNS": 16384}, 16),
    "softmax backward, long rows": (softmax._backward_long, {"BLOCK": 8192}, 16),
    "rms_norm forward": (rms_norm._forward_held, {**HELD, "HAS_WEIGHT": True}, 4),
    "rms_norm forward, long rows": (rms_norm._forward_long, {"BLOCK": 8192, "HAS_WEIGHT": True}, 16),
    "rms_norm backward": (rms_norm._backward_held, {**HELD, "HAS_WEIGHT": True, "STAGES": 3}, 8),
    "rms_norm backward, long rows": (rms_norm._backward_long, {"BLOCK": 8192, "HAS_WEIGHT": True}, 16),
    "rms_norm dweight": (rms_norm._dweight_parts, {"BLOCK": 1024}, 4),
    "cross_entropy": (
        cross_entropy._cross_entropy,
        {"HAS_CAP": True, "SMOOTH": True, "STATS": True, "GRADIENT": True, "BLOCK": 4096},
        8,
    ),
    "embedding forward": (embedding._gather, {"BLOCK": 2048}, 4),
    "embedding backward": (embedding._sum_chunks, {"CHUNK": 32, "BLOCK": 1024}, 4),
    "embedding backward, joining": (embedding._join_parts, {"CHUNK": 32, "BLOCK": 1024}, 4),
    "transpose": (transpose._transpose, {"TILE": 128}, 8),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles_and_fits(name, target):
    kernel, constants, warps = KERNELS[name]
    signature = {argument: _type(argument, constants) for argument in kernel.arg_names}
    gpu, shared_memory = TARGETS[target]
    # A wavefront of gfx942 has 64 lanes: a block of 1024 threads is 16 of them.
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants),
        target=gpu,
        options={"num_warps": min(warps, 1024 // gpu.warp_size)},
    )
    assert compiled.metadata.shared <= shared_memory


def _type(argument: str, constants: dict[str, int]) -> str:
    if argument in constants:
        return "constexpr"
    if argument in POINTERS:
        return "*fp32" if argument in FLOAT32 else "*i64" if argument in INT64 else "*bf16"
    return "fp32" if argument in FLOATS else "i32"

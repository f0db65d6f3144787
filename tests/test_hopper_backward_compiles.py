"""The Hopper backward compiles for sm_90, here, without a GPU: no serialised WGMMA, next to no stack, no register unset."""

from __future__ import annotations

import re
import subprocess

import pytest
import sass
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from headwise.backends.triton.hopper import attention_backward, attention_backward_rows
from headwise.backends.triton.hopper.backward_coverage import (
    BACKWARD_TILES,
    covers_backward,
    tile_of,
)
from headwise.ops.attention._arguments import Flags

# The release that the tiles were chosen with; of others it is only asked that they compile.
TUNED = triton.__version__.startswith("3.6.")
SM_90 = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
TENSORS = {"sums": "*fp32", "turns": "*i32", "ticket": "*i32", "records": "*i32"}

FULL = Flags(left=-1, right=-1, scale=0.125, softcap=0.0, deterministic=True)
CAUSAL = FULL._replace(right=0)
WINDOW = FULL._replace(left=1023, right=0)

CALLS = {
    "128, full": {"head_dim": 128, "flags": FULL},
    "128, full, any order": {"head_dim": 128, "flags": FULL._replace(deterministic=False)},
    "128, causal": {"head_dim": 128, "flags": CAUSAL},
    "128, causal, grouped": {"head_dim": 128, "flags": CAUSAL, "group": 4},
    "128, causal, packed": {"head_dim": 128, "flags": CAUSAL, "packed": True},
    "64, causal": {"head_dim": 64, "flags": CAUSAL},
    "64, window, tail, float16": {"head_dim": 64, "flags": WINDOW, "keys": 4000, "dtype": "fp16"},
    "256, full": {"head_dim": 256, "flags": FULL},
    "256, causal, any order": {"head_dim": 256, "flags": CAUSAL._replace(deterministic=False)},
    "192, causal, packed, grouped": {"head_dim": 192, "flags": CAUSAL, "group": 2, "packed": True},
    "256, window, cap": {"head_dim": 256, "flags": WINDOW._replace(softcap=30.0)},
    "64, window, cap": {"head_dim": 64, "flags": WINDOW._replace(softcap=30.0)},
}
# A few numbers, once per tile or once per step of 2 µs.
ALLOWED_STACK = 64


def plan(head_dim, flags, group=1, packed=False, keys=4096, dtype="bf16"):
    heads = 16
    width, tile = tile_of(head_dim, flags.softcap > 0)
    q, k = (1, heads, 4096, head_dim), (1, heads // group, keys, head_dim)
    strides = (heads * 4096 * head_dim, head_dim, heads * head_dim, 1)
    return attention_backward._plan(
        tile, width, -(-keys // tile.keys), -(-4096 // tile.rows), packed, q, k, head_dim, *(strides,) * 6, flags.left,
        flags.right, flags, 132,
    )  # fmt: skip


def compiled_kernel(made, dtype="bf16"):
    """What a launch of this plan compiles: descriptors, tensors, numbers, constants."""
    signature, constants = {}, {}
    parameters = list(made.kernel.params)
    for parameter, (_, box) in zip(parameters, made.boxes, strict=False):
        of_stats = parameter.name == "stats_desc"
        x = torch.empty(1, 64, dtype=torch.float32) if of_stats else torch.empty(1, 1, 1, 8, dtype=torch.bfloat16)
        described = box.descriptor(x)
        shape = ",".join(map(str, described.block_shape))
        signature[parameter.name] = f"tensordesc<{'fp32' if of_stats else dtype}[{shape}],{described.layout!r}>"
    rest = parameters[len(made.boxes) :]
    for parameter, value in zip(rest, [*TENSORS, *made.numbers, *made.constants], strict=True):
        if parameter.name in TENSORS:
            signature[parameter.name] = TENSORS[parameter.name]
        elif parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    # As at run time, where all of these begin at multiples of 16 bytes.
    names = [p.name for p in parameters]
    aligned = {(names.index(tensor),): [["tt.divisibility", 16]] for tensor in TENSORS}
    source = GluonASTSource(made.kernel, signature, constants, aligned)
    return triton.compile(source, target=SM_90, options={"num_warps": 4, "enable_fp_fusion": True})


@pytest.mark.parametrize("name", CALLS)
def test_backward_compiles_and_keeps_to_the_registers(name, tmp_path):
    call = CALLS[name]
    compiled = compiled_kernel(plan(**call), call.get("dtype", "bf16"))
    assert compiled.metadata.shared <= SHARED_MEMORY
    if not TUNED:
        return
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    command = [sass.TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", tmp_path / "again.cubin"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert not re.findall(r"C75\d\d", log), log
    assert int(re.search(r"(\d+) bytes stack frame", log)[1]) <= ALLOWED_STACK, log
    code = sass.disassemble(compiled.asm["cubin"], tmp_path)
    # Of what moves or makes 64 bits, addresses and factors have 32: there the reading is too strict.
    assert not [i for i in sass.unset_reads(code) if not re.search(r"\.64|\.WIDE", i)]
    assert not sass.hasty_arrivals(compiled.asm["ptx"])
    # dQ is added four numbers at a time, by an instruction that asks for no answer.
    assert "ADD.F32x4" in code
    assert "ATOMG.E.ADD.F32" not in code


@pytest.mark.parametrize("flags", [FULL, CAUSAL, WINDOW], ids=["full", "causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_where_keys_end_is_no_constant(head_dim, flags):
    assert len({plan(head_dim, flags, keys=keys).constants for keys in (1, 333, 4000, 4096, 20000)}) == 1


ROWS = {
    "prepare": {"D": 192, "WIDTH": 192, "BLOCK_D": 256, "ROWS": 64, "SUMS": 4096, "ALIGN": 8},
    "finish": {"D": 192, "ROWS": 64, "COLUMNS": 64, "PIECES": 3, "ALIGN": 8},
    "place": {"HAS_LEFT": True, "HAS_RIGHT": True, "ROWS": 64, "KEYS": 128, "SEARCH": 128},
}
FLOATS = ("grad_lse", "lse", "sink", "stats", "sums", "sink_parts")
INTS = ("cu_q", "cu_k", "turns", "ticket", "records")
HALVES = ("grad_out", "out", "dq")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_kernels_around_it_compile(name, packed):
    kernel, constants = getattr(attention_backward_rows, name), dict(ROWS[name])
    if not packed and name != "place":
        constants |= {"records": None}
    types = (
        dict.fromkeys(FLOATS, "*fp32")
        | dict.fromkeys(INTS, "*i32")
        | dict.fromkeys(HALVES, "*bf16")
        | {"scale": "fp32"}
    )
    signature = {a: "constexpr" if a in constants else types.get(a, "i32") for a in kernel.arg_names}
    triton.compile(ASTSource(kernel, signature, constants), target=SM_90, options={"num_warps": 4})


def covered(q=(2, 16, 4096, 128), k=None, value_dim=None, strides=None, dtype=torch.bfloat16, flags=FULL, **features):
    k = q if k is None else k
    contiguous = tuple(torch.empty(shape, device="meta").stride() for shape in (q, k, k))
    given = {"masked": False, "lengths": False, "sink": False, "packed": False, **features}
    return covers_backward(
        dtype, q, k, value_dim or q[3], strides or contiguous, right=flags.right, softcap=flags.softcap, **given
    )


def test_what_the_backward_takes_and_why_it_takes_no_more():
    assert covered() is None
    assert covered(flags=CAUSAL) is None
    assert covered((1, 32, 4097, 64), (1, 8, 5000, 64), flags=CAUSAL) is None
    assert covered((1, 32, 4096, 80)) is None
    assert "v has" in covered((1, 32, 4096, 80), value_dim=96)
    assert "caps" in covered(flags=FULL._replace(softcap=1e4))
    assert "caps" in covered(flags=FULL._replace(softcap=1e-4))
    assert "bfloat16" in covered(dtype=torch.float32)
    assert "mask" in covered(masked=True)
    assert "kv_lengths" in covered(lengths=True)
    assert "head dims" in covered((1, 8, 4096, 111))
    assert "head dims" in covered((1, 8, 4096, 264))
    assert covered((1, 8, 4096, 192)) is None
    assert "tiles" in covered((1, 1, 4096, 256))
    assert "nothing" in covered((0, 16, 4096, 64))
    assert "strides of k" in covered(strides=((128,) * 4, (127,) * 4, (128,) * 4))
    assert "tiles" in covered((1, 1, 128, 64))
    assert covered(flags=WINDOW._replace(softcap=9.0), sink=True) is None
    assert covered((1, 16, 4096, 64), flags=CAUSAL, packed=True) is None
    assert "sink" in covered((1, 16, 4096, 64), flags=CAUSAL, packed=True, sink=True)
    assert "sink" in covered((1, 16, 4096, 64), (1, 16, 1024, 64), flags=CAUSAL, sink=True)


def test_every_width_has_a_tile():
    assert [tile_of(d, False)[0] for d in (8, 64, 72, 128, 136, 256)] == [64, 64, 128, 128, 192, 256]
    assert all(tile_of(width, True)[1].rows == 64 for width in BACKWARD_TILES)


def test_heads_go_side_by_side_in_groups_of_one_size():
    together = attention_backward._heads_together
    # As many as fill the GPU; more where tiles of one head would wait for each other; never a small group at the end.
    assert together(False, -1, 0, 64, 128, 32, 132) == 2
    assert together(True, -1, 0, 64, 128, 32, 132) == 4
    assert together(True, -1, -1, 128, 128, 32, 132) == 2
    assert together(True, 1023, 0, 64, 128, 32, 132) == 2
    assert together(False, -1, 0, 32, 64, 9, 132) == 5
    assert together(True, -1, 0, 1, 1, 3, 132) == 3

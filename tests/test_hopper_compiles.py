"""The Hopper forward compiles for sm_90, here, without a GPU: no spills, no serialised WGMMA, no register read unset."""

from __future__ import annotations

import re
import subprocess

import pytest
import sass
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from headwise.backends import triton as rules
from headwise.backends.triton import hopper
from headwise.backends.triton.hopper import FORWARD, attention_forward, covers_forward, forward_tile
from headwise.backends.triton.hopper.schedule import Variant
from headwise.ops import _explain
from headwise.ops.attention._arguments import Flags

# The release that the tiles were chosen with; of others it is only asked that they compile.
TUNED = triton.__version__.startswith("3.6.")
SM_90 = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}

FULL = Flags(left=-1, right=-1, scale=0.125, softcap=0.0, deterministic=True)
CAUSAL = FULL._replace(right=0)
ALL_FLAGS = FULL._replace(left=1023, right=0, softcap=30.0)


def plan(head_dim, flags=FULL, packed=None, lengths=False, dtype=torch.bfloat16, length=4096, processors=132):
    """For 32 heads of 4096 queries, or as many queries in shorter sequences; packed: so many in 4096 queries."""
    shape = (2 * 4096 // length, 16, length, head_dim)
    strides = (16 * length * head_dim, length * head_dim, head_dim, 1)
    made = attention_forward._plan(
        dtype,
        shape,
        shape,
        head_dim,
        (strides,) * 4,
        lengths,
        packed,
        length,
        length,
        flags,
        processors,
        None,
    )
    assert made is not None
    return made


CALLS = {
    **{f"{d}, full": {"head_dim": d} for d in (64, 128)},
    **{f"{d}, causal": {"head_dim": d, "flags": CAUSAL} for d in (row.widest for row in FORWARD)},
    # The tile goes by the average length: each of them once.
    "128, packed": {"head_dim": 128, "packed": 2},
    "128, packed, causal": {"head_dim": 128, "flags": CAUSAL, "packed": 2},
    "128, packed, short, causal": {"head_dim": 128, "flags": CAUSAL, "packed": 9},
    "128, packed, all flags": {"head_dim": 128, "flags": ALL_FLAGS, "packed": 2},
    "64, packed, short": {"head_dim": 64, "packed": 9},
    "64, packed, short, causal": {"head_dim": 64, "flags": CAUSAL, "packed": 9},
    "64, packed, causal": {"head_dim": 64, "flags": CAUSAL, "packed": 4, "processors": 16},
    "64, packed, long, causal": {"head_dim": 64, "flags": CAUSAL, "packed": 1, "processors": 16},
    "256, packed, causal": {"head_dim": 256, "flags": CAUSAL, "packed": 2},
    "64, float16, lengths": {"head_dim": 64, "lengths": True, "dtype": torch.float16},
    "128, all flags": {"head_dim": 128, "flags": ALL_FLAGS},
    **{f"{d}, short": {"head_dim": d, "length": 512} for d in (64, 128)},
    **{f"{d}, short, causal": {"head_dim": d, "length": 512, "flags": CAUSAL} for d in (64, 128)},
    "64, four warpgroups": {"head_dim": 64, "length": 512, "processors": 16},
    "64, four warpgroups, causal": {"head_dim": 64, "length": 2048, "processors": 16, "flags": CAUSAL},
}


@pytest.mark.parametrize("name", CALLS)
def test_forward_compiles_and_keeps_to_the_registers(name, tmp_path):
    call = CALLS[name]
    compiled = compiled_forward(plan(**call), call)
    assert compiled.metadata.shared <= SHARED_MEMORY
    if not TUNED:
        return
    log = assembler_log(compiled, tmp_path)
    assert not re.findall(r"C75\d\d", log), log
    assert int(re.search(r"(\d+) bytes stack frame", log)[1]) <= ALLOWED_STACK.get(name, 0), log
    assert not sass.unset_reads(sass.disassemble(compiled.asm["cubin"], tmp_path))
    assert not sass.hasty_arrivals(compiled.asm["ptx"])


# Once per tile, not in the loop over the keys.
ALLOWED_STACK = {"64, full": 24, "192, causal": 24, "256, causal": 40, "256, packed, causal": 48, "128, all flags": 8}


def compiled_forward(made, call):
    """What a launch of this plan compiles: descriptors, tensors, numbers, constants."""
    dtype, packed, lengths = call.get("dtype", torch.bfloat16), call.get("packed"), call.get("lengths")
    sink = call.get("flags", FULL).softcap > 0
    signature, constants = {}, {}
    parameters = iter(made.kernel.params)
    for parameter, box in zip(parameters, made.boxes, strict=False):
        signature[parameter.name] = "constexpr"
        if box is None:
            constants[parameter.name] = None
        else:
            x = torch.empty(1, 1, 1, 8, dtype=dtype)
            described = box[1].descriptor(x)
            element = POINTERS[dtype][1:]
            shape = ",".join(map(str, described.block_shape))
            signature[parameter.name] = f"tensordesc<{element}[{shape}],{described.layout!r}>"
        if len(signature) == len(made.boxes):
            break
    there = {
        "lse": torch.float32, "sink": torch.float32 if sink else None,
        "lengths": torch.int32 if lengths else None, "cu_q": torch.int32 if packed else None,
        "cu_k": torch.int32 if packed else None, "counter": torch.int32,
    }  # fmt: skip
    rest = [p for p in made.kernel.params if p.name not in signature]
    values = [*there.values(), *made.numbers, *made.constants]
    for parameter, value in zip(rest, values, strict=True):
        name = parameter.name
        if name in there and value is not None:
            signature[name] = POINTERS[value]
        elif name in there or parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    ordered = {p.name: signature[p.name] for p in made.kernel.params}
    source = GluonASTSource(made.kernel, ordered, constants)
    return triton.compile(source, target=SM_90, options={"num_warps": 4, "enable_fp_fusion": True})


def assembler_log(compiled, folder) -> str:
    ptx = folder / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    command = [sass.TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", folder / "again.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("call", "consumers", "keys"),
    [
        ({"length": 512}, 4, 64),
        ({"length": 512, "banded": True}, 4, 64),
        ({"length": 2048, "banded": True}, 4, 64),
        ({"length": 2048}, 3, 128),
        ({"length": 4096, "banded": True}, 3, 128),
        ({"length": 384}, 2, 128),  # half of the second tile would be empty
        ({"length": 384, "banded": True}, 2, 64),
        ({"length": 128}, 2, 128),
        ({"length": 512, "packed": True}, 2, 128),
        ({"length": 512, "packed": True, "banded": True}, 2, 64),
        ({"length": 1365, "packed": True, "banded": True}, 4, 64),
        ({"length": 4000, "packed": True, "banded": True}, 3, 128),
        (
            {"length": 512, "tiles": 512},
            2,
            128,
        ),  # with a few large tiles, half of the GPU would wait for the last ones
        ({"length": 2048, "tiles": 512, "banded": True}, 2, 128),
    ],
)
def test_tiles_of_head_dim_64(call, consumers, keys):
    tile = forward_tile(64, **{"packed": False, "banded": False, "tiles": 4096, "processors": 132, **call})
    assert (tile.consumers, tile.keys) == (consumers, keys)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "banded", "keys"), [(1024, True, 64), (1025, True, 128), (512, False, 128)])
def test_tiles_of_head_dim_128(length, banded, keys, packed):
    assert forward_tile(128, length, packed, banded, 4096, 132).keys == keys


def test_a_cache_that_grows_compiles_nothing():
    window = CAUSAL._replace(left=1023)

    def constants(keys):
        q, k = ((1, 16, length, 128) for length in (2048, keys))
        strides = ((2**26, 128, 2048, 1),) * 4
        made = attention_forward._plan(torch.bfloat16, q, k, 128, strides, False, None, 0, 0, window, 132, None)
        return made.constants

    assert len({constants(keys) for keys in (2049, 3000, 3072, 4096, 20000)}) == 1


def test_a_packed_batch_has_the_tile_of_its_average_sequence():
    def chosen(sequences, longest):
        shape, strides = (1, 16, 32768, 128), (2**26, 128, 2048, 1)
        made = attention_forward._plan(
            torch.bfloat16, shape, shape, 128, (strides,) * 4, False, sequences, longest, longest, CAUSAL, 132, None
        )
        return Variant(*made.constants)

    assert chosen(64, 32768).keys == 64
    assert chosen(8, 32768).keys == 128
    assert chosen(8, 700).keys == 64
    assert chosen(0, 32768).keys == 128


@pytest.mark.parametrize(
    ("length", "head_dim", "group", "at_once"),
    [
        (512, 128, 1, 128),
        (2048, 128, 1, 32),
        (8192, 128, 4, 32),
        (8192, 256, 1, 8),
        (16384, 256, 1, 8),
        (16384, 256, 8, 64),
    ],
)
def test_heads_whose_tiles_are_drawn_together(length, head_dim, group, at_once):
    """What fits two thirds of the L2 cache, but at least eight heads of keys."""
    q_shape, k_shape = ((4, heads, length, head_dim) for heads in (64 * group, 64))
    strides = ((2**40 // 8, head_dim * length, head_dim, 1),) * 4
    made = attention_forward._plan(
        torch.bfloat16, q_shape, k_shape, head_dim, strides, False, None, 0, 0, CAUSAL, 132, None
    )
    names = [p.name for p in made.kernel.params if not p.is_constexpr]
    first_number = names.index("q_length")
    assert made.numbers[names.index("heads_at_once") - first_number] == at_once


def test_an_arrival_that_comes_too_early_is_found():
    arrival, load = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];", "ld.shared.b32 %r2, [%r3];"
    barrier, bytes_to_come = "bar.sync 2, 128;", "@%p1 mbarrier.arrive.expect_tx.b64 _, 4;"

    def found(*lines):
        return sass.hasty_arrivals("\n".join(lines))

    assert found(barrier, load, arrival)
    assert found(barrier, "red.global.add.f32 [%rd1], %f1;", arrival)
    assert not found(load, barrier, arrival)
    assert not found(barrier, load, bytes_to_come, barrier, arrival)
    # Work that stands behind the arrival, and comes before it.
    assert found(barrier, "bra.uni $L__BB0_2;", "$L__BB0_1:", arrival, "ret;", "$L__BB0_2:", load, "bra.uni $L__BB0_1;")
    assert not found(
        load, "bra.uni $L__BB0_2;", "$L__BB0_1:", arrival, "ret;", "$L__BB0_2:", barrier, "bra.uni $L__BB0_1;"
    )


def test_a_register_that_is_not_always_set_is_found():
    skipped = """
        /*0000*/                   @!P0 BRA `(.L_x_1) ;
        /*0010*/                   UIADD3 UR16, UP0, UR24, 0x2, URZ ;
    .L_x_1:
        /*0020*/                   UIADD3 UR36, UP0, UR16, 0x2, URZ ;
        /*0030*/                   EXIT ;
    """
    assert "UIADD3 UR36, UP0, UR16, 0x2, URZ" in sass.unset_reads(skipped)
    always = skipped.replace("@!P0 BRA `(.L_x_1)", "UMOV UR24, 0x1")
    assert not sass.unset_reads(always)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"masked": True}, "no mask"),
        ({"value_dim": 64}, "one head dim"),
        ({"q_shape": (2, 8, 1000, 100), "k_shape": (2, 8, 1000, 100), "value_dim": 100}, "multiples of 8"),
        ({"q_shape": (2, 8, 1000, 264), "k_shape": (2, 8, 1000, 264), "value_dim": 264}, "up to 256"),
        ({"q_shape": (2, 8, 500, 128)}, "fewer than 128 tiles"),
        ({"q_shape": (2, 999, 100, 128)}, "fewer than 128 queries"),
        ({"longest": 100}, "fewer than 128 queries"),
        ({"q_shape": (1, 1, 2**30, 128), "longest": 4096}, "32 bits"),
        ({"k_shape": (2, 8, 0, 128)}, "no keys"),
        ({"strides": ((8000, 1000, 132, 1),) * 3}, "strides of q"),
        ({"softcap": 1e4}, "caps up to 256"),
        ({"softcap": 30.0}, None),
        ({"k_shape": (2, 8, 900, 128), "right": 0}, "rows that see nothing"),
        ({"k_shape": (2, 8, 900, 128), "right": 100}, None),
        ({"k_shape": (2, 8, 900, 128)}, None),
    ],
)
def test_calls_that_are_not_covered_say_why(change, reason):
    shape = (2, 8, 1000, 128)
    call = {
        "dtype": torch.bfloat16, "q_shape": shape, "k_shape": shape, "value_dim": 128,
        "strides": ((1024000, 128000, 128, 1),) * 3, "masked": False, **change,
    }  # fmt: skip
    told = covers_forward(**call)
    assert told is None if reason is None else reason in told


@pytest.mark.parametrize(
    ("lacking", "told"), [(None, "the Hopper kernel"), ("no such GPU", "the plain kernel (no such GPU)")]
)
def test_explain_says_which_kernel_runs(monkeypatch, lacking, told):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(hopper, "missing", lambda device: lacking)
    q, k, v = (torch.empty(2, 8, 1024, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    call = _explain.describe("attention", q, k, v, causal=True)._replace(device="cuda")
    assert rules.note(call, {"q": q, "k": k, "v": v}) == f"forward: {told}"
    mask = torch.ones(1024, 1024, dtype=torch.bool, device="meta")
    assert "plain kernel" in rules.note(call, {"q": q, "k": k, "v": v, "mask": mask})
    q.requires_grad_()
    call = _explain.describe("attention", q, k, v, causal=True)._replace(device="cuda")
    assert rules.note(call, {"q": q, "k": k, "v": v}) == f"forward: {told}; backward: {told}"
    lengths = torch.ones(2, dtype=torch.int32, device="meta")
    cut = rules.note(call, {"q": q, "k": k, "v": v, "kv_lengths": lengths})
    assert cut.startswith(f"forward: {told}; backward: the plain kernel")

"""Every Triton kernel compiles for every kind of GPU it is meant for, here, without one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headwise.backends.triton import cross_entropy, decode, embedding, merge, probs, rms_norm, softmax, transpose
from headwise.backends.triton import launch as launching
from headwise.backends.triton.rows import FOR_REDUCTIONS, LONGEST_HELD_ROW, STAGES_AHEAD, fetches_ahead
from headwise.ops.attention._arguments import Flags

# The release that the tiles and blocks were chosen with.
TUNED = triton.__version__.startswith("3.6.")
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
    "row_grads", "targets", "ids", "order", "squares", "products",
}  # fmt: skip
FLOAT32 = {"rstd", "parts", "losses", "stats", "row_grads", "squares", "products"}
INT64 = {"targets", "ids", "order"}

POINTER_TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1",
    torch.uint8: "*u8",
}  # fmt: skip

HELD = {"ROWS": 1, "COLUMNS": 4096}
LONG = {"LINES": 2048, "LINE": 8}
PART = {"LINES": 512, "LINE": 8}
WEIGHT = {"HAS_WEIGHT": True}
KERNELS = {
    "softmax forward": (softmax._forward_held, HELD, 8),
    "softmax forward, long rows": (softmax._forward_walk, {"LINES": 4096, "LINE": 8, "STAGES": 1}, 32),
    "softmax forward, parts": (softmax._forward_parts, PART, 4),
    "softmax forward, joining": (softmax._forward_join, {**PART, "PARTS": 64}, 4),
    "softmax backward": (softmax._backward_held, {"ROWS": 1, "COLUMNS": 16384}, 16),
    "softmax backward, long rows": (softmax._backward_walk, {**LONG, "STAGES": 1}, 16),
    "softmax backward, parts": (softmax._backward_parts, PART, 4),
    "softmax backward, joining": (softmax._backward_join, {**PART, "PARTS": 64}, 4),
    "rms_norm forward": (rms_norm._forward_held, {**HELD, **WEIGHT}, 8),
    "rms_norm forward, long rows": (rms_norm._forward_walk, {"LINES": 4096, "LINE": 8, "STAGES": 1, **WEIGHT}, 32),
    "rms_norm forward, parts": (rms_norm._forward_parts, PART, 4),
    "rms_norm forward, joining": (rms_norm._forward_join, {**PART, **WEIGHT, "PARTS": 64}, 4),
    "rms_norm backward": (rms_norm._backward_held, {**HELD, **WEIGHT, "SHARES": 1, "STAGES": 3}, 8),
    "rms_norm backward, shares": (
        rms_norm._backward_held,
        {"ROWS": 1, "COLUMNS": 8192, **WEIGHT, "SHARES": 2, "STAGES": 3},
        8,
    ),
    "rms_norm backward, sums of rows": (rms_norm._backward_rows, {"LINES": 1024, "LINE": 8, **WEIGHT}, 8),
    "rms_norm backward, columns": (
        rms_norm._backward_columns,
        {"ROWS": 4, "COLUMNS": 1024, **WEIGHT, "SUMS": 16, "STAGES": 4},
        4,
    ),
    "rms_norm dweight": (rms_norm._add_parts, {"ROWS": 256, "COLUMNS": 32}, 8),
    **{
        f"cross_entropy, {name}": (
            cross_entropy._cross_entropy,
            {
                "HAS_CAP": True,
                "SMOOTH": True,
                "STATS": stats,
                "GRADIENT": gradient,
                **LONG,
                "STAGES": 1,
                "SHIFTED": shifted,
            },
            32,
        )
        for name, stats, gradient, shifted in (
            ("both", True, True, False),
            ("both, rows anywhere", True, True, True),
            ("forward, rows anywhere", True, False, True),
            ("backward, rows anywhere", False, True, True),
        )
    },
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
        options={"num_warps": min(warps, 1024 // gpu.warp_size), "enable_fp_fusion": True},
    )
    assert compiled.metadata.shared <= shared_memory


@pytest.mark.parametrize("target", [name for name, (_, memory) in TARGETS.items() if memory > 2 * LONGEST_HELD_ROW])
def test_softmax_fetches_two_rows_ahead(target):
    kernel, constants = softmax._forward_ahead, {"COLUMNS": 32768, "STAGES": STAGES_AHEAD}
    signature = {argument: _type(argument, constants) for argument in kernel.arg_names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ("x", "y", "width", "x_stride")}
    gpu, shared_memory = TARGETS[target]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=gpu, options={"num_warps": 16, "enable_fp_fusion": True})
    assert "cp.async" in compiled.asm["ptx"]
    assert 2 * LONGEST_HELD_ROW <= compiled.metadata.shared <= 2 * LONGEST_HELD_ROW + FOR_REDUCTIONS <= shared_memory


def test_softmax_does_not_fetch_rows_ahead_that_triton_would_read_one_by_one():
    def ahead(*shape, dtype=torch.bfloat16, stride=None):
        x = torch.empty(shape, dtype=dtype, device="meta")
        return fetches_ahead(*shape, stride or shape[1], x)

    assert ahead(24, 20000)
    assert not ahead(23, 20000)
    assert not ahead(24, 20008)
    assert not ahead(24, 20000, stride=20008)
    assert not ahead(24, 16384)
    assert not ahead(24, 20000, dtype=torch.float32)


def test_rms_norm_rows_that_are_read_one_by_one_have_small_blocks():
    """Larger ones need so many registers for addresses that a multiprocessor has room for one program in place of four."""
    x = torch.empty(8, 50257, dtype=torch.bfloat16, device="meta")
    assert rms_norm._walk_block(50257, (x, 50257)).lines == 2048


def _cross_entropy_both(x, n, smoothing, softcap):
    cross_entropy.cross_entropy_forward_backward(n.float(), x, n, -100, smoothing, 0.1, softcap)


CALLS = {
    "softmax_forward": lambda x, n: softmax.softmax_forward(x),
    "softmax_backward": lambda x, n: softmax.softmax_backward(x, x),
    "rms_norm_forward": lambda x, n: rms_norm.rms_norm_forward(x, x[0], 1e-6, 0.0),
    "rms_norm_backward": lambda x, n: rms_norm.rms_norm_backward(x, x, x[0], n.float(), 1e-6, 0.0),
    "cross_entropy_forward": lambda x, n: cross_entropy.cross_entropy_forward(x, n, -100, 0.1, 0.1, None),
    "cross_entropy_both": lambda x, n: _cross_entropy_both(x, n, 0.0, None),
    "cross_entropy_both, all flags": lambda x, n: _cross_entropy_both(x, n, 0.1, 9.0),
    "embedding_forward": lambda x, n: embedding.embedding_forward(n, x),
    "embedding_backward": lambda x, n: embedding.embedding_backward(x, n, len(n), -1),
    "transpose": lambda x, n: transpose.transpose_forward(x),
}


@pytest.fixture
def row_launches(monkeypatch):
    """What an op launches for so many rows of a width, as the arguments of ``launch``."""
    launches = []
    for module in (launching, softmax, rms_norm, cross_entropy, embedding, transpose):
        monkeypatch.setattr(module, "launch", lambda *launch: launches.append(launch))

    def of(op, dtype, rows, width):
        launches.clear()
        CALLS[op](torch.empty(rows, width, dtype=dtype, device="meta"), torch.empty(rows, dtype=int, device="meta"))
        return list(launches)

    return of


# Where a program holds the most: the widest rows of each way, and rows that no 16-byte load is aligned with.
WIDE = {
    "softmax_forward": [("bfloat16", 32768), ("bfloat16", 131072), ("bfloat16", 50257), ("float32", 131072)],
    "softmax_backward": [("bfloat16", 16384), ("bfloat16", 131072), ("float32", 131072)],
    "rms_norm_forward": [("bfloat16", 32768), ("bfloat16", 131072), ("bfloat16", 50257), ("float32", 131072)],
    "rms_norm_backward": [("bfloat16", 128), ("bfloat16", 16384), ("bfloat16", 131072), ("float32", 8192)],
    "cross_entropy_forward": [("bfloat16", 131072)],
    "cross_entropy_both": [("bfloat16", 50257), ("float32", 131072)],
    "cross_entropy_both, all flags": [("bfloat16", 131072)],
}


@pytest.mark.skipif(not TUNED, reason="the blocks were chosen with another release of Triton")
@pytest.mark.parametrize(("op", "dtype", "width"), [(op, *case) for op, cases in WIDE.items() for case in cases])
def test_row_kernels_keep_to_the_registers(op, dtype, width, row_launches, tmp_path):
    """What the launchers launch for many rows of this width, compiled for sm_90, spills nothing."""
    launches = row_launches(op, getattr(torch, dtype), 4096, width)
    assert launches
    for launch in launches:
        compiled = _compile(launch, TARGETS["sm_90"][0])
        assert compiled.metadata.shared <= TARGETS["sm_90"][1]
        assert _stack(compiled, tmp_path) == 0, launch


@pytest.mark.parametrize("op", CALLS)
def test_no_number_of_rows_asks_for_another_kernel(op, row_launches):
    """Triton compiles a kernel anew for other constants, and for numbers that become 1 or a multiple of 16."""

    def kernels(rows):
        for kernel, _, tensors, numbers, constants, *options in row_launches(op, torch.bfloat16, rows, 512):
            parameters = kernel.params[len(tensors) :]
            apart = [
                None if parameter.do_not_specialize or isinstance(number, float) else (number == 1, number % 16 == 0)
                for parameter, number in zip(parameters, numbers, strict=False)
            ]
            yield kernel.fn.__name__, [t is None for t in tensors], apart, constants, options

    known = list(kernels(16))
    assert known
    for rows in (1, 2, 17, 100, 333, 1024, 3000, 4096):
        assert list(kernels(rows)) == known, rows


@pytest.mark.parametrize("op", ["softmax_forward", "softmax_backward", "rms_norm_backward", "transpose"])
def test_row_kernels_load_and_store_16_bytes_at_once(op, row_launches):
    for launch in row_launches(op, torch.bfloat16, 4096, 512)[:1]:
        ptx = _compile(launch, TARGETS["sm_90"][0]).asm["ptx"]
        assert re.search(r"ld\.global\S*\.v4\.b32|cp\.async\S* .*, 0x10\b|cp\.async\S* .*, 16\b", ptx)
        assert re.search(r"st\.global\S*\.v4\.b32", ptx)


FLAGS = Flags(left=-1, right=0, scale=0.125, softcap=0.0, deterministic=True)
ALL_FLAGS = Flags(left=99, right=0, scale=0.125, softcap=30.0, deterministic=True)


def _decode(empty, d, page_size, flags, rows, splits):
    table = empty(2, 4096 // page_size, dtype=torch.int32) if page_size else None
    cache = empty(9, 8, page_size, d) if page_size else empty(2, 8, 4096, d)
    sink = empty(8 * rows, dtype=torch.float32) if flags.softcap else None
    lengths = empty(2, dtype=torch.int32)
    decode.attention_decode(empty(2, 8 * rows, 1, d), cache, cache, lengths, table, sink, flags, splits)


def _probs(empty, d, flags, backward):
    q, k = empty(1, 4, 4096, d), empty(1, 2, 4096, d)
    others: list = [None] * 5
    if flags.softcap:
        rows, lengths = empty(4096, dtype=torch.int64), empty(1, dtype=torch.int32)
        others = [rows, empty(1, 1, 4096, 4096, dtype=torch.bool), empty(1, 1, 4096, 4096), lengths, empty(4)]
    if backward:
        scores = empty(1, 4, 4096, 4096)
        probs.attention_probs_backward(scores, scores, q, k, *others, flags, bool(flags.softcap), bool(flags.softcap))
    else:
        probs.attention_probs(q, k, *others, flags)


def _merge(empty, d, parts):
    outs, lses = [empty(2, 8, 512, d)] * parts, [empty(2, 8, 512, dtype=torch.float32)] * parts
    merge.merge_attention(outs, lses)
    merge.merge_attention_backward(outs[0], lses[0], outs, lses, outs[0], lses[0])


# The call, and whether what it launches on sm_90 has to keep to the registers.
ATTENTION_CALLS = {
    **{f"decode, {d}": (lambda e, d=d: _decode(e, d, 0, FLAGS, 4, 8), True) for d in (64, 128, 256, 512)},
    "decode, one share": (lambda e: _decode(e, 128, 0, FLAGS, 4, 1), True),
    "decode, many rows": (lambda e: _decode(e, 128, 0, FLAGS, 32, 8), True),
    "decode, pages of 64, all flags": (lambda e: _decode(e, 128, 64, ALL_FLAGS, 4, 8), True),
    "decode, pages of 16, all flags": (lambda e: _decode(e, 128, 16, ALL_FLAGS, 4, 1), True),
    "probs, 128": (lambda e: _probs(e, 128, FLAGS, False), True),
    "probs backward, 128": (lambda e: _probs(e, 128, FLAGS, True), True),
    "probs backward, 512, all flags": (lambda e: _probs(e, 512, ALL_FLAGS, True), False),
    "merge, eight parts": (lambda e: _merge(e, 80, 8), True),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", ATTENTION_CALLS)
def test_what_attention_launches_compiles_and_fits(name, dtype, target, monkeypatch, tmp_path):
    call, in_registers = ATTENTION_CALLS[name]
    launches = []
    for module in (launching, probs, merge):
        monkeypatch.setattr(module, "launch", lambda *launch: launches.append(launch))
    monkeypatch.setattr(decode, "multiprocessors", lambda x: 132)
    for module in (decode, probs):
        monkeypatch.setattr(module, "architecture", lambda device: target)
        if target == "gfx942":
            monkeypatch.setattr(module, "dot_precision", lambda dtype, widest=0: "ieee")
    if target == "gfx942":
        monkeypatch.setattr(decode, "_merges_itself", lambda q, plans: False)
    call(lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device="meta"))
    assert launches
    for launch in launches:
        compiled = _compile(launch, TARGETS[target][0])
        assert compiled.metadata.shared <= TARGETS[target][1]
        if target == "sm_90" and in_registers:
            # The assembler may put a few words aside, of float32 to fit a second program on a multiprocessor.
            few = 16 if name in ("decode, 256", "decode, pages of 64, all flags") else 0
            assert _stack(compiled, tmp_path) <= (few if dtype == torch.bfloat16 else 24)


def _compile(launch, gpu):
    kernel, _, tensors, numbers, constants, *options = launch  # the options end with a limit of registers, or earlier
    values = (*tensors, *numbers, *constants)
    signature, constexprs, attributes = {}, {}, {}
    for place, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if place >= len(values) - len(constants) or value is None or one:
            signature[parameter.name], constexprs[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTER_TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (value % 16 == 0 and not parameter.do_not_specialize):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes),
        target=gpu,
        options={**dict(zip(("num_warps", "num_stages"), options, strict=False)), "enable_fp_fusion": True},
    )


def _stack(compiled, tmp_path) -> int:
    """Bytes of stack a thread has: what the registers do not hold. Other releases of Triton may need a few more."""
    if not TUNED:
        return 0
    cuobjdump = Path(triton.__path__[0], "backends", "nvidia", "bin", "cuobjdump")
    assert cuobjdump.exists(), "the installed triton has no cuobjdump: nothing can be said of registers"
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([cuobjdump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout).group(1))


def _type(argument: str, constants: dict[str, int]) -> str:
    if argument in constants:
        return "constexpr"
    if argument in POINTERS:
        return "*fp32" if argument in FLOAT32 else "*i64" if argument in INT64 else "*bf16"
    return "fp32" if argument in FLOATS else "i32"

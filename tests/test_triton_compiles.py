"""What the attention launchers launch compiles and fits the shared memory of every kind of GPU, here, without one.

Whether it fits is known before the assembler runs, so most variants are compiled no further than that. The other ops:
test_triton_rows_compile.py.
"""

from __future__ import annotations

import pytest
import torch
from ahead_of_time import TUNED, Recorded, stack
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from headwise.backends.triton import hopper
from headwise.backends.triton.attention_backward import attention_backward
from headwise.backends.triton.attention_forward import attention_forward
from headwise.backends.triton.decode import attention_decode
from headwise.backends.triton.gpu import KNOWN
from headwise.backends.triton.probs import attention_probs, attention_probs_backward
from headwise.ops.attention._arguments import Attention, AttentionBackward, Decode, Flags, Packing, Probs, ProbsBackward

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
FULL = Flags(left=-1, right=-1, scale=0.125, softcap=0.0, deterministic=True)
CAUSAL, ALL_FLAGS = FULL._replace(right=0), Flags(left=300, right=5, scale=0.125, softcap=30.0, deterministic=True)
DTYPES = {"bfloat16": BF16, "float32": F32}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {BF16: "*bf16", F32: "*fp32", torch.int64: "*i64", I32: "*i32", torch.uint8: "*u8"}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The kernels of this folder's own, also where those of hopper/ would run."""
    monkeypatch.setattr(hopper, "missing", lambda gpu: "not here")


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def attention_launches(
    arch, dtype, dim, flags, *, mask=False, bias=None, lengths=False, sink=False, packed=False, keys=1024
):
    """Everything that a call of attention with its gradients launches; lengths: q_lengths, kv_lengths and kv_starts."""
    group = 4 if lengths else 1
    sinks = meta(8, dtype=F32) if sink else None
    if packed:
        q, k, v = meta(1024, 8, dim, dtype=dtype), *(meta(keys, 8 // group, dim, dtype=dtype) for _ in range(2))
        packing = Packing(meta(5, dtype=I32), meta(5, dtype=I32), 300, 300)
        args = Attention(q, k, v, None, None, sinks, None, None, None, packing, flags, True)
        rows = (8, 1024)
    else:
        q, k, v = meta(2, 8, 1024, dim, dtype=dtype), *(meta(2, 8 // group, keys, dim, dtype=dtype) for _ in range(2))
        masks = meta(2, 1, 1024, keys, dtype=torch.bool) if mask else None
        biases = meta(8, 1024, keys, dtype=bias) if bias is not None else None
        vectors = [meta(2, dtype=I32) if lengths else None for _ in range(3)]
        args = Attention(q, k, v, masks, biases, sinks, *vectors, None, flags, True)
        rows = (2, 8, 1024)
    out, lse = meta(*q.shape, dtype=dtype), meta(*rows, dtype=F32)
    backward = AttentionBackward(meta(*q.shape, dtype=dtype), lse.clone(), out, lse, args, bias is not None, sink)
    made = [Recorded(attention_forward, args, arch), Recorded(attention_backward, backward, arch)]
    return [(recorded, launch) for recorded in made for launch in recorded.launches]


def shared_memory(launch, arch):
    """Bytes of shared memory of a launch, compiled as far as it takes to know."""
    signature, constants, attributes = {}, {}, {}

    def typed(value, special, path):
        if value is None or (special and type(value) is int and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            made = [typed(member, True, (*path, i)) for i, member in enumerate(value)]
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"

    tensors = [None if place is None else place.like for place in launch.tensors]
    for i, (parameter, value) in enumerate(zip(launch.kernel.params, [*tensors, *launch.tail], strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        else:
            signature[parameter.name] = typed(value, not parameter.do_not_specialize, (i,))
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    backend = make_backend(TARGETS[arch])
    options = backend.parse_options(
        {k: v for k, v in launch.options.items() if k != "maxnreg"} | source.parse_options()
    )
    metadata, stages, context = {"target": TARGETS[arch], **options.__dict__}, {}, ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(TARGETS[arch], options, functions, backend.get_module_map(), context)
    for stage in stages.values():
        module = stage(module, metadata)
        if "shared" in metadata:
            return metadata["shared"]
    raise AssertionError("no stage says how much shared memory there is")


def assert_fits(launches, arch):
    names = set()
    for _, launch in launches:
        names.add(launch.kernel.__name__)
        assert shared_memory(launch, arch) <= KNOWN[arch].shared_memory, launch
    return names


def slow(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.slow)


# A mask and a float32 bias need shared memory of their own: the most that a head dim can ask for.
WORST = [
    ("sm_90", "bfloat16", 128, "full"), ("sm_90", "bfloat16", 256, "full"), ("sm_90", "float32", 64, "full"),
    ("sm_86", "bfloat16", 64, "full"), ("gfx942", "bfloat16", 64, "full"),
    *(
        slow(arch, dtype, dim, flags)
        for arch in TARGETS
        for dtype in DTYPES
        for dim in (16, 32, 64, 128, 256, 512)
        for flags in ("full", "all flags")
        if (dim < 512 or dtype == "bfloat16")  # minutes of the compiler for what few will run
        if flags == "all flags" or dim in (64, 256)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "dtype", "dim", "flags"), WORST)
def test_attention_fits_with_a_mask_and_a_float32_bias(arch, dtype, dim, flags):
    chosen = FULL if flags == "full" else ALL_FLAGS
    names = assert_fits(attention_launches(arch, DTYPES[dtype], dim, chosen, mask=True, bias=F32), arch)
    assert {"_forward", "backward_queries", "backward_keys", "_bias_gradient"} < names
    assert ("_split" in names) == (arch == "sm_90" and dtype == "float32" and dim <= 128)


SCORES = {"mask": {"mask": True}, "bias": {"bias": BF16}, "bias, odd rows": {"bias": BF16, "keys": 1001}, "none": {}}


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("scores", SCORES)
def test_attention_fits(arch, dim, scores):
    flags = CAUSAL if scores == "none" else FULL
    assert_fits(attention_launches(arch, BF16, dim, flags, **SCORES[scores]), arch)


@pytest.mark.parametrize("arch", ["sm_90", slow("gfx942")])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_everything_at_once_compiles(arch, packed):
    given = {"packed": True} if packed else {"mask": True, "bias": BF16, "lengths": True}
    if arch == "gfx942" and not packed and not TUNED:
        pytest.xfail("Triton 3.9 for AMD: dk and dv with a mask need single bits in shared memory, which it refuses")
    assert_fits(attention_launches(arch, BF16, 64, ALL_FLAGS, sink=True, **given), arch)


# Bytes of stack that a thread may have: what the assembler sets aside without a loss that was measured.
SPILLED = 64


@pytest.mark.parametrize("dim", [128, slow(64), slow(256)])
def test_plain_attention_keeps_to_the_registers(dim, tmp_path):
    for recorded, launch in attention_launches("sm_90", BF16, dim, CAUSAL):
        assert stack(recorded.compiled(launch), tmp_path) <= SPILLED


# What merging and summing take of 16-bit inputs: as little shared memory as rounded results, and no more of the stack.
UNROUNDED = [("sm_90", 128), ("gfx942", 64), *(slow(arch, dim) for arch in TARGETS for dim in (64, 128, 256))]


@pytest.mark.parametrize(("arch", "dim"), UNROUNDED)
def test_unrounded_results_cost_nothing(arch, dim, tmp_path):
    launches = zip(
        attention_launches(arch, BF16, dim, CAUSAL), attention_launches(arch, BF16, dim, CAUSAL._replace(unrounded=True)),
        strict=True,
    )  # fmt: skip
    for (_, rounded), (recorded, launch) in launches:
        assert shared_memory(launch, arch) <= min(shared_memory(rounded, arch), KNOWN[arch].shared_memory)
        if arch == "sm_90":
            assert stack(recorded.compiled(launch), tmp_path) <= SPILLED


def _decode(dtype, d, page_size, flags, rows, splits, starts=False):
    cache = (9, 8, page_size, d) if page_size else (2, 8, 4096, d)
    return attention_decode, Decode(
        meta(2, 8 * rows, 1, d, dtype=dtype), meta(*cache, dtype=dtype), meta(*cache, dtype=dtype), meta(2, dtype=I32),
        meta(2, dtype=I32) if starts else None, meta(2, 4096 // page_size, dtype=I32) if page_size else None,
        meta(8 * rows, dtype=F32) if flags.softcap else None, flags, splits, False, True,
    )  # fmt: skip


def _latent(dtype, heads, page_size):
    cache = meta(*((128, 1, page_size, 576) if page_size else (2, 1, 4096, 576)), dtype=dtype)
    table = meta(2, 4096 // page_size, dtype=I32) if page_size else None
    q, lengths = meta(2, heads, 576, dtype=dtype), meta(2, dtype=I32)
    return attention_decode, Decode(q, cache, cache[..., :512], lengths, None, table, None, CAUSAL, 8, True, True)


def _probs(dtype, d, flags, backward):
    q, k = meta(1, 4, 4096, d, dtype=dtype), meta(1, 2, 4096, d, dtype=dtype)
    others = [None] * 7
    if flags.softcap:
        scores = meta(1, 1, 4096, 4096, dtype=torch.bool), meta(1, 1, 4096, 4096, dtype=dtype), meta(4, dtype=dtype)
        others = [meta(4096, dtype=torch.int64), *scores, *(meta(1, dtype=I32) for _ in range(3))]
    args = Probs(q, k, *others, flags)
    if not backward:
        return attention_probs, args
    grad, probs = (meta(1, 4, 4096, 4096, dtype=dtype) for _ in range(2))
    return attention_probs_backward, ProbsBackward(grad, probs, args, bool(flags.softcap), bool(flags.softcap))


ONE_SIDED = ALL_FLAGS._replace(left=99, right=0)
# The call, and how many bytes of stack it may have on sm_90; None: any.
CALLS = {
    **{f"decode, {d}": (lambda t, d=d: _decode(t, d, 0, CAUSAL, 4, 8), 16) for d in (64, 128, 256, 512)},
    "decode, unrounded": (lambda t: _decode(t, 128, 0, CAUSAL._replace(unrounded=True), 4, 8), 16),
    "decode, one split": (lambda t: _decode(t, 128, 0, CAUSAL, 4, 1), 0),
    "decode, many rows": (lambda t: _decode(t, 128, 0, CAUSAL, 32, 8), 0),
    "decode, pages of 64, all flags": (lambda t: _decode(t, 128, 64, ONE_SIDED, 4, 8, starts=True), 24),
    "decode, pages of 16, all flags": (lambda t: _decode(t, 128, 16, ONE_SIDED, 4, 1, starts=True), 24),
    "latent, 16 heads": (lambda t: _latent(t, 16, 64), 0),
    # 64 rows of 512 sums are half of all registers, and a few words beside them go to the stack.
    "latent, 128 heads": (lambda t: _latent(t, 128, 0), None),
    "probs, 128": (lambda t: _probs(t, 128, CAUSAL, False), 0),
    "probs backward, 128": (lambda t: _probs(t, 128, CAUSAL, True), 0),
    "probs backward, 512, all flags": (lambda t: _probs(t, 512, ALL_FLAGS, True), None),
}
QUICK = (
    "decode, 128",
    "decode, unrounded",
    "latent, 16 heads",
    "decode, pages of 16, all flags",
    "probs backward, 128",
)


@pytest.mark.parametrize(
    ("name", "dtype", "arch"),
    [
        (name, dtype, arch) if arch == "sm_90" and dtype == "bfloat16" and name in QUICK else slow(name, dtype, arch)
        for name in CALLS
        for dtype in DTYPES
        for arch in TARGETS
        if (name.startswith("latent"), dtype, arch) != (True, "float32", "sm_86")  # refused: test_cli.py
    ],
)
def test_decoding_and_probs_compile_and_fit(name, dtype, arch, tmp_path):
    call, spilled = CALLS[name]
    recorded = Recorded(*call(DTYPES[dtype]), arch)
    assert recorded.launches
    for launch in recorded.launches:
        assert shared_memory(launch, arch) <= KNOWN[arch].shared_memory
        if arch == "sm_90" and spilled is not None:
            # The assembler may put a few words of float32 aside to fit a second program on a multiprocessor.
            assert stack(recorded.compiled(launch), tmp_path) <= (spilled if dtype == "bfloat16" else 32)


@pytest.mark.parametrize("op", ["attention", "decode"])
def test_no_length_asks_for_another_kernel(op):
    """Triton compiles a kernel anew for other constants, and for numbers that become 1 or a multiple of 16."""

    def variants(length):
        q, k, v = (meta(2, 4, length, 64) for _ in range(3))
        args = Attention(q, k, v, None, None, None, None, None, None, None, CAUSAL, True)
        if op == "decode":
            args = Decode(meta(2, 4, 64), k, v, meta(2, dtype=I32), None, None, None, CAUSAL, 4)
        launcher = attention_forward if op == "attention" else attention_decode
        for launch in Recorded(launcher, args).launches:
            parameters = launch.kernel.params[len(launch.tensors) :]
            numbers = [
                special(value, not parameter.do_not_specialize)
                for parameter, value in zip(parameters, launch.tail, strict=True)
            ]
            yield launch.kernel.__name__, [t is None for t in launch.tensors], numbers, launch.options

    def special(value, matters):
        if isinstance(value, tuple) and all(not isinstance(x, (str, bool)) for x in value):
            return [special(member, True) for member in value]
        if not matters or isinstance(value, float):
            return None
        return (value == 1, value % 16 == 0) if type(value) is int else value

    known = list(variants(512))
    assert known
    for length in (300, 1001, 1024, 3000, 4096):
        assert list(variants(length)) == known, length

"""Every kernel variant that the case tables use compiles under both compilers of WGSL: naga (wgpu) and Tint (browsers).

The launchers are run on every case without running a kernel: what they would have compiled is recorded, for the adapter
of this machine and for others whose limits lead to other tiles.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress

import pytest
import torch
import wgpu
from webgpu_tint import TintError, compile_with_tint

from headwise import testing
from headwise.backends.registry import Unsupported
from headwise.backends.webgpu import recorder, runtime, shaders
from headwise.cases import SUITES
from headwise.config import settings
from headwise.ops.attention import elsewhere, unrounded

# What decides the tiles: the floor of WebGPU, a discrete GPU, a phone.
ADAPTERS = {
    "floor": {"tier": "A", "subgroup_size": 0, "workgroup_memory": 16384, "workgroup_threads": 256},
    "software": {},
    "discrete": {
        "name": "NVIDIA H200", "kind": "DiscreteGPU", "vendor": 0x10DE, "tier": "C", "subgroup_size": 32,
        "workgroup_memory": 49152, "workgroup_threads": 1024,
    },
    "phone": {
        "name": "a phone", "kind": "IntegratedGPU", "vendor": 0x5143, "tier": "C", "subgroup_size": 16,
        "workgroup_memory": 16384, "workgroup_threads": 256,
    },
}  # fmt: skip


@contextmanager
def recording(monkeypatch, **capabilities):
    """Yields a dict that fills with ``rendered text: (name, variant)`` while launchers run; no kernel does."""
    monkeypatch.setattr(settings, "webgpu_tier", None)
    runtime.forget()
    device = runtime.device()
    device.capabilities = device.capabilities._replace(**capabilities)
    recorded: dict[str, tuple[str, dict]] = {}
    made: dict[tuple, shaders.Kernel] = {}

    def kernel(name, **variant):
        key = (name, *variant.items())
        if key not in made:
            for native_half in (True, False):  # whatever this machine's driver rounds like
                rendered = shaders.render(name, native_half=native_half, **variant)
                recorded.setdefault(rendered.text, (name, variant | {"native_half": native_half}))
            made[key] = rendered
        return made[key]

    monkeypatch.setattr(device, "kernel", kernel)
    monkeypatch.setattr(recorder.Record, "_bind", lambda *arguments: [])  # nothing to encode
    try:
        yield recorded
    finally:
        monkeypatch.undo()
        runtime.forget()


def run_all_cases(op, quick):
    """Forward and backward of every case; the results are whatever was in memory."""
    suite = SUITES[op]
    for case in suite.cases:
        if quick and "quick" not in case.tags:
            continue
        for dtype in suite.dtypes:
            maker = testing.Maker(dtype, torch.device("cpu"), 0)
            arguments = suite.make(maker, **case.params)
            for differentiable in (suite.differentiable, ()):
                try:
                    testing._with_gradients(lambda a: suite.run(a, "webgpu"), arguments, differentiable, maker, {})
                    break
                except Unsupported:  # no gradients there; then forward
                    assert differentiable


# Hundreds of variants.
LONG = ("attention", "attention_decode", "attention_varlen", "cross_entropy", "rms_norm", "layer_norm", "add_rms_norm")


@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.slow if op in LONG else ()) for op in SUITES])
def test_every_variant_compiles_under_naga_and_tint(op, monkeypatch):
    found: dict[str, tuple[str, dict]] = {}
    for_the_floor: set[str] = set()
    for adapter, changes in ADAPTERS.items():
        with recording(monkeypatch, **changes) as recorded:
            run_all_cases(op, quick=adapter not in ("floor", "software"))
        assert recorded, "nothing was recorded: this test tests nothing"
        found.update(recorded)
        if changes.get("workgroup_memory") == 16384:
            for_the_floor.update(recorded)
    gpu = runtime.device().gpu
    failures = []
    for text, (name, variant) in found.items():
        try:
            gpu.create_shader_module(code=text)
            compile_with_tint(shaders.render(name, dialect=shaders.TINT, **variant).text, floor=text in for_the_floor)
        except (TintError, wgpu.GPUError) as error:
            failures.append(f"{name} {variant}: {error}")
    assert not failures, f"{len(failures)} of {len(found)} variants: " + "\n".join(failures[:3])


def test_dropout_of_a_part_compiles_under_naga_and_tint(monkeypatch):
    """With the numbers of its first batch entry and head, and of its first query and key, behind the seed."""
    x, ends = torch.randn(1, 2, 70, 16), torch.tensor([0, 30, 70], dtype=torch.int32)
    flags = {"window": None, "scale": 1.0, "softcap": None, "deterministic": True, "backend": "webgpu", "dropout": 0.5}
    with recording(monkeypatch) as recorded:
        for count in (3, 5, 6):
            seed, bias = torch.ones(count, dtype=torch.int64), torch.ones(1, 1, 70, 70)
            out, lse = unrounded.attention(x, x, x, bias=bias, seed=seed, **flags)
            unrounded.attention_backward(x, x, x, x, out, lse, bias=bias, need_bias_grad=True, seed=seed, **flags)
            if count == 3:
                packed = [x[0].transpose(0, 1).contiguous()] * 3
                out, lse = elsewhere.attention_varlen(*packed, ends, 40, seed=seed, **flags)
                unrounded.attention_varlen_backward(out, *packed, out, lse, ends, 40, seed=seed, **flags)
    parts = {text: of for text, of in recorded.items() if "load_aux(params.seed + 4u)" in text}
    assert {name for name, _ in parts.values()} == {"attention_forward", "attention_backward", "attention_bias"}
    gpu = runtime.device().gpu
    for text, (name, variant) in parts.items():
        gpu.create_shader_module(code=text)
        compile_with_tint(shaders.render(name, dialect=shaders.TINT, **variant).text)


def test_float16_is_compiled_in_both_ways(monkeypatch):
    with recording(monkeypatch) as recorded:
        run_all_cases("softmax", quick=True)
    ways = [text for text, (name, variant) in recorded.items() if name == "softmax" and variant["dtype"] == "f16"]
    assert any("return pack2x16float" in text for text in ways)
    assert any("half_bits" in text for text in ways)


def test_the_probes_compile_under_tint():
    for name in ("subgroup_probe", "half_probe"):
        compile_with_tint(shaders.render(name, dialect=shaders.TINT).text)


def test_both_dialects_are_rendered():
    """Tint wants to be told of subgroups, and naga does not know the words."""
    naga, tint = (shaders.render("subgroup_probe", dialect=dialect).text for dialect in (shaders.NAGA, shaders.TINT))
    assert "enable subgroups;" in tint
    assert "enable" not in naga
    with pytest.raises(TintError, match="subgroups"):
        compile_with_tint(naga)


# ----------------------------------------------------------------------------------- what Tint refuses and naga lets pass

HEAD = "@group(0) @binding(0) var<storage, read_write> y: array<f32>;\nvar<workgroup> shared_sum: array<f32, {size}>;\n"
MAIN = "@compute @workgroup_size({threads}) fn main(@builtin(local_invocation_index) thread: u32) {{ {body} }}\n"
GOOD = "shared_sum[thread] = y[thread]; workgroupBarrier(); y[thread] = shared_sum[thread ^ 1u];"


def shader(body=GOOD, size=64, threads=64):
    return HEAD.format(size=size) + MAIN.format(threads=threads, body=body)


def test_tint_takes_a_good_shader():
    compile_with_tint(shader())
    compile_with_tint("// Comments need not be ASCII: ≤ · –\n" + shader())


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("if (thread < 3u) { workgroupBarrier(); } y[thread] = 1.0;", "must only be called from uniform control flow"),
        ("if (y[0] > 3.0) { return; } workgroupBarrier(); y[thread] = 1.0;", "uniform control flow"),
        ("y[thread] = 1.0 / 0.0;", "infinity|division by zero|cannot be represented"),
        ("y[thread] = undeclared;", "unresolved"),
    ],
)
def test_tint_refuses(bad, why):
    with pytest.raises(TintError, match=why):
        compile_with_tint(shader(bad))


@pytest.mark.parametrize(("size", "threads"), [(5000, 64), (64, 512)])
def test_tint_refuses_more_than_every_device_has(size, threads):
    with pytest.raises(TintError, match=r"larger than the maximum allowed|exceeds the maximum allowed"):
        compile_with_tint(shader(size=size, threads=threads))


def test_naga_lets_a_barrier_pass_that_tint_refuses():
    """Which is why both are asked."""
    with suppress(TintError):
        compile_with_tint(bad := shader("if (thread < 3u) { workgroupBarrier(); } y[thread] = 1.0;"))
        pytest.fail("Tint took it")
    runtime.device().gpu.create_shader_module(code=bad)


def _operators(dtype):
    """One call of each kernel family of PyTorch's own operators, in the dtypes and layouts that choose a variant."""
    device = "webgpu"
    x, whole = (
        torch.zeros(6, 8, 12, dtype=dtype, device=device),
        torch.zeros(6, 8, 12, dtype=torch.int64, device=device),
    )
    turned, odd = x.transpose(0, 2), x[:, 1:, 3:]
    for y in (x, turned, odd):
        torch.where(y > 0, (y * 2 + y).exp().tanh(), torch.nn.functional.gelu(y) ** 1.5)
        y.sum(-1), y.sum(), y.amax(0), y.argmax(1), y.var(0), y.norm()
        y.cumsum(1), y.topk(2), y.sort(0), y.softmax(1)
        (
            y.log_softmax(-1),
            y.clone().mul_(y).fmod_(3),
            y.to(torch.int32),
            y.to(torch.bool).to(torch.int8).to(torch.int16) + 1,
        )
        y @ y.mT, y[0] @ y[0].t(), y.gather(1, whole[: y.shape[0], :1, : y.shape[2]])
        y.scatter_add(1, whole[: y.shape[0], :1, : y.shape[2]], y), y[whole[0, 0]], torch.cat([y, y.float()])
    (
        whole // 3 % 5 + whole.sum() - whole.prod(1).sum(),
        torch.arange(9, device=device),
        torch.arange(0, 1, 0.1, device=device),
    )
    many = torch.zeros(2, 3000, dtype=torch.int64, device=device)
    for y in (many.to(dtype), many, many.to(torch.int16), many.to(torch.bool)):
        y.sort(1), y.sort(1, descending=True), y.topk(20), y.scatter(1, many, y), y.scatter_reduce(1, many, y, "amax")
        y.index_fill(1, many[0], 1), y.index_select(1, many[0])
        (
            y.index_fill_(1, many[0], 1),
            y.index_copy_(1, many[0, :2], y[:, :2]),
            y.cummax(1),
            torch.searchsorted(y[0], y, right=True),
        )
    many << 3, many.int() >> 3, torch.searchsorted(x[0, 0], x, out_int32=True)
    many.scatter_reduce(1, many, many, "mean", include_self=False)
    x.uniform_(), x.normal_(), x.bernoulli_(0.5), x.exponential_(), whole.random_(0, 9), x.fill_(3)
    x.float().double().reciprocal().float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_operators_of_pytorch_compile_under_naga_and_tint_webgpu(dtype, monkeypatch):
    with recording(monkeypatch, **ADAPTERS["floor"]) as recorded:
        _operators(dtype)
    families = {name for name, _ in recorded.values()}
    assert families >= {
        "pointwise",
        "reduce",
        "matmul",
        "gather",
        "scatter",
        "scatter_targets",
        "sort_keys",
        "radix_sort",
        "order",
        "search",
        "write_along",
        "scan",
        "random",
        "arange",
        "wide",
    }
    gpu = runtime.device().gpu
    for text, (name, variant) in recorded.items():
        gpu.create_shader_module(code=text)
        compile_with_tint(shaders.render(name, dialect=shaders.TINT, **variant).text, floor=True)

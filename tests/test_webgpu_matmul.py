"""Products on WebGPU in every form that PyTorch hands over, against float64: tiles, few rows, splits of k."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from webgpu_tint import compile_with_tint

from headwise.backends.webgpu import matmul, matmul_plans, runtime, shaders
from headwise.backends.webgpu.matmul_plans import GemmTile, Plan, Rows
from headwise.config import settings

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of one product: rounding of the result and nothing else. A float32 sum of a few hundred products errs by less.
CLOSE = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


def operand(rows: int, columns: int, turned: bool, dtype: torch.dtype, batch: int = 0) -> torch.Tensor:
    shape = (columns, rows) if turned else (rows, columns)
    x = torch.randn(*([batch] if batch else []), *shape).to(dtype)
    return x.mT if turned else x


def assert_right(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None):
    device = runtime.device()
    with device.lock:
        inputs = [device.upload(x) for x in (a, b, *([] if bias is None else [bias]))]
        found = device.read(matmul.matmul(device, inputs[0], inputs[1], dtype or a.dtype, *inputs[2:]))
    wanted = a.double() @ b.double() + (0 if bias is None else bias.double())
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < CLOSE[dtype or a.dtype], (tuple(a.shape), tuple(b.shape), a.stride(), b.stride(), error)


@pytest.mark.parametrize(("m", "n", "k"), [(33, 40, 68), (40, 31, 33), (1, 264, 200), (3, 36, 84), (16, 72, 40)])
def test_any_sizes_and_layouts(m: int, n: int, k: int):
    for i, (a_turned, b_turned) in enumerate(product((False, True), repeat=2)):
        for dtype in (torch.float32, DTYPES[1 + i % 2]):
            bias = torch.randn(n).to(dtype) if a_turned == (dtype == torch.float32) else None
            assert_right(operand(m, k, a_turned, dtype), operand(k, n, b_turned, dtype), bias)


def test_a_column_is_a_row_of_the_transposed_product():
    for turned in (False, True):
        assert_right(operand(70, 48, turned, torch.float32), torch.randn(48, 1))


@pytest.mark.parametrize("tile", [GemmTile(32, 64, 4, 8, 8, 2), GemmTile(64, 32, 8, 4, 4, 1)])
def test_tiles_of_other_adapters(tile: GemmTile, monkeypatch: pytest.MonkeyPatch):
    """Two stages, threads in blocks of four by eight and not, chains that end within k, splits of k."""
    monkeypatch.setattr(matmul_plans, "CHAIN", 32)
    monkeypatch.setattr(matmul_plans, "MOST_ROWS", 0)
    for splits, turned in ((1, False), (3, True)):
        cut = Plan(tile, matmul_plans.split_of(104, splits, tile.step))
        monkeypatch.setattr(matmul_plans, "plan_for", lambda *sizes, plan=cut: plan)
        assert_right(operand(70, 104, turned, torch.float32), operand(104, 72, not turned, torch.float32))


@pytest.mark.parametrize("along_k", [False, True])
def test_few_rows_in_splits(along_k: bool, monkeypatch: pytest.MonkeyPatch):
    plan = Rows(8, 64, 16, 4, 2) if along_k else Rows(8, 64, 4, 4, 2)
    monkeypatch.setattr(matmul_plans, "MOST_ROWS", 8)
    monkeypatch.setattr(matmul_plans, "rows_for", lambda *sizes: plan)
    monkeypatch.setattr(matmul_plans, "split_of_rows", lambda *sizes: 64)
    for dtype in (torch.float32, torch.float16):
        assert_right(operand(6, 200, False, dtype), operand(200, 44, along_k, dtype), torch.randn(44).to(dtype))


def test_batches_in_splits_and_alone(monkeypatch: pytest.MonkeyPatch):
    a, b = operand(6, 80, False, torch.bfloat16, batch=3), operand(80, 8, True, torch.bfloat16, batch=3)
    assert_right(a, b)
    monkeypatch.setattr(matmul_plans, "plan_for", lambda *sizes: Plan(GemmTile(32, 32, 8, 4, 4), 32))
    assert_right(a, b)


@pytest.fixture
def binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(settings, "webgpu_binding_bytes", request.param)
    runtime.forget()
    yield request.param
    monkeypatch.undo()
    runtime.forget()


@pytest.mark.parametrize(
    ("binding", "batch", "m", "k", "n"),
    [(147456, 0, 96, 512, 128), (180000, 0, 96, 512, 128), (147456, 2, 72, 512, 72)],
    indirect=["binding"],
)
def test_partials_are_no_larger_than_a_binding(binding: int, batch: int, m: int, k: int, n: int):
    """By cost alone k has more splits: what is multiplied and the result can be bound, those partials cannot."""
    a, b = (operand(*size, False, torch.bfloat16, batch) for size in ((m, k), (k, n)))
    assert max(x.numel() for x in (a, b)) * 2 <= binding
    free = runtime.device().capabilities._replace(binding_bytes=1 << 27)
    splits = -(-k // matmul_plans.plan_for(free, m, n, k, batch or 1, True).split)
    assert splits * (batch or 1) * m * n * 4 > binding
    assert_right(a, b)


def test_a_long_sum_keeps_its_digits():
    """Thousands of products of one sign: one chain of additions would lose a digit."""
    a, b = torch.rand(32, 6000) + 0.5, torch.rand(6000, 32) + 0.5
    assert_right(a, b)
    assert_right(a[:1], b)


def test_plans_of_a_large_gpu():
    """Large products take the fastest tile and are not cut; small results of long sums are."""
    gpu = runtime.device().capabilities._replace(kind="DiscreteGPU", workgroup_memory=49152, workgroup_threads=1024)
    floor = gpu._replace(workgroup_memory=16384, workgroup_threads=256)
    for n in (2048, 4096, 8192):
        assert matmul_plans.plan_for(gpu, n, n, n, 1, True) == (matmul_plans._TILES[0], n)
        assert matmul_plans.plan_for(floor, n, n, n, 1, True).tile.memory <= 16384
    for m, n, k in ((768, 768, 4096), (3072, 768, 4096), (64, 4096, 4096), (100, 100, 100000)):
        tile, split = matmul_plans.plan_for(gpu, m, n, k, 1, True)
        assert split < k
        assert split % tile.step == 0
        assert matmul_plans.plan_for(gpu, m, n, k, 1, False).split == k
    assert matmul_plans.plan_for(gpu, 128, 128, 64, 1, True).split == 64
    # What WebGPU promises to bind: 128 MiB. Three splits would be 192.
    floor = floor._replace(binding_bytes=1 << 27)
    assert matmul_plans.plan_for(floor._replace(binding_bytes=1 << 28), 4096, 4096, 16384, 1, True).split < 8192
    assert matmul_plans.plan_for(floor, 4096, 4096, 16384, 1, True).split >= 8192


def test_the_tiles_of_large_gpus_compile_under_naga_and_tint():
    """Software never runs them."""
    gpu = runtime.device().gpu
    of_all = {"a": "f32", "b": "bf16", "out": "f32"}
    for i, tile in enumerate(matmul_plans._TILES):
        variant = {
            **of_all, "bias": "f32" if i % 2 else "", "a_along": "mk"[i % 2], "b_along": "kn"[i % 2], "a_vectors": True,
            "b_vectors": i != 1, "out_vectors": i != 2, "adds": i == 3, "batched": i == 4, "split_k": i == 5,
            "tile": tile[:5], "stages": tile.stages, "chain": 512 if i < 3 else 0,
        }  # fmt: skip
        gpu.create_shader_module(code=shaders.render("matmul", **variant).text)
        text = shaders.render("matmul", dialect=shaders.TINT, **variant).text
        compile_with_tint(text, floor=tile.memory <= 16384)
    for rows, along_k in product(range(1, matmul_plans.MOST_ROWS + 1), (False, True)):
        plan = matmul_plans.rows_for(rows, 4096, along_k)
        of_rows = {**of_all, "bias": "f16", "b_along": "k" if along_k else "n", "split_k": False, **plan._asdict()}
        gpu.create_shader_module(code=shaders.render("matmul_rows", **of_rows).text)
        compile_with_tint(shaders.render("matmul_rows", dialect=shaders.TINT, **of_rows).text, floor=True)

"""``device="webgpu"``: tensors, modules and optimizers as on any device of PyTorch, and what has no place there."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import headwise as hw
from headwise import testing, webgpu
from headwise.reference.philox import philox

DEVICE = "webgpu"
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def held(function, *tensors):
    """The same function there, on the CPU and, for the truth, in float64; every result within the budget of the house."""
    found, plain = function(*[x.to(DEVICE) for x in tensors]), function(*tensors)
    truth = function(*[x.double() if x.is_floating_point() else x for x in tensors])
    scale = max((x.abs().max().item() for x in tensors if x.is_floating_point()), default=0.0)
    several = [x if isinstance(x, (tuple, list)) else [x] for x in (found, plain, truth)]
    for i, (ours, theirs, true) in enumerate(zip(*several, strict=True)):
        assert ours.device.type == DEVICE
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        if theirs.is_floating_point():
            result = testing.compare(f"result {i}", ours.detach().cpu(), true.detach().double(), theirs.detach(), scale)
            assert result.ok, str(result)
        else:
            assert torch.equal(ours.cpu(), theirs)


# ------------------------------------------------------------------------------------------------------ a device's tensors


def test_tensors_are_made_moved_and_read():
    x = torch.arange(12.0).view(3, 4)
    y = x.to(DEVICE)
    assert y.device == torch.device(DEVICE, 0)
    assert torch.equal(y.cpu(), x)
    assert torch.equal(webgpu.array(x).cpu(), x)
    assert y[1, 2].item() == 6.0
    assert y.tolist() == x.tolist()
    assert repr(y).splitlines()[0] == "tensor([[ 0.,  1.,  2.,  3.],"
    assert repr(y).endswith("device='webgpu:0')")
    assert torch.equal(torch.empty(3, 4).copy_(y), x)
    for made in (
        torch.zeros(2, 3, device=DEVICE), torch.full((2, 3), 0.0, device=DEVICE),
        torch.tensor([[0.0] * 3] * 2, device=DEVICE),
        torch.zeros_like(y)[:2, :3], y.new_zeros(2, 3), torch.ones(2, 3, device=DEVICE) - 1,
    ):  # fmt: skip
        assert made.device.type == DEVICE
        assert torch.equal(made.cpu(), torch.zeros(2, 3))
    assert torch.equal(torch.arange(2, 9, 3, device=DEVICE).cpu(), torch.arange(2, 9, 3))
    assert torch.equal(torch.eye(3, device=DEVICE).cpu(), torch.eye(3))
    assert x.is_pinned() is False


def test_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="on cpu beside one on webgpu"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    assert torch.equal((torch.ones(3, device=DEVICE) * torch.tensor(2.0)).cpu(), torch.full((3,), 2.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool], ids=str)
def test_whole_numbers_are_exact(dtype):
    torch.manual_seed(0)
    low, high = (0, 2) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    a, b = (torch.randint(low, high, (1003,)).to(dtype) for _ in range(2))
    b[b == 0] = 1
    held(lambda a, b: [a + b, a * b, a == b, a < b, torch.where(a < b, a, b), a.sum(), a.to(torch.float32)], a, b)
    if dtype != torch.bool:
        held(lambda a, b: [a - b, a // b, a % b, torch.maximum(a, b), a.cumsum(0), a.sort().values], a, b)
    held(lambda a: [a.to(torch.int64), a.to(torch.uint8), a.to(torch.bool)], a)


def test_scalars_of_a_call_are_no_part_of_its_record():
    """A learning rate that changes every step must neither fill the cache nor be taken from it."""
    from headwise.backends.webgpu import recorder

    x = torch.arange(5.0, device=DEVICE)
    (x * 0.5).cpu()
    before = len(recorder._kept)
    for i in range(200):  # more than a command buffer holds
        last = x * float(i)
    assert torch.equal(last.cpu(), torch.arange(5.0) * 199)
    assert len(recorder._kept) == before
    kept = [x + i for i in range(100)]
    for i, y in enumerate(kept):
        assert torch.equal(y.cpu(), torch.arange(5.0) + i)


@pytest.mark.parametrize("value", [1e39, -1e39, float("inf"), float("nan")])
def test_numbers_that_float32_does_not_hold(value):
    assert torch.equal(
        (torch.arange(5.0, device=DEVICE) + value).cpu().nan_to_num(7), (torch.arange(5.0) + value).nan_to_num(7)
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_is_true_and_infinity_finds_the_largest_number(dtype):
    """As in PyTorch; WGSL alone lets a compiler take NaN for anything."""
    x = torch.tensor([float("nan"), 0.0, -0.0, 1.0, float("inf"), -float("inf"), 1e-7], dtype=dtype)
    y = x.to(DEVICE)
    for function in (
        lambda x: x.bool(), lambda x: x.logical_not(), lambda x: x.logical_and(x.flip(0)), lambda x: x.logical_or(x),
        lambda x: x.logical_xor(x.flip(0)), lambda x: x[:1].any(), lambda x: x[:1].all(), lambda x: x.all(),
        lambda x: x.nonzero(),
        lambda x: torch.zeros_like(x, dtype=torch.bool).copy_(x), lambda x: x.count_nonzero(), lambda x: x.nan_to_num(),
        lambda x: x.nan_to_num(2.0, neginf=-3.0),
    ):  # fmt: skip
        assert torch.equal(function(y).cpu(), function(x))


@pytest.mark.parametrize("name", ["leaky_relu", "hardshrink", "softshrink", "elu", "hardtanh", "mish", "softplus"])
def test_gradients_of_activations(name):
    x, found = torch.tensor([float("nan"), -3.0, -0.2, -0.0, 0.0, 0.3, 4.0, 100.0]), []
    for device in ("cpu", DEVICE):
        leaf = x.to(device).clone().requires_grad_()
        getattr(F, name)(leaf).sum().backward()
        found.append(leaf.grad.cpu())
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


def test_what_is_not_there_says_so_and_runs_on_the_cpu_if_asked():
    x = torch.rand(4, 4, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"aten.linalg_qr.default is not there on WebGPU. x.cpu\(\)"):
        torch.linalg.qr(x)
    webgpu.fallback()
    try:
        q, r = torch.linalg.qr(x)
    finally:
        webgpu.fallback(False)
    torch.testing.assert_close((q @ r).cpu(), x.cpu())
    assert webgpu.fallbacks()["aten.linalg_qr.default"] == 1
    with pytest.raises(NotImplementedError, match="fallback"):
        torch.linalg.qr(x)
    with pytest.raises(NotImplementedError, match="float64"):
        torch.ones(3, dtype=torch.float64, device=DEVICE) + 1


def test_an_operator_that_a_backward_pass_misses_raises():
    """PyTorch would end the process."""
    from headwise.backends.webgpu.array import OPERATORS

    func = torch.ops.aten.threshold_backward.default
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    y, there = x.relu().sum(), OPERATORS.pop(func)
    try:
        OPERATORS[func] = lambda *_: (_ for _ in ()).throw(NotImplementedError("no such thing"))
        with pytest.raises(NotImplementedError, match="no such thing"):
            y.backward()
    finally:
        OPERATORS[func] = there


def test_memory_summary_says_what_holds_it():
    webgpu.synchronize()
    x = torch.empty(1 << 20, device=DEVICE)
    there = webgpu.memory_summary()
    assert "4.0 MiB" in there
    del x
    assert there != webgpu.memory_summary()


# -------------------------------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_pointwise_over_views_and_broadcasts(dtype):
    torch.manual_seed(0)
    x, row, column = (torch.randn(s).to(dtype) for s in ((7, 65, 33), (33,), (7, 1, 1)))
    held(lambda x, row, column: [
        x * row + column, (x.transpose(0, 2) * 2).exp(), x[:, 1::2, 3:] - x[:, ::2, :-3][:, :32], torch.where(x > 0, x, row),
        x.clamp(-1, 1) / (row.abs() + 1), x.masked_fill(x > column, -2.5), F.gelu(x), F.silu(x), x.pow(3), x.float() + row,
    ], x, row, column)  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_writing_through_views(dtype):
    def writes(x, new):
        cache = x.clone()
        cache[:, 3:4] = new
        cache[2, :, 5] = 1
        cache[..., 1::2].mul_(2).add_(cache[..., ::2][..., :16])
        cache[:, torch.tensor([1, 7], device=x.device)] = 0
        cache.view(-1)[5:8].zero_()
        cache[0].t().sub_(cache[1].t(), alpha=0.5)
        cache[3].mul_(cache[3])
        return cache

    torch.manual_seed(0)
    held(writes, torch.randn(7, 30, 33).to(dtype), torch.randn(7, 1, 33).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reductions_of_long_and_of_many_rows(dtype):
    torch.manual_seed(0)
    for shape in ((3, 70001), (5000, 7), (4, 300, 33)):
        held(lambda x: [
            x.sum(), x.sum(0), x.mean(-1, keepdim=True), x.amax(-1), x.amin(0), x.argmax(-1), x.argmin(0), x.var(-1),
            x.norm(), x.max(-1).values, (x > 2).any(-1), (x > -3).all(0),
        ], torch.randn(shape).to(dtype))  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products_of_any_size_and_strides(dtype):
    torch.manual_seed(0)
    for batch, m, k, n in ((1, 70, 33, 41), (3, 1, 130, 65), (5, 129, 600, 17)):
        a, b, bias = (torch.randn(s).to(dtype) for s in ((batch, m, k), (batch, k, n), (n,)))
        held(lambda a, b, bias: [
            a @ b, b.mT @ a.mT, a[0] @ b[0], F.linear(a, b[0].t(), bias), torch.addmm(bias, a[0], b[0], beta=0.5, alpha=2),
            a[:, ::2] @ b[:, :, 1:], a[0, 0] @ b[0],
        ], a, b, bias)  # fmt: skip


def test_elements_by_number():
    torch.manual_seed(0)
    x = torch.randn(7, 300, 33)
    i, j = torch.randint(0, 7, (4, 1)), torch.randint(-33, 33, (6,))
    held(lambda x, i, j: [x[i, :, j], x[:, :, j], x[x > 1], x.index_select(2, j.abs()), x[i]], x, i, j)
    places, new = torch.rand(7, 300, 33).argsort(1)[:, :20], torch.randn(7, 20, 33)
    held(
        lambda x, p, new: [x.gather(1, p), x.scatter(1, p, new), x.scatter_add(1, p % 9, new), x.scatter(1, p, 2.0)],
        x,
        places,
        new,
    )
    many, rows = torch.randint(0, 7, (100,)), torch.randn(100, 300, 33)
    held(
        lambda x, many, rows: [x.index_add(0, many, rows), x.clone().index_put_((many,), rows, accumulate=True)],
        x,
        many,
        rows,
    )
    ids = torch.randint(0, 300, (5, 9))
    held(lambda ids, w: F.embedding(ids, w), ids, torch.randn(300, 12))
    outside = torch.tensor([1, 300], device=DEVICE)
    assert torch.randn(300, 4, device=DEVICE)[outside][1].isnan().all()  # loud, and inside the memory


def test_order_and_running_sums():
    torch.manual_seed(0)
    x = torch.randn(5, 700)
    x[0, 3] = x[1, 5] = float("nan")
    x[2, :300] = 1.0  # equal ones keep their order
    ordered = [
        lambda x: x.topk(9),
        lambda x: x.sort(dim=-1, stable=True),
        lambda x: x.sort(dim=0, descending=True, stable=True),
    ]
    for order in ordered:
        (values, places), (wanted, wanted_places) = order(x.to(DEVICE)), order(x)
        assert torch.equal(values.cpu().nan_to_num(9e9), wanted.nan_to_num(9e9))
        assert order is ordered[0] or torch.equal(places.cpu(), wanted_places)
    held(lambda x: x.argmax(-1), x.nan_to_num(0))
    held(
        lambda x: [x.cumsum(-1), x.cumsum(0), x.tril(-3), x.triu(1), x.softmax(0), x.log_softmax(-1)],
        torch.randn(65, 700),
    )
    assert (
        torch.full((2, 3), -float("inf"), device=DEVICE).softmax(-1).isnan().all()
    )  # PyTorch's own: not the contract's


def test_random_numbers_are_philox():
    torch.manual_seed(5)
    found = torch.rand(1001, device=DEVICE).cpu()
    counters = torch.arange(251)
    words = torch.stack(
        philox((counters, torch.zeros_like(counters), torch.zeros_like(counters), torch.zeros_like(counters)), (5, 0)),
        1,
    )
    assert torch.equal(found, ((words.view(-1) >> 8) * 2.0**-24)[:1001].float())
    again = torch.rand(1001, device=DEVICE)
    assert not torch.equal(again.cpu(), found)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1001, device=DEVICE).cpu(), found)
    state = torch.webgpu.get_rng_state()
    one = torch.randn(100_000, device=DEVICE)
    torch.webgpu.set_rng_state(state)
    assert torch.equal(one.cpu(), torch.randn(100_000, device=DEVICE).cpu())
    assert abs(one.mean().item()) < 0.02
    assert abs(one.std().item() - 1) < 0.02
    a, b = (torch.randn(9, device=DEVICE, generator=torch.Generator().manual_seed(1)).cpu() for _ in range(2))
    assert torch.equal(a, b)
    assert torch.randint(5, 9, (1000,), device=DEVICE).cpu().unique().tolist() == [5, 6, 7, 8]
    for dtype in FLOATS:
        assert torch.rand(100_000, device=DEVICE, dtype=dtype).max().item() < 1
    drawn = torch.multinomial(torch.tensor([0.0, 1.0, 3.0], device=DEVICE), 10_000, replacement=True).cpu()
    assert abs((drawn == 2).float().mean().item() - 0.75) < 0.03
    assert not (drawn == 0).any()
    kept = F.dropout(torch.ones(100_000, device=DEVICE), 0.25).cpu()
    assert abs((kept > 0).float().mean().item() - 0.75) < 0.01


def test_the_loss_and_attention_of_pytorch():
    def loss(x, targets):
        x = x.clone().requires_grad_()
        value = F.cross_entropy(x, targets, label_smoothing=0.1)
        value.backward()
        return [value.detach(), x.grad]

    def attention(q, k, v):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, v)]

    torch.manual_seed(0)
    targets = torch.randint(0, 65, (300,))
    targets[:7] = -100
    held(loss, torch.randn(300, 65), targets)
    held(attention, *(torch.randn(2, 3, 130, 24) for _ in range(3)))


# ----------------------------------------------------------------------------------------------------- modules, training


def block():
    torch.manual_seed(0)
    first, last = nn.Linear(33, 24), nn.Linear(24, 33)
    return nn.Sequential(nn.LayerNorm(33), first, nn.GELU(), nn.LayerNorm(24), last)


def trained(module, x, optimizer, steps=4, **options):
    made = optimizer(module.parameters(), lr=0.05, **options)
    for _ in range(steps):
        made.zero_grad()
        (module(x) - x.flip(-1)).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        made.step()
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    ],
    ids=["SGD", "AdamW", "AdamW foreach", "AdamW fused", "SGD fused"],
)
def test_training_equals_the_cpu(optimizer, options):
    model = block()
    held(lambda x: trained(copy.deepcopy(model).to(x.device, x.dtype), x, optimizer, **options), torch.randn(65, 33))


def test_an_uploaded_parameter_trains():
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    (webgpu.array(weight) * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    there = nn.Parameter(webgpu.array(torch.ones(3)))
    (there * 3).sum().backward()
    torch.optim.SGD([there], lr=0.5).step()
    assert torch.equal(there.detach().cpu(), torch.full((3,), -0.5))


def test_data_gives_a_tensor_other_memory():
    x, y = torch.ones(4, device=DEVICE, requires_grad=True), torch.arange(6.0, device=DEVICE)
    x.data = y[1:4]
    assert x.shape == (3,)
    assert x.tolist() == [1.0, 2.0, 3.0]
    y.fill_(7)  # the same memory
    assert (x.data * 2).tolist() == [14.0] * 3
    assert x.requires_grad
    assert not x.data.requires_grad
    module = nn.Linear(2, 2, device=DEVICE)
    module.weight.data = module.weight.data.to(torch.float16)
    assert module.weight.detach().cpu().dtype == torch.float16
    with pytest.raises(TypeError, match="x is on webgpu and y on cpu"):
        x.data = torch.ones(3)


def test_a_module_moves_and_stays_the_same_module():
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    before, values = tied[0].weight, tied[0].weight.detach().clone()
    optimizer = torch.optim.SGD(tied.parameters(), lr=1.0)
    assert tied.to(DEVICE)[0].weight is tied[1].weight is before
    assert isinstance(before, nn.Parameter)
    assert before.device.type == DEVICE
    tied(torch.ones(2, 4, device=DEVICE)).sum().backward()
    optimizer.step()
    assert not torch.equal(before.detach().cpu(), values)
    assert nn.Linear(4, 5, device=DEVICE).weight.device.type == DEVICE


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
    ids=["plain", "fused", "sgd"],
)
def test_a_gradient_scaler_skips_steps_and_clips_as_on_the_cpu(kind, options):
    x, found = torch.randn(8, 17), []
    x[4] = torch.inf
    for device in ("cpu", DEVICE):
        w = torch.linspace(-1, 1, 17).to(device).requires_grad_()
        optimizer, scaler = (
            kind([w], lr=0.1, **options),
            torch.amp.GradScaler(device, init_scale=3e3, growth_interval=3),
        )
        for i, row in enumerate(x.to(device)):
            optimizer.zero_grad()
            scaler.scale((w * row).sum()).backward()
            if i % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([w], 1.0)
            scaler.step(optimizer)
            scaler.update()
        found.append((w.detach().cpu(), scaler.get_scale()))
    assert found[0][1] == found[1][1] == 6e3
    torch.testing.assert_close(found[1][0], found[0][0])


def test_float64_is_cast_and_inverted_to_the_bit():
    torch.manual_seed(0)
    bits = torch.randint(-(1 << 63), (1 << 63) - 1, (20000,))
    near_one = (bits & ((1 << 53) - 1)) | (1022 << 52)
    near_float32 = (bits >> 3 & ((1 << 60) - 1)) % (280 << 52) + (870 << 52)  # its range, and below it
    edges = torch.tensor(
        [0.0, -0.0, 1.0, -2.0, 3.0, 2.0**1023, 1.9 * 2.0**1022, -(2.0**-1074), 2.0**-1023, torch.inf, torch.nan],
        dtype=torch.float64,
    )  # fmt: skip
    wide = torch.cat([*(x.view(torch.float64) for x in (bits, near_one, near_float32)), edges])
    for function in (torch.reciprocal, torch.Tensor.float):
        torch.testing.assert_close(function(wide.to(DEVICE)).cpu(), function(wide), rtol=0, atol=0, equal_nan=True)
    narrow = torch.randint(-(1 << 31), (1 << 31) - 1, (20000,), dtype=torch.int32).view(torch.float32)
    narrow = torch.cat([narrow, narrow * 1e-38, edges.float()])
    torch.testing.assert_close(narrow.to(DEVICE).double().cpu(), narrow.double(), rtol=0, atol=0, equal_nan=True)
    turned = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(turned.to(DEVICE).double().cpu(), turned.double())


def test_state_is_saved_and_loaded_both_ways():
    model = block().to(DEVICE)
    plain = block()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    plain.load_state_dict(model.state_dict())
    assert all(
        torch.equal(a, b.cpu()) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
    )
    model.load_state_dict(block().state_dict())
    assert torch.equal(model[1].weight.detach().cpu(), block()[1].weight)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "steps": 3}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["model"]["1.weight"].device.type == DEVICE
    assert torch.equal(loaded["model"]["1.weight"].cpu(), block()[1].weight.detach())
    twin = copy.deepcopy(model)
    assert isinstance(twin[1].weight, nn.Parameter)
    assert twin[1].weight is not model[1].weight
    other = pickle.loads(pickle.dumps(model))
    assert isinstance(other[1].weight, nn.Parameter)
    assert torch.equal(other[1].weight.detach().cpu(), twin[1].weight.detach().cpu())
    model.cpu()
    assert model[1].weight.device.type == "cpu"


def test_autocast_and_checkpoints():
    model, x = block().to(DEVICE), torch.randn(65, 33, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = model(x)
        assert y.dtype == torch.bfloat16
        assert y.softmax(-1).dtype == torch.float32
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    (again,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum(), x)
    assert torch.equal(plain.cpu(), again.cpu())


def test_autocast_reaches_our_ops_as_pytorchs():
    """Queries that a norm left in float32 meet keys and values of 16 bits; the bits are those of the call on the casts."""
    q, k, v = torch.randn(3, 1, 2, 9, 8).to(DEVICE)
    low = [x.to(torch.bfloat16) for x in (q, k, v)]
    q.requires_grad_()
    for _ in range(2):  # made, and found by its key
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = hw.attention(hw.rms_norm(q.to(torch.bfloat16)), low[1], v)
            assert (q @ k.mT).dtype == out.dtype == torch.bfloat16
            assert hw.rms_norm(low[0]).dtype == torch.float32
            with torch.autocast(DEVICE, enabled=False):
                assert hw.attention(q, k, v).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert hw.attention(q, k, v).dtype == torch.float32
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert grad.dtype == torch.float32
    again = hw.attention(hw.rms_norm(low[0].float()).to(torch.bfloat16), *low[1:])
    assert torch.equal(out.detach().cpu(), again.cpu())


def test_headwise_ops_and_modules_run_there():
    """Our own kernels beside PyTorch's operators, in one graph."""

    def step(x, weight):
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        q = hw.rms_norm(x, weight).view(2, 37, 4, 16).transpose(1, 2)
        y = hw.attention(q, q * 2, q, causal=True).transpose(1, 2).reshape(2, 37, 64)
        (y * y).sum().backward()
        return [y.detach(), x.grad, weight.grad]

    torch.manual_seed(0)
    held(step, torch.randn(2, 37, 64), torch.randn(64))


def test_beside_another_accelerator_nothing_is_registered():
    """A registered device would be the accelerator of the process, and backward passes on CUDA would fail."""
    program = """
import torch
torch.cuda.is_available = lambda: True
import headwise as hw
from headwise import webgpu
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
weight = torch.nn.Parameter(torch.randn(5, 8))
x = webgpu.array(weight)
a, b, c = (hw.softmax(x) * 2).split(3, -1)
((a.cpu() ** 2).sum() + c.to("cpu").sum()).backward()
found, weight.grad = weight.grad, None
a, b, c = (torch.softmax(weight, -1) * 2).split(3, -1)
((a ** 2).sum() + c.sum()).backward()
torch.testing.assert_close(found, weight.grad)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


_PRETENDED = "import torch; torch.backends.mps.is_available = lambda: True"
_REGISTERED = """
import headwise.webgpu
model = torch.nn.Linear(8, 4).to("webgpu")
x = torch.randn(5, 8)
model(x.to("webgpu")).square().sum().backward()
found = model.weight.grad.cpu()
model.cpu().zero_grad()
model(x).square().sum().backward()
torch.testing.assert_close(found, model.weight.grad)
"""
_NOT_REGISTERED = """
import headwise.webgpu
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
"""


@pytest.mark.parametrize(
    ("asked", "before", "program"),
    [
        ("1", _PRETENDED, _REGISTERED),
        ("", f"{_PRETENDED}; from headwise.config import settings; settings.webgpu_device = True", _REGISTERED),
        ("", _PRETENDED, _NOT_REGISTERED),
        ("0", "import torch", _NOT_REGISTERED),
    ],
)
def test_a_setting_says_whether_the_device_is_registered(asked, before, program):
    environment = os.environ | {"HEADWISE_WEBGPU_DEVICE": asked}
    subprocess.run([sys.executable, "-c", before + program], check=True, timeout=120, env=environment)

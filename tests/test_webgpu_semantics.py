"""Attention on WebGPU at the ends of float32 and of a grid: NaN under a cap, biases of the lowest float, scales of any size,
tiles that no adapter here would choose, many workgroups."""

from __future__ import annotations

import pytest
import torch
from attention_calls import maker

import headwise as hw
from headwise import reference
from headwise.backends.webgpu import adapter, runtime, tiles
from headwise.config import settings

CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}


@pytest.fixture(params=[1, 2])
def small_grids(monkeypatch, request):
    """One dimension of a grid holds this few workgroups; no call replays a record for other grids."""
    monkeypatch.setattr(adapter, "MOST_GROUPS", request.param)
    settings.changed()
    yield
    settings.changed()


# ------------------------------------------------------------------------------------------------- NaN under a cap


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("bad", ["q", "k"])
def test_nan_under_a_cap_is_seen_by_a_decoded_token(bad, tokens, dtype):
    m = maker("webgpu", dtype)
    x = {"q": m.normal(2, 4, tokens, 16), "k": m.normal(2, 2, 70, 16), "v": m.normal(2, 2, 70, 16)}
    lengths = torch.tensor([70, 50], dtype=torch.int32)
    if bad == "q":
        x["q"][1, 2, 0, 5] = torch.nan
        struck = torch.zeros(2, 4, tokens, dtype=torch.bool)
        struck[1, 2, 0] = True
    else:
        x["k"][0, 1, 33, 5] = torch.nan  # seen by both query heads of its key head
        x["k"][1, 1, 60, 5] = torch.nan  # past the length: seen by none
        struck = torch.zeros(2, 4, tokens, dtype=torch.bool)
        struck[0, 2:] = True
    out, lse = hw.attention_decode(**_cache(x), lengths=lengths, softcap=2.0, return_lse=True, backend="webgpu")
    assert torch.equal(lse.isnan(), struck)
    assert torch.equal(out.isnan(), struck[..., None].expand_as(out))


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3, 1e30])
def test_cap_of_decode_is_that_of_attention(size):
    m = maker("webgpu")
    x = {"q": m.normal(2, 4, 1, 16) * size, "k": m.normal(2, 2, 70, 16), "v": m.normal(2, 2, 70, 16)}
    lengths = torch.full((2,), 70, dtype=torch.int32)
    out, lse = hw.attention_decode(**_cache(x), lengths=lengths, softcap=2.0, return_lse=True, backend="webgpu")
    double = {n: t.double() for n, t in x.items()}
    expected, expected_lse = reference.attention(**double, softcap=2.0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def _cache(x):
    return {"q": x["q"], "k_cache": x["k"], "v_cache": x["v"]}


# ------------------------------------------------------------------------------------------ biases of the lowest float


def lowest_biases(m, queries, keys):
    """Rows of the lowest float, some of it and half of it, only of half of it, with -inf, with ordinary numbers."""
    lowest = torch.finfo(m.dtype).min
    bias = torch.full((1, 1, queries, keys), lowest, dtype=m.dtype)
    bias[:, :, 1::6, 1:3] = lowest / 2
    bias[:, :, 2::6] = lowest / 2
    bias[:, :, 3::6, ::2] = -torch.inf
    bias[:, :, 4::6, ::2] = m.normal(1, 1, bias[:, :, 4::6, ::2].shape[2], (keys + 1) // 2)
    bias[:, :, 5::6] = -torch.inf
    return bias


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("keys", [3, 90, 600])
@pytest.mark.parametrize("flags", [{}, {"sink": True}, {"softcap": 2.0, "causal": True}], ids=["plain", "sink", "cap"])
def test_lowest_float_as_bias(flags, keys, dtype):
    m = maker("webgpu", dtype)
    q, k, v = m.normal(1, 2, 12, 16), m.normal(1, 2, keys, 16), m.normal(1, 2, keys, 16)
    bias = lowest_biases(m, 12, keys)
    flags = {**flags, "sink": torch.tensor([0.5, -torch.inf])} if "sink" in flags else flags
    double = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in flags.items()}
    expected, _ = reference.attention(q.double(), k.double(), v.double(), bias=bias.double(), **double)
    expected_probs = reference.attention_probs(q.double(), k.double(), bias=bias.double(), **double)
    out = hw.attention(q, k, v, bias=bias, **flags, backend="webgpu")
    probs = hw.attention_probs(q, k, bias=bias, **flags, backend="webgpu")
    torch.testing.assert_close(out.double(), expected, **CLOSE[dtype])
    torch.testing.assert_close(probs.double(), expected_probs, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_lowest_float_beside_half_of_it(dtype):
    m = maker("webgpu", dtype)
    q, k = m.normal(1, 1, 1, 8), m.normal(1, 1, 3, 8)
    v = torch.eye(3, dtype=dtype)[None, None]
    lowest = torch.finfo(dtype).min
    bias = torch.tensor([lowest, lowest / 2, lowest / 2], dtype=dtype).view(1, 1, 1, 3)
    expected = torch.tensor([0, 0.5, 0.5], dtype=dtype).view(1, 1, 1, 3)
    assert torch.equal(hw.attention(q, k, v, bias=bias, backend="webgpu"), expected)
    assert torch.equal(hw.attention_probs(q, k, bias=bias, backend="webgpu"), expected)


@pytest.mark.parametrize("size", [1e9, 3e10, 7e20, 1.1e35, 1e38, 2e38])
def test_bias_of_any_size_on_a_whole_row(size):
    """Times log2(e) such a bias is rounded by more than any power of two there is."""
    m = maker("webgpu")
    x = {"q": m.normal(1, 2, 20, 16), "k": m.normal(1, 2, 90, 16), "v": m.normal(1, 2, 90, 16)}
    bias = torch.full((1, 1, 20, 90), -size)
    # In float32 nothing is left of the logits before the bias, from the second size on.
    plain = {**x, "q": torch.zeros_like(x["q"])}
    expected = x["v"].mean(2, keepdim=True).expand(1, 2, 20, 16)
    out, lse = hw.attention(**plain, bias=bias, return_lse=True, backend="webgpu")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, -size), rtol=1e-6, atol=0)
    probs = hw.attention_probs(plain["q"], x["k"], bias=bias, backend="webgpu")
    torch.testing.assert_close(probs, torch.full_like(probs, 1 / 90), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_gradients_under_lowest_biases_are_numbers(dtype):
    """Rows whose biases are ordinary where they count have the gradients of the oracle; no other row spoils them."""
    m = maker("webgpu", dtype)
    q, k, v = (m.normal(1, 2, n, 16).requires_grad_() for n in (12, 90, 90))
    bias = lowest_biases(m, 12, 90).requires_grad_()
    ordinary = torch.zeros(12, dtype=torch.bool)
    ordinary[4::6] = True
    out = hw.attention(q, k, v, bias=bias, backend="webgpu")
    for found in torch.autograd.grad(out.sum() + out[:, :, ordinary].square().sum(), [q, k, v, bias]):
        assert found.isfinite().all()
    grad = m.normal(*out.shape) * ordinary[:, None]
    out = hw.attention(q, k, v, bias=bias, backend="webgpu")
    found = torch.autograd.grad(out, [q, k, v, bias], grad)
    double = [t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    expected = torch.autograd.grad(reference.attention(*double[:3], bias=double[3])[0], double, grad.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, **CLOSE[dtype])
    probs = hw.attention_probs(q, k, bias=bias, backend="webgpu")
    found = torch.autograd.grad(probs, [q, k, bias], m.normal(*probs.shape))
    assert all(t.isfinite().all() for t in found)


# ------------------------------------------------------------------------------------------- grids of two dimensions


@pytest.mark.parametrize(("batch", "heads"), [(130, 2), (1, 130)])
def test_lengths_and_sinks_beyond_one_dimension_of_a_grid(small_grids, batch, heads):
    m = maker("webgpu")
    x = {"q": m.normal(batch, heads, 3, 8), "k": m.normal(batch, heads, 5, 8), "v": m.normal(batch, heads, 5, 8)}
    x["sink"] = m.normal(heads)
    lengths = m.integers(0, 6, batch)
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    double = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    grad = m.normal(batch, heads, 3, 8)
    out = hw.attention(**leaves, kv_lengths=lengths, backend="webgpu")
    expected, _ = reference.attention(**double, kv_lengths=lengths)
    torch.testing.assert_close(out.detach().double(), expected.detach(), **CLOSE[torch.float32])
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    for one, other in zip(found, torch.autograd.grad(expected, list(double.values()), grad.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------- scales of any size, and tiles


@pytest.mark.parametrize("flags", [{}, {"causal": True}, {"window": (9, 4)}], ids=str)
@pytest.mark.parametrize("scale", [1e-37, 1e-29, 1e-6, 0.3, 4.0, 1e6, 1e29])
def test_scales_of_any_size(scale, flags):
    """Some rows see nothing; those that do have weights from products and the scale alone."""
    m = maker("webgpu")
    size = max(1.0, scale) ** 0.5  # logits of the size of the root of the scale, at most
    x = {"q": m.normal(1, 2, 70, 16) / size, "k": m.normal(1, 2, 50, 16) / size, "v": m.normal(1, 2, 50, 16)}
    out, lse = hw.attention(**x, **flags, scale=scale, return_lse=True, backend="webgpu")
    expected, expected_lse = reference.attention(**{n: t.double() for n, t in x.items()}, **flags, scale=scale)
    torch.testing.assert_close(out.double(), expected, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("size", "scale"), [(1.7e19, 1e-3), (1.5e19, 1e-3), (1.2e19, 1.0), (1.7e19, 1e-10)], ids=str)
def test_products_at_the_end_of_float32_are_seen(size, scale):
    """One as low as they come is no hidden key."""
    q, k, v = torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 3, 16), maker("webgpu").normal(1, 1, 3, 16)
    q[..., 0], k[..., 0] = size, -size
    out, lse = hw.attention(q, k, v, scale=scale, return_lse=True, backend="webgpu")
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand(-1, -1, 2, -1), rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(lse, torch.full((1, 1, 2), -size * size * scale), rtol=1e-6, atol=0.0)


FLAGS = {
    "plain": {}, "causal": {"causal": True}, "window": {"window": (100, 30)}, "cap": {"softcap": 2.0},
    "mask": {"mask": True}, "bias": {"bias": True}, "sink": {"sink": True}, "lengths": {"kv_lengths": True},
}  # fmt: skip


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_lanes_that_lie_apart_compute_the_same(flags):
    """As NVIDIA's tiles have them: chunks of ten keys, a tile that its threads fill in two turns, sums cut into chains."""
    m = maker("webgpu")
    keys = 600
    x = {"q": m.normal(1, 2, 70, 36), "k": m.normal(1, 1, keys, 36), "v": m.normal(1, 1, keys, 28)}
    given = {
        "mask": torch.rand(1, 1, 70, keys) < 0.7, "bias": m.normal(1, 2, 70, keys), "sink": m.normal(2),
        "kv_lengths": torch.tensor([555], dtype=torch.int32),
    }  # fmt: skip
    flags = {name: given.get(name, value) for name, value in flags.items()}
    results = []
    for apart in (1, 2):
        # Ten do not go into the vectors of four that threads exchange without subgroups.
        subgroups = runtime.device().capabilities.tier >= "C"
        tile = tiles.ForwardTile(4, 4, 32, 40 if subgroups else 8, 10 if subgroups else 4, apart)
        with tiles.forced("attention_forward", tile):
            results.append(hw.attention(**x, **flags, return_lse=True, backend="webgpu"))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    double = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in flags.items()}
    expected, _ = reference.attention(**{n: t.double() for n, t in x.items()}, **double)
    torch.testing.assert_close(results[0][0].double(), expected, rtol=3e-6, atol=3e-6)


# ---------------------------------------------------------------------------------------------- rows that see nothing


@pytest.mark.parametrize("tier", ["A", "C"])
@pytest.mark.parametrize("by", ["mask", "bias"])
def test_a_row_that_sees_nothing_but_a_sink_keeps_nan_to_itself(monkeypatch, by, tier):
    """Its lse is the sink's, so lse does not tell it apart. Its q and gradient reach nobody, and the NaN of keys that its
    neighbours see does not reach it; only a gradient of lse does, and goes to the sink."""
    device = runtime.device()
    if tier > device.capabilities.tier:
        pytest.skip(f"the adapter is of tier {device.capabilities.tier}")
    if tier == "A":
        floor = {"tier": "A", "subgroup_size": 0, "workgroup_memory": 16384, "workgroup_threads": 256}
        monkeypatch.setattr(device, "capabilities", device.capabilities._replace(**floor))
    settings.changed()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, length, 24) for length in (40, 50, 50, 40))
    visible = torch.rand(1, 1, 40, 50) < 0.7
    empty = torch.zeros(40, dtype=torch.bool)
    empty[[0, 5, 6, 39]] = True
    visible[:, :, empty] = False
    q[:, :, empty], grad[:, :, empty] = torch.nan, torch.nan
    given = {"mask": visible} if by == "mask" else {"bias": torch.where(visible, 0.0, -torch.inf)}
    grad_lse, sink = torch.randn(1, 2, 40), torch.tensor([0.5, -1.0])

    def run(k, backend, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v, sink)]
        arguments = {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}
        out, lse = hw.attention(*leaves[:3], sink=leaves[3], **arguments, return_lse=True, backend=backend)
        return out, lse, *torch.autograd.grad([out, lse], leaves, [grad.to(dtype), grad_lse.to(dtype)])

    for ours, expected in zip(run(k, "webgpu", torch.float32), run(k, "cpu", torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    k[0, :, 20] = torch.nan  # some rows see it
    out, lse, dq, *_ = run(k, "webgpu", torch.float32)
    assert not out[:, :, empty].any()
    assert not dq[:, :, empty].any()
    assert torch.equal(lse[:, :, empty], sink[None, :, None].expand(1, 2, 4))
    assert dq.isnan().any()
    monkeypatch.undo()
    settings.changed()

"""float32 as three bfloat16: nothing is lost in the splitting, and attention that multiplies so is float32's equal.

The kernels run in Triton's interpreter, with tiles that ask for it; tests/gpu and `headwise check` run them on a GPU.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

import direct_attention as direct
import pytest
import torch
from attention_calls import ints, maker, ours, packed_call, theirs

import headwise as hw
from headwise.backends.triton import attention_backward, attention_forward, tile_sizes
from headwise.backends.triton.bf16x3 import pitch, split, tile_precision
from headwise.backends.triton.gpu import Interpreter
from headwise.backends.triton.tile_sizes import AttentionTile
from headwise.config import settings

in_the_interpreter = pytest.mark.skipif(
    not settings.triton_interpret, reason="for Triton's interpreter (TRITON_INTERPRET=1)"
)
KERNELS = ("attention_forward", "attention_backward_queries", "attention_backward_keys")
SPECIAL = (0.0, math.inf, -math.inf, math.nan, 3.4028234663852886e38, -3.4e38, 1.1754943508222875e-38, 1 / 3, -1e-30)


@pytest.fixture
def splits(monkeypatch):
    """Every kernel asks for bf16x3; the list grows with the tensors that are split."""
    shapes = []

    def counted(gpu, x):
        shapes.append(x.shape)
        return split(gpu, x)

    for module in (attention_forward, attention_backward):
        monkeypatch.setattr(module, "split", counted)
    with ExitStack() as stack:
        for kernel in KERNELS:
            stack.enter_context(tile_sizes.forced(kernel, AttentionTile(32, 32, 4, 2, bf16x3=True)))
        yield shapes


@in_the_interpreter
@pytest.mark.parametrize("dim", [1, 16, 40])
def test_three_bfloat16_hold_every_float32(dim):
    x = (
        torch.randn(2, 5, 3, dim, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-25, 25, 5)[:, None, None]
    )
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    x = x.transpose(1, 2)
    three = split(Interpreter(False), x)
    assert three.is_contiguous()
    high, middle, low = three.float().unflatten(3, (3, pitch(dim)))[..., :dim].unbind(3)
    assert torch.equal((low + middle + high).nan_to_num(7.0), x.nan_to_num(7.0))
    finite = x.isfinite()
    assert high[finite].isfinite().all()
    assert (middle[finite].abs() <= high[finite].abs() * 2**-7).all()
    assert (low[finite].abs() <= high[finite].abs() * 2**-15).all()


CALLS = {
    "causal": (32, 32, {"causal": True}),
    "window and cap": (20, 37, {"window": (9, 4), "softcap": 3.0}),
    "large logits": (16, 16, {"scale": 4.0}),
}


@in_the_interpreter
@pytest.mark.parametrize("call", CALLS)
def test_attention_is_within_the_budget(call, splits):
    D, Dv, flags = CALLS[call]
    m = maker("triton")
    x = {"q": m.normal(1, 4, 70, D), "k": m.normal(1, 2, 50, D), "v": m.normal(1, 2, 50, Dv)}
    direct.assert_within_budget(ours("triton", **flags), theirs(**flags), x)
    assert len(splits) >= 3 + 3 + 4  # forward twice, backward once


@in_the_interpreter
def test_packed_attention_is_within_the_budget(splits):
    m, bounds = maker("triton"), [0, 33, 33, 90]
    x = {n: m.normal(97, heads, 24) for n, heads in (("q", 2), ("k", 1), ("v", 1))}
    direct.assert_within_budget(
        packed_call("triton", bounds, bounds, causal=True),
        lambda q, k, v: direct.varlen(q, k, v, bounds, bounds, causal=True),
        x,
    )
    assert splits


@in_the_interpreter
def test_what_is_hidden_may_hold_anything(splits):
    m = maker("triton")
    q, k, v = m.normal(1, 2, 40, 16), m.normal(1, 2, 40, 16), m.normal(1, 2, 40, 16)
    mask = m.coin(40, 40)
    mask[:, 7] = False
    results = []
    for hidden in (0.0, math.nan, math.inf, 3e38):
        for x in (k, v):
            x[:, :, 7] = hidden
            x[:, :, 30:] = hidden
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = hw.attention(*leaves, mask=mask, kv_lengths=ints("triton", 30), backend="triton")
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
    assert splits


@in_the_interpreter
def test_infinite_values_stay_infinite(splits):
    """Infinity times one of the three numbers of a weight, which may be zero or of the other sign, must not be NaN."""
    m = maker("triton")
    q, k, v = m.normal(1, 1, 40, 16), m.normal(1, 1, 50, 16), m.normal(1, 1, 50, 16)
    v[0, 0, 3, 2], v[0, 0, 44, 5], v[0, 0, 4, 6], v[0, 0, 5, 7] = math.inf, -math.inf, math.nan, 3.4e38
    out = hw.attention(q, k, v, backend="triton")
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out[out.isinf()], expected[expected.isinf()].float())
    k[0, 0, 9] = math.inf  # scores of infinity, of either sign
    _, lse = hw.attention(q, k, v, return_lse=True, backend="triton")
    scores = q.double() @ k.double().transpose(2, 3)
    assert torch.equal(lse.isnan(), scores.logsumexp(-1).isfinite().logical_not())
    assert splits


EXPANDED = {
    "over the batch": lambda x: x[:1].expand(3, -1, -1, -1),
    "over the heads": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "over both": lambda x: x[:1, :1].expand(3, 4, -1, -1),
    "over the batch, heads inside": lambda x: x[:1].transpose(1, 2).contiguous().transpose(1, 2).expand(3, -1, -1, -1),
    "over the heads, heads inside": lambda x: (
        x[:, :1].transpose(1, 2).contiguous().transpose(1, 2).expand(-1, 4, -1, -1)
    ),
}


@in_the_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("which", EXPANDED)
def test_what_is_expanded_is_split_once(which, splits):
    m = maker("triton")
    q, grad = m.normal(3, 4, 40, 20), m.normal(3, 4, 40, 24)
    k, v = EXPANDED[which](m.normal(3, 4, 37, 20)), EXPANDED[which](m.normal(3, 4, 37, 24))
    gpu = Interpreter(False)
    for x in (k, v):
        three, (dim, step) = split(gpu, x), (x.shape[3], pitch(x.shape[3]))
        assert three.shape == (3, 4, 37, 3 * step)
        # Between the three numbers of a row there is room that nobody writes.
        one, other = (s.unflatten(3, (3, step))[..., :dim] for s in (three, split(gpu, x.contiguous())))
        assert torch.equal(one, other)
        batch, heads = (1 if x.stride(i) == 0 else x.shape[i] for i in (0, 1))
        assert three.untyped_storage().nbytes() == batch * heads * 37 * 3 * step * 2

    def results(k, v, grad):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = hw.attention(*leaves, causal=True, return_lse=True, backend="triton")
        return out, lse, *torch.autograd.grad(out, leaves, grad)

    one_grad = grad[:1].expand(3, -1, -1, -1)
    for of_grad in (grad, one_grad):
        expanded, written_out = results(k, v, of_grad), results(k.contiguous(), v.contiguous(), of_grad.contiguous())
        for a, b in zip(expanded, written_out, strict=True):
            assert torch.equal(a, b)
    assert splits


def test_it_is_for_true_float32_alone():
    three, one = AttentionTile(64, 64, 4, 2, bf16x3=True), AttentionTile(64, 64, 4, 2)
    assert tile_precision("tf32x3", torch.float32, three) == "bf16x3"
    assert tile_precision("tf32x3", torch.float32, three, one) == "tf32x3"
    assert tile_precision("tf32", torch.float32, three) == "tf32"  # switched on by the user
    assert tile_precision("ieee", torch.float32, three) == "ieee"  # AMD, and gradients of very wide heads
    assert tile_precision("ieee", torch.bfloat16, three) == "ieee"


def test_both_kernels_of_backward_agree_on_it():
    for path in tile_sizes.TABLES.glob("*.json"):
        rows = tile_sizes._read(path)["tiles"]
        queries, keys = rows["attention_backward_queries"], rows["attention_backward_keys"]
        for name in queries.keys() & keys.keys():
            assert queries[name].get("bf16x3") == keys[name].get("bf16x3"), (path.name, name)

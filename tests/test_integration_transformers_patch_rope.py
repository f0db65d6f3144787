"""patch and explain: functions that rotate by angles, and tables of embeddings."""

from __future__ import annotations

import copy
import functools
import sys

import pytest
import torch
from test_integration_transformers_patch import calls  # noqa: F401  (a fixture)
from torch import nn

import headwise.integrations.transformers as adapter
from headwise.integrations import _patch_rope


def halves(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return turned(q), turned(k)


def once(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (torch.cat((x, x), -1) for x in (cos, sin))
    return halves(q, k, cos, sin, unsqueeze_dim)


def pairs(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin

    return turned(q), turned(k)


def wrong_way(q, k, cos, sin, unsqueeze_dim=1):
    return halves(q, k, cos, -sin, unsqueeze_dim)


def only_q(q, k, cos, sin, unsqueeze_dim=1):
    return halves(q, k, cos, sin, unsqueeze_dim)[0], k


LAYOUTS = {
    halves: lambda x: torch.cat((x, x), -1), once: lambda x: x, pairs: lambda x: x.repeat_interleave(2, -1),
    wrong_way: None, only_q: None,
}  # fmt: skip
apply_rope = None


class Rotates(nn.Module):
    def forward(self, q, k, cos, sin, **options):
        return apply_rope(q, k, cos, sin, **options)


@pytest.mark.parametrize("function", LAYOUTS, ids=lambda function: function.__name__)
def test_which_rope(function, monkeypatch, calls):  # noqa: F811
    monkeypatch.setattr(sys.modules[__name__], "apply_rope", function)
    module = Rotates()
    (row,) = adapter.patch(module)
    assert row.what == "rope"
    if LAYOUTS[function] is None:
        assert not row.swapped
        assert "apply_rope does not compute rope" in row.reason
        return
    assert row.swapped
    generator = torch.Generator().manual_seed(0)
    for batch, heads_at, dtype in ((1, 1, torch.float64), (2, 1, torch.float64), (2, 2, torch.float64), (2, 1, None)):
        angles = torch.randn(batch, 6, 4, generator=generator, dtype=dtype)
        cos, sin = LAYOUTS[function](angles.cos()), LAYOUTS[function](angles.sin())
        shape = (lambda heads: (2, heads, 6, 8)) if heads_at == 1 else (lambda heads: (2, 6, heads, 8))
        q, k = (torch.randn(shape(h), generator=generator, dtype=dtype).requires_grad_() for h in (4, 2))
        calls.clear()
        results = module(q, k, cos, sin, unsqueeze_dim=heads_at)
        assert calls == {"rope": 1}
        expected = function(q, k, cos, sin, heads_at)
        torch.testing.assert_close(results, expected)
        upstream = [torch.randn(y.shape, generator=generator, dtype=dtype) for y in expected]
        mine, theirs = (torch.autograd.grad(y, (q, k), upstream) for y in (results, expected))
        torch.testing.assert_close(mine, theirs)
    # The tables are made once for all layers, and again for other angles, or when these have been written to.
    module(q, k, cos, sin)
    cos.mul_(0.5)
    torch.testing.assert_close(module(q, k, cos, sin)[0], function(q, k, cos, sin)[0])
    with torch.inference_mode():
        there = [x.clone() for x in (q, k, cos, sin)]
        torch.testing.assert_close(module(*there), function(*there))
    # They go with the angles that they were made of.
    module(q, k, cos, sin)
    assert _patch_rope._last
    del there, cos
    assert not _patch_rope._last
    cos = LAYOUTS[function](angles.cos())
    # 16-bit queries and wide angles give what the model's own code gives.
    assert module(q.bfloat16(), k.bfloat16(), cos, sin)[0].dtype == torch.float32
    # What it was not tried with goes to the model's own function.
    calls.clear()
    torch.testing.assert_close(
        module(q[..., :4, :], k, cos[:, :1], sin[:, :1])[1], function(q[..., :4, :], k, cos[:, :1], sin[:, :1])[1]
    )
    assert not calls


def decorated(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        self.times += 1
        return function(self, *args, **kwargs)

    return wrapper


def hidden(function):
    holder = [function]

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return holder[0](*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("wrap", [decorated, hidden])
def test_rope_in_a_decorated_forward(wrap, monkeypatch, calls):  # noqa: F811
    class Decorated(Rotates):
        times = 0
        forward = wrap(Rotates.forward)

    monkeypatch.setattr(sys.modules[__name__], "apply_rope", halves)
    module, angles = Decorated(), torch.randn(1, 6, 4)
    (row,) = adapter.patch(module)
    inputs = [torch.randn(2, heads, 6, 8) for heads in (4, 2)]
    inputs += [LAYOUTS[halves](x) for x in (angles.cos(), angles.sin())]
    calls.clear()
    torch.testing.assert_close(module(*inputs), halves(*inputs))
    assert row.swapped == bool(calls) == (wrap is decorated)
    assert module.times == (wrap is decorated)
    assert "decorated" in row.reason or row.swapped


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Embedding(7, 4, padding_idx=2), ""), (nn.Embedding(7, 4, max_norm=1.0), "max_norm"),
        (nn.Embedding(7, 4, sparse=True), "sparse"), (nn.Embedding(7, 4, scale_grad_by_freq=True), "scale_grad"),
    ],
)  # fmt: skip
def test_which_embeddings(module, reason, calls):  # noqa: F811
    (row,) = adapter.patch(module)
    assert (row.what, row.swapped) == ("embedding", not reason)
    assert reason in row.reason
    ids, plain = torch.tensor([[1, 2, 1], [6, 0, 2]]), copy.deepcopy(module)
    adapter.unpatch(plain)
    result, expected = module(ids), plain(ids)
    assert torch.equal(result, expected)
    assert calls["embedding"] == (not reason)
    for y in (result, expected):
        y.pow(2).sum().backward()
    torch.testing.assert_close(module.weight.grad.to_dense(), plain.weight.grad.to_dense())

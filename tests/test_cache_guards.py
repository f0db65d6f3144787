"""The guards before the cache key: they find a recent call again, and nothing that is not like it."""

from __future__ import annotations

import pytest
import torch
from test_cache_key import SURROUNDINGS, Mode, checked, qkv

import headwise as hw
from headwise.ops import _cache
from headwise.ops._cache import Cache
from headwise.ops.attention import dense

__all__ = ["checked"]  # a fixture


def recently_used(inputs):
    """A cache that finds these tensors by its guards: it was asked twice."""
    cache = Cache()
    _, key = cache.find((True,), inputs)
    cache[key] = "value"
    assert cache.find((True,), inputs)[0] == "value"
    assert len(cache._recent) == 1
    assert cache.find((True,), inputs)[0] == "value"
    assert len(cache._recent) == 1  # the guards themselves answered
    return cache


@pytest.mark.parametrize(
    "watching", [Mode, torch.profiler.profile, lambda: torch.device("meta"), torch.autograd.forward_ad.dual_level]
)
def test_guards_overlook_nobody_who_watches(watching):
    inputs = tuple(qkv())
    cache = recently_used(inputs)
    with watching():
        assert cache.find((True,), inputs) == (None, None)
    assert cache.find((True,), inputs)[0] == "value"


def test_guards_overlook_no_transform(checked):
    """grad and vmap see plain tensors from outside, too."""
    q, k, v = qkv()
    for _ in range(3):
        hw.attention(q, k, v)
    seen = []
    operator = dense._forward.through_operator
    dense._forward.through_operator = lambda *args: seen.append(1) or operator(*args)
    try:
        torch.func.vmap(lambda x: hw.attention(q, k, v) + x)(torch.zeros(2, 1))
    finally:
        del dense._forward.through_operator
    assert seen


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_guards_see_the_surroundings(name):
    inputs = tuple(qkv())
    cache = recently_used(inputs)
    change, back_again = SURROUNDINGS[name]
    with change():
        value, key = cache.find((True,), inputs)
        assert value is None
        assert key is not None
    assert (cache.find((True,), inputs)[0] == "value") == back_again


OTHER_TENSORS = {
    "dtype": lambda x: x.bfloat16(),
    "shape": lambda x: x[:, :, :4].contiguous(),
    "strides": lambda x: x.mT.contiguous().mT,
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "address": lambda x: torch.cat([x.flatten(), x.flatten()])[1 : 1 + x.numel()].view(x.shape),
    "negative": torch._neg_view,
    "zero": lambda x: torch._efficientzerotensor(x.shape),
    "conjugate": lambda x: torch._conj(torch.complex(x, x)),
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x[0].to_sparse_csr(),
    "opaque": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([*x]),
    "jagged": lambda x: torch.nested.as_nested_tensor([*x], layout=torch.jagged),
    "own type": lambda x: x.as_subclass(type("Own", (torch.Tensor,), {})),
    "meta": lambda x: x.to("meta"),
    "not given": lambda x: None,
}


@pytest.mark.filterwarnings("ignore")  # nested and compressed tensors are prototypes
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_guards_see_another_tensor(name, place):
    inputs = qkv()
    cache = recently_used(tuple(inputs))
    inputs[place] = OTHER_TENSORS[name](inputs[place])
    assert cache.find((True,), tuple(inputs))[0] is None


def test_guards_see_what_was_given_beside_the_tensors():
    inputs = tuple(qkv())
    cache = recently_used(inputs)
    assert cache.find((False,), inputs)[0] is None
    assert cache.find((True,), (*inputs, None))[0] is None


def test_guards_see_which_tensors_are_one():
    q, k, v = qkv()
    cache = recently_used((q, k, k))
    assert cache.find((True,), (q, k, v))[0] is None
    assert cache.find((True,), (q, q, k))[0] is None
    cache = recently_used((q, k, v))
    assert cache.find((True,), (q, k, k))[0] is None


def test_few_guards_are_kept():
    cache = Cache()
    kinds = [tuple(qkv(length)) for length in range(1, 30)]
    for _ in range(3):
        for n, inputs in enumerate(kinds):
            value, key = cache.find((), inputs)
            assert value in (None, n)
            if value is None:
                cache[key] = n
    assert 0 < len(cache._recent) <= 4
    assert len(cache) == 29
    cache.clear()
    assert cache.find((), kinds[-1])[0] is None


def test_more_kinds_in_turn_make_few_guards(monkeypatch):
    made = []
    guards = _cache.TensorGuards
    monkeypatch.setattr(_cache, "TensorGuards", lambda *given, **how: made.append(1) or guards(*given, **how))
    cache = Cache()
    kinds = [tuple(qkv(length)) for length in range(1, 10)]
    for _ in range(20):
        for n, inputs in enumerate(kinds):
            value, key = cache.find((), inputs)
            assert value in (None, n)
            if value is None:
                cache[key] = n
    assert len(made) < 20
    for _ in range(20):
        cache.find((), kinds[0])
    made.clear()
    cache.find((), kinds[0])
    assert not made  # a kind that stays has its guard

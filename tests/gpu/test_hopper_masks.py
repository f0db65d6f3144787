"""Masks and biases in the Hopper kernels on a Hopper GPU, within the error budget, with NaN where nobody looks.

HEADWISE_TEST_REPEATS: how often one call is repeated; 10000 unless it says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import torch
from gpu_machine import differing, gpu, normal  # noqa: F401  # gpu is a fixture
from hopper_sweep import hide_with_nan
from torch import Tensor

import headwise as hw
from headwise.backends.triton import hopper
from headwise.backends.triton.gpu import Gpu, facts
from headwise.cases import attention
from headwise.testing import Case, Maker, maker_of, measure

REPEATS = int(os.environ.get("HEADWISE_TEST_REPEATS", "10000"))


@pytest.fixture(autouse=True)
def on_hopper(gpu: None) -> None:  # noqa: F811
    reason = hopper.missing(Gpu(facts(torch.cuda.current_device()), tf32=False))
    if reason is not None:
        pytest.skip(reason)


def documents(queries: int, keys: int, length: int, device: Any) -> Tensor:
    q, k = (torch.arange(n, device=device) // length for n in (queries, keys))
    return q[:, None] == k[None, :]


def mask_of(kind: str, maker: Maker, b: int, h: int, sq: int, sk: int) -> Tensor:
    device = maker.device
    if kind == "random":
        return maker.coin(sq, sk, chance=0.5)
    if kind == "sparse, per head":  # rows that see nothing, blocks of which nothing is seen, keys that nobody sees
        mask = maker.coin(b, h, sq, sk, chance=0.02)
        mask[..., 130:400, :] &= torch.arange(sk, device=device) >= sk // 2
        mask[..., : sq // 7, :] = False
        mask[..., 300:333] = False
        return mask
    if kind == "padding":
        ends = maker.tensor([sk - 77, sk // 3], torch.int64).repeat(b)
        return torch.arange(sk, device=device) < ends[:b, None, None, None]
    if kind == "left padding":
        starts = maker.tensor([77, sk // 3], torch.int64).repeat(b)
        return torch.arange(sk, device=device) >= starts[:b, None, None, None]
    if kind == "queries":
        return maker.coin(b, 1, sq, 1, chance=0.7)
    if kind == "heads":
        return maker.coin(1, h, 1, 1, chance=0.5)
    if kind == "causal":
        return torch.ones(sq, sk, dtype=torch.bool, device=device).tril(sk - sq)
    if kind == "documents":
        return documents(sq, sk, 170, device)[None, None]
    assert kind == "causal in documents"
    mask = documents(sq, sk, 300, device) & torch.ones(sq, sk, dtype=torch.bool, device=device).tril(sk - sq)
    return mask.expand(b, 1, sq, sk)


KINDS = (
    "random", "sparse, per head", "padding", "left padding", "queries", "heads", "causal", "documents",
    "causal in documents",
)  # fmt: skip


def make(maker: Maker, *, kind: str = "", bias_dtype: torch.dtype | None = None, **params: Any) -> dict[str, Any]:
    """As the conformance cases, with NaN in keys that no query of the batch entry sees."""
    arguments = attention.make(maker, **params)
    if bias_dtype is not None:
        arguments["bias"] = arguments["bias"].to(bias_dtype)
    if not kind:
        return arguments
    arguments["mask"] = mask_of(kind, maker, *arguments["q"].shape[:3], arguments["k"].shape[2])
    hide_with_nan(arguments, maker.device)
    return arguments


FLAGS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (300, 40)},
    "softcap and sink": {"softcap": 15.0, "sink": True},
}
CALLS = [(kind, "full", 128) for kind in KINDS]
CALLS += [(kind, flags, 64) for kind in ("random", "sparse, per head", "padding", "queries") for flags in FLAGS]
CALLS += [("sparse, per head", "causal", dim) for dim in (80, 96, 192, 256)]
CALLS += [("documents", "full", dim) for dim in (80, 96, 192, 256)]
CALLS += [("sparse, per head", "window", 128), ("left padding", "causal", 128)]


@pytest.mark.parametrize(("kind", "flags", "dim"), CALLS)
@pytest.mark.parametrize("lengths", [(1000, 1133), (1240, 1030)], ids=str)
def test_within_the_budget(kind, flags, dim, lengths):
    assert_within_the_budget(lengths, d=dim, kind=kind, **FLAGS[flags])


# Shape of the bias where 0 stands for what the call has, head dim, dtype, flags, mask.
BIASES = {
    "per head": ((1, 0, 0, 0), 128, torch.bfloat16, "full", ""),
    "per head, causal": ((1, 0, 0, 0), 64, torch.bfloat16, "causal", ""),
    "per head, float32": ((1, 0, 0, 0), 128, torch.float32, "full", ""),
    "one for all, window": ((0, 0), 64, torch.float32, "window", ""),
    "of each batch entry": ((0, 1, 0, 0), 96, torch.bfloat16, "full", ""),
    "of keys": ((0, 1, 1, 0), 128, torch.bfloat16, "full", ""),
    "of keys, causal": ((0, 1, 0), 64, torch.float32, "causal", ""),
    "and a mask": ((1, 0, 0, 0), 128, torch.bfloat16, "full", "sparse, per head"),
    "and a causal mask": ((1, 0, 0, 0), 64, torch.bfloat16, "causal", "documents"),
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("lengths", [(1000, 1136), (1104, 648)], ids=str)
def test_biases_within_the_budget(name, lengths):
    shape, dim, dtype, flags, kind = BIASES[name]
    full = (2, 8, *lengths)[-len(shape) :]
    bias = tuple(n or here for n, here in zip(shape, full, strict=True))
    assert_within_the_budget(lengths, d=dim, kind=kind, bias=bias, bias_dtype=dtype, **FLAGS[flags])


def assert_on_hopper(arguments):
    """Both directions."""
    x = {n: t.requires_grad_() if n in ("q", "k", "v") else t for n, t in arguments.items()}
    note = hw.explain("attention", x.pop("q"), x.pop("k"), x.pop("v"), **x).note
    assert note == "forward: the Hopper kernel; backward: the Hopper kernel", note


def assert_within_the_budget(lengths, **params):
    params = {"b": 2, "hq": 8, "hk": 4, "sq": lengths[0], "sk": lengths[1], **params}
    case = Case(str(params), params)
    suite = dataclasses.replace(attention.SUITE, cases=(case,), make=make)
    assert_on_hopper(make(maker_of(suite, case, torch.bfloat16, "cuda"), **params))
    errors = measure(suite, case, dtype=torch.bfloat16, device="cuda", backend="triton")
    bad = [str(e) for e in errors if not e.ok]
    assert not bad, bad


def test_these_calls_are_the_hopper_kernels():
    q, k, v = (normal(2, 8, 1000, 128, seed=s) for s in range(3))
    mask = documents(1000, 1000, 100, q.device)[None, None].expand(2, 1, 1000, 1000)
    for x in (q, k, v):
        x.requires_grad_()
    for given in ({"mask": mask}, {"bias": normal(8, 1000, 1000)}, {"mask": mask, "bias": normal(8, 1000, 1000)}):
        note = hw.explain("attention", q, k, v, **given).note
        assert note == "forward: the Hopper kernel; backward: the Hopper kernel"


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_queries_that_see_nothing_may_hold_nan(dim, biased, sink):
    if biased and dim > 128:
        pytest.skip("the Hopper kernels read a bias up to head dim 128")
    q, k, v, g = (normal(2, 8, 1504, dim, seed=s) for s in range(4))
    blind = torch.arange(1504, device=q.device) % 97 < 3
    seen = documents(1504, 1504, 400, q.device) & ~blind[:, None]
    given = {"bias": torch.where(seen, 0, -math.inf).to(q.dtype)} if biased else {"mask": seen}
    if sink:
        given["sink"] = normal(8, dtype=torch.float32)

    def run(inside):
        x, grad = (t.clone() for t in (q, g))
        x[:, :, blind] = grad[:, :, blind] = inside
        inputs = [t.clone().requires_grad_() for t in (x, k, v)]
        assert "backward: the Hopper kernel" in hw.explain("attention", *inputs, **given).note
        out = hw.attention(*inputs, **given)
        return (out.detach(), *torch.autograd.grad(out, inputs, grad))

    with_nan = run(math.nan)
    assert all(bool(t.isfinite().all()) for t in with_nan)
    assert int(differing(with_nan, run(0.0))) == 0


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_same_bits_every_time(dim, biased):
    if biased and dim > 128:
        pytest.skip("the Hopper kernels read a bias up to head dim 128")
    q, k, v, g = (normal(2, 8, 1504, dim, seed=s) for s in range(4))
    given = {"mask": documents(1504, 1504, 200, q.device) | (torch.arange(1504, device=q.device) % 5 == 0)}
    if biased:
        given["bias"] = normal(8, 1504, 1504, seed=9).requires_grad_()
    inputs = [x.requires_grad_() for x in (q, k, v)] + ([given["bias"]] if biased else [])

    def run():
        out = hw.attention(q, k, v, **given)
        return (out.detach(), *torch.autograd.grad(out, inputs, g))

    first = run()
    wrong = torch.zeros((), dtype=torch.int64, device=q.device)
    for _ in range(REPEATS // 10):
        wrong += differing(run(), first)
    assert int(wrong) == 0

"""Padded batches in the Hopper kernels on a Hopper GPU: within the error budget, NaN where nothing exists, the same bits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from gpu_machine import differing, gpu, normal  # noqa: F401  # gpu is a fixture

import headwise as hw
from headwise.backends.triton import hopper
from headwise.backends.triton.gpu import Gpu, facts
from headwise.cases import attention
from headwise.testing import Case, Maker, maker_of, measure

LENGTHS = {
    "right": {"q_lengths": (1000, 333, 0, 129), "kv_lengths": (1000, 333, 0, 129)},
    "left": {"kv_starts": (0, 667, 1000, 871)},
    "keys alone": {"kv_lengths": (1, 1000, 640, 333)},
    "all": {"q_lengths": (64, 1000, 129, 500), "kv_lengths": (100, 1000, 640, 333), "kv_starts": (33, 0, 300, 333)},
}
FLAGS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"window": (200, 30)},
    "softcap and sink": {"softcap": 15.0, "sink": True},
}


@pytest.fixture(autouse=True)
def on_hopper(gpu: None) -> None:  # noqa: F811
    reason = hopper.missing(Gpu(facts(torch.cuda.current_device()), tf32=False))
    if reason is not None:
        pytest.skip(reason)


def make(maker: Maker, *, kind: str, **params: Any) -> dict[str, Any]:
    """As the conformance cases, heads inside, with NaN past every length."""
    arguments = attention.make(maker, **params)
    for name in ("q", "k", "v"):
        arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    for name, values in LENGTHS[kind].items():
        arguments[name] = maker.tensor(list(values), torch.int64)
        for x in ("q",) if name == "q_lengths" else ("k", "v"):
            row = torch.arange(arguments[x].shape[2], device=maker.device)[:, None]
            length = arguments[name][:, None, None, None]
            arguments[x].masked_fill_(row < length if name == "kv_starts" else row >= length, math.nan)
    return arguments


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", LENGTHS)
def test_within_the_budget(kind, flags, dim):
    assert_within_the_budget(kind, flags, d=dim)


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", LENGTHS)
def test_masks_beside_lengths_within_the_budget(kind, flags, dim):
    assert_within_the_budget(kind, flags, d=dim, mask=(4, 1, 1000, 1000), chance=0.3)


def assert_within_the_budget(kind, flags, **params):
    params = {"b": 4, "hq": 8, "hk": 4, "sq": 1000, "sk": 1000, "kind": kind, **FLAGS[flags], **params}
    case = Case(str(params), params)
    suite = dataclasses.replace(attention.SUITE, cases=(case,), make=make)
    arguments = make(maker_of(suite, case, torch.bfloat16, "cuda"), **params)
    note = hw.explain("attention", *(arguments.pop(n).requires_grad_() for n in "qkv"), **arguments).note
    assert note == "forward: the Hopper kernel; backward: the Hopper kernel"
    errors = measure(suite, case, dtype=torch.bfloat16, device="cuda", backend="triton")
    bad = [str(e) for e in errors if not e.ok]
    assert not bad, bad


@pytest.mark.parametrize("kind", LENGTHS)
def test_they_are_the_hopper_kernels_and_give_the_same_bits_every_time(kind):
    q, k, v, g = (normal(4, 1000, 8, 128, seed=s).transpose(1, 2).requires_grad_() for s in range(4))
    given = {name: torch.tensor(values, device=q.device) for name, values in LENGTHS[kind].items()}
    note = hw.explain("attention", q, k, v, causal=True, **given).note
    assert note == "forward: the Hopper kernel; backward: the Hopper kernel"

    def run():
        out = hw.attention(q, k, v, causal=True, **given)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), g))

    first = run()
    wrong = torch.zeros((), dtype=torch.int64, device=q.device)
    for _ in range(300):
        wrong += differing(run(), first)
    assert int(wrong) == 0


def test_a_bad_length_is_nan_in_its_entry_alone():
    q, k, v, g = (normal(3, 1024, 8, 64, seed=s).transpose(1, 2).requires_grad_() for s in range(4))

    def run(second):
        lengths = torch.tensor([1024, second, 500], device=q.device)
        out, lse = hw.attention(q, k, v, causal=True, q_lengths=lengths, kv_lengths=lengths, return_lse=True)
        return (out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), g))

    for bad, good in zip(run(2000), run(700), strict=True):
        assert bad[1].isnan().all()
        assert int(differing((bad[0], bad[2]), (good[0], good[2]))) == 0

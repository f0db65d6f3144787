"""Masks in the Hopper kernels on a Hopper GPU: against float64 within the error budget, with NaN where nobody looks.

HEADWISE_TEST_REPEATS: how often one call is repeated; 10000 unless it says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import torch
from gpu_machine import bits, gpu, normal  # noqa: F401  # gpu is a fixture
from torch import Tensor

import headwise as hw
from headwise.backends.triton import hopper
from headwise.backends.triton.gpu import Gpu, facts
from headwise.cases import attention
from headwise.testing import Case, Maker, measure

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
        return torch.arange(sk, device=device) < maker.tensor([sk - 77, sk // 3], torch.int64).repeat(b)[:b, None, None, None]
    if kind == "left padding":
        return torch.arange(sk, device=device) >= maker.tensor([77, sk // 3], torch.int64).repeat(b)[:b, None, None, None]
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


def make(maker: Maker, *, kind: str, **params: Any) -> dict[str, Any]:
    """As the conformance cases, with NaN in keys that no query of the batch entry sees."""
    arguments = attention.make(maker, **params)
    q, k = arguments["q"], arguments["k"]
    mask = arguments["mask"] = mask_of(kind, maker, *q.shape[:3], k.shape[2])
    position = torch.arange(q.shape[2], device=maker.device)[:, None] + k.shape[2] - q.shape[2]
    distance = torch.arange(k.shape[2], device=maker.device) - position
    left, right = params.get("window", (None, 0 if params.get("causal") else None))
    band = (distance >= (-math.inf if left is None else -left)) & (distance <= (math.inf if right is None else right))
    group = q.shape[1] // k.shape[1]
    seen = (mask & band).expand(*q.shape[:3], k.shape[2]).any(2).unflatten(1, (-1, group)).any(2)
    for x in (k, v) if (v := arguments["v"]) is not None else ():
        x.masked_fill_(~seen[..., None], math.nan)
    return arguments


FLAGS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (300, 40)},
    "softcap and sink": {"softcap": 15.0, "sink": True},
}
CALLS = [(kind, "full", 128) for kind in KINDS]
CALLS += [(kind, flags, 64) for kind in ("random", "sparse, per head", "padding", "queries") for flags in FLAGS]
CALLS += [(kind, flags, dim) for kind, flags in (("sparse, per head", "causal"), ("documents", "full")) for dim in (80, 96, 192, 256)]
CALLS += [("sparse, per head", "window", 128), ("left padding", "causal", 128)]


@pytest.mark.parametrize(("kind", "flags", "dim"), CALLS)
@pytest.mark.parametrize("lengths", [(1000, 1133), (1100, 650)], ids=str)
def test_within_the_budget(kind, flags, dim, lengths):
    params = {"b": 2, "hq": 8, "hk": 4, "sq": lengths[0], "sk": lengths[1], "d": dim, "kind": kind, **FLAGS[flags]}
    case = Case(f"{kind}, {flags}, {dim}, {lengths}", params)
    suite = dataclasses.replace(attention.SUITE, cases=(case,), make=make)
    errors = measure(suite, case, dtype=torch.bfloat16, device="cuda", backend="triton")
    bad = [str(e) for e in errors if not e.ok]
    assert not bad, bad


def test_these_calls_are_the_hopper_kernels():
    q, k, v = (normal(2, 8, 1000, 128, seed=s) for s in range(3))
    mask = documents(1000, 1000, 100, q.device)
    assert "forward: the Hopper kernel" in hw.explain("attention", q, k, v, mask=mask).note


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_same_bits_every_time(dim):
    q, k, v = (normal(2, 8, 1500, dim, seed=s) for s in range(3))
    mask = documents(1500, 1500, 200, q.device)
    first = hw.attention(q, k, v, mask=mask)
    wrong = torch.zeros((), dtype=torch.int64, device=q.device)
    for _ in range(REPEATS // 10):
        wrong += (bits(hw.attention(q, k, v, mask=mask)) != bits(first)).sum()
    assert int(wrong) == 0

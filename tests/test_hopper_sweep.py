"""The sweep over head dims and broadcast shapes that a GPU runs: who takes which case, and a sample in the interpreter."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from hopper_variants import gradients_of, recorded

import headwise as hw
from headwise.backends.triton.hopper import padded
from headwise.cases import attention
from headwise.config import settings
from headwise.ops._explain import describe
from headwise.testing import Maker, measure

sys.path.append(str(Path(__file__).parent / "gpu"))

import hopper_sweep
from hopper_sweep import DIMS, LARGE, SHAPES, SMALL, sweep

CASES = list(sweep(LARGE))
HOPPER = "forward: the Hopper kernel; backward: the Hopper kernel"
# Gluon kernels that are compiled for all of it, and calls that they take. On a GPU machine one takes some seconds.
VARIANTS, TAKEN = 88, 752


class Meta(Maker):
    """Tensors without memory, at once."""

    def normal(self, *shape, scale=1.0, dtype=None):
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def coin(self, *shape, chance=0.5):
        return torch.empty(shape, dtype=torch.bool, device="meta")


def arguments_of(case):
    params = dict(case.params)
    mask = params.pop("mask", None)
    arguments = attention.make(Meta(torch.bfloat16, torch.device("meta")), **params, mask=mask)
    for name in ("q", "k", "v"):
        arguments[name].requires_grad_()
    return arguments


@pytest.mark.skipif(
    settings.triton_interpret, reason="explain names what runs: the interpreter; make test asks without it"
)
def test_the_hopper_kernels_take_what_the_sweep_says():
    for _, case, taken in CASES:
        note = hw.explain("attention", **arguments_of(case), arch="sm_90").note
        assert (note == HOPPER) == taken, f"{case.name}: {note}"


def test_every_head_dim_meets_every_shape():
    found = {(c.case.params["d"], c.case.params.get("mask"), c.case.params.get("bias")) for c in CASES if c.on_hopper}

    def sized(shape):
        return tuple(n if has else 1 for n, has in zip((LARGE.b, LARGE.hq, LARGE.sq, LARGE.sk), shape, strict=True))

    assert {(d, sized(s), None) for d in DIMS for s in SHAPES} <= found
    assert {(d, None, sized(s)) for d in DIMS if d <= 128 for s in SHAPES if s[3]} <= found
    assert len({(c.case.params["d"], c.case.params["dv"]) for c in CASES if c.case.params["dv"] and c.on_hopper}) == 64


def test_few_variants_are_compiled():
    variants = set()
    for _, case, taken in CASES:
        if taken:
            args = describe("attention", **arguments_of(case)).arguments
            for launcher, given in ((padded.forward, args), (padded.backward, gradients_of(args))):
                _, launches, _ = recorded(launcher, given)
                variants |= {(x.kernel.fn.__name__, x.tail[-1]) for x in launches if x.described}
    assert (len(variants), sum(c.on_hopper for c in CASES)) == (VARIANTS, TAKEN)


@pytest.mark.slow
@pytest.mark.skipif(not settings.triton_interpret, reason="for Triton's interpreter (TRITON_INTERPRET=1)")
@pytest.mark.parametrize("case", [c.case for c in list(sweep(SMALL))[::23]], ids=lambda case: case.name)
def test_the_plain_kernels_are_within_the_budget(case):
    suite = dataclasses.replace(attention.SUITE, cases=(case,), make=hopper_sweep.make)
    errors = measure(suite, case, dtype=torch.bfloat16, backend="triton")
    assert not [str(e) for e in errors if not e.ok]

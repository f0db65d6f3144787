"""Every head dim and every broadcast shape of masks and biases, in the Hopper kernels where they take it."""

from __future__ import annotations

import dataclasses

import hopper_sweep
import pytest
import torch
from gpu_machine import gpu  # noqa: F401  # a fixture
from hopper_sweep import LARGE, sweep

import headwise as hw
from headwise.backends.triton import hopper
from headwise.backends.triton.gpu import Gpu, facts
from headwise.cases import attention
from headwise.testing import maker_of, measure

GROUPS = sorted({group for group, _, _ in sweep(LARGE)})
HOPPER = "forward: the Hopper kernel; backward: the Hopper kernel"


@pytest.fixture(autouse=True)
def on_hopper(gpu: None) -> None:  # noqa: F811
    reason = hopper.missing(Gpu(facts(torch.cuda.current_device()), tf32=False))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("group", GROUPS)
def test_within_the_budget(group):
    """All cases of a group in one test: they share what is compiled."""
    bad = []
    for _, case, taken in (c for c in sweep(LARGE) if c.group == group):
        suite = dataclasses.replace(attention.SUITE, cases=(case,), make=hopper_sweep.make)
        arguments = hopper_sweep.make(maker_of(suite, case, torch.bfloat16, "cuda"), **case.params)
        for name in ("q", "k", "v"):
            arguments[name].requires_grad_()
        note = hw.explain("attention", **arguments).note
        assert (note == HOPPER) == taken, f"{case.name}: {note}"
        errors = measure(suite, case, dtype=torch.bfloat16, device="cuda", backend="triton")
        bad += [f"{case.name}: {e}" for e in errors if not e.ok]
    assert not bad, "\n".join(bad)

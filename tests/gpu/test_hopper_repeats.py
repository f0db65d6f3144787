"""The Hopper kernels for masks, biases, odd head dims, caps and padded batches: the same bits ten thousand times.

The calls are small: an iteration takes some 0.2 ms, most of it launches, so that all of them take about a minute (estimated,
not measured). HEADWISE_TEST_REPEATS: how often a call is repeated; 10000 unless it says otherwise.
"""

from __future__ import annotations

import os

import hopper_calls
import pytest
import torch
from gpu_machine import DEVICE, differing, gpu, normal  # noqa: F401  # gpu is a fixture

import headwise as hw
from headwise.backends.triton import hopper
from headwise.backends.triton.gpu import Gpu, facts

REPEATS = int(os.environ.get("HEADWISE_TEST_REPEATS", "10000"))
CALLS = [
    "64, mask", "128, mask, cap and sink", "160, mask of queries", "256, mask, causal", "64, bias",
    "96, mask of entries beside lengths, causal",
    "64, float32 bias of keys, causal", "96, float32 bias", "128, bias, window", "128, bias and mask", "80", "96, window",
    "160", "192/128", "64, causal, cap and sink", "192, causal, cap", "80, packed, window", "192/128, packed, causal",
    "128, padded on the right",
]  # fmt: skip


@pytest.fixture(autouse=True)
def on_hopper(gpu: None) -> None:  # noqa: F811
    reason = hopper.missing(Gpu(facts(torch.cuda.current_device()), tf32=False))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_in_every_run(name):
    call = hopper_calls.make(name, DEVICE)
    note = hw.explain(call.op, **call.arguments).note
    assert note == "forward: the Hopper kernel; backward: the Hopper kernel"
    first = hopper_calls.run(call)
    side, noise = torch.cuda.Stream(), normal(512, 512)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for repeat in range(REPEATS):
        if repeat % 3 == 0:  # work on another stream changes which program runs when
            with torch.cuda.stream(side):
                noise = (noise @ noise).clamp_(-1, 1)
        wrong += differing(hopper_calls.run(call), first)
    torch.cuda.synchronize()
    assert int(wrong) == 0

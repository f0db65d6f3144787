"""Attention needs O(S) memory: no array of Sq × Sk, forward or backward, whatever the features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_calls import ints, maker, on_every_backend
from backends_under_test import DEVICE
from torch.profiler import ProfilerActivity, profile

import headwise as hw

S = 8192


def allocations(device: str, run: Callable[[], Any]) -> tuple[int, int]:
    """(largest single allocation, peak of all allocations that live at once) of ``run()``, in bytes."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return peak, peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = list(profiled.profiler.kineto_results.experimental_event_tree())
    found = []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    largest = live = peak = 0
    for _, size in sorted(found):
        largest = max(largest, size)
        live += size
        peak = max(peak, live)
    return largest, peak


def assert_no_square_array(backend: str, run: Callable[[], Any]) -> None:
    largest, peak = allocations(DEVICE[backend], run)
    # One byte per pair of query and key would be S² = 64 MiB; a tensor like q is 1 MiB.
    assert largest < S * S // 4
    assert peak < S * S


def test_allocations_are_seen():
    def run() -> None:
        x = torch.ones(1000, 1000)
        (x @ x).sum()

    assert allocations("cpu", run) == (4_000_000, pytest.approx(8_000_000, rel=0.01))


FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (255, 0)},
    "window on both sides": {"window": (128, 128), "softcap": 5.0},
    "key padding": {"kv_lengths": (S - 1000,), "causal": True},
    "sink": {"sink": (2,), "causal": True},
    "mask of keys": {"mask": (1, 1, 1, S), "window": (1000, 1000)},
    "bias of keys": {"bias": (1, 1, 1, S), "window": (1000, 0)},
    "bias of queries": {"bias": (1, 2, S, 1), "window": (1000, 0)},
}


@pytest.mark.parametrize("feature", FEATURES)
@on_every_backend
def test_attention_needs_no_square_array(backend, feature):
    m = maker(backend)
    x = {n: m.normal(1, h, S, 16).requires_grad_() for n, h in (("q", 2), ("k", 1), ("v", 1))}
    flags = dict(FEATURES[feature])
    if "kv_lengths" in flags:
        flags["kv_lengths"] = ints(backend, *flags["kv_lengths"])
    if "mask" in flags:
        flags["mask"] = m.coin(*flags["mask"])
    for name in ("bias", "sink"):
        if name in flags:
            x[name] = m.normal(*flags.pop(name)).requires_grad_()
    grad = m.normal(1, 2, S, 16)

    def run() -> None:
        out = hw.attention(**x, **flags, backend=backend)
        torch.autograd.grad(out, list(x.values()), grad)

    assert_no_square_array(backend, run)


@on_every_backend
def test_packed_attention_needs_no_square_array(backend):
    m = maker(backend)
    q, k, v = (m.normal(S, 1, 16).requires_grad_() for _ in range(3))
    bounds = ints(backend, 0, 100, 100, 5000, S - 3)
    grad = m.normal(S, 1, 16)

    def run() -> None:
        out = hw.attention_varlen(q, k, v, bounds, bounds, 4900, 4900, causal=True, backend=backend)
        torch.autograd.grad(out, (q, k, v), grad)

    assert_no_square_array(backend, run)


@on_every_backend
def test_decode_never_copies_or_expands_the_cache(backend):
    m = maker(backend)
    C = 65536
    q, k, v = m.normal(1, 16, 16), m.normal(1, 2, C, 16), m.normal(1, 2, C, 16)
    largest, peak = allocations(
        DEVICE[backend], lambda: hw.attention_decode(q, k, v, ints(backend, C), backend=backend)
    )
    cache = k.numel() * k.element_size()
    # The scores of all heads at once are half as large as a cache: O(S), and allowed.
    assert largest < cache
    assert peak < 2 * cache

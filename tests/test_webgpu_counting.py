"""``device="webgpu"``: counting, searching, running extremes and shifts, equal to the CPU's."""

from __future__ import annotations

import math

import pytest
import torch

import headwise.webgpu  # noqa: F401  registers the device

DEVICE = "webgpu"
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def same(function, *tensors):
    found = function(*[x.to(DEVICE) for x in tensors])
    expected = function(*tensors)
    for ours, plain in zip(*[r if isinstance(r, tuple) else (r,) for r in (found, expected)], strict=True):
        assert ours.device.type == DEVICE
        assert ours.shape == plain.shape
        assert ours.dtype == plain.dtype
        assert torch.equal(ours.cpu().nan_to_num(-1234), plain.nan_to_num(-1234))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bool])
def test_unique(dtype):
    torch.manual_seed(0)
    for x in (torch.randint(0, 900, (3, 1000)).to(dtype), torch.tensor([3, 3, 1, 0, 1]).to(dtype)):
        same(lambda x: torch.unique(x, return_inverse=True, return_counts=True), x)
        same(torch.unique, x)
        same(lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True), x)
    same(lambda x: torch.unique(x, return_counts=True), torch.zeros(0, dtype=dtype))


def test_every_nan_is_unique():
    same(
        lambda x: torch.unique(x, return_inverse=True, return_counts=True),
        torch.tensor([3.0, math.nan, 1.0, math.nan, 3.0]),
    )


def test_bincount():
    torch.manual_seed(0)
    x = torch.randint(0, 50, (5000,))
    same(torch.bincount, x)
    same(lambda x: torch.bincount(x.int(), minlength=60), x)
    same(lambda x, w: torch.bincount(x, w), x, torch.randint(-4, 5, (5000,)).float())
    same(lambda x: torch.bincount(x, minlength=3), x[:0])
    with pytest.raises(RuntimeError, match="-1 is among the numbers"):
        torch.bincount(torch.tensor([3, -1], device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_repeats_by_numbers(dtype):
    x, repeats = torch.randn(4, 3), torch.tensor([2, 0, 5, 1], dtype=dtype)
    same(torch.repeat_interleave, repeats)
    same(lambda x, r: torch.repeat_interleave(x, r, 0), x, repeats)
    same(lambda x, r: torch.repeat_interleave(x, r, 0, output_size=8), x, repeats)
    with pytest.raises(RuntimeError, match="-2 is among the repeats"):
        torch.repeat_interleave(-repeats[:1].to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("right", [False, True])
def test_searchsorted(dtype, right):
    torch.manual_seed(0)
    rows = torch.randint(0, 40, (3, 70)).sort(-1).values.to(dtype)
    x = torch.randint(0, 45, (3, 300)).to(dtype)
    same(lambda s, x: torch.searchsorted(s, x, right=right), rows, x)
    same(lambda s, x: torch.searchsorted(s[0], x, right=right, out_int32=True), rows, x)
    same(lambda s, x: torch.bucketize(x, s[0], right=right), rows, x)
    same(lambda s: torch.searchsorted(s[0], 7, right=right), rows)
    if dtype == torch.float32:
        special = torch.tensor([math.nan, math.inf, -math.inf])
        same(lambda s, x: torch.searchsorted(s[0], x, right=right), rows, special)
        mixed = rows[:, torch.randperm(70)]
        same(lambda s, x, i: torch.searchsorted(s, x, right=right, sorter=i), mixed, x, mixed.argsort(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *WHOLE, torch.bool])
@pytest.mark.parametrize("function", [torch.cummax, torch.cummin])
def test_running_extremes(dtype, function):
    torch.manual_seed(0)
    x = torch.randint(-100, 100, (3, 700, 2)).to(dtype)
    for dim in (0, 1, -1):
        same(lambda x, dim=dim: tuple(function(x, dim)), x)
    if dtype == torch.float32:
        x[0, 300:500:7] = math.nan
        x[1, ::90] = math.inf
        same(lambda x: tuple(function(x, 1)), x)
        found = x.to(DEVICE).requires_grad_()
        function(found, 1).values.nansum().backward()
        plain = x.clone().requires_grad_()
        function(plain, 1).values.nansum().backward()
        assert torch.equal(found.grad.cpu(), plain.grad)


@pytest.mark.parametrize("dtype", WHOLE)
def test_shifts(dtype):
    bits = torch.iinfo(dtype).bits
    x = torch.tensor([1, 2, 7, 100, -1, -77]).to(dtype).view(-1, 1)
    by = torch.tensor([0, 1, 5, bits - 1, bits, 120]).to(dtype)
    same(lambda x, b: x << b, x, by)
    same(lambda x, b: x >> b, x, by)
    same(lambda x: x << 3, x)
    same(lambda x: x.__irshift__(1), x)
    if dtype == torch.int64:
        wide = torch.tensor([1 << 40, -(1 << 45) - 12345, (1 << 62) + 1])
        for n in (1, 31, 32, 33, 63, 64):
            same(lambda x, n=n: (x << n, x >> n), wide)


def test_logspace():
    assert torch.equal(torch.logspace(0, 2, 7, device=DEVICE).cpu(), torch.logspace(0, 2, 7))

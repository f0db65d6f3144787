"""Numbers of any size and dtype on ``device="webgpu"``: angles, whole numbers, casts, and which dtypes mix."""

from __future__ import annotations

import math

import pytest
import torch

import headwise.webgpu  # noqa: F401  registers the device

DEVICE = "webgpu"


def _units(found, truth):
    """The largest error, in units of the last place of a float32."""
    size = truth.float().abs()
    unit = (torch.nextafter(size, torch.full_like(size, math.inf)) - size).double()
    return ((found.double() - truth).abs() / unit).max().item()


# ------------------------------------------------------------------------------------------------------------------ angles


@pytest.mark.parametrize("function", [torch.sin, torch.cos])
@pytest.mark.parametrize("largest", [1.0, 100.0, 1e4, 12800.0, 1e5, 1e7])
def test_angles_of_any_size_are_good_to_a_few_units_webgpu(function, largest):
    draw = torch.Generator().manual_seed(0)
    spread = (torch.rand(1 << 15, generator=draw, dtype=torch.float64) * 2 - 1) * largest
    # Next to a multiple of a right angle most digits cancel.
    right = torch.randint(0, int(largest) + 1, (1 << 12,), generator=draw) * (math.pi / 2)
    x = torch.cat([spread, right, -right]).float()
    assert _units(function(x.to(DEVICE)).cpu(), function(x.double())) <= 4


@pytest.mark.parametrize("function", [torch.sin, torch.cos])
def test_angles_up_to_the_largest_float_webgpu(function):
    """float64 has the digits of such an angle; what its own sine is off by does not show in a float32."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(0x30000000, 0x7F800000, (1 << 14,), generator=draw, dtype=torch.int64).to(torch.int32)
    # 16367173 * 2^72 is the float32 that is closest to a multiple of a right angle.
    special = torch.tensor([16367173.0 * 2.0**72, torch.finfo(torch.float32).max, 5e5, 1e6, 12800.0, 12800.001, 0.0])
    x = torch.cat([bits.view(torch.float32), special])
    x = torch.cat([x, -x])
    assert _units(function(x.to(DEVICE)).cpu(), function(x.double())) <= 4
    endless = torch.tensor([math.inf, -math.inf, math.nan], device=DEVICE)
    assert function(endless).isnan().all()


# ----------------------------------------------------------------------------------------------------------- whole numbers


def test_any_and_all_of_bytes_are_zero_or_one_webgpu():
    for x in (torch.tensor([4, 2]), torch.tensor([[4, 0], [2, 0], [1, 8]]), torch.zeros(3), torch.full((40, 50), 6)):
        for dtype in (torch.uint8, torch.int8, torch.int64, torch.bool):
            y = x.to(dtype)
            for op in (torch.any, torch.all):
                made = op(y.to(DEVICE), 0)
                assert torch.equal(made.cpu(), op(y, 0)), (op, dtype)
                assert made.dtype == op(y, 0).dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
def test_powers_of_whole_numbers_are_those_of_the_cpu_webgpu(dtype):
    base = torch.tensor([3, 1, -1, 0, 2, -1, -3, 5], dtype=dtype)
    exponent = torch.tensor([-1, -2, -3, -1, -5, -4, 5, 27], dtype=dtype)
    assert torch.equal((base.to(DEVICE) ** exponent.to(DEVICE)).cpu(), base**exponent)
    assert torch.equal((2 ** exponent.to(DEVICE)).cpu(), 2**exponent)
    if dtype == torch.int64:
        large = exponent.clamp_min(0) + (1 << 33)
        assert torch.equal((base.to(DEVICE) ** large.to(DEVICE)).cpu(), base**large)
    with pytest.raises(RuntimeError, match="Integers to negative integer powers are not allowed"):
        base.to(DEVICE) ** -1
    with pytest.raises(RuntimeError, match="Integers to negative integer powers are not allowed"):
        base.to(DEVICE).pow_(-2)


def test_whole_numbers_of_64_bits_are_rounded_once_webgpu():
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 63, (1 << 14,), generator=draw)
    x = torch.randint(-(1 << 63), (1 << 63) - 1, (1 << 14,), generator=draw) >> sizes
    # Ties of the first 24 digits, and what is a tie but for the last digit; and the ends.
    ties = torch.tensor([(0x1000001 << n) + d for n in range(39) for d in (-1, 0, 1)])
    ends = torch.tensor([-(1 << 63), (1 << 63) - 1, (1 << 62) + 3, (1 << 32) - 1, (1 << 24) - 1, 0, 1, -1])
    x = torch.cat([x, ties, -ties, ties + (ties & -ties), ends])
    assert torch.equal(x.to(DEVICE).float().cpu(), x.float())


# ------------------------------------------------------------------------------------------------------- dtypes that mix


def test_floats_are_not_written_into_whole_numbers_webgpu():
    whole, real = torch.tensor([3], device=DEVICE), torch.tensor([1.5], device=DEVICE)
    for write in (
        lambda: whole.mul_(real),
        lambda: whole.mul_(1.5),
        lambda: whole.addcmul_(real, real),
        lambda: whole.sub_(real),
        lambda: torch.add(whole, 1.5, out=torch.zeros(1, dtype=torch.int64, device=DEVICE)),
    ):
        with pytest.raises(RuntimeError, match=r"can't be cast|not possible"):
            write()
    assert whole.clone().mul_(torch.tensor([2], dtype=torch.int32, device=DEVICE)).item() == 6
    assert whole.clone().lt_(4.5).item() == 1
    assert whole.clone().masked_fill_(whole == 3, 2.5).item() == 2
    assert real.clone().mul_(whole).item() == 4.5


def test_numbers_of_float64_on_the_cpu_mix_with_tensors_webgpu():
    """As PyTorch's rules have it: tensors of no dims on the CPU go with those of any device, and do not widen them."""
    number, x = torch.tensor(0.1, dtype=torch.float64), torch.tensor([1.0, 3.0])
    y = x.to(DEVICE)
    for call in (
        lambda x: x * number,
        lambda x: number - x,
        lambda x: x / number > number,
        lambda x: torch.where(x > 2, number, x),
        lambda x: x.clamp(number, 2 * number),
        lambda x: x.masked_fill(x > 2, number),
        lambda x: x.clone().mul_(number).add_(number),
        lambda x: x.half() * number,
        lambda x: torch._foreach_mul([x], number)[0],
    ):
        made, expected = call(y), call(x)
        assert made.dtype == expected.dtype
        torch.testing.assert_close(made.cpu(), expected, rtol=1e-6, atol=0)
    with pytest.raises(NotImplementedError, match="float64"):
        torch.tensor([1, 2], device=DEVICE) * number  # whole numbers become float64


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("value", [2.5, 1, True, torch.tensor(2.5)])
def test_a_filled_tensor_keeps_what_is_not_filled(dtype, value):
    """The rest does not pass through the value's dtype."""
    x = torch.tensor([2**53 + 1, 2**24 + 1, 5]).to(dtype)
    mask = torch.tensor([False, False, True])
    expected = x.clone().masked_fill_(mask, value)
    there = value.to(DEVICE) if isinstance(value, torch.Tensor) else value
    mine = x.to(DEVICE)
    assert torch.equal(mine.masked_fill(mask.to(DEVICE), there).cpu(), expected)
    assert torch.equal(mine.masked_fill_(mask.to(DEVICE), there).cpu(), expected)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 300])
def test_a_value_that_does_not_fit_is_refused(value):
    x = torch.zeros(3, dtype=torch.int8, device=DEVICE)
    with pytest.raises(RuntimeError, match="without overflow"):
        x.masked_fill_(x == 0, value)


def test_results_of_tensors_without_dims_have_memory_of_their_own():
    x = torch.tensor(2.0, device=DEVICE)
    for made in (x.flip(0), x.logsumexp(0), torch.logsumexp(x, ())):
        made.add_(1)
    assert x.item() == 2


def test_numbers_put_into_one_element():
    x = torch.zeros(3, device=DEVICE)
    x.index_put_((torch.tensor(1, device=DEVICE),), torch.ones((), device=DEVICE))
    assert x.tolist() == [0, 1, 0]


def test_infinity_divided_by_a_whole_number():
    a = torch.tensor([float("inf"), -float("inf"), 7.0, 1.0])
    b = torch.tensor([2.0, 3.0, float("inf"), 0.0])
    expected = torch.floor_divide(a, b)
    assert torch.equal(torch.floor_divide(a.to(DEVICE), b.to(DEVICE)).cpu().isnan(), expected.isnan())
    assert torch.equal(torch.floor_divide(a.to(DEVICE), b.to(DEVICE)).cpu().nan_to_num(), expected.nan_to_num())

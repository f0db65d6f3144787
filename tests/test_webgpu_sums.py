"""Sums of many numbers on ``device="webgpu"``: no chain of roundings is long, whichever dim is summed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import headwise.webgpu  # noqa: F401  registers the device
from headwise import testing

DEVICE = "webgpu"
FLOATS = [torch.float32, torch.float16, torch.bfloat16]

SUMS = {
    "sum": lambda x, dim: x.sum(dim),
    "mean": lambda x, dim: x.mean(dim),
    "var": lambda x, dim: x.var(dim),
    "var_mean": lambda x, dim: torch.stack(torch.var_mean(x, dim)),
    "norm of powers 1": lambda x, dim: torch.linalg.vector_norm(x, 1, dim),
    "norm of powers 2": lambda x, dim: torch.linalg.vector_norm(x, 2, dim),
    "norm of powers 3": lambda x, dim: torch.linalg.vector_norm(x, 3, dim),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "cumsum": lambda x, dim: x.cumsum(dim),
}
# Many rows, neighbouring columns or few of them; long rows; and dims on both sides of the one that is summed.
SHAPES = [((20000, 33), 0), ((8192, 5), 0), ((260, 4100), 0), ((3, 70000), 1), ((2, 6000, 40), 1)]


def _numbers(kind, shape, dtype):
    draw = torch.Generator().manual_seed(0)
    made = {
        # Equal numbers: all roundings of a chain go the same way.
        "equal": lambda: torch.full(shape, 0.1),
        "around zero": lambda: torch.randn(shape, generator=draw),
        "far from zero": lambda: torch.randn(shape, generator=draw) + 10,
    }
    return made[kind]().to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_sums_of_many_numbers_are_within_the_budget_webgpu(shape, dim, dtype):
    for kind in ("equal", "around zero", "far from zero"):
        x = _numbers(kind, shape, dtype)
        there = x.to(DEVICE)
        for name, of in SUMS.items():
            if kind == "equal" and "var" in name:
                continue  # zero: nothing to be relative to
            truth, plain = of(x.double(), dim), of(x, dim)
            truth = torch.where(truth.to(dtype).isinf(), truth.to(dtype), truth)  # what a float16 has no room for
            result = testing.compare(f"{name} of numbers {kind}", of(there, dim).cpu(), truth, plain)
            assert result.ok, str(result)


def test_the_variance_of_equal_numbers_is_next_to_nothing_webgpu():
    assert torch.full((9000, 40), 0.1, device=DEVICE).var(0).max().item() < 1e-15


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_gradient_of_a_bias_over_many_tokens_is_within_the_budget_webgpu(dtype):
    x, weight = _numbers("around zero", (8192, 16), dtype), _numbers("around zero", (48, 16), dtype)

    def gradient(x, weight):
        bias = torch.zeros(48, dtype=x.dtype, device=x.device, requires_grad=True)
        (made,) = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), bias)
        return made

    plain, truth = gradient(x, weight), gradient(x.double(), weight.double())
    result = testing.compare("bias", gradient(x.to(DEVICE), weight.to(DEVICE)).cpu(), truth, plain, truth.abs().max())
    assert result.ok, str(result)


def test_running_sums_of_whole_numbers_are_exact_webgpu():
    whole = torch.randint(-9, 9, (3, 70001), generator=torch.Generator().manual_seed(0))
    assert torch.equal(whole.to(DEVICE).cumsum(1).cpu(), whole.cumsum(1))
    assert torch.equal(whole.t().to(DEVICE).cumsum(0).cpu(), whole.t().cumsum(0))
    signs = torch.where(whole > 0, 1, -1)
    assert torch.equal(signs.to(DEVICE).cumprod(1).cpu(), signs.cumprod(1))


@pytest.mark.parametrize("op", ["sum", "amax", "amin", "argmax", "any", "all", "prod"])
def test_columns_of_whole_numbers_are_exact_webgpu(op):
    """Over many rows, of which a column is cut into parts."""
    whole = torch.randint(-(1 << 40), 1 << 40, (5000, 37), generator=torch.Generator().manual_seed(0))
    whole[:, 1] = 0
    whole[4321, 2] = 0
    for x in (whole, (whole % 251).to(torch.uint8), (whole % 7 - 3).to(torch.int32), whole > 0):
        if not (x.dtype == torch.bool and op in ("argmax", "prod")):
            made = getattr(x.to(DEVICE), op)(0)
            assert torch.equal(made.cpu(), getattr(x, op)(0)), (op, x.dtype)


def test_the_logarithm_of_no_exponentials_is_minus_infinity_webgpu():
    for shape, dim, keepdim in (((0, 3), 0, False), ((3, 0), 1, True), ((3, 0), (0, 1), False), ((2, 0, 4), 2, False)):
        x = torch.empty(shape)
        assert torch.equal(x.to(DEVICE).logsumexp(dim, keepdim).cpu(), x.logsumexp(dim, keepdim))

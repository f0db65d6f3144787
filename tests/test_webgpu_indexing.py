"""``device="webgpu"``: elements that are read and written by number, and their order; and what is out of range."""

from __future__ import annotations

import math

import pytest
import torch

from headwise import testing, webgpu
from headwise.backends.webgpu import runtime

DEVICE = "webgpu"


def there(x):
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def same(function, *tensors):
    """The same results there and on the CPU, bit by bit."""
    found, expected = function(*[there(x) for x in tensors]), function(*tensors)
    for ours, plain in zip(*[r if isinstance(r, tuple) else (r,) for r in (found, expected)], strict=True):
        assert ours.shape == plain.shape
        assert ours.dtype == plain.dtype
        assert torch.equal(ours.cpu().nan_to_num(-1234), plain.nan_to_num(-1234))


# ------------------------------------------------------------------------------------------------------------------ dtypes


_DTYPES = {
    "setitem": lambda x, i, y: x.__setitem__(i, y),
    "index_put_": lambda x, i, y: x.index_put_((i,), y),
    "index_copy_": lambda x, i, y: x.index_copy_(0, i, y),
    "index_add_": lambda x, i, y: x.index_add_(0, i, y),
    "scatter_": lambda x, i, y: x.scatter_(0, i, y),
    "masked_scatter_": lambda x, i, y: x.masked_scatter_(torch.tensor([True, False, True], device=x.device), y),
}


@pytest.mark.parametrize("name", _DTYPES)
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_another_dtype_is_not_written_as_bits(name, device):
    x = torch.zeros(3, device=device)
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        _DTYPES[name](x, torch.tensor([0, 2], device=device), torch.ones(2, dtype=torch.int64, device=device))
    assert x.tolist() == [0, 0, 0]


def test_a_number_is_written_in_the_dtype_of_the_tensor():
    mask = torch.tensor([True, False, True])

    def written(x, index, mask):
        x[index] = 2.5
        x[mask] = torch.tensor(7, device=x.device)
        return x

    for dtype in (torch.float32, torch.int64):
        same(written, torch.zeros(3, dtype=dtype), torch.tensor([1, 0]), mask)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: x.index_select(0, i), lambda x, i: x.gather(0, i), lambda x, i: x.scatter(0, i, 1.0), lambda x, i: x[i],
        lambda x, i: x.index_add(0, i, x[:1]), lambda x, i: x.index_copy(0, i, x[:1]), lambda x, i: x.index_fill(0, i, 1.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_an_index_holds_whole_numbers(call, device):
    with pytest.raises((RuntimeError, IndexError), match=r"int64|long"):
        call(torch.zeros(3, device=device), torch.tensor([0.0], device=device))


# ------------------------------------------------------------------------------------------------------------ out of range


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_sizes_are_compared_before_elements_are_read(device):
    x, i = torch.ones(3, 4, device=device), torch.zeros(4, 1, dtype=torch.int64, device=device)
    for call in (
        lambda: x.gather(1, i), lambda: x.gather(1, i[:, 0]), lambda: x.scatter(1, i, 1.0),
        lambda: x.scatter(1, i[:, 0], 1.0), lambda: x.scatter(0, i[:2], x[:1]), lambda: x.index_add(0, i[:2, 0], x[:1]),
        lambda: x.index_add(0, i, x),
        lambda: x.index_copy(0, i[:2, 0], x[:2, :1]), lambda: x[:0].index_select(0, i[:, 0]),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, IndexError)):
            call()


_OUTSIDE = (7, -8, 1 << 32, (1 << 32) + 1, -(1 << 40))


@pytest.mark.parametrize("number", _OUTSIDE)
@pytest.mark.parametrize("count", [1, 5000])  # each element looks at all sources, or finds its own
def test_what_is_out_of_range_is_written_nowhere(number, count):
    whole = torch.arange(350.0).view(5, 70)
    x = whole.to(DEVICE)
    outside = torch.full((count,), number, device=DEVICE)
    inside = torch.zeros_like(outside)
    x[inside, outside * 10] = 9.0
    x[outside, inside] = 9.0
    x[outside] = 9.0
    x.index_put_((inside, outside * 10), torch.ones(count, device=DEVICE), accumulate=True)
    x.index_put_((outside,), torch.ones(count, 70, device=DEVICE), accumulate=True)
    x.index_fill_(0, outside, 5.0)
    x.index_copy_(0, outside, torch.ones(count, 70, device=DEVICE))
    x.index_add_(0, outside, torch.ones(count, 70, device=DEVICE))
    for reduce in (None, "add", "multiply"):
        given = {} if reduce is None else {"reduce": reduce}
        x.scatter_(0, outside.view(-1, 1).expand(-1, 70), 5.0, **given)
    assert torch.equal(x.cpu(), whole)


def test_only_indices_count_negative_numbers_from_the_end():
    x, i = torch.arange(1.0, 4.0).to(DEVICE), torch.tensor([-1], device=DEVICE)
    assert x[i].tolist() == [3]
    assert x.index_fill(0, i, 9.0).tolist() == [1, 2, 9]
    assert x.index_put((i,), torch.tensor([9.0], device=DEVICE)).tolist() == [1, 2, 9]
    for read in (x.gather(0, i), x.index_select(0, i)):
        assert math.isnan(read.item())
    for written in (x.scatter(0, i, 9.0), x.index_add(0, i, x[:1]), x.index_copy(0, i, x[:1])):
        assert written.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.float32, torch.bfloat16])
def test_what_is_read_out_of_range_is_loud(dtype):
    x, i = torch.ones(3, dtype=dtype, device=DEVICE), torch.tensor([3, 0, -4], device=DEVICE)
    for found in (x.gather(0, i), x[i], x.index_select(0, i)):
        of = found.cpu()
        assert of[1] == 1
        expected = of[::2].isnan() if dtype.is_floating_point else of[::2] == torch.iinfo(dtype).min
        assert expected.all()


def test_many_negative_indices_are_added_at_the_end():
    same(
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        torch.zeros(5, 3),
        torch.arange(100) % 5 - 5,
        torch.ones(100, 3),
    )


# ------------------------------------------------------------------------------------------------------------------- order


def _elements(dtype, shape):
    torch.manual_seed(0)
    if dtype.is_floating_point:
        x = torch.randn(shape)
        x.view(-1)[::7] = math.nan
        x.view(-1)[1::11] = math.inf
        x.view(-1)[2::11] = -math.inf
        x.view(-1)[3::5] = 0.0
        x.view(-1)[4::13] = -0.0
        x.view(-1)[5::17] *= 1e-40
        return x.to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.randint(low, high, shape, dtype=dtype)
    x.view(-1)[::3] = x.view(-1)[1]
    return x


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
)
@pytest.mark.parametrize("descending", [False, True])
def test_long_rows_are_sorted_as_on_the_cpu(dtype, descending):
    # Several tiles of 2048 keys in each row, the last one not full.
    for shape, dim in (((3, 4999), 1), ((300, 3), 0), ((2, 1025, 2), 1)):
        same(
            lambda x, dim=dim: tuple(torch.sort(x, dim=dim, descending=descending, stable=True)),
            _elements(dtype, shape),
        )


@pytest.mark.parametrize("k", [1, 16, 17, 200, 4999])
@pytest.mark.parametrize("largest", [False, True])
def test_the_top_of_long_rows(k, largest):
    x = torch.randperm(3 * 4999, generator=torch.Generator().manual_seed(0)).float().view(3, 4999)
    same(lambda x: tuple(x.topk(k, -1, largest)), x)


# ------------------------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool])
def test_many_sources_are_scattered_and_the_last_one_wins(dtype):
    torch.manual_seed(0)
    x, source = _elements(dtype, (3, 700, 4)), _elements(dtype, (3, 2100, 4))
    index = torch.randint(700, (3, 2100, 4))
    same(lambda x, i, y: x.scatter(1, i, y), x, index, source)
    same(lambda x, i, y: x.scatter(1, i, True), x, index, source)
    if dtype != torch.bfloat16:
        same(lambda x, i, y: x.scatter_reduce(1, i, y, "amax"), x.nan_to_num(), index, source.nan_to_num())
    rows = torch.randint(700, (2100,))
    same(lambda x, i, y: x.index_copy(1, i, y), x, rows, source)
    same(lambda x, i, y: x.index_put((i % 3, i), y[0, :, 0, None].expand(-1, 4)), x, rows, source)


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin", "mean"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32])
def test_many_sources_are_reduced(reduce, include_self, dtype):
    torch.manual_seed(0)
    x, source = torch.randint(-9, 9, (2, 400, 3)), torch.randint(-9, 9, (2, 1500, 3))
    index = torch.randint(400, (2, 1500, 3))
    index[:, :300] = 7  # one element gets many
    if reduce == "prod":
        source = source.sign() + (source == 0).long()
    x, source = x.to(dtype), source.to(dtype)
    assert x.numel() * 1500 > 1 << 18
    if reduce == "mean" and dtype == torch.float32:
        found = there(x).scatter_reduce(1, there(index), there(source), reduce, include_self=include_self).cpu()
        plain, truth = (
            t.scatter_reduce(1, index, s, reduce, include_self=include_self)
            for t, s in ((x, source), (x.double(), source.double()))
        )
        result = testing.compare("mean", found, truth, plain, 9.0)
        assert result.ok, str(result)
    else:
        same(lambda x, i, y: x.scatter_reduce(1, i, y, reduce, include_self=include_self), x, index, source)


def test_the_gradient_of_a_gather_adds_up_in_a_fixed_order():
    torch.manual_seed(0)
    x, index = torch.randn(4, 900), torch.randint(900, (4, 3000))
    grad = torch.randn(4, 3000)
    index[:, ::3] = 5

    def gradient(x, index, grad):
        x = x.detach().requires_grad_()
        x.gather(1, index).backward(grad)
        return x.grad

    found = [gradient(there(x), there(index), there(grad)).cpu() for _ in range(2)]
    assert torch.equal(*found)
    plain, truth = gradient(x, index, grad), gradient(x.double(), index, grad.double())
    result = testing.compare("gradient", found[0], truth, plain, grad.abs().max().item())
    assert result.ok, str(result)


def test_the_work_grows_with_the_elements():
    """Invocations, which do not depend on how busy a machine is: no kernel of a long row has a loop over the row."""
    device = runtime.device()
    with webgpu.capture() as step:
        x = torch.zeros(1 << 16, device=DEVICE)
        places = x.sort().indices
        x.scatter(0, places, x)
        x.scatter_add(0, places, x)
        x[x > 0] = 0
        x.topk(200)
    assert device is step.device
    modes = {(s.kernel.name, "fn ahead" in s.kernel.text, "load_keys(outer" in s.kernel.text) for s in step.steps}
    assert {name for name, compares, looks in modes if compares or (looks and name == "scatter")} == set()
    assert {"radix_sort", "scatter"} <= {name for name, *_ in modes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("count", [1, 5, 400])
def test_rows_are_written_in_place_and_the_last_one_wins(dtype, count):
    torch.manual_seed(0)
    cache, rows = _elements(dtype, (2, 3, 90, 5)), _elements(dtype, (2, 3, count, 5))
    places = torch.randint(90, (count,))

    def copied(cache, places, rows):
        cache = cache.clone()
        cache[1:].index_copy_(2, places, rows[1:])  # begins in the middle of its memory
        cache[:1, :, places - 90] = rows[:1]
        cache.index_fill_(0, places[:1] % 2, 1)
        cache[:, places[:2] % 3] = cache[:, :1]
        cache.transpose(1, 2).index_copy_(1, places, rows.transpose(1, 2))
        return cache

    same(copied, cache, places, rows)


def test_a_row_of_a_cache_costs_no_copy_of_the_cache():
    cache, row = torch.zeros(4, 4096, 8, device=DEVICE), torch.ones(4, 1, 8, device=DEVICE)
    with webgpu.capture() as step:
        cache.index_copy_(1, torch.arange(5, 6, device=DEVICE), row)
        cache[:, torch.arange(6, 7, device=DEVICE)] = row
    assert max(math.prod(s.groups) for s in step.steps) == 1
    assert cache.sum().item() == 64


# -------------------------------------------------------------------------------------------------------------------- masks


def test_one_value_is_written_through_a_mask_without_reading_it():
    x = torch.randn(6, 4, 3)
    mask, rows = x[..., 0] > 0, torch.randn(3)
    reads = runtime.device().counts.readbacks
    y = there(x)
    y[there(x) > 0.5] = 0
    y[there(mask)] = there(rows)
    y[:, there(mask[0])] = 2.0
    assert runtime.device().counts.readbacks == reads
    expected = x.clone()
    expected[x > 0.5] = 0
    expected[mask] = rows
    expected[:, mask[0]] = 2.0
    assert torch.equal(y.cpu(), expected)


def test_a_masked_write_is_captured():
    x = torch.randn(50, device=DEVICE)
    with webgpu.capture(x) as step:
        y = x * 2
        y[y > 0] = 0
        y[y < -1] = -1.0
    new = torch.randn(50)
    step(new)
    assert torch.equal(y.cpu(), (new * 2).clamp(-1, 0))


def test_a_mask_that_chooses_nothing_needs_no_source():
    same(lambda x, m, y: x.masked_scatter(m, y), torch.randn(3), torch.zeros(3, dtype=torch.bool), torch.zeros(0))


def test_values_for_each_place_of_a_mask():
    x, mask = torch.zeros(4, 3), torch.tensor([True, False, True, True])
    same(lambda x, m, y: x.index_put((m,), y), x, mask, torch.randn(3, 3))
    same(lambda x, m, y: x.index_put((m,), y), x, mask, torch.randn(3, 1))
    same(lambda x, m, y: x.index_put((m,), y, accumulate=True), x, mask, torch.randn(3))
    for device in ("cpu", DEVICE):
        with pytest.raises((RuntimeError, IndexError)):
            x.to(device)[mask.to(device)] = torch.ones(2, 3, device=device)
        with pytest.raises(IndexError):
            x.to(device)[mask[:2].to(device)] = 1.0

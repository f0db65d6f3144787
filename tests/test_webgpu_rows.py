"""Row kernels on WebGPU in the shapes that conformance cases are too small for: workgroups that take several rows, rows read
ahead, rows that are walked; and at the ends of bfloat16, where NaN must stay NaN and no power may overflow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import headwise as hw
from headwise import reference
from headwise.backends.webgpu import cross_entropy, norms, rows, runtime
from headwise.config import settings
from headwise.webgpu import array

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CLOSE = {
    F32: {"rtol": 3e-6, "atol": 1e-6}, F16: {"rtol": 1e-3, "atol": 1e-6}, BF16: {"rtol": 8e-3, "atol": 1e-6},
}  # fmt: skip
INF = float("inf")


@pytest.fixture(autouse=True)
def new_records():
    """Calls are recorded in the tiles of the test; the next test does not replay them."""
    settings.changed()
    yield
    settings.changed()


def tiled(monkeypatch, module, *tile):
    monkeypatch.setattr(rows, "tile", lambda device, width, words: rows.RowTile(*tile))
    if module is cross_entropy:
        monkeypatch.setattr(cross_entropy, "WALKED_BY_FEW", 0)


# --------------------------------------------------------------------------------------- several rows of one workgroup


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("width", [512, 500, 333], ids=["whole", "padded", "odd"])
@pytest.mark.parametrize("walks", [False, True], ids=["held", "walked"])
@pytest.mark.parametrize("turns", [3, 50])
def test_cross_entropy_of_several_rows_in_turn(monkeypatch, turns, walks, width, dtype):
    """Some of them ignored or out of range: neither moves what was read ahead to another row.

    In bfloat16 whole rows take turns only under a cap: without one there are many small workgroups.
    """
    cap = 50.0 if dtype is BF16 else None
    tiled(monkeypatch, cross_entropy, 32, 32, *((2, True) if walks else (4, False)))
    monkeypatch.setattr(cross_entropy, "ENOUGH_GROUPS", 1)
    monkeypatch.setattr(cross_entropy, "MOST_TURNS", turns)
    torch.manual_seed(turns)
    logits, targets = (3 * torch.randn(23, width)).to(dtype), torch.randint(0, width, (23,))
    targets[[0, 4, 5, 11, 22]] = -100
    targets[[7, 12]] = width
    logits[5] = torch.nan  # of a row that is ignored
    assert cross_entropy._groups(23, cross_entropy._tile(None, width, dtype, False), False) < 23
    loss, grad = hw.cross_entropy_forward_backward(logits, targets, reduction="none", softcap=cap, backend="webgpu")
    counted, bad = targets != -100, targets == width
    good = counted & ~bad
    x = logits[good].double().requires_grad_()
    z = x if cap is None else cap * torch.tanh(x / cap)
    expected = torch.nn.functional.cross_entropy(z, targets[good], reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(loss[good].double(), expected.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(grad[good].double(), x.grad, **CLOSE[dtype])
    assert loss[bad].isnan().all()
    assert grad[bad].isnan().all()
    assert not loss[~counted].any()
    assert not grad[~counted].any()
    # The other two forms are the same kernel, each with what it needs.
    wanted = logits.clone().requires_grad_()
    apart = hw.cross_entropy(wanted, targets, reduction="none", softcap=cap, backend="webgpu")
    apart[good].sum().backward()
    torch.testing.assert_close(apart[good], loss[good], rtol=0, atol=0)
    torch.testing.assert_close(wanted.grad[good], grad[good], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("width", [512, 500, 333], ids=["whole", "padded", "odd"])
@pytest.mark.parametrize("tile", [(32, 32, 4, False), (32, 128, 4, False), (16, 32, 8, False)], ids=str)
def test_rms_norm_backward_of_several_rows_in_turn(monkeypatch, tile, width, dtype):
    """One row ahead and two, the weight kept in registers and not (8 vectors), more rows and fewer than shares."""
    tiled(monkeypatch, norms, *tile)
    monkeypatch.setattr(norms, "ROWS_PER_PARTIAL", 1000)
    monkeypatch.setattr(norms, "FEWEST_PARTIALS", 4)
    for count in (1, 2, 13, 40):
        torch.manual_seed(count)
        x, grad, weight = (torch.randn(*shape).to(dtype) for shape in ((count, width), (count, width), (width,)))
        dx, dweight = hw.rms_norm_backward(grad, x, weight, backend="webgpu")
        leaves = x.double().requires_grad_(), weight.double().requires_grad_()
        reference.rms_norm(*leaves).backward(grad.double())
        slack = {"rtol": CLOSE[dtype]["rtol"], "atol": 1e-5}
        torch.testing.assert_close(dx.double(), leaves[0].grad, **slack)
        torch.testing.assert_close(dweight.double(), leaves[1].grad, **slack)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("width", [512, 333], ids=["whole", "odd"])
@pytest.mark.parametrize("tile", [(32, 128, 4, False), (16, 32, 8, False), (16, 32, 2, True)], ids=str)
def test_other_norms_of_several_rows_in_turn(monkeypatch, tile, width, dtype):
    """As above and, in the last tile, rows that are walked."""
    tiled(monkeypatch, norms, *tile)
    monkeypatch.setattr(norms, "ROWS_PER_PARTIAL", 1000)
    monkeypatch.setattr(norms, "FEWEST_PARTIALS", 4)
    slack = {"rtol": CLOSE[dtype]["rtol"], "atol": 2e-5 if dtype == F32 else 2e-2}
    for count in (1, 13, 40):
        torch.manual_seed(count)
        x, more, grad, grad_h = (torch.randn(count, width).to(dtype) for _ in range(4))
        weight, bias = (torch.randn(width).to(dtype) for _ in range(2))
        leaves = [v.double().requires_grad_() for v in (x, weight, bias)]
        reference.layer_norm(*leaves).backward(grad.double())
        for ours, leaf in zip(hw.layer_norm_backward(grad, x, weight, bias, backend="webgpu"), leaves, strict=True):
            torch.testing.assert_close(ours.double(), leaf.grad, **slack)
        y, h = hw.add_rms_norm(x, more, weight, backend="webgpu")
        assert torch.equal(h, x + more)
        leaves = [v.double().requires_grad_() for v in (h, weight)]
        expected = reference.rms_norm(*leaves)
        torch.testing.assert_close(y.double(), expected.detach(), **slack)
        torch.autograd.backward((expected, leaves[0]), (grad.double(), grad_h.double()))
        dx, dresidual, dweight = hw.add_rms_norm_backward(grad, grad_h, h, weight, backend="webgpu")
        assert dx is dresidual
        torch.testing.assert_close(dx.double(), leaves[0].grad, **slack)
        torch.testing.assert_close(dweight.double(), leaves[1].grad, **slack)


# ------------------------------------------------------------------------------------------------- the ends of bfloat16

ROWS = {
    "one NaN": lambda x: x.index_fill_(0, torch.tensor([3]), torch.nan),
    "one +inf": lambda x: x.index_fill_(0, torch.tensor([3]), INF),
    "one -inf": lambda x: x.index_fill_(0, torch.tensor([3]), -INF),
    "all -inf": lambda x: x.fill_(-INF),
    "all highest": lambda x: x.fill_(3.3e38),
    "all lowest": lambda x: x.fill_(-3.3e38),
    "both ends": lambda x: x.index_fill_(0, torch.tensor([3, 9]), 3e38).index_fill_(0, torch.tensor([5]), -3e38),
    **{f"of size {size:g}": lambda x, size=size: x.mul_(size) for size in (300.0, 9.9e5, 1.1e6, 1e9, 1e30)},
    **{f"all {size:g}": lambda x, size=size: x.fill_(size) for size in (333.0, 9.9e5, 1.1e6, 1e30)},
}


@pytest.mark.parametrize("width", [64, 1024, 2500])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_softmax_and_cross_entropy_of_rows_of_any_size(dtype, width):
    torch.manual_seed(0)
    x = torch.stack([change(torch.randn(width)) for change in ROWS.values()]).to(dtype)
    expected = torch.softmax(x.double(), -1)
    torch.testing.assert_close(
        hw.softmax(x, backend="webgpu").double(),
        torch.where((x == -INF).all(-1, keepdim=True), 0.0, expected),
        equal_nan=True,
        **CLOSE[dtype],
    )
    targets = torch.randint(0, width, (len(x),))
    loss, grad = hw.cross_entropy_forward_backward(x, targets, reduction="none", backend="webgpu")
    expected[torch.arange(len(x)), targets] -= 1
    torch.testing.assert_close(grad.double(), expected, equal_nan=True, **CLOSE[dtype])
    # Differences first: far from 0 a float64 has no room for the logarithm of a total.
    away = x.double() - x.double().max(-1, keepdim=True).values
    known = away.isfinite().all(-1)
    exact = torch.logsumexp(away, -1) - away[torch.arange(len(x)), targets]
    torch.testing.assert_close(loss[known].double(), exact[known], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("walks", [False, True], ids=["held", "walked"])
@pytest.mark.parametrize("first", [-INF, -1e4, -300.0, -90.0, -60.0, -27.0, 0.0, 30.0])
def test_cross_entropy_where_few_values_say_little(monkeypatch, first, walks, dtype):
    """16 bits take their reference from a thread's first vectors: here all of those are far below the others, or above."""
    tiled(monkeypatch, cross_entropy, 32, 32, *((4, True) if walks else (8, False)))
    torch.manual_seed(0)
    x = torch.randn(6, 1024)
    x[:, : 32 * 8] += first  # two vectors of each thread
    x[2] = -INF
    x[2, 700] = 5.0  # one value alone
    x[3, 1000] += 40.0  # a sure row, and its target: hardly any loss
    x[4, 330] = torch.nan
    x = x.to(dtype)
    targets = torch.tensor([5, 600, 700, 1000, 7, 900])
    loss, grad = hw.cross_entropy_forward_backward(x, targets, reduction="none", backend="webgpu")
    expected = torch.softmax(x.double(), -1)
    at_target = expected.log()[torch.arange(6), targets]
    expected[torch.arange(6), targets] -= 1
    torch.testing.assert_close(grad.double(), expected, equal_nan=True, **CLOSE[dtype])
    known = torch.tensor([1, 2, 3, 5])
    torch.testing.assert_close(loss[known].double(), -at_target[known], rtol=2e-6, atol=3e-6)
    assert loss[4].isnan()
    # The other kernels read what this one kept of a row.
    again = array(x).requires_grad_()
    hw.cross_entropy(again, array(targets), reduction="none").backward(array(torch.ones(6)))
    torch.testing.assert_close(again.grad.torch(), grad, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("base", [0.0, 100.0, -100.0, 1000.0, 8000.0, 30000.0, -30000.0])
def test_cross_entropy_where_references_are_large_and_near(monkeypatch, base, dtype):
    """The highest value is a little above the reference, and the target below it or above: no digit of either may go."""
    tiled(monkeypatch, cross_entropy, 32, 32, 8, False)
    step = max(2.0, abs(base) * 2.0 ** (-9 if dtype is F16 else -6))  # some roundings of such numbers
    x = torch.full((4, 1024), base) - step * torch.randint(0, 2, (4, 1024), generator=torch.Generator().manual_seed(0))
    x[:, 700] = base + 4.0 if dtype is F16 and abs(base) < 5000 else base + step
    x[1, 900:] = base - step  # what another subgroup has seen is lower
    targets = torch.tensor([700, 3, 901, 500])
    x = x.to(dtype)
    loss, grad = hw.cross_entropy_forward_backward(x, targets, reduction="none", backend="webgpu")
    away = x.double() - x.double().max(-1, keepdim=True).values
    exact = torch.logsumexp(away, -1) - away[torch.arange(4), targets]
    torch.testing.assert_close(loss.double(), exact, rtol=2e-6, atol=3e-6)
    expected = torch.softmax(away, -1)
    expected[torch.arange(4), targets] -= 1
    torch.testing.assert_close(grad.double(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("limit", [256, 384, 512, 768, 896, 1024])
def test_threads_of_a_long_row_are_a_power_of_two(limit):
    device = runtime.device()
    limited = SimpleNamespace(capabilities=device.capabilities._replace(workgroup_threads=limit))
    for width in (8192, 16384, 50304, 65536, 70000, 131072):
        for sampled in (False, True):
            tile = cross_entropy._tile(limited, width, BF16, sampled)
            assert tile.threads <= limit
            assert tile.threads & (tile.threads - 1) == 0
            assert tile.lanes & (tile.lanes - 1) == 0


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, INF, -INF])
def test_what_is_not_finite_stays_in_its_row(bad, dtype):
    """Rows without it are written another way than rows with it."""
    torch.manual_seed(0)
    x, grad, weight = (torch.randn(*shape).to(dtype) for shape in ((5, 256), (5, 256), (256,)))
    probs = torch.softmax(x.float(), -1).to(dtype)
    spoiled = grad.clone()
    spoiled[2, 17] = bad
    struck = torch.zeros(5, 1, dtype=torch.bool)
    struck[2] = True
    for clean, dirty in (
        [hw.softmax_backward(probs, g, backend="webgpu") for g in (grad, spoiled)],
        [hw.rms_norm_backward(g, x, weight, backend="webgpu")[0] for g in (grad, spoiled)],
    ):
        assert not clean.isnan().any()
        assert torch.equal(dirty[~struck[:, 0]], clean[~struck[:, 0]])
        assert dirty[2, 17].isnan()
        assert not dirty[2].isfinite().any()


def test_a_gradient_that_is_infinite_is_so_in_bfloat16():
    """Infinite where the probability is not 0, NaN where it is: no pattern of bits turns into another."""
    logits = torch.tensor([[0.0, 0.0, -1e4, 0.0]]).to(BF16)
    x = array(logits).requires_grad_()
    hw.cross_entropy(x, array(torch.tensor([0])), reduction="none").backward(array(torch.tensor([INF])))
    expected = torch.tensor([[torch.nan, INF, torch.nan, INF]]).to(BF16)
    torch.testing.assert_close(x.grad.torch(), expected, equal_nan=True)


# ----------------------------------------------------------------------------------------------------------- what is chosen


def test_tiles_of_cross_entropy_by_classes():
    device = runtime.device()
    threads = min(device.capabilities.workgroup_threads, rows.LONGEST_THREADS)
    if threads > rows.THREADS:
        assert cross_entropy._tile(device, 32768, BF16, sampled=False) == rows.RowTile(256, 256, 8, True)
        assert cross_entropy._tile(device, 32768, BF16, sampled=True) == rows.RowTile(512, 512, 16, True)
    for sampled in (True, False):
        assert cross_entropy._tile(device, 4096, BF16, sampled).walks is False
        longest = cross_entropy._tile(device, 131072, BF16, sampled)
        assert (longest.walks, longest.threads) == (True, threads)
    for classes in (4097, 9000, 16384, 50304, 65536, 151936):
        tile = cross_entropy._tile(device, classes, BF16, sampled=True)
        assert tile.held <= 16
        if threads == rows.LONGEST_THREADS:
            assert tile.blocks(classes) == {50304: 2, 65536: 2, 151936: 3}.get(classes, 1)


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 4, 7, 8191])
@pytest.mark.parametrize("count", [0, 1, 2, 9, 8192])
def test_pieces_are_of_one_size(count, rows_at_once):
    """But for the last: never many rows and then very few."""
    width = 256
    limits = runtime.device().capabilities._replace(binding_bytes=512 + 2 * width * rows_at_once)
    storage = SimpleNamespace(size=1 << 40)
    x = SimpleNamespace(shape=(count, width), strides=(width, 1), itemsize=2, storage=storage)
    pieces = rows.pieces(SimpleNamespace(capabilities=limits), x)
    assert [row for first, length in pieces for row in range(first, first + length)] == list(range(count))
    sizes = [length for _, length in pieces]
    assert max(sizes, default=0) <= rows_at_once
    unit = 4 if rows_at_once >= 4 else 2 if rows_at_once >= 2 else 1
    assert all(length == sizes[0] and length % unit == 0 for length in sizes[:-1])
    assert len(pieces) == -(-count // (rows_at_once // unit * unit))
    assert not sizes or sizes[0] - sizes[-1] < unit * len(sizes)

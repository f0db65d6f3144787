"""``device="webgpu"``: what is not there says so, and nothing is written to the wrong place, or lost, in silence."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headwise import testing, webgpu
from headwise.backends.webgpu.capture_errors import CaptureError

DEVICE = "webgpu"


@pytest.fixture
def fallback():
    webgpu.fallback(True)
    yield
    webgpu.fallback(False)


# ---------------------------------------------------------------------------------------------------------------- the CPU


@pytest.mark.usefixtures("fallback")
def test_what_an_operator_on_the_cpu_writes_comes_back():
    a = torch.arange(6.0).view(2, 3)
    out = torch.zeros(2, 2, device=DEVICE)
    assert torch.mm(a.to(DEVICE), a.t().to(DEVICE), out=out) is out
    assert torch.equal(out.cpu(), a @ a.t())
    total = torch.zeros(3, device=DEVICE)
    assert torch.sum(a.to(DEVICE), 0, out=total) is total
    assert torch.equal(total.cpu(), a.sum(0))
    x = torch.tensor([1.0, 2.0], device=DEVICE)
    assert x.lgamma_() is x
    assert x.tolist() == [0, 0]
    values, places = torch.zeros(2, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    torch.kthvalue(a.to(DEVICE), 2, out=(values, places))
    assert (values.tolist(), places.tolist()) == ([1, 4], [1, 1])


@pytest.mark.usefixtures("fallback")
def test_an_embedding_with_a_largest_norm_shrinks_its_rows():
    table = torch.randn(5, 8) * 4
    there = table.to(DEVICE)
    ids = torch.tensor([1, 3])
    found = F.embedding(ids.to(DEVICE), there, max_norm=1.0)
    expected = F.embedding(ids, table, max_norm=1.0)
    assert torch.allclose(found.cpu(), expected, atol=1e-6)
    assert torch.allclose(there.cpu(), table, atol=1e-6)


def test_an_out_of_another_size_is_refused():
    a = torch.eye(2, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"a tensor of shape \(3, 3\) on WebGPU.* cannot become \(2, 2\)"):
        torch.mm(a, a, out=torch.zeros(3, 3, device=DEVICE))


@pytest.mark.usefixtures("fallback")
def test_results_that_the_cpu_makes_for_empty_ones():
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    for mine, expected in zip(x.to(DEVICE).median(0), x.median(0), strict=True):
        assert torch.equal(mine.cpu(), expected)


# -------------------------------------------------------------------------------------------------------- several devices


_MIXED = {
    "embedding": (lambda w: F.embedding(torch.tensor([1]), w), "aten.embedding.default", "indices on cpu"),
    "cross_entropy": (
        lambda w: F.cross_entropy(w, torch.tensor([0, 1, 1])), "aten.nll_loss_forward.default", "target on cpu",
    ),
    "index_select": (lambda w: w.index_select(0, torch.tensor([1])), "aten.index_select.default", "index on cpu"),
    "gather": (lambda w: w.gather(0, torch.tensor([[1, 0]])), "aten.gather.default", "index on cpu"),
    "index of a CPU tensor": (lambda w: torch.ones(3)[w[:, 0].long()], "aten.index.Tensor", "self on cpu"),
    "cat": (lambda w: torch.cat([w, torch.ones(3, 2)]), "aten.cat.default", "tensors[1] on cpu"),
    "index_put": (
        lambda w: w.index_put_((torch.tensor([0, 1], device=DEVICE),), torch.ones(2, 2)), "aten.index_put_.default",
        "values on cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _MIXED)
def test_tensors_on_two_devices_are_named(name):
    call, operator, where = _MIXED[name]
    with pytest.raises(RuntimeError, match=re.escape(operator)) as error:
        call(torch.ones(3, 2, device=DEVICE))
    assert where in str(error.value)
    assert "webgpu" in str(error.value)


# ------------------------------------------------------------------------------------------------------------ shared memory


_WRITES = {
    "add_": lambda x: x.add_(1),
    "copy_": lambda x: x.copy_(torch.ones(3, device=DEVICE)),
    "copy_ from the CPU": lambda x: x.copy_(torch.ones(3)),
    "out": lambda x: torch.exp(torch.ones(3, device=DEVICE), out=x),
    "uniform_": lambda x: x.uniform_(),
    "scatter_": lambda x: x.scatter_(0, torch.tensor([0], device=DEVICE), 1.0),
    "index_put_": lambda x: x.__setitem__(torch.tensor([0], device=DEVICE), 1.0),
    "cumsum_": lambda x: x.cumsum_(0),
}


@pytest.mark.parametrize("name", _WRITES)
def test_nothing_is_written_through_elements_that_share_memory(name):
    x = torch.zeros(1, device=DEVICE)
    with pytest.raises(RuntimeError, match="single memory location"):
        _WRITES[name](x.expand(3))
    assert x.item() == 0
    assert x.expand(3).fill_(2).tolist() == [2, 2, 2]  # the same for all: PyTorch allows it, too


# ------------------------------------------------------------------------------------------------------------ captures


@pytest.mark.parametrize(
    "used", [lambda x, n: x * n, lambda x, n: x + n.to(DEVICE), lambda x, n: torch.empty_like(x).fill_(n)]
)
def test_a_number_on_the_cpu_that_changed_since_its_capture_is_not_replayed(used):
    x, number = torch.ones(4, device=DEVICE), torch.tensor(2.0)
    with webgpu.capture() as step:
        y = used(x, number)
    expected = y.tolist()
    step()
    assert y.tolist() == expected
    number.fill_(3.0)
    with pytest.raises(CaptureError, match=r"held 2.0 and holds 3.0 now"):
        step()


# ---------------------------------------------------------------------------------------------------- compiled, cells


def test_a_compiled_write_to_a_slice():
    def written(cache, rows):
        cache[:, 2:4] = rows
        return cache.sum(1)

    cache, rows = torch.randn(3, 6), torch.randn(3, 2)
    there = cache.to(DEVICE)
    found = torch.compile(written, backend="aot_eager", fullgraph=True)(there, rows.to(DEVICE))
    assert torch.allclose(found.cpu(), written(cache, rows), atol=1e-6)
    assert torch.equal(there.cpu(), cache)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_inductor_is_refused_by_name():
    model = nn.Linear(4, 4).to(DEVICE)
    with pytest.raises(Exception, match=r"no inductor backend for webgpu.*aot_eager"):
        torch.compile(model)(torch.ones(2, 4, device=DEVICE))
    assert torch.compile(model, backend="aot_eager")(torch.ones(2, 4, device=DEVICE)).shape == (2, 4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers_train_as_on_the_cpu(kind, bias):
    torch.manual_seed(0)
    model = kind(5, 7, num_layers=2, bias=bias, batch_first=True)
    x, grad = torch.randn(3, 11, 5), torch.randn(3, 11, 7)
    results = {}
    for name, device, dtype in (("truth", "cpu", torch.float64), ("plain", "cpu", None), ("ours", DEVICE, None)):
        copy = kind(5, 7, num_layers=2, bias=bias, batch_first=True)
        copy.load_state_dict(model.state_dict())
        copy = copy.to(device=device, dtype=dtype)
        given = x.clone().to(device=device, dtype=dtype).detach().requires_grad_()
        y, _ = copy(given)
        y.backward(grad.to(device=device, dtype=dtype))
        results[name] = [t.detach().cpu() for t in (y, given.grad, *(p.grad for p in copy.parameters()))]
    for ours, plain, truth in zip(results["ours"], results["plain"], results["truth"], strict=True):
        result = testing.compare("cell", ours, truth, plain, 1.0)
        assert result.ok, str(result)

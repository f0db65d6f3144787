"""Every op on resident arrays: nothing crosses the bus, and the result is bit by bit that of the call on CPU tensors."""

from __future__ import annotations

import pytest
import torch

from headwise.cases import SUITES
from headwise.testing import Maker
from headwise.webgpu import Array, array, counts

CASES = [(suite, case) for suite in SUITES.values() for case in suite.cases if "quick" in case.tags]


def placed(values):
    """The same arguments with every tensor on the GPU."""

    def place(x):
        if isinstance(x, torch.Tensor):
            return array(x)
        return type(x)(place(y) for y in x) if isinstance(x, (list, tuple)) else x

    return {name: place(x) for name, x in values.items()}


def leaves_of(suite, values):
    found = {}
    for name in suite.differentiable:
        value = values.get(name)
        for i, x in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(x, torch.Tensor):
                found[name, i] = x.requires_grad_()
    return found


def run(suite, values, grads, backend, differentiate=True):
    """Outputs and gradients, all from one backward."""
    leaves = leaves_of(suite, values) if differentiate else {}
    outputs = suite.run(values, backend)
    targets = {name: out for name, out in outputs.items() if out.requires_grad}
    results = {name: out.detach() for name, out in outputs.items()}
    if targets:
        given = [grads(name, out) for name, out in targets.items()]
        found = torch.autograd.grad(list(targets.values()), list(leaves.values()), given, allow_unused=True)
        results.update(zip(leaves, found, strict=True))
    return results


@pytest.mark.parametrize(("suite", "case"), [pytest.param(s, c, id=f"webgpu-{s.op}-{c.name}") for s, c in CASES])
def test_resident_arrays_give_the_same_bits(suite, case):
    def arguments():
        return suite.make(Maker(torch.bfloat16, torch.device("cpu"), 1), **case.params)

    kept = {}

    def gradient(name, out):
        if name not in kept:
            kept[name] = torch.randn(out.shape, generator=torch.Generator().manual_seed(len(kept))).to(out.dtype)
            kept[name, "there"] = array(kept[name])
        return kept[name, "there"] if isinstance(out, Array) else kept[name]

    differentiate = "page_size" not in case.params
    expected = run(suite, arguments(), gradient, "webgpu", differentiate)
    there = placed(arguments())
    before = counts()
    ours = run(suite, there, gradient, None, differentiate)
    after = counts()
    assert after.readbacks == before.readbacks
    assert after.uploads == before.uploads or isinstance(case.params.get("rows"), list)
    assert ours.keys() == expected.keys()
    for name, x in ours.items():
        if x is None:
            assert expected[name] is None
            continue
        assert isinstance(x, Array)
        assert torch.equal(x.torch().nan_to_num(12345.0), expected[name].nan_to_num(12345.0)), name


def test_gradients_over_pages_are_those_of_the_cpu():
    """The pages are gathered by PyTorch's operators."""
    suite = SUITES["attention_decode"]

    def values():
        return suite.make(Maker(torch.float32, torch.device("cpu")), **suite.case("paged").params)

    expected = run(suite, values(), lambda name, out: torch.ones_like(out), "cpu")
    found = run(suite, placed(values()), lambda name, out: torch.ones_like(out), None)
    for name, x in expected.items():
        assert (x is None) == (found[name] is None)
        if x is not None:
            torch.testing.assert_close(found[name].cpu(), x)

"""Eager calls go past PyTorch's dispatcher where nobody sees it. Everything that could see it still does."""

from __future__ import annotations

import pytest
import torch
from attention_calls import on_every_backend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.backends import registry
from headwise.ops import softmax as module
from headwise.ops._cache import Cache

X = torch.randn(3, 10)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(module._forward, "_entries", Cache())


@pytest.fixture
def dispatched(monkeypatch):
    """The calls of softmax that went through the operator."""
    seen = []
    through = module._forward.through_operator

    def noted(*args):
        seen.append(args)
        return through(*args)

    monkeypatch.setattr(module._forward, "through_operator", noted)
    return seen


def test_a_plain_call_goes_past_the_operator(dispatched):
    for x in (X, X.clone().requires_grad_(), torch.nn.Parameter(X), X.t(), X[:, 3:]):
        torch.testing.assert_close(hw.softmax(x), torch.softmax(x, -1))
        with torch.no_grad():
            assert not hw.softmax(x).requires_grad
    assert not dispatched


def test_modes_see_the_operator(dispatched):
    functions, operators = [], []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            functions.append(function)
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operators.append(function)
            return function(*args, **(kwargs or {}))

    with Functions():
        hw.softmax(X)
    with Operators():
        hw.softmax(X)
    op = torch.ops.headwise.softmax_forward.default
    assert op in functions
    assert op in operators
    assert len(dispatched) == 2


def test_profiler_sees_the_operator():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        hw.softmax(X)
    assert "headwise::softmax_forward" in {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's tracer calls what PyTorch deprecates
def test_tracer_sees_the_operator():
    traced = torch.jit.trace(hw.softmax, X)
    assert "headwise::softmax_forward" in str(traced.graph)


def test_transforms_see_the_operator(dispatched):
    torch.func.grad(lambda x: hw.softmax(x).square().sum())(X)
    assert dispatched


def test_tensor_subclasses_see_the_operator(dispatched):
    class Own(torch.Tensor):
        pass

    assert type(hw.softmax(X.as_subclass(Own))) is Own
    assert dispatched


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_is_refused():
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            hw.softmax(x)


def test_negative_views_have_the_values_they_show():
    x = torch.view_as_complex(torch.randn(3, 10, 2)).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(hw.softmax(x), torch.softmax(x.resolve_neg(), -1))


def test_inference_mode_gives_inference_tensors():
    x = X.clone().requires_grad_()
    with torch.inference_mode():
        y = hw.softmax(x)
    assert y.is_inference()
    assert not y.requires_grad


def test_below_autograd_nothing_is_recorded():
    x = X.clone().requires_grad_()
    with torch._C._AutoDispatchBelowAutograd():
        y = hw.softmax(x)
    assert not y.requires_grad


@pytest.mark.parametrize("gradient", [False, True])
def test_autocast_does_not_reach_inside(gradient, monkeypatch):
    inside = []
    weight = torch.randn(10)

    def run(x, *grad):
        inside.append((x @ weight).dtype)
        return torch.softmax(x, -1)

    monkeypatch.setattr(registry, "recorder", lambda backend, name: lambda args: run)
    with torch.autocast("cpu", torch.bfloat16):
        y = hw.softmax(X.clone().requires_grad_(gradient))
        if gradient:
            y.sum().backward()
    assert y.requires_grad == gradient
    assert inside == [torch.float32] * (1 + gradient)


def test_autograd_notices_a_changed_input():
    x = torch.randn(3, 10, requires_grad=True)
    weight = torch.ones(10)
    scaled = x * 1
    y = hw.rms_norm(scaled, weight)
    scaled += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_results_can_be_changed_in_place():
    x = X.clone().requires_grad_()
    for y in (hw.softmax(X), hw.rms_norm(x)):
        version = y._version
        y.add_(1)
        assert y._version == version + 1


IDS = torch.tensor([[2, 0, 9], [1, 1, 4]])
OTHERS = {
    "embedding": lambda x, how: hw.embedding(IDS, x.T, **how),
    "cross_entropy": lambda x, how: hw.cross_entropy(x.expand(2, 3, 10), IDS, reduction="none", **how),
    "linear_cross_entropy": lambda x, how: hw.linear_cross_entropy(
        x.expand(2, 3, 10), torch.eye(10).to(x), IDS, reduction="none", return_logprobs=True, return_entropy=True, **how
    ),
    "layer_norm": lambda x, how: hw.layer_norm(x, **how),
    "add_rms_norm": lambda x, how: hw.add_rms_norm(x, x, torch.ones(10).to(x), **how),
    "glu": lambda x, how: hw.glu(x, **how),
    "rope": lambda x, how: hw.rope(x[:, None], torch.ones(3, 5), torch.zeros(3, 5), **how),
    "transpose": lambda x, how: hw.transpose(x, **how),
    "attention_probs": lambda x, how: hw.attention_probs(x[None, None], x[None, None], **how),
    "merge_attention": lambda x, how: hw.merge_attention([x[None]] * 2, [x.new_zeros(1, 3)] * 2, **how),
}  # those of attention and decoding are in test_attention_inputs.py


@on_every_backend
@pytest.mark.parametrize("name", OTHERS)
def test_no_result_is_a_view(name, backend):
    """Autograd lets nobody change a view that an op has made: CTRL scales its embeddings in place."""
    dtypes = (torch.float32, torch.float64) if backend == "cpu" else (torch.float32,)
    for dtype in dtypes:
        results = OTHERS[name](X.to(dtype, copy=True).requires_grad_(), {"backend": backend})
        for y in results if isinstance(results, tuple) else (results,):
            assert y.requires_grad
            y.mul_(2)


def test_saved_tensor_hooks_are_called():
    packed = []

    def pack(x):
        packed.append(x.shape)
        return x

    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = hw.softmax(x)
    assert packed == [X.shape]
    y.sum().backward()

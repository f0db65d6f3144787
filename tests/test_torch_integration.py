"""The ops as PyTorch sees them: opcheck, torch.compile, torch.export, and the corners of autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import direct_attention as direct
import pytest
import torch
from attention_calls import ints, maker, on_every_backend, ours, theirs
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.config import settings


class Recorder(TorchDispatchMode):
    """Keeps the arguments of the headwise operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "headwise":
            assert not kwargs
            self.calls.setdefault(func._schema.name, []).append(args)
        return func(*args, **(kwargs or {}))


def sample_calls(backend: str) -> list[Callable[[], Any]]:
    """Public calls that together reach every operator, in their forms with and without optional arguments."""
    m = maker(backend)
    q, k, v = (m.normal(2, 4, 19, 8), m.normal(2, 2, 23, 8), m.normal(2, 2, 23, 6))
    bias, sink, mask = m.normal(4, 19, 23), m.normal(4), m.coin(2, 1, 1, 23, chance=0.8)
    packed = (m.normal(20, 4, 8), m.normal(25, 2, 8), m.normal(25, 2, 6))
    bounds = (ints(backend, 0, 7, 20), ints(backend, 0, 12, 25), 13, 13)
    for t in (q, k, v, bias, sink, *packed):
        t.requires_grad_()
    pages = m.integers(0, 6, 2, 3, dtype=torch.int32)
    x, weight, table = (m.normal(*s).requires_grad_() for s in ((5, 12), (12,), (9, 12)))
    ids, targets = m.integers(0, 9, 2, 3), m.integers(0, 12, 5)
    parts = [hw.attention(q, k, v, mask=mask, return_lse=True, backend=backend) for _ in range(2)]
    outs, lses = ([t.detach().requires_grad_() for t in pair] for pair in zip(*parts, strict=True))
    lengths = ints(backend, 23, 11)
    angles, fewer = (m.normal(23, 3), m.normal(23, 3)), targets % 9

    def plain() -> list[Tensor]:
        return [hw.attention(q, k, v, causal=True, window=(7, 0), backend=backend)]

    def every_feature() -> tuple[Tensor, ...]:
        return hw.attention(
            q, k, v, mask=mask, bias=bias, sink=sink, softcap=3.0, kv_lengths=lengths, return_lse=True, backend=backend
        )

    return [
        plain,
        every_feature,
        lambda: hw.attention_varlen(*packed, *bounds, sink=sink, causal=True, return_lse=True, backend=backend),
        lambda: [hw.attention_decode(q[:, :, 0].detach(), k.detach(), v.detach(), lengths, backend=backend)],
        lambda: hw.attention_decode(
            q.detach()[:, :, :2],
            m.normal(6, 2, 8, 8),
            m.normal(6, 2, 8, 6),
            ints(backend, 24, 3),
            block_table=pages,
            sink=sink.detach(),
            return_lse=True,
            backend=backend,
        ),
        lambda: [hw.attention_probs(q, k, rows=[0, -1], bias=bias, sink=sink, backend=backend)],
        lambda: hw.merge_attention(outs, lses, backend=backend),
        lambda: [hw.softmax(x, backend=backend)],
        lambda: [hw.rms_norm(x, weight, backend=backend)],
        lambda: [hw.embedding(ids, table, backend=backend)],
        lambda: [hw.cross_entropy(x, targets, backend=backend)],
        lambda: hw.cross_entropy_forward_backward(x.detach(), targets, backend=backend),
        lambda: [hw.transpose(x, backend=backend)],
        lambda: [hw.layer_norm(x, weight, backend=backend)],
        lambda: hw.add_rms_norm(x, x.detach(), weight, backend=backend),
        lambda: [hw.glu(x, x.detach(), backend=backend)],
        lambda: [hw.glu(x, activation="gelu", backend=backend)],
        lambda: hw.rope((q, k[:, :, :19]), *angles, backend=backend),
        lambda: [hw.linear_cross_entropy(x, table, fewer, backend=backend)],
        lambda: hw.linear_cross_entropy(x, table, fewer, return_logprobs=True, return_entropy=True, backend=backend),
        lambda: hw.linear_cross_entropy_forward_backward(x.detach(), table.detach(), fewer, backend=backend)[:3],
    ]


def recorded(backend: str) -> dict[str, list[tuple[Any, ...]]]:
    with Recorder() as recorder:
        for call in sample_calls(backend):
            outputs = [out for out in call() if out.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    return recorder.calls


OPERATORS = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("headwise::"))


def test_there_are_operators():
    assert len(OPERATORS) > 10
    assert any("attention" in name for name in OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
@on_every_backend
def test_opcheck(backend, name):
    calls = recorded(backend).get(name)
    assert calls, f"no sample call reaches {name}"
    operator = getattr(torch.ops.headwise, name.removeprefix("headwise::")).default
    for args in calls:

        def fresh(x: Any) -> Any:
            if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor):
                return [fresh(t) for t in x]
            if not isinstance(x, Tensor):
                return x
            # The backward operators have no gradients of their own.
            return x.detach().requires_grad_(x.requires_grad and "backward" not in name)

        results = torch.library.opcheck(operator, tuple(map(fresh, args)))
        assert set(results.values()) == {"SUCCESS"}


# torch.compile


def assert_equals_direct(
    step: Callable[..., Any], expected: Callable[..., Any], x: dict[str, Tensor], grads: tuple[Tensor, ...]
) -> None:
    """Results and gradients of ``step`` are those of ``expected`` in float64."""
    results = direct.results_of(step, x, grads)
    truth = direct.results_of(expected, x, grads, torch.float64)
    for name, value in results.items():
        torch.testing.assert_close(value.double(), truth[name], rtol=1e-4, atol=1e-5, msg=lambda s, n=name: f"{n}: {s}")


@on_every_backend
def test_compiled_attention_takes_new_lengths_without_recompiling(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    m = maker(backend)

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(q, k, v, bias, sink, lengths):
        out, lse = hw.attention(
            q, k, v, causal=True, bias=bias, sink=sink, kv_lengths=lengths, return_lse=True, backend=backend
        )
        return out * 2, lse

    # Sizes that are equal at first are taken for one size by PyTorch: all of these differ from each other.
    for B, Sq, Sk in ((3, 40, 60), (3, 57, 71), (5, 33, 100), (6, 130, 131), (7, 9, 10)):
        x = {
            "q": m.normal(B, 4, Sq, 16),
            "k": m.normal(B, 2, Sk, 16),
            "v": m.normal(B, 2, Sk, 8),
            "bias": m.normal(B, 1, 1, Sk),
            "sink": m.normal(4),
        }
        lengths = m.integers(0, Sk + 1, B, dtype=torch.int32)

        def expected(q, k, v, bias, sink, lengths=lengths):
            out, lse = direct.attention(q, k, v, causal=True, bias=bias, sink=sink, kv_lengths=lengths)
            return out * 2, lse

        grads = (m.normal(B, 4, Sq, 8), m.normal(B, 4, Sq))
        assert_equals_direct(lambda lengths=lengths, **t: step(**t, lengths=lengths), expected, x, grads)
    assert counter.frame_count == 1


@on_every_backend
def test_compiled_packed_attention_takes_new_lengths_without_recompiling(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    m = maker(backend)

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(q, k, v, cu_q, cu_k, longest_q: int, longest_k: int):
        return hw.attention_varlen(
            q, k, v, cu_q, cu_k, longest_q, longest_k, causal=True, return_lse=True, backend=backend
        )

    for cu_q, cu_k in (([0, 5, 20], [0, 9, 33]), ([0, 40, 47], [0, 40, 90]), ([0, 10, 10, 99], [0, 31, 60, 150])):
        x = {"q": m.normal(cu_q[-1], 4, 16), "k": m.normal(cu_k[-1], 2, 16), "v": m.normal(cu_k[-1], 2, 8)}
        longest = [max(b - a for a, b in itertools.pairwise(cu)) for cu in (cu_q, cu_k)]
        bounds = (ints(backend, *cu_q), ints(backend, *cu_k), *longest)
        grads = (m.normal(cu_q[-1], 4, 8), m.normal(4, cu_q[-1]))
        assert_equals_direct(
            lambda q, k, v, b=bounds: step(q, k, v, *b),
            lambda q, k, v, a=cu_q, b=cu_k: direct.varlen(q, k, v, a, b, causal=True),
            x,
            grads,
        )
    assert counter.frame_count == 1


@on_every_backend
def test_compiled_decode_takes_new_lengths_without_recompiling(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    m = maker(backend)
    step = torch.compile(
        lambda q, k, v, lengths: hw.attention_decode(q, k, v, lengths, return_lse=True, backend=backend),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for B, C in ((3, 40), (5, 64), (7, 300)):
        q, k, v = m.normal(B, 4, 16), m.normal(B, 2, C, 16), m.normal(B, 2, C, 8)
        lengths = m.integers(0, C + 1, B, dtype=torch.int32)
        eager = hw.attention_decode(q, k, v, lengths, return_lse=True, backend=backend)
        assert all(map(torch.equal, step(q, k, v, lengths), eager))
    assert counter.frame_count == 1


@on_every_backend
def test_compiled_probs_and_merge(backend):
    torch._dynamo.reset()
    m = maker(backend)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(q, k, v):
        probs = hw.attention_probs(q, k, rows=[0, -1], causal=True, backend=backend)
        half = k.shape[2] // 2
        parts = [
            hw.attention(q, k[:, :, s], v[:, :, s], return_lse=True, backend=backend)
            for s in (slice(0, half), slice(half, None))
        ]
        out, lse = hw.merge_attention([o for o, _ in parts], [s for _, s in parts], backend=backend)
        return probs, out, lse

    def expected(q, k, v):
        probs = direct.attention(q, k, v, causal=True, probs=True)[2]
        return probs[:, :, [0, -1]], *direct.attention(q, k, v)

    for Sq, Sk in ((20, 30), (35, 64)):
        x = {"q": m.normal(2, 4, Sq, 16), "k": m.normal(2, 2, Sk, 16), "v": m.normal(2, 2, Sk, 8)}
        grads = (m.normal(2, 4, 2, Sk), m.normal(2, 4, Sq, 8), m.normal(2, 4, Sq))
        assert_equals_direct(step, expected, x, grads)


@on_every_backend
def test_bad_call_is_refused_while_compiling(backend):
    torch._dynamo.reset()
    m = maker(backend)
    step = torch.compile(lambda q, k, v: hw.attention(q, k, v, backend=backend), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"(?s)Hq|heads"):
        step(m.normal(1, 3, 8, 16), m.normal(1, 2, 8, 16), m.normal(1, 2, 8, 16))


@on_every_backend
def test_validate_mode_works_compiled(backend, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(settings, "validate", True)
    m = maker(backend)
    step = torch.compile(
        lambda q, k, v, lengths: hw.attention(q, k, v, kv_lengths=lengths, backend=backend),
        fullgraph=True,
        backend="aot_eager",
    )
    x = [m.normal(2, 2, 8, 16) for _ in range(3)]
    assert step(*x, ints(backend, 8, 0)).isfinite().all()
    with pytest.raises(ValueError, match=r"kv_lengths\[1\] is 9"):
        step(*x, ints(backend, 8, 9))


# torch.export


class Layer(torch.nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.project = torch.nn.Linear(32, 64)
        self.sink = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).split((32, 16, 16), -1)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        return hw.attention(q, k, v, causal=True, window=(20, 0), sink=self.sink, backend=self.backend)


@on_every_backend
def test_exported_module_runs_at_other_lengths(backend):
    torch.manual_seed(0)
    m = maker(backend)
    layer = Layer(backend).to(m.device)
    shapes = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}}
    program = torch.export.export(layer, (m.normal(2, 17, 32),), dynamic_shapes=shapes)
    names = [str(node.target) for node in program.graph.nodes]
    assert any(name.startswith("headwise.attention") for name in names)
    for B, S in ((2, 17), (3, 90), (5, 33)):
        x = m.normal(B, S, 32)
        assert torch.equal(program.module()(x), layer(x))


# Autograd


def small(backend: str) -> dict[str, Tensor]:
    m = maker(backend)
    return {
        "q": m.normal(2, 4, 40, 16),
        "k": m.normal(2, 2, 70, 16),
        "v": m.normal(2, 2, 70, 8),
        "bias": m.normal(1, 4, 1, 70),
        "sink": m.normal(4),
    }


SUBSETS = [("q",), ("k",), ("v",), ("bias",), ("sink",), ("q", "v"), ("k", "sink"), ("bias", "v")]


@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
@on_every_backend
def test_gradients_of_a_subset_of_the_inputs(backend, subset):
    x = small(backend)
    wanted = {n: x.pop(n) for n in subset}
    direct.assert_within_budget(
        ours(backend, causal=True, **x),
        lambda **t: direct.attention(**{n: a.to(next(iter(t.values())).dtype) for n, a in x.items()}, **t, causal=True),
        wanted,
    )


@on_every_backend
def test_unwanted_gradients_stay_none(backend):
    x = small(backend)
    x["k"].requires_grad_()
    hw.attention(**x, backend=backend).sum().backward()
    assert x["k"].grad is not None
    assert [n for n, t in x.items() if t.grad is not None] == ["k"]


@pytest.mark.parametrize("which", ["out", "lse"])
@on_every_backend
def test_gradient_of_one_output_alone(backend, which):
    x = small(backend)
    if which == "lse":
        del x["v"]
        v = maker(backend).normal(2, 2, 70, 8)
        direct.assert_within_budget(
            lambda **t: hw.attention(v=v, **t, return_lse=True, backend=backend)[1:],
            lambda **t: direct.attention(v=v.to(t["q"].dtype), **t)[1:],
            x,
        )
    else:
        direct.assert_within_budget(
            lambda **t: hw.attention(**t, return_lse=True, backend=backend)[:1], lambda **t: theirs()(**t)[:1], x
        )


@on_every_backend
def test_values_get_no_gradient_from_the_lse(backend):
    x = {n: t.requires_grad_() for n, t in small(backend).items()}
    _, lse = hw.attention(**x, return_lse=True, backend=backend)
    (grad,) = torch.autograd.grad(lse.sum(), x["v"], allow_unused=True)
    assert grad is None or (grad == 0).all()


@pytest.mark.parametrize("form", ["expanded", "transposed", "strided"])
@on_every_backend
def test_output_gradients_may_have_any_strides(backend, form):
    m = maker(backend)
    x = {n: t.requires_grad_() for n, t in small(backend).items()}
    grads = {
        "expanded": (m.normal(1, 4, 1, 1).expand(2, 4, 40, 8), m.normal(1, 1, 1).expand(2, 4, 40)),
        "transposed": (m.normal(8, 40, 4, 2).permute(3, 2, 1, 0), m.normal(40, 4, 2).permute(2, 1, 0)),
        "strided": (m.normal(2, 4, 40, 16)[..., ::2], m.normal(2, 4, 80)[..., ::2]),
    }[form]
    outputs = hw.attention(**x, return_lse=True, backend=backend)
    found = torch.autograd.grad(outputs, list(x.values()), grads, retain_graph=True)
    expected = torch.autograd.grad(outputs, list(x.values()), [g.contiguous() for g in grads])
    assert all(map(torch.equal, found, expected))
    bounds, packed = ints(backend, 0, 40), [t[0].transpose(0, 1)[:40] for t in (x["q"], x["k"], x["v"])]
    out = hw.attention_varlen(*packed, bounds, bounds, 40, 40, backend=backend)
    grad = grads[0][0].transpose(0, 1)
    found = torch.autograd.grad(out, packed, grad, retain_graph=True)
    assert all(map(torch.equal, found, torch.autograd.grad(out, packed, grad.contiguous())))


@on_every_backend
def test_gradients_accumulate_and_the_graph_can_be_kept(backend):
    x = {n: t.requires_grad_() for n, t in small(backend).items()}
    out = hw.attention(**x, backend=backend)
    out.sum().backward(retain_graph=True)
    first = {n: t.grad.clone() for n, t in x.items()}
    out.sum().backward()
    for name, tensor in x.items():
        assert torch.equal(tensor.grad, 2 * first[name])


@on_every_backend
def test_second_order_gradients_raise(backend):
    m = maker(backend)
    x = {n: t.requires_grad_() for n, t in small(backend).items()}
    bounds = ints(backend, 0, 40)

    def packed() -> Tensor:
        q, k, v = (t[0].transpose(0, 1)[:40] for t in (x["q"], x["k"], x["v"]))
        return hw.attention_varlen(q, k, v, bounds, bounds, 40, 40, backend=backend)

    rows, targets = m.normal(5, 12).requires_grad_(), m.integers(0, 12, 5)
    for out, leaf in (
        (hw.attention(**x, backend=backend), x["q"]),
        (packed(), x["k"]),
        (hw.softmax(rows, backend=backend), rows),
        (hw.rms_norm(rows, None, backend=backend), rows),
        (hw.cross_entropy(rows, targets, backend=backend), rows),
    ):
        (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match="second-order"):
            torch.autograd.grad(grad.sum(), leaf)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_every_backend
def test_without_gradients_the_result_is_the_same(backend, mode):
    x = {n: t.requires_grad_() for n, t in small(backend).items()}
    with_grad = hw.attention(**x, causal=True, return_lse=True, backend=backend)
    with mode():
        without = hw.attention(**x, causal=True, return_lse=True, backend=backend)
        again = hw.attention(without[0].repeat(1, 1, 1, 2), *[x[n] for n in "kv"], backend=backend)
        probs = hw.attention_probs(x["q"], x["k"], backend=backend)
        merged = hw.merge_attention([without[0]] * 2, [without[1]] * 2, backend=backend)
    assert all(t.requires_grad for t in with_grad)
    assert not any(t.requires_grad for t in (*without, again, probs, *merged))
    for a, b in zip(with_grad, without, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(merged[0], without[0], rtol=1e-6, atol=0)


@on_every_backend
def test_results_are_new_contiguous_tensors(backend):
    m = maker(backend)
    x = {"q": m.normal(2, 40, 4, 16).transpose(1, 2), "k": m.normal(2, 40, 4, 16).transpose(1, 2)}
    x["v"] = x["k"]
    before = [t.clone() for t in x.values()]
    out, lse = hw.attention(**x, window=(0, 0), return_lse=True, backend=backend)
    assert out.dtype == x["q"].dtype
    assert lse.dtype == torch.float32
    assert out.shape == (2, 4, 40, 16)
    assert lse.shape == (2, 4, 40)
    out.zero_()
    assert all(map(torch.equal, x.values(), before)), "the output shares memory with an input"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on_every_backend
def test_lse_is_float32_whatever_the_inputs(backend, dtype):
    m = maker(backend, dtype)
    out, lse = hw.attention(*(m.normal(1, 2, 30, 16) for _ in range(3)), return_lse=True, backend=backend)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    # Not a 16-bit number stored in 32 bits: the bits below are in use.
    assert not torch.equal(lse, lse.to(dtype).float())

"""What a new user tries: torch.func, tensors without memory, nested tensors, use_backend inside torch.compile, mypy."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading

import pytest
import torch
from bad_calls import Inputs, good_calls
from result_layouts import layouts
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import headwise as hw
from headwise import reference
from headwise.backends import registry
from headwise.ops._op import OPS

torch.manual_seed(0)
Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
ROWS, WEIGHT, TABLE = torch.randn(2, 3, 9), torch.randn(9), torch.randn(5, 9)
COS, SIN = torch.randn(2, 5, 3)
IDS, TARGETS = torch.tensor([[0, 4, 2], [2, 2, 0]]), torch.tensor([[0, 8, 3], [1, 1, -100]])

# Functions of tensors, ours and in plain PyTorch: (ours, plain, the tensors; the first dim of each is a batch).
CALLS = {
    "attention": (
        lambda q, k, v: hw.attention(q, k, v, causal=True, softcap=3.0),
        lambda q, k, v: reference.attention(q, k, v, causal=True, softcap=3.0)[0],
        (Q, K, V),
    ),
    "attention and its lse": (
        lambda q, k, v: hw.attention(q, k, v, return_lse=True),
        lambda q, k, v: reference.attention(q, k, v),
        (Q, K, V),
    ),
    "attention_probs": (
        lambda q, k: hw.attention_probs(q, k, rows=[0, -1]),
        lambda q, k: reference.attention_probs(q, k, rows=[0, -1]),
        (Q, K),
    ),
    "attention_decode": (
        lambda q, k, v: hw.attention_decode(q, k, v, torch.full((q.shape[0],), 6)),
        lambda q, k, v: reference.attention_decode(q, k, v, torch.full((q.shape[0],), 6))[0],
        (Q, K, V),
    ),
    "merge_attention": (
        lambda a, b, s, t: hw.merge_attention([a, b], [s, t])[0],
        lambda a, b, s, t: reference.merge_attention([a, b], [s, t])[0],
        (Q, Q.flip(0), Q[..., 0], Q[..., 1]),
    ),
    "rms_norm": (
        lambda x: hw.rms_norm(x, WEIGHT),
        lambda x: reference.rms_norm(x, WEIGHT),
        (ROWS,),
    ),
    "layer_norm": (
        lambda x: hw.layer_norm(x, WEIGHT, WEIGHT + 1),
        lambda x: reference.layer_norm(x, WEIGHT, WEIGHT + 1),
        (ROWS,),
    ),
    "add_rms_norm": (
        lambda x, y: hw.add_rms_norm(x, y, WEIGHT),
        lambda x, y: reference.add_rms_norm(x, y, WEIGHT),
        (ROWS, ROWS.flip(0)),
    ),
    "glu": (hw.glu, lambda gate, up: torch.nn.functional.silu(gate) * up, (ROWS, ROWS.flip(0))),
    "rope": (
        lambda x: hw.rope(x, COS, SIN),
        lambda x: reference.rope(x, COS, SIN),
        (Q,),
    ),
    "softmax": (hw.softmax, lambda x: torch.softmax(x, -1), (ROWS,)),
    "embedding": (lambda w: hw.embedding(IDS, w), lambda w: w[IDS], (TABLE,)),
    "cross_entropy": (
        lambda x: hw.cross_entropy(x, TARGETS[:, : x.shape[-2]].reshape(-1)[: x[..., 0].numel()].view(x.shape[:-1])),
        lambda x: torch.nn.functional.cross_entropy(
            x.reshape(-1, 9), TARGETS[:, : x.shape[-2]].reshape(-1)[: x[..., 0].numel()]
        ),
        (ROWS,),
    ),
    "linear_cross_entropy": (
        lambda x, w: hw.linear_cross_entropy(x, w, TARGETS.reshape(-1)[: x[..., 0].numel()].view(x.shape[:-1])),
        lambda x, w: torch.nn.functional.cross_entropy(
            x.reshape(-1, 9) @ w.T, TARGETS.reshape(-1)[: x[..., 0].numel()]
        ),
        (ROWS, ROWS.reshape(-1, 9)[:6].repeat(2, 1)[:9]),
    ),
    "transpose": (hw.transpose, lambda x: x.mT, (ROWS,)),
}  # fmt: skip
each_call = pytest.mark.parametrize(("ours", "plain", "tensors"), CALLS.values(), ids=CALLS.keys())
# Those whose leading dim may be taken away or multiplied: (3, 9) rows are as good as (2, 3, 9).
ANY_RANK = {name: call for name, call in CALLS.items() if name in ("rms_norm", "softmax", "transpose")}


def number(run):
    """A function that gives one number, as `torch.func.grad` wants it."""

    def of(*tensors):
        results = run(*tensors)
        return sum(x.square().sum() for x in (results if isinstance(results, tuple) else (results,)))

    return of


def assert_all_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@each_call
def test_grad(ours, plain, tensors):
    every = tuple(range(len(tensors)))
    for _ in range(2):
        assert_all_close(
            torch.func.grad(number(ours), every)(*tensors), torch.func.grad(number(plain), every)(*tensors)
        )
    found, value = torch.func.grad_and_value(number(ours), every)(*tensors)
    assert_all_close(value, number(plain)(*tensors))
    assert all(g.shape == x.shape for g, x in zip(found, tensors, strict=True))


@each_call
def test_jacrev(ours, plain, tensors):
    every = tuple(range(len(tensors)))
    assert_all_close(torch.func.jacrev(ours, every)(*tensors), torch.func.jacrev(plain, every)(*tensors))


@each_call
def test_vjp(ours, plain, tensors):
    results, pull = torch.func.vjp(ours, *tensors)
    cotangents = torch.utils._pytree.tree_map(torch.ones_like, results)
    _, expected = torch.func.vjp(plain, *tensors)
    assert_all_close(pull(cotangents), expected(cotangents))


@each_call
def test_vmap(ours, plain, tensors):
    """Over a new dim, in front of one tensor and behind the first dim of another; what has none is shared."""
    stacked = [torch.stack([x, x + 0.5, x * 2]) for x in tensors]
    one_by_one = [plain(*row) for row in zip(*stacked, strict=True)]
    expected = [torch.stack(x) for x in zip(*one_by_one, strict=True)] if isinstance(one_by_one[0], tuple) else None
    found = torch.vmap(ours)(*stacked)
    assert_all_close(
        found if expected is None else list(found), torch.stack(one_by_one) if expected is None else expected
    )
    moved = torch.vmap(ours, in_dims=1)(*[x.transpose(0, 1) for x in stacked])
    assert_all_close(moved, found)
    if len(tensors) > 1:
        shared = torch.vmap(ours, in_dims=(0, *[None] * (len(tensors) - 1)))(stacked[0], *tensors[1:])
        alone = [ours(x, *tensors[1:]) for x in stacked[0]]
        wanted = [torch.stack(x) for x in zip(*alone, strict=True)] if isinstance(shared, tuple) else torch.stack(alone)
        assert_all_close(list(shared) if isinstance(shared, tuple) else shared, wanted)


@each_call
def test_gradients_of_each_sample_and_of_all(ours, plain, tensors):
    stacked = [torch.stack([x, x + 0.5]) for x in tensors]
    every = tuple(range(len(tensors)))
    of_each = torch.vmap(torch.func.grad(number(ours), every))(*stacked)
    assert_all_close(of_each, torch.vmap(torch.func.grad(number(plain), every))(*stacked))
    of_all = torch.func.grad(lambda *x: torch.vmap(number(ours))(*x).sum(), every)(*stacked)
    assert_all_close(of_all, of_each)


def test_two_dims_mapped_at_once():
    x = torch.randn(2, 3, 4, 9)
    for name, (ours, plain, _) in ANY_RANK.items():
        found, expected = (torch.vmap(torch.vmap(f))(x) for f in (ours, plain))
        torch.testing.assert_close(found, expected, msg=lambda text, n=name: f"{n}: {text}")


def test_gradients_of_a_module_by_functional_call():
    from headwise.nn import RMSNorm

    module = RMSNorm(9)
    values = {name: torch.randn_like(x) for name, x in module.named_parameters()}

    def loss(values, x):
        return torch.func.functional_call(module, values, (x,)).square().sum()

    (found,) = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, ROWS).values()
    expected = torch.vmap(torch.func.grad(lambda w, x: reference.rms_norm(x, w).square().sum()), in_dims=(None, 0))
    assert_all_close(found, expected(next(iter(values.values())), ROWS))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of PyTorch's own forward mode
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")  # the same, from PyTorch 2.15 on
@each_call
def test_forward_mode_and_second_order_say_that_they_are_not_there(ours, plain, tensors):
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(ours, tensors, tensors)
    if ours is hw.transpose:  # its gradient is itself
        assert_all_close(*(torch.func.jacrev(torch.func.grad(number(f)))(*tensors) for f in (ours, plain)))
        return
    for place in range(len(tensors)):
        with pytest.raises(NotImplementedError, match="second-order"):
            torch.func.jacrev(torch.func.grad(number(ours), place), place)(*tensors)
        leaves = [x.clone().requires_grad_(i == place) for i, x in enumerate(tensors)]
        (grad,) = torch.autograd.grad(number(ours)(*leaves), leaves[place], create_graph=True)
        with pytest.raises(NotImplementedError, match="second-order"):
            grad.sum().backward()


# --------------------------------------------------------------------------------------------------------- second order


def test_what_the_second_order_error_advises_works():
    x = ROWS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(hw.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order") as caught:
        grad.sum().backward()
    assert "headwise.reference" in str(caught.value)
    q, k, v = (t.double().requires_grad_() for t in (Q, K, V))
    assert torch.autograd.gradgradcheck(lambda q, k, v: reference.attention(q, k, v)[0], (q[:1], k[:1], v[:1]))


@pytest.mark.parametrize("op", [op for op in OPS if "backward" not in op])
def test_the_reference_has_every_op_under_its_name(op):
    assert inspect.isfunction(getattr(reference, op))
    scope = {}
    exec(f"from headwise.reference import {op}", scope)
    assert scope[op] is getattr(reference, op)


# ------------------------------------------------------------------------------------------- tensors without memory, nested


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", [None, "cpu"])
def test_tensors_without_memory_give_results_without_memory(op, backend):
    def results(device):
        made = getattr(hw, op)(**good_calls(Inputs(device))[op], backend=backend)
        return {str(i): x for i, x in enumerate(torch.utils._pytree.tree_leaves(made))}

    for _ in range(2):
        found = results("meta")
        assert all(x.is_meta for x in found.values())
        assert layouts(found) == layouts(results("cpu"))
    with FakeTensorMode():
        assert layouts(results("cpu")) == layouts(found)


def test_a_bad_call_without_memory_is_refused():
    with pytest.raises(ValueError, match=r"attention: k has head dim 9 and q has 8"):
        hw.attention(Q.to("meta"), torch.empty(2, 2, 7, 9, device="meta"), V.to("meta"))


def test_a_model_without_memory_has_gradients():
    x = {n: t.to("meta").requires_grad_() for n, t in (("q", Q), ("k", K), ("v", V))}
    hw.rms_norm(hw.attention(**x, causal=True)).sum().backward()
    assert all(t.grad.is_meta and t.grad.shape == t.shape for t in x.values())


NESTED = {
    "jagged": lambda: torch.nested.as_nested_tensor([torch.ones(3, 8), torch.ones(2, 8)], layout=torch.jagged),
    "strided": lambda: torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)]),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # they are a prototype
@pytest.mark.parametrize("layout", NESTED)
@pytest.mark.parametrize("op", OPS)
def test_nested_tensors_are_refused_with_a_way_out(op, layout):
    arguments = good_calls(Inputs("cpu"))[op]
    name = next(name for name, x in arguments.items() if isinstance(x, (Tensor, list)))
    nested = NESTED[layout]()
    changed = {**arguments, name: [nested, *arguments[name][1:]] if isinstance(arguments[name], list) else nested}
    for gradient in (False, True):
        with pytest.raises(TypeError, match=rf"{op}: .*nested.*attention_varlen.*offsets.*to_padded_tensor"):
            getattr(hw, op)(**changed)
        nested.requires_grad_(not gradient and nested.dtype.is_floating_point)


def test_rms_norm_needs_no_weight():
    expected = ROWS / (ROWS.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_all_close(hw.rms_norm(ROWS), expected)
    assert hw.rms_norm_backward(ROWS, ROWS)[1] is None


# -------------------------------------------------------------------------------------------- use_backend and torch.compile


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def on_the_cpu(x):
    with hw.use_backend("cpu"):
        return hw.softmax(x) * 2


def anywhere(x):
    return hw.rms_norm(x) + 1


def test_use_backend_inside_a_compiled_function(compiler):
    inside = torch.compile(on_the_cpu, fullgraph=True, backend=compiler)
    after = torch.compile(anywhere, fullgraph=True, backend=compiler)
    for _ in range(3):
        x = torch.randn(3, 10)
        assert_all_close(inside(x), torch.softmax(x, -1) * 2)
        assert_all_close(after(x), reference.rms_norm(x, None) + 1)
        assert_all_close(hw.softmax(x), torch.softmax(x, -1))
    assert compiler.frame_count == 2, "compiled again, though nothing changed"
    assert registry.forced.name == registry._Forced().name


def test_use_backend_inside_a_compiled_function_with_gradients(compiler):
    inside = torch.compile(on_the_cpu, fullgraph=True, backend=compiler)
    for _ in range(3):
        x = torch.randn(3, 10, requires_grad=True)
        inside(x).square().sum().backward()
        wanted = x.detach().clone().requires_grad_()
        (torch.softmax(wanted, -1) * 2).square().sum().backward()
        assert_all_close(x.grad, wanted.grad)


def test_use_backend_around_a_compiled_function(compiler):
    compiled = torch.compile(anywhere, fullgraph=True, backend=compiler)
    x = torch.randn(3, 10)
    expected = reference.rms_norm(x, None) + 1
    for around in ("cpu", None, "cpu", None):
        with hw.use_backend(around):
            assert_all_close(compiled(x), expected)
        assert_all_close(compiled(x), expected)


def test_use_backend_inside_a_compiled_function_of_another_thread(compiler):
    inside = torch.compile(on_the_cpu, fullgraph=True, backend=compiler)
    x = torch.randn(3, 10)
    results = [inside(x)]
    threads = [threading.Thread(target=lambda: results.append(inside(x))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for found in results:
        assert_all_close(found, torch.softmax(x, -1) * 2)


def test_an_error_within_use_backend_leaves_nothing_behind():
    before = registry.forced.name
    with pytest.raises(ValueError, match=r"at least 1 dimension"), hw.use_backend("cpu"):
        hw.softmax(torch.tensor(1.0))
    assert registry.forced.name == before


# ------------------------------------------------------------------------------------------------------------------- mypy

SNIPPET = """
import torch
import headwise as hw
from typing_extensions import assert_type

Pair = tuple[torch.Tensor, torch.Tensor]

def use(q: torch.Tensor, lengths: torch.Tensor, wanted: bool) -> None:
    cu, n = lengths, 3
    assert_type(hw.attention(q, q, q), torch.Tensor)
    assert_type(hw.attention(q, q, q, causal=True, return_lse=False), torch.Tensor)
    assert_type(hw.attention(q, q, q, return_lse=True, window=(3, None)), Pair)
    assert_type(hw.attention(q, q, q, return_lse=wanted), torch.Tensor | Pair)
    assert_type(hw.attention_varlen(q, q, q, cu, cu, n, n), torch.Tensor)
    assert_type(hw.attention_varlen(q, q, q, cu, cu, n, n, return_lse=True), Pair)
    assert_type(hw.attention_varlen(q, q, q, cu, cu, n, n, return_lse=wanted), torch.Tensor | Pair)
    assert_type(hw.attention_decode(q, q, q, lengths), torch.Tensor)
    assert_type(hw.attention_decode(q, q, q, lengths, return_lse=True, kv_starts=lengths), Pair)
    assert_type(hw.attention_decode(q, q, q, lengths, return_lse=wanted), torch.Tensor | Pair)
    hw.attention(q, q, q, q_lengths=lengths, kv_lengths=lengths, deterministic=False).transpose(1, 2)
    out, lse = hw.attention(q, q, q, return_lse=True)
    hw.rms_norm(q).sum()
    assert_type(hw.linear_cross_entropy(q, q, lengths), torch.Tensor)
    assert_type(hw.linear_cross_entropy(q, q, lengths, return_entropy=True), tuple[torch.Tensor, ...])
    hw.attention(q, q, q, causal="yes")  # wrong: a str
    hw.attention(q, q, q, windw=(3, 0))  # wrong: no such argument
"""


def test_mypy_sees_what_a_call_returns(tmp_path):
    """The lines that say "wrong" are errors, and no others."""
    path = tmp_path / "snippet.py"
    path.write_text(SNIPPET)
    options = ["--strict", "--no-error-summary", "--cache-dir", str(tmp_path), "--follow-imports", "silent"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(path)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    found = {int(line) for line in re.findall(r"snippet\.py:(\d+): error", done.stdout)}
    wrong = {number for number, line in enumerate(SNIPPET.split("\n"), 1) if "# wrong" in line}
    assert found == wrong, done.stdout + done.stderr


def test_calls_of_this_file_reach_every_op():
    """A new op is tried here as the others are."""
    tried = {*CALLS, "attention_varlen"}  # the sequences of a packed batch are not a dim
    assert {op for op in OPS if OPS[op].backward is not None} <= tried

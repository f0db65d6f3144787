"""linear_cross_entropy, beyond the case table: mistakes that others shipped, memory, chunks, PyTorch's machinery."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends_under_test import DEVICE, RUNNABLE
from test_memory import allocations

import headwise as hw
from headwise.backends.cpu import linear_cross_entropy as on_cpu
from headwise.backends.cpu.matmul import fast_in_bfloat16
from headwise.config import settings
from headwise.testing import compare

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def inputs(rows, width, classes, dtype=F32, device="cpu", seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(classes, width, generator=generator) * (scale / width**0.5)
    targets = torch.randint(0, classes, (rows,), generator=generator)
    return hidden.to(device, dtype), weight.to(device, dtype), targets.to(device)


def gradients(function, hidden, weight, targets, grad=None, **options):
    leaves = [hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()]
    loss = function(*leaves, targets, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaves, grad)


def plain(hidden, weight, targets, softcap=None, **options):
    """In float64."""
    logits = hidden.double() @ weight.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, **options)


def relative(ours, truth):
    return ((ours.double().cpu() - truth.double().cpu()).norm() / truth.double().cpu().norm()).item()


def small_chunks(monkeypatch):
    """From now on chunks are as small as they get, 16 or 64 rows, 64 or 1024 classes; their numbers on the CPU.

    Calls that were recorded keep their chunks: no other test may have the sizes of the caller.
    """
    monkeypatch.setattr(on_cpu, "CHUNK", 1)
    monkeypatch.setattr(on_cpu, "KEPT", 0)
    found, parts = [], on_cpu._parts

    def counted(*sizes):
        cut = list(parts(*sizes))
        found.append(len(cut))
        return iter(cut)

    monkeypatch.setattr(on_cpu, "_parts", counted)
    if "webgpu" in RUNNABLE:
        from headwise.backends.webgpu import linear_cross_entropy as on_webgpu

        monkeypatch.setattr(on_webgpu, "CHUNK", 1)
    if "triton" in RUNNABLE:
        from headwise.backends.triton import linear_cross_entropy as on_triton

        monkeypatch.setattr(on_triton, "SCRATCH", 1 << 16)
        monkeypatch.setattr(on_triton, "_AGAIN", 64)
    return found


# ------------------------------------------------------------------------------------------------ what others got wrong


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_thousand_steps_of_training_go_as_with_the_plain_loss(dtype, monkeypatch):
    """A fused loss with a small bias in its gradients leaves the way of the plain one over many steps.

    Both start from the same float32 parameters; a third training in float64 says how far the plain one is off.
    """
    chunks = small_chunks(monkeypatch)

    def train(loss_of, params):
        generator = torch.Generator().manual_seed(3)
        start = (torch.randn(197, 24, generator=generator), *(torch.randn(2, 197, 24, generator=generator) / 5))
        table, inner, head = leaves = [x.to(params).requires_grad_() for x in (start[0], start[1][:24], start[2])]
        optimizer = torch.optim.SGD(leaves, lr=0.5)
        losses = []
        for _ in range(1000):
            ids = torch.randint(0, 197, (64,), generator=generator)
            targets = (7 * ids + 3) % 197
            targets[::5] = -100
            loss = loss_of(torch.tanh(table[ids] @ inner), head, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return {"losses": torch.stack(losses), "table": table.detach(), "inner": inner.detach(), "head": head.detach()}

    def fused(hidden, weight, targets):
        return hw.linear_cross_entropy(hidden.to(dtype), weight.to(dtype), targets, backend="cpu")

    def unfused(hidden, weight, targets):
        return F.cross_entropy((hidden.to(dtype) @ weight.to(dtype).T).to(F32), targets)

    ours, theirs = train(fused, F32), train(unfused, F32)
    truth = train(lambda h, w, t: F.cross_entropy(h @ w.T, t), torch.float64)
    assert truth["losses"][-50:].mean() < 0.2 * truth["losses"][:50].mean()  # it learns
    assert min(chunks) >= 4
    for name, exact in truth.items():
        error = compare(name, ours[name], exact, theirs[name])
        assert error.ok, str(error)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_gradients_per_token_arrive(backend, dtype):
    """Zero gradients with reduction="none", or one gradient for all tokens."""
    hidden, weight, targets = inputs(40, 24, 100, dtype, DEVICE[backend])
    grad = torch.linspace(-2, 3, 40)
    ours = gradients(
        hw.linear_cross_entropy, hidden, weight, targets, grad.to(DEVICE[backend]), reduction="none", backend=backend
    )
    truth = gradients(plain, hidden.cpu(), weight.cpu(), targets.cpu(), grad.double(), reduction="none")
    for mine, theirs in zip(ours, truth, strict=True):
        assert relative(mine, theirs) < (2e-6 if mine.dtype == F32 else 5e-3)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_the_soft_cap_is_applied(backend, reduction):
    hidden, weight, targets = inputs(30, 24, 100, F32, DEVICE[backend], scale=10.0)
    options = {"reduction": reduction, "softcap": 4.0}
    loss = hw.linear_cross_entropy(hidden, weight, targets, **options, backend=backend)
    torch.testing.assert_close(
        loss.cpu(), plain(hidden.cpu(), weight.cpu(), targets.cpu(), **options).float(), rtol=2e-6, atol=1e-6
    )
    without = hw.linear_cross_entropy(hidden, weight, targets, reduction=reduction, backend=backend)
    assert not torch.allclose(loss, without, rtol=0.05)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_gradient_of_the_weight_is_rounded_once(backend, dtype, reduction, monkeypatch):
    """Summed in 16 bits from chunk to chunk, small terms would vanish beside a large one.

    The first row gives a large gradient to every class, and 64 others together 0.4 units in its last place.
    """
    rows, classes, width = 515, 256, 16
    chunks = small_chunks(monkeypatch)
    eps, draw = torch.finfo(dtype).eps, torch.Generator().manual_seed(1)
    hidden = torch.full((rows, width), 16 * 0.4 * eps / 64)
    hidden[0] = 16 * (1.1 + 0.4 * torch.rand(width, generator=draw))
    hidden, weight = (
        x.to(DEVICE[backend], dtype) for x in (hidden, torch.randn(classes, width, generator=draw) / 1024)
    )
    targets = torch.zeros(rows, dtype=torch.int64, device=DEVICE[backend])
    grad = torch.ones(rows, device=DEVICE[backend]) if reduction == "none" else None
    options = {"reduction": reduction, "backend": backend}
    _, _, dweight = gradients(hw.linear_cross_entropy, hidden, weight, targets, grad, **options)
    _, _, truth = gradients(plain, hidden.cpu(), weight.cpu(), targets.cpu(), reduction="sum")
    # Not that of the targets' class, which is far larger. Half of it is for the gradients of logits in 16 bits.
    assert relative(dweight[1:], truth[1:]) < eps
    assert backend != "cpu" or min(chunks) >= 4


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_gradient_of_hidden_is_rounded_once(backend, dtype, reduction, monkeypatch):
    """The same of its sum over the classes: the first ones hold the target and give 1, every 1024 more give 0.4 units in
    the last place, which no chunk of them may lose."""
    rows, classes, width = 22, 8200, 18
    chunks = small_chunks(monkeypatch)
    hidden, _, _ = inputs(rows, width, 1, dtype, DEVICE[backend])
    eps, draw = torch.finfo(dtype).eps, torch.Generator().manual_seed(1)
    weight = torch.full((classes, width), 0.4 * eps * classes / 1024)
    weight[:50] = 1.1 + 0.4 * torch.rand(50, width, generator=draw)
    hidden, weight = hidden * 2.0**-6, weight.to(hidden)
    targets = torch.arange(rows, device=DEVICE[backend])
    grad = torch.ones(rows, device=DEVICE[backend]) if reduction == "none" else None
    options = {"reduction": reduction, "backend": backend}
    _, dhidden, _ = gradients(hw.linear_cross_entropy, hidden, weight, targets, grad, **options)
    _, truth, _ = gradients(plain, hidden.cpu(), weight.cpu(), targets.cpu(), reduction="sum")
    assert relative(dhidden, truth) < eps
    assert backend != "cpu" or max(chunks) >= 100


@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_mean_does_not_count_ignored_tokens(backend):
    hidden, weight, targets = inputs(30, 24, 100, F32, DEVICE[backend])
    targets[:20] = -100
    some = gradients(hw.linear_cross_entropy, hidden, weight, targets, backend=backend)
    rest = gradients(hw.linear_cross_entropy, hidden[20:], weight, targets[20:], backend=backend)
    torch.testing.assert_close(some[0], rest[0], rtol=1e-6, atol=0)
    assert relative(some[2], rest[2]) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_gradients_are_written_when_every_target_is_ignored(backend, dtype, reduction):
    hidden, weight, targets = inputs(9, 24, 300, dtype, DEVICE[backend])
    targets[:] = -100
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01, "backend": backend}
    grad = torch.ones_like(targets, dtype=F32) if reduction == "none" else None
    results = gradients(hw.linear_cross_entropy, hidden, weight, targets, grad, **options)
    explicit = hw.linear_cross_entropy_forward_backward(hidden, weight, targets, **options)
    for value in (*results, *explicit[:3]):
        assert torch.equal(value, torch.zeros_like(value))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_gradients_of_16_bits_are_right_to_their_last_digits(backend, dtype, reduction):
    """Logits rounded to 16 bits put probabilities off by percents: by 4 to 23 % in gradients."""
    hidden, weight, targets = inputs(120, 48, 333, dtype, DEVICE[backend], scale=20.0)
    grad = torch.ones(120, device=DEVICE[backend]) if reduction == "none" else None
    ours = gradients(hw.linear_cross_entropy, hidden, weight, targets, grad, reduction=reduction, backend=backend)
    wanted_grad = None if grad is None else grad.cpu().double()
    truth = gradients(plain, hidden.cpu(), weight.cpu(), targets.cpu(), wanted_grad, reduction=reduction)
    assert relative(ours[0], truth[0]) < 2e-6
    for mine, theirs in zip(ours[1:], truth[1:], strict=True):
        assert relative(mine, theirs) < torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_loss_scale_reaches_float16_before_anything_is_rounded(backend):
    """Gradients made for a gradient of 1 and multiplied afterwards would be zeros."""
    hidden, weight, targets = inputs(64, 16, 500, F16, DEVICE[backend], scale=0.1)
    hidden = hidden * 2.0**-6
    scale = torch.tensor(2.0**16, device=DEVICE[backend])
    ours = gradients(hw.linear_cross_entropy, hidden, weight, targets, scale, backend=backend)
    truth = gradients(plain, hidden.cpu(), weight.cpu(), targets.cpu(), scale.cpu().double())
    assert relative(ours[2], truth[2]) < 2e-3


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("bad", [-1, 70, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_target_outside_the_classes_gives_nan_for_its_row_alone(backend, bad):
    hidden, weight, targets = inputs(12, 16, 70, F32, DEVICE[backend])
    targets[[2, 7]], targets[5] = bad, -100
    hidden.requires_grad_()
    is_bad = (targets == bad).cpu()
    options = {"reduction": "none", "return_logprobs": True, "return_entropy": True, "backend": backend}
    results = hw.linear_cross_entropy(hidden, weight, targets, **options)
    for values in results:
        assert torch.equal(values.isnan().cpu(), is_bad)
        assert values[5] == 0
    (dhidden,) = torch.autograd.grad(sum(x.sum() for x in results), hidden)
    assert torch.equal(dhidden.isnan().all(-1).cpu(), is_bad)
    assert torch.equal(dhidden.isnan().any(-1).cpu(), is_bad)
    assert hw.linear_cross_entropy(hidden.detach(), weight, targets, backend=backend).isnan()


@pytest.mark.parametrize("backend", RUNNABLE)
def test_validate_names_the_first_bad_target(backend, monkeypatch):
    monkeypatch.setattr(settings, "validate", True)
    hidden, weight, targets = inputs(6, 16, 9, F32, DEVICE[backend])
    targets[:] = torch.tensor([0, -100, 8, 1, 9, -1])
    message = r"linear_cross_entropy: targets\[4\] is 9; it needs to be from 0 to 8 or -100"
    with pytest.raises(ValueError, match=message):
        hw.linear_cross_entropy(hidden, weight, targets, backend=backend)
    with pytest.raises(ValueError, match=message):
        hw.linear_cross_entropy_forward_backward(hidden, weight, targets, backend=backend)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_mean_divides_by_the_weights_of_counted_tokens(backend):
    hidden, weight, targets = inputs(10, 16, 30, F32, DEVICE[backend])
    targets[:3] = -100
    weights = torch.arange(10.0, device=DEVICE[backend])
    weights[0] = torch.nan  # of an ignored token: it may be anything
    loss = hw.linear_cross_entropy(hidden, weight, targets, token_weights=weights, backend=backend)
    losses = hw.linear_cross_entropy(hidden, weight, targets, reduction="none", backend=backend)
    torch.testing.assert_close(loss, (losses * weights)[3:].sum() / weights[3:].sum())


def test_gradients_are_those_of_the_formula():
    hidden, weight, targets = inputs(5, 4, 6, torch.float64)
    targets[2] = -100
    bias = torch.randn(6, dtype=torch.float64)
    options = {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0}
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.0], dtype=torch.float64)
    for more in ({"reduction": "mean"}, {"reduction": "none", "return_logprobs": True, "return_entropy": True}):
        assert torch.autograd.gradcheck(
            lambda h, w, b: hw.linear_cross_entropy(h, w, targets, **options, **more, bias=b, token_weights=weights),  # noqa: B023
            leaves,
        )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_gives_the_same_bits_every_time(backend, dtype):
    hidden, weight, targets = inputs(150, 40, 1003, dtype, DEVICE[backend])
    first = gradients(hw.linear_cross_entropy, hidden, weight, targets, backend=backend)
    for _ in range(2):
        again = gradients(hw.linear_cross_entropy, hidden, weight, targets, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


# ---------------------------------------------------------------------------------------------------- memory and chunks


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"return_entropy": True}], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_logits_never_exist(dtype, options):
    rows, width, classes = 4096, 32, 16384
    hidden, weight, targets = inputs(rows, width, classes, dtype)
    hidden.requires_grad_(), weight.requires_grad_()

    def run():
        results = hw.linear_cross_entropy(hidden, weight, targets, **options, backend="cpu")
        loss = results[0] + results[1].sum() if isinstance(results, tuple) else results.sum()
        torch.autograd.grad(loss, (hidden, weight))

    largest, peak = allocations("cpu", run)
    logits = 4 * rows * classes  # 256 MiB
    assert largest <= 4 * on_cpu.CHUNK
    assert peak < logits // 2


@pytest.mark.parametrize(("dtype", "kept"), [(F32, 0), (BF16, 0), (BF16, 1 << 20)], ids=str)
def test_chunks_of_the_cpu_give_the_result_of_one(dtype, kept, monkeypatch):
    """float32 by rows; bfloat16 by columns, and by rows with gradients of logits that are kept."""
    hidden, weight, targets = inputs(200, 24, 333, dtype)
    targets[::9] = -100
    whole = gradients(hw.linear_cross_entropy, hidden, weight, targets, label_smoothing=0.1, backend="cpu")
    chunks = small_chunks(monkeypatch)
    monkeypatch.setattr(on_cpu, "KEPT", kept)
    by_columns, columns = [], on_cpu._by_columns
    monkeypatch.setattr(on_cpu, "_by_columns", lambda *given: by_columns.append(given) or columns(*given))
    parts = gradients(hw.linear_cross_entropy, hidden, weight, targets, label_smoothing=0.1, backend="cpu")
    truth = gradients(plain, hidden, weight, targets, label_smoothing=0.1)
    for of_parts, of_whole, exact in zip(parts, whole, truth, strict=True):
        assert relative(of_parts, exact) < 1.5 * relative(of_whole, exact) + 2e-7
    assert min(chunks) >= 4
    assert len(by_columns) == (dtype == BF16 and not (kept and fast_in_bfloat16()))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_chunks_of_webgpu_give_the_result_of_one(dtype, monkeypatch):
    from headwise.backends.webgpu import linear_cross_entropy as on_webgpu

    monkeypatch.setattr(on_webgpu, "CHUNK", 70 * 131)  # of sizes that no other test has: records are kept
    hidden, weight, targets = inputs(199, 26, 391, dtype)
    targets[::9] = -100
    parts = gradients(hw.linear_cross_entropy, hidden, weight, targets, z_loss=0.01, backend="webgpu")
    whole = gradients(hw.linear_cross_entropy, hidden, weight, targets, z_loss=0.01, backend="cpu")
    for a, b in zip(parts, whole, strict=True):
        assert relative(a, b) < (2e-6 if a.dtype == F32 else 4e-3)


# --------------------------------------------------------------------------------------------------- PyTorch's machinery


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_one_side_may_be_frozen(backend, frozen, reduction):
    hidden, weight, targets = inputs(30, 16, 50, BF16, DEVICE[backend])
    grad = torch.ones(30, device=DEVICE[backend]) if reduction == "none" else None
    both = gradients(hw.linear_cross_entropy, hidden, weight, targets, grad, reduction=reduction, backend=backend)
    leaf = weight if frozen == "hidden" else hidden
    leaf.requires_grad_()
    loss = hw.linear_cross_entropy(hidden, weight, targets, reduction=reduction, backend=backend)
    (found,) = torch.autograd.grad(loss, leaf, grad)
    assert relative(found, both[2 if frozen == "hidden" else 1]) < 1e-2


@pytest.mark.parametrize("backend", RUNNABLE)
def test_tied_weights(backend):
    """The head is the table of the embedding: autograd adds both gradients."""
    _, table, targets = inputs(20, 16, 50, F32, DEVICE[backend])
    ids = (targets + 1) % 50
    (ours,) = torch.autograd.grad(_tied(hw.linear_cross_entropy, table.requires_grad_(), ids, targets, backend), table)
    cpu = table.detach().cpu().requires_grad_()
    loss = F.cross_entropy(cpu[ids.cpu()] @ cpu.T, targets.cpu())
    assert relative(ours, torch.autograd.grad(loss, cpu)[0]) < 2e-6


def _tied(function, table, ids, targets, backend):
    return function(table[ids], table, targets, backend=backend)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_backward_twice_over_a_retained_graph(backend, dtype):
    """Gradients that the forward made are multiplied in place only where nobody wants them again."""
    hidden, weight, targets = inputs(30, 16, 50, dtype, DEVICE[backend])
    hidden.requires_grad_(), weight.requires_grad_()
    loss = hw.linear_cross_entropy(hidden, weight, targets, backend=backend)
    grads = [torch.tensor(g, device=DEVICE[backend]) for g in (4.0, 1.0, 0.5)]
    found = [torch.autograd.grad(loss, (hidden, weight), g, retain_graph=True) for g in grads[:2]]
    found.append(torch.autograd.grad(loss, (hidden, weight), grads[2]))
    for grad, pair in zip(grads, found, strict=True):
        for one, first in zip(pair, found[1], strict=True):
            assert torch.equal(one, first * grad)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_gradients_of_a_sum_of_losses(backend):
    """The same weight in two losses, as with gradient accumulation."""
    hidden, weight, targets = inputs(30, 16, 50, F32, DEVICE[backend])
    weight.requires_grad_()
    for part in (slice(0, 15), slice(15, 30)):
        (hw.linear_cross_entropy(hidden[part], weight, targets[part], backend=backend) / 2).backward()
    _, _, truth = gradients(plain, hidden.cpu(), weight.detach().cpu(), targets.cpu())
    assert relative(weight.grad, truth) < 2e-6


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"return_logprobs": True}], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_under_compile_and_func(dtype, options):
    torch._dynamo.reset()
    hidden, weight, targets = inputs(20, 16, 50, dtype)

    def loss_of(h, w):
        results = hw.linear_cross_entropy(h, w, targets, **options, backend="cpu")
        return results[0] + results[1].sum() if isinstance(results, tuple) else results.sum()

    eager = gradients(lambda h, w, _: loss_of(h, w), hidden, weight, targets)
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for found in (
        gradients(lambda h, w, _: compiled(h, w), hidden, weight, targets),
        (loss_of(hidden, weight), *torch.func.grad(loss_of, (0, 1))(hidden, weight)),
    ):
        for a, b in zip(found, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5 if dtype == F32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_explicit_form_is_what_autograd_gives(backend):
    hidden, weight, targets = inputs(30, 16, 50, BF16, DEVICE[backend])
    loss, dhidden, dweight, dbias = hw.linear_cross_entropy_forward_backward(hidden, weight, targets, backend=backend)
    ours = gradients(hw.linear_cross_entropy, hidden, weight, targets, backend=backend)
    assert dbias is None
    assert all(torch.equal(a, b) for a, b in zip((loss, dhidden, dweight), ours, strict=True))


def test_token_weights_that_want_a_gradient_are_refused():
    hidden, weight, targets = inputs(4, 8, 9)
    weights = torch.ones(4, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"linear_cross_entropy: token_weights requires a gradient; it needs to be a constant"
    ):
        hw.linear_cross_entropy(hidden, weight, targets, token_weights=weights)
    with torch.no_grad():
        hw.linear_cross_entropy(hidden, weight, targets, token_weights=weights)


def test_webgpu_arrays_stay_on_the_gpu():
    hidden, weight, targets = inputs(30, 16, 50, BF16)
    arrays = [hw.webgpu.array(x).requires_grad_() for x in (hidden, weight)]
    on_gpu = hw.webgpu.array(targets)
    before = hw.webgpu.counts()
    loss = hw.linear_cross_entropy(*arrays, on_gpu)
    loss.backward()
    after = hw.webgpu.counts()
    assert (after.uploads, after.readbacks) == (before.uploads, before.readbacks)
    wanted = gradients(hw.linear_cross_entropy, hidden, weight, targets, backend="webgpu")
    found = (loss.detach().torch(), arrays[0].grad.torch(), arrays[1].grad.torch())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_second_order_gradients_raise(backend):
    """The gradients that a forward made are no constants: what is computed from them must not lose its graph."""
    hidden, weight, targets = inputs(6, 8, 11, device=DEVICE[backend])
    hidden.requires_grad_()
    loss = hw.linear_cross_entropy(hidden, weight, targets, backend=backend)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order gradients"):
        grad.square().sum().backward()


def test_second_order_gradients_raise_under_func():
    hidden, weight, targets = inputs(6, 8, 11)
    grad = torch.func.grad(lambda x: hw.linear_cross_entropy(x, weight, targets))
    with pytest.raises(NotImplementedError, match="second-order gradients"):
        torch.func.grad(lambda x: grad(x).square().sum())(hidden)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_gradient_that_is_nan_arrives(backend):
    hidden, weight, targets = inputs(6, 8, 11, device=DEVICE[backend])
    nan = torch.full((), torch.nan, device=DEVICE[backend])
    _, dhidden, dweight = gradients(hw.linear_cross_entropy, hidden, weight, targets, nan, backend=backend)
    assert dhidden.isnan().all()
    assert dweight.isnan().all()


@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_bad_target_is_loud_though_nothing_weighs(backend):
    hidden, weight, targets = inputs(6, 8, 11, device=DEVICE[backend])
    nothing = torch.zeros(6, device=DEVICE[backend])
    assert hw.linear_cross_entropy(hidden, weight, targets, token_weights=nothing, backend=backend) == 0
    targets[2] = 99
    assert hw.linear_cross_entropy(hidden, weight, targets, token_weights=nothing, backend=backend).isnan()


@pytest.mark.skipif(not settings.triton_interpret, reason="for Triton's interpreter (TRITON_INTERPRET=1)")
@pytest.mark.parametrize(("rows", "width", "classes"), [(150, 40, 3000), (70, 100, 2051), (97, 24, 4160)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_triton_windows_and_chunks_give_the_result_of_one(rows, width, classes, dtype, monkeypatch):
    """Scratch so small that there are several chunks of rows, several windows, rows that are kept and rows made again."""
    from headwise.backends.triton import linear_cross_entropy as on_triton

    torch.manual_seed(rows)
    monkeypatch.setattr(on_triton, "SCRATCH", 1 << 19)
    monkeypatch.setattr(on_triton, "_AGAIN", 64)
    hidden, weight = torch.randn(rows, width).to(dtype), (torch.randn(classes, width) / width**0.5).to(dtype)
    bias, targets = torch.randn(classes).to(dtype), torch.randint(0, classes, (rows,))
    targets[::7] = -100

    def loss_and_gradients(function):
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
        loss = function(*leaves)
        return loss, torch.autograd.grad(loss, leaves)

    loss, found = loss_and_gradients(lambda h, w, b: hw.linear_cross_entropy(h, w, targets, bias=b, backend="triton"))
    wanted_loss, wanted = loss_and_gradients(
        lambda h, w, b: F.cross_entropy(F.linear(h.double(), w.double(), b.double()), targets)
    )
    torch.testing.assert_close(loss.double(), wanted_loss, rtol=2e-6, atol=0)
    for ours_one, truth_one in zip(found, wanted, strict=True):
        error = (ours_one.double() - truth_one).norm() / truth_one.double().norm()
        assert error < (5e-3 if dtype == BF16 else 2e-6)

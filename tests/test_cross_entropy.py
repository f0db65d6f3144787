"""Cross entropy, beyond the case table: bad targets, memory, fixed bits, PyTorch's machinery and its own results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends_under_test import DEVICE, RUNNABLE

import headwise as hw
from headwise import nn
from headwise.config import settings

OPTIONS = [
    {},
    {"label_smoothing": 0.2},
    {"reduction": "sum"},
    {"reduction": "none", "label_smoothing": 0.1},
    {"ignore_index": 3, "label_smoothing": 0.3},
    {"ignore_index": 3, "reduction": "none"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_agrees_with_pytorch(options):
    logits = torch.randn(50, 17, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 17, (50,))
    targets[::4] = options.get("ignore_index", -100)
    ours, theirs = hw.cross_entropy(logits, targets, **options), F.cross_entropy(logits, targets, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    grad = torch.randn(ours.shape, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(ours, logits, grad), torch.autograd.grad(theirs, logits, grad), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize(
    "options", [{}, {"z_loss": 0.1}, {"softcap": 2.0}, {"z_loss": 0.1, "softcap": 2.0, "label_smoothing": 0.3}]
)
def test_gradients_are_those_of_the_formula(options):
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1, 5, -100, 0])
    assert torch.autograd.gradcheck(lambda x: hw.cross_entropy(x, targets, **options), logits)


@pytest.mark.parametrize("bad", [-1, 70, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 10.0}], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_target_outside_the_classes_gives_nan_for_its_row_alone(backend, options, bad):
    logits = torch.randn(12, 70, device=DEVICE[backend], requires_grad=True)
    targets = torch.randint(0, 70, (12,))
    targets[[2, 7]], targets[5] = bad, -100
    is_bad = targets == bad
    targets = targets.to(DEVICE[backend])
    losses = hw.cross_entropy(logits, targets, reduction="none", **options, backend=backend)
    assert torch.equal(losses.isnan().cpu(), is_bad)
    assert losses[5] == 0
    (dlogits,) = torch.autograd.grad(losses.sum(), logits)
    _, fused = hw.cross_entropy_forward_backward(logits.detach(), targets, reduction="none", **options, backend=backend)
    for gradient in (dlogits, fused):
        assert torch.equal(gradient.isnan().all(-1).cpu(), is_bad)
        assert torch.equal(gradient.isnan().any(-1).cpu(), is_bad)
    mean = hw.cross_entropy(logits, targets, **options, backend=backend)
    assert mean.isnan()
    (dlogits,) = torch.autograd.grad(mean, logits)
    assert torch.equal(dlogits.isnan().any(-1).cpu(), is_bad)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_validate_names_the_first_bad_target(backend, monkeypatch):
    monkeypatch.setattr(settings, "validate", True)
    logits = torch.randn(2, 3, 9, device=DEVICE[backend])
    targets = torch.tensor([[0, -100, 8], [1, 9, -1]], device=DEVICE[backend])
    message = r"cross_entropy: targets\[1, 1\] is 9; it needs to be from 0 to 8 or -100"
    with pytest.raises(ValueError, match=message):
        hw.cross_entropy(logits, targets, backend=backend)
    with pytest.raises(ValueError, match=message):
        hw.cross_entropy_forward_backward(logits, targets, backend=backend)
    hw.cross_entropy(logits[0], targets[0], backend=backend)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_gradients_are_written_when_every_target_is_ignored(backend, dtype, reduction):
    logits = torch.randn(9, 300).to(DEVICE[backend], dtype)
    logits[3], logits[4] = torch.nan, torch.inf
    logits.requires_grad_()
    targets = torch.full((9,), -100, device=DEVICE[backend])
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01}
    loss = hw.cross_entropy(logits, targets, **options, backend=backend)
    (dlogits,) = torch.autograd.grad(loss.sum(), logits)
    fused_loss, fused = hw.cross_entropy_forward_backward(logits.detach(), targets, **options, backend=backend)
    for value in (loss, dlogits, fused_loss, fused):
        assert torch.equal(value, torch.zeros_like(value))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_gives_the_same_bits_every_time(backend):
    logits = torch.randn(300, 5001, device=DEVICE[backend], requires_grad=True)
    targets = torch.randint(0, 5001, (300,), device=DEVICE[backend])

    def run():
        loss = hw.cross_entropy(logits, targets, backend=backend)
        fused = hw.cross_entropy_forward_backward(logits.detach(), targets, backend=backend)
        return loss.detach(), *torch.autograd.grad(loss, logits), *fused

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_loss_is_float32_and_gradient_has_the_dtype_of_the_logits(backend):
    logits = torch.randn(5, 40).to(DEVICE[backend], torch.bfloat16).requires_grad_()
    targets = torch.randint(0, 40, (5,), device=DEVICE[backend])
    loss = hw.cross_entropy(logits, targets, backend=backend)
    loss.backward()
    assert (loss.dtype, logits.grad.dtype) == (torch.float32, torch.bfloat16)
    loss, dlogits = hw.cross_entropy_forward_backward(logits.detach(), targets, backend=backend)
    assert (loss.dtype, dlogits.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_backward_twice_over_a_retained_graph(backend):
    logits = torch.randn(6, 500, device=DEVICE[backend], requires_grad=True)
    before = logits.detach().clone()
    loss = hw.cross_entropy(logits, torch.arange(6, device=DEVICE[backend]), softcap=9.0, backend=backend)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second)
    assert torch.equal(logits, before)


def _peak_allocated(run) -> int:
    """The most bytes that were allocated on top of what was there before, from the allocator's own record."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("layout", ["contiguous", "leading dims turned"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_one_gradient_and_a_few_blocks(dtype, options, layout):
    logits = torch.randn(8, 20, 65536).to(dtype)
    if layout != "contiguous":
        logits = logits.transpose(0, 1)
    targets = torch.randint(0, 65536, logits.shape[:2])
    targets[::3] = -100
    size, blocks = logits.numel() * logits.element_size(), 8 * 2**20
    assert size > 2 * blocks  # else the test proves nothing
    with torch.no_grad():
        assert _peak_allocated(lambda: hw.cross_entropy(logits, targets, **options)) < blocks
        assert _peak_allocated(lambda: hw.cross_entropy_forward_backward(logits, targets, **options)) < size + blocks
    leaf = logits.detach().requires_grad_()
    peak = _peak_allocated(lambda: torch.autograd.grad(hw.cross_entropy(leaf, targets, **options), leaf))
    assert size <= peak < size + blocks


def test_second_order_raises():
    logits = torch.randn(3, 5, requires_grad=True)
    (dlogits,) = torch.autograd.grad(hw.cross_entropy(logits, torch.tensor([0, 1, 2])), logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order"):
        dlogits.square().sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction):
    logits, targets = torch.randn(2, 3, 8), torch.tensor([[1, 2, -100], [0, 7, 3]])
    options = (-100, reduction, 0.1, 1e-3, 30.0, "cpu")
    grad = torch.randn(2, 3) if reduction == "none" else torch.randn(())
    torch.library.opcheck(torch.ops.headwise.cross_entropy_forward_backward, (logits, targets, *options))
    _, stats = torch.ops.headwise.cross_entropy_forward(logits, targets, *options)
    torch.library.opcheck(torch.ops.headwise.cross_entropy_backward, (grad, stats, logits, targets, *options))
    logits.requires_grad_()
    torch.library.opcheck(torch.ops.headwise.cross_entropy_forward, (logits, targets, *options))


def test_one_compiled_function_takes_every_shape():
    def loss_of(logits, targets, smoothing):
        return hw.cross_entropy(logits, targets, label_smoothing=smoothing, z_loss=1e-3)

    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 5, 17), (2, 9, 40), (6, 4, 111)):
        logits = torch.randn(shape, requires_grad=True)
        targets = torch.randint(0, shape[-1], shape[:-1])
        ours, eager = compiled(logits, targets, 0.1), loss_of(logits, targets, 0.1)
        assert torch.equal(ours, eager)
        assert torch.equal(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, eager)))


def test_module():
    logits, targets = torch.randn(2, 3, 8), torch.tensor([[1, 2, 6], [0, 7, 3]])
    module = nn.CrossEntropyLoss(ignore_index=6, reduction="sum", label_smoothing=0.1, z_loss=0.01, softcap=5.0)
    assert torch.equal(module(logits, targets), hw.cross_entropy(logits, targets, 6, "sum", 0.1, 0.01, 5.0))

"""`headwise.webgpu.capture`: a replayed step computes what the eager step does, bit for bit, and says what it cannot do."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise import nn, webgpu
from headwise.webgpu import CaptureError, capture

DEVICE = "webgpu"
VOCABULARY = 50


def model_of(**options) -> nn.TransformerLM:
    torch.manual_seed(1)
    shape = {"vocabulary": VOCABULARY, "dim": 32, "layers": 2, "heads": 2, "positions": 64, "windows": (6, None)}
    return nn.TransformerLM(nn.TransformerConfig(**{**shape, "key_heads": 1, **options})).to(DEVICE)


class Training:
    """A model, its optimizer, and one step of them."""

    def __init__(self, **options) -> None:
        self.model = model_of(**options)
        self.rate = torch.tensor(1e-2, device=DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, weight_decay=0.1, capturable=True)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = F.dropout(self.model.hidden(ids[:, :-1]), 0.1)
        loss = hw.linear_cross_entropy(loss, self.model.embedding.weight, ids[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def everything(self) -> list[torch.Tensor]:
        """Weights, moments and step counts."""
        moments = [x for kept in self.optimizer.state.values() for x in kept.values()]
        return [x.detach().cpu() for x in (*self.model.parameters(), *moments)]


def test_replayed_training_is_eager_training_bit_for_bit():
    """Attention with dropout, dropout, tied weights, clipping, AdamW with a learning rate that changes."""
    batches = [torch.randint(VOCABULARY, (2, 18)) for _ in range(6)]
    rates = [0.01 / (i + 1) for i in range(6)]
    eager, captured = Training(dropout=0.1), Training(dropout=0.1)
    losses = []
    torch.manual_seed(3)
    for ids, rate in zip(batches, rates, strict=True):
        eager.rate.fill_(rate)
        losses.append(eager.step(ids.to(DEVICE)).item())
    assert len(set(losses)) == 6

    torch.manual_seed(3)
    captured.rate.fill_(rates[0])
    found = [captured.step(batches[0].to(DEVICE)).item()]
    captured.rate.fill_(rates[1])
    ids = batches[1].to(DEVICE)
    with capture(ids, rate=captured.rate) as step:
        loss = captured.step(ids)
    found.append(loss.item())
    for i in (2, 3, 4):
        # From the CPU and from the GPU, as bytes and as elements.
        step(batches[i] if i == 2 else batches[i].to(DEVICE), rate=torch.tensor(rates[i]))
        found.append(loss.item())
    captured.rate.fill_(rates[5])  # eager code after a replay sees and changes the same memory
    found.append(captured.step(batches[5].to(DEVICE)).item())
    assert found == losses
    for ours, theirs in zip(captured.everything(), eager.everything(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_replay_is_one_submission_and_uploads_only_its_inputs():
    x, w = torch.randn(3, 40, device=DEVICE), torch.randn(40, 40, device=DEVICE)
    with capture(x=x) as step:
        y = x
        for _ in range(100):  # more than eager code puts into one command buffer
            y = torch.tanh(y @ w)
    webgpu.synchronize()
    before = webgpu.counts()
    step(x=torch.randn(3, 40))
    after = webgpu.counts()
    assert after.submissions == before.submissions + 1
    assert after.dispatches == before.dispatches + 200
    assert (after.uploads, after.uploaded_bytes) == (before.uploads + 1, before.uploaded_bytes + 480)
    assert (after.readbacks, after.pipelines) == (before.readbacks, before.pipelines)


def test_its_memory_is_its_own():
    """Results keep their places, whatever is made, dropped and overwritten around the replays."""
    x = torch.randn(5, 64)
    given = x.to(DEVICE)
    with capture(given) as step:
        hidden = torch.exp(given)
        result = (hidden + 1) * torch.sin(hidden)
        del hidden
    for _ in range(3):
        x = torch.randn(5, 64)
        noise = [torch.full((5, 64), torch.nan, device=DEVICE) for _ in range(20)]
        step(x)
        noise += [torch.full((5, 64), torch.nan, device=DEVICE) for _ in range(20)]
        torch.testing.assert_close(result.cpu(), (torch.exp(x) + 1) * torch.sin(torch.exp(x)), rtol=1e-4, atol=1e-4)
        assert all(y.isnan().all().item() for y in noise)
        del noise


def test_uploads_after_a_capture_wait_for_what_was_dispatched_before():
    """Buffers know in which command buffer they were last used: a capture does not begin to count anew."""
    webgpu.synchronize()
    for _ in range(3):
        dropped = [torch.full((100,), 7.0, device=DEVICE) for _ in range(20)]
        del dropped  # their kernels are not submitted yet
        with capture():
            pass
        uploaded = [torch.arange(100.0).to(DEVICE) for _ in range(20)]
        assert all(x.tolist() == list(range(100)) for x in uploaded)


def test_a_weight_that_is_dropped_outside_stays_with_the_capture():
    x, weight = torch.ones(8, device=DEVICE), torch.full((8,), 3.0, device=DEVICE)
    with capture(x) as step:
        y = x * weight
    del weight
    gc.collect()
    others = [torch.full((8,), 7.0, device=DEVICE) for _ in range(20)]
    step(torch.full((8,), 2.0))
    assert y.tolist() == [6.0] * 8
    assert all(z.tolist() == [7.0] * 8 for z in others)


def test_memory_goes_back_when_nothing_refers_to_it():
    torch.webgpu.empty_cache()
    x = torch.ones(300_000, device=DEVICE)
    webgpu.synchronize()

    def free() -> int:
        return sum(size * len(buffers) for size, buffers in x._device.pool.free.items())

    with capture(x) as step:
        y = (x + 1) * (x + 2)
    before = free()
    del step
    gc.collect()
    assert y[0].item() == 6.0
    assert free() == before  # a tensor of the block holds all of it
    del y
    gc.collect()
    assert free() >= before + 2 * 1_200_000


def test_random_draws_are_those_of_eager_code():
    def draw() -> torch.Tensor:
        shape = (40,)
        noise = torch.randn(shape, device=DEVICE) + torch.rand(shape, device=DEVICE)
        return noise + torch.randint(9, shape, device=DEVICE) + F.dropout(torch.ones(shape, device=DEVICE), 0.3)

    torch.manual_seed(7)
    eager = [draw().cpu() for _ in range(5)]
    torch.manual_seed(7)
    with capture() as step:
        drawn = draw()
    found = [drawn.cpu()]
    for _ in range(2):
        step()
        found.append(drawn.cpu())
    found.append(draw().cpu())
    step.replay()
    found.append(drawn.cpu())
    for ours, theirs in zip(found, eager, strict=True):
        assert torch.equal(ours, theirs)
    torch.manual_seed(7)
    step()
    assert torch.equal(drawn.cpu(), eager[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_drops_the_same(reentrant):
    """Both results are linear in x: x · gradient is their sum, if forward and recomputation dropped the same."""

    def linear(x: torch.Tensor) -> torch.Tensor:
        q = torch.ones(1, 2, 20, 4, device=DEVICE)
        return F.dropout(x, 0.5) + hw.attention(q, q, x, dropout=0.5)

    def run() -> torch.Tensor:
        y = checkpoint(linear, x, use_reentrant=reentrant)
        x.grad = None
        y.sum().backward()
        return torch.stack([y.sum().detach(), (x.detach() * x.grad).sum()])

    x = torch.randn(1, 2, 20, 4, device=DEVICE, requires_grad=True)
    torch.manual_seed(5)
    eager = [run().cpu() for _ in range(3)]
    torch.manual_seed(5)
    with capture() as step:
        sums = run()
    for expected in eager:
        total, again = sums.tolist()
        assert again == pytest.approx(total, rel=1e-4)
        assert torch.equal(sums.cpu(), expected)
        step()
    assert len({x[0].item() for x in eager}) == 3


def test_decoding_with_a_cache():
    """Greedy decoding, captured, is `TransformerLM.generate`; the cache holds the same bits."""
    model = model_of().requires_grad_(False)
    prompt = torch.randint(VOCABULARY, (2, 5), device=DEVICE)
    expected = model.generate(prompt, 12).cpu()
    cache = model.cache(2, 40)
    cache.extend(5)
    token = model(prompt, cache=cache)[:, -1:].argmax(-1)
    made = [token.cpu()]
    cache.extend(1)  # once by itself: the next step has the same layouts
    token.copy_(model(token, cache=cache)[:, -1:].argmax(-1))
    made.append(token.cpu())
    with capture() as step:
        cache.extend(1)
        token.copy_(model(token, cache=cache)[:, -1:].argmax(-1))
    made.append(token.cpu())
    for _ in range(9):
        step()
        made.append(token.cpu())
    assert torch.equal(torch.cat(made, 1), expected)
    assert cache.lengths.tolist() == [16, 16]
    cache.trim(cache.lengths)  # what the host knows of the lengths
    cache.extend(1)
    assert cache.positions.tolist() == [[16], [16]]
    cache.reset()  # the captured step serves the next prompt
    cache.extend(5)
    token.copy_(model(prompt, cache=cache)[:, -1:].argmax(-1))
    made = [token.cpu()]
    for _ in range(4):
        step()
        made.append(token.cpu())
    assert torch.equal(torch.cat(made, 1), expected[:, :5])
    assert cache.lengths.tolist() == [9, 9]

    paged = model.cache(2, 40, page_size=8)
    with pytest.raises(RuntimeError, match="hands out pages on the CPU"), capture():
        paged.extend(1)


def test_what_is_uploaded_once_and_changed_is_uploaded_again():
    x = torch.ones(4, device=DEVICE)
    with capture(x) as step:
        total = torch.tensor(2.0, device=DEVICE)
        total += x.sum()
        y = x * torch.tensor(3.0)
    for _ in range(2):
        step(torch.full((4,), 5.0))
        assert total.item() == 22.0
        assert y.tolist() == [15.0] * 4


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda x: x.sum().item(), r"item\(\)"),
        (lambda x: float(x[0]), "aten._local_scalar_dense.default"),
        (lambda x: x if x[0] > 0 else -x, "aten._local_scalar_dense.default"),
        (lambda x: x[x > 0], "aten.index.Tensor"),
        (lambda x: x.nonzero(), "aten.nonzero.default"),
        (lambda x: x.masked_select(x > 0), "aten.masked_select.default"),
        (lambda x: x.cpu(), "aten._to_copy.default"),
        (lambda x: x.tolist(), r"tolist\(\)"),
        (lambda x: repr(x), "printing"),
        (lambda x: torch.zeros(4).copy_(x), "aten.copy_.default"),
    ],
    ids=["item", "float", "if", "mask", "nonzero", "masked_select", "cpu", "tolist", "repr", "copy"],
)
def test_reading_back_names_the_operator_and_the_way_out(read, named):
    x = torch.ones(4, device=DEVICE)
    with (
        pytest.raises(CaptureError, match=f"({named}) reads elements back inside of a capture.*torch.where"),
        capture(),
    ):
        read(x)
    assert (x + 1).tolist() == [2.0] * 4  # the device is as it was


def test_reading_back_within_a_backward_pass():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float(grad.sum())

    x = torch.ones(4, device=DEVICE, requires_grad=True)
    with pytest.raises(CaptureError, match="reads elements back"), capture():
        Reads.apply(x).sum().backward()


def test_uploads_are_refused():
    x = torch.ones(4, device=DEVICE)
    with pytest.raises(CaptureError, match=r"\(4,\) of float32 goes from the CPU.*pass it to capture"), capture():
        x + torch.ones(4).to(DEVICE)
    with pytest.raises(CaptureError, match="goes from the CPU"), capture():
        torch.randperm(4, device=DEVICE)


def test_an_optimizer_that_a_replay_would_not_bring_forward_is_refused():
    def made(kind, warm: bool = True, **options):
        p = torch.nn.Parameter(torch.ones(4, device=DEVICE))
        p.grad = torch.ones(4, device=DEVICE)
        optimizer = kind([p], lr=0.1, **options)
        if warm:
            optimizer.step()
        return optimizer

    with pytest.raises(CaptureError, match=r"AdamW keeps 'step' on the CPU.*capturable=True"), capture():
        made(torch.optim.AdamW).step()
    cold = made(torch.optim.AdamW, warm=False, capturable=True)
    with pytest.raises(CaptureError, match=r"AdamW made its state .* inside of the capture.*Run one step"), capture():
        cold.step()
    cold = made(torch.optim.SGD, warm=False, momentum=0.9)
    with pytest.raises(CaptureError, match="SGD made its state"), capture():
        cold.step()

    optimizer = made(torch.optim.SGD, momentum=0.9)
    with capture() as step:
        optimizer.step()
    step()
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(CaptureError, match=r"lr of SGD is 0.05 now and was 0.1 when.*tensor on webgpu"):
        step()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda o, p: o.param_groups[0]["lr"].fill_(0.05), r"lr of AdamW is 0.05.* now and was 0.1.* when"),
        (lambda o, p: o.param_groups[0].update(lr=torch.tensor(0.1, device=DEVICE)), "lr of AdamW is a tensor now"),
        (lambda o, p: o.param_groups[0].update(maximize=True), "maximize of AdamW is True now and was False.*anew"),
        (lambda o, p: o.load_state_dict(copy.deepcopy(o.state_dict())), "other groups of parameters.*load_state_dict"),
        (lambda o, p: o.add_param_group({"params": [p.detach().clone()]}), "other groups of parameters.*anew"),
        (lambda o, p: setattr(p, "data", p.detach().clone()), "a parameter of AdamW lies in other memory"),
    ],
    ids=["rate", "another rate", "flag", "state", "group", "data"],
)
def test_what_changes_after_the_capture_and_would_be_without_effect_is_refused(change, told):
    p = torch.nn.Parameter(torch.ones(4, device=DEVICE))
    p.grad = torch.ones(4, device=DEVICE)
    optimizer = torch.optim.AdamW([p], lr=torch.tensor(0.1), fused=True)
    optimizer.step()
    with capture() as step:
        optimizer.step()
    step()
    change(optimizer, p)
    with pytest.raises(CaptureError, match=told):
        step()


def test_gradients_from_before_the_block_that_others_took_the_place_of_are_refused():
    p = torch.nn.Parameter(torch.ones(4, device=DEVICE))
    optimizer = torch.optim.SGD([p], lr=1.0)
    p.sum().backward()
    with capture() as step:
        optimizer.step()
    p.grad.fill_(2)  # in place: the replay sees it
    step()
    assert p.tolist() == [-2.0] * 4
    optimizer.zero_grad()
    for _ in range(2):  # gone, and then another
        with pytest.raises(CaptureError, match="a gradient that SGD took from before the capture is gone or lies"):
            step()
        (p * 3).sum().backward()
    assert p.tolist() == [-2.0] * 4
    with capture() as step:  # whose own gradients go and come
        optimizer.zero_grad()
        (p * 5).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    step()
    assert p.tolist() == [-12.0] * 4


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9})],
    ids=["adamw", "adam", "sgd"],
)
def test_a_rate_on_the_gpu_changes_a_fused_step(kind, options):
    rates, gradients = (0.1, 0.05, 0.2), torch.randn(3, 37)
    on_cpu = torch.randn(37).requires_grad_()
    p, rate = on_cpu.detach().to(DEVICE).requires_grad_(), torch.tensor(rates[0], device=DEVICE)
    theirs, ours = kind([on_cpu], weight_decay=0.1, **options), kind([p], rate, weight_decay=0.1, fused=True, **options)
    for gradient, now in zip(gradients, rates, strict=True):
        theirs.param_groups[0]["lr"], on_cpu.grad = now, gradient
        theirs.step()
    p.grad = gradients[0].to(DEVICE)
    ours.step()
    p.grad.copy_(gradients[1])
    rate.fill_(rates[1])
    with capture(p.grad, rate=rate) as step:
        ours.step()
    step(gradients[2], rate=torch.tensor(rates[2]))
    torch.testing.assert_close(p.detach().cpu(), on_cpu.detach(), rtol=1e-5, atol=1e-6)


def test_bad_inputs_name_the_argument():
    x = torch.ones(4, 2, device=DEVICE)
    with pytest.raises(TypeError, match=r"capture: x is a tensor \(4,\) of float32 on cpu"):
        capture(x=torch.ones(4))
    with capture(x, scale=torch.ones((), device=DEVICE)) as step:
        y = x + 1
    with pytest.raises(ValueError, match=r"input 0 is a tensor \(4, 3\) of float32 on cpu; .* \(4, 2\) of float32"):
        step(torch.ones(4, 3), scale=torch.ones(()))
    with pytest.raises(ValueError, match=r"scale is a tensor \(\) of float64.* \(\) of float32 on webgpu"):
        step(torch.ones(4, 2), scale=torch.ones((), dtype=torch.float64))
    with pytest.raises(TypeError, match="scale is missing"):
        step(torch.ones(4, 2))
    with pytest.raises(TypeError, match=r"other was given and is none of the inputs.*input 0, scale"):
        step(torch.ones(4, 2), other=torch.ones(()))
    with pytest.raises(TypeError, match="3 inputs"):
        step(x, x, x)
    assert y[0, 0].item() == 2.0


def test_inputs_of_any_layout():
    whole = torch.zeros(6, 8, device=DEVICE)
    part, odd = whole[1:4, ::2], torch.zeros(5, dtype=torch.uint8, device=DEVICE)
    with capture(part=part, odd=odd) as step:
        y = part * 2 + odd[:4]
    a, b = torch.randn(3, 4), torch.arange(5, dtype=torch.uint8)
    for place in ("cpu", DEVICE):
        step(part=a.to(place), odd=b.to(place))
        torch.testing.assert_close(y.cpu(), a * 2 + b[:4])
        whole[1:4, ::2] = 0
        assert whole.abs().sum().item() == 0  # nothing beside the input was written


def test_inputs_that_share_memory():
    a, b = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
    with capture(a=a, b=b) as step:
        y = a * 10 + b
    step(a=b, b=a)  # each gets what the other had
    assert y.tolist() == [10.0] * 4
    whole = torch.arange(8.0, device=DEVICE)
    with capture(whole[:4]) as step:
        y = whole[:4] * 1
    step(whole[2:6])
    assert y.tolist() == [2.0, 3.0, 4.0, 5.0]
    with pytest.raises(ValueError, match="capture: b and a share memory"):
        capture(a=whole[:4], b=whole[2:6])
    with pytest.raises(ValueError, match="a is expanded"):
        capture(a=whole[:1].expand(4))


def test_constants_of_an_operator_are_part_of_the_recording():
    """Pooling and interpolation upload matrices that follow from their options."""
    x = torch.randn(1, 2, 6, 6, requires_grad=True)
    given = x.detach().to(DEVICE).requires_grad_()

    def resampled(x: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(F.avg_pool2d(x, 3, 2, 1), scale_factor=2, mode="bilinear")
        return torch.autograd.grad(y.square().sum(), x)[0]

    with capture(given) as step:
        y = resampled(given)
    new = torch.randn(1, 2, 6, 6)
    step(new)
    torch.testing.assert_close(y.cpu(), resampled(new.requires_grad_()), rtol=1e-4, atol=1e-5)


def test_the_memory_summary_inside_of_a_capture_is_that_of_the_device():
    kept = torch.ones(1 << 20, device=DEVICE)
    with capture():
        told = webgpu.memory_summary()
    assert float(told.split(": ")[1].split(" MiB in use")[0]) >= kept.numel() * 4 / (1 << 20)


def test_blocks_that_fail_nest_or_come_twice():
    x = torch.ones(4, device=DEVICE)
    with pytest.raises(ZeroDivisionError), capture(x) as failed:
        x / (1 // 0)
    with pytest.raises(CaptureError, match="the capture is failed"):
        failed(x)
    with pytest.raises(CaptureError, match="inside of a capture"), capture(), capture():
        pass
    with capture(x) as step:
        y = x + 1
        with pytest.raises(CaptureError, match="nothing to replay"):
            step(x)
    with pytest.raises(CaptureError, match="records one block"), step:
        pass
    with capture() as other, pytest.raises(CaptureError, match="a replay inside of a capture"):
        step(x)
    other()  # nothing was recorded
    assert not torch.webgpu.is_current_stream_capturing()
    assert y.tolist() == [2.0] * 4


def test_two_captures_share_what_both_use():
    weight, grad = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    with capture(grad) as add:
        weight += grad
    with capture() as double:
        weight *= 2
    assert weight.tolist() == [4.0] * 4
    add(torch.full((4,), 3.0))
    double()
    add(torch.full((4,), 1.0))
    assert weight.tolist() == [15.0] * 4
    assert copy.deepcopy(weight).tolist() == [15.0] * 4

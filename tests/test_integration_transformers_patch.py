"""patch, unpatch and explain: models of Transformers with our norms, gated MLPs and loss."""

from __future__ import annotations

import copy
import inspect
import io
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from test_integration_transformers import hold, inputs_of
from torch import nn
from transformers_models import (
    BY_NAME,
    MODELS,
    NEW,
    Float64Throughout,
    build,
    compiled_in_one_graph,
    in_float64,
    tokens,
)

import headwise.integrations.transformers as adapter
from headwise import testing
from headwise.backends.registry import use_backend
from headwise.integrations import _lazy_logits, _patch_embedding, _patch_glu, _patch_norms, _patch_rope
from headwise.integrations._lazy_logits import LazyLogits

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

# What is swapped in two layers of each, and what is refused ("no …").
EXPECTED = {
    "llama": {"rms_norm": 5, "glu, silu": 2, "rope": 2, "embedding": 1, "loss": 1},
    "qwen3": {"rms_norm": 9, "glu, silu": 2, "rope": 2, "embedding": 1, "loss": 1},
    "mistral": {"rms_norm": 5, "glu, silu": 2, "rope": 2, "embedding": 1, "loss": 1},
    "gemma2": {"rms_norm, 1 + weight": 9, "glu, gelu_tanh": 2, "rope": 2, "no embedding": 1, "loss": 1},
    "gemma3": {"rms_norm, 1 + weight": 13, "glu, gelu_tanh": 2, "rope": 2, "no embedding": 1, "loss": 1},
    "gpt_oss": {"rms_norm": 5, "no glu": 2, "rope": 2, "embedding": 1, "loss": 1},
    "deepseek_v3": {"rms_norm": 9, "glu, silu": 2, "no glu": 1, "no rope": 2, "embedding": 1, "loss": 1},
    "bert": {"layer_norm": 6, "embedding": 3, "loss": 1},
    "modernbert": {"layer_norm": 6, "glu, gelu": 2, "rope": 2, "embedding": 1, "loss": 1},
    "t5": {"rms_norm": 12, "embedding": 5, "loss": 1},
    "vit": {"layer_norm": 5},
    "whisper": {"layer_norm": 12, "embedding": 2, "no embedding": 1, "loss": 1},
    "gemma4": {"rms_norm": 15, "glu, gelu_tanh": 2, "rope": 2, "no embedding": 1, "loss": 1},
}
# Calls of embedding in one forward pass: T5 has one table for two stacks, and reads its positions in each.
LOOK_UPS = {"t5": 4}
if not NEW:  # each expert an MLP of its own; Gemma 2 scales behind its embedding
    EXPECTED["gemma2"] = {"rms_norm, 1 + weight": 9, "glu, gelu_tanh": 2, "rope": 2, "embedding": 1, "loss": 1}
    EXPECTED["deepseek_v3"] = {"rms_norm": 9, "glu, silu": 6, "no rope": 2, "embedding": 1, "loss": 1}
SOME = [BY_NAME[name] for name in ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "bert", "t5") if name in BY_NAME]
WITH_LOSS = [model for model in SOME if "loss" in EXPECTED[model.name]]
each = pytest.mark.parametrize("model", SOME, ids=lambda model: model.name)
each_with_loss = pytest.mark.parametrize("model", WITH_LOSS, ids=lambda model: model.name)


@pytest.fixture
def calls(monkeypatch):
    """How often each op was called by a patched model."""
    counts = Counter()

    def watch(module, name):
        op = getattr(module, name)

        def spy(*args, **kwargs):
            counts[name] += 1
            return op(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)

    watch(_patch_norms, "rms_norm")
    watch(_patch_norms, "layer_norm")
    watch(_patch_glu, "glu")
    watch(_patch_rope, "rope")
    watch(_patch_embedding, "embedding")
    watch(_lazy_logits, "linear_cross_entropy")
    return counts


def counted(report):
    return Counter(row.what if row.swapped else f"no {row.what}" for row in report)


def attributes(model):
    """Every attribute of every module, by identity where it is not a container."""
    return [(path, sorted(module.__dict__), module.training) for path, module in model.named_modules()]


WITHOUT_DROPOUT = {"bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}}


def models(model):
    own, ours = (build(model, "eager", **WITHOUT_DROPOUT.get(model.name, {})) for _ in range(2))
    adapter.patch(ours)
    return own, ours


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_explain(model):
    built = build(model, "eager")
    before = attributes(built)
    report = adapter.explain(built)
    assert attributes(built) == before, "explain changed something"
    assert counted(report) == EXPECTED[model.name]
    assert all(row.swapped != bool(row.reason) for row in report)
    assert all(len(line) <= 80 for line in str(report).splitlines())
    assert adapter.patch(built) == report
    assert adapter.explain(built) == report == adapter.patch(built)
    adapter.unpatch(built)
    assert attributes(built) == before


@each
def test_logits_and_gradients(model, calls):
    own, ours = models(model)
    inputs, tokens_that_count = inputs_of(model.name, "right")
    calls.clear()
    hold(own, ours, inputs, tokens_that_count)
    wanted = Counter()
    for what, count in EXPECTED[model.name].items():
        if what != "loss" and not what.startswith("no "):
            wanted[what.split(",")[0]] += LOOK_UPS.get(model.name, count) if what == "embedding" else count
    assert calls == wanted


def labelled():
    """Tokens and labels, some of them ignored."""
    ids = tokens()
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


def loss_and_gradients(model, **options):
    ids, labels = labelled()
    model.train().zero_grad()
    output = model(ids, labels=labels, **options)
    output.loss.backward()
    gradients = {f"grad of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), **gradients}, output


@each_with_loss
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 50}], ids=["mean", "num_items"])
def test_loss_and_gradients(model, options, calls):
    own, ours = models(model)
    with Float64Throughout():
        truth, _ = loss_and_gradients(in_float64(own), **options)
    plain, _ = loss_and_gradients(own, **options)
    calls.clear()
    results, output = loss_and_gradients(ours, **options)
    assert calls["linear_cross_entropy"] == 1
    assert not output.logits.was_read(), "the logits were built"
    assert results.keys() == truth.keys() == plain.keys()
    assert not [str(e) for e in testing.compare_all(results, truth, plain) if not e.ok]


def three_steps(model):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(3):
        ids, labels = labelled()
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@each_with_loss
def test_three_training_steps(model):
    own, ours = models(model)
    with Float64Throughout():
        truth = three_steps(in_float64(own))
    error = testing.compare("losses", three_steps(ours), truth, three_steps(own))
    assert error.ok, str(error)
    assert truth[-1] < 0.99 * truth[0]


@each
def test_unpatch_restores_every_bit(model):
    own, ours = models(model)
    state = ours.state_dict()
    adapter.unpatch(ours)
    assert attributes(ours) == attributes(own)
    assert state.keys() == own.state_dict().keys()
    inputs, _ = inputs_of(model.name, "right")
    assert torch.equal(ours(**inputs).logits, own(**inputs).logits)
    adapter.unpatch(own)  # never patched: nothing happens
    assert attributes(ours) == attributes(own)


def test_a_copy_computes_with_its_own_weights(calls):
    _, ours = models(BY_NAME["gemma2"])
    ids, labels = labelled()
    before = ours.train()(ids, labels=labels)
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.25)
    calls.clear()
    of_the_copy = copied(ids, labels=labels)
    calls.pop("embedding", None)
    assert calls == {"rms_norm": 9, "glu": 2, "rope": 2, "linear_cross_entropy": 1}
    assert torch.equal(ours(ids, labels=labels).loss, before.loss)
    unpatched = copy.deepcopy(copied)
    adapter.unpatch(unpatched)
    torch.testing.assert_close(of_the_copy.loss, unpatched(ids, labels=labels).loss, rtol=1e-5, atol=0)
    assert abs(of_the_copy.loss - before.loss) > 0.01
    of_the_copy.loss.backward()
    assert all(p.grad is None for p in ours.parameters())
    assert all(p.grad is not None for p in copied.parameters())
    for module in copied.modules():
        forward = module.__dict__.get("forward")
        assert forward is None or forward.__self__ is module
    adapter.unpatch(ours)


def test_pickled(calls):
    """A patched model comes back from a file as it was before the patch, and may be patched again."""
    own, ours = models(BY_NAME["llama"])
    for module in (*own.modules(), *ours.modules()):
        module.__dict__.pop("_kernel_funcs", None)  # of the package `kernels`: a local class, which nobody can pickle
    stored = io.BytesIO()
    torch.save(ours, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    calls.clear()
    assert torch.equal(loaded(tokens()).logits, own(tokens()).logits)
    assert not calls
    assert counted(adapter.patch(loaded)) == EXPECTED["llama"]
    calls.clear()  # recognising calls them too
    loaded(tokens())
    assert calls == {"rms_norm": 5, "glu": 2, "rope": 2, "embedding": 1}
    adapter.unpatch(loaded)
    assert attributes(loaded) == attributes(own)


def test_what_runs_the_model_says_nothing_about_the_search():
    """It computes on the CPU, whatever backend and device the caller has chosen."""
    model = build(BY_NAME["llama"], "eager")
    expected = adapter.explain(model)
    assert {row.what for row in expected} >= {"rope", "rms_norm", "loss"}
    with use_backend("triton"), torch.device("meta"):
        assert adapter.explain(model) == expected


def test_names_hooks_and_signature_stay():
    own, ours = models(BY_NAME["llama"])
    assert inspect.signature(ours.forward) == inspect.signature(own.forward)
    assert repr(ours) == repr(own)
    seen = []
    for name in ("model.norm", "model.layers.0.mlp", "model.layers.0.mlp.gate_proj", "lm_head"):
        ours.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    ours(tokens())
    assert seen == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp", "model.norm", "lm_head"]


# ------------------------------------------------------------------------------------------------- look-alikes


class Norm(nn.Module):
    """x / rms(x) * weight, as in Llama; the cases below change one thing each."""

    def __init__(self, width=16, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class HalfOffset(Norm):
    def forward(self, x):
        return super().forward(x) * (self.weight + 0.5) / self.weight


class EpsOutside(Norm):
    def forward(self, x):
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps))


class OtherEps(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps))


class OverAll(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean() + self.eps))


class Gated(Norm):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


class OnlyInTraining(Norm):
    def forward(self, x):
        return super().forward(x) * (0.9 if self.training else 1.0)


@pytest.mark.parametrize("kind", [HalfOffset, EpsOutside, OtherEps, OverAll, Gated, OnlyInTraining])
def test_a_norm_of_another_formula_is_refused(kind):
    module = nn.Sequential(kind())
    (row,) = adapter.patch(module)
    assert (row.path, row.what, row.swapped) == ("0", "norm", False)
    assert "forward" in row.reason
    assert "forward" not in module[0].__dict__


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (Norm(), "rms_norm"), (Norm(eps=1e-2), "rms_norm"), (nn.LayerNorm(16), "layer_norm"),
        (nn.LayerNorm(16, bias=False), "layer_norm"), (nn.RMSNorm(16, eps=1e-5), "rms_norm"),
        (nn.RMSNorm(16), None), (nn.GroupNorm(1, 16), None), (nn.BatchNorm1d(16), None),
        (nn.InstanceNorm1d(16, affine=True), None),
    ],
)  # fmt: skip
def test_which_norms(module, what):
    (row,) = adapter.explain(module)
    assert (row.what if row.swapped else None) == what, row


class Mlp(nn.Module):
    def __init__(self, activation=nn.functional.silu, names=("gate", "up", "down")):
        super().__init__()
        for name, sizes in zip(names, ((16, 24), (16, 24), (24, 16)), strict=True):
            setattr(self, name, nn.Linear(*sizes))
        self.activation, self.names = activation, names

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.activation(gate(x)) * up(x))


class NotMultiplied(Mlp):
    def forward(self, x):
        return self.down(self.activation(self.gate(x)) + self.up(x))


class Fused(nn.Module):
    def __init__(self, interleaved=False):
        super().__init__()
        self.both, self.out, self.interleaved = nn.Linear(16, 48), nn.Linear(24, 16), interleaved
        self.dropout = nn.Dropout(0.25)

    def forward(self, x):
        y = self.both(x)
        gate, up = (y[..., ::2], y[..., 1::2]) if self.interleaved else y.chunk(2, dim=-1)
        return self.out(self.dropout(nn.functional.gelu(gate) * up))


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (Mlp(), "glu, silu"), (Mlp(names=("w1", "w3", "w2")), "glu, silu"), (Mlp(torch.relu), "glu, relu"),
        (Mlp(names=("c", "a", "b")), "glu, silu"), (Fused(), "glu, gelu"), (Fused(True), None),
        (Mlp(lambda x: x * torch.sigmoid(1.702 * x)), None), (NotMultiplied(), None),
    ],
)  # fmt: skip
def test_which_mlps(module, what):
    x, training = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)), module.training
    torch.manual_seed(1)
    own = module(x)
    (row,) = adapter.patch(module)
    assert (row.what if row.swapped else None) == what, row
    assert bool(row.reason) == (what is None)
    torch.manual_seed(1)  # dropout draws the same
    torch.testing.assert_close(module(x), own, rtol=1e-5, atol=1e-5)
    assert module.training is training


def test_a_foreign_forward_is_left_alone():
    model = build(BY_NAME["llama"], "eager")
    norm = model.model.norm
    norm.forward = foreign = lambda x: x
    rows = {row.path: row for row in adapter.patch(model)}
    assert "someone else" in rows["model.norm"].reason
    adapter.unpatch(model)
    assert norm.forward is foreign


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize(("x", "weight"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_norm_with_a_weight_of_another_dtype(name, x, weight):
    own, ours = models(BY_NAME[name])
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(x)
    expected, result = own.model.norm.to(weight)(inputs), ours.model.norm.to(weight)(inputs)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result.float(), expected.float(), rtol=0.02, atol=0.02)


# ------------------------------------------------------------------------------------------------------ the loss


@each_with_loss
def test_who_reads_logits_gets_them(model):
    own, ours = models(model)
    ids, labels = labelled()
    expected, output = own.train()(ids, labels=labels), ours.train()(ids, labels=labels)
    assert type(output.logits) is LazyLogits
    assert output.logits.shape == expected.logits.shape
    assert output.logits.dtype == expected.logits.dtype
    assert output.logits.requires_grad
    assert not output.logits.was_read()
    torch.testing.assert_close(output.logits + 0, expected.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
    assert type(output.logits.softmax(-1)) is torch.Tensor
    output.logits.sum().backward()
    assert ours.get_output_embeddings().weight.grad is not None
    # Without labels, or not in training, there is nothing special about them.
    assert type(ours.eval()(ids, labels=labels).logits) is torch.Tensor
    unlabelled = {"decoder_input_ids": ids} if model.name == "t5" else {}
    assert type(ours.train()(ids, **unlabelled).logits) is torch.Tensor


def test_logits_read_after_the_step_are_refused():
    _, ours = models(BY_NAME["llama"])
    ids, labels = labelled()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    output = ours.train()(ids, labels=labels)
    output.loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="read after the weights were changed"):
        output.logits.argmax(-1)


def test_loss_options(calls):
    own, ours = models(BY_NAME["gemma2"])
    ids, labels = labelled()
    shifted = labels.roll(-3, dims=-1)
    for options in (
        {"shift_labels": shifted},
        {"ignore_index": 5, "labels": labels.masked_fill(labels == -100, 5)},
        {"num_items_in_batch": torch.tensor(33)},
        {"shift_labels": shifted[:, -4:].contiguous(), "logits_to_keep": 4},
    ):
        given = {"labels": labels} | options
        calls.clear()
        result, expected = ours.train()(ids, **given), own.train()(ids, **given)
        torch.testing.assert_close(result.loss, expected.loss, rtol=1e-5, atol=0)
        assert calls["linear_cross_entropy"] == 1
        assert result.logits.shape == expected.logits.shape
    for model in (own, ours):
        with pytest.raises(ValueError, match="to match target batch_size"):
            model(ids, labels=labels, logits_to_keep=4)


def test_other_losses_of_the_logits(calls):
    """Class weights, or a scale instead of a soft cap: the real logits, and PyTorch's own loss."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(30, 8, generator=generator), torch.randn(17, 8, generator=generator)
    targets, logits = torch.randint(0, 17, (30,), generator=generator), hidden @ weight.T
    entropy, classes = nn.functional.cross_entropy, torch.rand(17, generator=generator)
    cases = [
        (lambda x: entropy(x, targets, label_smoothing=0.1), 1, None),
        (lambda x: entropy(x.view(5, 6, 17).float().view(-1, 17), targets, reduction="none"), 1, None),
        (lambda x: entropy(3.0 * torch.tanh(x / 3.0), targets), 1, None),
        (lambda x: entropy(3.0 * torch.tanh(x / 2.0), targets), 0, "arithmetic on its logits"),
        (lambda x: entropy(x / 2.0, targets), 0, "arithmetic on its logits"),
        (lambda x: entropy(x, targets, weight=classes), 0, "cross_entropy with weight"),
        (lambda x: entropy(x, logits.softmax(-1)), 0, None),
        (lambda x: entropy(x.to("cpu"), targets), 0, None),
        (lambda x: entropy(x[:20], targets[:20]), 0, None),
        (lambda x: entropy(x.div_(2.0), targets), 0, None),
    ]
    for loss, fused, warning in cases:
        calls.clear()
        expected, lazy = loss(logits.clone()), LazyLogits.of(hidden, weight, None)
        with pytest.warns(UserWarning, match=warning) if warning else nullcontext():
            result = loss(lazy)
        torch.testing.assert_close(result, expected)
        assert calls["linear_cross_entropy"] == fused
        assert lazy.was_read() != bool(fused)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("autocast", [True, False])
def test_the_loss_has_the_dtype_of_pytorchs(dtype, autocast):
    """Under autocast float32, also where the model does not turn its logits to it: the scale of a loss is 65536."""
    hidden, weight = torch.randn(2, 30, 8, dtype=dtype).unbind()
    lazy = LazyLogits.of(hidden.requires_grad_(), weight, None)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        expected = nn.functional.cross_entropy(hidden @ weight.T, torch.arange(30))
        loss = nn.functional.cross_entropy(lazy, torch.arange(30))
    assert not lazy.was_read()
    assert loss.dtype == expected.dtype
    (gradient,) = torch.autograd.grad(loss * 65536.0 if autocast else loss, hidden)
    assert gradient.isfinite().all()


def test_another_loss_function_is_refused():
    model = build(BY_NAME["llama"], "eager")
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().logsumexp(-1).mean()
    rows = {row.what: row for row in adapter.explain(model)}
    assert not rows["loss"].swapped
    assert "not the cross entropy" in rows["loss"].reason


def test_autocast():
    own, ours = models(BY_NAME["qwen3"])
    with Float64Throughout():
        truth, _ = loss_and_gradients(in_float64(own))
    with torch.autocast("cpu", torch.bfloat16):
        plain, expected = loss_and_gradients(own)
        results, output = loss_and_gradients(ours)
    assert not output.logits.was_read()
    assert output.logits.dtype == expected.logits.dtype == torch.bfloat16
    assert not [str(e) for e in testing.compare_all(results, truth, plain) if not e.ok]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16(name):
    own, ours = (model.to(torch.bfloat16) for model in models(BY_NAME[name]))
    with Float64Throughout():
        truth, _ = loss_and_gradients(in_float64(own))
    plain, _ = loss_and_gradients(own)
    results, output = loss_and_gradients(ours)
    assert not output.logits.was_read()
    assert results["loss"].dtype == plain["loss"].dtype == torch.float32
    assert not [str(e) for e in testing.compare_all(results, truth, plain) if not e.ok]


def test_with_checkpoints_and_our_attention(calls):
    """register and patch together, with the layers computed again in the backward."""
    own, _ = models(BY_NAME["qwen3"])
    adapter.register()
    ours = build(BY_NAME["qwen3"], "headwise")
    adapter.patch(ours)
    ours.gradient_checkpointing_enable()
    with Float64Throughout():
        truth, _ = loss_and_gradients(in_float64(own))
    plain, _ = loss_and_gradients(own)
    calls.clear()
    results, _ = loss_and_gradients(ours)
    assert calls == {"rms_norm": 9 + 8, "glu": 4, "rope": 4, "embedding": 1, "linear_cross_entropy": 1}
    assert not [str(e) for e in testing.compare_all(results, truth, plain) if not e.ok]


def test_generate(calls):
    own, ours = models(BY_NAME["gemma3"])
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = own.generate(tokens(length=9), **options)
    calls.clear()
    assert torch.equal(ours.generate(tokens(length=9), **options), expected)
    assert calls["rms_norm"] == 8 * 13


def test_compiled():
    """One graph, with our ops in it. The loss is left to the compiler."""
    own, ours = models(BY_NAME["llama"])
    ids, labels = labelled()
    compiled, graphs = compiled_in_one_graph(ours.train())
    result = compiled(ids, labels=labels).loss
    torch.testing.assert_close(result, own.train()(ids, labels=labels).loss, rtol=1e-5, atol=0)
    assert len(graphs) == 1
    assert "headwise.rms_norm_forward" in graphs[0]
    assert "headwise.glu_forward" in graphs[0]
    assert "headwise.rope_forward" in graphs[0]
    assert "headwise.embedding_forward" in graphs[0]

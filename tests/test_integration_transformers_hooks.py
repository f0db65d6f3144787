"""Hooks and functions of others around the modules of a patched model: they see what they see in the model's own."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.module import register_module_full_backward_hook
from torch.nn.parallel import DistributedDataParallel
from transformers.activations import ACT2FN
from transformers_models import BY_NAME, build, compiled_in_one_graph, tokens

import headwise.integrations.transformers as adapter
from headwise.integrations import _patch_glu

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def labelled():
    ids = tokens()
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


def own_and_ours(name="llama", device="cpu"):
    own, ours = (build(BY_NAME[name], "eager").to(device).train() for _ in range(2))
    adapter.patch(ours)
    return own, ours


def step(model):
    ids, labels = labelled()
    device = next(model.parameters()).device
    output = model(input_ids=ids.to(device), labels=labels.to(device))
    output.loss.backward()
    return output


def hold_gradients(own, ours):
    for (name, wanted), (_, got) in zip(own.named_parameters(), ours.named_parameters(), strict=True):
        assert got.grad is not None, f"{name} has no gradient"
        grad = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        torch.testing.assert_close(
            grad, wanted.grad, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


class Passing(torch.autograd.Function):
    """What it was given; the gradient is halved."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Copying(Passing):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


class Rounding(Passing):
    """A step that could be written down, and behind which the gradient is another."""

    @staticmethod
    def forward(ctx, x):
        return x.float().view(x.shape)


def _seen(hook):
    """Registers a hook that notes the gradient, halves what goes on, and gives back what it noted."""

    def register(model):
        seen = []

        def note(*args):
            grads = args[-1]
            seen.append((grads[0] if isinstance(grads, tuple) else grads).clone())

        hook(model, note)
        return seen

    return register


def _halving_full(model, note):
    def halve(module, into, grads):
        note(grads)
        return tuple(g / 2 for g in into)

    model.get_output_embeddings().register_full_backward_hook(halve)


def _halving_pre(model, note):
    def halve(module, grads):
        note(grads)
        return tuple(g / 2 for g in grads)

    model.get_output_embeddings().register_full_backward_pre_hook(halve)


def _in_forward_hook(model, note):
    def halve(grad):
        note(grad)
        return grad / 2

    model.get_output_embeddings().register_forward_hook(lambda module, given, out: out.register_hook(halve) and None)


def _function(kind):
    def register(model, note):
        model.get_output_embeddings().register_forward_hook(lambda module, given, out: kind.apply(out))

    return register


HOOKS = {
    "full": _halving_full,
    "full_pre": _halving_pre,
    "in_forward_hook": _in_forward_hook,
    "passing": _function(Passing),
    "copying": _function(Copying),
    "rounding": _function(Rounding),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])  # Gemma 2 has a soft cap behind the head
def test_a_hook_on_the_head(name, hook):
    """Weights below the head and the head itself get the gradients of the unpatched model, and so does the hook."""
    hold_hook(name, hook)


def hold_hook(name, hook, device="cpu"):
    own, ours = own_and_ours(name, device)
    register = _seen(HOOKS[hook])
    wanted, seen = register(own), register(ours)
    expected, output = step(own), step(ours)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
    hold_gradients(own, ours)
    assert len(seen) == len(wanted)
    for got, want in zip(seen, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)
    # The hook does change the gradients, or the comparison proves little.
    plain, _ = own_and_ours(name, device)
    step(plain)
    last = next(p for n, p in plain.named_parameters() if n.endswith("model.norm.weight"))
    changed = next(p for n, p in own.named_parameters() if n.endswith("model.norm.weight"))
    assert (last.grad - changed.grad).norm() > 0.3 * last.grad.norm()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("what", ["register_hook", "retain_grad", "changed", "with another reader"])
def test_the_gradient_of_logits(name, what):
    """Asked for after the loss was computed without them."""
    grads = []
    for model in (models := own_and_ours(name)):
        ids, labels = labelled()
        output = model(ids, labels=labels)
        loss = output.loss
        if what == "retain_grad":
            output.logits.retain_grad()
        elif what == "changed":
            output.logits.register_hook(lambda grad: grads.append(grad) or grad * 3)
        else:
            output.logits.register_hook(grads.append)
        if what == "with another reader":
            loss = loss + output.logits.pow(2).mean()
        loss.backward()
        if what == "retain_grad":
            grads.append(output.logits.grad)
    assert [grad.dtype for grad in grads] == [torch.float32] * 2
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-6)
    hold_gradients(*models)


def test_a_removed_hook_waits_for_nothing():
    own, ours = own_and_ours()
    ids, labels = labelled()
    output = ours(ids, labels=labels)
    output.logits.register_hook(lambda grad: grad * 3).remove()
    output.loss.backward()
    assert not output.logits.was_read()
    step(own)
    hold_gradients(own, ours)


def test_a_head_without_gradients():
    """As with adapters: the head is frozen, the layers below are not; and the other way round."""
    for frozen in ("lm_head", "model"):
        own, ours = own_and_ours()
        for model in (own, ours):
            model.get_submodule(frozen).requires_grad_(False)
            model.lm_head.register_full_backward_hook(lambda *_: None)
            step(model)
        for (name, wanted), (_, got) in zip(own.named_parameters(), ours.named_parameters(), strict=True):
            assert (got.grad is None) == (wanted.grad is None), name
            if wanted.grad is not None:
                torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-3, atol=1e-5)


def test_hooks_on_all_modules():
    counts = []
    for model in (models := own_and_ours()):
        seen = Counter()
        handle = register_module_full_backward_hook(lambda module, *_, seen=seen: seen.update([type(module)]))
        try:
            step(model)
        finally:
            handle.remove()
        counts.append({kind: n for kind, n in seen.items() if kind.__module__.startswith(("torch", "transformers"))})
    assert counts[0] == counts[1]
    assert counts[0][nn.Linear] == 15
    hold_gradients(*models)


HOOKED = {
    "register_forward_hook": lambda seen: lambda module, given, out: seen.append(out.detach()) or out * 0.5,
    "register_forward_pre_hook": lambda seen: lambda module, given: seen.append(given[0].detach()),
    "register_full_backward_hook": lambda seen: lambda module, into, grads: seen.append(grads[0]),
    "register_full_backward_pre_hook": lambda seen: lambda module, grads: seen.append(grads[0]),
}


@pytest.mark.parametrize("hook", HOOKED)
def test_a_hook_on_an_activation(hook):
    """Put on after the patch."""
    found = []
    for model in (models := own_and_ours()):
        getattr(model.model.layers[1].mlp.act_fn, hook)(HOOKED[hook](seen := []))
        step(model)
        found.append(seen)
    assert len(found[0]) == len(found[1]) == 1
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-3, atol=1e-5)
    hold_gradients(*models)


@pytest.mark.parametrize("before", ["function", "module", "options", "partial", "inside", "factor"])
def test_an_activation_that_was_exchanged(before, monkeypatch):
    """After the patch the class's own forward runs; before, and in a copy, the op."""
    torch.compiler.reset()  # all of these compile one forward, and PyTorch stops after eight
    calls = []
    glu = _patch_glu.glu
    monkeypatch.setattr(_patch_glu, "glu", lambda *args: calls.append(args[2]) or glu(*args))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
            self.act = {
                "function": nn.functional.silu, "module": nn.SiLU(), "options": nn.GELU(),
                "partial": ACT2FN["gelu_pytorch_tanh"], "inside": nn.Sequential(nn.SiLU()), "factor": nn.SiLU(),
            }[before]  # fmt: skip
            self.factor = 1.0

        def forward(self, x):
            return self.down(self.act(self.gate(x)) * self.up(x)) * self.factor

    mlp, x = Mlp(), 3 * torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    adapter.patch(mlp)
    calls.clear()
    copied = copy.deepcopy(mlp)
    torch.testing.assert_close(copied(x), Mlp.forward(copied, x), rtol=1e-5, atol=1e-5)
    assert len(calls) == 1
    if before == "options":
        mlp.act.approximate = "tanh"
    elif before == "inside":
        mlp.act[0] = nn.GELU()
    elif before == "factor":
        mlp.factor = 2.0
    else:
        mlp.act = nn.GELU()
    assert torch.equal(mlp(x), Mlp.forward(mlp, x))
    for model, ops in ((copied, 1), (mlp, 0)):
        compiled, graphs = compiled_in_one_graph(model)
        torch.testing.assert_close(compiled(x), Mlp.forward(model, x), rtol=1e-5, atol=1e-5)
        assert graphs[0].count("headwise.glu_forward") == ops


def test_functional_transforms():
    own, ours = own_and_ours()
    ids, labels = labelled()
    grads = []
    for model in (own, ours):
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters, model=model):
            return torch.func.functional_call(model, parameters, (ids,), {"labels": labels}).loss

        grads.append(torch.func.grad(loss)(parameters))
    for name, wanted in grads[0].items():
        torch.testing.assert_close(grads[1][name], wanted, rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------------------------- several processes


@pytest.fixture
def one_process(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def shard(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("patched", ["before", "after"])
def test_sharded_weights(one_process, patched):
    own, ours = own_and_ours()
    if patched == "after":
        adapter.unpatch(ours)
    shard(ours, one_process)
    if patched == "after":
        assert [row.swapped for row in adapter.patch(ours) if row.what == "loss"] == [True]
    output = step(ours)
    assert not output.logits.was_read(), "the hooks of FSDP had the logits built"
    step(own)
    hold_gradients(own, ours)
    output = ours(*labelled()[:1], labels=labelled()[1])
    seen = []
    output.logits.register_hook(lambda grad: seen.append(grad.shape))
    output.loss.backward()
    assert seen == [output.logits.shape]


def test_sharded_weights_in_mixed_precision(one_process):
    _, ours = own_and_ours()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(ours, mesh=one_process, mp_policy=policy)
    output = step(ours)
    assert not output.logits.was_read()
    assert output.logits.dtype == torch.float32
    assert all(p.grad is not None for p in ours.parameters())


def test_a_head_that_is_sharded_by_itself(one_process):
    """Its weight is gone when the loss is computed: real logits, and a word about it."""
    own, ours = own_and_ours()
    fully_shard(ours.lm_head, mesh=one_process)
    shard(ours, one_process)
    with pytest.warns(UserWarning, match="the head is an FSDP unit of its own"):
        step(ours)
    step(own)
    hold_gradients(own, ours)
    adapter.unpatch(ours)
    (row,) = (row for row in adapter.explain(ours) if row.what == "loss")
    assert not row.swapped
    assert "FSDPLinear" in row.reason


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_replicated_weights(one_process, options):
    own, ours = own_and_ours()
    replicas = DistributedDataParallel(ours, **options)
    for _ in range(2):
        ours.zero_grad()
        step(replicas)
    step(own)
    hold_gradients(own, ours)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_loss_and_logits_that_are_changed_in_place(name):
    """Models add a loss of theirs to the loss; logits that are edited after the loss do not change its gradient."""
    own, ours = own_and_ours(name)
    ids, labels = labelled()
    for model in (own, ours):
        output = model(input_ids=ids, labels=labels)
        output.loss *= 2
        output.logits.register_hook(lambda grad: grad)
        with torch.no_grad():
            output.logits.mul_(3)
        output.loss.backward()
    hold_gradients(own, ours)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_hook_on_logits_that_were_read(name):
    own, ours = own_and_ours(name)
    for model in (own, ours):
        logits = model(input_ids=labelled()[0], labels=labelled()[1]).logits
        logits.argmax(-1)
        logits.register_hook(lambda grad: grad * 2)
        with torch.inference_mode():
            logits.argmax(-1)
        logits.square().mean().backward()
    hold_gradients(own, ours)


def test_steps_after_which_the_logits_were_changed():
    _, ours = own_and_ours()
    logits = ours(input_ids=labelled()[0], labels=labelled()[1]).logits
    halves, rows = logits / 2, logits.view(-1, logits.shape[-1])
    expected = (logits * 1).detach()
    with torch.no_grad():
        logits.mul_(0)
    torch.testing.assert_close(halves.detach() * 2, expected)
    assert not rows.detach().any()  # shares their memory, as a view does


@pytest.mark.parametrize("kind", ["fused", "plain", "bias"])
def test_logits_that_are_read_after_a_step_raise(kind):
    _, ours = own_and_ours()
    head = ours.get_output_embeddings()
    if kind == "bias":
        head.bias = nn.Parameter(torch.zeros(head.out_features))
    trained = [head.bias] if kind == "bias" else ours.parameters()
    output = step(ours)
    torch.optim.AdamW(trained, lr=0.1, fused=kind == "fused").step()
    with pytest.raises(RuntimeError, match="read after the weights were changed"):
        output.logits.argmax(-1)


def test_second_order_gradients_of_the_head():
    own, ours = own_and_ours()
    ids, labels = labelled()
    found = []
    for model in (own, ours):
        output = model(input_ids=ids, labels=labels)
        output.logits.retain_grad()
        weight = model.get_output_embeddings().weight
        (grad,) = torch.autograd.grad(output.loss, weight, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), weight)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-6)


def test_a_loss_that_is_kept_keeps_nothing_else():
    _, ours = own_and_ours()
    hidden = []
    ours.get_output_embeddings().register_forward_pre_hook(lambda module, args: hidden.append(weakref.ref(args[0])))
    loss = step(ours).loss
    gc.collect()
    assert loss is not None
    assert hidden[0]() is None


def test_autocast_around_the_reader_alone():
    own, ours = own_and_ours()
    found = []
    for model in (own, ours):
        ids, labels = labelled()
        logits = model(input_ids=ids, labels=labels).logits
        with torch.autocast("cpu", torch.bfloat16):
            found.append(nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)

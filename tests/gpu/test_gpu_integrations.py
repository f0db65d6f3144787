"""Models of Transformers, trainers and the other adapters with the kernels of CUDA. What is held is what the tests on the
CPU hold: the functions are theirs. Quick ones first, and every model by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gpu_machine import DEVICE, gpu, normal, relative_error

# This folder stands alone; the helpers of the CPU's tests are beside it.
sys.path.append(str(Path(__file__).resolve().parent.parent))
pytest.importorskip("transformers")

import test_integration_transformers as models
import test_integration_transformers_autocast as autocast
import test_integration_transformers_generate as generation
import test_integration_transformers_hooks as hooks
from transformers_models import BY_NAME, CAUSAL, MODELS, build, in_float64, padding, pair, tokens

import headwise.integrations.transformers as adapter
from headwise import testing
from headwise.integrations import _sdpa_registry, flash_attn, sdpa

__all__ = ["gpu"]
pytestmark = pytest.mark.filterwarnings("ignore")

each = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


def on_the_gpu(model, patched, **changes):
    eager, ours = (net.to(DEVICE) for net in pair(model, **changes))
    if patched:
        adapter.patch(ours)
    return eager, ours


# ------------------------------------------------------------------------------------------------ single functions


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sdpa_under_autocast(dtype, is_causal):
    """Float32 in, autocast's dtype out, float32 gradients, as PyTorch's own; within twice its error."""
    inputs = [normal(2, 8, 300, 64, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]
    grad = normal(2, 8, 300, 64, seed=9, dtype=dtype)

    def run(tensors, grad):
        out = F.scaled_dot_product_attention(*tensors, is_causal=is_causal)
        return out, *torch.autograd.grad(out, tensors, grad)

    truth = run([x.double() for x in inputs], grad.double())
    with torch.autocast(DEVICE, dtype):
        plain = run(inputs, grad)
        with sdpa.override():
            ours = run(inputs, grad)
    for name, mine, theirs, exact in zip(["out", "dq", "dk", "dv"], ours, plain, truth, strict=True):
        assert mine.dtype == theirs.dtype
        error = testing.compare(name, mine, exact, theirs)
        assert error.ok, str(error)


def test_pytorchs_dispatcher(monkeypatch):
    """activate_flash_attention_impl("headwise"): calls that PyTorch sends to flash attention reach us, both ways."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("this PyTorch has no register_flash_attention_impl")
    calls = []
    for name in ("attention", "attention_backward"):
        op = getattr(_sdpa_registry, name)
        monkeypatch.setattr(_sdpa_registry, name, lambda *a, op=op, name=name, **k: calls.append(name) or op(*a, **k))
    inputs = [normal(2, 8, 300, 64, seed=i).requires_grad_() for i in range(3)]
    grad = normal(2, 8, 300, 64, seed=9)

    def run(is_causal):
        out = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)
        return out, *torch.autograd.grad(out, inputs, grad)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        wanted = [run(is_causal) for is_causal in (False, True)]
        sdpa.register_flash_attention_impl()
        torch.nn.attention.activate_flash_attention_impl("headwise")
        try:
            got = [run(is_causal) for is_causal in (False, True)]
        finally:
            torch.nn.attention.restore_flash_attention_impl()
        assert calls == ["attention", "attention_backward"] * 2
        run(True)
        assert len(calls) == 4
    for mine, theirs in zip(got, wanted, strict=True):
        assert max(map(relative_error, mine, theirs)) < 1e-2


def test_rotary_layer_of_flash_attn():
    from headwise.integrations.flash_attn.layers.rotary import RotaryEmbedding

    layer = RotaryEmbedding(64, device=DEVICE)
    qkv = normal(2, 300, 3, 8, 64)
    wanted = RotaryEmbedding(64)(qkv.float().cpu())
    assert relative_error(layer(qkv).cpu(), wanted) < 1e-2


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(scale):
    q, k, v = (normal(2, 300, 8, 64, seed=i) for i in range(3))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * scale
    wanted = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double())
    assert relative_error(flash_attn.flash_attn_func(q, k, v, softmax_scale=scale), wanted) < 1e-2


ONNX = ["Attention", "LayerNormalization", "RMSNormalization", "RotaryEmbedding", "SoftmaxCrossEntropyLoss"]


@pytest.mark.parametrize("operator", ONNX)
def test_onnx(operator):
    onnx = pytest.importorskip("test_integration_onnx", exc_type=ImportError)
    tests = onnx.node_tests(operator)
    assert onnx.adapter.Backend.supports_device("CUDA")
    result = onnx.run_by_onnx(onnx.adapter.Backend, tests, "cuda")
    assert result.testsRun == len(tests)
    assert [(str(test), text.strip().splitlines()[-1]) for test, text in result.failures + result.errors] == []
    assert result.skipped == []


# ---------------------------------------------------------------------------------------------------------- models


@each
@pytest.mark.parametrize("patched", [False, True], ids=["attention", "patched"])
def test_logits_and_gradients(model, patched):
    eager, ours = on_the_gpu(model, patched)
    models.hold(eager, ours, *models.inputs_of(model.name, "left"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [("deepseek_v3", models.DEEPSEEK_HEADS), ("gemma4", {"global_head_dim": 512})],
    ids=["DeepSeek 192/128", "Gemma 4 512"],
)
def test_wide_heads(name, changes):
    if name not in BY_NAME:
        pytest.skip("this release of Transformers does not have the model")
    eager, ours = on_the_gpu(BY_NAME[name], False, **changes)
    models.hold(eager, ours, *models.inputs_of(name, "left"))


@each
def test_bfloat16(model):
    """Logits of 16-bit weights, with all of the model patched."""
    eager, ours = (net.bfloat16() for net in on_the_gpu(model, True))
    inputs, counted = models.inputs_of(model.name, "left")
    with torch.no_grad(), models.Float64Throughout():
        exact = in_float64(eager)
        truth = exact(**models.moved(inputs, exact, torch.float64)).logits
    with torch.no_grad():
        plain, result = (net(**models.moved(inputs, net, torch.bfloat16)).logits for net in (eager, ours))
    seen = slice(None) if counted is None else counted.bool().to(DEVICE)
    error = testing.compare("logits", result[seen], truth[seen], plain[seen])
    assert error.ok, str(error)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "t5"])
def test_dtypes_under_autocast(name, weights):
    """Where autocast has a rule for PyTorch's norms."""
    autocast.hold_dtypes(name, weights, DEVICE)


@pytest.mark.parametrize("hook", hooks.HOOKS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_hooks_on_the_head(name, hook):
    """The backward runs in a thread of the device."""
    hooks.hold_hook(name, hook, DEVICE)


@each
def test_ten_training_steps(model):
    models.hold_ten_steps(model, *on_the_gpu(model, True))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("model", CAUSAL, ids=lambda model: model.name)
def test_generate(model, side, cache):
    eager, ours = on_the_gpu(model, True)
    ids, mask = tokens(length=24), padding(side, length=24)
    options = {"cache_implementation": cache, "disable_compile": True}
    expected = generation.generate(eager, ids, mask, **options)
    assert torch.equal(generation.generate(ours, ids, mask, **options), expected)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_generate_of_encoders_and_decoders(name):
    if name not in BY_NAME:
        pytest.skip("this release has attention code of its own in the model")
    eager, ours = on_the_gpu(BY_NAME[name], True)
    inputs = {"t5": lambda: {"input_ids": tokens(length=20), "attention_mask": padding("right", length=20)}}.get(
        name, lambda: {"input_features": models.inputs_of("whisper", "left")[0]["input_features"]}
    )()
    options = {"max_new_tokens": generation.NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    eagers, result = (net.generate(**models.moved(inputs, net, torch.float32), **options) for net in (eager, ours))
    assert torch.equal(result, eagers)


# -------------------------------------------------------------------------------------------------------- trainers


@pytest.fixture
def trainers():
    """The module of the CPU's tests, where the packages are there."""
    module = pytest.importorskip("test_integration_trainers", exc_type=ImportError)
    yield module
    module.accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("batches", ["PADDED", "PADDING_FREE", "PACKED"])
def test_sft(tmp_path, trainers, batches, bf16, lora):
    options = {"bf16": bf16, "gradient_checkpointing": True, "device": DEVICE, **getattr(trainers, batches)}
    if lora:
        options["learning_rate"] = 1e-2
    trainers.hold(lambda kind: trainers.sft(tmp_path, kind, lora, **options), ("eager", "sdpa"))


@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
def test_accelerate(trainers, checkpoints):
    trainers.hold_accelerate(True, {}, DEVICE, checkpoints)


def test_flash_attention_2_is_ours(monkeypatch):
    """A model that asks Transformers for flash_attn gets us after install()."""
    calls = []
    flash_attn.install()
    try:
        interface = sys.modules["flash_attn.flash_attn_interface"]
        for name in ("flash_attn_func", "flash_attn_varlen_func"):
            op = getattr(interface, name)
            spy = lambda *a, op=op, name=name, **k: calls.append(name) or op(*a, **k)  # noqa: E731
            monkeypatch.setattr(interface, name, spy)
            monkeypatch.setattr(sys.modules["flash_attn"], name, spy)
        ours = build(BY_NAME["llama"], "flash_attention_2").to(DEVICE, torch.bfloat16)
        eager = build(BY_NAME["llama"], "eager").to(DEVICE, torch.bfloat16)
        ids, mask = tokens().to(DEVICE), padding("right").to(DEVICE)
        with torch.no_grad():
            got, wanted = (net(ids, attention_mask=mask).logits[mask.bool()] for net in (ours, eager))
        assert calls
        assert relative_error(got, wanted) < 3e-2
    finally:
        flash_attn.uninstall()

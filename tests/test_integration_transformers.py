"""Models of Hugging Face Transformers with our attention: logits and gradients within the budget of eager attention."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE
from transformers_models import (
    BY_NAME,
    LONG,
    MODELS,
    NEW,
    Float64Throughout,
    build,
    compiled_in_one_graph,
    in_float64,
    padding,
    pair,
    tokens,
)

from headwise import testing
from headwise.backends.registry import use_backend

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def inputs_of(name, side):
    """What a model is called with, and which logits count."""
    generator = torch.Generator().manual_seed(2)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 48, 48, generator=generator)}, None
    if name == "whisper":
        features = torch.randn(2, 8, 120, generator=generator)
        mask = padding(side, length=24)
        return {
            "input_features": features,
            "decoder_input_ids": tokens(length=24),
            "decoder_attention_mask": mask,
        }, mask
    mask = padding(side)
    if name == "t5":
        return {"input_ids": tokens(), "attention_mask": mask, "decoder_input_ids": tokens(length=20, seed=3)}, None
    return {"input_ids": tokens(), "attention_mask": mask}, mask


def moved(inputs, model, dtype):
    """The inputs on the device of the model; numbers in this dtype."""
    device = next(model.parameters()).device
    return {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in inputs.items()}


def logits_and_gradients(model, inputs, counted, dtype):
    logits = model(**moved(inputs, model, dtype)).logits
    if counted is not None:
        logits = logits[counted.bool().to(logits.device)]
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4)).to(logits.device, dtype)
    model.zero_grad()
    (logits * cotangent).sum().backward()
    gradients = {f"grad of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def hold(eager, ours, inputs, counted):
    """Ours against eager attention in float64, within twice what eager attention in float32 is off by."""
    with Float64Throughout():
        truth = logits_and_gradients(in_float64(eager), inputs, counted, torch.float64)
    assert truth["logits"].dtype == torch.float64
    plain = logits_and_gradients(eager, inputs, counted, torch.float32)
    results = logits_and_gradients(ours, inputs, counted, torch.float32)
    assert results.keys() == truth.keys() == plain.keys()
    errors = testing.compare_all(results, truth, plain)
    assert not [str(e) for e in errors if not e.ok]
    return truth, plain


@pytest.mark.parametrize(
    ("model", "side"),
    [
        pytest.param(*pair, id=f"{pair[0].name}-{pair[1]}")
        for pair in product(MODELS, ("left", "right"))
        if pair[0].name != "vit" or pair[1] == "left"  # images have no padding
    ],
)
def test_logits_and_gradients(model, side, adapter_calls):
    eager, ours = pair(model)
    inputs, counted = inputs_of(model.name, side)
    truth, plain = hold(eager, ours, inputs, counted)
    assert adapter_calls, "our attention was never called"
    for op, (query, *_), given in adapter_calls:
        assert op == "attention"
        assert given["mask"] is None or given["mask"].shape[2] == 1, "an S × S mask was built"
        assert query.dtype == torch.float32
    found = {
        "window": any(c[2]["window"][0] is not None for c in adapter_calls),
        "softcap": any(c[2]["softcap"] is not None for c in adapter_calls),
        "sink": any(c[2]["sink"] is not None for c in adapter_calls),
        "bias": any(c[2]["bias"] is not None for c in adapter_calls),
    }
    assert {name for name, there in found.items() if there} == model.features

    # The padding matters: without it the results are far outside the budget.
    mask = next((name for name in ("attention_mask", "decoder_attention_mask") if name in inputs), None)
    if mask is not None and not (model.causal and side == "right") and model.name != "whisper":
        unpadded = logits_and_gradients(eager, inputs | {mask: torch.ones_like(inputs[mask])}, counted, torch.float32)
        assert not testing.compare("logits", unpadded["logits"], truth["logits"], plain["logits"]).ok


@pytest.mark.skipif(not NEW, reason="this release of Transformers has no Gemma 4")
def test_heads_of_512():
    """The global layers of Gemma 4 have them, beside narrow heads in the layers with a window."""
    eager, ours = pair(BY_NAME["gemma4"], global_head_dim=512)
    hold(eager, ours, *inputs_of("gemma4", "left"))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_deepseek_with_its_own_head_dims(side, adapter_calls):
    """Queries and keys of 192, values of 128."""
    eager, ours = pair(BY_NAME["deepseek_v3"], **DEEPSEEK_HEADS)
    hold(eager, ours, *inputs_of("deepseek_v3", side))
    assert {(args[0].shape[-1], args[2].shape[-1]) for _, args, _ in adapter_calls} == {(192, 128)}


DEEPSEEK_HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def batch_of(model, step):
    """One of two batches to learn, padded; ids of some have to differ from what their loss asks for."""
    side = "left" if step % 2 else "right"
    inputs, counted = inputs_of(model.name, side)
    for name in ("input_ids", "decoder_input_ids"):
        if name in inputs:
            inputs[name] = tokens(*inputs[name].shape, seed=10 * (name == "input_ids") + step % 2)
    if model.name == "vit":
        return inputs | {"labels": torch.tensor([step % 2, 3])}
    if model.name in ("t5", "whisper"):
        labels = inputs.pop("decoder_input_ids")
        inputs.pop("decoder_attention_mask", None)
        return inputs | {"labels": labels}
    # The token before a left-padded sequence sees nothing. What it predicts is nobody's business, and differs:
    # eager attention gives it the mean of all values, ours (and PyTorch's own) zeros.
    predicted = counted.bool() & (counted.roll(1, dims=-1).bool() if model.causal else True)
    return inputs | {"labels": inputs["input_ids"].masked_fill(~predicted, -100)}


def ten_steps(net, model):
    """The losses of ten steps of AdamW on two padded batches, without dropout."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for step in range(10):
        loss = net(**moved(batch_of(model, step), net, next(net.parameters()).dtype)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=() if m.name in ("llama", "t5") else pytest.mark.slow, id=m.name) for m in MODELS]
)
def test_ten_training_steps(model):
    """Every model learns the same with either attention, as far as float32 allows."""
    hold_ten_steps(model, *pair(model))


def hold_ten_steps(model, eager, ours):
    with Float64Throughout():
        truth = ten_steps(in_float64(eager), model)
    losses = ten_steps(ours, model)
    # Ten numbers are one draw of luck: PyTorch's two attentions are both run, and the worse one counts.
    plains = (lambda: eager, lambda: build(model, "sdpa").to(losses.device))
    errors = (testing.compare("losses", losses, truth, ten_steps(plain(), model)) for plain in plains)
    assert any(error.ok for error in errors)
    assert losses[-2:].mean() < losses[:2].mean() - 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_autocast(dtype):
    """Qwen3's norms leave float32 queries beside 16-bit values; all three become what autocast says, as in PyTorch's own."""
    eager, ours = pair(BY_NAME["qwen3"])
    ids = tokens()
    with torch.no_grad():
        with Float64Throughout():
            truth = in_float64(eager)(ids).logits
        with torch.autocast("cpu", dtype):
            plain, result = eager(ids).logits, ours(ids).logits
    error = testing.compare("logits", result, truth, plain)
    assert error.ok, str(error)


def test_compiled():
    """torch.compile of the whole model, masks included, in one graph; packed position_ids as well, without a mask."""
    eager, ours = pair(BY_NAME["mistral"])
    compiled, graphs = compiled_in_one_graph(ours)
    packed = torch.cat([torch.arange(15), torch.arange(LONG - 15)]).expand(2, -1)
    for inputs, op in (
        ({"attention_mask": padding("left")}, "attention_forward"),
        ({"position_ids": packed, "use_cache": False}, "attention_varlen_forward"),
    ):
        counted = inputs.get("attention_mask", torch.ones(2, LONG)).bool()
        with torch.no_grad():
            result, expected = compiled(tokens(), **inputs).logits, eager(tokens(), **inputs).logits
        torch.testing.assert_close(result[counted], expected[counted], rtol=1e-4, atol=1e-4)
        assert f"headwise.{op}" in graphs[-1]
        # All pairs appear once, as a view of one element.
        pairs = [line for line in graphs[-1].splitlines() if f"b8[2, 1, {LONG}, {LONG}]" in line]
        assert len(pairs) == 1
        assert "ones.expand(" in pairs[0]
    assert len(graphs) == 2


@pytest.mark.slow  # mistral, above, stands for them
@pytest.mark.parametrize("model", [m for m in MODELS if m.name != "mistral"], ids=lambda m: m.name)
def test_every_model_compiled(model):
    """One graph of the whole model with our operator in it, and eager attention's logits and gradients."""
    eager, ours = pair(model)
    for net in (eager, ours):
        net.config._experts_implementation = "batched_mm"  # the others loop over experts that only the data knows
    inputs, counted = inputs_of(model.name, "left")
    torch._dynamo.reset()
    compiled, graphs = compiled_in_one_graph(ours)
    result = logits_and_gradients(compiled, inputs, counted, torch.float32)
    expected = logits_and_gradients(eager, inputs, counted, torch.float32)
    (graph,) = graphs
    assert "headwise.attention_forward" in graph
    for name, plain in expected.items():
        error = (result[name.replace("grad of ", "grad of _orig_mod.")] - plain).norm()
        # Some gradients are nothing but rounding (the bias of keys): their scale is that of the logits' cotangent.
        assert error <= 1e-3 * plain.norm() + 1e-5 * expected["logits"].norm(), f"{name}: {error}"


@pytest.mark.skipif("triton" not in RUNNABLE, reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_on_triton(name, adapter_calls):
    """Windows with a soft cap, or with sinks, and padding on the left; both directions."""
    eager, ours = pair(BY_NAME[name])
    with use_backend("triton"):
        hold(eager, ours.to(DEVICE["triton"]), *inputs_of(name, "left"))
    assert len(adapter_calls) == 2

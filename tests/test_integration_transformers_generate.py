"""generate() with our attention: eager attention's tokens, over every cache of Transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers_models import (
    BY_NAME,
    CAUSAL,
    NEW,
    VOCAB,
    build,
    padding,
    pair,
    tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

NEW_TOKENS = 14
MORE = [
    pytest.param(m, marks=() if m.name in ("llama", "mistral", "gemma2", "gpt_oss") else pytest.mark.slow)
    for m in CAUSAL
]


def generate(model, ids, mask=None, **options):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | options
    mask = None if mask is None else mask.to(model.device)
    return model.generate(ids.to(model.device), attention_mask=mask, **options).cpu()


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model", MORE, ids=lambda m: m.name)
def test_generates_what_eager_attention_does(model, cache, side, adapter_calls):
    """Prompts longer than the window, new tokens that fill the caches further; a static cache longer than its fill."""
    if not NEW and (model.name, cache) == ("deepseek_v3", "static"):
        pytest.skip("static caches of this release of Transformers need values as wide as keys")
    eager, ours = pair(model)
    ids, mask = tokens(length=24), padding(side, length=24)
    options = {"cache_implementation": cache}
    expected = generate(eager, ids, mask, **options)
    assert torch.equal(generate(ours, ids, mask, **options), expected)
    assert expected[:, 24:].unique().numel() > 4, "the models say too little to tell anything apart"
    if side is None and NEW:  # older releases keep a mask of ones, and only the device knows that it is one
        assert [op for op, _, _ in adapter_calls].count("attention_decode") == 2 * (NEW_TOKENS - 1)
    if side is not None:
        assert not torch.equal(generate(eager, ids, torch.ones_like(mask), **options)[0], expected[0])
    assert all(given.get("mask") is None or given["mask"].shape[2] == 1 for _, _, given in adapter_calls)


LOOKUP = pytest.param({"prompt_lookup_num_tokens": 3}, marks=pytest.mark.skipif(not NEW, reason="needs an end token"))


@pytest.mark.parametrize("options", [LOOKUP, {"assistant": True}], ids=["lookup", "assistant"])
@pytest.mark.parametrize(
    "name", [pytest.param(m.name, marks=() if m.name == "llama" else pytest.mark.slow) for m in CAUSAL]
)
def test_assisted_decoding(name, options, adapter_calls):
    """Several candidate tokens at once over a cache that is cropped when they are refused."""
    eager, ours = pair(BY_NAME[name])
    ids = tokens(batch=1, length=12).repeat(1, 2)
    expected = generate(eager, ids)
    if "assistant" in options:
        # Almost the same model, so that some candidates are taken and some refused.
        assistant = build(BY_NAME[name], "headwise")
        with torch.no_grad():
            assistant.lm_head.weight.add_(0.05 * build(BY_NAME[name], "headwise", seed=5).lm_head.weight)
        options = {"assistant_model": assistant}
    assert torch.equal(generate(ours, ids, **options), expected)
    several = {op for op, (query, key, *_), _ in adapter_calls if 1 < query.shape[2] < key.shape[2]}
    assert several == {"attention_decode" if NEW else "attention"}


def test_beams(adapter_calls):
    eager, ours = pair(BY_NAME["llama"])
    ids, mask = tokens(length=20), padding("left", length=20)
    assert torch.equal(generate(ours, ids, mask, num_beams=3), generate(eager, ids, mask, num_beams=3))
    assert adapter_calls


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_prefill_in_chunks(name, adapter_calls):
    """Queries in the middle of the cache: 7 at a time, the last 3 of them alone."""
    eager, ours = pair(BY_NAME[name])
    ids = tokens(length=24)
    whole = generate(eager, ids)
    assert torch.equal(generate(ours, ids, prefill_chunk_size=7), whole)
    assert any(args[0].shape[2] == 7 and args[1].shape[2] > 7 for _, args, _ in adapter_calls)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_second_turn_over_a_cache(name):
    """Forward passes by hand: 10 tokens, 17 more, then one; left-padded, over a dynamic cache."""
    eager, ours = pair(BY_NAME[name])
    ids, mask = tokens(length=28), padding("left", length=28)
    results = []
    for model in (eager, ours):
        past, logits = None, []
        for start, end in ((0, 10), (10, 27), (27, 28)):
            positions = (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, start:]
            with torch.no_grad():
                out = model(
                    ids[:, start:end], attention_mask=mask[:, :end], past_key_values=past, position_ids=positions,
                    use_cache=True,
                )  # fmt: skip
            past = out.past_key_values
            logits.append(out.logits)
        results.append(torch.cat(logits, dim=1)[mask.bool()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_nothing_leaks_from_the_free_end_of_a_static_cache():
    """NaN where no key has been written yet changes nothing, not even a bit."""
    from transformers import StaticCache

    _, ours = pair(BY_NAME["llama"])
    ids = tokens(length=21)
    results = []
    for poison in (False, True):
        cache = StaticCache(config=ours.config, max_cache_len=50)
        logits = []
        for start, end in ((0, 20), (20, 21)):
            positions = torch.arange(start, end)
            with torch.no_grad():
                logits.append(
                    ours(ids[:, start:end], past_key_values=cache, cache_position=positions, use_cache=True).logits
                    if not NEW
                    else ours(ids[:, start:end], past_key_values=cache, use_cache=True).logits
                )
            if poison:
                for layer in cache.layers:
                    layer.keys[:, :, end:] = float("nan")
                    layer.values[:, :, end:] = float("nan")
        results.append(torch.cat(logits, dim=1))
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("side", [None, "left"])
def test_compiled_decoding(side):
    """generate() compiles the forward of a static cache, with masks that were made outside of the graph."""
    from transformers.generation.configuration_utils import CompileConfig

    eager, ours = pair(BY_NAME["llama"])
    ids, mask = tokens(length=12), padding(side, length=12, missing=5)
    expected = generate(eager, ids, mask, max_new_tokens=6)
    options = CompileConfig(backend="aot_eager", fullgraph=True, dynamic=False, mode=None)
    options._compile_all_devices = True
    ours.generation_config = copy.deepcopy(ours.generation_config)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = generate(ours, ids, mask, max_new_tokens=6, cache_implementation="static", compile_config=options)
    assert torch.equal(result, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "every length was compiled anew, or none"


@pytest.mark.skipif(not NEW, reason="T5 has attention code of its own in this release of Transformers")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_encoder_and_decoder(cache, adapter_calls):
    """T5: a padded source, position biases in the decoder, cross attention over the encoder's keys."""
    eager, ours = pair(BY_NAME["t5"])
    ids, mask = tokens(length=20), padding("right", length=20)
    expected = generate(eager, ids, mask, cache_implementation=cache)
    assert torch.equal(generate(ours, ids, mask, cache_implementation=cache), expected)
    assert any(given.get("bias") is not None for _, _, given in adapter_calls)
    assert expected.max() < VOCAB


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_speech(cache, adapter_calls):
    """Whisper: every new token attends to all of the encoder's keys, which the cache keeps beside its own."""
    eager, ours = pair(BY_NAME["whisper"])
    features = torch.randn(2, 8, 120, generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    expected = eager.generate(features, **options)
    assert torch.equal(ours.generate(features, **options), expected)
    assert not torch.equal(eager.generate(-features, **options), expected), "what was heard says too little"
    lengths = {args[1].shape[2] for op, args, _ in adapter_calls if op == "attention_decode"}
    assert 60 in lengths, "no token was decoded over the encoder's keys"
    assert len(lengths) > 1

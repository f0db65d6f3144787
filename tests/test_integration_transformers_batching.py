"""Continuous batching of Transformers, whose paged cache takes PyTorch's attention or flash_attn: ours behind either."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers
from transformers import modeling_flash_attention_utils
from transformers_models import BY_NAME, NEW, build, tokens

import headwise.integrations.transformers as adapter
from headwise.integrations import flash_attn, sdpa
from headwise.integrations.flash_attn import flash_attn_interface

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.skipif(not NEW, reason="release 5 of Transformers has one API for it"),
]
NEW_TOKENS = 7


def generation():
    return transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)


def prompts():
    """More tokens than a batch takes at once: prompts are cut, and requests join while others are decoding."""
    return [tokens(1, length, seed=length)[0].tolist() for length in (5, 30, 17, 41, 9)]


def one_by_one(model):
    return [
        model.generate(torch.tensor([prompt]), generation_config=generation())[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


def together(model):
    batching = transformers.ContinuousBatchingConfig(
        auto_switch_to_flash=False, num_blocks=40, page_size=8, max_batch_tokens=32
    )
    found = model.generate_batch(
        inputs=prompts(), generation_config=generation(), continuous_batching_config=batching, progress_bar=False
    )
    return [output.generated_tokens for output in found.values()]


@pytest.fixture
def calls(monkeypatch):
    seen = []

    def watch(module, name):
        op = getattr(module, name)

        def spy(*args, **kwargs):
            seen.append(name)
            return op(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)

    watch(sdpa, "attention")
    watch(flash_attn_interface, "attention_varlen")
    return seen


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_behind_sdpa(name, calls):
    model = build(BY_NAME[name], "eager")
    expected = one_by_one(model)
    model.set_attn_implementation("sdpa")
    with sdpa.override():
        assert together(model) == expected
    assert set(calls) == {"attention"}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_behind_flash_attn(name, calls, monkeypatch):
    """As on CUDA, where Transformers finds flash_attn by its metadata once ``install()`` has been called."""
    model = build(BY_NAME[name], "eager")
    expected = one_by_one(model)
    there = lambda *_, **__: True  # noqa: E731
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("transformers") and "is_flash_attn_2_available" in vars(module):
            monkeypatch.setattr(module, "is_flash_attn_2_available", there)
    monkeypatch.setitem(
        modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check", there
    )
    monkeypatch.setattr(model, "_flash_attn_can_dispatch", there)  # asks for a GPU
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    flash_attn.install()
    try:
        model.set_attn_implementation("flash_attention_2")
        assert together(model) == expected
    finally:
        flash_attn.uninstall()
    assert set(calls) == {"attention_varlen"}


def test_our_own_name_is_refused_by_name():
    """Transformers takes a list of names there; nothing falls back in silence."""
    adapter.register()
    model = build(BY_NAME["llama"], "headwise")
    with pytest.raises(ValueError, match="headwise is not supported for continuous batching"):
        together(model)


def test_a_paged_name_is_refused():
    """Transformers would not accept it where it matters, so it is said at once how our kernels get there."""
    with pytest.raises(ValueError, match=r"'paged\|headwise'; continuous batching takes no .*sdpa\.override\(\)"):
        adapter.register("paged|headwise")

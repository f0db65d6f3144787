"""32768 tokens through models of Transformers: no table of all pairs, and no copy of queries, keys and values."""

from __future__ import annotations

import pytest
import torch
from transformers_models import BY_NAME, NEW, VOCAB, pair

import headwise.integrations.transformers as adapter
from headwise.benchmark.memory import peak_extra
from headwise.integrations._compact_mask import CompactMask

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

S, NARROW = 32768, 512
# A bit for every pair would be 128 MiB, a bool for every pair 1 GiB. A layer's tensors are 2 MiB each.
MOST = 64 << 20
CACHE = 2 * 16 * 4 * (S + 64)  # bytes of keys and values, which stay
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "max_position_embeddings": S + 64}  # fmt: skip


def left_padded():
    mask = torch.ones(1, S, dtype=torch.int64)
    mask[:, :1000] = 0
    return mask


CALLS = {
    "padding and a window": ("mistral", lambda: {"attention_mask": left_padded(), "use_cache": False}),
    "packed": ("llama", lambda: {"position_ids": torch.arange(S)[None] % 400, "use_cache": False}),
    "packed, with a window": ("mistral", lambda: {"position_ids": torch.arange(S)[None] % 3000, "use_cache": False}),
    "a static cache": ("llama", lambda: {"past_key_values": "static"}),
    "a sliding cache": ("mistral", lambda: {"past_key_values": "static"}),
}
if NEW:
    CALLS["bidirectional windows"] = ("modernbert", lambda: {"attention_mask": left_padded()})


def finish(loss):
    if loss.requires_grad:
        loss.backward()


@pytest.mark.parametrize("name", CALLS)
def test_no_table_of_all_pairs(name):
    kind, arguments = CALLS[name]
    changes = TINY | ({"sliding_window": NARROW} if kind == "mistral" else {})
    if kind == "modernbert":
        changes = {n: x for n, x in TINY.items() if n != "num_key_value_heads"}
        changes |= {"local_attention": 2 * NARROW, "global_attn_every_n_layers": 1}
    _, model = pair(BY_NAME[kind], **changes)
    body = model.base_model  # without logits
    inputs = arguments()
    if inputs.get("past_key_values") == "static":
        from transformers import StaticCache

        inputs["past_key_values"] = StaticCache(config=model.config, max_cache_len=S + 64)
    ids = torch.arange(S)[None] % (VOCAB - 3) + 3
    if "past_key_values" in inputs:  # a prompt, then a token over a cache that is longer than its fill
        with torch.no_grad():
            prompt = peak_extra(lambda: body(ids, **inputs), "cpu")
            token = peak_extra(lambda: body(ids[:, -1:], **inputs), "cpu")
        assert token <= MOST / 8, f"{token / 2**20:.0f} MiB"
        assert prompt <= MOST + CACHE, f"{prompt / 2**20:.0f} MiB"
        return
    with torch.set_grad_enabled("packed" in name):  # the others' backward takes half a minute at this length
        most = peak_extra(lambda: finish(body(ids, **inputs).last_hidden_state.sum()), "cpu")
    assert most <= MOST, f"{most / 2**20:.0f} MiB"


def test_a_table_would_be_seen(monkeypatch):
    """The bound is one that a bool mask breaks, at a quarter of the length."""
    monkeypatch.setattr(CompactMask, "of", lambda shape, *_, **__: torch.ones(shape, dtype=torch.bool))
    _, model = pair(BY_NAME["mistral"], **TINY, sliding_window=NARROW)
    ids = torch.ones(1, S // 4, dtype=torch.int64)
    with torch.no_grad():
        assert peak_extra(lambda: model.base_model(ids, use_cache=False), "cpu") >= (S // 4) ** 2


@pytest.mark.parametrize("mask", ["none", "compact", "static"])
def test_nothing_is_copied(mask, monkeypatch):
    """(B, S, H, D) memory goes to the op as it lies, and its result to the next layer."""
    seen = []
    for op in ("attention", "attention_decode"):
        own = getattr(adapter, op)

        def spy(*tensors, own=own, **flags):
            seen.append((tensors, own(*tensors, **flags)))
            return seen[-1][1]

        monkeypatch.setattr(adapter, op, spy)
    stored = [torch.randn(2, 40, heads, 16) for heads in (4, 2, 2)]
    q, k, v = (x.transpose(1, 2) for x in stored)
    made = CompactMask.of((2, 1, 40, 40), "cpu", (None, 0), 30 if mask == "static" else 40)
    out, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, None if mask == "none" else made)
    ((tensors, result),) = seen
    assert [x.data_ptr() for x in tensors] == [x.data_ptr() for x in stored]
    assert out.data_ptr() == result.data_ptr()
    assert out.is_contiguous()


def test_packed_sequences_are_not_copied(monkeypatch):
    seen = []
    own = adapter.attention_varlen
    monkeypatch.setattr(adapter, "attention_varlen", lambda *a, **f: seen.append(a[:3]) or own(*a, **f))
    stored = [torch.randn(2, 40, heads, 16) for heads in (4, 2, 2)]
    offsets = torch.tensor([0, 30, 80], dtype=torch.int32)
    q, k, v = (x.transpose(1, 2) for x in stored)
    adapter.attention_forward(torch.nn.Module(), q, k, v, None, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
    assert [x.data_ptr() for x in seen[0]] == [x.data_ptr() for x in stored]


def test_a_layer_asks_nothing_of_its_mask(monkeypatch):
    """A question to a tensor of a class of our own takes 3 µs, and every layer had four: they were half of what the
    adapter added to a call."""
    made = CompactMask.of((1, 1, 9, 9), "cpu", (None, 0), 9)
    asked = []
    own = CompactMask.__torch_function__.__func__
    monkeypatch.setattr(
        CompactMask, "__torch_function__", classmethod(lambda cls, f, *rest: asked.append(f) or own(cls, f, *rest))
    )
    q = torch.randn(1, 2, 9, 8)
    adapter.attention_forward(torch.nn.Module(), q, q, q, made)
    assert not asked

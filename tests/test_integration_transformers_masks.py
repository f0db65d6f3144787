"""Masks between Transformers and our attention: what is said in a few numbers, what has to be built, what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils
from transformers_models import (
    BY_NAME,
    LONG,
    NEW,
    SHORT,
    Model,
    padding,
    pair,
    tokens,
)

import headwise.integrations.transformers as adapter
from headwise import testing
from headwise.integrations import _mask_rules
from headwise.integrations._compact_mask import BuiltMask, CompactMask, Packed
from headwise.ops.attention import attention

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

CAUSAL = masking_utils.causal_mask_function
SEQUENCES = torch.tensor([[0] * 3 + [1] * 5 + [2], [0] * 9])


def place(queries, offset):
    """How this release of Transformers says where the queries are."""
    if not NEW:
        return {"cache_position": torch.arange(queries) + offset}
    return {"q_length": queries, "q_offset": offset, "device": "cpu"}


def expected_mask(**arguments):
    return masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)


def functions():
    yield "causal", CAUSAL
    yield "window", masking_utils.sliding_window_causal_mask_function(4)
    if NEW:
        yield "bidirectional", masking_utils.bidirectional_mask_function
        yield "both sides", masking_utils.sliding_window_bidirectional_mask_function(3)


FUNCTIONS = dict(functions())
# queries, position of the first, keys, position of the first key: no cache; a cache; one that slides; the free end of a
# static one, before and behind its first token.
PLACES = [
    (9, 0, 9, 0), (3, 6, 9, 0), (1, 8, 9, 0), (1, 11, 5, 7), (4, 11, 8, 7), (5, 0, 12, 0), (1, 4, 12, 0), (2, 3, 12, 0),
]  # fmt: skip


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("side", [None, "left", "hole"])
@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compact_mask_says_what_the_real_one_says(name, where, side, on_device):
    queries, offset, keys, first_key = where
    if on_device and NEW:
        offset = torch.tensor(offset)
    # Positions that a generation has reached; a longer static cache is padded by the mask function.
    mask = None if side is None else padding(side, length=queries + where[1], missing=3).bool()
    arguments = {
        "batch_size": 2, "kv_length": keys, "kv_offset": first_key, "mask_function": FUNCTIONS[name], "attention_mask": mask,
        **place(queries, offset),
    }  # fmt: skip
    made = adapter.make_mask(**arguments, allow_is_causal_skip=not on_device and where[1] + queries == keys + first_key)
    expected = expected_mask(**arguments)
    assert made.shape == expected.shape
    assert torch.equal(made.built(), expected)
    if name in ("causal", "window"):
        assert isinstance(made, CompactMask)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_packed_sequences(name, adapter_calls):
    """As offsets: no sequence sees another, and the result is that of the mask."""
    function = masking_utils.and_masks(FUNCTIONS[name], masking_utils.packed_sequence_mask_function(SEQUENCES))
    arguments = {"batch_size": 2, "kv_length": 9, "mask_function": function, **place(9, 0)}
    made = adapter.make_mask(**arguments, allow_is_causal_skip=False)
    assert isinstance(made, CompactMask)
    assert torch.equal(made.built(), expected_mask(**arguments))
    assert made.packing().cu_seqlens.tolist() == [0, 3, 8, 9, 18]
    q, k, v = torch.randn(3, 2, 4, 9, 16, generator=torch.Generator().manual_seed(0))
    out, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, made)
    assert [op for op, _, _ in adapter_calls] == ["attention_varlen"]
    torch.testing.assert_close(out.transpose(1, 2), attention(q, k, v, mask=made.built()))


def test_packed_sequences_in_pieces():
    """Numbers that come back along a row are no packing that offsets could say: the mask is built."""
    pieces = torch.tensor([[0, 0, 1, 1, 0, 0]])
    function = masking_utils.and_masks(CAUSAL, masking_utils.packed_sequence_mask_function(pieces))
    made = adapter.make_mask(batch_size=1, kv_length=6, mask_function=function, **place(6, 0))
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    out, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, made)
    torch.testing.assert_close(out.transpose(1, 2), attention(q, k, v, mask=made.built()))

    def compiled(made):
        return adapter.attention_forward(torch.nn.Module(), q, k, v, made)[0]

    assert torch.compile(compiled, backend="aot_eager")(made).isnan().all(), "wrong in silence"


def custom_functions():
    image = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1]] * 2)
    near = torch.tensor([[False, True] + [True] * 7] * 2)
    yield "or", masking_utils.or_masks(CAUSAL, lambda b, h, q, k: k < 3)
    yield "and", masking_utils.and_masks(CAUSAL, lambda b, h, q, k: (q + k) % 2 == 0)
    yield "looked up", masking_utils.and_masks(CAUSAL, lambda b, h, q, k: near[b, k])
    yield "chunks", masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2]))
    yield "a query looked up twice", lambda b, h, q, k: (SEQUENCES[b, q] == SEQUENCES[b, q]) & (k <= q)
    yield "keys of the future", lambda b, h, q, k: k > q
    yield "twice the distance", lambda b, h, q, k: k <= q + q
    if NEW:
        yield "images", masking_utils.or_masks(CAUSAL, masking_utils.blockwise_overlay(image))


@pytest.mark.parametrize(("name", "function"), list(custom_functions()), ids=lambda x: x if isinstance(x, str) else "")
def test_other_functions_are_built(name, function):
    """A mask that our flags cannot say is a real mask, and the right one."""
    arguments = {"batch_size": 2, "kv_length": 9, "mask_function": function, **place(9, 0)}
    if NEW:
        arguments["use_vmap"] = name != "images"
    rule = _mask_rules.read(function)
    assert rule is None or name == "keys of the future"
    made = adapter.make_mask(**arguments, attention_mask=padding("left", length=9, missing=2).bool())
    assert type(made) is BuiltMask
    assert torch.equal(
        made.built(), expected_mask(**arguments, attention_mask=padding("left", length=9, missing=2).bool())
    )


def test_who_computes_with_a_compact_mask_gets_the_real_one():
    """Views and logic, as with any bool mask."""
    mask = padding("left", length=9, missing=2).bool()
    arguments = {"batch_size": 2, "kv_length": 9, "attention_mask": mask, **place(9, 0)}
    made, real = adapter.make_mask(**arguments), expected_mask(**arguments, mask_function=CAUSAL)
    other = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    for compute in (
        lambda m: m[:, :, -2:, :5], lambda m: m & other, lambda m: ~m, lambda m: other | m[:, :, :9], lambda m: m == other,
        lambda m: torch.cat([m, other], dim=1), lambda m: torch.where(m, 0.0, -1.0), lambda m: m.sum(-1),
        lambda m: m.expand(2, 4, 9, 9), lambda m: other.float().masked_fill(~m, -1.0), lambda m: m * other,
    ):  # fmt: skip
        assert torch.equal(torch.as_tensor(compute(made)).as_subclass(torch.Tensor), compute(real))
    assert made.dtype == torch.bool
    assert made.dim() == made.ndim == 4
    assert made.detach() is made.to("cpu") is made.to(torch.bool) is made
    assert made.to("meta").packed is None
    made.packed = Packed(torch.tensor([0, 4, 9]), 5, False)
    moved = made.to("meta")
    assert isinstance(moved, CompactMask)
    assert moved.padding.device.type == moved.packed.cu_seqlens.device.type == "meta"
    assert moved.packed[1:] == made.packed[1:]


@pytest.mark.parametrize("built", [False, True])
def test_a_mask_is_not_a_number(built):
    """Added to scores, or compared with 0, it would do the wrong thing in silence. Its views are no numbers either."""
    function = masking_utils.or_masks(CAUSAL, lambda b, h, q, k: k < 3) if built else CAUSAL
    made = adapter.make_mask(batch_size=2, kv_length=9, mask_function=function, **place(9, 0))
    assert isinstance(made, CompactMask) is not built
    scores = torch.randn(2, 4, 9, 9)
    for use in (
        lambda m: scores + m, lambda m: m + scores, lambda m: scores.add_(m), lambda m: torch.add(scores, m),
        lambda m: 1.0 - m, lambda m: m * -1e9, lambda m: m == 0, lambda m: m < 0, lambda m: m.float(),
        lambda m: m.to(torch.float32), lambda m: m.to(dtype=torch.bfloat16), lambda m: m.to(scores), lambda m: m.long(),
        lambda m: m.type_as(scores), lambda m: scores.masked_fill(m, -1.0), lambda m: scores.masked_fill_(m, -1.0),
    ):  # fmt: skip
        for view in (made, made[:, :, :, :9], made.expand(2, 4, 9, 9), made.to(torch.bool), made.contiguous()):
            with pytest.raises(NotImplementedError, match="attn_implementation='eager'"):
                use(view)


OWN_CODE = {
    "Bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 4},
    "CodeGen": {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4},
    "Mpt": {"d_model": 32, "n_layers": 1, "n_heads": 4},
    "XGLM": {"d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 32},
}


@pytest.mark.parametrize("name", OWN_CODE)
def test_models_with_attention_code_of_their_own(name):
    """They accept any name that is registered, and would add a mask of ours to their scores: refused, or right."""
    adapter.register()
    models = []
    for implementation in ("headwise", "eager"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(vocab_size=96, **OWN_CODE[name])
        config._attn_implementation = implementation
        models.append(getattr(transformers, f"{name}ForCausalLM")(config).eval())
    ours, eager = models
    inputs = {"input_ids": tokens(), "attention_mask": padding("left")}
    if NEW:
        with pytest.raises(NotImplementedError, match="attn_implementation='eager'"):
            ours(**inputs)
    else:  # masks of their own, too
        assert torch.equal(ours(**inputs).logits, eager(**inputs).logits)


def test_chunked_attention():
    """Llama 4: chunks of 8 tokens, a mask that has to be built."""
    model = Model(
        "llama4", "Llama4TextConfig", "Llama4ForCausalLM",
        BY_NAME["llama"].options | {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 32},
    )  # fmt: skip
    eager, ours = pair(model)
    mask = padding("left")
    with torch.no_grad():
        expected, result = (m(tokens(), attention_mask=mask).logits[mask.bool()] for m in (eager, ours))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_no_table_of_all_pairs():
    """A million tokens: the table would take a terabyte."""
    length = 1 << 20
    mask = torch.ones(1, length, dtype=torch.bool)
    ids = torch.zeros(1, length, dtype=torch.int64)
    packed = masking_utils.and_masks(CAUSAL, masking_utils.packed_sequence_mask_function(ids))
    window = masking_utils.sliding_window_causal_mask_function(4096)
    for options in ({"attention_mask": mask}, {"mask_function": packed}, {"mask_function": window}):
        made = adapter.make_mask(batch_size=1, kv_length=length, **options, **place(length, 0))
        assert isinstance(made, CompactMask)
        assert made.shape == (1, 1, length, length)


class NoReading(TorchDispatchMode):
    """Tensors whose values nobody may look at."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a value was read back"
        assert "nonzero" not in str(func), "a size that only the device knows was read back"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("read", [torch.Tensor.item, bool, int, torch.Tensor.nonzero, lambda x: x.tolist()])
def test_reading_would_be_seen(read, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    with NoReading(), pytest.raises((AssertionError, TypeError)):
        read(torch.zeros((), dtype=torch.int64))


def test_nothing_is_read_back(monkeypatch):
    """Masks of static caches, of padding and of packed offsets, and the adapter_calls that are made of them."""
    monkeypatch.setattr(torch.Tensor, "tolist", None)

    def stand_in(query, key, value, *rest, **options):
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    for op in ("attention", "attention_varlen", "attention_decode"):
        monkeypatch.setattr(adapter, op, stand_in)
    ones = torch.ones(2, 9, dtype=torch.bool)
    layer = torch.nn.Module()
    offsets = torch.tensor([0, 5, 12])
    with NoReading():
        for queries, offset, mask in itertools.product((1, 9), (torch.zeros((), dtype=torch.int64), 0), (None, ones)):
            made = adapter.make_mask(
                batch_size=2, kv_length=12, attention_mask=mask, allow_is_causal_skip=False, **place(queries, offset)
            )
            q, k = torch.randn(2, 4, queries, 16), torch.randn(2, 2, 12, 16)
            adapter.attention_forward(layer, q, k, k, made)
        q, longest = torch.randn(1, 4, 12, 16), torch.tensor(7)
        adapter.attention_forward(
            layer,
            q,
            q,
            q,
            None,
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=longest,
            max_length_k=longest,
        )


def packed_positions(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


def offsets_of(*lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("how", ["positions", "offsets", "offsets with a tensor max_length", "both, with a cache"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_packed_batch_is_its_sequences(name, how, adapter_calls):
    """Packed position_ids without an attention_mask: a loss that is that of the sequences, and no sequence sees another."""
    eager, ours = pair(BY_NAME[name])
    lengths = (15, 1, 24)
    ids = tokens(batch=1)
    inputs = {"position_ids": packed_positions(*lengths), "use_cache": how == "both, with a cache"}
    if how != "positions":
        longest = torch.tensor(max(lengths)) if "tensor" in how else max(lengths)
        offsets = offsets_of(*lengths)
        inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}
    labels = ids.masked_fill(inputs["position_ids"] == 0, -100)
    result = ours(ids, labels=labels, **inputs)
    assert {op for op, _, _ in adapter_calls} == {"attention_varlen"}
    result.loss.backward()
    logits = torch.cat([eager(part).logits for part in ids.split(lengths, dim=1)], dim=1)
    loss = eager.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
    loss.backward()
    assert loss > 1.0
    torch.testing.assert_close(result.logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.loss, loss)
    for ours_parameter, parameter in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours_parameter.grad, parameter.grad, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(eager(ids, use_cache=False).logits, logits, atol=0.1)


def test_plain_positions_are_no_packing(adapter_calls):
    """Older releases hand over sequence numbers for every call without a mask: one sequence per row is dense attention."""
    _, ours = pair(BY_NAME["llama"])
    ours(tokens(), use_cache=False)
    assert {op for op, _, _ in adapter_calls} == {"attention"}


def test_three_rows_of_positions_are_no_packing(adapter_calls):
    """Qwen2-VL turns by three positions per token (M-RoPE), which stand still or jump back inside an image."""
    text = {k: v for k, v in BY_NAME["llama"].options.items() if k != "head_dim"}
    text |= {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}, "rope_theta": 1e4}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    models = []
    adapter.register()
    for implementation in ("eager", "headwise"):
        torch.manual_seed(0)
        config = transformers.Qwen2VLConfig(text_config=dict(text), vision_config=dict(vision))
        config._attn_implementation = implementation
        models.append(transformers.Qwen2VLForConditionalGeneration(config).eval())
    assert [m.config._attn_implementation for m in models] == ["eager", "headwise"]
    positions = torch.stack([torch.arange(LONG)] * 3)[:, None].repeat(1, 2, 1)
    positions[0, :, 8:24] = 8
    positions[1, :, 8:24] = torch.arange(4).repeat_interleave(4) + 8
    positions[2, :, 8:24] = torch.arange(4).repeat(4) + 8
    with torch.no_grad():
        eager, ours = (m(tokens(), position_ids=positions, use_cache=False).logits for m in models)
    assert {op for op, _, _ in adapter_calls} == {"attention"}
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_both_registers_hold_the_name():
    """With the attention alone no mask would be made, and padding would be attended to."""
    adapter.register()
    assert transformers.AttentionInterface._global_mapping["headwise"] is adapter.attention_forward
    assert transformers.AttentionMaskInterface._global_mapping["headwise"] is adapter.make_mask


@pytest.mark.parametrize("name", ["my_flash", "sdpa2", "flex", "paged|headwise", "eager_headwise"])
def test_names_that_mean_something_else(name):
    with pytest.raises(ValueError, match="name is"):
        adapter.register(name)


def call(mask=None, queries=4, keys=4, **options):
    q, k = torch.randn(1, 2, queries, 8), torch.randn(1, 2, keys, 8)
    return adapter.attention_forward(torch.nn.Module(), q, k, k, mask, **options)


@pytest.mark.parametrize("name", ["indices", "block_indices", "head_mask", "cache"])
def test_arguments_that_are_refused(name):
    with pytest.raises(NotImplementedError, match=name):
        call(**{name: torch.ones(1)})
    call(**{name: None})


def test_calls_that_say_too_little_or_two_things():
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    both = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 4, "max_length_k": 4}
    padded = adapter.make_mask(
        batch_size=1, kv_length=4, attention_mask=torch.ones(1, 4, dtype=torch.bool), **place(4, 0)
    )
    with pytest.raises(NotImplementedError, match="output_attentions"):
        call(output_attentions=True)
    with pytest.raises(NotImplementedError, match="scaling"):
        call(scaling=torch.tensor(0.5))
    with pytest.raises(NotImplementedError, match="attention_mask with cu_seq_lens_q"):
        call(padded, **both)
    with pytest.raises(NotImplementedError, match="position_bias with cu_seq_lens_q"):
        call(position_bias=torch.zeros(1, 2, 4, 4), **both)
    with pytest.raises(ValueError, match="cu_seq_lens_k is None"):
        call(cu_seq_lens_q=offsets)
    with pytest.raises(ValueError, match="attention_mask is None in a causal layer with 2 queries and 4 keys"):
        call(queries=2)
    with pytest.raises(NotImplementedError, match="sliding_window"):
        call(is_causal=False, sliding_window=2)
    with pytest.raises(ValueError, match="shape"):
        call(torch.ones(1, 4))
    with pytest.raises(TypeError, match="int64"):
        call(torch.ones(1, 1, 4, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(1, 4, 4\)"):
        call(padded, queries=3)


def test_calls_without_a_mask():
    """A layer's own word: causal or not, a window of W tokens with itself; one query sees every key."""
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    layer = torch.nn.Module()

    def result(queries=q, **options):
        return adapter.attention_forward(layer, queries, k, v, None, **options)[0].transpose(1, 2)

    assert torch.equal(result(), attention(q, k, v, causal=True))
    assert torch.equal(result(is_causal=False), attention(q, k, v))
    assert torch.equal(result(sliding_window=3), attention(q, k, v, window=(2, 0)))
    layer.is_causal = False
    assert torch.equal(result(), attention(q, k, v))
    last = q[:, :, -1:]
    torch.testing.assert_close(result(last, is_causal=True), attention(last, k, v))


def test_keys_of_any_stride():
    """Keys that come from a convolution over the tokens (Inkling) have them in their last dim: copied, not refused."""
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    offsets = torch.tensor([0, 4, 6], dtype=torch.int32)
    for options in ({}, {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}):
        plain, out = (adapter.attention_forward(torch.nn.Module(), *x, None, **options)[0] for x in ((q, k, v), turned))
        assert torch.equal(out, plain)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_ones_own(kind):
    """A (B, 1, Sq, Sk) mask given to the model reaches every layer as it is."""
    eager, ours = pair(BY_NAME["llama"])
    prefix = (torch.ones(LONG, LONG).tril() > 0) | (torch.arange(LONG) < 10)
    added = torch.zeros(LONG, LONG).masked_fill(~prefix, torch.finfo(torch.float32).min).expand(2, 1, LONG, LONG)
    mask = prefix.expand(2, 1, LONG, LONG) if kind == "bool" else added
    with torch.no_grad():
        expected = eager(tokens(), attention_mask=added).logits
        assert not torch.allclose(expected, eager(tokens()).logits, atol=0.1)
        torch.testing.assert_close(ours(tokens(), attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    """Layers that run a second time in the backward pass get the same compact masks."""
    _, ours = pair(BY_NAME["gemma2"])
    gradients = []
    for checkpointing in (False, True):
        ours.train()
        ours.zero_grad()
        if checkpointing:
            ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ours(tokens(), attention_mask=padding("right"), labels=tokens(), use_cache=False).loss.backward()
        gradients.append([p.grad.clone() for p in ours.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.skipif(not NEW, reason="BERT has attention code of its own in this release of Transformers")
def test_dropout():
    """BERT in training: dropout of the probabilities goes to the op, with a seed of PyTorch's generator."""
    _, ours = pair(BY_NAME["bert"], attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    ours.train()
    torch.manual_seed(3)
    first, second = ours(tokens()).logits, ours(tokens()).logits
    torch.manual_seed(3)
    assert torch.equal(first, ours(tokens()).logits)
    assert not torch.allclose(first, second)
    assert first.isfinite().all()


def test_a_window_that_is_off_by_one_would_be_seen(monkeypatch):
    """The models above are close enough to the budget's edge that the smallest mistake in a mask shows."""
    eager, ours = pair(BY_NAME["mistral"])
    ids = tokens()
    with torch.no_grad():
        truth, right = eager.double()(ids).logits, ours(ids).logits
        made = CompactMask.of

        def wider(shape, device, window, *rest):
            return made(shape, device, (SHORT, window[1]), *rest)

        monkeypatch.setattr(CompactMask, "of", staticmethod(wider))
        wrong = ours(ids).logits
    assert testing.compare("logits", right, truth, eager.float()(ids).logits).ok
    assert not testing.compare("logits", wrong, truth, eager.float()(ids).logits).ok


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_mask_of_three_dims_is_named(name):
    _, ours = pair(BY_NAME[name])
    ids = tokens()
    square = torch.ones(*ids.shape, ids.shape[1], dtype=torch.int64).tril()
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \(2, 40, 40\); a model needs \(B, S\).*mask\[:, None\]"
    ):
        ours(ids, attention_mask=square)

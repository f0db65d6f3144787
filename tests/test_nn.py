"""The modules: rotary tables, caches, attention in its three forms, and the language model."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional as F

import headwise as hw
from headwise import nn

SMALL = nn.TransformerConfig(
    vocabulary=61,
    dim=32,
    layers=3,
    heads=4,
    key_heads=2,
    windows=(9, None),
    qk_norm=True,
    norm_offset=1.0,
    positions=128,
)
LENGTHS = [37, 5, 22]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def attention(**options) -> nn.Attention:
    torch.manual_seed(0)
    rotary = nn.RotaryEmbedding(16, 128)
    module = nn.Attention(48, 4, 2, 16, qk_norm=True, rotary=rotary, **options)
    for norm in (module.q_norm, module.k_norm):
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    if module.sink is not None:
        torch.nn.init.normal_(module.sink)
    return module


def model(config: nn.TransformerConfig = SMALL, **options) -> nn.TransformerLM:
    torch.manual_seed(1)
    made = nn.TransformerLM(config, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(SMALL.vocabulary, shape, generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------------------------------------------- rotary


def test_tables_are_exact_and_stay_float32():
    rotary = nn.RotaryEmbedding(64, 20_000).to(torch.bfloat16)
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    for position in (1, 257, 8191, 19_999):
        for pair in (0, 7, 31):
            angle = position * 10_000.0 ** (-2 * pair / 64)
            assert rotary.cos[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert rotary.sin[position, pair].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_a_model_in_bfloat16_does_not_drift_at_far_positions():
    """Scores depend on the distance alone, at position 100,000 as at 0."""
    rotary = nn.RotaryEmbedding(64, 100_100).to(torch.bfloat16)
    q, k = torch.randn(2, 1, 1, 1, 64, generator=torch.Generator().manual_seed(0))

    def score(at: int) -> float:
        turned_q, _ = rotary(q, q, torch.tensor([at + 60]))
        _, turned_k = rotary(k, k, torch.tensor([at]))
        return float((turned_q * turned_k).sum())

    assert score(100_000) == pytest.approx(score(0), abs=1e-3)


def test_tables_are_made_when_a_model_leaves_the_meta_device():
    with torch.device("meta"):
        rotary = nn.RotaryEmbedding(16, 50, scaling=nn.LinearScaling(4.0))
    assert rotary.cos.is_meta
    made = rotary.to_empty(device="cpu")
    assert torch.equal(made.cos, nn.RotaryEmbedding(16, 50, scaling=nn.LinearScaling(4.0)).cos)
    assert not made.state_dict()


def test_linear_scaling_divides_positions():
    plain, scaled = nn.RotaryEmbedding(16, 64), nn.RotaryEmbedding(16, 64, scaling=nn.LinearScaling(4.0))
    close(scaled.cos[::4], plain.cos[:16])


def test_llama3_scaling_keeps_fast_pairs_and_stretches_slow_ones():
    rotary = nn.RotaryEmbedding(128, 8, 500_000.0, scaling=nn.Llama3Scaling(8.0, 1.0, 4.0, 8192))
    plain = nn.RotaryEmbedding(128, 8, 500_000.0).frequencies()
    ratio = rotary.frequencies() / plain
    wavelength = 2 * math.pi / plain
    assert torch.equal(
        ratio[wavelength < 8192 / 4], torch.ones(int((wavelength < 8192 / 4).sum()), dtype=torch.float64)
    )
    close(ratio[wavelength > 8192], torch.full((int((wavelength > 8192).sum()),), 1 / 8, dtype=torch.float64))
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    smooth = (8192 / wavelength[between] - 1.0) / 3.0
    close(ratio[between], (1 - smooth) / 8 + smooth)
    assert between.sum() >= 5


def test_yarn_scaling():
    rule = nn.YarnScaling(4.0, 4096)
    ratio = nn.RotaryEmbedding(128, 8, scaling=rule).frequencies() / nn.RotaryEmbedding(128, 8).frequencies()
    # 32 turns in 4096 positions end at pair 20.9, one turn at pair 45.03.
    assert torch.equal(ratio[:21], torch.ones(21, dtype=torch.float64))
    close(ratio[46:], torch.full((18,), 0.25, dtype=torch.float64))
    close(ratio[33], torch.tensor(1 - 0.75 * (33 - 20) / (46 - 20), dtype=torch.float64))
    assert rule.magnitude() == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert nn.YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0).magnitude() == 1.0
    assert nn.YarnScaling(4.0, 4096, magnitude_factor=1.5).magnitude() == 1.5
    scaled = nn.RotaryEmbedding(128, 8, scaling=rule)
    close(scaled.cos[0], torch.full((64,), rule.magnitude()))


@pytest.mark.parametrize("dim", [0, 15])
def test_a_rotation_of_odd_width(dim):
    with pytest.raises(ValueError, match=f"dim is {dim}; it needs an even number"):
        nn.RotaryEmbedding(dim, 8)


# ----------------------------------------------------------------------------------------------------------- attention


FLAGS = [
    {},
    {"window": (6, 0)},
    {"softcap": 3.0, "sink": True, "scale": 0.3},
]


@pytest.mark.parametrize("options", FLAGS, ids=str)
def test_packed_padded_and_alone_are_the_same(options):
    module = attention(**options)
    documents = [torch.randn(n, 48) for n in LENGTHS]
    alone = [module(x[None])[0] for x in documents]
    packed = module(torch.cat(documents), packing=nn.Packing.of(LENGTHS)).split(LENGTHS)
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=math.nan)
    padded = module(padded.nan_to_num(7.0), lengths=torch.tensor(LENGTHS))
    for i, n in enumerate(LENGTHS):
        close(packed[i], alone[i])
        close(padded[i, :n], alone[i])


def in_steps(module: nn.Attention, x: torch.Tensor, steps: list[int], cache: nn.KVCache) -> torch.Tensor:
    """x (B, S, dim) through the cache, so many tokens at a time."""
    cache.keys.fill_(math.nan)
    cache.values.fill_(math.nan)
    found = []
    for part in x.split(steps, 1):
        cache.extend(part.shape[1])
        found.append(module(part, cache=cache))
    return torch.cat(found, 1)


def contiguous(batch: int, capacity: int) -> nn.KVCache:
    return nn.KVCache(1, batch, 2, capacity, 16)


def paged(batch: int, capacity: int) -> nn.PagedKVCache:
    return nn.PagedKVCache(1, batch, 2, batch * -(-capacity // 8), 16, page_size=8)


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("options", FLAGS, ids=str)
@pytest.mark.parametrize("steps", [[40], [17, 1, 1, 4, 17], [1] * 40], ids=str)
def test_a_cache_changes_nothing(make, options, steps):
    module = attention(**options)
    x = torch.randn(2, 40, 48)
    with torch.no_grad():
        close(in_steps(module, x, steps, make(2, 40)), module(x))


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("known", [list, torch.tensor])
def test_prompts_of_different_lengths(make, known):
    """Two rounds of padded tokens, then single ones: each row is as if it were alone."""
    module = attention(window=(20, 0))
    rounds = [LENGTHS, [2, 30, 0], [1, 1, 1]]
    rows = [torch.randn(sum(n), 48) for n in zip(*rounds, strict=True)]
    cache = make(3, 90)
    cache.keys.fill_(math.nan)
    cache.values.fill_(math.nan)
    found: list[list[torch.Tensor]] = [[], [], []]
    done = [0, 0, 0]
    with torch.no_grad():
        for counts in rounds:
            tokens = torch.full((3, max(counts), 48), 3.0)
            for row, n in enumerate(counts):
                tokens[row, :n] = rows[row][done[row] : done[row] + n]
            cache.extend(max(counts), None if counts == [1, 1, 1] else known(counts))
            out = module(tokens, cache=cache)
            for row, n in enumerate(counts):
                found[row].append(out[row, :n])
                done[row] += n
        assert cache.lengths.tolist() == done
        for row in range(3):
            close(torch.cat(found[row]), module(rows[row][None])[0])


def test_dropout_is_for_training():
    module = attention(dropout=0.5)
    x = torch.randn(1, 30, 48)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_the_unrotated_projection_is_not_kept_for_the_backward():
    module = nn.Attention(48, 4, 2, 16, rotary=nn.RotaryEmbedding(16, 128))
    projected, kept = [], []
    module.qkv.register_forward_hook(lambda _module, _args, out: projected.append(out))

    def note(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = module(torch.randn(2, 40, 48))
    assert kept
    assert projected[0].untyped_storage().data_ptr() not in kept
    out.sum().backward()


def test_attention_that_cannot_be():
    with pytest.raises(ValueError, match="dim is 10; it needs a multiple of heads"):
        nn.Attention(10, 3)
    with pytest.raises(ValueError, match="heads is 4; it needs a multiple of key_heads"):
        nn.Attention(64, 4, 3)
    module = attention(causal=False)
    cache = contiguous(1, 8)
    cache.extend(2)
    with pytest.raises(ValueError, match="a cache needs causal=True"):
        module(torch.randn(1, 2, 48), cache=cache)


def test_what_excludes_each_other_is_refused():
    module, x = attention(), torch.randn(2, 4, 48)
    cache = contiguous(2, 8)
    cache.extend(4)
    with pytest.raises(ValueError, match="lengths and cache are given"):
        module(x, cache=cache, lengths=torch.tensor([4, 3]))
    with pytest.raises(ValueError, match="packing and lengths are given"):
        module(x.flatten(0, 1), packing=nn.Packing.of([4, 4]), lengths=torch.tensor([4, 3]))


def test_nothing_is_dropped_with_a_cache():
    module = attention(dropout=0.5)
    x = torch.randn(1, 30, 48)
    with torch.no_grad():
        found = in_steps(module, x, [10, 1, 19], contiguous(1, 30))
        close(found, module.eval()(x))


# -------------------------------------------------------------------------------------------------------------- caches


def test_a_full_cache_says_so_and_stays_usable():
    cache = contiguous(1, 8)
    cache.extend(7)
    with pytest.raises(ValueError, match="9 positions are needed; its capacity is 8"):
        cache.extend(2)
    assert cache.lengths.tolist() == [7]
    assert cache.extend(1).tolist() == [[7]]


@pytest.mark.parametrize("make", [contiguous, paged])
def test_lengths_that_a_caller_has_kept_stay_what_they_were(make):
    """As for a draft of four tokens of which the larger model accepts one."""
    cache = make(1, 32)
    cache.extend(5)
    before = cache.lengths
    cache.extend(4)
    cache.trim(before + 1)
    assert (before.tolist(), cache.lengths.tolist()) == ([5], [6])
    assert cache.extend(1).tolist() == [[6]]


def test_pages_are_given_back():
    cache = nn.PagedKVCache(1, 2, 1, 4, 8, page_size=4)
    cache.extend(8)  # all four pages
    with pytest.raises(ValueError, match="2 more pages are needed; 0 of 4 are free"):
        cache.extend(1)
    cache.release(0)
    assert cache.lengths.tolist() == [0, 8]
    assert cache.extend(4, [1, 4]).tolist()[0] == [0, 1, 2, 3]
    assert cache.lengths.tolist() == [1, 12]
    held = {page for page in cache.block_table.flatten().tolist() if page < 4}
    assert len(held) == 4  # none is held twice


def test_padding_does_not_write_into_pages_of_others():
    cache = nn.PagedKVCache(1, 2, 1, 3, 4, page_size=4)
    cache.extend(4, [4, 1])
    cache.write(0, torch.ones(2, 1, 4, 4), torch.ones(2, 1, 4, 4))
    cache.extend(4, [0, 2])
    cache.write(0, torch.full((2, 1, 4, 4), 9.0), torch.full((2, 1, 4, 4), 9.0))
    keys, _ = cache.read(0)
    assert (keys[0, 0, :4] == 1.0).all()
    assert keys[1, 0, :3, 0].tolist() == [1.0, 9.0, 9.0]


@pytest.mark.parametrize("make", [contiguous, paged])
def test_trimmed_tokens_are_forgotten(make):
    module = attention()
    x, wrong = torch.randn(2, 20, 48), torch.randn(2, 6, 48)
    cache = make(2, 30)
    with torch.no_grad():
        first = in_steps(module, x[:, :12], [12], cache)
        cache.extend(6)
        module(wrong, cache=cache)
        cache.trim(torch.tensor([12, 12]))
        cache.extend(8)
        close(torch.cat([first, module(x[:, 12:], cache=cache)], 1), module(x))


def test_counts_that_cannot_be():
    with pytest.raises(ValueError, match=r"counts is \[3, 9\]; it needs 2 numbers from 0 to 4"):
        contiguous(2, 20).extend(4, [3, 9])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.extend(4, torch.tensor([[3], [4]])), r"counts has shape \(2, 1\)"),
        (lambda cache: cache.extend(4, torch.tensor([3.7, 4.2])), "dtype float32; it needs"),
        (lambda cache: cache.trim(torch.tensor([3])), r"lengths has shape \(1,\)"),
        (lambda cache: cache.write(0, *torch.zeros(2, 1, 2, 5, 16)), "of 2 sequences and the 5 tokens"),
        (lambda cache: cache.write(0, *torch.zeros(2, 2, 2, 1, 16)), "of 2 sequences and the 5 tokens"),
    ],
)  # fmt: skip
def test_a_cache_takes_what_fits(call, message):
    cache = contiguous(2, 20)
    cache.extend(5)
    with pytest.raises(ValueError, match=message):
        call(cache)


def test_numbers_of_a_tensor_stay_inside():
    cache = contiguous(2, 20)
    cache.extend(5, torch.tensor([99, -4]))
    assert cache.lengths.tolist() == [5, 0]
    cache.trim(torch.tensor([-3, 4]))
    assert cache.lengths.tolist() == [0, 0]


def test_a_sequence_has_its_share_of_pages():
    lm = model()
    cache = lm.cache(8, 100, page_size=16)
    assert cache.block_table.shape == (8, 7)  # what the decode kernel splits by does not depend on the batch
    cache.extend(100)
    with pytest.raises(ValueError, match="a sequence needs 8 pages; each may have 7"):
        cache.extend(13)


def test_a_cache_is_reset():
    cache = paged(2, 16)
    cache.extend(16)
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    assert cache.extend(16).tolist() == [[*range(16)]] * 2
    assert cache.first


# --------------------------------------------------------------------------------------------------------------- model


CONFIGS = {
    "tied": SMALL,
    "as gpt-oss": nn.TransformerConfig(
        vocabulary=61, dim=32, layers=2, heads=4, key_heads=1, head_dim=16, windows=(5, None), sink=True, tied=False,
        positions=128, rotary_scaling=nn.YarnScaling(4.0, 32, whole_pairs=False),
    ),
    "as Gemma 2": nn.TransformerConfig(
        vocabulary=61, dim=32, layers=2, heads=2, windows=(8, None), softcap=5.0, logit_softcap=3.0, norm_offset=1.0,
        activation="gelu_tanh", positions=128, embedding_scale=math.sqrt(32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_is_that_of_the_logits(name):
    lm = model(CONFIGS[name])
    tokens = ids(2, 40)
    targets = ids(2, 40, seed=1)
    targets[0, :7] = -100
    loss, plain = lm(tokens, targets), F.cross_entropy(lm(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)
    parameters = list(lm.parameters())
    for found, expected in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(plain, parameters), strict=True
    ):
        close(found, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_takes_the_likeliest_token_of_a_forward_pass(name):
    lm = model(CONFIGS[name])
    prompt = ids(3, 11)
    made = lm.generate(prompt, 12)
    with torch.no_grad():
        likeliest = lm(torch.cat([prompt, made], 1)).argmax(-1)
    assert torch.equal(likeliest[:, 10:-1], made)


def test_generation_of_padded_prompts():
    lm = model()
    prompts = ids(3, 11)
    lengths = torch.tensor([11, 4, 7])
    made = lm.generate(prompts, 6, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(made[row : row + 1], lm.generate(prompts[row : row + 1, :length], 6))


def test_generation_draws_by_the_generator():
    lm = model()
    drawn = [
        lm.generate(ids(2, 5), 20, temperature=1.0, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert lm.generate(ids(2, 5), 0).shape == (2, 0)


def test_a_model_in_pages_and_packed():
    lm = model()
    tokens = ids(2, 30)
    whole = lm(tokens)
    close(lm(tokens.flatten(), packing=nn.Packing.of([30, 30])).view_as(whole), whole)
    cache = lm.cache(2, 30, page_size=4)
    with torch.no_grad():
        parts = []
        for part in tokens.split([9, 1, 20], 1):
            cache.extend(part.shape[1])
            parts.append(lm(part, cache=cache))
    close(torch.cat(parts, 1), whole)


def test_a_model_copied_saved_and_checkpointed():
    lm = model()
    other = model().requires_grad_(False)
    other.load_state_dict(lm.state_dict())
    tokens = ids(1, 20)
    assert torch.equal(copy.deepcopy(lm)(tokens), lm(tokens))
    assert torch.equal(other(tokens), lm(tokens))
    lm(tokens, tokens).backward()
    expected = [p.grad.clone() for p in lm.parameters()]
    lm.zero_grad()
    forward = nn.TransformerBlock.forward

    def checkpointed(block, x, residual=None, **how):
        return torch.utils.checkpoint.checkpoint(
            lambda x, residual: forward(block, x, residual, **how), x, residual, use_reentrant=False
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.TransformerBlock, "forward", checkpointed)
        lm(tokens, tokens).backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(lm.parameters(), expected, strict=True))


def test_a_model_under_autocast():
    """The stream, the norms and the loss stay in float32, the products are bfloat16; a cache takes what comes."""
    lm = model()
    tokens = ids(2, 20)
    exact = lm(tokens, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        loss = lm(tokens, tokens)
        loss.backward()
        made = lm.generate(tokens[:, :5], 4)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    assert made.shape == (2, 4)


def test_a_model_built_on_meta_takes_its_weights():
    with torch.device("meta"):
        empty = nn.TransformerLM(SMALL)
    empty.load_state_dict(model().state_dict(), assign=True)
    assert torch.equal(empty(ids(1, 9)), model()(ids(1, 9)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.TransformerConfig(50, 32, 2, 4, windows=(0,)), "a window is 0; it needs at least 1 key"),
        (lambda: nn.TransformerConfig(50, 32, 2, 4, windows=()), "windows is empty"),
        (lambda: nn.TransformerConfig(50, 33, 2, 4), "dim is 33; it needs a multiple of heads"),
        (lambda: nn.Attention(32, 4, 0), "key_heads 0; each needs at least 1"),
        (lambda: nn.Attention(32, 4, dropout=2.0), "dropout is 2.0"),
        (lambda: nn.GatedMLP(8, 8, "swish"), "activation is 'swish'; it needs to be one of silu"),
        (lambda: model().cache(2, 129), "capacity is 129; the model has 128 positions"),
        (lambda: model().generate(ids(1, 100), 30), "100 tokens and 30 more; the model has 128 positions"),
        (lambda: model().generate(ids(1, 0), 3), r"ids has shape \(1, 0\)"),
        (lambda: model().generate(ids(1, 3), 3, temperature=-1.0), "temperature -1.0"),
        (lambda: model().generate(ids(2, 3), 3, lengths=torch.tensor([3, 0])), r"lengths is \[3, 0\]; each needs"),
        (lambda: model().generate(ids(2, 3), 3, lengths=[3, 1]), "it needs a tensor of 2 whole numbers"),
    ],
)  # fmt: skip
def test_models_that_cannot_be(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_last_position_is_used():
    assert model().generate(ids(1, 100), 29).shape == (1, 29)


def test_a_model_compiles_without_a_break():
    lm = model(nn.TransformerConfig(vocabulary=61, dim=32, layers=1, heads=2, key_heads=1, positions=64))
    tokens, targets = ids(1, 24), ids(1, 24, seed=1)
    compiled = torch.compile(lm, fullgraph=True, backend="aot_eager")
    close(compiled(tokens, targets), lm(tokens, targets))


# ------------------------------------------------------------------------------------------------------- small modules


def test_layer_norm_is_that_of_pytorch():
    ours, theirs = nn.LayerNorm(40), torch.nn.LayerNorm(40)
    for module in (ours, theirs):
        torch.manual_seed(0)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    x = torch.randn(7, 40)
    close(ours(x), theirs(x))
    assert nn.LayerNorm(40, bias=False).bias is None
    assert not list(nn.LayerNorm(40, elementwise_affine=False).parameters())


def test_rms_norm_with_a_residual():
    norm = nn.RMSNorm(40, weight_offset=1.0)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(2, 7, 40)
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    close(normed, norm(x + residual))


def test_gated_mlp():
    mlp = nn.GatedMLP(16, 24, "gelu_tanh", bias=True)
    x = torch.randn(5, 16)
    gate, up = mlp.gate_up(x).chunk(2, -1)
    close(mlp(x), mlp.down(F.gelu(gate, approximate="tanh") * up))
    close(mlp.glu(gate, up), F.gelu(gate, approximate="tanh") * up)


def test_linear_cross_entropy_loss():
    hidden, weight, targets = torch.randn(9, 16), torch.randn(30, 16), torch.randint(30, (9,))
    loss = nn.LinearCrossEntropyLoss(label_smoothing=0.1, softcap=4.0)
    expected = hw.cross_entropy(hidden @ weight.T, targets, label_smoothing=0.1, softcap=4.0)
    close(loss(hidden, weight, targets), expected)
    assert "label_smoothing=0.1" in repr(loss)

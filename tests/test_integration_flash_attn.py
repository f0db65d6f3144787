"""The functions of flash_attn on Headwise, against attention written out with whole matrices, in float64."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import sys

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE

import headwise as hw
from headwise.integrations import flash_attn
from headwise.integrations.flash_attn import _packed, bert_padding, flash_attn_interface
from headwise.integrations.flash_attn.layers.rotary import apply_rotary_emb

SHAPES = [(7, 7), (5, 9), (9, 5), (1, 7), (70, 131)]
WINDOWS = [(-1, -1), (3, -1), (-1, 2), (3, 0), (2, 4), (0, 0)]


def normal(*shape, grad=False, seed=0, dtype=torch.float64):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return made.to(dtype).requires_grad_(grad)


def qkv(queries, keys, heads=4, key_heads=2, batch=2, dim=8):
    return (
        normal(batch, queries, heads, dim, grad=True, seed=1),
        normal(batch, keys, key_heads, dim, grad=True, seed=2),
        normal(batch, keys, key_heads, dim, grad=True, seed=3),
    )


def slopes(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) * 0.5 + 0.05


def written_out(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, alibi=None, start=0):
    """(out, lse, probs) of q (B, Sq, H, D) over k, v (B, Sk, Hk, D); keys before ``start`` do not exist."""
    (_, queries, heads, dim), (_, keys, key_heads, _) = q.shape, k.shape
    k, v = (x.repeat_interleave(heads // key_heads, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (1 / math.sqrt(dim) if scale is None else scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    p = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)
    if alibi is not None:
        s = s - alibi.double().reshape(-1, heads, 1, 1) * (p - j).abs()
    seen = (j >= start) & (j == j) & (p == p)
    left, right = window
    if causal:
        right = 0
    if left >= 0:
        seen = seen & (j >= p - left)
    if right >= 0:
        seen = seen & (j <= p + right)
    s = s.masked_fill(~seen, -torch.inf)
    empty = ~seen.any(-1)[:, None]
    probs = s.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return torch.einsum("bhij,bjhd->bihd", probs, v), s.logsumexp(-1), probs


def same(got, wanted, inputs=()):
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    if inputs:
        grad = normal(*wanted.shape, seed=9)
        for mine, theirs in zip(*(torch.autograd.grad(y, inputs, grad) for y in (got, wanted)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------------------------------------------- dense


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
@pytest.mark.parametrize("alibi", [None, (4,), (2, 4)], ids=str)
def test_dense(queries, keys, causal, alibi):
    alibi = alibi and slopes(*alibi)
    for window in WINDOWS:
        for softcap, scale in ((0.0, None), (2.0, 0.4)):
            q, k, v = qkv(queries, keys)
            flags = {"causal": causal, "softcap": softcap}
            got, lse, dropped = flash_attn.flash_attn_func(
                q, k, v, softmax_scale=scale, window_size=window, alibi_slopes=alibi, return_attn_probs=True, **flags
            )
            wanted, wanted_lse, _ = written_out(q, k, v, scale=scale, window=window, alibi=alibi, **flags)
            assert (dropped.shape, dropped.dtype) == ((0,), q.dtype)  # as flash_attn 2.8.3 has it
            assert got.is_contiguous()
            torch.testing.assert_close(lse, wanted_lse, rtol=1e-9, atol=1e-9)
            same(got, wanted, (q, k, v))
            alone = flash_attn.flash_attn_func(q, k, v, 0.0, scale, causal, window, softcap, alibi)
            assert torch.equal(alone, got)


def test_the_lse_of_alibi_has_a_gradient():
    q, k, v = qkv(6, 9)
    for causal in (False, True):
        lse = flash_attn.flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes(4), return_attn_probs=True)[1]
        same(lse, written_out(q, k, v, causal=causal, alibi=slopes(4))[1], (q, k))


def test_alibi_makes_no_square_bias(monkeypatch):
    biases = []

    def attention(*args, **kwargs):
        biases.append(kwargs["bias"])
        return hw.attention(*args, **kwargs)

    monkeypatch.setattr("headwise.integrations.flash_attn._alibi.attention", attention)
    for options, count in (({}, 1), ({"causal": True}, 1), ({"window_size": (30, 20)}, 2)):
        biases.clear()
        flash_attn.flash_attn_func(*qkv(50, 60), alibi_slopes=slopes(2, 4), **options)
        assert len(biases) == count
        assert all(bias.untyped_storage().nbytes() <= 2 * 4 * (50 + 60) * bias.itemsize for bias in biases)


def test_alibi_far_from_the_end_of_a_cache_is_as_exact_as_elsewhere():
    """A bias of tens of thousands, counted from the far end of the cache, would leave two digits of the scores."""
    keys, filled = 100_000, 300
    q = normal(1, 3, 2, 8, dtype=torch.float32)
    k, v = (normal(1, filled, 2, 8, seed=seed, dtype=torch.float32) for seed in (1, 2))
    caches = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, keys - filled)) for x in (k, v)]
    alibi, lengths = torch.tensor([0.3, 0.25]), torch.tensor([filled], dtype=torch.int32)
    for causal in (False, True):
        flags = {"causal": causal, "alibi_slopes": alibi}
        wanted = written_out(q.double(), k.double(), v.double(), causal=causal, alibi=alibi)[0]
        short = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **flags)
        far = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, **flags)
        assert (far - wanted).abs().max() <= 2 * (short - wanted).abs().max() + 1e-7


def test_packed_tensors():
    q, k, v = qkv(7, 7, key_heads=4)
    wanted = written_out(q, k, v, causal=True)[0]
    same(flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True), wanted, (q, k, v))
    q, k, v = qkv(5, 9)
    out, lse, _ = flash_attn.flash_attn_kvpacked_func(
        q, torch.stack((k, v), 2), window_size=(2, 1), return_attn_probs=True
    )
    wanted, wanted_lse, _ = written_out(q, k, v, window=(2, 1))
    same(lse, wanted_lse)
    same(out, wanted, (q, k, v))


def test_views_are_read_in_place(monkeypatch):
    seen = []
    monkeypatch.setattr(
        flash_attn_interface, "attention", lambda *args, **kwargs: seen.extend(args) or hw.attention(*args, **kwargs)
    )
    qkv_together = normal(2, 9, 3, 4, 8)
    out = flash_attn.flash_attn_qkvpacked_func(qkv_together, causal=True)
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in qkv_together.unbind(2)]
    assert [x.shape for x in seen] == [(2, 4, 9, 8)] * 3
    assert out.is_contiguous()


def test_dropout_drops_what_the_probabilities_say():
    for queries, keys in ((6, 6), (5, 9)):
        q, k, v = qkv(queries, keys, key_heads=4)
        flags = {"causal": True, "softcap": 2.0}
        out, lse, signed = flash_attn.flash_attn_func(q, k, v, 0.4, return_attn_probs=True, **flags)
        _, wanted_lse, probs = written_out(q, k, v, **flags)
        same(lse, wanted_lse)
        largest = probs.amax(-1, keepdim=True)
        same(signed.abs(), (probs / largest).nan_to_num())
        kept = torch.where(signed < 0, 0.0, signed * largest) / 0.6
        assert {-1, 1} <= set(signed.sign().unique().tolist())
        same(out, torch.einsum("bhij,bjhd->bihd", kept, v), (v,))


@pytest.mark.parametrize("causal", [False, True])
def test_signed_probabilities_of_packed_batches_and_of_alibi(causal):
    """The entries that a packed call drops, and one with ALiBi, are those that its signs show."""
    of_q, of_k = LENGTHS[1]
    cu_q, cu_k = cumulated(of_q), cumulated(of_k)
    q, k, v = normal(sum(of_q), 4, 8), normal(sum(of_k), 2, 8, seed=1), normal(sum(of_k), 2, 8, seed=2)
    for alibi in (None, slopes(4, 4)):
        out, lse, signed = flash_attn.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max(of_q), max(of_k), 0.4, causal=causal, alibi_slopes=alibi, return_attn_probs=True
        )
        assert signed.shape == (4, 4, max(of_q), max(of_k))
        for b, (queries, keys) in enumerate(zip(of_q, of_k, strict=True)):
            rows, columns = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            _, wanted_lse, probs = written_out(
                q[None, rows],
                k[None, columns],
                v[None, columns],
                causal=causal,
                alibi=None if alibi is None else alibi[b],
            )
            same(lse[:, rows], wanted_lse[0])
            largest = probs.amax(-1, keepdim=True)
            of_b = signed[b, None, :, :queries, :keys]
            same(of_b.abs(), (probs / largest).nan_to_num())
            kept = torch.where(of_b < 0, 0.0, of_b * largest) / 0.6
            same(out[rows], torch.einsum("bhij,bjhd->bihd", kept, v[None, columns].repeat_interleave(2, 2))[0])


def test_windows_may_be_elements_of_a_tensor():
    q, k, v = qkv(7, 7)
    window = torch.tensor([2, 1])
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=window),
                       flash_attn.flash_attn_func(q, k, v, window_size=(2, 1)))  # fmt: skip


def test_dropout_with_alibi_drops_in_both_halves_and_keeps_the_mean():
    q, k, v = qkv(1, 40, key_heads=4, batch=1)
    wanted = written_out(q, k, v, alibi=slopes(4))[0]
    torch.manual_seed(0)
    draws = torch.stack([flash_attn.flash_attn_func(q, k, v, 0.3, alibi_slopes=slopes(4)) for _ in range(100)])
    assert (draws.std(0) > 0).all()
    assert (draws.mean(0) - wanted).abs().max() < 4 * (draws.std(0) / math.sqrt(100)).max()


# ---------------------------------------------------------------------------------------------------------- packed

LENGTHS = [([5, 0, 9, 1], [5, 0, 9, 1]), ([3, 4, 1, 6], [9, 2, 5, 6])]


def cumulated(lengths):
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize(("of_q", "of_k"), LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alibi", [None, (4,), (4, 4)], ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_varlen(of_q, of_k, causal, alibi, paged):
    alibi = alibi and slopes(*alibi)
    for window in WINDOWS:
        # Three rows more than the sequences have.
        q = normal(sum(of_q) + 3, 4, 8, grad=True)
        k, v = (normal(sum(of_k), 2, 8, grad=True, seed=seed) for seed in (1, 2))
        cu_q, cu_k = cumulated(of_q), cumulated(of_k)
        given, table = (k, v), None
        if paged:
            given, table = pages_of(k, v, cu_k, size=4)
        got, lse, _ = flash_attn.flash_attn_varlen_func(
            q, *given, cu_q, cu_k, max(of_q), max(of_k), causal=causal, window_size=window, alibi_slopes=alibi,
            return_attn_probs=True, block_table=table,
        )  # fmt: skip
        outs, lses = [], []
        for b in range(len(of_q)):
            rows, columns = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            of_b = alibi[b] if alibi is not None and alibi.dim() == 2 else alibi
            one = written_out(
                q[None, rows], k[None, columns], v[None, columns], causal=causal, window=window, alibi=of_b
            )
            outs.append(one[0][0])
            lses.append(one[1][0])
        outs.append(torch.zeros(3, 4, 8, dtype=torch.float64))
        lses.append(torch.full((4, 3), -torch.inf, dtype=torch.float64))
        torch.testing.assert_close(lse, torch.cat(lses, 1), rtol=1e-9, atol=1e-9)
        same(got, torch.cat(outs), (q, k, v))


def pages_of(k, v, cu_k, size):
    """The same keys in scattered pages: ((k, v), block_table); pages that are not used hold NaN."""
    lengths = _packed.lengths(cu_k).tolist()
    needed = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32)
    places = []
    for b, count in enumerate(needed):
        own = [order.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(own, dtype=torch.int32)
        places += [own[s // size] * size + s % size for s in range(lengths[b])]
    stored = []
    for x in (k, v):
        empty = torch.full((len(needed) and (sum(needed) + 2) * size, *x.shape[1:]), torch.nan, dtype=x.dtype)
        stored.append(empty.index_copy(0, torch.tensor(places), x).unflatten(0, (-1, size)))
    return stored, table


def test_varlen_packed_tensors_and_tensor_lengths():
    cu = cumulated([5, 3])
    together = normal(8, 3, 4, 8, grad=True)
    wanted = flash_attn.flash_attn_varlen_func(*together.unbind(1), cu, cu, 5, 5, causal=True)
    same(flash_attn.flash_attn_varlen_qkvpacked_func(together, cu, torch.tensor(5), causal=True), wanted, (together,))
    q, kv = normal(8, 4, 8, grad=True), normal(8, 2, 2, 8, grad=True)
    wanted = flash_attn.flash_attn_varlen_func(q, *kv.unbind(1), cu, cu, 5, 5, softcap=3.0)
    same(flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 5, 5, softcap=3.0), wanted, (q, kv))


def test_varlen_dropout():
    cu = cumulated([5, 3])
    q, k, v = normal(8, 4, 8), normal(8, 2, 8), normal(8, 2, 8)
    torch.manual_seed(1)
    got = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, 0.3)
    torch.manual_seed(1)
    assert torch.equal(got, hw.attention_varlen(q, k, v, cu, cu, 5, 5, dropout=0.3, deterministic=False))


# ---------------------------------------------------------------------------------------------------------- padding


def test_unpad_and_pad():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    x = normal(3, 4, 2, 5, grad=True)
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    assert (indices.tolist(), cu.tolist(), longest, used.tolist()) == ([0, 1, 4, 5, 6, 7], [0, 2, 6, 6], 4, [2, 4, 0])
    assert cu.dtype == used.dtype == torch.int32
    back = bert_padding.pad_input(tokens.clone(), indices, 3, 4)
    assert torch.equal(back, x * mask[:, :, None, None])
    same(back, x * mask[:, :, None, None], (x,))
    same(bert_padding.index_first_axis(x.flatten(0, 1), indices), x[mask.bool()], (x,))
    same(bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)[0], tokens)
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    _, indices, cu, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert (indices.tolist(), cu.tolist(), longest) == ([0, 1, 2, 4, 5, 6, 7, 8], [0, 3, 7, 8], 4)
    assert used.tolist() == [2, 4, 0]
    tokens, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(
        x, torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0], [1, 1, 1, 0]])
    )
    assert (indices.tolist(), cu.tolist(), longest) == ([0, 1, 2, 4, 5, 6, 7, 8, 9, 10], [0, 2, 3, 7, 8, 9, 10], 4)


# ---------------------------------------------------------------------------------------------------------- rotary


def angles(length=64, pairs=3):
    angle = torch.outer(torch.arange(length, dtype=torch.float64), torch.logspace(0, -2, pairs, dtype=torch.float64))
    return angle.cos(), angle.sin()


def rotated(x, positions, interleaved, pairs=3):
    """x (B, S, H, D) by complex numbers; positions (B, S)."""
    cos, sin = angles(pairs=pairs)
    turn = torch.complex(cos, sin)[positions][:, :, None]  # (B, S, 1, R)
    head, tail = x[..., : 2 * pairs], x[..., 2 * pairs :]
    parts = head.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else head.chunk(2, -1)
    turned = torch.complex(*parts) * turn
    head = torch.stack((turned.real, turned.imag), -1 if interleaved else -2).flatten(-2)
    return torch.cat((head, tail), -1)


# ---------------------------------------------------------------------------------------------------------- caches

CACHES = ["contiguous", "chosen entries", "paged"]
CACHE_CALLS = [
    (queries, new, extra)
    for queries, new in ((1, 0), (1, 1), (3, 3), (20, 20), (3, 5), (4, 0))
    for extra in ("none", "window", "rotary", "rotary window", "leftpad", "alibi", "softcap")
    if new or "rotary" not in extra  # what is rotated are new keys
]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "new", "extra"), CACHE_CALLS)
def test_kvcache(kind, causal, queries, new, extra):
    batch, capacity, size = 3, 48, 8
    lengths = torch.tensor([22, 7, 26], dtype=torch.int32)
    if not new and extra != "leftpad":
        lengths[1] = queries  # no more than the queries
    window = (9, 2) if "window" in extra else (-1, -1)
    flags = {"causal": causal, "window_size": window, "softcap": 2.0 if extra == "softcap" else 0.0}
    q = normal(batch, queries, 4, 8, seed=1)
    k, v = (normal(batch, new, 2, 8, seed=seed) if new else None for seed in (2, 3))
    filled = [normal(batch, capacity, 2, 8, seed=seed) for seed in (4, 5)]  # each sequence's own
    caches, options = stored(kind, filled, lengths, new, size)
    before = [cache.clone() for cache in caches]
    if "rotary" in extra:
        options |= dict(zip(("rotary_cos", "rotary_sin"), angles(), strict=True))
        options["rotary_interleaved"] = causal
    if extra == "leftpad":
        options["cache_leftpad"] = torch.tensor([3, 0, 8], dtype=torch.int32)
    if extra == "alibi":
        options["alibi_slopes"] = slopes(batch, 4)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, return_softmax_lse=True, **flags, **options
    )
    assert out.is_contiguous()

    if "rotary" in extra:
        at = lengths[:, None] + torch.arange(queries) * (causal or extra == "rotary window")
        q = rotated(q, at.expand(batch, queries), causal)
        k = rotated(k, lengths[:, None] + torch.arange(new), causal)
    for b in range(batch):
        n = int(lengths[b])
        mine = [cache[b : b + 1, :n] for cache in filled]
        if new:
            mine = [torch.cat((x, y[b : b + 1]), 1) for x, y in zip(mine, (k, v), strict=True)]
        found = [entry(kind, cache, options, b)[: n + new] for cache in caches]
        for x, y in zip(found, mine, strict=True):  # the cache has them
            same(x, y[0])
        wanted, wanted_lse, _ = written_out(
            q[b : b + 1], *mine, causal=causal, window=window, softcap=flags["softcap"],
            alibi=options["alibi_slopes"][b] if extra == "alibi" else None,
            start=int(options["cache_leftpad"][b]) if extra == "leftpad" else 0,
        )  # fmt: skip
        same(out[b : b + 1], wanted)
        same(lse[b : b + 1], wanted_lse)
    # Nothing else was written.
    changed = sum(int((x != y).any(-1).any(-1).sum()) for x, y in zip(caches, before, strict=True))
    assert changed == 2 * batch * new


def stored(kind, filled, lengths, new, size):
    """Caches (batch, capacity, 2, 8) as ``kind`` has them, and the arguments that say where they are."""
    batch, capacity = filled[0].shape[:2]
    if kind == "contiguous":
        return [x.clone() for x in filled], {}
    if kind == "chosen entries":
        index = torch.tensor([4, 0, 2], dtype=torch.int32)
        return [normal(5, capacity, 2, 8, seed=8).index_copy(0, index.long(), x) for x in filled], {
            "cache_batch_idx": index
        }
    each = capacity // size
    order = torch.randperm(batch * each + 2, generator=torch.Generator().manual_seed(1))[: batch * each]
    table = order.reshape(batch, each).int()
    pool = normal(batch * each + 2, size, 2, 8, seed=8)
    caches = [pool.index_copy(0, order, x.unflatten(1, (each, size)).flatten(0, 1)) for x in filled]
    for b in range(batch):  # pages past the end are not there
        table[b, -(-(int(lengths[b]) + new) // size) :] = -1
    return caches, {"block_table": table}


def entry(kind, cache, options, b):
    if kind == "contiguous":
        return cache[b]
    if kind == "chosen entries":
        return cache[options["cache_batch_idx"][b]]
    return cache[options["block_table"][b].long()].flatten(0, 1)


def test_kvcache_lengths_that_are_a_number_or_none():
    q, cache = normal(2, 1, 4, 8), [normal(2, 16, 2, 8, seed=seed) for seed in (1, 2)]
    same(flash_attn.flash_attn_with_kvcache(q, *cache), written_out(q, *cache)[0])
    wanted = written_out(q, *(x[:, :9] for x in cache), causal=True)[0]
    same(flash_attn.flash_attn_with_kvcache(q, *cache, cache_seqlens=9, causal=True, num_splits=3), wanted)
    more = [torch.cat((x, x)) for x in cache]  # a cache for more sequences than there are
    same(flash_attn.flash_attn_with_kvcache(q, *more, cache_seqlens=9), wanted)
    new = [normal(2, 1, 2, 8, seed=seed) for seed in (3, 4)]
    flash_attn.flash_attn_with_kvcache(q, *cache, *new, cache_seqlens=9)
    assert all(torch.equal(x[:, 9:10], y) for x, y in zip(cache, new, strict=True))
    with pytest.raises((IndexError, RuntimeError)):
        flash_attn.flash_attn_with_kvcache(q, *cache, *new, cache_seqlens=16)


BAD_CACHE_CALLS = {
    "v is missing": {"k": 1},
    "cache_seqlens": {"k": 1, "v": 1},
    "rotary_sin is missing": {"rotary_cos": 1},
    "without k and v": {"rotary_cos": 1, "rotary_sin": 1},
    "cache_batch_idx": {"cache_batch_idx": 1, "block_table": 1},
}


@pytest.mark.parametrize("named", BAD_CACHE_CALLS)
def test_kvcache_says_what_is_missing(named):
    given = {name: torch.zeros(2, 1, 2, 8) for name in BAD_CACHE_CALLS[named]}
    with pytest.raises((ValueError, NotImplementedError), match=named):
        flash_attn.flash_attn_with_kvcache(normal(2, 1, 4, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8), **given)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"flash_attn_func.*\(B, S, H, D\)"):
        flash_attn.flash_attn_func(normal(5, 4, 8), normal(5, 4, 8), normal(5, 4, 8))
    with pytest.raises(ValueError, match=r"qkv.*\(B, S, 3, H, D\)"):
        flash_attn.flash_attn_qkvpacked_func(normal(2, 5, 2, 4, 8))
    with pytest.raises(ValueError, match=r"kv.*\(Tk, 2, Hk, D\)"):
        flash_attn.flash_attn_varlen_kvpacked_func(normal(5, 4, 8), normal(5, 3, 4, 8), None, None, 5, 5)
    with pytest.raises(ValueError, match="alibi_slopes"):
        flash_attn.flash_attn_func(*qkv(5, 5), alibi_slopes=slopes(3))


# ------------------------------------------------------------------------------------------------------ the package

# Names and defaults of release 2.8, in order.
SIGNATURES = {
    "flash_attn_func": "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_kvpacked_func": "q kv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False block_table=None",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen dropout_p=0.0 softmax_scale=None causal=False "
    "window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) "
    "softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    texts = [p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(" ", "") for p in parameters]
    assert texts == SIGNATURES[name].split()


def test_install_and_uninstall():
    assert "flash_attn" not in sys.modules
    theirs = sys.modules["flash_attn.something"] = type(sys)("flash_attn.something")
    try:
        flash_attn.install()
        flash_attn.install()
        import flash_attn as imported
        from flash_attn.bert_padding import unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_func
        from flash_attn.layers.rotary import RotaryEmbedding, rotate_half
        from flash_attn.layers.rotary import apply_rotary_emb as rotary
        from flash_attn.ops.triton.rotary import apply_rotary

        assert imported.flash_attn_func is flash_attn.flash_attn_func
        assert (unpad_input, rotary) == (bert_padding.unpad_input, apply_rotary_emb)
        assert all(x.__module__.startswith("headwise.") for x in (RotaryEmbedding, rotate_half, apply_rotary))
        assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
        assert importlib.util.find_spec("flash_attn") is not None
        for name in ("flash_attn", "flash-attn"):
            assert importlib.metadata.version(name) == imported.__version__
        assert "flash_attn" in importlib.metadata.packages_distributions()
        with pytest.raises(ModuleNotFoundError, match="flash_attn"):
            importlib.import_module("flash_attn.ops.rms_norm")
    finally:
        flash_attn.uninstall()
        flash_attn.uninstall()
    assert sys.modules.pop("flash_attn.something") is theirs
    assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


def test_compiled():
    def function(q, k, v, alibi):
        return flash_attn.flash_attn_func(q, k, v, window_size=(3, 2), alibi_slopes=alibi)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for alibi in (None, slopes(4)):
        q, k, v = qkv(6, 9)
        same(compiled(q, k, v, alibi), function(q, k, v, alibi), (q, k, v))


@pytest.mark.parametrize("backend", [name for name in RUNNABLE if name != "cpu"])
def test_on_other_backends(backend):
    """Views, lengths and a bias over keys are what their kernels see."""
    inputs = [x.detach().to(DEVICE[backend], torch.float32).requires_grad_() for x in qkv(6, 9)]
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    alibi = slopes(2, 4)
    with hw.use_backend(backend):
        for window in ((-1, -1), (3, 2), (2, 0)):
            options = {"window_size": window, "alibi_slopes": alibi.to(DEVICE[backend]), "return_attn_probs": True}
            got, lse, _ = flash_attn.flash_attn_func(*inputs, **options)
            wanted, wanted_lse, _ = written_out(*exact, window=window, alibi=alibi)
            near = {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(got.cpu().double(), wanted, **near)
            torch.testing.assert_close(lse.cpu().double(), wanted_lse, **near)
            grad = normal(*wanted.shape, seed=9)
            mine = torch.autograd.grad(got, inputs, grad.to(got.device, torch.float32))
            for dx, theirs in zip(mine, torch.autograd.grad(wanted, exact, grad), strict=True):
                torch.testing.assert_close(dx.cpu().double(), theirs, **near)


@pytest.mark.parametrize("backend", [name for name in RUNNABLE if name != "cpu"])
@pytest.mark.parametrize("kind", CACHES)
def test_caches_on_other_backends(backend, kind):
    lengths, batch = torch.tensor([22, 7, 26], dtype=torch.int32), 3
    filled = [normal(batch, 48, 2, 8, seed=seed) for seed in (4, 5)]
    caches, options = stored(kind, filled, lengths, 1, size=8)
    q, k, v = (normal(batch, 1, heads, 8, seed=seed) for heads, seed in ((4, 1), (2, 2), (2, 3)))
    place = {"device": DEVICE[backend], "dtype": torch.float32}
    options = {name: x.to(DEVICE[backend]) for name, x in options.items()}
    with hw.use_backend(backend):
        out = flash_attn.flash_attn_with_kvcache(
            q.to(**place), *(cache.to(**place) for cache in caches), k.to(**place), v.to(**place),
            cache_seqlens=lengths.to(DEVICE[backend]), causal=True, **options,
        )  # fmt: skip
    for b in range(batch):
        mine = [torch.cat((x[b : b + 1, : lengths[b]], y[b : b + 1]), 1) for x, y in zip(filled, (k, v), strict=True)]
        wanted = written_out(q[b : b + 1], *mine, causal=True)[0]
        torch.testing.assert_close(out[b : b + 1].cpu().double(), wanted, rtol=1e-5, atol=1e-5)


def test_appending_writes_nowhere_else():
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 8)
    q, new = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
    table = torch.tensor([[0, -1]], dtype=torch.int32)
    with pytest.raises(IndexError):  # the second page is not there
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=4, block_table=table)
    with pytest.raises(IndexError):
        flash_attn.flash_attn_with_kvcache(q, k_cache[:1], v_cache[:1], new, new, cache_seqlens=-1)
    with pytest.raises(ValueError, match=r"k has shape \(1, 1, 1, 8\); it needs \(1, Snew, 2, 8\)"):
        flash_attn.flash_attn_with_kvcache(q, k_cache[:1], v_cache[:1], new[:, :, :1], new[:, :, :1], cache_seqlens=0)
    assert not k_cache.any()
    assert not v_cache.any()

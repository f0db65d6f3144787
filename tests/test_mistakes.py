"""Mistakes that other kernel libraries shipped, each one a named test on every backend: what a call means.

What is expected comes from `direct_attention` or from a line of algebra in the test, never from `headwise.reference`.
The mistakes of arithmetic and memory are in `test_mistakes_in_kernels`.
"""

from __future__ import annotations

import math

import direct_attention as direct
import pytest
import torch
from attention_calls import ints, maker, on_every_backend, ours, packed_call, theirs
from backends_under_test import RUNNABLE

import headwise as hw

INF = math.inf


def reveal(S: int, Sq: int, backend: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs whose output shows the probabilities themselves: the values are the identity."""
    m = maker(backend, seed=seed)
    eye = torch.eye(S, device=m.device)[None, None].repeat(1, 2, 1, 1)
    return {"q": m.normal(1, 4, Sq, 16), "k": m.normal(1, 2, S, 16), "v": eye}


# A flash backward that normalises each key tile by itself: right at 64 tokens, ten times off at 2048.


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("S", [64, 512, 2048])
@on_every_backend
def test_backward_normalises_over_all_keys(backend, S, causal):
    m = maker(backend)
    x = {"q": m.normal(1, 2, S, 24), "k": m.normal(1, 1, S, 24), "v": m.normal(1, 1, S, 24)}
    direct.assert_within_budget(ours(backend, causal=causal), theirs(causal=causal), x)


@pytest.mark.parametrize("S", [64, 512, 2048])
@on_every_backend
def test_explicit_backward_normalises_over_all_keys(backend, S):
    m = maker(backend)
    x = {"q": m.normal(1, 2, S, 24), "k": m.normal(1, 1, S, 24), "v": m.normal(1, 1, S, 24)}
    grads = (m.normal(1, 2, S, 24), m.normal(1, 2, S))
    out, lse = hw.attention(**x, return_lse=True, backend=backend)
    found = hw.attention_backward(grads[0], *x.values(), out, lse, grad_lse=grads[1], backend=backend)
    truth = direct.results_of(theirs(), x, grads, torch.float64)
    plain = direct.results_of(theirs(), x, grads)
    direct.assert_all_ok({f"grad of {n}": g for n, g in zip(x, found, strict=True)}, truth, plain)


# A window one key too wide; a window of 0 that means "all" in one place and "self" in another.

WINDOWS = [(0, 0), (1, 0), (0, 1), (63, 0), (64, 0), (31, 32), (5, None), (-1, 7), (None, 0), (100, 100), (0, -1)]


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@on_every_backend
def test_window_sees_exactly_its_keys(backend, window, causal):
    S, Sq = 200, 150
    expected = direct.visible_keys(Sq, S, causal=causal, window=window)
    x = reveal(S, Sq, backend)
    out = hw.attention(**x, causal=causal, window=window, backend=backend)
    assert torch.equal(out.cpu() != 0, expected.expand(1, 4, Sq, S))
    probs = hw.attention_probs(x["q"], x["k"], causal=causal, window=window, backend=backend)
    assert torch.equal(probs.cpu() != 0, expected.expand(1, 4, Sq, S))


@on_every_backend
def test_window_of_w_tokens_including_self_counts_w(backend):
    out = hw.attention(**reveal(100, 100, backend), window=(8 - 1, 0), backend=backend)
    seen = (out != 0).sum(-1)[0, 0].tolist()
    assert seen == [min(i + 1, 8) for i in range(100)]


@on_every_backend
def test_window_zero_means_self_in_every_op(backend):
    m = maker(backend)
    q, k, v = m.normal(2, 4, 70, 16), m.normal(2, 2, 70, 16), m.normal(2, 2, 70, 8)
    itself = v.repeat_interleave(2, dim=1)
    out, lse = hw.attention(q, k, v, window=(0, 0), return_lse=True, backend=backend)
    torch.testing.assert_close(out, itself, rtol=1e-6, atol=0)
    own_logit = (q * k.repeat_interleave(2, dim=1)).sum(-1).double() / 4
    torch.testing.assert_close(lse.double(), own_logit, rtol=1e-5, atol=1e-5)
    packed = packed_call(backend, [0, 30, 70], [0, 30, 70], window=(0, 0))
    out, _ = packed(*(x[0].transpose(0, 1) for x in (q, k, v)))
    torch.testing.assert_close(out, itself[0].transpose(0, 1), rtol=1e-6, atol=0)
    out = hw.attention_decode(q[:, :, 0], k, v, ints(backend, 70, 13), window=(0, 0), backend=backend)
    torch.testing.assert_close(out, torch.stack([itself[0, :, 69], itself[1, :, 12]]), rtol=1e-6, atol=0)
    probs = hw.attention_probs(q, k, window=(0, 0), backend=backend)
    assert torch.equal(probs, torch.eye(70, device=q.device).expand_as(probs))


@pytest.mark.parametrize("window", [(-1, -1), (None, None), (-1, None), (None, -1)], ids=str)
@on_every_backend
def test_unbounded_window_is_no_window(backend, window):
    x = reveal(100, 90, backend)
    full = hw.attention(**x, backend=backend)
    assert (full != 0).all()
    assert torch.equal(hw.attention(**x, window=window, backend=backend), full)


# Causal from the top-left corner, so that a decoded token sees only key 0.


@pytest.mark.parametrize("Sq", [1, 3, 64, 65])
@on_every_backend
def test_causal_aligns_at_the_bottom_right(backend, Sq):
    S = 130
    out = hw.attention(**reveal(S, Sq, backend), causal=True, backend=backend)
    seen = (out != 0).sum(-1)[0, 0].tolist()
    assert seen == [S - Sq + i + 1 for i in range(Sq)]


@on_every_backend
def test_one_decoded_token_sees_the_whole_cache(backend):
    x = reveal(130, 1, backend)
    expected = direct.attention(**{n: t.double() for n, t in x.items()})[0].float()
    for out in (
        hw.attention(**x, causal=True, backend=backend),
        hw.attention_decode(x["q"], x["k"], x["v"], ints(backend, 130), backend=backend),
        hw.attention_decode(x["q"][:, :, 0], x["k"], x["v"], ints(backend, 130), backend=backend)[:, :, None],
    ):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=0)
    packed = packed_call(backend, [0, 1], [0, 130], causal=True)
    out, _ = packed(*(t[0].transpose(0, 1) for t in x.values()))
    torch.testing.assert_close(out.transpose(0, 1)[None], expected, rtol=1e-5, atol=0)


@on_every_backend
def test_kv_lengths_move_the_causal_corner(backend):
    x = {n: t.repeat(3, 1, 1, 1) for n, t in reveal(100, 7, backend).items()}
    out = hw.attention(**x, causal=True, kv_lengths=ints(backend, 100, 40, 4), backend=backend)
    seen = (out != 0).sum(-1)[:, 0].tolist()
    assert seen == [[94 + i for i in range(7)], [34 + i for i in range(7)], [max(0, i - 2) for i in range(7)]]


# A "float mask" thresholded at 0.5.


@on_every_backend
def test_float_bias_is_added_not_thresholded(backend):
    x = reveal(80, 80, backend)
    x["q"] = torch.zeros_like(x["q"])
    weights = torch.rand(80, 80, generator=torch.Generator().manual_seed(0)).to(x["q"].device) + 0.01
    out = hw.attention(**x, bias=weights.log(), backend=backend)
    expected = (weights.double() / weights.double().sum(-1, keepdim=True)).float()
    torch.testing.assert_close(out, expected.expand_as(out), rtol=2e-5, atol=0)


@on_every_backend
def test_float_mask_is_refused(backend):
    x = reveal(80, 80, backend)
    with pytest.raises(TypeError, match="mask"):
        hw.attention(**x, mask=torch.rand(80, 80, device=x["q"].device), backend=backend)


# A fully masked row returning mean(V).


def calls_with_empty_rows(backend: str):
    m = maker(backend)
    mask = m.coin(2, 1, 70, 90, chance=0.3)
    mask[0, :, 5:9] = False
    mask[1, :, 64:] = False
    yield "mask", {"mask": mask}, 90
    yield "all masked", {"mask": torch.zeros(1, 1, 70, 90, dtype=torch.bool, device=m.device)}, 90
    yield "kv_lengths 0", {"kv_lengths": ints(backend, 0, 90)}, 90
    yield "kv_lengths, causal", {"kv_lengths": ints(backend, 33, 69), "causal": True}, 90
    yield "more queries than keys", {"causal": True}, 30
    yield "window beside the keys", {"window": (3, 3)}, 30
    yield "no keys", {}, 0
    yield "bias of -inf", {"bias": torch.where(mask, 0.5, -INF)}, 90


EMPTY_ROWS = [name for name, *_ in calls_with_empty_rows(RUNNABLE[0])]


@pytest.mark.parametrize("name", EMPTY_ROWS)
@on_every_backend
def test_row_that_sees_nothing_is_zero(backend, name):
    flags, Sk = {n: (f, s) for n, f, s in calls_with_empty_rows(backend)}[name]
    m = maker(backend)
    x = {"q": m.normal(2, 4, 70, 16), "k": m.normal(2, 2, Sk, 16), "v": m.normal(2, 2, Sk, 24) + 3}
    results = direct.assert_within_budget(ours(backend, **flags), theirs(**flags), x)
    empty = direct.attention(**{n: t.double() for n, t in x.items()}, **flags)[1] == -INF
    assert empty.any(), "this case has no empty row"
    assert (results["0"][empty] == 0).all()
    assert (results["1"][empty] == -INF).all()
    assert (results["grad of q"][empty] == 0).all()


@on_every_backend
def test_probs_of_an_empty_row_are_zero(backend):
    m = maker(backend)
    q, k = m.normal(2, 4, 70, 16), m.normal(2, 2, 30, 16)
    probs = hw.attention_probs(q, k, causal=True, backend=backend)
    assert (probs[:, :, :40] == 0).all()
    torch.testing.assert_close(probs[:, :, 40:].sum(-1), torch.ones(2, 4, 30, device=q.device), rtol=1e-5, atol=0)


@on_every_backend
def test_softmax_of_an_empty_row_is_zero(backend):
    x = maker(backend).normal(5, 300)
    x[2] = -INF
    probs = hw.softmax(x, backend=backend)
    assert (probs[2] == 0).all()
    torch.testing.assert_close(probs.sum(-1).tolist(), [1.0, 1.0, 0.0, 1.0, 1.0], rtol=1e-5, atol=0)


# The LSE of an empty set written as a finite number, then merged.


@on_every_backend
def test_empty_part_weighs_nothing_in_a_merge(backend):
    m = maker(backend)
    q, k, v = m.normal(2, 4, 20, 16), m.normal(2, 2, 90, 16), m.normal(2, 2, 90, 16)
    part = {"return_lse": True, "backend": backend}
    full = hw.attention(q, k, v, **part)
    nothing = hw.attention(q, k, v, kv_lengths=ints(backend, 0, 0), **part)
    no_keys = hw.attention(q, k[:, :, :0], v[:, :, :0], **part)
    for parts in ([full, nothing], [nothing, full], [no_keys, full, nothing]):
        out, lse = hw.merge_attention([o for o, _ in parts], [s for _, s in parts], backend=backend)
        torch.testing.assert_close(out, full[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(lse, full[1], rtol=1e-6, atol=0)
    out, lse = hw.merge_attention([nothing[0], no_keys[0]], [nothing[1], no_keys[1]], backend=backend)
    assert (out == 0).all()
    assert (lse == -INF).all()


@on_every_backend
def test_rows_empty_in_one_part_only_merge_right(backend):
    m = maker(backend)
    x = {"q": m.normal(1, 4, 60, 16), "k": m.normal(1, 2, 60, 16), "v": m.normal(1, 2, 60, 16)}
    mask = direct.visible_keys(60, 60, causal=True).to(m.device)

    def merged(q, k, v):
        parts = [
            hw.attention(q, k[:, :, a:b], v[:, :, a:b], mask=mask[:, a:b], return_lse=True, backend=backend)
            for a, b in ((0, 17), (17, 18), (18, 18), (18, 60))
        ]
        return hw.merge_attention([o for o, _ in parts], [s for _, s in parts], backend=backend)

    # Its gradients pass through empty rows too: none may turn into NaN.
    direct.assert_within_budget(merged, theirs(causal=True), x)


@on_every_backend
def test_merge_of_all_empty_parts_has_zero_gradients(backend):
    m = maker(backend)
    outs = [torch.zeros(1, 2, 5, 8, device=m.device, requires_grad=True) for _ in range(2)]
    lses = [torch.full((1, 2, 5), -INF, device=m.device, requires_grad=True) for _ in range(2)]
    out, lse = hw.merge_attention(outs, lses, backend=backend)
    grads = torch.autograd.grad([out, lse], [*outs, *lses], [m.normal(1, 2, 5, 8), m.normal(1, 2, 5)])
    assert all((g == 0).all() for g in grads)


# Tokens past the last sequence attending to sequence 0.


@on_every_backend
def test_tokens_past_the_last_sequence_see_nothing(backend):
    m = maker(backend)
    cu_q, cu_k = [0, 40, 75], [0, 50, 97]
    x = {"q": m.normal(90, 4, 16), "k": m.normal(110, 2, 16), "v": m.normal(110, 2, 8)}
    call = packed_call(backend, cu_q, cu_k)
    results = direct.assert_within_budget(call, lambda q, k, v: direct.varlen(q, k, v, cu_q, cu_k), x)
    assert (results["0"][75:] == 0).all()
    assert (results["1"][:, 75:] == -INF).all()
    for name, end in (("q", 75), ("k", 97), ("v", 97)):
        assert (results[f"grad of {name}"][end:] == 0).all()
        x[name][end:] = math.nan
    poisoned = direct.results_of(call, x, tuple(torch.ones_like(results[n]) for n in "01"))
    assert torch.equal(poisoned["0"], results["0"])
    assert torch.equal(poisoned["1"], results["1"])
    assert all(t.isfinite().all() for n, t in poisoned.items() if n != "1")


# NaN in unused cache leaking as 0·NaN.


def poison(*tensors: torch.Tensor, where: tuple) -> None:
    for i, t in enumerate(tensors):
        t[where] = (math.nan, INF)[i % 2]


@pytest.mark.parametrize("bad", [math.nan, INF, -INF], ids=str)
@on_every_backend
def test_keys_past_kv_lengths_never_leak(backend, bad):
    m = maker(backend)
    x = {"q": m.normal(3, 4, 70, 16), "k": m.normal(3, 2, 150, 16), "v": m.normal(3, 2, 150, 8)}
    lengths = ints(backend, 150, 65, 0)
    for name in ("k", "v"):
        x[name][1, :, 65:] = bad
        x[name][2] = bad
    for causal in (False, True):
        flags = {"kv_lengths": lengths, "causal": causal}
        results = direct.assert_within_budget(ours(backend, **flags), theirs(**flags), x)
        assert (results["grad of k"][1, :, 65:] == 0).all()
        assert (results["grad of v"][2] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, INF], ids=str)
@on_every_backend
def test_keys_before_every_window_never_leak(backend, bad):
    m = maker(backend)
    x = {"q": m.normal(1, 4, 20, 16), "k": m.normal(1, 2, 200, 16), "v": m.normal(1, 2, 200, 8)}
    for name in ("k", "v"):
        x[name][:, :, : 180 - 9] = bad
    results = direct.assert_within_budget(ours(backend, window=(9, 0)), theirs(window=(9, 0)), x)
    assert (results["grad of v"][:, :, : 180 - 9] == 0).all()


@on_every_backend
def test_keys_that_the_mask_hides_from_all_never_leak(backend):
    m = maker(backend)
    x = {"q": m.normal(1, 4, 70, 16), "k": m.normal(1, 2, 150, 16), "v": m.normal(1, 2, 150, 8)}
    mask = m.coin(1, 1, 70, 150, chance=0.6)
    hidden = torch.arange(150, device=m.device) % 7 == 3
    mask[..., hidden] = False
    x["k"][:, :, hidden] = math.nan
    x["v"][:, :, hidden] = math.nan
    direct.assert_within_budget(ours(backend, mask=mask), theirs(mask=mask), x)


@pytest.mark.parametrize("Sq", [None, 3], ids=["one token", "three tokens"])
@on_every_backend
def test_unused_cache_never_leaks(backend, Sq):
    m = maker(backend)
    q = m.normal(4, 4, 16) if Sq is None else m.normal(4, 4, Sq, 16)
    k, v = m.normal(4, 2, 200, 16), m.normal(4, 2, 200, 8)
    lengths = [200, 129, 5, 0]
    for b, length in enumerate(lengths):
        poison(k, v, where=(b, slice(None), slice(length, None)))
    direct.assert_within_budget(
        lambda q: hw.attention_decode(q, k, v, ints(backend, *lengths), return_lse=True, backend=backend),
        lambda q: direct.decode(q, k.to(q.dtype), v.to(q.dtype), lengths),
        {"q": q},
        backward=False,
    )


@on_every_backend
def test_unused_pages_never_leak(backend):
    m = maker(backend)
    page_size, lengths = 16, [100, 33, 16, 0]
    k, v = m.normal(40, 2, page_size, 16), m.normal(40, 2, page_size, 8)
    table = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:28].view(4, 7).int()
    used = torch.zeros(40, page_size, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for j in range(length):
            used[table[b, j // page_size], j % page_size] = True
    poison(k, v, where=(~used)[:, None].expand(-1, 2, -1).to(m.device))
    table = table.to(m.device)
    direct.assert_within_budget(
        lambda q: hw.attention_decode(
            q, k, v, ints(backend, *lengths), block_table=table, return_lse=True, backend=backend
        ),
        lambda q: direct.decode(q, k.to(q.dtype), v.to(q.dtype), lengths, block_table=table),
        {"q": m.normal(4, 4, 16)},
        backward=False,
    )


@on_every_backend
def test_page_numbers_behind_the_length_are_never_followed(backend):
    m = maker(backend)
    q, k, v = m.normal(2, 4, 16), m.normal(6, 2, 16, 16), m.normal(6, 2, 16, 8)
    good = torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=torch.int32, device=m.device)
    wild = torch.tensor([[3, 1, 2**30], [5, -1, -(2**31)]], dtype=torch.int32, device=m.device)
    lengths = ints(backend, 32, 7)
    expected = hw.attention_decode(q, k, v, lengths, block_table=good, backend=backend)
    assert expected.isfinite().all()
    assert torch.equal(hw.attention_decode(q, k, v, lengths, block_table=wild, backend=backend), expected)


# Dropped trailing heads when Hq % Hk != 0.


@pytest.mark.parametrize(("Hq", "Hk"), [(6, 4), (5, 2), (2, 4), (7, 3)])
@on_every_backend
def test_heads_that_do_not_divide_are_refused(backend, Hq, Hk):
    m = maker(backend)
    with pytest.raises(ValueError, match=rf"\b{Hq}\b.*\b{Hk}\b|\b{Hk}\b.*\b{Hq}\b"):
        hw.attention(m.normal(1, Hq, 8, 16), m.normal(1, Hk, 8, 16), m.normal(1, Hk, 8, 16), backend=backend)


@pytest.mark.parametrize(("Hq", "Hk"), [(6, 1), (6, 2), (6, 3), (6, 6), (10, 2), (9, 3)])
@on_every_backend
def test_every_head_reads_its_own_key_head(backend, Hq, Hk):
    m = maker(backend)
    q, k = m.normal(1, Hq, 70, 16), m.normal(1, Hk, 70, 16)
    # Each key head has a constant of its own as its values: the output names the head it came from.
    v = torch.arange(1.0, Hk + 1, device=m.device)[None, :, None, None].repeat(1, 1, 70, 16)
    expected = [h // (Hq // Hk) + 1.0 for h in range(Hq)]
    named = torch.tensor(expected, device=m.device)[None, :, None, None].expand(1, Hq, 70, 16)
    torch.testing.assert_close(hw.attention(q, k, v, backend=backend), named, rtol=1e-6, atol=0)
    decoded = hw.attention_decode(q[:, :, 0], k, v, ints(backend, 70), backend=backend)
    torch.testing.assert_close(decoded, named[:, :, 0], rtol=1e-6, atol=0)
    x = {"q": q, "k": k, "v": m.normal(1, Hk, 70, 16)}
    direct.assert_within_budget(ours(backend), theirs(), x)


# A zero-length query sequence shifting the gradients of the ones after it.


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        ([0, 50, 50, 140], [0, 50, 120, 230]),
        ([0, 0, 0, 90], [0, 70, 140, 230]),
        ([0, 90, 90], [0, 90, 230]),
        ([0, 70, 140], [0, 0, 230]),
        ([0, 0, 80, 80, 81, 81, 160], [0, 3, 83, 83, 150, 150, 230]),
        ([0, 0, 0], [0, 115, 230]),
    ],
    ids=lambda bounds: "-".join(map(str, bounds)),
)
@on_every_backend
def test_zero_length_sequences_shift_nothing(backend, cu_q, cu_k, causal):
    m = maker(backend)
    x = {"q": m.normal(cu_q[-1], 4, 16), "k": m.normal(cu_k[-1], 2, 16), "v": m.normal(cu_k[-1], 2, 8)}
    direct.assert_within_budget(
        packed_call(backend, cu_q, cu_k, causal=causal),
        lambda q, k, v: direct.varlen(q, k, v, cu_q, cu_k, causal=causal),
        x,
    )


@on_every_backend
def test_zero_length_sequences_shift_nothing_in_the_explicit_backward(backend):
    m = maker(backend)
    cu_q, cu_k = [0, 50, 50, 140], [0, 50, 120, 230]
    x = {"q": m.normal(140, 4, 16), "k": m.normal(230, 2, 16), "v": m.normal(230, 2, 8)}
    grads = (m.normal(140, 4, 8), m.normal(4, 140))
    out, lse = packed_call(backend, cu_q, cu_k)(**x)
    bounds = (ints(backend, *cu_q), ints(backend, *cu_k), 90, 110)
    found = hw.attention_varlen_backward(grads[0], *x.values(), out, lse, *bounds, grad_lse=grads[1], backend=backend)
    truth = direct.results_of(
        lambda **t: direct.varlen(**t, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), x, grads, torch.float64
    )
    plain = direct.results_of(lambda **t: direct.varlen(**t, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), x, grads)
    direct.assert_all_ok({f"grad of {n}": g for n, g in zip(x, found, strict=True)}, truth, plain)

"""The oracle is itself under test: against a second formula, against PyTorch where it has the feature, by gradcheck."""

from __future__ import annotations

import itertools
import math

import direct_attention as direct
import pytest
import torch
import torch.nn.functional as F

from headwise import reference as oracle
from headwise.reference.cross_entropy import cross_entropy
from headwise.reference.embedding import embedding
from headwise.reference.rms_norm import rms_norm
from headwise.reference.softmax import softmax


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def coin(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4


SEVERAL_FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "one-sided window": {"window": (None, 3)},
    "window and causal": {"window": (9, 4), "causal": True},
    "mask": {"mask": coin(2, 1, 23, 31)},
    "mask of keys": {"mask": coin(31)},
    "bias": {"bias": normal(1, 4, 23, 31)},
    "bias of keys": {"bias": normal(2, 1, 1, 31)},
    "bias with -inf": {"bias": torch.where(coin(23, 31), 0.3, -math.inf).double()},
    "kv_lengths": {"kv_lengths": torch.tensor([31, 7])},
    "kv_lengths and causal": {"kv_lengths": torch.tensor([0, 12]), "causal": True},
    "q_lengths": {"q_lengths": torch.tensor([23, 2]), "causal": True},
    "kv_starts": {"kv_starts": torch.tensor([31, 4]), "window": (20, 1)},
    "right-padded batch": {"q_lengths": torch.tensor([3, 0]), "kv_lengths": torch.tensor([3, 0]), "causal": True},
    "scale": {"scale": 1.0},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": normal(4)},
    "sink and empty rows": {"sink": normal(4), "kv_lengths": torch.tensor([0, 12]), "causal": True},
    "everything": {
        "causal": True,
        "window": (12, 0),
        "mask": coin(2, 4, 23, 31) | (torch.arange(31) < 20),
        "bias": normal(2, 4, 23, 31),
        "kv_lengths": torch.tensor([31, 28]),
        "q_lengths": torch.tensor([23, 17]),
        "kv_starts": torch.tensor([0, 9]),
        "scale": 0.7,
        "softcap": 2.0,
        "sink": normal(4),
    },
}


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", SEVERAL_FEATURES)
def test_oracle_agrees_with_the_direct_formula(name):
    flags = dict(SEVERAL_FEATURES[name])
    x = {"q": normal(2, 4, 23, 8), "k": normal(2, 2, 31, 8), "v": normal(2, 2, 31, 6)}
    x.update({n: flags.pop(n) for n in ("bias", "sink") if n in flags})
    grads = (normal(2, 4, 23, 6, seed=5), normal(2, 4, 23, seed=6))
    close(
        direct.results_of(lambda **t: oracle.attention(**t, **flags), x, grads),
        direct.results_of(lambda **t: direct.attention(**t, **flags), x, grads),
    )


BOUNDS = {  # queries, first key and end of the keys of two batch entries
    "right-padded": ([23, 9], [0, 0], [31, 9]),
    "left-padded": ([23, 23], [0, 17], [31, 31]),
    "both": ([11, 23], [5, 12], [28, 20]),
    "nothing left": ([0, 15], [3, 20], [31, 10]),
}


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("name", ["plain", "window and causal", "everything"])
def test_lengths_leave_calls_of_what_exists(name, bounds):
    """With q_lengths, kv_starts and kv_lengths each batch entry is a call of its own; the rest may hold NaN."""
    flags = {n: f for n, f in SEVERAL_FEATURES[name].items() if n not in ("q_lengths", "kv_starts", "kv_lengths")}
    x = {"q": normal(2, 4, 23, 8), "k": normal(2, 2, 31, 8), "v": normal(2, 2, 31, 6), "sink": normal(4)}
    x.update({n: flags.pop(n) for n in ("bias", "sink") if n in flags})
    out_grad, lse_grad = normal(2, 4, 23, 6, seed=5), normal(2, 4, 23, seed=6)
    lengths = dict(zip(("q_lengths", "kv_starts", "kv_lengths"), map(torch.tensor, BOUNDS[bounds]), strict=True))
    for b, (rows, start, stop) in enumerate(zip(*BOUNDS[bounds], strict=True)):
        for t in (x["q"], out_grad, lse_grad):
            t[b, :, rows:] = math.nan
        for t in (x["k"], x["v"]):
            t[b, :, :start], t[b, :, stop:] = math.nan, math.inf

    def one_by_one(q, k, v, sink, bias=None):
        outs, lses = [], []
        for b, (rows, start, stop) in enumerate(zip(*BOUNDS[bounds], strict=True)):
            keys, entry = slice(min(start, stop), stop), slice(b, b + 1)
            scores = {"mask": flags.get("mask"), "bias": bias}
            scores = {n: t.expand(2, 4, 23, 31)[entry, :, :rows, keys] for n, t in scores.items() if t is not None}
            out, lse = oracle.attention(
                q[entry, :, :rows], k[entry, :, keys], v[entry, :, keys], sink=sink, **{**flags, **scores}
            )
            outs.append(F.pad(out, (0, 0, 0, 23 - rows)))
            lses.append(F.pad(lse, (0, 23 - rows), value=-math.inf))
        return torch.cat(outs), torch.cat(lses)

    close(
        direct.results_of(lambda **t: oracle.attention(**t, **flags, **lengths), x, (out_grad, lse_grad)),
        direct.results_of(one_by_one, x, (out_grad, lse_grad)),
    )


def test_a_sink_may_be_given_to_a_part_that_sees_nothing():
    x = {"q": normal(2, 4, 23, 8), "k": normal(2, 4, 31, 8), "v": normal(2, 4, 31, 6), "sink": normal(4)}
    seen = direct.visible_keys(23, 31, causal=True)
    assert not seen[:12, 20:].any()
    grads = (normal(2, 4, 23, 6, seed=5), normal(2, 4, 23, seed=6))

    def merged(q, k, v, sink):
        parts = [
            oracle.attention(q, k[:, :, :20], v[:, :, :20], mask=seen[:, :20]),
            oracle.attention(q, k[:, :, 20:], v[:, :, 20:], mask=seen[:, 20:], sink=sink),
        ]
        assert torch.equal(parts[1][1][:, :, :12], sink[:, None].expand(2, 4, 12))
        return oracle.merge_attention(*zip(*parts, strict=True))

    close(
        direct.results_of(merged, x, grads),
        direct.results_of(lambda **t: direct.attention(**t, causal=True), x, grads),
    )


def test_oracle_of_packed_attention_agrees_with_the_direct_formula():
    x = {"q": normal(40, 4, 8), "k": normal(50, 2, 8), "v": normal(50, 2, 6)}
    cu_q, cu_k = [0, 0, 13, 13, 34], [0, 5, 20, 20, 47]
    grads = (normal(40, 4, 6), normal(4, 40))
    bounds = (torch.tensor(cu_q), torch.tensor(cu_k), 21, 27)
    close(
        direct.results_of(lambda q, k, v: oracle.attention_varlen(q, k, v, *bounds, causal=True), x, grads),
        direct.results_of(lambda q, k, v: direct.varlen(q, k, v, cu_q, cu_k, causal=True), x, grads),
    )


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("Sq", [None, 1, 3])
def test_oracle_of_decode_agrees_with_the_direct_formula(Sq, paged):
    q = normal(4, 4, 8) if Sq is None else normal(4, 4, Sq, 8)
    shape = (30, 2, 5) if paged else (4, 2, 25)
    k, v = normal(*shape, 8), normal(*shape, 6)
    table = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:20].view(4, 5) if paged else None
    lengths, starts = [25, 11, 1, 0], [21, 0, 1, 3]
    flags = {"block_table": table, "window": (7, None)}
    ours = oracle.attention_decode(q, k, v, torch.tensor(lengths), kv_starts=torch.tensor(starts), **flags)
    theirs = direct.decode(q, k, v, lengths, kv_starts=starts, **flags)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_oracle_of_probs_agrees_with_the_direct_formula():
    q, k = normal(2, 4, 23, 8), normal(2, 2, 31, 8)
    flags = {"causal": True, "sink": normal(4), "softcap": 2.0}
    rows = [0, -1, 7, -23]
    expected = direct.attention(q, k, k, **flags, probs=True)[2]
    torch.testing.assert_close(oracle.attention_probs(q, k, **flags), expected, rtol=1e-12, atol=1e-14)
    some = oracle.attention_probs(q, k, rows=rows, **flags)
    torch.testing.assert_close(some, expected[:, :, rows], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cuts", [(0, 31), (0, 0, 31), (0, 7, 8, 31), (0, 10, 10, 20, 31, 31)], ids=str)
def test_oracle_of_merge_agrees_with_attention_over_all_keys(cuts):
    x = {"q": normal(2, 4, 23, 8), "k": normal(2, 4, 31, 8), "v": normal(2, 4, 31, 6)}
    seen = direct.visible_keys(23, 31, causal=True)
    grads = (normal(2, 4, 23, 6, seed=5), normal(2, 4, 23, seed=6))

    def merged(q, k, v):
        parts = [
            direct.attention(q, k[:, :, a:b], v[:, :, a:b], mask=seen[:, a:b]) for a, b in itertools.pairwise(cuts)
        ]
        return oracle.merge_attention([out for out, _ in parts], [lse for _, lse in parts])

    close(
        direct.results_of(merged, x, grads),
        direct.results_of(lambda **t: direct.attention(**t, causal=True), x, grads),
    )


@pytest.mark.parametrize("scale", [None, 1.0], ids=["", "scale"])
@pytest.mark.parametrize("feature", ["plain", "causal", "mask", "bias", "gqa"])
def test_oracle_agrees_with_pytorch(feature, scale):
    S = 29
    x = {"q": normal(2, 4, S, 8), "k": normal(2, 4, S, 8), "v": normal(2, 4, S, 6)}
    ours: dict[str, object] = {"scale": scale}
    theirs: dict[str, object] = {"scale": scale}
    if feature == "causal":
        ours["causal"] = theirs["is_causal"] = True
    if feature == "mask":
        ours["mask"] = theirs["attn_mask"] = coin(2, 1, S, S) | torch.eye(S, dtype=torch.bool)
    if feature == "bias":
        ours["bias"] = theirs["attn_mask"] = normal(1, 4, S, S)
    if feature == "gqa":
        x["k"], x["v"] = x["k"][:, :2], x["v"][:, :2]
        theirs["enable_gqa"] = True
    grads = (normal(2, 4, S, 6, seed=5),)
    close(
        direct.results_of(lambda q, k, v: oracle.attention(q, k, v, **ours)[:1], x, grads),
        direct.results_of(lambda q, k, v: (F.scaled_dot_product_attention(q, k, v, **theirs),), x, grads),
    )


@pytest.mark.parametrize("name", SEVERAL_FEATURES)
def test_gradients_of_the_oracle(name):
    flags = {n: f for n, f in SEVERAL_FEATURES[name].items() if n not in ("mask", "bias", "sink")}
    given = SEVERAL_FEATURES[name]
    q, k, v = normal(2, 2, 3, 2), normal(2, 1, 5, 2), normal(2, 1, 5, 3)
    for lengths, most in (("q_lengths", 3), ("kv_starts", 5), ("kv_lengths", 5)):
        if lengths in flags:
            flags[lengths] = flags[lengths].clamp(max=most)
    if "mask" in given:
        flags["mask"] = coin(2, 2, 3, 5)
    bias = normal(1, 2, 3, 5) if "bias" in given else None
    if name == "bias with -inf":
        bias = None
        flags["bias"] = torch.where(coin(3, 5), 0.3, -math.inf).double()
    sink = normal(2) if "sink" in given else None

    def run(q, k, v, bias, sink):
        extra = {"bias": bias} if bias is not None else {}
        out, lse = oracle.attention(q, k, v, sink=sink, **extra, **flags)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    leaves = [None if t is None else t.requires_grad_() for t in (q, k, v, bias, sink)]
    assert torch.autograd.gradcheck(run, leaves)


def test_gradients_of_the_oracle_of_merge():
    outs = [normal(1, 2, 3, 2, seed=i).requires_grad_() for i in range(3)]
    lses = [normal(1, 2, 3, seed=i).requires_grad_() for i in range(3)]
    assert torch.autograd.gradcheck(lambda *t: oracle.merge_attention(t[:3], t[3:]), (*outs, *lses))


def test_oracles_of_the_row_ops_agree_with_pytorch():
    x, weight = normal(7, 33), normal(33)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (33,), weight, 1e-6), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(softmax(x), F.softmax(x, -1), rtol=1e-12, atol=1e-15)
    targets = torch.tensor([0, 32, -100, 5, 6, -100, 1])
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            torch.testing.assert_close(
                cross_entropy(x, targets, reduction=reduction, label_smoothing=smoothing),
                F.cross_entropy(x, targets, reduction=reduction, label_smoothing=smoothing),
                rtol=1e-12,
                atol=1e-14,
            )
    ids = torch.tensor([[0, 6], [3, 3]])
    assert torch.equal(embedding(ids, x), F.embedding(ids, x))


def test_gradients_of_the_oracles_of_the_row_ops():
    x, weight = normal(4, 5).requires_grad_(), normal(5).requires_grad_()
    targets = torch.tensor([0, 4, -100, 2])
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6, 1.0), (x, weight))
    assert torch.autograd.gradcheck(softmax, (x,))
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, targets, label_smoothing=0.1, z_loss=0.01, softcap=3.0), (x,)
    )

"""Masks beside lengths in the Hopper kernels, whose own source `gluon_on_cpu` runs: the packed mask knows the lengths.

What does not exist, and what nobody sees, is NaN.
"""

from __future__ import annotations

import math

import direct_attention as direct
import pytest
import torch
from gluon_on_cpu import OnCpu
from test_hopper_interpreted import StandIn, assert_close, normal
from test_hopper_padded import BATCH, HEADS, KEYS, QUERIES, arguments, call_of, for_small_calls

from headwise.backends.triton.hopper import folded_lengths, padded, padding
from headwise.ops.attention._arguments import AttentionBackward

__all__ = ["for_small_calls"]  # a fixture that all tests here have


def coin(*shape, chance=0.5):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < chance
    mask[:, :, 60:] &= torch.arange(shape[3]) % 5 > 0
    return mask


MASKS = {
    "of each entry": coin(BATCH, 1, QUERIES, KEYS),
    "of each head": coin(BATCH, HEADS, QUERIES, KEYS, chance=0.05),
    "of keys": coin(BATCH, 1, 1, KEYS),
}
CALLS = [
    ("both ends", "of each entry", (None, 0), True, 64, 0.0),
    ("all", "of each head", (60, 5), True, 64, 4.0),
    ("all", "of each entry", (None, None), False, 80, 0.0),
    ("queries", "of each head", (60, 5), False, 128, 0.0),
    ("starts", "of keys", (None, None), True, 128, 0.0),
    ("keys", "of each entry", (None, 0), True, 160, 0.0),
    ("keys", "of keys", (None, None), False, 256, 30.0),
]


def folded_call(name, kind, window, sink, dim, cap):
    """``(inputs, gradients of both outputs, what they give in float64, the call)``, with NaN where nobody looks."""
    x, lengths = call_of(name, window, sink, dim)
    mask = MASKS[kind]
    grads = normal(BATCH, HEADS, QUERIES, dim, seed=5), normal(BATCH, HEADS, QUERIES, seed=6, dtype=torch.float32)
    expected = direct.results_of(
        lambda **t: direct.attention(**t, **lengths, window=window, mask=mask, softcap=cap or None),
        x,
        grads,
        torch.float64,
    )
    for b in range(BATCH):
        queries, length, start = (
            int(lengths[of][b]) if of in lengths else full
            for of, full in (("q_lengths", QUERIES), ("kv_lengths", KEYS), ("kv_starts", 0))
        )
        seen = direct.visible_keys(QUERIES, KEYS, queries=queries, length=length, start=start, window=window)
        seen = seen & mask.expand(BATCH, HEADS, QUERIES, KEYS)[b]
        used = seen.any(1).unflatten(0, (-1, 2)).any(1)
        for t in (x["k"][b], x["v"][b]):
            t[~used] = math.nan
        x["q"][b][~seen.any(2)] = grads[0][b][~seen.any(2)] = math.nan
        grads[1][b, :, queries:] = math.nan
    call = arguments(x, lengths, window, dim)._replace(mask=mask)
    return x, grads, expected, call._replace(flags=call.flags._replace(softcap=cap))


@pytest.mark.parametrize(("name", "kind", "window", "sink", "dim", "cap"), CALLS, ids=str)
def test_both_directions(name, kind, window, sink, dim, cap):
    x, grads, expected, call = folded_call(name, kind, window, sink, dim, cap)
    assert padding.covers_forward(call) is padding.covers_backward(call) is None
    out, lse = padded.forward(OnCpu(dim), call)
    assert_close(out, expected["0"])
    assert torch.equal(lse.isinf(), expected["1"].isinf())
    assert torch.allclose(lse.double(), expected["1"], atol=1e-4)
    found = padded.backward(OnCpu(dim), AttentionBackward(grads[0], grads[1], out, lse, call, False, sink))
    for n, grad in zip(("q", "k", "v", "bias", "sink"), found, strict=True):
        assert (grad is None) == (n not in x)
        if grad is not None:
            assert_close(grad, expected[f"grad of {n}"])


def test_a_band_that_is_one_key_off_is_found(monkeypatch):
    folded = folded_lengths._folded
    monkeypatch.setattr(folded_lengths, "_folded", lambda *args: folded(*args)._replace(band=(-1, 1)))
    _, _, expected, call = folded_call("both ends", "of each entry", (None, 0), True, 64, 0.0)
    out, _ = padded.forward(OnCpu(0), call)
    with pytest.raises(AssertionError):
        assert_close(out, expected["0"])


@pytest.mark.parametrize(("name", "value"), [("q_lengths", -1), ("kv_lengths", KEYS + 1), ("kv_starts", 2**40)])
def test_a_bad_length_is_nan_in_its_entry_alone(name, value):
    _, grads, _, call = folded_call("all", "of each entry", (None, 0), False, 64, 0.0)

    def results():
        out, lse = padded.forward(OnCpu(1), call)
        args = AttentionBackward(grads[0], grads[1], out, lse, call, False, False)
        return out, lse, *padded.backward(OnCpu(1), args)[:3]

    good = results()
    getattr(call, name)[1] = value
    for ours, expected in zip(results(), good, strict=True):
        assert ours[1].isnan().all()
        assert torch.equal(ours[[0, 2]], expected[[0, 2]])


def test_a_mask_that_does_not_have_all_numbers_goes_to_the_plain_kernels():
    x, lengths = call_of("all", (None, 0), False)
    args = arguments(x, lengths, (None, 0))
    for mask, taken in (
        (MASKS["of each entry"], True),
        (MASKS["of keys"], False),  # beside a band and q_lengths
        (MASKS["of each entry"][:1], False),
        (MASKS["of each entry"][:1].expand(BATCH, -1, -1, -1), False),
    ):
        call = args._replace(mask=mask)
        for covers in (padding.covers_forward, padding.covers_backward):
            assert (covers(call) is None) == taken
    no_band = arguments(x, {"kv_lengths": lengths["kv_lengths"]}, (None, None))._replace(mask=MASKS["of keys"])
    assert padding.covers_forward(no_band) is padding.covers_backward(no_band) is None
    for mask, window in (("of each entry", (5, 0)), ("of keys", (5, 0)), ("of keys", (None, None))):  # one query
        one = arguments(x | {"q": x["q"][:, :, :1]}, lengths, window)._replace(mask=MASKS[mask][:, :, :1])
        assert padding.covers_backward(one) is not None
    with_bias = args._replace(mask=MASKS["of each entry"], bias=torch.zeros(QUERIES, KEYS + 6)[:, :KEYS])
    assert padding.covers_forward(with_bias) is not None
    assert padded.forward(StandIn(), with_bias) is None

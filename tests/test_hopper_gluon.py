"""The Hopper kernels themselves, their Gluon source run by `gluon_on_cpu`: right in every order of things that is tried.

Few programs work on many tiles, so that rings, messages and turns come round. What nobody sees is NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import direct_attention as direct
import pytest
import torch
from gluon_on_cpu import Deadlock, OnCpu
from test_hopper_interpreted import LENGTHS, assert_close, normal

from headwise.backends.triton.hopper import (
    attention_backward,
    attention_forward,
    backward_schedule,
    coverage,
    forward_kernel,
    forward_producer,
)
from headwise.ops.attention._arguments import Attention, AttentionBackward, Flags, Packing


class Shape(NamedTuple):
    """Head dims of q and k, and of v."""

    dim: int
    value_dim: int


SHAPES = [Shape(80, 80), Shape(160, 160), Shape(192, 128)]
BACKWARD_SHAPES = [Shape(80, 80), Shape(160, 160), Shape(192, 128), Shape(96, 96)]
PADDED = [Shape(72, 72), Shape(136, 136), Shape(168, 96), Shape(184, 120)]
WINDOWS = {"full": (None, None), "causal": (None, 0), "window": (60, 20)}


def forward_tile(shape):
    return coverage.forward_tile(shape.dim, 4096, False, False, 9999, 132, shape.value_dim)


def backward_tile(shape):
    tile = coverage.backward_tile(shape.dim, False, value_dim=shape.value_dim)
    return tile._replace(unordered_from=0, banded_unordered_from=0)


def flags_of(dim, window, cap=0.0, deterministic=True):
    left, right = (-1 if side is None else side for side in window)
    return Flags(left, right, 1 / math.sqrt(dim), cap, deterministic)


class Inputs(NamedTuple):
    """Of a call: tensors by name, gradients of both outputs, outputs and gradients in float64, and the call."""

    x: dict[str, torch.Tensor]
    grads: tuple[torch.Tensor, torch.Tensor]
    truth: dict[str, torch.Tensor]
    call: Attention


def dense(
    shape, window, *, rows=200, keys=230, heads=2, key_heads=1, batch=2, sink=False, cap=0.0, deterministic=True,
    dtype=torch.bfloat16, unseen=True,
):  # fmt: skip
    """``unseen``: is what nobody sees NaN?"""
    x = {"q": normal(batch, heads, rows, shape.dim, seed=1, dtype=dtype)}
    x["k"] = normal(batch, key_heads, keys, shape.dim, seed=2, dtype=dtype)
    x["v"] = normal(batch, key_heads, keys, shape.value_dim, seed=3, dtype=dtype)
    if sink:
        x["sink"] = normal(heads, seed=4, dtype=torch.float32)
    grads = (
        normal(batch, heads, rows, shape.value_dim, seed=5, dtype=dtype),
        normal(batch, heads, rows, seed=6, dtype=torch.float32),
    )
    truth = direct.results_of(
        lambda **t: direct.attention(**t, window=window, softcap=cap or None), x, grads, torch.float64
    )
    if unseen:
        hidden = ~direct.visible_keys(rows, keys, window=window).any(0)
        x["k"][:, :, hidden] = x["v"][:, :, hidden] = math.nan
    flags = flags_of(shape.dim, window, cap, deterministic)
    return Inputs(
        x, grads, truth, Attention(x["q"], x["k"], x["v"], None, None, x.get("sink"), None, None, None, None, flags)
    )


def packed(shape, window, *, sink=False, cap=0.0, deterministic=True):
    cu_q, cu_k = ([0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in zip(*LENGTHS, strict=True))
    tokens, keys = cu_q[-1] + 7, cu_k[-1] + 9
    x = {"q": normal(tokens, 4, shape.dim, seed=1), "k": normal(keys, 2, shape.dim, seed=2)}
    x["v"] = normal(keys, 2, shape.value_dim, seed=3)
    if sink:
        x["sink"] = normal(4, seed=4, dtype=torch.float32)
    grads = normal(tokens, 4, shape.value_dim, seed=5), normal(4, tokens, seed=6, dtype=torch.float32)

    def run(**t):
        return direct.varlen(t.pop("q"), t.pop("k"), t.pop("v"), cu_q, cu_k, window=window, softcap=cap or None, **t)

    truth = direct.results_of(run, x, grads, torch.float64)
    for i, (q_length, k_length) in enumerate(LENGTHS):
        unseen = ~direct.visible_keys(q_length, k_length, window=window)
        x["q"][cu_q[i] : cu_q[i + 1]][unseen.all(1)] = math.nan
        grads[0][cu_q[i] : cu_q[i + 1]][unseen.all(1)] = math.nan
        x["k"][cu_k[i] : cu_k[i + 1]][unseen.all(0)] = x["v"][cu_k[i] : cu_k[i + 1]][unseen.all(0)] = math.nan
    x["q"][cu_q[-1] :] = grads[0][cu_q[-1] :] = x["k"][cu_k[-1] :] = x["v"][cu_k[-1] :] = math.nan
    cu = [torch.tensor(offsets, dtype=torch.int32) for offsets in (cu_q, cu_k)]
    packing = Packing(*cu, *(int(c.diff().max()) for c in cu))
    flags = flags_of(shape.dim, window, cap, deterministic)
    call = Attention(x["q"], x["k"], x["v"], None, None, x.get("sink"), None, None, None, packing, flags)
    return Inputs(x, grads, truth, call)


def check_forward(given, tile, seed=0):
    out, lse = attention_forward.forward(OnCpu(seed), given.call, tile)
    assert_close(out, given.truth["0"])
    expected = given.truth["1"]
    assert torch.equal(lse.isinf(), expected.isinf())
    seen = expected.isfinite()
    assert (lse.double() - expected)[seen].abs().max() < 1e-4


def gradients(given, tile, seed=0):
    dtype = given.x["q"].dtype
    args = AttentionBackward(
        given.grads[0], given.grads[1], given.truth["0"].to(dtype), given.truth["1"].float(), given.call, False,
        given.call.sink is not None,
    )  # fmt: skip
    found = attention_backward.backward(OnCpu(seed), args, tile)
    return {n: grad for n, grad in zip(("q", "k", "v", "bias", "sink"), found, strict=True) if grad is not None}


def check_backward(given, tile, seed=0):
    for name, grad in gradients(given, tile, seed).items():
        assert_close(grad, given.truth[f"grad of {name}"])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape, window):
    given = dense(shape, WINDOWS[window], sink=window == "causal", keys=200 if window == "full" else 230)
    check_forward(given, forward_tile(shape))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [Shape(64, 64), Shape(128, 128)], ids=str)
def test_forward_of_heads_in_one_piece(shape, window):
    check_forward(dense(shape, WINDOWS[window]), forward_tile(shape))


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
def test_forward_with_lengths_and_a_cap(shape):
    given = dense(shape, (None, None), batch=4, cap=7.0)
    lengths = torch.tensor([230, 0, 129, 64])
    expected = direct.attention(*(given.x[n].double() for n in "qkv"), kv_lengths=lengths, softcap=7.0)
    for entry, length in enumerate(lengths.tolist()):
        given.x["k"][entry, :, length:] = given.x["v"][entry, :, length:] = math.nan
    truth = {str(i): x for i, x in enumerate(expected)}
    check_forward(given._replace(truth=truth, call=given.call._replace(kv_lengths=lengths)), forward_tile(shape))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
def test_packed_forward(shape, window):
    check_forward(packed(shape, WINDOWS[window], sink=window == "window"), forward_tile(shape))


@pytest.mark.parametrize(("window", "deterministic"), [("full", False), ("causal", True), ("window", True)])
@pytest.mark.parametrize("shape", BACKWARD_SHAPES, ids=str)
def test_backward(shape, window, deterministic):
    given = dense(shape, WINDOWS[window], sink=window == "causal", deterministic=deterministic)
    check_backward(given, backward_tile(shape))


@pytest.mark.parametrize("window", ["full", "causal"])
@pytest.mark.parametrize("shape", [Shape(128, 128), Shape(256, 256)], ids=str)
def test_backward_of_other_heads(shape, window):
    check_backward(dense(shape, WINDOWS[window]), backward_tile(shape))


@pytest.mark.parametrize("window", ["causal", "window"])
@pytest.mark.parametrize("shape", [BACKWARD_SHAPES[i] for i in (0, 2, 3)], ids=str)
def test_packed_backward(shape, window):
    check_backward(packed(shape, WINDOWS[window], sink=window == "window"), backward_tile(shape))


@pytest.mark.parametrize("shape", [BACKWARD_SHAPES[i] for i in (2, 3)], ids=str)
def test_float16_and_a_cap(shape):
    given = dense(shape, (None, 0), cap=7.0, dtype=torch.float16)
    check_forward(given, forward_tile(shape))
    check_backward(given, backward_tile(shape))


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", PADDED, ids=str)
def test_heads_that_do_not_fill_their_tile(shape, window):
    given = dense(shape, WINDOWS[window])
    check_forward(given, forward_tile(shape))
    check_backward(given, backward_tile(shape))


@pytest.mark.slow
@pytest.mark.parametrize("shape", BACKWARD_SHAPES, ids=str)
def test_many_orders_and_the_same_bits_in_all(shape):
    given = dense(shape, (None, 0), rows=200, keys=200, heads=4, key_heads=2)
    first = gradients(given, backward_tile(shape))
    for seed in range(1, 8):
        again = gradients(given, backward_tile(shape), seed)
        assert all(torch.equal(again[n], first[n]) for n in first)
        check_forward(given, forward_tile(shape), seed)


def test_masks_and_biases_take_tiles_that_can_read_them():
    for dim in (72, 80, 96):
        assert coverage.backward_tile(dim, False).d1 > 0
        for given in ({"masked": True}, {"biased": True}):
            assert coverage.backward_tile(dim, False, **given).d1 == 0
    shape = SHAPES[2]
    call = dense(shape, (None, 0), rows=70, keys=70).call._replace(mask=torch.ones(70, 70, dtype=torch.bool))
    for covers in (coverage.covers_forward, coverage.covers_backward):
        assert "no mask beside v of another" in covers(call)


# What this finds: each of these takes away something that a kernel waits for.


def fails(given, tile, of_backward=False):
    """Does some order of things give wrong numbers, more arrivals than a barrier is for, or nothing at all?"""
    for seed in range(6):
        try:
            (check_backward if of_backward else check_forward)(given, tile, seed)
        except AssertionError:
            return True
    return False


def nothing(*_, **__):
    return None


@pytest.mark.parametrize(("module", "name"), [(forward_producer, "wait_empty"), (forward_kernel, "wait_full")])
def test_a_forward_that_does_not_wait_is_found(module, name, monkeypatch):
    shape = SHAPES[2]
    given = dense(shape, (None, 0), batch=1)
    monkeypatch.setattr(module, name, nothing)
    assert fails(given, forward_tile(shape))


@pytest.mark.parametrize("shape", [BACKWARD_SHAPES[i] for i in (2, 3)], ids=str)
def test_a_backward_that_does_not_wait_is_found(shape, monkeypatch):
    given = dense(shape, (None, 0), batch=1)
    monkeypatch.setattr(backward_schedule, "wait_empty", nothing)
    assert fails(given, backward_tile(shape), of_backward=True)


def test_a_kernel_that_waits_for_ever_is_found(monkeypatch):
    given = dense(SHAPES[2], (None, 0), batch=1)
    monkeypatch.setattr(forward_producer, "_load_values", lambda *args: args[3])
    with pytest.raises(Deadlock, match="nobody can go on"):
        check_forward(given, forward_tile(SHAPES[2]))

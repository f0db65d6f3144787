"""The Hopper backward on a Hopper GPU: right against float64 for tails, groups and bands, and the same bits in every run.

HEADWISE_TEST_REPEATS: how often the same backward is run; 10000 times unless it says otherwise.
"""

from __future__ import annotations

import contextlib
import math
import os

import pytest
import torch
from gpu_machine import DEVICE, assert_close, differing, gpu, normal
from torch import Tensor

import headwise as hw
from headwise.backends.triton import hopper, tile_sizes
from headwise.backends.triton.gpu import Gpu, facts
from headwise.backends.triton.hopper import attention_backward, coverage
from headwise.config import settings

__all__ = ["gpu"]

REPEATS = int(os.environ.get("HEADWISE_TEST_REPEATS", "10000"))


@pytest.fixture(autouse=True)
def only_on_hopper(gpu):
    reason = hopper.missing(Gpu(facts(torch.cuda.current_device()), tf32=False))
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def forced(monkeypatch):
    """Makes all calls take the Hopper kernel, small ones too, with so many programs; gives what it recorded."""
    recorded = []
    run = attention_backward.backward

    def force(programs=None, unordered=True):
        def backward(gpu, args):
            gpu.multiprocessors = programs or gpu.multiprocessors
            call = args.forward
            tile = coverage.backward_tile(call.q.shape[-1], call.flags.softcap > 0, value_dim=call.v.shape[-1])
            if unordered:
                tile = tile._replace(unordered_from=0, banded_unordered_from=0)
            recorded.append(1)
            return run(gpu, args, tile)

        monkeypatch.setattr(attention_backward, "backward", backward)
        settings.changed()  # calls are recorded anew
        return recorded

    yield force
    settings.changed()


def truth(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, left: int, right: int, softcap: float) -> list[Tensor]:
    """out, lse, dq, dk, dv in float64, head by head."""
    (_, heads, rows, dim), (_, key_heads, keys, _) = q.shape, k.shape
    like = {"dtype": torch.float64, "device": DEVICE}
    out, lse = torch.zeros(*q.shape[:3], v.shape[3], **like), torch.zeros(*q.shape[:3], **like)
    dq, dk, dv = (torch.zeros(x.shape, **like) for x in (q, k, v))
    distance = torch.arange(keys, device=DEVICE)[None] - torch.arange(rows, device=DEVICE)[:, None] - (keys - rows)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    for b in range(q.shape[0]):
        for h in range(heads):
            g = h // (heads // key_heads)
            q1, k1, v1, do = q[b, h].double(), k[b, g].double(), v[b, g].double(), grad[b, h].double()
            s, slope = q1 @ k1.T / math.sqrt(dim), 1.0
            if softcap:
                t = torch.tanh(s / softcap)
                s, slope = softcap * t, 1 - t * t
            s = s.masked_fill(~seen, -math.inf)
            lse[b, h] = torch.logsumexp(s, 1)
            p = torch.exp(s - torch.where(lse[b, h] == -math.inf, 0.0, lse[b, h])[:, None])
            out[b, h] = p @ v1
            ds = p * (do @ v1.T - (out[b, h] * do).sum(1, keepdim=True)) * slope / math.sqrt(dim)
            dq[b, h] = ds @ k1
            dk[b, g] += ds.T @ q1
            dv[b, g] += p.T @ do
    return [out, lse, dq, dk, dv]


SHAPES = {
    "whole tiles": (2, 3, 3, 512, 512),
    "tails": (1, 2, 2, 1000, 1000),
    "one more than tiles": (1, 2, 2, 4097, 4097),
    "more queries": (1, 2, 2, 1000, 777),
    "more keys": (1, 2, 2, 300, 1111),
    "grouped": (2, 8, 2, 640, 1152),
    "one key head": (1, 6, 1, 333, 450),
}
BANDS = {
    "full": (-1, -1, 0.0),
    "causal": (-1, 0, 0.0),
    "window": (100, 0, 0.0),
    "both sides": (70, 200, 0.0),
    "left": (200, -1, 0.0),
    "cap": (-1, 0, 5.0),
}
# Most of the time goes into compiling, so every width has each shape once, and each band: not all pairs. As many programs as
# the GPU has multiprocessors would have one tile each; one alone has them all, and waits for nobody.
CALLS = [
    (width, shape, list(BANDS)[(place + turn) % len(BANDS)], (132, 3, 1)[place % 3])
    for turn, width in enumerate((64, 128, 256))
    for place, shape in enumerate(SHAPES)
] + [
    (80, "tails", "causal", 132),
    (80, "grouped", "cap", 3),
    (96, "tails", "both sides", 132),
    (96, "grouped", "causal", 1),
    ((192, 128), "tails", "causal", 132),
    ((192, 128), "grouped", "full", 3),
    (192, "tails", "full", 3),
    (192, "grouped", "causal", 1),
    (192, "more queries", "both sides", 132),
    (136, "one more than tiles", "cap", 5),
]


@pytest.mark.parametrize("deterministic", [True, False], ids=["turns", "any order"])
@pytest.mark.parametrize(("head_dim", "shape", "band", "programs"), CALLS)
def test_gradients_are_right(head_dim, shape, band, programs, deterministic, forced):
    recorded = forced(programs)
    batch, heads, key_heads, rows, keys = SHAPES[shape]
    left, right, softcap = BANDS[band]
    dim, value_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    q, grad = (normal(batch, rows, heads, d, seed=s).transpose(1, 2) for s, d in ((1, dim), (4, value_dim)))
    k, v = (normal(batch, keys, key_heads, d, seed=s).transpose(1, 2) for s, d in ((2, dim), (3, value_dim)))
    out, lse, *gradients = truth(q, k, v, grad, left, right, softcap)
    ours = hw.attention_backward(
        grad, q, k, v, out.to(q.dtype), lse.float(), window=(left, right), softcap=softcap or None,
        deterministic=deterministic, backend="triton",
    )  # fmt: skip
    assert len(recorded) == 1
    for name, x, y in zip(("dq", "dk", "dv"), ours, gradients, strict=True):
        assert torch.isfinite(x).all(), name
        assert_close(x, y, 5e-3)


PACKED = {
    "as many keys as queries": ([100, 0, 300, 1, 1000, 64, 128, 777], None, 4, (-1, 0)),
    # Queries without keys and keys without queries in the middle; rows that see nothing, keys that nothing sees.
    "others": ([100, 0, 300, 1, 700, 40], [64, 50, 0, 900, 700, 200], 2, (200, 0)),
}


@pytest.mark.parametrize("deterministic", [True, False], ids=["turns", "any order"])
@pytest.mark.parametrize(
    ("head_dim", "batch", "dtype", "programs"),
    [
        (128, "as many keys as queries", torch.bfloat16, 132),
        (192, "as many keys as queries", torch.bfloat16, 5),
        (64, "others", torch.float16, 3),
        (128, "others", torch.float16, 1),
        (256, "others", torch.float16, 7),
    ],
)
def test_sequences_of_a_packed_batch_do_not_touch_each_other(head_dim, batch, dtype, programs, deterministic, forced):
    recorded = forced(programs, unordered=False)
    q_lengths, k_lengths, key_heads, (left, right) = PACKED[batch]
    k_lengths = k_lengths or q_lengths
    q_ends, k_ends = (
        torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32) for lengths in (q_lengths, k_lengths)
    )
    q_at, k_at, extra = sum(q_lengths), sum(k_lengths), 77  # tokens of no sequence
    q, grad = (normal(q_at + extra, 4, head_dim, seed=s, dtype=dtype) for s in (0, 3))
    k, v = (normal(k_at + extra, key_heads, head_dim, seed=s, dtype=dtype) for s in (1, 2))
    pieces = []
    for i in range(len(q_lengths)):
        rows, keys = slice(*q_ends[i : i + 2].tolist()), slice(*k_ends[i : i + 2].tolist())
        part = (q[rows], k[keys], v[keys], grad[rows])
        pieces.append(truth(*(x.transpose(0, 1)[None] for x in part), left, right, 0.0))
    out, dq, dk, dv = (torch.cat([p[i][0].transpose(0, 1) for p in pieces]) for i in (0, 2, 3, 4))
    lse = torch.cat([p[1][0] for p in pieces], 1)
    for x, at in ((q, q_at), (grad, q_at), (k, k_at), (v, k_at)):
        x[at:] = torch.nan
    out = torch.cat([out, torch.zeros(extra, 4, head_dim, device=DEVICE)]).to(dtype)
    lse = torch.cat([lse, torch.full((4, extra), -math.inf, device=DEVICE)], 1).float()
    ours = hw.attention_varlen_backward(
        grad, q, k, v, out, lse, q_ends, k_ends, max(q_lengths), max(k_lengths), window=(left, right),
        deterministic=deterministic, backend="triton",
    )  # fmt: skip
    assert len(recorded) == 1
    for x, y, at in zip(ours, (dq, dk, dv), (q_at, k_at, k_at), strict=True):
        assert_close(x[:at], y, 5e-3)
        assert not x[at:].any()


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (128, True), (256, True)])
def test_the_same_bits_in_every_run(head_dim, causal, forced):
    recorded = forced()
    q, k, v, grad = (normal(1, 8, 1000, head_dim, seed=s) for s in range(4))
    out, lse, *gradients = truth(q, k, v, grad, -1, 0 if causal else -1, 0.0)

    def run():
        return hw.attention_backward(
            grad, q, k, v, out.to(q.dtype), lse.float(), causal=causal, deterministic=True, backend="triton"
        )

    first = run()
    for x, y in zip(first, gradients, strict=True):
        assert_close(x, y, 5e-3)
    side, noise = torch.cuda.Stream(), normal(512, 512)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for repeat in range(REPEATS):
        # Work on another stream changes which program runs when.
        with torch.cuda.stream(side):
            if repeat % 3 == 0:
                noise = (noise @ noise).clamp_(-1, 1)
        wrong += differing(first, run())
    torch.cuda.synchronize()
    assert int(wrong) == 0
    assert len(recorded) == 1


@pytest.mark.parametrize("deterministic", [True, False], ids=["turns", "any order"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_gradient_into_the_lse_of_rows_that_see_nothing_reaches_the_sink(head_dim, packed, deterministic, forced):
    """Against the plain kernels. 100 queries come before the first key; so do 200 of a sequence, and one has no keys."""
    recorded = forced()
    heads, key_heads = 8, 2
    if packed:
        cu_q, cu_k = (
            torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 300, 500, 900], [0, 100, 100, 500])
        )
        shape, k_shape, lse_shape, lengths = (950, heads), (550, key_heads), (heads, 950), (cu_q, cu_k, 400, 400)
        run, empty = hw.attention_varlen, [*range(200), *range(300, 500)]
    else:
        shape, k_shape, lse_shape, lengths = (2, heads, 500), (2, key_heads, 400), (2, heads, 500), ()
        run, empty = hw.attention, list(range(100))

    def gradients(backend_tile):
        x = [normal(*s, head_dim, seed=i).requires_grad_() for i, s in enumerate((shape, k_shape, k_shape))]
        sink = normal(heads, seed=3, dtype=torch.float32).requires_grad_()
        with backend_tile:
            out, lse = run(*x, *lengths, causal=True, sink=sink, deterministic=deterministic, return_lse=True)
            grads = (normal(*shape, head_dim, seed=4), normal(*lse_shape, seed=5, dtype=torch.float32))
            return torch.autograd.grad((out, lse), (*x, sink), grads)

    ours = gradients(contextlib.nullcontext())
    assert len(recorded) == 1
    tile = tile_sizes.tile("attention_backward_queries", 16, head_dim, True, "sm_90")
    plain = gradients(tile_sizes.forced("attention_backward_queries", tile))
    assert len(recorded) == 1
    for x, y in zip(ours, plain, strict=True):
        assert_close(x, y, 1e-2)
    rows = ours[0][empty] if packed else ours[0][:, :, empty]
    assert not rows.any()

"""Padded batches that the Hopper kernels run as packed ones, in Triton's interpreter.

PyTorch stands in for the Gluon kernels.
"""

from __future__ import annotations

import math

import direct_attention as direct
import pytest
import torch
from test_hopper_interpreted import StandIn, assert_close, normal

from headwise import layout
from headwise.backends.triton.hopper import attention_forward, coverage, padded, padding
from headwise.ops.attention._arguments import Attention, AttentionBackward, Flags

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS = 3, 4, 2, 150, 170
LENGTHS = {
    "both ends": {"q_lengths": (150, 37, 0), "kv_lengths": (170, 90, 3)},
    "queries": {"q_lengths": (101, 150, 1)},
    "keys": {"kv_lengths": (0, 170, 140)},
    "starts": {"kv_starts": (0, 100, 170)},
    "all": {"q_lengths": (64, 150, 129), "kv_lengths": (100, 170, 130), "kv_starts": (33, 0, 131)},
}
WINDOWS = ((None, 0), (None, None), (60, 5))
CALLS = [(name, WINDOWS[(i + j) % 3], (i + j) % 2 == 0) for i, name in enumerate(LENGTHS) for j in (0, 1)]


@pytest.fixture(autouse=True)
def for_small_calls(monkeypatch):
    """The kernels are for larger calls than the interpreter has patience for."""
    monkeypatch.setattr(coverage, "LEAST_TILES", 0)
    monkeypatch.setattr(coverage, "BACKWARD", tuple(t._replace(least_tiles=0) for t in coverage.BACKWARD))


def inside(*shape, seed, dtype=torch.bfloat16):
    """``(B, H, S, D)`` that lies as ``(B, S, H, D)``."""
    b, h, s, d = shape
    return normal(b, s, h, d, seed=seed, dtype=dtype).transpose(1, 2)


def call_of(name, window, sink, dim=64):
    x = {"q": inside(BATCH, HEADS, QUERIES, dim, seed=1)}
    x |= {n: inside(BATCH, KEY_HEADS, KEYS, dim, seed=s) for n, s in (("k", 2), ("v", 3))}
    if sink:
        x["sink"] = normal(HEADS, seed=4, dtype=torch.float32)
    return x, {key: torch.tensor(value, dtype=torch.int64) for key, value in LENGTHS[name].items()}


def arguments(x, lengths, window, dim=64):
    left, right = (-1 if side is None else side for side in window)
    given = {"kv_lengths": None, "q_lengths": None, "kv_starts": None} | lengths
    flags = Flags(left, right, 1 / math.sqrt(dim), 0.0, True)
    return Attention(x["q"], x["k"], x["v"], None, None, x.get("sink"), packing=None, flags=flags, **given)


def nothing_to_see(x, lengths, window, grads):
    """NaN in all that must not matter."""
    for b in range(BATCH):
        queries, length, start = (
            int(lengths[name][b]) if name in lengths else full
            for name, full in (("q_lengths", QUERIES), ("kv_lengths", KEYS), ("kv_starts", 0))
        )
        seen = direct.visible_keys(QUERIES, KEYS, queries=queries, length=length, start=start, window=window)
        x["k"][b, :, ~seen.any(0)] = x["v"][b, :, ~seen.any(0)] = math.nan
        x["q"][b, :, queries:] = math.nan
        for grad in grads:
            grad[b, :, queries:] = math.nan


def packed_forward(gpu, args, tile=None):
    """In place of the Gluon kernel."""
    cu_q, cu_k = args.packing.cu_q.tolist(), args.packing.cu_k.tolist()
    window = tuple(None if side < 0 else side for side in (args.flags.left, args.flags.right))
    out, lse = direct.varlen(*(x.double() for x in (args.q, args.k, args.v)), cu_q, cu_k, window=window, sink=args.sink)
    return out.to(args.q.dtype), lse.float()


@pytest.mark.parametrize(("name", "window", "sink"), CALLS, ids=str)
def test_forward(name, window, sink, monkeypatch):
    monkeypatch.setattr(attention_forward, "forward", packed_forward)
    monkeypatch.setattr(padded, "covers_forward", lambda args: None if args.packing else "kv_lengths alone, too")
    x, lengths = call_of(name, window, sink)
    expected = direct.attention(**{n: t.double() for n, t in x.items()}, **lengths, window=window)
    nothing_to_see(x, lengths, window, ())
    args = arguments(x, lengths, window)
    out, lse = padded.forward(StandIn(), args)
    assert out.stride() == layout.strides_like_heads(x["q"], 64)
    assert_close(out, expected[0])
    assert torch.equal(lse.isinf(), expected[1].isinf())
    assert torch.allclose(lse.double(), expected[1], atol=1e-5)
    assert padded.forward(StandIn(), args._replace(with_lse=False))[1] is None


@pytest.mark.parametrize(("name", "window", "sink"), CALLS, ids=str)
def test_backward(name, window, sink):
    x, lengths = call_of(name, window, sink)
    grads = normal(BATCH, HEADS, QUERIES, 64, seed=5), normal(BATCH, HEADS, QUERIES, seed=6, dtype=torch.float32)
    results = direct.results_of(lambda **t: direct.attention(**t, **lengths, window=window), x, grads, torch.float64)
    nothing_to_see(x, lengths, window, grads)
    call = arguments(x, lengths, window)
    assert padding.covers_backward(call) is None
    args = AttentionBackward(grads[0], grads[1], results["0"].bfloat16(), results["1"].float(), call, False, sink)
    found = dict(zip(("q", "k", "v", "bias", "sink"), padded.backward(StandIn(), args), strict=True))
    for n in x:
        assert_close(found[n], results[f"grad of {n}"])
    for n in "qkv":
        assert found[n].stride() == layout.empty_heads_inside(x[n]).stride()


@pytest.mark.parametrize(("name", "value"), [("q_lengths", -1), ("kv_lengths", KEYS + 1), ("kv_starts", 2**40)])
def test_a_bad_length_is_nan_in_its_entry_alone(name, value, monkeypatch):
    monkeypatch.setattr(attention_forward, "forward", packed_forward)
    monkeypatch.setattr(padded, "covers_forward", lambda args: None if args.packing else "kv_lengths alone, too")
    x, lengths = call_of("all", (None, 0), False)
    grads = inside(BATCH, HEADS, QUERIES, 64, seed=5), normal(BATCH, HEADS, QUERIES, seed=6, dtype=torch.float32)

    def results():
        call = arguments(x, lengths, (None, 0))
        out, lse = padded.forward(StandIn(), call)
        args = AttentionBackward(grads[0], grads[1], out, lse, call, False, False)
        return out, lse, *padded.backward(StandIn(), args)[:3]

    good = results()
    lengths[name][1] = value
    for ours, expected in zip(results(), good, strict=True):
        assert ours[1].isnan().all()
        assert torch.equal(ours[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize(("batch", "tokens"), [(70000, 128), (2, 2**25)])
def test_a_batch_of_any_size_fits_the_grids(batch, tokens):
    """CUDA's grids hold 65535 programs along all axes but the first."""
    q = torch.empty(batch, tokens, 4, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    length = torch.empty(batch, dtype=torch.int64, device="meta")
    call = arguments({"q": q, "k": q, "v": q}, {"q_lengths": length, "kv_starts": length}, (None, 0), dim=128)
    assert padding.covers_forward(call) is padding.covers_backward(call) is None
    gpu, grids = StandIn(), []
    gpu.launch = lambda kernel, grid, *_, **__: grids.append(grid)
    with torch.device("meta"):
        rows = torch.empty(batch, 4, tokens)
        padded.forward(gpu, call)
        padded.backward(gpu, AttentionBackward(q, rows, q, rows, call, False, False))
    assert len(grids) > 10
    assert [grid for grid in grids if max(grid[1:], default=0) > 65535] == []


def test_which_calls_are_taken():
    x, lengths = call_of("all", (None, 0), False)
    args = arguments(x, lengths, (None, 0))
    assert padding.covers_backward(args) is None
    assert not padding.packable(args._replace(q_lengths=None, kv_lengths=None, kv_starts=None))
    outside = args._replace(**{n: x[n].contiguous() for n in "qkv"})
    assert "reads no q_lengths" in padding.covers_backward(outside)
    one_for_all = args._replace(k=x["k"][:1].expand(BATCH, -1, -1, -1))
    assert "reads no q_lengths" in padding.covers_backward(one_for_all)
    assert "reads no q_lengths" in padding.covers_backward(
        args._replace(mask=torch.ones(QUERIES, KEYS, dtype=torch.bool))
    )

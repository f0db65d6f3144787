"""The Hopper backward in Triton's interpreter: all of it but the Gluon kernel, for which PyTorch stands in.

The stand-in takes what the kernel is launched with and leaves what it leaves: dK and dV through descriptors, and sums of dQ,
block by block in the order of a warpgroup's registers. So the arrays, the cuts and the order of things are under test.
"""

from __future__ import annotations

import math

import direct_attention as direct
import pytest
import torch

from headwise.config import settings

if not settings.triton_interpret:
    pytest.skip("for Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from headwise.backends.triton.gpu import KNOWN, Gpu, Interpreter
from headwise.backends.triton.hopper.attention_backward import backward
from headwise.backends.triton.hopper.coverage import backward_tile
from headwise.backends.triton.hopper.mask_tiles import HEADER
from headwise.ops.attention._arguments import Attention, AttentionBackward, Flags, Packing


class StandIn(Interpreter):
    def __init__(self):
        Gpu.__init__(self, KNOWN["sm_90"], False)
        self.counter = torch.zeros(1, dtype=torch.int32)

    def counters(self, count):
        assert count == 1
        return self.counter

    def launch(self, kernel, grid, tensors, numbers=(), constants=(), *, descriptors=(), **options):
        if descriptors:
            gradients([None if d is None else d[0] for d in descriptors], tensors, numbers, constants[0])
        else:
            super().launch(kernel, grid, tensors, numbers, constants, **options)


def gradients(described, tensors, numbers, variant):
    """What the kernel does, tile by tile of keys."""
    q, k, v, do, stats, dk, dv, bias = described[:8]  # without the second pieces: the same tensors
    bias_batch, bias_head, bias_row, bias_key = numbers[-4:]
    sums, turns, _, records, bits, lists, blind, _ = tensors
    steps = numbers[-12:-4]
    upwards = variant.deterministic and variant.has_right and not variant.has_left and records is None
    tiles, _, _, rows, keys, row_blocks, all_blocks, left, right, key_heads, group, scale = numbers[:12]
    for batch in range(q.shape[0]):
        for tile in range(tiles - 1, -1, -1) if upwards else range(tiles):
            first_row, first_key, number, first_block, bad = 0, 0, tile, batch * row_blocks, 0
            if records is not None:
                first_row, rows, first_key, keys, number, first_block, bad, _ = records[tile].tolist()
            low, high = number * variant.keys, min(number * variant.keys + variant.keys, keys)
            if low >= keys:
                continue
            here = slice(first_key + low, first_key + high)
            for key_head in range(key_heads):
                of_k, of_v = (x[batch, key_head, here].float() for x in (k, v))
                if variant.masked:  # what nobody sees is overwritten
                    seen = seen_keys(lists, steps, batch, key_head * group, group, low, high)
                    of_k, of_v = of_k * 1, of_v * 1
                    of_k[~seen] = of_v[~seen] = 0
                sum_dk, sum_dv = torch.zeros_like(of_k), torch.zeros_like(of_v)
                for head in range(key_head * group, key_head * group + group):
                    blocks = [(block, None, True) for block in range(-(-rows // variant.rows))]
                    if variant.masked:
                        blocks = visited(lists, steps, batch, head, number)
                    for block, rank, needs_mask in blocks:
                        row = torch.arange(block * variant.rows, min(block * variant.rows + variant.rows, rows))
                        distance = torch.arange(low, high) - (row[:, None] + keys - rows)
                        seen = (distance >= (-left if left >= 0 else -math.inf)) & (
                            distance <= (right if right >= 0 else math.inf)
                        )
                        if not needs_mask:
                            seen[:] = True
                        elif variant.masked:
                            seen &= unpacked(bits, steps, batch, head, low, high, row).T
                        elif not seen.any():
                            continue
                        of_q, of_do = (x[batch, head, first_row + row].float() for x in (q, do))
                        at = head * all_blocks + first_block + block
                        lse, delta = stats[2 * at, : len(row), None], stats[2 * at + 1, : len(row), None]
                        if blind is not None and blind[at]:
                            of_q, of_do = (torch.where(lse.isinf(), 0, x) for x in (of_q, of_do))
                        logits = of_q @ of_k.T * scale
                        if bias is not None:
                            of_head = bias[batch * bias_batch, head * bias_head, :, bias_key + low : bias_key + high]
                            logits += of_head if variant.bias_rows == 1 else of_head[bias_row + row]
                        p = torch.where(seen, torch.exp2(logits * math.log2(math.e) - lse), 0)
                        ds = p * (of_do @ of_v.T - delta)
                        sum_dk += ds.T @ of_q
                        sum_dv += p.T @ of_do
                        if rank is not None and turns is not None:
                            assert turns[at] == rank
                        add(sums, turns, at, ds @ of_k, variant)
                dk[batch, key_head, here] = (sum_dk * scale + (math.nan if bad else 0)).to(dk.dtype)
                dv[batch, key_head, here] = (sum_dv + (math.nan if bad else 0)).to(dv.dtype)


def visited(lists, steps, batch, head, number):
    """(block, rank, does it need the mask?) of a tile's list."""
    at = batch * steps[4] + head * steps[5] + number * steps[6]
    entries = lists[at + HEADER : at + HEADER + int(lists[at])].tolist()
    return [(x & 0x7FFF, x >> 16, x & 0x8000 != 0) for x in entries]


def unpacked(bits, steps, batch, head, low, high, row):
    """(keys, queries) bool."""
    words = bits[
        batch * steps[0] + head * steps[1] + (row // 128)[None, :] * steps[2] + torch.arange(low, high)[:, None] * steps[3]
        + (row % 8 // 2)[None, :]
    ]  # fmt: skip
    return (words >> (row % 128 // 8 * 2 + row % 2)[None, :]) & 1 != 0


def seen_keys(lists, steps, batch, head, group, low, high):
    key = torch.arange(low, high)
    at = batch * steps[4] + steps[7] + key // 128 * 4 + key % 8 // 2
    words = [lists[at + (head + member) * steps[5]] for member in range(group)]
    return torch.stack([(w >> (key % 128 // 8 * 2 + key % 2)) & 1 != 0 for w in words]).any(0)


def add(sums, turns, at, dq, variant):
    """To a block of dQ: pieces of 64 rows and as many columns as a warpgroup's product has."""
    full = torch.zeros(variant.rows, variant.dim)
    full[: dq.shape[0], : dq.shape[1]] = dq
    columns = 32 if variant.dim * variant.rows == 64 * 64 else 64
    flat = torch.cat([
        piece.reshape(4, 2, 8, columns // 8, 4, 2).permute(0, 3, 2, 4, 1, 5).reshape(-1)
        for half in full.split(64)
        for piece in half.split(columns, 1)
    ])  # fmt: skip
    here = slice(at * flat.numel(), (at + 1) * flat.numel())
    if turns is not None:
        first = turns[at] == 0
        turns[at] += 1
        sums[here] = flat if first else sums[here] + flat
    else:
        sums[here] += flat


def normal(*shape, seed, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(x, grads, packing, window, **scores):
    """Outputs and gradients in float64."""

    def run(**t):
        if packing is None:
            return direct.attention(**t, window=window, **scores)
        return direct.varlen(t.pop("q"), t.pop("k"), t.pop("v"), *packing, window=window, **t)

    return direct.results_of(run, x, grads, torch.float64)


def ours(x, grads, results, packing, window, deterministic, mask=None, bias=None):
    left, right = (-1 if side is None else side for side in window)
    dim, sink = x["q"].shape[-1], x.get("sink")
    flags = Flags(left, right, 1 / math.sqrt(dim), 0.0, deterministic)
    packed = None
    if packing is not None:
        cu = [torch.tensor(offsets, dtype=torch.int32) for offsets in packing]
        packed = Packing(*cu, *(int(c.diff().max()) for c in cu))
    call = Attention(x["q"], x["k"], x["v"], mask, bias, sink, None, None, None, packed, flags)
    wanted = bias is not None, sink is not None
    args = AttentionBackward(
        grads[0], grads[1].float(), results["0"].to(torch.bfloat16), results["1"].float(), call, *wanted
    )
    gpu = StandIn()
    tile = backward_tile(dim, False, bias is not None)._replace(unordered_from=0, banded_unordered_from=0)
    dq, dk, dv, dbias, dsink = backward(gpu, args, tile)
    found = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sink": dsink}
    assert (dbias is None, dsink is None) == (bias is None, sink is None)
    return {name: grad for name, grad in found.items() if grad is not None}


DENSE = {
    "full": (2, 4, 2, 200, 200, (None, None)),
    "rows that see nothing": (2, 4, 2, 300, 90, (None, 0)),
    "few rows that see nothing": (1, 2, 1, 140, 137, (None, 2)),
    "keys that nothing sees": (2, 2, 1, 70, 300, (40, 0)),
    "window": (1, 2, 2, 260, 260, (50, 10)),
}


@pytest.mark.parametrize(("dim", "deterministic"), [(64, True), (128, False), (192, True)])
@pytest.mark.parametrize("name", DENSE)
def test_dense(name, dim, deterministic):
    batch, heads, key_heads, rows, keys, window = DENSE[name]
    x = {"q": normal(batch, heads, rows, dim, seed=1)}
    x |= {n: normal(batch, key_heads, keys, dim, seed=s) for n, s in (("k", 2), ("v", 3))}
    x["sink"] = normal(heads, seed=4, dtype=torch.float32)
    grads = normal(batch, heads, rows, dim, seed=5), normal(batch, heads, rows, seed=6, dtype=torch.float32)
    expected = truth(x, grads, None, window)
    unseen = ~direct.visible_keys(rows, keys, window=window)
    # What sees nothing, and what nothing sees, may hold anything; so may the gradient of an output that is zero.
    x["q"][:, :, unseen.all(1)] = grads[0][:, :, unseen.all(1)] = math.nan
    x["k"][:, :, unseen.all(0)] = x["v"][:, :, unseen.all(0)] = math.nan
    found = ours(x, grads, expected, None, window, deterministic)
    for n, grad in found.items():
        assert_close(grad, expected[f"grad of {n}"])
    assert not found["q"][:, :, unseen.all(1)].any()
    assert not found["k"][:, :, unseen.all(0)].any()


def of_documents(queries, keys):
    return torch.arange(queries)[:, None] // 70 == torch.arange(keys) // 70


MASKS = {
    "per query": lambda b, h, q, k: torch.rand(q, k, generator=torch.Generator().manual_seed(9)) < 0.3,
    "per head": lambda b, h, q, k: (
        (torch.rand(b, h, q, k, generator=torch.Generator().manual_seed(9)) < 0.02) & (torch.arange(k) % 7 > 0)
    ),
    "documents": lambda b, h, q, k: of_documents(q, k)[None, None],
    "padding": lambda b, h, q, k: torch.arange(k) < torch.arange(k // 3, k // 3 + b)[:, None, None, None],
    "queries": lambda b, h, q, k: torch.arange(q)[:, None] % 5 > 0,
}


@pytest.mark.parametrize(
    ("dim", "deterministic", "window"),
    [(64, True, (None, None)), (64, True, (None, 0)), (128, False, (60, 20)), (192, True, (60, None))],
)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dim, deterministic, window):
    batch, heads, key_heads, rows, keys = 2, 4, 2, 300, 260
    mask = MASKS[name](batch, heads, rows, keys)
    x = {"q": normal(batch, heads, rows, dim, seed=1)}
    x |= {n: normal(batch, key_heads, keys, dim, seed=s) for n, s in (("k", 2), ("v", 3))}
    grads = normal(batch, heads, rows, dim, seed=5), normal(batch, heads, rows, seed=6, dtype=torch.float32)
    expected = truth(x, grads, None, window, mask=mask)
    seen = (mask & direct.visible_keys(rows, keys, window=window)).expand(batch, heads, rows, keys)
    used = seen.any(2).unflatten(1, (key_heads, -1)).any(2)
    x["k"][~used] = x["v"][~used] = math.nan
    x["q"][~seen.any(3)] = grads[0][~seen.any(3)] = math.nan
    found = ours(x, grads, expected, None, window, deterministic, mask)
    for n, grad in found.items():
        assert_close(grad, expected[f"grad of {n}"])
    assert not found["q"][~seen.any(3)].any()
    assert not found["k"][~used].any()


@pytest.mark.parametrize(
    ("shape", "masked", "window"),
    [
        ((1, 4, 170, 136), False, (None, 0)),
        ((1, 4, 170, 136), True, (60, 20)),
        ((2, 1, 1, 136), True, (None, 0)),
        ((2, 1, 1, 136), False, (60, 20)),
        ((2, 1, 170, 136), False, (60, None)),
    ],
)
def test_biases(shape, masked, window):
    batch, heads, key_heads, rows, keys, dim = 2, 4, 2, 170, 136, 64
    mask = of_documents(rows, keys)[None, None] if masked else None
    bias = normal(*shape, seed=11)
    bias[..., ::9] = -math.inf
    if bias.shape[2] > 1:
        bias[..., 50:60, :] = -math.inf
    x = {"q": normal(batch, heads, rows, dim, seed=1)}
    x |= {n: normal(batch, key_heads, keys, dim, seed=s) for n, s in (("k", 2), ("v", 3))}
    grads = normal(batch, heads, rows, dim, seed=5), normal(batch, heads, rows, seed=6, dtype=torch.float32)
    expected = truth(x | {"bias": bias}, grads, None, window, mask=mask)
    seen = direct.visible_keys(rows, keys, window=window) & (True if mask is None else mask) & (bias > -math.inf)
    blind = ~seen.any(3).expand(batch, heads, rows)
    x["q"][blind] = grads[0][blind] = math.nan
    if mask is None:
        hidden = ~direct.visible_keys(rows, keys, window=window).any(0)
        x["k"][:, :, hidden] = x["v"][:, :, hidden] = math.nan
    found = ours(x, grads, expected, None, window, True, mask, bias)
    for n, grad in found.items():
        assert_close(grad, expected[f"grad of {n}"])


# None of either, rows that see nothing, keys that nothing sees; tokens of no sequence behind them.
LENGTHS = [(100, 100), (0, 30), (90, 40), (60, 0), (20, 200), (65, 65)]


@pytest.mark.parametrize(("sink", "deterministic"), [(True, True), (False, False)])
@pytest.mark.parametrize(("dim", "window"), [(64, (None, 0)), (128, (50, 0)), (192, (30, 20)), (64, (None, None))])
def test_packed(dim, window, sink, deterministic):
    cu_q, cu_k = ([0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in zip(*LENGTHS, strict=True))
    tokens, keys = cu_q[-1] + 7, cu_k[-1] + 9
    x = {"q": normal(tokens, 4, dim, seed=1), "k": normal(keys, 2, dim, seed=2), "v": normal(keys, 2, dim, seed=3)}
    if sink:
        x["sink"] = normal(4, seed=4, dtype=torch.float32)
    grads = normal(tokens, 4, dim, seed=5), normal(4, tokens, seed=6, dtype=torch.float32)
    expected = truth(x, grads, (cu_q, cu_k), window)
    for i, (q_length, k_length) in enumerate(LENGTHS):
        unseen = ~direct.visible_keys(q_length, k_length, window=window)
        x["q"][cu_q[i] : cu_q[i + 1]][unseen.all(1)] = math.nan
        grads[0][cu_q[i] : cu_q[i + 1]][unseen.all(1)] = math.nan
        x["k"][cu_k[i] : cu_k[i + 1]][unseen.all(0)] = math.nan
    x["q"][cu_q[-1] :] = grads[0][cu_q[-1] :] = x["k"][cu_k[-1] :] = x["v"][cu_k[-1] :] = math.nan
    found = ours(x, grads, expected, (cu_q, cu_k), window, deterministic)
    for n, grad in found.items():
        assert_close(grad, expected[f"grad of {n}"])


def test_a_gradient_of_the_sink_where_the_statistics_are_those_of_more_keys():
    """A split of the keys takes the merged output and lse: the sink belongs to a row, also if this part of it is empty."""
    x = {n: normal(1, 2, s, 64, seed=i) for i, (n, s) in enumerate((("q", 80), ("k", 30), ("v", 30)))}
    x["sink"] = normal(2, seed=4, dtype=torch.float32)
    grads = normal(1, 2, 80, 64, seed=5), normal(1, 2, 80, seed=6, dtype=torch.float32)
    out, lse = normal(1, 2, 80, 64, seed=7), normal(1, 2, 80, seed=8, dtype=torch.float32) + 5
    found = ours(x, grads, {"0": out, "1": lse}, None, (None, 0), True)
    share = torch.exp(x["sink"][:, None] - lse)
    expected = (share * (grads[1] - (grads[0].float() * out.float()).sum(3))).sum((0, 2))
    assert_close(found["sink"], expected)


def test_offsets_that_make_no_sense_give_nan():
    x = {n: normal(300, 2, 64, seed=i) for i, n in enumerate("qkv")} | {"sink": normal(2, seed=4, dtype=torch.float32)}
    grads = normal(300, 2, 64, seed=5), normal(2, 300, seed=6, dtype=torch.float32)
    results = {"0": normal(300, 2, 64, seed=7), "1": normal(2, 300, seed=8, dtype=torch.float32)}
    found = ours(x, grads, results, ([0, 100, 400], [0, 100, 300]), (None, 0), True)
    assert all(bool(grad.isnan().all()) for grad in found.values())


def assert_close(found, expected):
    assert found.isfinite().all()
    error = (found.double() - expected).norm() / expected.norm().clamp_min(1e-6)
    assert error < 1e-2, float(error)

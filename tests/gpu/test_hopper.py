"""The Hopper forward on a Hopper GPU: against the plain kernel, bit for bit over many runs, in graphs and on streams.

HEADWISE_TEST_REPEATS: how often one shape is repeated; 10000 unless it says otherwise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import pytest
import torch
from gpu_machine import assert_close, bits, gpu, ints, normal, same_bits  # noqa: F401  # gpu is a fixture
from torch import Tensor

import headwise as hw
from headwise.backends.triton import hopper, tile_sizes
from headwise.backends.triton.gpu import Gpu, facts
from headwise.backends.triton.hopper import attention_forward, coverage, tiles
from headwise.config import settings

REPEATS = int(os.environ.get("HEADWISE_TEST_REPEATS", "10000"))
DIMS = (64, 80, 96, 128, 160, 192, 256)
FLAGS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (300, 0)},
    "two-sided window": {"window": (100, 700)},
    "softcap": {"causal": True, "softcap": 20.0},
}
# Keys after its own that a query sees; a query before the first key by more than that sees nothing.
PAST_ITSELF = {"full": math.inf, "causal": 0, "window": 0, "two-sided window": 700, "softcap": 0}
PLAIN = "the plain kernel (there are rows that see nothing, and its tiles multiply by values that they do not see)"


@pytest.fixture(autouse=True)
def on_hopper(gpu: None) -> None:  # noqa: F811
    reason = hopper.missing(Gpu(facts(torch.cuda.current_device()), tf32=False))
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def forced(monkeypatch):
    """Makes calls work in another tile, or with fewer programs, than they would."""
    run = attention_forward.forward

    def force(tile=None, programs=None):
        def forward(machine, args):
            machine.multiprocessors = programs or machine.multiprocessors
            return run(machine, args, tile)

        monkeypatch.setattr(attention_forward, "forward", forward)
        settings.changed()  # calls are recorded anew

    yield force
    settings.changed()


def qkv(batch: int, heads: int, key_heads: int, queries: int, keys: int, dim: int, inside: bool = True) -> list[Tensor]:
    def one(of: int, length: int, seed: int) -> Tensor:
        if inside:
            return normal(batch, length, of, dim, seed=seed).transpose(1, 2)
        return normal(batch, of, length, dim, seed=seed)

    return [one(heads, queries, 1), one(key_heads, keys, 2), one(key_heads, keys, 3)]


def plainly(call, *args, **kwargs):
    """The same call by the plain kernel: the one a tile was asked for."""
    tile = tile_sizes.tile("attention_forward", 16, args[0].shape[-1], True, "sm_90")
    with tile_sizes.forced("attention_forward", tile):
        return call(*args, **kwargs)


def note(op: str, *args, **kwargs) -> str:
    return hw.explain(op, *args, **kwargs).note


@pytest.mark.parametrize("inside", [True, False], ids=["heads inside", "heads outside"])
@pytest.mark.parametrize("lengths", [(512, 512), (1000, 1000), (2049, 2049), (600, 777), (700, 130)], ids=str)
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("dim", DIMS)
def test_forward_agrees_with_the_plain_kernel(dim, name, lengths, inside):
    agrees_with_the_plain_kernel(qkv(2, 16, 4, *lengths, dim, inside), name, lengths)


@pytest.mark.parametrize("lengths", [(1000, 1000), (600, 777)], ids=str)
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("dims", [(192, 128), (144, 80)], ids=str)
def test_values_narrower_than_keys(dims, name, lengths):
    q, k, v = qkv(2, 16, 4, *lengths, dims[0])
    agrees_with_the_plain_kernel((q, k, v[..., : dims[1]].contiguous()), name, lengths)


def agrees_with_the_plain_kernel(inputs, name, lengths):
    q, k, v = inputs
    flags = FLAGS[name]
    queries, keys = lengths
    sees_nothing = queries > keys + PAST_ITSELF[name]
    assert note("attention", q, k, v, **flags) == (
        f"forward: {PLAIN}" if sees_nothing else "forward: the Hopper kernel"
    )
    out, lse = hw.attention(q, k, v, return_lse=True, **flags)
    expected, expected_lse = plainly(hw.attention, q, k, v, return_lse=True, **flags)
    assert_close(out, expected, 5e-3)
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    seen = expected_lse.isfinite()
    assert (lse - expected_lse)[seen].abs().max() < 1e-3


@pytest.mark.parametrize("name", FLAGS)
def test_many_short_sequences_agree_with_the_plain_kernel(name):
    """Head dim 64 has a tile of four warpgroups for them."""
    flags, banded = FLAGS[name], name != "full"
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    q, k, v = qkv(processors, 8, 2, 500, 500, 64)
    tile = coverage.forward_tile(64, 500, False, banded, coverage.tiles_in_all(q), processors)
    assert tile.consumers == 4
    out, lse = hw.attention(q, k, v, return_lse=True, **flags)
    expected, expected_lse = plainly(hw.attention, q, k, v, return_lse=True, **flags)
    assert_close(out, expected, 5e-3)
    assert (lse - expected_lse).abs().max() < 1e-3
    wrong = torch.zeros((), dtype=torch.int64, device=q.device)
    for _ in range(REPEATS // 10):
        wrong += (bits(hw.attention(q, k, v, **flags)) != bits(out)).sum()
    assert int(wrong) == 0


def test_many_short_sequences_with_an_unused_cache_of_nan():
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    q, k, v = qkv(processors, 8, 2, 500, 700, 64)
    lengths = torch.arange(processors, device=q.device, dtype=torch.int32) * 97 % 701
    unused = torch.arange(700, device=q.device) >= lengths[:, None]
    for x in (k, v):
        x.masked_fill_(unused[:, None, :, None], math.nan)
    for causal in (False, True):
        given = {"kv_lengths": lengths, "causal": causal, "return_lse": True}
        out, lse = hw.attention(q, k, v, **given)
        expected, expected_lse = plainly(hw.attention, q, k, v, **given)
        assert_close(out, expected, 5e-3)
        assert torch.equal(lse.isinf(), expected_lse.isinf())


def test_sink_and_lengths_with_an_unused_cache_of_nan():
    q, k, v = qkv(4, 8, 2, 600, 1100, 128)
    sink, lengths = normal(8, dtype=torch.float32), ints(1100, 650, 0, 601)
    for entry, length in enumerate(lengths.tolist()):
        k[entry, :, length:] = v[entry, :, length:] = math.nan
    for causal in (False, True):
        given = {"kv_lengths": lengths, "sink": sink, "causal": causal, "return_lse": True}
        out, lse = hw.attention(q, k, v, **given)
        expected, expected_lse = plainly(hw.attention, q, k, v, **given)
        assert_close(out, expected, 5e-3)
        assert torch.equal(lse.isinf(), expected_lse.isinf())


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_do_not_touch_each_other(dim, causal):
    lengths = [1, 700, 0, 64, 128, 257, 63, 1000, 3]
    total = sum(lengths) + 50
    q, k, v = normal(total, 8, dim, seed=1), normal(total, 2, dim, seed=2), normal(total, 2, dim, seed=3)
    cu = ints(0, *lengths).cumsum(0).int()
    given = {"causal": causal, "return_lse": True}
    k[cu[-1] :] = v[cu[-1] :] = math.nan
    out, _ = hw.attention_varlen(q, k, v, cu, cu, 1000, 1000, **given)
    expected, _ = plainly(hw.attention_varlen, q, k, v, cu, cu, 1000, 1000, **given)
    assert_close(out, expected, 5e-3)
    assert not out[cu[-1] :].any()
    v[cu[4] : cu[5]] = math.nan
    others = torch.ones(total, dtype=torch.bool, device=q.device)
    others[cu[4] : cu[5]] = False
    again, _ = hw.attention_varlen(q, k, v, cu, cu, 1000, 1000, **given)
    assert same_bits((again[others],), (out[others],))


# Queries and keys of sequences: none of either, more of either, and last tiles of which one warpgroup has nothing.
OTHER_LENGTHS = [
    (1, 4),
    (300, 250),
    (0, 9),
    (64, 64),
    (128, 500),
    (257, 257),
    (63, 0),
    (1000, 700),
    (3, 3),
    (70, 300),
    (5, 900),
]


def offsets(lengths: Iterable[int]) -> Tensor:
    return ints(0, *lengths).cumsum(0).int()


@pytest.mark.parametrize(("sink", "programs"), [(False, None), (True, 3)], ids=["plain", "sink, few programs"])
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_packed_sequences_with_other_keys_and_nan_in_what_nobody_sees(dim, name, sink, programs, forced):
    forced(programs=programs)
    flags = FLAGS[name]
    cu_q, cu_k = (offsets(lengths) for lengths in zip(*OTHER_LENGTHS, strict=True))
    tokens, keys = int(cu_q[-1]) + 50, int(cu_k[-1]) + 50
    q, k, v = normal(tokens, 16, dim, seed=1), normal(keys, 4, dim, seed=2), normal(keys, 4, dim, seed=3)
    unseen = torch.ones(keys, dtype=torch.bool, device=q.device)
    left = flags.get("window", (math.inf, 0))[0]
    for i, (rows, here) in enumerate(OTHER_LENGTHS):
        if rows:
            unseen[cu_k[i] + int(max(here - rows - left, 0)) : cu_k[i + 1]] = False
    k[unseen] = v[unseen] = math.nan
    given = {"return_lse": True, "sink": normal(16, dtype=torch.float32) if sink else None, **flags}
    call = (q, k, v, cu_q, cu_k, 1000, 900)
    assert note("attention_varlen", *call, **given) == "forward: the Hopper kernel"
    out, lse = hw.attention_varlen(*call, **given)
    expected, expected_lse = plainly(hw.attention_varlen, *call, **given)
    assert_close(out, expected, 5e-3)
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    seen = expected_lse.isfinite()
    assert (lse - expected_lse)[seen].abs().max() < 1e-3
    again = hw.attention_varlen(*call, **given)
    assert same_bits(again, (out, lse))


# Every tile that packed batches may have, whatever is chosen for these lengths.
TILES = sorted(
    {(row.widest, tile) for row in coverage.FORWARD for tile in row[1:6] if isinstance(tile, tiles.ForwardTile)}
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dim", "tile"), TILES, ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else str(x)
)
def test_packed_sequences_in_every_tile(dim, tile, causal, forced):
    """Last tiles of which one, two or three warpgroups have nothing."""
    forced(tile)
    cu = offsets([1500, 1, 2049, 700, 65, 0, 1090, 200])
    q, k, v = (normal(int(cu[-1]), heads, dim, seed=seed) for seed, heads in enumerate((8, 2, 2)))
    call, given = (q, k, v, cu, cu, 2049, 2049), {"causal": causal, "return_lse": True}
    assert note("attention_varlen", *call, **given) == "forward: the Hopper kernel"
    out, lse = hw.attention_varlen(*call, **given)
    again = hw.attention_varlen(*call, **given)
    expected, expected_lse = plainly(hw.attention_varlen, *call, **given)
    assert_close(out, expected, 5e-3)
    assert (lse - expected_lse).abs().max() < 1e-3
    assert same_bits(again, (out, lse))


@pytest.mark.parametrize("causal", [False, True])
def test_more_packed_sequences_than_are_looked_at_in_one_go(causal):
    cu = offsets(37 * i % 200 for i in range(300))
    q, k, v = (normal(int(cu[-1]) + 5, heads, 128, seed=seed) for seed, heads in enumerate((8, 2, 2)))
    call, given = (q, k, v, cu, cu, 199, 199), {"causal": causal, "return_lse": True}
    assert note("attention_varlen", *call, **given) == "forward: the Hopper kernel"
    out, lse = hw.attention_varlen(*call, **given)
    expected, _ = plainly(hw.attention_varlen, *call, **given)
    assert_close(out, expected, 5e-3)
    assert not out[cu[-1] :].any()
    assert bool((lse[:, cu[-1] :] == -math.inf).all())


@pytest.mark.parametrize("at", [0, 1, 3, 200])
def test_offsets_that_make_no_sense_give_nan(at):
    cu = offsets([150] * 200)
    q, k, v = (normal(int(cu[-1]), 8, 128, seed=seed) for seed in (1, 2, 3))
    assert note("attention_varlen", q, k, v, cu, cu, 150, 150, causal=True) == "forward: the Hopper kernel"
    wrong = cu.clone()
    wrong[at] = 10**6 if at else 1
    for cu_q, cu_k in ((wrong, cu), (cu, wrong)):
        out, lse = hw.attention_varlen(q, k, v, cu_q, cu_k, 150, 150, causal=True, return_lse=True)
        assert bool(out.isnan().all())
        assert bool(lse.isnan().all())
    out, _ = hw.attention_varlen(q, k, v, cu, cu, 150, 150, causal=True, return_lse=True)  # the counter is as it was
    assert not bool(out.isnan().any())


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_many_runs_give_the_same_bits(dim):
    q, k, v = qkv(2, 8, 4, 1024, 1024, dim)
    first = hw.attention(q, k, v, causal=True, return_lse=True)
    wrong = torch.zeros((), dtype=torch.int64, device=q.device)
    for _ in range(REPEATS):
        again = hw.attention(q, k, v, causal=True, return_lse=True)
        for a, b in zip(first, again, strict=True):
            wrong += (bits(a) != bits(b)).sum()
    assert int(wrong) == 0


def test_graphs_and_streams_draw_their_work_from_counters_of_their_own():
    q, k, v = qkv(2, 8, 8, 1024, 1024, 128)
    expected = hw.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hw.attention(q, k, v, causal=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for _ in range(20):
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(hw.attention(q, k, v, causal=True))
    torch.cuda.synchronize()
    assert same_bits((captured,), (expected,))
    assert all(same_bits((x,), (expected,)) for x in results)


def test_what_is_not_covered_goes_to_the_plain_kernel_and_says_so():
    q, k, v = qkv(1, 32, 32, 600, 600, 128)
    bias = normal(600, 1)
    assert "the plain kernel (it reads no bias that is broadcast" in note("attention", q, k, v, bias=bias)
    odd = normal(1, 32, 600, 132)[..., :128]
    assert "the plain kernel (the strides of q" in note("attention", odd, k, v)
    same = {"causal": True}  # as in the tile that `plainly` asks for
    assert_close(hw.attention(odd, k, v, **same), plainly(hw.attention, odd, k, v, **same), 1e-6)
    shifted = normal(32 * 600 * 128 + 1)[1:].view(1, 32, 600, 128)  # an address that no descriptor takes
    assert_close(hw.attention(shifted, k, v, **same), plainly(hw.attention, shifted, k, v, **same), 1e-6)


@pytest.mark.parametrize("lowest", [0.0, -math.inf])
def test_rows_that_see_nothing_are_zeros(lowest):
    """Neither a sink of -inf nor a NaN that other rows see may reach them."""
    q, k, v = qkv(2, 32, 8, 600, 512, 128)
    v = v.clone()
    v[0, :, 3] = math.nan  # seen by every row of the first entry that sees anything
    lengths = torch.tensor([512, 0], dtype=torch.int32, device=q.device)
    sink = torch.full((32,), lowest, device=q.device)
    for given in ({"kv_lengths": lengths}, {}):
        out, lse = hw.attention(q, k, v, causal=True, sink=sink, return_lse=True, **given)
        assert (lse[:, :, :88] == lowest).all()
        assert (out[:, :, :88] == 0).all()
        assert (lse[0, :, 88:] != lowest).all()
        if given:
            assert (lse[1] == lowest).all()
            assert (out[1] == 0).all()


def test_the_lse_of_packed_rows_that_see_nothing_is_the_sink():
    """Rows before the first key and sequences without keys; but tokens of no sequence do not exist."""
    cu_q, cu_k = offsets([300, 200, 500]), offsets([100, 0, 500])
    q, k, v = normal(1050, 32, 128, seed=1), normal(600, 8, 128, seed=2), normal(600, 8, 128, seed=3)
    sink = normal(32, dtype=torch.float32)
    call = (q, k, v, cu_q, cu_k, 500, 500)
    assert note("attention_varlen", *call, causal=True, sink=sink) == "forward: the Hopper kernel"
    out, lse = hw.attention_varlen(*call, causal=True, sink=sink, return_lse=True)
    empty = torch.tensor([*range(200), *range(300, 500)], device=q.device)
    assert torch.equal(lse[:, empty], sink[:, None].expand(32, 400))
    assert not out[empty].any()
    assert (lse[:, 1000:] == -math.inf).all()
    assert not out[1000:].any()


def test_inductor_may_make_graphs_of_it():
    q, k, v = qkv(2, 32, 32, 1024, 1024, 64)
    hw.attention(q, k, v, causal=True)
    compiled = torch.compile(lambda q, k, v: hw.attention(q, k, v, causal=True), mode="reduce-overhead")
    for _ in range(4):
        out = compiled(q, k, v).clone()
    assert same_bits((out,), (hw.attention(q, k, v, causal=True),))

"""What does not exist: padded queries and keys (q_lengths, kv_lengths, kv_starts), and rows that see nothing."""

from __future__ import annotations

import itertools
import math

import direct_attention as direct
import pytest
import torch
from attention_calls import ints, maker, on_every_backend, ours, theirs
from torch import Tensor

import headwise as hw

INF = math.inf
LENGTHS = [40, 1, 70, 0, 33]
LONGEST, TOTAL = 70, sum(LENGTHS)
BOUNDS = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
ONE_WAY, SOFT = {"causal": True}, {"softcap": 3.0, "scale": 0.5}
FLAGS = {"full": {}, "causal": ONE_WAY, "window": {"window": (7, 3)}, "causal, softcap": ONE_WAY | SOFT}


def inputs(backend: str, queries: int = LONGEST, keys: int = LONGEST, batch: int = len(LENGTHS)) -> dict[str, Tensor]:
    m = maker(backend)
    shapes = {"q": (batch, 4, queries, 16), "k": (batch, 2, keys, 16), "v": (batch, 2, keys, 8)}
    return {name: m.normal(*shape) for name, shape in shapes.items()} | {"sink": m.normal(4)}


def results(run, x: dict[str, Tensor], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return direct.results_of(run, x, grads)


def packed(x: Tensor) -> Tensor:
    """(B, H, S, …) without its padding: (T, H, …)."""
    return torch.cat([row[:, :n].transpose(0, 1) for row, n in zip(x, LENGTHS, strict=True)])


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
@on_every_backend
def test_a_right_padded_batch_is_the_packed_batch(backend, flags):
    m, x, lengths = maker(backend), inputs(backend), ints(backend, *LENGTHS)
    grads = (m.normal(len(LENGTHS), 4, LONGEST, 8), m.normal(len(LENGTHS), 4, LONGEST))
    # Nobody reads what is in the padding: neither of the inputs nor of the gradients that arrive.
    exists = torch.arange(LONGEST, device=m.device) < lengths[:, None]
    for t in (x["q"], x["k"], x["v"], *grads):
        t.masked_fill_(~exists[:, None, :].unsqueeze(-1) if t.dim() == 4 else ~exists[:, None], math.nan)
    padded = results(ours(backend, q_lengths=lengths, kv_lengths=lengths, **flags), x, grads)

    def call(q, k, v, sink):
        bounds = ints(backend, *BOUNDS)
        return hw.attention_varlen(
            q, k, v, bounds, bounds, LONGEST, LONGEST, sink=sink, **flags, return_lse=True, backend=backend
        )

    of_packed = {n: t if n == "sink" else packed(t) for n, t in x.items()}
    expected = results(call, of_packed, (packed(grads[0]), packed(grads[1][..., None])[..., 0].T))
    for name, found in padded.items():
        wanted = expected[name].T if name == "1" else expected[name]
        if name != "grad of sink":
            rows = exists[:, None, :, None].expand(*found.shape[:3], 1) if found.dim() == 4 else exists[:, None, :]
            outside = found.masked_fill(rows, -INF if name == "1" else 0)
            assert (outside == (-INF if name == "1" else 0)).all(), f"{name}: the padding"
            found = packed(found) if found.dim() == 4 else packed(found[..., None])[..., 0]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


PADDINGS = {
    "q_lengths": {"q_lengths": (40, 7, 0)},
    "q_lengths and kv_lengths": {"q_lengths": (40, 7, 0), "kv_lengths": (60, 7, 33)},
    "more queries than keys": {"q_lengths": (40, 30, 9), "kv_lengths": (60, 7, 0)},
    "kv_starts": {"kv_starts": (0, 17, 60)},
    "kv_starts and kv_lengths": {"kv_starts": (5, 17, 33), "kv_lengths": (60, 40, 12)},
    "all three": {"kv_starts": (3, 0, 9), "kv_lengths": (60, 50, 10), "q_lengths": (40, 1, 20)},
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS.keys())
@on_every_backend
def test_padding_and_its_positions(backend, padding, flags):
    x = inputs(backend, queries=40, keys=60, batch=3)
    for name, bad in (("q", math.nan), ("k", math.nan), ("v", INF)):
        of_q = name == "q"
        stops = padding.get("q_lengths" if of_q else "kv_lengths", (x[name].shape[2],) * 3)
        starts = padding.get("kv_starts", (0, 0, 0)) if not of_q else (0, 0, 0)
        for b in range(3):
            x[name][b, :, : starts[b]] = bad
            x[name][b, :, stops[b] :] = bad
    lengths = {name: ints(backend, *values) for name, values in padding.items()}
    direct.assert_within_budget(ours(backend, **lengths, **flags), theirs(**lengths, **flags), x)


@on_every_backend
def test_probabilities_of_padding_are_zero(backend):
    x = inputs(backend, queries=40, keys=60, batch=3)
    lengths = {name: ints(backend, *values) for name, values in PADDINGS["all three"].items()}
    expected = direct.attention(**{n: t.double() for n, t in x.items()}, **lengths, causal=True, probs=True)[2]
    x["q"][1, :, 1:] = math.nan
    probs = hw.attention_probs(x["q"], x["k"], sink=x["sink"], **lengths, causal=True, backend=backend)
    torch.testing.assert_close(probs.double(), expected, rtol=1e-4, atol=1e-6)
    assert (probs[1, :, 1:] == 0).all()
    assert (probs[0, :, :, :3] == 0).all()


@pytest.mark.parametrize("tokens", [None, 3], ids=["one token", "three tokens"])
@pytest.mark.parametrize("paged", [False, True], ids=["", "paged"])
@on_every_backend
def test_decode_sees_no_key_before_its_start(backend, paged, tokens):
    m = maker(backend)
    lengths, starts, size = [64, 40, 7, 20], [0, 17, 7, 33], 16
    q = m.normal(4, 4, 16) if tokens is None else m.normal(4, 4, tokens, 16)
    k, v, sink, table = m.normal(4, 2, 64, 16), m.normal(4, 2, 64, 8), m.normal(4), None
    for b in range(4):
        k[b, :, : starts[b]], v[b, :, : starts[b]] = math.nan, INF
    given = {"k": k, "v": v}
    if paged:
        # The pages before a start have been given to others: what the table says of them makes no sense.
        order = torch.randperm(16, generator=torch.Generator().manual_seed(0)).view(4, 4)
        for name, cache in given.items():
            pages = torch.empty(16, 2, size, cache.shape[3], device=m.device)
            pages[order.flatten()] = cache.unflatten(2, (4, size)).transpose(1, 2).flatten(0, 1)
            given[name] = pages
        for b in range(4):
            order[b, : starts[b] // size] = -1 - b
        table = order.to(m.device, torch.int32)

    def call(q, sink):
        return hw.attention_decode(
            q, given["k"], given["v"], ints(backend, *lengths), kv_starts=ints(backend, *starts), block_table=table,
            sink=sink, return_lse=True, backend=backend,
        )  # fmt: skip

    def formula(q, sink):
        keys, values = (t.to(q.dtype) for t in (k, v))
        return direct.decode(q, keys, values, lengths, kv_starts=starts, sink=sink)

    direct.assert_within_budget(call, formula, {"q": q, "sink": sink})


# ------------------------------------------------------------------------------------------------ rows that see nothing


def blind_calls(backend: str):
    """Calls of 6 queries that all see nothing, as functions of q, k, v and a sink that give (out, lse)."""
    m = maker(backend)
    hidden = torch.zeros(1, 1, 6, 9, dtype=torch.bool, device=m.device)
    nothing, bounds = ints(backend, 0), ints(backend, 0, 6)

    def rows(x: Tensor) -> Tensor:
        return x[0].transpose(0, 1)

    def varlen(q, k, v, sink):
        out, lse = hw.attention_varlen(
            rows(q), rows(k), rows(v), bounds, ints(backend, 0, 0), 6, 0, sink=sink, return_lse=True, backend=backend
        )
        return out.transpose(0, 1)[None], lse[None]

    def decode(q, k, v, sink):
        return hw.attention_decode(q, k, v, nothing, sink=sink, return_lse=True, backend=backend)

    yield "mask", ours(backend, mask=hidden)
    yield "kv_lengths", ours(backend, kv_lengths=nothing)
    yield "kv_starts", ours(backend, kv_starts=ints(backend, 9))
    yield "bias", ours(backend, bias=torch.full((1, 1, 1, 9), -INF, device=m.device))
    yield "packed", varlen
    yield "decode", decode


BLIND = ["mask", "kv_lengths", "kv_starts", "bias", "packed", "decode"]


@pytest.mark.parametrize("how", BLIND)
@on_every_backend
def test_the_lse_of_a_row_that_sees_nothing_is_its_sink(backend, how):
    m, call = maker(backend), dict(blind_calls(backend))[how]
    x = {"q": m.normal(1, 4, 6, 16), "k": m.normal(1, 2, 9, 16), "v": m.normal(1, 2, 9, 8)}
    x["sink"] = torch.tensor([0.5, -3.0, 20.0, -INF], device=m.device)
    grads = (m.normal(1, 4, 6, 8), m.normal(1, 4, 6))
    found = results(call, x, grads)
    assert (found["0"] == 0).all()
    assert torch.equal(found["1"], x["sink"][None, :, None].expand(1, 4, 6))
    for name in "qkv":
        assert (found[f"grad of {name}"] == 0).all(), name
    # The sink is all there is in the denominator: what arrives at the lse goes there, and nowhere else.
    expected = grads[1].sum((0, 2))
    expected[3] = 0  # no sink at all
    torch.testing.assert_close(found["grad of sink"], expected, rtol=1e-5, atol=1e-6)
    del x["sink"]
    out, lse = call(**x, sink=None)
    assert (out == 0).all()
    assert (lse == -INF).all()


@on_every_backend
def test_the_explicit_backward_of_a_row_that_sees_nothing(backend):
    m = maker(backend)
    q, k, v, sink = m.normal(1, 4, 6, 16), m.normal(1, 2, 9, 16), m.normal(1, 2, 9, 8), m.normal(4)
    lengths = {"kv_lengths": ints(backend, 0)}
    out, lse = hw.attention(q, k, v, sink=sink, **lengths, return_lse=True, backend=backend)
    grad_lse = m.normal(1, 4, 6)
    *others, dsink = hw.attention_backward(
        m.normal(1, 4, 6, 8), q, k, v, out, lse, sink=sink, grad_lse=grad_lse, need_sink_grad=True, **lengths,
        backend=backend,
    )  # fmt: skip
    assert all((g == 0).all() for g in others)
    torch.testing.assert_close(dsink, grad_lse.sum((0, 2)), rtol=1e-5, atol=1e-6)


# Where the keys are cut, and which part is given the sink. Causal: rows see nothing of the parts behind them.
SPLITS = [((0, 23, 60), 0), ((0, 23, 60), 1), ((0, 60, 60), 1), ((0, 0, 60), 0), ((0, 5, 50, 60), 2)]


@pytest.mark.parametrize(("cuts", "holder"), SPLITS, ids=str)
@on_every_backend
def test_a_split_whose_sink_is_given_to_one_part_merges_exactly(backend, cuts, holder):
    m = maker(backend)
    x = inputs(backend, queries=60, keys=60, batch=1)
    mask = direct.visible_keys(60, 60, causal=True).to(m.device)

    def merged(q, k, v, sink):
        parts = [
            hw.attention(
                q, k[:, :, a:b], v[:, :, a:b], mask=mask[:, a:b], sink=sink if part == holder else None, return_lse=True,
                backend=backend,
            )
            for part, (a, b) in enumerate(itertools.pairwise(cuts))
        ]  # fmt: skip
        return hw.merge_attention([out for out, _ in parts], [lse for _, lse in parts], backend=backend)

    direct.assert_within_budget(merged, theirs(causal=True), x)
    whole = hw.attention(**x, causal=True, return_lse=True, backend=backend)
    for a, b in zip(merged(**x), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- torch.compile, export


class Padded(torch.nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        return hw.attention(
            q, k, v, q_lengths=lengths, kv_lengths=lengths, kv_starts=starts, causal=True, return_lse=True,
            backend=self.backend,
        )  # fmt: skip


@pytest.mark.parametrize("how", ["compile", "export"])
@on_every_backend
def test_padding_goes_through_the_compiler(backend, how):
    torch._dynamo.reset()
    m, module = maker(backend), Padded(backend)
    first = None
    for B, S in ((3, 17), (5, 33), (2, 40)):
        x = {"q": m.normal(B, 4, S, 16), "k": m.normal(B, 2, S, 16), "v": m.normal(B, 2, S, 8)}
        lengths, starts = m.integers(0, S + 1, B), m.integers(0, S // 2, B, dtype=torch.int32)
        if first is None and how == "compile":
            first = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
        elif first is None:
            batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
            sizes = {**{n: {0: batch, 2: length} for n in "qkv"}, "lengths": {0: batch}, "starts": {0: batch}}
            first = torch.export.export(module, (*x.values(), lengths, starts), dynamic_shapes=sizes).module()
        grads = (m.normal(B, 4, S, 8), m.normal(B, 4, S))
        found, expected = (
            direct.results_of(lambda q, k, v, f=f, of=(lengths, starts): f(q, k, v, *of), x, grads)
            for f in (first, module)
        )
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("nowhere", [-1, 10**6, 0], ids=["negative", "beyond", "of nan"])
@on_every_backend
def test_pages_of_keys_that_do_not_exist_need_not_exist(backend, nowhere):
    m = maker(backend)
    q, k, v = m.normal(2, 4, 16), m.normal(6, 2, 4, 16), m.normal(6, 2, 4, 8)
    k[0], v[0] = math.nan, math.nan
    lengths, starts = ints(backend, 14, 9), ints(backend, 8, 4)
    table = torch.tensor([[1, 2, 3, 4], [5, 1, 2, 3]], dtype=torch.int32, device=m.device)
    flags = {"kv_starts": starts, "backend": backend}
    expected = hw.attention_decode(q, k, v, lengths, block_table=table, **flags)
    table[0, :2], table[1, 0], table[1, 3] = nowhere, nowhere, nowhere
    assert torch.equal(hw.attention_decode(q, k, v, lengths, block_table=table, **flags), expected)
    assert not expected.isnan().any()

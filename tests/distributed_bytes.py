"""What ranks send and hold, against the cost model; `distributed_rank.main` runs it."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

import headwise.distributed as hwd
from headwise.benchmark.distributed import counted
from headwise.benchmark.memory import peak_extra
from headwise.distributed import blocks, costs, shards

BYTES = {
    "causal": {"left": -1, "right": 0},
    "window": {"left": 200, "right": 0, "layout": "contiguous"},
    "window, zigzag": {"left": 50, "right": 20},
    "documents": {"left": -1, "right": 0, "layout": "contiguous", "documents": 5},
    "documents, zigzag": {"left": -1, "right": 0, "documents": 9},
    "few key heads": {"left": -1, "right": -1, "Hk": 1},
    "few key heads, 16 bits": {"left": -1, "right": 0, "Hk": 1, "dtype": torch.bfloat16},
}


def check_bytes(group, rank, ranks):
    """What the sockets have sent is what the cost model says, within 5 %."""
    length, heads, dim = 256 * ranks, 8, 32
    few = torch.randn(1, 1, 1, 1)
    told = counted(lambda: hwd.context_parallel_attention(few, few, few, group, method="gather", layout="contiguous"))
    for name, how in BYTES.items():
        params = {"layout": "zigzag", "Hk": 4, "documents": 0, **how}
        sides = tuple(None if side < 0 else side for side in (how["left"], how["right"]))
        ends = (
            [n * length // params["documents"] for n in range(params["documents"] + 1)] if params["documents"] else None
        )
        dtype = params.get("dtype", torch.float32)
        q, k, v = (torch.randn(1, h, length, dim, dtype=dtype) for h in (heads, params["Hk"], params["Hk"]))
        q, k, v = (hwd.shard(x, group, dim=2, layout=params["layout"]).requires_grad_() for x in (q, k, v))
        parts = tuple(shards.segments(length, r, ranks, params["layout"]) for r in range(ranks))
        documents = [shards.Segment(*pair) for pair in itertools.pairwise(ends or [0, length])]
        regions = tuple(blocks.Region(part, part) for part in documents)
        plan = blocks.Plan(rank, parts, parts, how["left"], how["right"], regions, ends is not None)
        flags = {
            "layout": params["layout"], "window": sides, "cu_seqlens": None if ends is None else torch.tensor(ends)
        }  # fmt: skip

        def run(method, gradient, q=q, k=k, v=v, flags=flags):
            with torch.set_grad_enabled(gradient):
                out = hwd.context_parallel_attention(q, k, v, group, method=method, **flags)
                if gradient:
                    out.sum().backward()

        for method, gradient in itertools.product(costs.METHODS, (False, True)):
            sent = counted(partial(run, method, gradient)) - told
            modelled = costs.cost(method, costs.Sizes.of(q, k, v), plan, gradient).sent
            assert abs(sent - modelled) <= 0.05 * modelled + 500 * ranks, (name, method, gradient, sent, modelled)
    check_bytes_of_losses(group, rank, ranks)
    check_bytes_of_decode(group, rank, ranks)


def near(what, sent, modelled):
    """modelled: a Cost for the same call with many and with few numbers to send."""
    difference = modelled[1].sent - modelled[0].sent
    assert abs(sent[1] - sent[0] - difference) <= 0.05 * difference, (what, sent, modelled)


def check_bytes_of_losses(group, rank, ranks):
    of_logits, of_linear = hwd.vocabulary_parallel_cross_entropy, hwd.vocabulary_parallel_linear_cross_entropy

    def run(n, hidden, **flags):
        targets = torch.ones(n).long()
        if hidden:
            of_linear(
                torch.randn(n, hidden).requires_grad_(), torch.randn(5, hidden), targets, group, **flags
            ).backward()
        else:
            of_logits(torch.randn(n, 5), targets, group, **flags)

    for numbers, hidden, flags in ((2, 0, {}), (3, 0, {"label_smoothing": 0.1}), (2, 32, {})):
        sent = [counted(partial(run, n, hidden, **flags)) for n in (1, 8001)]
        near(flags, sent, [costs.of_loss(n, numbers, hidden, rank, ranks, True) for n in (1, 8001)])


def check_bytes_of_decode(group, rank, ranks):
    cache, lengths = torch.randn(200, 2, 3, 16), torch.full((200,), 3 * ranks)
    for way in costs.DECODE:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(costs, "way_of_decode", lambda *_, way=way: way)
            sent = [
                counted(partial(hwd.context_parallel_decode, torch.randn(200, h, 16), cache, cache, lengths, group))
                for h in (2, 20)
            ]
        near(way, sent, [costs.of_decode(200 * h, 17, 4, rank, ranks, way) for h in (2, 20)])


def check_memory(group, rank, ranks):
    """With as many tokens on each rank, a ring of more ranks holds no more; gather does."""
    if ranks < 4:
        return
    three, held = dist.new_group([0, 1, 2]), {}
    for method, gradient, of in itertools.product(("ring", "gather"), (False, True), (three, group)):
        if of is three and rank > 2:
            continue
        x = torch.randn(1, 2, 600, 64)

        def call(x=x, of=of, method=method, gradient=gradient):
            leaf = x.clone().requires_grad_(gradient)
            out = hwd.context_parallel_attention(leaf, leaf, leaf, of, method=method, layout="contiguous")
            if gradient:
                out.sum().backward()

        call()
        held[method, gradient, of is group] = peak_extra(call, "cpu")
    if rank < 3:
        assert held["ring", False, True] <= 1.05 * held["ring", False, False], held
        # A sum of gradients is let go when it has been sent: one more or less of them, by chance.
        assert held["ring", True, True] <= 1.4 * held["ring", True, False], held
        assert held["gather", False, True] > 1.2 * held["gather", False, False], held

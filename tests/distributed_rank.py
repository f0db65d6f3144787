"""One rank of the processes that `test_distributed` starts: ``python distributed_rank.py RANK RANKS FILE``.

Every rank makes the whole inputs, cuts out its shards, and compares the results that all ranks have put together.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed_bytes import check_bytes, check_memory
from distributed_losses import OnAll, check_loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import headwise.distributed as hwd
from headwise import reference as oracle
from headwise import testing
from headwise.cases import attention as attention_cases
from headwise.distributed import costs, groups, models

SHORT = {"B": 2, "Hq": 4, "Hk": 2, "Sq": 67, "Sk": 67, "D": 16, "Dv": 16}
FLAGS = ("causal", "window", "softcap", "scale", "kv_lengths", "q_lengths", "kv_starts", "dropout", "dropout_seed")
METHODS = ("ring", "gather", "ulysses")
DROPOUT = {"dropout": 0.3, "dropout_seed": 2**40 + 7}
CASES = {
    "full": {},
    "causal": {"causal": True, "Sq": 301, "Sk": 301, "B": 1},
    "causal, sink": {"causal": True, "sink": True, "Dv": 24},
    "window": {"window": (9, 5)},
    "narrow causal window, sink": {"causal": True, "window": (3, None), "sink": True, "Sq": 131, "Sk": 131},
    "narrow window, more keys": {"window": (4, 1), "Sq": 99, "Sk": 140, "Hk": 1, "sink": True},
    "window, lengths": {"kv_lengths": [61, 30], "q_lengths": [50, 30], "window": (4, 0)},
    "window that reaches left only": {"window": (None, 2), "Hq": 6, "Hk": 1, "D": 11, "Dv": 5},
    "more keys": {"causal": True, "Sq": 41, "Sk": 90, "window": (30, 0)},
    "more queries, empty rows": {"causal": True, "Sq": 53, "Sk": 20},
    "empty rows with a sink": {"causal": True, "Sq": 53, "Sk": 20, "sink": True},
    "fewer tokens than ranks": {"causal": True, "Sq": 1, "Sk": 1},
    "softcap, scale": {"causal": True, "softcap": 3.0, "scale": 0.7},
    "mask per query": {"mask": (67, 67), "causal": True},
    "mask per head, more keys": {"mask": (2, 4, 1, 90), "Sk": 90, "sink": True},
    "bias": {"bias": (2, 4, 67, 67), "causal": True},
    "bias of keys, mask of queries": {"bias": (4, 1, 67), "mask": (67, 1), "window": (20, None)},
    "bias of queries": {"bias": (2, 1, 67, 1), "Hq": 7, "Hk": 1},
    "lengths": {"kv_lengths": [61, 3], "causal": True, "sink": True},
    "right-padded": {"kv_lengths": [20, 67], "q_lengths": [20, 67], "causal": True, "window": (9, None)},
    "right-padded, alike, one empty": {"B": 3, "kv_lengths": [33, 33, 0], "q_lengths": [33, 33, 0], "sink": True},
    "left-padded, mask, bias": {"kv_starts": [60, 5], "mask": (2, 1, 67, 67), "bias": (67, 67), "causal": True},
    "documents": {"cu_seqlens": [0, 5, 5, 40, 41, 60], "causal": True, "B": 1, "sink": True},
    "documents, window": {"cu_seqlens": [0, 1, 37, 67], "window": (6, 3), "Hq": 6, "Hk": 3},
    "fewer heads than ranks": {"Hq": 1, "Hk": 1, "bias": (67, 67), "sink": True, "causal": True},
    "no batch": {"B": 0, "sink": True, "bias": (1, 4, 1, 67)},
    "more ranks than key heads": {"Hq": 6, "Hk": 1, "causal": True},
    "uneven heads": {"Hq": 10, "Hk": 2, "causal": True, "sink": True},
    "dropout": {**DROPOUT, "causal": True, "sink": True, "Sq": 141, "Sk": 141},
    "dropout, more keys, window": {**DROPOUT, "Sk": 90, "window": (30, 3), "Hq": 6, "Hk": 1},
    "dropout, lengths, bias": {
        **DROPOUT,
        "q_lengths": [50, 67],
        "kv_lengths": [61, 30],
        "kv_starts": [3, 0],
        "bias": (67, 67),
        "sink": True,
    },
    "dropout, documents": {**DROPOUT, "cu_seqlens": [0, 5, 5, 40, 41, 60], "causal": True, "B": 1, "sink": True},
}


class Cut(torch.autograd.Function):
    """The whole of a tensor to this rank's shard; the whole gradient from those of all shards."""

    @staticmethod
    def forward(ctx, x, group, layout, dim=2):
        ctx.group, ctx.layout, ctx.dim = group, layout, dim
        return hwd.shard(x, group, dim=dim, layout=layout)

    @staticmethod
    def backward(ctx, grad):
        return hwd.unshard(grad, ctx.group, dim=ctx.dim, layout=ctx.layout), None, None, None


class Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, layout):
        ctx.group, ctx.layout = group, layout
        return hwd.unshard(x, group, dim=2, layout=layout)

    @staticmethod
    def backward(ctx, grad):
        return hwd.shard(grad, ctx.group, dim=2, layout=ctx.layout), None, None


def make(maker, *, B, Hq, Hk, Sq, Sk, D, Dv, sink=False, mask=None, bias=None, **flags):
    shapes = {"q": (B, Hq, Sq, D), "k": (B, Hk, Sk, D), "v": (B, Hk, Sk, Dv)}
    arguments = {name: maker.normal(*shape) for name, shape in shapes.items()}
    if mask is not None:
        arguments["mask"] = maker.coin(*mask, chance=0.6)
    if bias is not None:
        arguments["bias"] = maker.normal(*bias)
    for name in ("kv_lengths", "q_lengths", "kv_starts", "cu_seqlens"):
        if name in flags:
            values = flags[name]
            flags[name] = maker.tensor(values, torch.int32)
            for x in {"q_lengths": "q", "kv_lengths": "kv", "kv_starts": "kv"}.get(name, ""):
                attention_cases.poison(arguments[x], values, before=name == "kv_starts")
    return {**arguments, "sink": maker.normal(Hq, dtype=torch.float32) if sink else None, **flags}


def own_rows(x, group, layout):
    """A mask or bias with the rows of this rank."""
    if x.dim() < 2 or x.shape[-2] == 1:
        return OnAll.apply(x, group) if x.is_floating_point() else x
    return Cut.apply(x, group, layout, -2) if x.is_floating_point() else hwd.shard(x, group, dim=-2, layout=layout)


def run(group, method, layout, arguments, backend):
    q, k, v = (Cut.apply(arguments[name], group, layout) for name in "qkv")
    sink = arguments["sink"] if arguments["sink"] is None else OnAll.apply(arguments["sink"], group)
    flags = {name: arguments[name] for name in (*FLAGS, "cu_seqlens") if name in arguments}
    flags |= {name: own_rows(arguments[name], group, layout) for name in ("mask", "bias") if name in arguments}
    out, lse = hwd.context_parallel_attention(
        q, k, v, group, method=method, layout=layout, sink=sink, return_lse=True, backend=backend, **flags
    )
    return {"out": Joined.apply(out, group, layout), "lse": Joined.apply(lse, group, layout)}


def reference(arguments):
    flags = {name: arguments[name] for name in (*FLAGS, "mask", "bias") if name in arguments}
    q, k, v = (arguments[name] for name in "qkv")
    if "cu_seqlens" not in arguments:
        out, lse = oracle.attention(q, k, v, sink=arguments["sink"], **flags)
        return {"out": out, "lse": lse}
    ends = arguments["cu_seqlens"]
    found = [
        oracle.attention_varlen(
            *(x.transpose(0, 1) for x in entry), ends, ends, 99, 99, sink=arguments["sink"], **flags
        )
        for entry in zip(q, k, v, strict=True)
    ]
    out, lse = (torch.stack(x) for x in zip(*found, strict=True))
    return {"out": out.transpose(1, 2), "lse": lse}


def check_attention(group):
    for number, (name, params) in enumerate(CASES.items()):
        case = testing.Case(name, {**SHORT, **params})
        for turn, method in enumerate(METHODS, number):
            for layout in ("zigzag", "contiguous") if turn % 3 else ("zigzag",):
                suite = testing.Suite(
                    "context_parallel_attention", (case,), make, partial(run, group, method, layout), reference,
                    differentiable=("q", "k", "v", "sink", "bias"),
                )  # fmt: skip
                dtypes = [torch.float32, (torch.bfloat16, torch.float16)[number % 2]]
                for dtype in dtypes if layout == "zigzag" and turn % 2 else dtypes[:1]:
                    without = ("lse",) if number % 2 else ()
                    for error in testing.measure(suite, case, dtype=dtype, without_gradient=without, seed=number):
                        assert error.ok, f"{name}, {method}, {layout}, {dtype}: {error}"


def check_bits(group):
    """The same run after run."""
    arguments = make(testing.Maker(torch.bfloat16, torch.device("cpu"), 5), **SHORT, sink=True, causal=True)
    for method in METHODS:
        found = []
        for _ in range(2):
            leaves = {n: x.clone().requires_grad_() for n, x in arguments.items() if isinstance(x, torch.Tensor)}
            results = run(group, method, "zigzag", {**arguments, **leaves}, None)
            results["out"].float().square().sum().backward()
            found.append([results["out"], results["lse"], *(x.grad for x in leaves.values())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), method


def check_no_batch(group, ranks):
    """Weights get gradients of zero, as in one process, and not none: an optimizer or DDP may wait for them."""
    for method, return_lse in itertools.product((*METHODS, "auto"), (False, True)):
        q = torch.zeros(0, 2, 4, 8, requires_grad=True)
        sink, bias = torch.ones(2, requires_grad=True), torch.ones(2, 1, 4 * ranks, requires_grad=True)
        found = hwd.context_parallel_attention(
            q, q, q, group, method=method, sink=sink, bias=bias, return_lse=return_lse
        )
        (found[0] if return_lse else found).sum().backward()
        assert all(x.grad is not None and (x.grad == 0).all() for x in (q, sink, bias)), method


def check_seeds(group, rank, ranks):
    """Without a seed all ranks drop what rank 0 has drawn; a tensor is a seed, too. Another seed drops others."""
    q = hwd.shard(torch.randn(1, 2, 9 * ranks, 8, generator=torch.Generator().manual_seed(1)), group, dim=2)
    torch.manual_seed(0)
    seed = torch.randint(0, 2**63 - 1, (1,))
    for method in METHODS:
        torch.manual_seed(rank)
        run = partial(hwd.context_parallel_attention, q, q, q, group, method=method, dropout=0.4)
        drawn = run()
        assert torch.equal(drawn, run(dropout_seed=seed))
        assert torch.equal(drawn, run(dropout_seed=int(seed)))
        assert not torch.equal(drawn, run())


def check_shards(group, rank, ranks):
    for layout in ("zigzag", "contiguous"):
        for length in range(4 * ranks + 3):
            tokens = torch.randint(0, 99, (2, length), generator=torch.Generator().manual_seed(length))
            part = hwd.shard(tokens, group, layout=layout)
            assert length // ranks - 1 <= part.shape[1] <= length // ranks + 2
            assert torch.equal(hwd.unshard(part, group, layout=layout), tokens)
            positions = hwd.shard_positions(length, group, layout=layout)
            assert torch.equal(tokens[:, positions], part)
            hidden = tokens[..., None].to(torch.bfloat16).expand(-1, -1, 3)
            own = hwd.shard(hidden, group, dim=1, layout=layout)
            assert torch.equal(hwd.unshard(own, group, dim=1, layout=layout), hidden)
    eight = hwd.shard_positions(4 * ranks, group)
    last = 4 * ranks - 2 * rank
    assert eight.tolist() == [2 * rank, 2 * rank + 1, last - 2, last - 1]


def paged(cache, page_size, generator):
    """Pages in any order, some of them nobody's, and the table that finds them."""
    batch, heads, room, dim = cache.shape
    count = room // page_size
    order = torch.randperm(batch * count + 3, generator=generator)[: batch * count]
    pages = torch.full((batch * count + 3, heads, page_size, dim), torch.nan, dtype=cache.dtype)
    pages[order] = cache.unflatten(2, (count, page_size)).transpose(1, 2).flatten(0, 1)
    return pages, order.view(batch, count).int()


def check_cancelling(group, ranks):
    """Parts of dk and dv that cancel over ranks: what is left is as close as on one device. bfloat16."""
    maker = testing.Maker(torch.bfloat16, torch.device("cpu"), 6)
    half, k, v = (
        maker.normal(1, 2, 8 * ranks, 16),
        maker.normal(1, 1, 16 * ranks, 16),
        maker.normal(1, 1, 16 * ranks, 16),
    )
    grad = maker.normal(1, 2, 8 * ranks, 16)
    grads = torch.cat([grad, -grad + maker.normal(1, 2, 8 * ranks, 16, scale=0.01)], 2)
    given = {"q": torch.cat([half, half], 2), "k": k, "v": v}

    def of(run, dtype):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
        run(**leaves).backward(grads.to(dtype))
        return {name: x.grad for name, x in leaves.items()}

    truth, plain = (of(lambda **x: oracle.attention(**x)[0], dtype) for dtype in (torch.float64, torch.bfloat16))
    for method in METHODS:

        def sharded(method=method, **x):
            parts = (Cut.apply(x[name], group, "contiguous") for name in "qkv")
            out = hwd.context_parallel_attention(*parts, group, method=method, layout="contiguous")
            return Joined.apply(out, group, "contiguous")

        for name, ours in of(sharded, torch.bfloat16).items():
            error = testing.compare(name, ours, truth[name], plain[name])
            assert error.ok, f"{method}: {error}"


def check_autocast(group, ranks):
    """The shards are cast once; the float32 parts of a row stay what they are."""
    whole = [torch.randn(1, 2, 12 * ranks, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for method in METHODS:
        mine = [hwd.shard(x, group, dim=-2) for x in whole]
        wide, low = ([x.to(d).requires_grad_() for x in mine] for d in (torch.float32, torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16):
            found = hwd.context_parallel_attention(*wide, group, method=method, causal=True)
        plain = hwd.context_parallel_attention(*low, group, method=method, causal=True)
        assert torch.equal(found, plain)
        grads = (torch.autograd.grad(x.float().square().sum(), inputs) for x, inputs in ((found, wide), (plain, low)))
        assert all(a.dtype == torch.float32 and torch.equal(a.to(b.dtype), b) for a, b in zip(*grads, strict=True))
    q, cache = torch.ones(1, 2, 8), hwd.shard(whole[0], group, dim=-2, layout="contiguous")
    for dtype in (torch.float32, torch.bfloat16):  # a token follows the caches
        given = *[cache.to(dtype)] * 2, torch.tensor([12 * ranks]), group
        with torch.autocast("cpu", torch.bfloat16):
            found = hwd.context_parallel_decode(q, *given)
        assert torch.equal(found, hwd.context_parallel_decode(q.to(dtype), *given))


def check_decode(group, rank, ranks):
    rooms = [8 + 4 * r for r in range(ranks)]
    start, total = sum(rooms[:rank]), sum(rooms)
    for number, (dtype, queries, (window, sink)) in enumerate(
        itertools.product((torch.float32, torch.bfloat16), (None, 1, 3), ((None, False), ((4, 0), True)))
    ):
        maker = testing.Maker(dtype, torch.device("cpu"), 3)
        q = maker.normal(4, 6, *([] if queries is None else [queries]), 16)
        k, v = maker.normal(4, 2, total, 16), maker.normal(4, 2, total, 8)
        lengths = torch.tensor([total, 0, 8, total - 3])
        flags = {"window": window, "sink": maker.normal(6) if sink else None}
        if number % 2:
            flags["kv_starts"] = torch.tensor([0, 0, 6, 15])
        caches, where = [x[:, :, start : start + rooms[rank]] for x in (k, v)], {}
        if number % 3:
            tables = [paged(x, 4, torch.Generator().manual_seed(rank)) for x in caches]
            caches, where = [pages for pages, _ in tables], {"block_table": tables[0][1]}
        both = []
        for way in costs.DECODE:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(costs, "way_of_decode", lambda *_, way=way: way)
                both.append(hwd.context_parallel_decode(q, *caches, lengths, group, return_lse=True, **flags, **where))
        inputs = {"q": q, "k_cache": k, "v_cache": v, "lengths": lengths, **flags}
        versions = [
            oracle.attention_decode(**testing.upcast(inputs, to)) for to in (torch.float64, dtype, torch.float32)
        ]
        plain = versions[1][0], versions[2][1]
        for way, found in zip(costs.DECODE, both, strict=True):
            for name, ours, truth, other in zip(("out", "lse"), found, versions[0], plain, strict=True):
                error = testing.compare(name, ours, truth, other)
                assert error.ok, f"decode, {way}, {dtype}, {queries}, {flags}, {where}: {error}"
            assert found[0].dtype == dtype
            on_rank_0 = found[0].clone()
            dist.broadcast(on_rank_0, 0, group=group)
            assert torch.equal(found[0], on_rank_0)
    few, part = torch.ones(1, 1, 16), torch.ones(1, 1, 2, 16)  # fewer rows than ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "way_of_decode", lambda *_: "scatter")
        found = hwd.context_parallel_decode(few, part, part, torch.tensor([2 * ranks]), group)
        assert torch.allclose(found, few)
    beyond = hwd.context_parallel_decode(q, *caches, lengths + torch.tensor([1, 0, 0, 0]), group, **where)
    assert beyond.flatten(1).isnan().all(1).tolist() == [True, False, False, False]
    starts = torch.tensor([-1, 0, total + 1, 0])
    before = hwd.context_parallel_decode(q, *caches, lengths, group, kv_starts=starts, **where)
    assert before.flatten(1).isnan().all(1).tolist() == [True, False, True, False]


def refused(kind, words, call):
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), f"{caught.value} does not say {words}"


def check_refusals(group, rank, ranks):
    """On every rank, also where one alone has the mistake; afterwards the group is as good as before."""
    last = rank == ranks - 1
    x = torch.randn(1, 2, 4, 8)
    attend = hwd.context_parallel_attention

    def attention(y=x, **flags):
        return lambda: attend(y, y, y, group, **flags)

    refused(ValueError, ["dtype", "float16", f"rank {ranks - 1}"], attention(x.half() if last else x))
    refused(ValueError, ["B, Hq, D"], attention(x[:, :1] if last else x))
    refused(ValueError, ["causal", "(-1, -1) on rank 0 and (-1, 0)"], attention(causal=last))
    refused(ValueError, ["method", "'gather'"], attention(method="gather" if last else "ring"))
    refused(ValueError, ["gradient"], attention(x.clone().requires_grad_(last)))
    refused(ValueError, ["lengths", "shard"], attention(x[:, :, :1] if last else x))
    refused(ValueError, ["method is 'star'"], attention(method="star"))
    refused(TypeError if last else ValueError, ["mask"], attention(mask=torch.ones(1) if last else None))
    refused(ValueError, ["window"], attention(window=(-3, 0) if last else None))
    total = 4 * ranks
    refused(ValueError, ["dropout", "1.5"], attention(dropout=1.5))
    refused(ValueError, ["dropout is 0.5 on rank 0"], attention(dropout=0.25 if last else 0.5))
    refused(ValueError, ["dropout_seed is 3 on rank 0"], attention(dropout=0.5, dropout_seed=3 + last))
    refused(ValueError, ["dropout_seed", "(3,)"], attention(dropout=0.5, dropout_seed=torch.ones(3).long()))
    packs = {"cu_seqlens": torch.tensor([0, 4]), "dropout": 0.5}
    refused(NotImplementedError, ["dropout", "batch of 1"], attention(torch.cat([x, x]), **packs))
    refused(ValueError, ["kv_lengths", "(3,)"], attention(kv_lengths=torch.tensor([3 - last])))
    refused(ValueError, ["q_lengths[0]", str(total)], attention(q_lengths=torch.tensor([total + 1])))
    refused(ValueError, ["cu_seqlens", "ends"], attention(cu_seqlens=torch.tensor([0, 3, 2])))
    refused(
        ValueError,
        ["cu_seqlens", "kv_starts"],
        attention(cu_seqlens=torch.ones(1).int(), kv_starts=torch.ones(1).int()),
    )
    refused(ValueError, ["mask", f"{total}"], attention(mask=torch.ones(4, 5, dtype=torch.bool)))
    refused(ValueError, ["shape of bias"], attention(bias=torch.ones(2 - last, 1, total)))
    refused(ValueError, ["gradient", "bias"], attention(bias=torch.ones(total).requires_grad_(last)))
    refused(ValueError, ["mask has", "rows"], attention(mask=torch.ones(4 if last else 1, 4 * ranks, dtype=torch.bool)))
    refused(ValueError, ["bogus"], attention(backend="bogus"))
    documents = {"cu_seqlens": torch.tensor([0, total]), "method": "ulysses"}
    refused(NotImplementedError, ["cu_seqlens", "mask"], attention(mask=torch.ones(total).bool(), **documents))
    refused(NotImplementedError, ["cu_seqlens", "bias"], attention(bias=torch.ones(total), **documents))
    refused(
        ValueError, ["the function", "unshard"],
        lambda: hwd.unshard(x, group) if last else attend(x, x, x, group),
    )  # fmt: skip
    refused(TypeError, ["group"], lambda: attend(x, x, x, None))
    decode = hwd.context_parallel_decode
    refused(
        ValueError,
        ["shape of q"],
        lambda: decode(x[:, :, 0, : 8 - last], *2 * [x[..., : 8 - last]], torch.ones(1).int(), group),
    )
    loss = partial(hwd.vocabulary_parallel_cross_entropy, x, torch.ones(1, 2, 4).long(), group)
    refused(ValueError, ["reduction"], lambda: loss(reduction="sum" if last else "mean"))
    refused(ValueError, ["return_entropy", "True on rank"], lambda: loss(return_entropy=last))
    refused(TypeError, ["return_logprobs"], lambda: loss(return_logprobs=1))
    weighted = partial(hwd.vocabulary_parallel_linear_cross_entropy, x[0, 0], x[0, 1], torch.arange(4), group)
    refused(ValueError, ["gradient"], lambda: weighted(token_weights=torch.ones(4).requires_grad_(last)))
    leaf = x[0, 0].clone().requires_grad_()  # its gradient is asked for on some ranks alone
    for run in (
        lambda: hwd.vocabulary_parallel_cross_entropy(leaf, torch.arange(4), group),
        lambda: hwd.vocabulary_parallel_linear_cross_entropy(leaf, x[0, 1], torch.arange(4), group),
        lambda: attend(leaf[None, None], x[:, :1], x[:, :1], group),
    ):
        with torch.set_grad_enabled(not last):
            refused(ValueError, ["gradient", "on every rank"], run)
    refused(
        ValueError, ["no rank has a class"], lambda: hwd.vocabulary_parallel_cross_entropy(x[..., :0], *loss.args[1:])
    )
    refused(ValueError, ["backend", "whole rows"], lambda: weighted(backend="webgpu"))
    refused(ValueError, ["backend", "'cpu' on rank"], lambda: loss(backend="cpu" if last else None))
    linear, labels = hwd.vocabulary_parallel_linear_cross_entropy, torch.arange(4)
    kind = TypeError if last else ValueError
    refused(kind, ["weight is a NoneType"], lambda: linear(x[0, 0], None if last else x[0, 1], labels, group))
    refused(NotImplementedError, ["gradient"], lambda: hwd.unshard(x.clone().requires_grad_(), group))
    model = None if last else torch.nn.Linear(2, 2)
    refused(AttributeError if last else ValueError, ["NoneType"], lambda: hwd.sum_gradients(model, group))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",))
    spread, alike = (
        DTensor.from_local(*of) if last else of[0]
        for of in ((x, mesh, (Shard(2),)), (torch.ones(total), mesh, (Replicate(),)))
    )
    refused(kind, ["k is a DTensor"], lambda: attend(x, spread, x, group))
    refused(kind, ["bias is a DTensor"], attention(bias=alike))
    refused(kind, ["k_cache is a DTensor"], lambda: decode(x[:, :, 0], spread, x, torch.ones(1).int(), group))
    refused(kind, ["logits is a DTensor"], lambda: hwd.vocabulary_parallel_cross_entropy(spread, *loss.args[1:]))
    assert torch.equal(attend(x, x, x, mesh), attend(x, x, x, group))
    refused(ValueError, ["2 dimensions"], lambda: attend(x, x, x, init_device_mesh("cpu", (1, ranks))))


def check_order(group, rank, ranks):
    """Ranks that call backward in another order would exchange messages of the same sizes: refused, and right afterwards."""
    x = torch.randn(1, ranks, 4 * ranks, 8, generator=torch.Generator().manual_seed(6))
    hidden, targets = torch.ones(3, 4).requires_grad_(), torch.arange(3)
    for method in METHODS:
        for turned in (True, False):
            leaves = [Cut.apply(y, group, "zigzag").detach().requires_grad_() for y in (x, x + 1)]
            outs = [hwd.context_parallel_attention(y, y, y, group, method=method, causal=True) for y in leaves]
            for out in reversed(outs) if turned and rank == ranks - 1 else outs:
                if turned:
                    refused(ValueError, ["backward of calls", "same order"], out.sum().backward)
                else:
                    out.sum().backward()
    check_going_on(group, rank, ranks, x)
    losses = [hwd.vocabulary_parallel_linear_cross_entropy(hidden, hidden[:2], targets, group) for _ in range(2)]
    for loss in reversed(losses) if rank == ranks - 1 else losses:
        refused(ValueError, ["backward of calls"], loss.backward)
    other = torch.arange(3) + (rank == ranks - 1)
    refused(
        ValueError,
        ["fingerprint of targets"],
        lambda: hwd.vocabulary_parallel_linear_cross_entropy(hidden, hidden[:2], other, group),
    )


def check_going_on(group, rank, ranks, x):
    """One rank leaves its backward out, or gives up on a batch: all of them are told, and can go on together."""
    last, words, few = rank == ranks - 1, ["same order", f"rank {ranks - 1} is"], torch.ones(3, 4)
    hidden = few.clone().requires_grad_()
    peers = groups.peers_of("model", group)

    def attended(method="ring", **flags):
        y = Cut.apply(x, group, "zigzag").detach().requires_grad_()
        return hwd.context_parallel_attention(y, y, y, group, method=method, **flags)

    def lost(value=None):
        """The loss over the vocabulary."""
        return hwd.vocabulary_parallel_linear_cross_entropy(hidden, few[:2], torch.arange(3), group)

    def total():
        return models._Total.apply(torch.ones(()), peers, 1)

    def decoded():
        return hwd.context_parallel_decode(few[None], few[None, :, None], few[None, :, None], torch.tensor([1]), group)

    for first, following in (
        *((partial(attended, method), attended) for method in METHODS),
        (partial(attended, "ulysses", bias=torch.ones(1, 1, 1, requires_grad=True)), decoded),
        (attended, lost), (attended, total), (lost, attended), (lost, lost), (lost, decoded),
    ):  # fmt: skip
        found = first()
        refused(ValueError, words, following if last else found.sum().backward)
        refused(ValueError, words, (lambda: hwd.sum_gradients(torch.nn.Linear(2, 2), group)) if last else total)
        assert int(total()) == ranks
    found = attended()
    mistaken = partial(attended, window=(-3, 0)) if last else found.sum().backward
    refused(ValueError, ["window" if last else "same order"], mistaken)
    attended().sum().backward()


def check_hosts(group, rank, ranks):
    """What `auto` takes for the links between ranks: those of one machine, or a network if one rank runs elsewhere."""
    x, asked = torch.randn(1, 2, 8, 8), []

    def noted(device, one_host, real=costs.machine_of):
        asked.append(one_host)
        return real(device, one_host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "machine_of", noted)
        for name in ("here", "elsewhere" if rank == ranks - 1 else "here"):
            patch.setattr(groups, "host_name", lambda name=name: name)
            hwd.context_parallel_attention(x, x, x, group)
    assert asked == [True, False]


def check_first_messages(ranks):
    """Before messages between some ranks there is one collective of all of them in every group, on the tensors' device."""
    group, log = dist.new_group(list(range(ranks))), []

    def noted(name):
        real = getattr(dist, name)
        return lambda *args, **flags: (log.append(name), real(*args, **flags))[1]

    x = torch.randn(1, 1, 40, 8)
    names = ("all_reduce", "all_gather", "batch_isend_irecv")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, noted(name))
        for _ in range(2):
            hwd.context_parallel_attention(
                x, x, x, group, method="ring", causal=True, window=(3, None), layout="contiguous"
            )
    calls = [log.count(name) for name in names]
    assert log[:3] == ["all_gather", "all_gather", "all_reduce"]
    assert calls[:2] == [1, 4]
    assert calls[2] > 0


CHECKS = (
    check_first_messages,
    check_hosts,
    check_shards,
    check_attention,
    check_bits,
    check_no_batch,
    check_seeds,
    check_cancelling,
    check_autocast,
    check_decode,
    check_loss,
    check_refusals,
    check_order,
    check_bytes,
    check_memory,
)


def main(checks=CHECKS):
    """``python distributed_rank.py RANK RANKS FILE [name of a check …]``"""
    rank, ranks, path, *names = sys.argv[1:]
    rank, ranks = int(rank), int(ranks)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=ranks, timeout=timedelta(seconds=100)
    )
    known = {"group": dist.group.WORLD, "rank": rank, "ranks": ranks}
    for check in checks:
        if not names or check.__name__ in names:
            check(**{name: known[name] for name in inspect.signature(check).parameters})
    dist.barrier()
    known.clear()  # gloo joins its threads with the last reference; at the exit of Python it aborts now and then
    dist.destroy_process_group()
    print("all checks ran")


if __name__ == "__main__":
    main()

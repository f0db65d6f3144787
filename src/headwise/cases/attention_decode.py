"""Cases of decoding: contiguous and paged caches, with NaN beyond their lengths."""

from __future__ import annotations

from typing import Any

import torch

import headwise as hw
from headwise import reference as oracle
from headwise.cases.attention import heads, meaning
from headwise.cases.row_inputs import QUICK
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(
    maker: Maker, *, lengths: list[int], starts: list[int] | None = None, capacity: int = 0, page_size: int = 0,
    hq: int = 4, hk: int = 2, d: int = 64, dv: int | None = None, sq: int | None = None, layout: str = "bhsd",
    sink: bool = False, latent: bool = False, **flags: Any,
) -> Arguments:  # fmt: skip
    """latent: the values are the first dv numbers of the keys, in the same memory."""
    batch, dv = len(lengths), dv or d
    arguments: Arguments = {"q": maker.normal(batch, hq, d) if sq is None else maker.normal(batch, hq, sq, d), **flags}
    if page_size:
        counts = [-(-n // page_size) for n in lengths]
        pages = sum(counts) + 3  # some are not used
        k, v = (maker.normal(pages, hk, page_size, dim) for dim in (d, dv))
        order = torch.randperm(pages, generator=maker.generator).tolist()
        table = torch.full((batch, max(counts, default=0) + 1), -1, dtype=torch.int32)
        used = torch.zeros(pages, page_size, dtype=torch.bool)
        for b, (start, stop) in enumerate(zip(starts or [0] * batch, lengths, strict=True)):
            for key in range(start, stop):  # pages without keys are not in the table
                i = key // page_size
                if table[b, i] < 0:
                    table[b, i] = order.pop()
                used[table[b, i], key % page_size] = True
        unused = ~used.to(maker.device)[:, None, :, None]
        arguments["block_table"] = table.to(maker.device)
    else:
        k, v = (heads(maker, batch, hk, capacity, dim, layout) for dim in (d, dv))
        position = torch.arange(capacity, device=maker.device)
        unused = position >= maker.tensor(lengths, torch.int64)[:, None]
        if starts is not None:
            unused |= position < maker.tensor(starts, torch.int64)[:, None]
        unused = unused[:, None, :, None]
    if latent:
        v = k[..., :dv]
    arguments["k_cache"], arguments["v_cache"] = (x.masked_fill_(unused, torch.nan) for x in (k, v))
    arguments["lengths"] = maker.tensor(lengths, torch.int32)
    if starts is not None:
        arguments["kv_starts"] = maker.tensor(starts, torch.int32)
    if sink:
        arguments["sink"] = maker.normal(hq)
    return arguments


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    out, lse = hw.attention_decode(**arguments, return_lse=True, backend=backend)
    return {"out": out, "lse": lse}


def reference(arguments: Arguments) -> Outputs:
    out, lse = oracle.attention_decode(**meaning(arguments))
    return {"out": out, "lse": lse}


SUITE = Suite(
    op="attention_decode",
    cases=(
        Case("contiguous", {"lengths": [100, 1, 0, 257], "capacity": 300}, QUICK),
        Case("long", {"lengths": [3000, 1777], "capacity": 4096, "hq": 8, "hk": 2}),
        Case("one key head", {"lengths": [90, 140], "capacity": 150, "hq": 8, "hk": 1, "d": 80}, QUICK),
        Case("ungrouped", {"lengths": [90, 33], "capacity": 128, "hq": 3, "hk": 3}, QUICK),
        Case("window", {"lengths": [200, 20], "capacity": 256, "window": (31, 0)}, QUICK),
        Case("softcap and sink", {"lengths": [200, 20, 0], "capacity": 256, "softcap": 8.0, "sink": True}, QUICK),
        Case("speculative tokens", {"lengths": [130, 4, 2, 0], "capacity": 160, "sq": 4}, QUICK),
        Case("speculative tokens and a window", {"lengths": [130, 40], "capacity": 160, "sq": 3, "window": (9, 0)}, QUICK),
        Case("three splits", {"lengths": [500, 100, 7], "capacity": 512, "num_splits": 3}, QUICK),
        Case("splits of speculative tokens", {"lengths": [300, 5], "capacity": 320, "sq": 4, "num_splits": 4}, QUICK),
        Case("transposed cache", {"lengths": [120, 64], "capacity": 128, "layout": "bshd"}, QUICK),
        Case("head dims 96 and 64", {"lengths": [70, 128], "capacity": 128, "d": 96, "dv": 64}, QUICK),
        # Short rows: many groups of few threads, which combine their results in workgroup memory.
        Case("head dim 32, one key head", {"lengths": [70, 33], "capacity": 96, "hq": 4, "hk": 1, "d": 32}, QUICK),
        Case("head dim 8, one key head", {"lengths": [70, 33], "capacity": 96, "hq": 6, "hk": 1, "d": 8}, QUICK),
        Case("head dim 512", {"lengths": [70, 128], "capacity": 128, "d": 512}),
        Case("latent", {"lengths": [70, 129], "capacity": 130, "hq": 20, "hk": 1, "d": 576, "dv": 512, "latent": True}),
        Case("latent, paged", {"lengths": [70, 1], "page_size": 16, "hq": 4, "hk": 1, "d": 576, "dv": 512, "latent": True}),
        Case(
            "latent, narrow, speculative tokens",
            {"lengths": [90, 3], "page_size": 8, "hq": 6, "hk": 1, "d": 40, "dv": 32, "sq": 3, "latent": True, "sink": True},
            QUICK,
        ),
        Case("head dims 576 and 512 apart", {"lengths": [70, 33], "capacity": 96, "hk": 1, "d": 576, "dv": 512}),
        Case("paged", {"lengths": [100, 16, 0, 33], "page_size": 16}, QUICK),
        Case("paged, long", {"lengths": [2000, 1], "page_size": 64, "hq": 8, "hk": 2}),
        Case("paged, pages of 1", {"lengths": [5, 9], "page_size": 1}, QUICK),
        Case(
            "paged, all flags",
            {"lengths": [90, 47], "page_size": 32, "sq": 2, "window": (40, 0), "softcap": 20.0, "sink": True},
            QUICK,
        ),
        Case("kv_starts", {"lengths": [200, 90, 0, 64], "starts": [0, 37, 0, 63], "capacity": 256}, QUICK),
        Case(
            "kv_starts at and beyond the end, sink",
            {"lengths": [100, 60, 0, 80], "starts": [100, 128, 5, 70], "capacity": 128, "sink": True},
            QUICK,
        ),
        Case(
            "kv_starts, speculative tokens and splits",
            {"lengths": [300, 90, 5], "starts": [111, 88, 4], "capacity": 320, "sq": 4, "num_splits": 3},
            QUICK,
        ),
        Case(
            "kv_starts and a window",
            {"lengths": [200, 150], "starts": [190, 20], "capacity": 256, "window": (31, 0), "softcap": 8.0},
            QUICK,
        ),
        Case("paged, kv_starts", {"lengths": [100, 70, 33, 9], "starts": [50, 69, 0, 40], "page_size": 16}, QUICK),
        Case("paged, kv_starts, long", {"lengths": [2000, 1500], "starts": [700, 1490], "page_size": 64, "sink": True}),
        Case("no batch", {"lengths": [], "capacity": 16}, QUICK),
        Case("no capacity", {"lengths": [0, 0], "capacity": 0}, QUICK),
    ),
    make=make,
    run=run,
    reference=reference,
    differentiable=("q", "k_cache", "v_cache", "sink"),
    side_outputs=("lse",),
)  # fmt: skip

"""Cases of decoding: contiguous and paged caches, poisoned beyond their lengths."""

from __future__ import annotations

from typing import Any

import torch

import headwise as hw
from headwise.cases.attention import heads
from headwise.reference import attention as reference_attention
from headwise.testing import Arguments, Case, Maker, Outputs, Suite

QUICK = frozenset({"quick"})


def make(
    maker: Maker, *, lengths: list[int], capacity: int = 0, page_size: int = 0, spare_pages: int = 3, hq: int = 4,
    hk: int = 2, d: int = 64, dv: int | None = None, sq: int | None = None, layout: str = "bhsd", sink: bool = False,
    **flags: Any,
) -> Arguments:  # fmt: skip
    batch, dv = len(lengths), dv or d
    arguments: Arguments = {"q": maker.normal(batch, hq, d) if sq is None else maker.normal(batch, hq, sq, d), **flags}
    if page_size:
        counts = [-(-n // page_size) for n in lengths]
        pages = sum(counts) + spare_pages
        k, v = (maker.normal(pages, hk, page_size, dim) for dim in (d, dv))
        order = torch.randperm(pages, generator=maker.generator).tolist()
        table = torch.full((batch, max(counts, default=0) + 1), -1, dtype=torch.int32)
        used = torch.zeros(pages, page_size, dtype=torch.bool)
        for b, (n, count) in enumerate(zip(lengths, counts, strict=True)):
            for i in range(count):
                table[b, i] = page = order.pop()
                used[page, : n - i * page_size] = True
        unused = ~used.to(maker.device)[:, None, :, None]
        arguments["block_table"] = table.to(maker.device)
    else:
        k, v = (heads(maker, batch, hk, capacity, dim, layout) for dim in (d, dv))
        position = torch.arange(capacity, device=maker.device)
        unused = (position >= maker.tensor(lengths, torch.int64)[:, None])[:, None, :, None]
    arguments["k_cache"], arguments["v_cache"] = (x.masked_fill_(unused, torch.nan) for x in (k, v))
    arguments["lengths"] = maker.tensor(lengths, torch.int32)
    if sink:
        arguments["sink"] = maker.normal(hq)
    return arguments


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    out, lse = hw.attention_decode(**arguments, return_lse=True, backend=backend)
    return {"out": out, "lse": lse}


def reference(arguments: Arguments) -> Outputs:
    arguments = {name: value for name, value in arguments.items() if name != "num_splits"}
    out, lse = reference_attention.attention_decode(**arguments)
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
        # Short rows: many teams of few threads, which meet in workgroup memory.
        Case("head dim 32, one key head", {"lengths": [70, 33], "capacity": 96, "hq": 4, "hk": 1, "d": 32}, QUICK),
        Case("head dim 8, one key head", {"lengths": [70, 33], "capacity": 96, "hq": 6, "hk": 1, "d": 8}, QUICK),
        Case("head dim 512", {"lengths": [70, 128], "capacity": 128, "d": 512}),
        Case("paged", {"lengths": [100, 16, 0, 33], "page_size": 16}, QUICK),
        Case("paged, long", {"lengths": [2000, 1], "page_size": 64, "hq": 8, "hk": 2}),
        Case("paged, pages of 1", {"lengths": [5, 9], "page_size": 1}, QUICK),
        Case(
            "paged, all flags",
            {"lengths": [90, 47], "page_size": 32, "sq": 2, "window": (40, 0), "softcap": 20.0, "sink": True},
            QUICK,
        ),
        Case("no batch", {"lengths": [], "capacity": 16}, QUICK),
        Case("no capacity", {"lengths": [0, 0], "capacity": 0}, QUICK),
    ),
    make=make,
    run=run,
    reference=reference,
    differentiable=("q", "k_cache", "v_cache", "sink"),
    side_outputs=("lse",),
)  # fmt: skip

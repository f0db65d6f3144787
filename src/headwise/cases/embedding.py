"""Cases of embedding: repeated ids, one id throughout, padding, ids outside the table, odd sizes, strides."""

from __future__ import annotations

import torch
from torch import Tensor

import headwise as hw
from headwise.cases.row_inputs import QUICK
from headwise.reference.embedding import embedding
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(
    maker: Maker,
    *,
    ids: tuple[int, ...],
    table: tuple[int, int],
    different: int | None = None,  # draw ids from this many rows only
    outside: bool = False,
    padding_idx: int | None = None,
    id_dtype: torch.dtype = torch.int64,
    strided: bool = False,
) -> Arguments:
    rows, width = table
    drawn = maker.integers(0, different or rows, *ids, dtype=id_dtype)
    weight = maker.normal(rows, width)
    if strided:
        drawn = drawn.transpose(0, 1)
        weight = maker.normal(width, rows).transpose(0, 1)
    if outside:
        flat = drawn.reshape(-1)
        flat[::7], flat[1::11], flat[2::13] = -1, rows, 2**31 - 1
        drawn = flat.view(drawn.shape)
    return {"ids": drawn, "weight": weight, "padding_idx": padding_idx}


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    return {"rows": hw.embedding(**arguments, backend=backend)}


def reference(arguments: Arguments) -> Outputs:
    return {"rows": embedding(**arguments)}


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    ids, weight, padding_idx = arguments["ids"], arguments["weight"], arguments["padding_idx"]
    return {"weight": hw.embedding_backward(grads["rows"], ids, weight.shape[0], padding_idx, backend=backend)}


CASES = (
    Case("small table", {"ids": (4, 9), "table": (11, 16)}, QUICK),
    Case("width 1", {"ids": (40,), "table": (7, 1)}, QUICK),
    Case("width 111", {"ids": (3, 50), "table": (300, 111)}, QUICK),
    Case("50257 rows", {"ids": (2, 300), "table": (50257, 96)}),
    Case("wide rows", {"ids": (130,), "table": (64, 4096)}),
    Case("many ids", {"ids": (8, 1024), "table": (1000, 130)}),
    Case("many ids, few of them different", {"ids": (4096,), "table": (5000, 64), "different": 3}),
    Case("one id throughout", {"ids": (500,), "table": (20, 33), "different": 1}, QUICK),
    Case("ids in int32", {"ids": (6, 7), "table": (19, 24), "id_dtype": torch.int32}, QUICK),
    Case("one id, no dims", {"ids": (), "table": (19, 24)}, QUICK),
    Case("three dims of ids", {"ids": (2, 3, 4), "table": (19, 24)}, QUICK),
    Case("padding", {"ids": (6, 17), "table": (5, 40), "padding_idx": 2}, QUICK),
    Case("padding from the end", {"ids": (6, 17), "table": (5, 40), "padding_idx": -1}, QUICK),
    Case("padding, many ids", {"ids": (4096,), "table": (700, 64), "padding_idx": 0}),
    Case("ids outside", {"ids": (5, 31), "table": (23, 40), "outside": True}, QUICK),
    Case("many ids, some outside", {"ids": (33, 40), "table": (23, 40), "outside": True, "padding_idx": 4}),
    Case("ids outside and padding", {"ids": (5, 31), "table": (23, 40), "outside": True, "padding_idx": 4}, QUICK),
    Case("strided", {"ids": (5, 31), "table": (23, 40), "strided": True}, QUICK),
    Case("no ids", {"ids": (3, 0), "table": (9, 16)}, QUICK),
    Case("no columns", {"ids": (3, 4), "table": (9, 0)}, QUICK),
    Case("no ids and no table", {"ids": (0,), "table": (0, 8), "different": 1}, QUICK),
)

SUITE = Suite("embedding", CASES, make, run, reference, explicit=explicit, differentiable=("weight",))

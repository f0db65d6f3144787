"""Cases of merging: parts that see no key, rows that no part sees, packed shapes."""

from __future__ import annotations

import torch
from torch import Tensor

import headwise as hw
from headwise import reference as oracle
from headwise.cases.row_inputs import QUICK
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def make(maker: Maker, *, parts: int, shape: tuple[int, ...], packed: bool = False, spread: float = 3.0) -> Arguments:
    statistics = torch.float64 if maker.dtype == torch.float64 else torch.float32
    outs = [maker.normal(*shape) for _ in range(parts)]
    lses = [maker.normal(*shape[:-1], scale=spread, dtype=statistics) for _ in range(parts)]
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        gone = maker.coin(*shape[:-1], chance=0.3)
        gone[..., :1] = True  # some rows that no part sees
        lse.masked_fill_(gone, -torch.inf)
        out.masked_fill_(gone[..., None], 0.0)
        if packed:
            lses[i] = lse.transpose(0, 1).contiguous()
    return {"outs": outs, "lses": lses, "packed": packed}


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    out, lse = hw.merge_attention(**arguments, backend=backend)
    return {"out": out, "lse": lse}


def reference(arguments: Arguments) -> Outputs:
    packed = arguments["packed"]
    lses: list[Tensor] = [x.transpose(0, 1) if packed else x for x in arguments["lses"]]
    out, lse = oracle.merge_attention(arguments["outs"], lses)
    return {"out": out, "lse": lse.transpose(0, 1) if packed else lse}


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    found = hw.merge_attention_backward(
        grads["out"], grads["lse"], out=outputs["out"], lse=outputs["lse"], backend=backend, **arguments
    )
    names = [f"{kind}[{i}]" for kind in ("outs", "lses") for i in range(len(arguments["outs"]))]
    return dict(zip(names, [*found[0], *found[1]], strict=True))


SUITE = Suite(
    op="merge_attention",
    cases=(
        Case("two parts", {"parts": 2, "shape": (2, 3, 70, 40)}, QUICK),
        Case("seven parts", {"parts": 7, "shape": (1, 4, 130, 64)}, QUICK),
        Case("one part", {"parts": 1, "shape": (2, 2, 9, 16)}, QUICK),
        Case("of decoding", {"parts": 3, "shape": (5, 8, 64)}, QUICK),
        Case("packed", {"parts": 3, "shape": (90, 4, 32), "packed": True}, QUICK),
        Case("packed, square", {"parts": 2, "shape": (8, 8, 32), "packed": True}, QUICK),
        Case("far apart", {"parts": 3, "shape": (2, 2, 50, 32), "spread": 60.0}, QUICK),
        Case("no rows", {"parts": 2, "shape": (1, 2, 0, 16)}, QUICK),
    ),
    make=make,
    run=run,
    reference=reference,
    explicit=explicit,
    differentiable=("outs", "lses"),
    side_outputs=("lse",),
)

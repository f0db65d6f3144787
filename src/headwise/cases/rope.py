"""Cases of rope: both pairings, part of a head, one tensor and pairs, every form of positions, strides, far positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.cases.row_inputs import QUICK
from headwise.reference.rope import rope
from headwise.testing import Arguments, Case, Maker, Outputs, Suite


def tables(maker: Maker, positions: int, pairs: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin ``(P, R)`` of the usual angles; float32, float64 for float64."""
    wide = torch.float64 if maker.dtype == torch.float64 else torch.float32
    angles = torch.outer(torch.arange(positions).double(), base ** -(torch.arange(pairs).double() / max(pairs, 1)))
    return angles.cos().to(maker.device, wide), angles.sin().to(maker.device, wide)


def tensor(maker: Maker, b: int, h: int, s: int, d: int, layout: str) -> Tensor:
    """``(B, H, S, D)`` with heads outside ("bhsd"), inside ("bshd"), every second column ("strided"), or part of a row of
    q, k and v ("qkv"); packed ``(T, H, D)``."""
    if layout == "packed":
        return maker.normal(b * s, h, d)
    if layout == "bshd":
        return maker.normal(b, s, h, d).transpose(1, 2)
    if layout == "qkv":
        return maker.normal(b, s, 3, h, d)[:, :, 1].transpose(1, 2)
    if layout == "strided":
        return maker.normal(b, h, s, 2 * d)[..., ::2]
    return maker.normal(b, h, s, d)


def make(
    maker: Maker,
    *,
    b: int = 2,
    h: int = 3,
    hk: int | None = None,  # heads of a second tensor
    s: int = 37,
    d: int = 64,
    r: int | None = None,  # pairs; None: all of D
    known: int | None = None,  # positions P
    positions: str = "none",  # or "each" (B, S), "shared" (S,), "outside" (some are bad), "far" (the last of P)
    layout: str = "bhsd",
    interleaved: bool = False,
    sliced: bool = False,  # the tables are columns of wider ones
) -> Arguments:
    pairs = d // 2 if r is None else r
    count = b * s if layout == "packed" else s
    known = known or max(count, 1)
    cos, sin = (t[:, :pairs] for t in tables(maker, known, pairs * 2 if sliced else pairs))
    x: Any = tensor(maker, b, h, s, d, layout)
    if hk is not None:
        x = [x, tensor(maker, b, hk, s, d, layout)]
    shape = (count,) if layout == "packed" or positions == "shared" else (b, s)
    where: Tensor | None = None
    if positions != "none":
        low = known - 16 if positions == "far" else 0
        where = maker.integers(low, known, *shape, dtype=torch.int32 if positions == "shared" else torch.int64)
    if positions == "outside" and where is not None:
        where.view(-1)[::5] = maker.tensor([-1, known, 2**31 - 1, -(2**40), 2**40], torch.int64).repeat(where.numel())[
            : len(where.view(-1)[::5])
        ]
    return {"x": x, "cos": cos, "sin": sin, "positions": where, "interleaved": interleaved}


def run(arguments: Arguments, backend: str | None = None) -> Outputs:
    return _named(hw.rope(**arguments, backend=backend))


def reference(arguments: Arguments) -> Outputs:
    x, others = arguments["x"], {name: value for name, value in arguments.items() if name != "x"}
    return _named(rope(x, **others) if isinstance(x, Tensor) else [rope(one, **others) for one in x])


def explicit(arguments: Arguments, outputs: Outputs, grads: dict[str, Tensor], backend: str | None) -> Outputs:
    others = {name: value for name, value in arguments.items() if name != "x"}
    given: Any = grads["y"] if "y" in grads else (grads["q"], grads["k"])
    found = hw.rope_backward(given, **others, backend=backend)
    return {"x": found} if isinstance(found, Tensor) else {f"x[{i}]": dx for i, dx in enumerate(found)}


def _named(ys: Any) -> Outputs:
    return {"y": ys} if isinstance(ys, Tensor) else dict(zip("qk", ys, strict=True))


CASES = (
    Case("heads outside", {}, QUICK),
    Case("heads inside", {"layout": "bshd", "d": 128}, QUICK),
    Case("interleaved", {"interleaved": True, "h": 5}, QUICK),
    Case("interleaved, heads inside", {"interleaved": True, "layout": "bshd", "d": 48}, QUICK),
    Case("packed", {"layout": "packed", "positions": "each"}, QUICK),
    Case("packed, no positions", {"layout": "packed", "d": 32, "interleaved": True}, QUICK),
    Case("q and k", {"h": 4, "hk": 2, "layout": "bshd"}, QUICK),
    Case("q and k, interleaved, packed", {"h": 6, "hk": 1, "layout": "packed", "interleaved": True}, QUICK),
    Case("q and k, positions outside", {"h": 3, "hk": 1, "positions": "outside", "r": 20}, QUICK),
    Case("part of a head", {"d": 80, "r": 16}, QUICK),
    Case("part of a head, interleaved", {"d": 80, "r": 16, "interleaved": True, "layout": "bshd"}, QUICK),
    Case("odd dim", {"d": 37, "r": 9, "h": 2}, QUICK),
    Case("odd dim, interleaved", {"d": 37, "r": 11, "h": 2, "interleaved": True}, QUICK),
    Case("odd dim, q and k, heads inside", {"d": 21, "r": 10, "h": 3, "hk": 2, "layout": "bshd"}, QUICK),
    Case("no pairs", {"d": 8, "r": 0, "known": 40}, QUICK),
    Case("one pair", {"d": 2, "h": 1, "s": 5}, QUICK),
    Case("positions of each batch entry", {"positions": "each", "known": 500}, QUICK),
    Case("positions that all share", {"positions": "shared", "known": 500, "layout": "bshd"}, QUICK),
    Case("positions outside", {"positions": "outside", "d": 40, "r": 12}, QUICK),
    Case("positions outside, interleaved", {"positions": "outside", "d": 40, "interleaved": True}, QUICK),
    Case("far positions", {"positions": "far", "known": 40000, "s": 20, "h": 1}, QUICK),
    Case("every second column", {"layout": "strided"}, QUICK),
    Case("part of a row of q, k, v", {"layout": "qkv", "h": 2, "hk": 2}, QUICK),
    Case("tables of wider ones", {"sliced": True, "known": 60}, QUICK),
    Case(
        "one token each", {"b": 19, "s": 1, "h": 8, "hk": 2, "positions": "each", "known": 90, "layout": "bshd"}, QUICK
    ),
    Case("no tokens", {"s": 0}, QUICK),
    Case("no heads, and two", {"h": 0, "hk": 2}, QUICK),
    Case("head dim 256", {"d": 256, "h": 2}),
    Case("many tokens", {"b": 2, "h": 8, "hk": 2, "s": 1500, "d": 128, "layout": "bshd"}),
    Case("many tokens, interleaved", {"b": 1, "h": 6, "hk": 3, "s": 1111, "d": 96, "interleaved": True}),
)

SUITE = Suite("rope", CASES, make, run, reference, explicit=explicit, differentiable=("x",))

"""Masks and biases on WebGPU, beside the same call without them: what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from headwise.benchmark.case import BenchCase, our_yardstick
from headwise.benchmark.requirements import Requirement, Within
from headwise.benchmark.suites.attention import BOTH, PATTERNS, PLAIN, Shape, attention_case, plain
from headwise.benchmark.suites.hopper_features import MASKS, LastHead
from headwise.testing import Arguments, Maker

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MASK, BIAS = Within(1.5, PLAIN), Within(1.7, PLAIN)
# Of H 16, S 2048: head dim, dtype, kind. Every kind in both directions.
CALLS = [
    *[(dim, dtype, kind) for dim in (64, 128) for dtype in (F32, F16, BF16) for kind in ("dense mask", "bias")],
    (128, F32, "8 documents as a mask"),
]


def cases(shrink: int) -> list[BenchCase]:
    built = []
    for dim, dtype, kind in CALLS:
        shape = Shape(1, 16, 16, 2048 // shrink, dim)
        needed: tuple[Requirement, ...] = (BIAS if kind == "bias" else MASK,)
        for direction in BOTH:
            case = attention_case(
                f"{kind} S {shape.length} D {dim} {str(dtype).removeprefix('torch.')}", "features", shape, direction,
                PATTERNS["full"], features=_features(kind, shape), dtype=dtype, requirements=needed,
                peers=(our_yardstick(PLAIN, plain),),
            )  # fmt: skip
            built.append(replace(case, check=LastHead()))
    return built


def _features(kind: str, shape: Shape) -> Callable[[Maker], Arguments]:
    def made(maker: Maker) -> Arguments:
        if kind == "bias":
            return {"bias": maker.normal(1, shape.heads, shape.length, shape.length)}
        return {"mask": MASKS[kind](maker, shape.batch, shape.length)}

    return made

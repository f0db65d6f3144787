"""The suite for Hopper GPUs: bfloat16 attention against the fastest peers, cuDNN and FlashAttention-4.

24 shapes with 16384 tokens and heads · head dim = 2048, forward and backward, in ten shuffled rounds; then other head
dims, grouped heads, a window, a packed batch, masks, biases and soft caps. Inputs are views of ``(B, S, H, D)``,
FlashAttention's layout. A peer that is not installed or cannot run a case is left out, and the report says so.

Ours must be at least as fast as each peer. The peers' backward sums in any order, so ours with ``deterministic=False``
runs beside the default in the same rounds, and is what is held to the peers there. What the default may cost is a target
of its own: the geometric mean over the 24 shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import headwise as hw
from headwise.benchmark.case import BenchCase, BenchSuite, Contender, Direction
from headwise.benchmark.requirements import AtLeast, Mean
from headwise.benchmark.suites import hopper_features
from headwise.benchmark.suites.attention import BOTH, PATTERNS, Shape, Visibility, attention_case
from headwise.benchmark.suites.cuda import BF16, TOKENS, attention_table, random_packed_case, table_shape
from headwise.benchmark.suites.peers import CUDNN, FA4, any_order_contender, fa4_peer, sdpa_peers
from headwise.benchmark.timing import Plan

PEERS = (*sdpa_peers(CUDNN), fa4_peer())
_TABLE = tuple(f"attention D {head_dim}" for head_dim in (64, 128, 256))
MEANS = (
    Mean("24 shapes", "forward", _TABLE, (CUDNN, FA4), 1.05),
    Mean("24 shapes", "backward", _TABLE, (CUDNN, FA4), 1.05, any_order=True),
    Mean("24 shapes", "backward", _TABLE, (CUDNN, FA4), 0.95),
)


class HeadDims(NamedTuple):
    keys: int
    values: int
    patterns: tuple[str, ...]


# 192/128 is latent attention in training and prefill.
HEAD_DIMS = (HeadDims(192, 128, ("causal", "full")), HeadDims(80, 80, ("full",)), HeadDims(96, 96, ("causal",)))


def cases(quick: bool) -> list[BenchCase]:
    shrink = 64 if quick else 1
    return [
        *_dense(shrink),
        *_head_dims(shrink),
        *_grouped(shrink),
        *_window(shrink),
        *_packed(shrink),
        *hopper_features.cases(shrink),
        *hopper_features.softcap_cases(shrink),
    ]


def _attention(
    name: str,
    group: str,
    shape: Shape,
    direction: Direction,
    visibility: Visibility,
    peers: tuple[Contender, ...] = PEERS,
    value_dim: int | None = None,
) -> BenchCase:
    beside, required = _beside(peers, direction, hw.attention)
    return attention_case(
        name, group, shape, direction, visibility, peers=beside, requirements=required, dtype=BF16, heads_inside=True,
        value_dim=value_dim,
    )  # fmt: skip


def _beside(
    peers: tuple[Contender, ...], direction: Direction, call: Callable[..., Any]
) -> tuple[tuple[Contender, ...], tuple[AtLeast, ...]]:
    """The contenders of a case, ours in any order among them, and what is required."""
    backward = direction != "forward"
    required = tuple(AtLeast(1.0, peer.name, any_order=backward) for peer in peers)
    return (any_order_contender(call), *peers) if backward else peers, required


def _head_dims(shrink: int) -> list[BenchCase]:
    built: list[BenchCase] = []
    for direction, dims, length in product(BOTH, HEAD_DIMS, (2048, 4096, 8192)):
        shape = Shape(max(1, TOKENS // length // shrink), 16, 16, length // shrink, dims.keys)
        named = f"D {dims.keys}" + (f" Dv {dims.values}" if dims.values != dims.keys else "")
        for pattern in dims.patterns:
            name = f"{pattern} S {shape.length} {named}"
            case = _attention(name, "head dims", shape, direction, PATTERNS[pattern], value_dim=dims.values)
            built.append(case)
    return built


def _dense(shrink: int) -> list[BenchCase]:
    return [_attention(*row) for row in attention_table(shrink)]


def _grouped(shrink: int) -> list[BenchCase]:
    built: list[BenchCase] = []
    for direction, pattern, length in product(BOTH, PATTERNS, (2048, 8192)):
        shape = Shape(max(1, TOKENS // length // shrink), 32, 8, length // shrink, 128)
        name = f"{pattern} S {shape.length} D 128 Hq 32 Hk 8"
        built.append(_attention(name, "grouped heads", shape, direction, PATTERNS[pattern]))
    return built


def _window(shrink: int) -> list[BenchCase]:
    length, width = TOKENS // shrink, 1024 // shrink
    shape = table_shape(length, 128, 1)._replace(batch=1)
    visibility = Visibility(causal=True, window=(width - 1, 0))
    name = f"window {width} S {length} D 128"
    return [_attention(name, "window", shape, direction, visibility, peers=(fa4_peer(),)) for direction in BOTH]


def _packed(shrink: int) -> list[BenchCase]:
    return [
        random_packed_case(shrink, direction, *_beside((fa4_peer(packed=True),), direction, hw.attention_varlen))
        for direction in BOTH
    ]


# Seconds per case: a GPU that is lent for minutes can run them all.
PLAN = Plan(repeats=10, sample_s=0.004, most_calls=20)
SUITE = BenchSuite(name="hopper", device="cuda", dtype=BF16, cases=cases, backend="triton", plan=PLAN, means=MEANS)

"""The suite for Hopper GPUs: bfloat16 attention against the fastest peers, cuDNN and FlashAttention-4.

24 shapes with 16384 tokens and heads · head dim = 2048, forward and backward, in ten shuffled rounds; then grouped
heads, a window, a packed batch, masks and biases. Inputs are views of ``(B, S, H, D)``, FlashAttention's layout. A peer
that is not installed or cannot run a case is left out, and the report says so. Ours must be at least as fast as each peer.
"""

from __future__ import annotations

from itertools import product

from headwise.benchmark.case import BenchCase, BenchSuite, Contender, Direction
from headwise.benchmark.requirements import AtLeast
from headwise.benchmark.suites import hopper_features
from headwise.benchmark.suites.attention import BOTH, PATTERNS, Shape, Visibility, attention_case
from headwise.benchmark.suites.cuda import BF16, TOKENS, attention_table, random_packed_case, table_shape
from headwise.benchmark.suites.peers import CUDNN, FA4, fa4_peer, sdpa_peers
from headwise.benchmark.timing import Plan

PEERS = (*sdpa_peers(CUDNN), fa4_peer())


def cases(quick: bool) -> list[BenchCase]:
    shrink = 64 if quick else 1
    return [*_dense(shrink), *_grouped(shrink), *_window(shrink), *_packed(shrink), *hopper_features.cases(shrink)]


def _attention(
    name: str,
    group: str,
    shape: Shape,
    direction: Direction,
    visibility: Visibility,
    peers: tuple[Contender, ...] = PEERS,
) -> BenchCase:
    required = tuple(AtLeast(1.0, peer.name) for peer in peers)
    return attention_case(
        name, group, shape, direction, visibility, peers=peers, requirements=required, dtype=BF16, heads_inside=True
    )


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
    peer, required = fa4_peer(packed=True), AtLeast(1.0, FA4)
    return [random_packed_case(shrink, direction, peer, required) for direction in BOTH]


# Seconds per case: a GPU that is lent for minutes can run them all.
PLAN = Plan(repeats=10, sample_s=0.004, most_calls=20)
SUITE = BenchSuite(name="hopper", device="cuda", dtype=BF16, cases=cases, backend="triton", plan=PLAN)

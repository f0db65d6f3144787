"""The suite of Hopper GPUs: attention in bfloat16 against the fastest there is, cuDNN and FlashAttention-4.

24 shapes of 16384 tokens and 2048 = heads · head dim, forward and backward, in ten shuffled rounds; then grouped heads, a
window and a packed batch. Inputs are views of ``(B, S, H, D)``, the layout FlashAttention takes. A peer that is not
installed, or does not run a case, is left out, and the report says so. At least as fast as the better of two is at least as
fast as each.
"""

from __future__ import annotations

from itertools import product

from headwise.benchmark.case import AtLeast, BenchCase, BenchSuite
from headwise.benchmark.suites.attention import Shape, Visibility, attention_case, packed_case
from headwise.benchmark.suites.cuda import (
    BF16,
    BOTH,
    MODEL_WIDTH,
    PACKED_SEQUENCES,
    PACKED_TOKENS,
    PATTERNS,
    TOKENS,
    random_lengths,
)
from headwise.benchmark.suites.peers import CUDNN, FA4, fa4_peer, sdpa_peers
from headwise.benchmark.timing import Plan

AS_FAST = (AtLeast(1.0, CUDNN), AtLeast(1.0, FA4))


def cases(quick: bool) -> list[BenchCase]:
    shrink = 64 if quick else 1
    return [*_dense(shrink), *_grouped(shrink), *_window(shrink), *_packed(shrink)]


def _dense(shrink: int) -> list[BenchCase]:
    return [
        attention_case(
            f"{pattern} S {length // shrink}",
            f"attention D {head_dim}",
            _shape(length, head_dim, shrink),
            direction,
            PATTERNS[pattern],
            peers=(*sdpa_peers(CUDNN), fa4_peer()),
            requirements=AS_FAST,
            dtype=BF16,
            heads_inside=True,
        )
        for head_dim, direction, pattern, length in product((64, 128, 256), BOTH, PATTERNS, (512, 2048, 8192, 16384))
    ]


def _grouped(shrink: int) -> list[BenchCase]:
    return [
        attention_case(
            f"{pattern} S {length // shrink} D 128 Hq 32 Hk 8",
            "grouped heads",
            Shape(max(1, TOKENS // length // shrink), 32, 8, length // shrink, 128),
            direction,
            PATTERNS[pattern],
            peers=(*sdpa_peers(CUDNN), fa4_peer()),
            requirements=AS_FAST,
            dtype=BF16,
            heads_inside=True,
        )
        for direction, pattern, length in product(BOTH, PATTERNS, (2048, 8192))
    ]


def _window(shrink: int) -> list[BenchCase]:
    length, width = TOKENS // shrink, 1024 // shrink
    return [
        attention_case(
            f"window {width} S {length} D 128",
            "window",
            _shape(length, 128, 1)._replace(batch=1),
            direction,
            Visibility(causal=True, window=(width - 1, 0)),
            peers=(fa4_peer(),),
            requirements=(AtLeast(1.0, FA4),),
            dtype=BF16,
            heads_inside=True,
        )
        for direction in BOTH
    ]


def _packed(shrink: int) -> list[BenchCase]:
    lengths = random_lengths(PACKED_SEQUENCES, PACKED_TOKENS // shrink)
    return [
        packed_case(
            f"{PACKED_SEQUENCES} random lengths causal T {sum(lengths)} D 128 H 16",
            "packed",
            lengths,
            16,
            128,
            direction,
            causal=True,
            peers=(fa4_peer(packed=True),),
            requirements=(AtLeast(1.0, FA4),),
            dtype=BF16,
        )
        for direction in BOTH
    ]


def _shape(length: int, head_dim: int, shrink: int) -> Shape:
    heads = MODEL_WIDTH // head_dim
    return Shape(max(1, TOKENS // length // shrink), heads, heads, length // shrink, head_dim)


SUITE = BenchSuite(
    name="hopper",
    device="cuda",
    dtype=BF16,
    cases=cases,
    backend="triton",
    plan=Plan(
        repeats=10, sample_s=0.004, most_calls=20
    ),  # seconds per case, so that a machine lent for minutes can do all
)

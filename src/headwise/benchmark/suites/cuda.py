"""The suite of CUDA and ROCm GPUs: bfloat16 but where a case says otherwise. The targets are stated for one H200.

A group takes at most a few minutes there, so that a machine that is lent for minutes can do one (`--group`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import cast

import torch
from torch import Tensor

import headwise as hw
from headwise.benchmark.case import (
    AtLeast,
    Bandwidth,
    BenchCase,
    BenchSuite,
    Contender,
    Direction,
    OwnLeaves,
    PeakMemory,
    Requirement,
    SameRate,
    TimeLimit,
    Within,
)
from headwise.benchmark.suites import training
from headwise.benchmark.suites.attention import (
    QKV,
    SDPA,
    Shape,
    Visibility,
    attention_bytes,
    attention_case,
    attention_flops,
    packed_case,
    sdpa,
)
from headwise.benchmark.suites.decode import CONTIGUOUS, Cache, contiguous_yardstick, decode_case
from headwise.benchmark.suites.peers import (
    CUDNN,
    EFFICIENT,
    FA2,
    FLEX,
    MATH,
    flex_peer,
    sdpa_decode_peers,
    sdpa_peers,
)
from headwise.benchmark.suites.training import TORCH, Setting
from headwise.benchmark.timing import Plan, Timed
from headwise.testing import Arguments

BF16 = torch.bfloat16
BOTH: tuple[Direction, Direction] = ("forward", "backward")
PATTERNS = {"full": Visibility(), "causal": Visibility(causal=True)}

TOKENS, MODEL_WIDTH = 16384, 2048  # B·S and H·D of the attention table
DENSE, CAUSAL = "our dense", "our causal"

# Terabytes per second, of the bytes that must move; rows of other widths may be 15 % slower. Softmax forward moves what
# rms_norm forward moves, and is held to the same rate.
RATES = {
    ("rms_norm", "forward"): 3.85,
    ("rms_norm", "backward"): 3.6,
    ("softmax", "forward"): 3.85,
    ("softmax", "backward"): 4.15,
}
OTHER_WIDTHS = 0.85
WIDTHS = tuple(1 << n for n in range(7, 19))  # 128 … 262144
ELEMENTS = 1 << 26  # of a tensor at each of these widths
FEW_ROWS = ((64, 262144), (256, 65536))

PACKED_SEQUENCES, PACKED_TOKENS = 64, 32768


def cases(quick: bool) -> list[BenchCase]:
    shrink = 64 if quick else 1
    return [
        *_attention(shrink),
        *_attention_float32(shrink),
        *_packed(shrink),
        *_window(shrink),
        *_decode(shrink),
        *_rows(shrink),
        *_training_ops(shrink),
        *_memory(shrink),
        *_host_overhead(),
    ]


def _attention(shrink: int) -> list[BenchCase]:
    return [
        attention_case(
            f"{pattern} S {length // shrink}",
            f"attention D {head_dim}",
            _shape(length, head_dim, shrink),
            direction,
            PATTERNS[pattern],
            peers=(*sdpa_peers(FA2, CUDNN), flex_peer()),
            requirements=(AtLeast(1.3, FA2), AtLeast(1.0, FLEX)),
            dtype=BF16,
        )
        for head_dim, direction, pattern, length in product((64, 128, 256), BOTH, PATTERNS, (512, 2048, 8192, 16384))
    ]


def _attention_float32(shrink: int) -> list[BenchCase]:
    """At least 1.5 times as fast as the better of two is the same as 1.5 times as fast as each."""
    return [
        attention_case(
            f"{pattern} S {length // shrink} D {head_dim}",
            "attention float32",
            _shape(length, head_dim, shrink),
            direction,
            PATTERNS[pattern],
            peers=sdpa_peers(EFFICIENT, MATH),
            requirements=(AtLeast(1.5, EFFICIENT), AtLeast(1.5, MATH)),
            dtype=torch.float32,
        )
        for direction, pattern, head_dim, length in product(BOTH, PATTERNS, (64, 128), (2048, 8192))
    ]


def _shape(length: int, head_dim: int, shrink: int) -> Shape:
    heads = MODEL_WIDTH // head_dim
    return Shape(max(1, TOKENS // length // shrink), heads, heads, length // shrink, head_dim)


def random_lengths(sequences: int, total: int) -> list[int]:
    """Lengths from 1 to about twice their mean, adding up to ``total``; the same ones every time."""
    draw = random.Random(0)
    weights = [draw.uniform(0.0, 2.0) for _ in range(sequences)]
    spare = total - sequences
    lengths = [1 + int(spare * w / sum(weights)) for w in weights]
    lengths[0] += total - sum(lengths)
    return lengths


def dense_equal(lengths: list[int]) -> tuple[int, int]:
    """Batch and length of the dense causal call that comes nearest to these packed ones in tokens and in work."""
    tokens = sum(lengths)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    length = max(64, round(2 * pairs / tokens / 64) * 64)
    return max(1, round(pairs / (length * (length + 1) / 2))), length


def _packed(shrink: int) -> list[BenchCase]:
    lengths = random_lengths(PACKED_SEQUENCES, PACKED_TOKENS // shrink)
    batch, length = dense_equal(lengths)
    heads, head_dim = 16, 128
    pairs = batch * heads * Visibility(causal=True).pairs(length, length)

    def dense(arguments: Arguments) -> OwnLeaves:
        q, k, v = leaves = tuple(_as_dense(arguments[name], batch, length) for name in QKV)
        return OwnLeaves(lambda: cast(Tensor, hw.attention(q, k, v, causal=True)), leaves)

    return [
        packed_case(
            f"{PACKED_SEQUENCES} random lengths causal T {sum(lengths)} D {head_dim} H {heads}",
            "packed",
            lengths,
            heads,
            head_dim,
            direction,
            causal=True,
            peers=(Contender(DENSE, dense, yardstick=True, flops=attention_flops(pairs, head_dim, direction)),),
            requirements=(SameRate(0.95, DENSE),),
            dtype=BF16,
        )
        for direction in BOTH
    ]


def _window(shrink: int) -> list[BenchCase]:
    length, width = TOKENS // shrink, 1024 // shrink
    shape = _shape(length, 128, 1)._replace(batch=1)

    def causal(arguments: Arguments) -> Callable[[], Tensor]:
        q, k, v = (arguments[name] for name in QKV)
        return lambda: cast(Tensor, hw.attention(q, k, v, causal=True))

    return [
        attention_case(
            f"window {width} S {length} D 128 H {shape.heads}",
            "window",
            shape,
            direction,
            Visibility(window=(width - 1, 0)),
            peers=(Contender(CAUSAL, causal, yardstick=True, flops=_causal_flops(shape, direction)),),
            requirements=(AtLeast(6.0, CAUSAL),),
            dtype=BF16,
        )
        for direction in BOTH
    ]


def _causal_flops(shape: Shape, direction: Direction) -> float:
    pairs = Visibility(causal=True).pairs(shape.length, shape.length)
    return attention_flops(shape.batch * shape.heads * pairs, shape.head_dim, direction)


def _decode(shrink: int) -> list[BenchCase]:
    caches = [Cache(batch, length // shrink) for batch, length in product((1, 8, 64), (4096, 32768))]
    built: list[BenchCase] = []
    ways: dict[str, Timed] = {"decode as CUDA graphs": "graph", "decode as plain calls": "calls"}
    for (group, timed), cache in product(ways.items(), caches):
        required: tuple[Requirement, ...] = (AtLeast(1.0, CUDNN), AtLeast(1.0, FA2))
        if timed == "graph" and cache.batch == 1 and cache.length == 32768:
            required += (Bandwidth(3.2),)
        peers = sdpa_decode_peers(CUDNN, FA2)
        built.append(decode_case(group, cache, timed, BF16, peers=peers, requirements=required))
    for cache in caches:
        required = (Within(1.05, CONTIGUOUS),)
        peers = (contiguous_yardstick(),)
        built.append(
            decode_case("decode paged", cache, "graph", BF16, page_size=64, peers=peers, requirements=required)
        )
    return built


def _rows(shrink: int) -> list[BenchCase]:
    builders = {"rms_norm": training.rms_norm_case, "softmax": training.softmax_case}
    built: list[BenchCase] = []
    for (op, build), direction in product(builders.items(), BOTH):
        rate = RATES[op, direction]
        shapes = {(ELEMENTS // width, width): OTHER_WIDTHS * rate for width in WIDTHS}
        shapes.update(dict.fromkeys(FEW_ROWS, OTHER_WIDTHS * rate))
        shapes[(16384, 4096 if op == "rms_norm" else 16384)] = rate
        for (rows, width), least in shapes.items():
            setting = Setting(BF16, op, (Bandwidth(least),))
            built.append(build(max(1, rows // shrink), width, direction, setting))
    return built


def _training_ops(shrink: int) -> list[BenchCase]:
    def setting(*required: Requirement, dtype: torch.dtype = BF16) -> Setting:
        return Setting(dtype, requirements=required)

    ids, entries, side = 16384 // shrink, 131072 // shrink, 16384 // shrink
    single = Setting(torch.float32, "training ops float32", (Bandwidth(3.95),))
    return [
        training.transpose_case(side, 16384, setting(Bandwidth(3.95))),
        training.transpose_case(side, 16384, single),
        training.cross_entropy_case(8192 // shrink, 131072, setting(Bandwidth(3.2)), fused=True),
        training.cross_entropy_case(8192 // shrink, 131072, setting(AtLeast(1.0, TORCH))),
        training.embedding_case(ids, entries, 4096, "forward", setting()),
        training.embedding_case(ids, entries, 4096, "backward", setting(AtLeast(2.0, TORCH))),
        training.embedding_case(ids, entries, 4096, "backward", setting(AtLeast(1.0, TORCH)), one_id=True),
    ]


def _memory(shrink: int) -> list[BenchCase]:
    shape = Shape(1, 16, 16, 131072 // shrink, 128)
    gradients = 3 * attention_bytes(shape, "forward", BF16) / 4  # q, k, v and out are of one size
    limit = int(gradients + 2e9)
    return [
        attention_case(
            f"causal S {shape.length} D 128 H 16",
            "memory",
            shape,
            "backward",
            Visibility(causal=True),
            requirements=(PeakMemory(limit, "2 GB beyond the three gradients"),),
            dtype=BF16,
        )
    ]


def _host_overhead() -> list[BenchCase]:
    limit = (TimeLimit(25.0),)
    setting = Setting(BF16, "host overhead", limit, "host")
    return [
        attention_case(
            "attention B 1 H 16 S 128 D 64",
            "host overhead",
            Shape(1, 16, 16, 128, 64),
            "forward",
            Visibility(),
            peers=(Contender(SDPA, sdpa),),
            requirements=limit,
            dtype=BF16,
            timed="host",
        ),
        training.softmax_case(64, 1024, "forward", setting),
        training.rms_norm_case(64, 1024, "forward", setting),
    ]


def _as_dense(x: Tensor, batch: int, length: int) -> Tensor:
    """Packed ``(T, H, D)`` as ``(batch, H, length, D)``: its first tokens, with the first ones again if it has too few."""
    tokens = batch * length
    enough = x.detach() if x.shape[0] >= tokens else torch.cat([x.detach(), x.detach()[: tokens - x.shape[0]]])
    dense = enough[:tokens].reshape(batch, length, *x.shape[1:]).transpose(1, 2)
    return dense.requires_grad_(x.requires_grad)


SUITE = BenchSuite(
    name="cuda",
    device="cuda",
    dtype=BF16,
    cases=cases,
    backend="triton",
    plan=Plan(target_s=3.0, sample_s=0.005, most_calls=100),
)

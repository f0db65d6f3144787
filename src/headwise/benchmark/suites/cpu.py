"""The CPU suite: float32, two threads, against PyTorch's own attention and ops."""

from __future__ import annotations

from itertools import product

import torch

from headwise.benchmark.case import BenchCase, BenchSuite, Contender, Direction, our_yardstick
from headwise.benchmark.requirements import AtLeast, PeakMemory, Within
from headwise.benchmark.suites import cpu_features, dropout, linear_loss, pointwise, training
from headwise.benchmark.suites.attention import (
    BOTH,
    PATTERNS,
    PLAIN,
    QKV,
    SDPA,
    Shape,
    Visibility,
    attention_case,
    packed_case,
    plain,
    sdpa,
    sdpa_packed,
)
from headwise.benchmark.suites.norms import cpu_norm_cases
from headwise.testing import Arguments, Maker

# Fewer heads for longer sequences: every call takes between 0.05 s and 2 s on two cores.
HEADS = {1024: 8, 2048: 8, 4096: 4, 8192: 2}
DOCUMENTS = 16
GIB = 1 << 30


def cases(quick: bool) -> list[BenchCase]:
    shrink = 32 if quick else 1
    return [
        *_plain_attention(shrink),
        *_grouped_heads(shrink),
        *_window(shrink),
        *_packed(shrink),
        *_features(shrink),
        *cpu_features.cases(shrink),
        *dropout.on_cpu(shrink),
        *_long_window(shrink),
        *_cross_entropy(shrink),
        *_linear_loss(shrink),
        *_training_ops(shrink),
        *cpu_norm_cases(shrink),
    ]


def _against_sdpa(
    name: str, group: str, shape: Shape, direction: Direction, visibility: Visibility, ratio: float = 1.0
) -> BenchCase:
    peers, requirements = (Contender(SDPA, sdpa),), (AtLeast(ratio, SDPA),)
    return attention_case(name, group, shape, direction, visibility, peers=peers, requirements=requirements)


def _plain_attention(shrink: int) -> list[BenchCase]:
    built: list[BenchCase] = []
    for pattern, head_dim, (length, heads), direction in product(PATTERNS, (64, 128), HEADS.items(), BOTH):
        shape = Shape(1, heads, heads, length // shrink, head_dim)
        name = f"S {shape.length} D {head_dim} H {heads}"
        built.append(_against_sdpa(name, f"attention {pattern}", shape, direction, PATTERNS[pattern]))
    return built


def _grouped_heads(shrink: int) -> list[BenchCase]:
    shape = Shape(1, 8, 1, 2048 // shrink, 64)
    return [
        _against_sdpa(f"8:1 {pattern} S {shape.length} D 64", "grouped heads", shape, direction, PATTERNS[pattern])
        for pattern, direction in product(PATTERNS, BOTH)
    ]


def _window(shrink: int) -> list[BenchCase]:
    length, width = 8192 // shrink, 256 // shrink
    shape, visibility = Shape(1, 2, 2, length, 64), Visibility(window=(width - 1, 0))
    name = f"window {width} S {length} D 64 H 2"
    return [_against_sdpa(name, "window", shape, direction, visibility, ratio=3.0) for direction in BOTH]


def document_lengths(total: int) -> list[int]:
    """Uneven lengths that add up to ``total``: the longest document is 31 times the shortest."""
    weights = [2 * i + 1 for i in range(DOCUMENTS)]
    order = [weights[(7 * i) % DOCUMENTS] for i in range(DOCUMENTS)]  # mixes long and short documents
    lengths = [total * w // sum(weights) for w in order]
    lengths[0] += total - sum(lengths)
    return lengths


def _packed(shrink: int) -> list[BenchCase]:
    tokens = 8192 // shrink
    return [
        packed_case(
            f"{DOCUMENTS} documents {pattern} T {tokens} D 64 H 4",
            "packed",
            document_lengths(tokens),
            heads=4,
            head_dim=64,
            direction=direction,
            causal=PATTERNS[pattern].causal,
            peers=(Contender(SDPA, sdpa_packed),),
            requirements=(AtLeast(2.0, SDPA),),
        )
        for pattern, direction in product(PATTERNS, BOTH)
    ]


def _features(shrink: int) -> list[BenchCase]:
    length = 2048 // shrink
    shape = Shape(2, 4, 4, length, 64)

    def softcap(maker: Maker) -> Arguments:
        return {"softcap": 20.0}

    def sink(maker: Maker) -> Arguments:
        return {"sink": maker.normal(shape.heads)}

    def lengths(maker: Maker) -> Arguments:
        # Nearly full, so that the work is close to that of the plain call.
        return {"kv_lengths": maker.tensor([length - 7, length - length // 8], torch.int32)}

    features = {"softcap": (softcap, QKV), "sink": (sink, (*QKV, "sink")), "kv_lengths": (lengths, QKV)}
    return [
        attention_case(
            f"{feature} {pattern} S {length} D 64",
            "features",
            shape,
            direction,
            PATTERNS[pattern],
            features=features[feature][0],
            differentiable=features[feature][1],
            peers=(our_yardstick(PLAIN, plain),),
            requirements=(Within(1.5, PLAIN),),
        )
        for feature, pattern, direction in product(features, PATTERNS, BOTH)
    ]


def _long_window(shrink: int) -> list[BenchCase]:
    length, width = 65536 // shrink, 1024 // shrink
    return [
        attention_case(
            f"window {width} S {length} D 64 H 4",
            "long sequence",
            Shape(1, 4, 4, length, 64),
            "forward+backward",
            Visibility(window=(width - 1, 0)),
            requirements=(PeakMemory(GIB, "1 GiB extra memory"),),
        )
    ]


def _cross_entropy(shrink: int) -> list[BenchCase]:
    rows, vocabulary = 2048 // shrink, 131072 // shrink
    # The gradient is the only buffer as large as the logits; 2 % more is for the rows in progress.
    limit = int(1.02 * 4 * rows * vocabulary)
    memory = PeakMemory(limit, "one logits buffer (+2 % for working rows)")
    setting = training.Setting(group="cross entropy", requirements=(AtLeast(1.0, training.TORCH), memory))
    return [training.cross_entropy_case(rows, vocabulary, setting)]


def _linear_loss(shrink: int) -> list[BenchCase]:
    sizes = (1024 // shrink, 512 // shrink, 32000 // shrink)
    # Logits of a chunk, the blocks in progress; all logits are 125 MiB, and PyTorch holds them three times.
    memory = linear_loss.beside_gradients(*sizes, torch.float32, 96 << 20)
    required = (AtLeast(1.0, training.TORCH), memory)
    return [
        linear_loss.linear_loss_case(*sizes, torch.float32, peers=(linear_loss.pytorch_peer(),), requirements=required)
    ]


def _training_ops(shrink: int) -> list[BenchCase]:
    built: list[BenchCase] = []
    for direction in BOTH:
        built += [
            training.rms_norm_case(8192 // shrink, 2048, direction),
            training.embedding_case(16384 // shrink, 32768 // shrink, 512, direction),
        ]
        level = training.Setting(requirements=(AtLeast(1.0, training.TORCH),))
        built += [
            training.softmax_case(4096 // shrink, 4096, direction, level if direction == "forward" else training.PLAIN),
            pointwise.glu_case(2048 // shrink, 5632, direction, level),
            pointwise.rope_case(pointwise.RopeShape(2, 32, 8, 1024 // shrink, 128), direction, level),
        ]
    return [*built, training.transpose_case(4096 // shrink, 4096)]


SUITE = BenchSuite(name="cpu", device="cpu", dtype=torch.float32, cases=cases, backend="cpu", threads=2)

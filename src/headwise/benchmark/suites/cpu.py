"""The CPU suite: float32, two threads, against PyTorch's own attention and ops."""

from __future__ import annotations

from itertools import product

import torch

from headwise.benchmark.case import AtLeast, BenchCase, BenchSuite, Contender, Direction, PeakMemory, Within
from headwise.benchmark.suites import training
from headwise.benchmark.suites.attention import (
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
from headwise.testing import Arguments, Maker

BOTH: tuple[Direction, ...] = ("forward", "backward")
PATTERNS = {"full": Visibility(), "causal": Visibility(causal=True)}
# Few heads where sequences are long: every call takes between 0.05 s and 2 s on two cores.
HEADS = {1024: 8, 2048: 8, 4096: 4, 8192: 2}
SDPA_PEER = (Contender(SDPA, sdpa),)
PLAIN_YARDSTICK = (Contender(PLAIN, plain, yardstick=True),)
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
        *_long_window(shrink),
        *_cross_entropy(shrink),
        *_training_ops(shrink),
    ]


def _plain_attention(shrink: int) -> list[BenchCase]:
    return [
        attention_case(
            f"S {length // shrink} D {head_dim} H {heads}",
            f"attention {pattern}",
            Shape(1, heads, heads, length // shrink, head_dim),
            direction,
            PATTERNS[pattern],
            peers=SDPA_PEER,
            requirements=(AtLeast(1.0, SDPA),),
        )
        for pattern, head_dim, (length, heads), direction in product(PATTERNS, (64, 128), HEADS.items(), BOTH)
    ]


def _grouped_heads(shrink: int) -> list[BenchCase]:
    length = 2048 // shrink
    return [
        attention_case(
            f"8:1 {pattern} S {length} D 64",
            "grouped heads",
            Shape(1, 8, 1, length, 64),
            direction,
            PATTERNS[pattern],
            peers=SDPA_PEER,
            requirements=(AtLeast(1.0, SDPA),),
        )
        for pattern, direction in product(PATTERNS, BOTH)
    ]


def _window(shrink: int) -> list[BenchCase]:
    length, width = 8192 // shrink, 256 // shrink
    return [
        attention_case(
            f"window {width} S {length} D 64 H 2",
            "window",
            Shape(1, 2, 2, length, 64),
            direction,
            Visibility(window=(width - 1, 0)),
            peers=SDPA_PEER,
            requirements=(AtLeast(3.0, SDPA),),
        )
        for direction in BOTH
    ]


def document_lengths(total: int) -> list[int]:
    """Uneven lengths that add up to ``total``: the longest document is thirty-one times the shortest."""
    weights = [2 * i + 1 for i in range(DOCUMENTS)]
    order = [weights[(7 * i) % DOCUMENTS] for i in range(DOCUMENTS)]  # long and short ones mixed
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
        # Nearly full, so that there is little less to do than in the plain call.
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
            peers=PLAIN_YARDSTICK,
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
    # The gradient is the one logits-sized buffer. A fiftieth on top is room for the rows being worked on.
    limit = int(1.02 * 4 * rows * vocabulary)
    memory = PeakMemory(limit, "one logits buffer (+2 % for working rows)")
    setting = training.Setting(group="cross entropy", requirements=(AtLeast(1.0, training.TORCH), memory))
    return [training.cross_entropy_case(rows, vocabulary, setting)]


def _training_ops(shrink: int) -> list[BenchCase]:
    built: list[BenchCase] = []
    for direction in BOTH:
        built += [
            training.rms_norm_case(8192 // shrink, 2048, direction),
            training.softmax_case(4096 // shrink, 4096, direction),
            training.embedding_case(16384 // shrink, 32768 // shrink, 512, direction),
        ]
    return [*built, training.transpose_case(4096 // shrink, 4096)]


SUITE = BenchSuite(name="cpu", device="cpu", dtype=torch.float32, cases=cases, backend="cpu", threads=2)

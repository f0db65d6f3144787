"""The suite for CUDA and ROCm GPUs: bfloat16 unless a case says otherwise. The targets are for one H200.

One group (`--group`) takes at most a few minutes there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

import headwise as hw
from headwise.benchmark.case import BenchCase, BenchSuite, Contender, Direction, OwnLeaves, our_yardstick
from headwise.benchmark.requirements import (
    AtLeast,
    Bandwidth,
    FlopRate,
    PeakMemory,
    Requirement,
    SameRate,
    TimeLimit,
    Within,
)
from headwise.benchmark.suites import cold_start, dropout, linear_loss, pointwise, training
from headwise.benchmark.suites.attention import (
    BOTH,
    PATTERNS,
    QKV,
    Shape,
    Visibility,
    attention_bytes,
    attention_case,
    attention_flops,
    packed_case,
)
from headwise.benchmark.suites.decode import (
    CONTIGUOUS,
    LATENT,
    Cache,
    contiguous_yardstick,
    decode_case,
    latent_case,
)
from headwise.benchmark.suites.host import host_cases
from headwise.benchmark.suites.norms import cuda_norm_cases
from headwise.benchmark.suites.peers import (
    CUDNN,
    EFFICIENT,
    FA2,
    FLEX,
    MATH,
    flash_mla_peer,
    flex_peer,
    sdpa_decode_peers,
    sdpa_peers,
)
from headwise.benchmark.suites.quack_peers import QUACK, cross_entropy_peer, rms_norm_peer, softmax_peer
from headwise.benchmark.suites.training import TORCH, Setting
from headwise.benchmark.timing import Plan, Timed
from headwise.testing import Arguments

BF16 = torch.bfloat16
TOKENS, MODEL_WIDTH = 16384, 2048  # B·S and H·D of the attention table
DENSE, CAUSAL = "our dense", "our causal"

# Required TB/s, counting the bytes that must move; other row widths may be 15 % slower. Softmax forward moves as much
# as rms_norm forward and has the same target.
RATES = {
    ("rms_norm", "forward"): 3.85,
    ("rms_norm", "backward"): 3.6,
    ("softmax", "forward"): 3.85,
    ("softmax", "backward"): 4.15,
}
OTHER_WIDTHS = 0.85
WIDTHS = tuple(1 << n for n in range(7, 19))  # 128 … 262144
ELEMENTS = 1 << 26  # per tensor, at every width
FEW_ROWS = ((64, 262144), (256, 65536))

PACKED_SEQUENCES, PACKED_TOKENS, PACKED_HEADS, PACKED_HEAD_DIM = 64, 32768, 16, 128


def cases(quick: bool) -> list[BenchCase]:
    shrink = 64 if quick else 1
    return [
        *_attention(shrink),
        *_attention_float32(shrink),
        *dropout.on_cuda(table_shape, shrink),
        *_packed(shrink),
        *_window(shrink),
        *_decode(shrink),
        *_latent(shrink),
        *_rows(shrink),
        *_through_autograd(shrink),
        *cuda_norm_cases(shrink, BF16),
        *_training_ops(shrink),
        *_pointwise(shrink),
        *_linear_loss(shrink),
        *_memory(shrink),
        *host_cases(BF16),
        *cold_start.cases(shrink),
    ]


def _attention(shrink: int) -> list[BenchCase]:
    peers = (*sdpa_peers(FA2, CUDNN), flex_peer())
    requirements = (AtLeast(1.3, FA2), AtLeast(1.0, FLEX))
    return [attention_case(*row, peers=peers, requirements=requirements, dtype=BF16) for row in attention_table(shrink)]


def attention_table(shrink: int) -> Iterator[tuple[str, str, Shape, Direction, Visibility]]:
    """Name, group, shape, direction and visibility of every case that this suite shares with ``hopper``."""
    for head_dim, direction, pattern, length in product((64, 128, 256), BOTH, PATTERNS, (512, 2048, 8192, 16384)):
        shape = table_shape(length, head_dim, shrink)
        yield f"{pattern} S {shape.length}", f"attention D {head_dim}", shape, direction, PATTERNS[pattern]


def _attention_float32(shrink: int) -> list[BenchCase]:
    """1.5 times as fast as the faster of two peers: the same as 1.5 times as fast as each."""
    return [
        attention_case(
            f"{pattern} S {length // shrink} D {head_dim}",
            "attention float32",
            table_shape(length, head_dim, shrink),
            direction,
            PATTERNS[pattern],
            peers=sdpa_peers(EFFICIENT, MATH),
            requirements=(AtLeast(1.5, EFFICIENT), AtLeast(1.5, MATH)),
            dtype=torch.float32,
        )
        for direction, pattern, head_dim, length in product(BOTH, PATTERNS, (64, 128), (2048, 8192))
    ]


def table_shape(length: int, head_dim: int, shrink: int) -> Shape:
    heads = MODEL_WIDTH // head_dim
    return Shape(max(1, TOKENS // length // shrink), heads, heads, length // shrink, head_dim)


def random_lengths(sequences: int, total: int) -> list[int]:
    """Pseudorandom lengths from 1 to about twice their mean that add up to ``total``; the same in every run."""
    draw = random.Random(0)
    weights = [draw.uniform(0.0, 2.0) for _ in range(sequences)]
    spare = total - sequences
    lengths = [1 + int(spare * w / sum(weights)) for w in weights]
    lengths[0] += total - sum(lengths)
    return lengths


def dense_equal(lengths: list[int]) -> tuple[int, int]:
    """Batch and length of the dense causal call that is closest to this packed batch in tokens and work."""
    tokens = sum(lengths)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    length = max(64, round(2 * pairs / tokens / 64) * 64)
    return max(1, round(pairs / (length * (length + 1) / 2))), length


def _packed(shrink: int) -> list[BenchCase]:
    lengths = random_lengths(PACKED_SEQUENCES, PACKED_TOKENS // shrink)
    batch, length = dense_equal(lengths)
    shape = Shape(batch, PACKED_HEADS, PACKED_HEADS, length, PACKED_HEAD_DIM)

    def dense(arguments: Arguments) -> OwnLeaves:
        q, k, v = leaves = tuple(_as_dense(arguments[name], batch, length) for name in QKV)
        return OwnLeaves(lambda: hw.attention(q, k, v, causal=True), leaves)

    return [
        random_packed_case(
            shrink,
            direction,
            (our_yardstick(DENSE, dense, flops=_causal_flops(shape, direction)),),
            (SameRate(0.95, DENSE),),
        )
        for direction in BOTH
    ]


def random_packed_case(
    shrink: int, direction: Direction, peers: tuple[Contender, ...], requirements: tuple[Requirement, ...]
) -> BenchCase:
    lengths = random_lengths(PACKED_SEQUENCES, PACKED_TOKENS // shrink)
    return packed_case(
        f"{len(lengths)} random lengths causal T {sum(lengths)} D {PACKED_HEAD_DIM} H {PACKED_HEADS}",
        "packed",
        lengths,
        PACKED_HEADS,
        PACKED_HEAD_DIM,
        direction,
        causal=True,
        peers=peers,
        requirements=requirements,
        dtype=BF16,
    )


def _window(shrink: int) -> list[BenchCase]:
    length, width = TOKENS // shrink, 1024 // shrink
    shape = table_shape(length, 128, 1)._replace(batch=1)

    def causal(arguments: Arguments) -> Callable[[], Tensor]:
        q, k, v = (arguments[name] for name in QKV)
        return lambda: hw.attention(q, k, v, causal=True)

    return [
        attention_case(
            f"window {width} S {length} D 128 H {shape.heads}",
            "window",
            shape,
            direction,
            Visibility(window=(width - 1, 0)),
            peers=(our_yardstick(CAUSAL, causal, flops=_causal_flops(shape, direction)),),
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


def _latent(shrink: int) -> list[BenchCase]:
    """16 heads wait for memory, 128 for the tensor cores."""
    needed: dict[int, Requirement] = {16: Bandwidth(2.8), 128: FlopRate(450.0)}
    built: list[BenchCase] = []
    for (heads, required), page_size in product(needed.items(), (None, 64)):
        cache = Cache(max(1, 32 // shrink), 32768 // shrink, heads, 1, LATENT)
        peers = (flash_mla_peer(),)
        case = latent_case(
            "latent decode", cache, "graph", BF16, page_size=page_size, peers=peers, requirements=(required,)
        )
        built.append(case)
    return built


def _rows(shrink: int) -> list[BenchCase]:
    builders = {
        "rms_norm": (training.rms_norm_case, rms_norm_peer(training.RMS_EPS)),
        "softmax": (training.softmax_case, softmax_peer()),
    }
    built: list[BenchCase] = []
    for (op, (build, quack)), direction in product(builders.items(), BOTH):
        rate = RATES[op, direction]
        shapes = {(ELEMENTS // width, width): OTHER_WIDTHS * rate for width in WIDTHS}
        shapes.update(dict.fromkeys(FEW_ROWS, OTHER_WIDTHS * rate))
        shapes[(16384, 4096 if op == "rms_norm" else 16384)] = rate
        for (rows, width), least in shapes.items():
            setting = Setting(BF16, op, (Bandwidth(least),))
            built.append(build(max(1, rows // shrink), width, direction, setting, peers=(quack,)))
    return built


def _through_autograd(shrink: int) -> list[BenchCase]:
    """The backward of rms_norm as a training step calls it: what the host takes counts."""
    setting = Setting(BF16, "rms_norm as plain calls", (Bandwidth(RATES["rms_norm", "backward"]),))
    peers = (rms_norm_peer(training.RMS_EPS),)
    return [replace(training.rms_norm_case(16384 // shrink, 4096, "backward", setting, peers=peers), timed="calls")]


def _training_ops(shrink: int) -> list[BenchCase]:
    def setting(*required: Requirement) -> Setting:
        return Setting(BF16, requirements=required)

    ids, entries, side = 16384 // shrink, 131072 // shrink, 16384 // shrink
    single = Setting(torch.float32, "training ops float32", (Bandwidth(3.95),))
    return [
        training.transpose_case(side, 16384, setting(Bandwidth(3.95))),
        training.transpose_case(side, 16384, single),
        training.cross_entropy_case(8192 // shrink, 131072, setting(Bandwidth(3.2)), fused=True),
        training.cross_entropy_case(
            8192 // shrink, 131072, setting(AtLeast(1.0, TORCH), AtLeast(1.05, QUACK)), peers=(cross_entropy_peer(),)
        ),
        training.embedding_case(ids, entries, 4096, "forward", setting()),
        training.embedding_case(ids, entries, 4096, "backward", setting(AtLeast(2.0, TORCH))),
        training.embedding_case(ids, entries, 4096, "backward", setting(AtLeast(1.0, TORCH)), one_id=True),
    ]


def _pointwise(shrink: int) -> list[BenchCase]:
    """As fast as a copy moves bytes (4.24 TB/s): glu level with the best peers, rope within a tenth."""
    built: list[BenchCase] = []
    for direction in BOTH:
        level = Setting(BF16, requirements=(AtLeast(0.98, pointwise.COMPILED), AtLeast(0.98, pointwise.LIGER)))
        built.append(pointwise.glu_case(16384 // shrink, 14336, direction, level, fast_peers=True))
        shape = pointwise.RopeShape(2, 32, 8, 8192 // shrink, 128)
        near = Setting(BF16, requirements=(Bandwidth(0.9 * 4.24), AtLeast(1.0, pointwise.COMPILED)))
        built.append(pointwise.rope_case(shape, direction, near, fast_peers=True))
    return built


def _linear_loss(shrink: int) -> list[BenchCase]:
    """As fast as a matmul and our cross_entropy, in a sixteenth of their memory beside the gradients."""
    sizes = (8192 // shrink, 4096 // shrink, 131072 // shrink)
    memory = linear_loss.beside_gradients(*sizes, BF16, 256 << 20)
    peers = (linear_loss.pytorch_peer(), linear_loss.compiled_peer(), linear_loss.liger_peer())
    required = (AtLeast(1.0, TORCH), TimeLimit(39_700.0), memory)
    return [linear_loss.linear_loss_case(*sizes, BF16, peers=peers, requirements=required)]


def _memory(shrink: int) -> list[BenchCase]:
    shape = Shape(1, 16, 16, 131072 // shrink, 128)
    gradients = 3 * attention_bytes(shape, "forward", BF16) / 4  # q, k, v and out have the same size
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


def _as_dense(x: Tensor, batch: int, length: int) -> Tensor:
    """Packed ``(T, H, D)`` as ``(batch, H, length, D)``: its first tokens, then again from the start if too few."""
    tokens = batch * length
    enough = x.detach() if x.shape[0] >= tokens else torch.cat([x.detach(), x.detach()[: tokens - x.shape[0]]])
    dense = enough[:tokens].reshape(batch, length, *x.shape[1:]).transpose(1, 2)
    return dense.requires_grad_(x.requires_grad)


PLAN = Plan(target_s=3.0, sample_s=0.005, most_calls=100)
SUITE = BenchSuite(name="cuda", device="cuda", dtype=BF16, cases=cases, backend="triton", plan=PLAN)

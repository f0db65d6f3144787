"""CPU cases of masks and biases, many short sequences, decoding of one key head, and ops too small for many blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.backends.cpu.threads import one_thread
from headwise.benchmark.case import BenchCase, Contender, Direction, our_yardstick
from headwise.benchmark.correctness import WholeCheck, oracle
from headwise.benchmark.requirements import AtLeast, Within
from headwise.benchmark.suites import pointwise, training
from headwise.benchmark.suites.attention import BOTH, QKV, SDPA, attention_flops, ours, packed_case
from headwise.benchmark.suites.decode import Cache, decode_case
from headwise.benchmark.suites.norms import layer_norm_case
from headwise.testing import Arguments, Maker

BATCHED, ONE_THREAD = "our batched call", "one thread"
DOCUMENTS = 8  # of a block-diagonal mask
Scores = Callable[[Maker, int], Arguments]


def cases(shrink: int) -> list[BenchCase]:
    return [*_scores(shrink), *_short_sequences(shrink), _one_key_head(shrink), *_small_ops(shrink)]


def _random(maker: Maker, length: int) -> Arguments:
    return {"mask": maker.coin(length, length, chance=0.7)}


def _blocks(maker: Maker, length: int) -> Arguments:
    document = torch.arange(length, device=maker.device) // max(1, length // DOCUMENTS)
    return {"mask": document[:, None] == document[None, :]}


def _causal(maker: Maker, length: int) -> Arguments:
    return {"mask": torch.ones(length, length, dtype=torch.bool, device=maker.device).tril()}


def _padding(maker: Maker, length: int) -> Arguments:
    return {"mask": (torch.arange(length, device=maker.device) < length - length // 7)[None, None, None]}


def _bias(maker: Maker, length: int) -> Arguments:
    return {"bias": maker.normal(4, length, length)}


def _scores(shrink: int) -> Iterator[BenchCase]:
    """The least: 1.0 × SDPA with the same mask, and 3 × where seven eighths of it are hidden in blocks."""
    kinds: dict[str, tuple[Scores, float]] = {
        "random mask": (_random, 1.0), "block-diagonal mask": (_blocks, 3.0), "causal as a mask": (_causal, 1.0),
        "padding as a mask": (_padding, 1.0), "bias": (_bias, 1.0),
    }  # fmt: skip
    for (name, (scores, least)), head_dim, direction in product(kinds.items(), (64, 128), BOTH):
        yield _case(name, scores, 2048 // shrink, head_dim, direction, least)


def _case(name: str, scores: Scores, length: int, head_dim: int, direction: Direction, least: float) -> BenchCase:
    def make(maker: Maker) -> Arguments:
        q, k, v = (maker.normal(1, 4, length, head_dim) for _ in QKV)
        return {"q": q, "k": k, "v": v, **scores(maker, length)}

    def sdpa(arguments: Arguments) -> Callable[[], Tensor]:
        q, k, v, given = arguments.values()
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=given)

    return BenchCase(
        name=f"{name} S {length} D {head_dim} H 4", group="masks", direction=direction, make=make, ours=ours,
        check=WholeCheck(oracle("attention"), QKV), differentiable=QKV, peers=(Contender(SDPA, sdpa),),
        flops=attention_flops(4 * length * length, head_dim, direction), requirements=(AtLeast(least, SDPA),),
    )  # fmt: skip


def _short_sequences(shrink: int) -> Iterator[BenchCase]:
    count, length = 500 // min(shrink, 10), 16

    def batched(arguments: Arguments) -> Callable[[], Tensor]:
        q, k, v = (arguments[name].unflatten(0, (count, length)).transpose(1, 2) for name in QKV)
        return lambda: hw.attention(q, k, v, causal=arguments["causal"])

    for direction in BOTH:
        yield packed_case(
            f"{count} documents of {length} tokens D 64 H 8", "short sequences", [length] * count, heads=8, head_dim=64,
            direction=direction, causal=True, peers=(our_yardstick(BATCHED, batched),),
            requirements=(Within(1.5, BATCHED),),
        )  # fmt: skip


def _one_key_head(shrink: int) -> BenchCase:
    def decode(arguments: Arguments) -> Callable[[], Any]:
        return lambda: hw.attention_decode(**arguments)

    return decode_case(
        "decode", Cache(1, 32768 // shrink, 8, 1, 128), "device", torch.float32,
        peers=(Contender(ONE_THREAD, decode, scope=one_thread),), requirements=(AtLeast(1.7, ONE_THREAD),),
    )  # fmt: skip


def _small_ops(shrink: int) -> Iterator[BenchCase]:
    for direction, dtype in product(BOTH, (torch.float32, torch.bfloat16)):
        group = f"small ops, {str(dtype).removeprefix('torch.')}"
        level = training.Setting(dtype, group, (AtLeast(1.0, training.TORCH),))
        yield layer_norm_case(2048 // shrink, 1024, direction, level)
        yield pointwise.glu_case(1024 // shrink, 2816, direction, level)

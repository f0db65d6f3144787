"""Attention with dropout. PyTorch drops other entries than we do, so its kernels are timed and not compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.benchmark.case import BenchCase, Contender, Direction, our_yardstick
from headwise.benchmark.requirements import Requirement, Within
from headwise.benchmark.suites.attention import (
    BOTH,
    PATTERNS,
    PLAIN,
    QKV,
    SDPA,
    Shape,
    Visibility,
    attention_case,
    plain,
)
from headwise.benchmark.suites.peers import EFFICIENT, FA2, sdpa_yardsticks
from headwise.reference.philox import random_bits
from headwise.testing import Arguments, Outputs

CHANCE, SEED = 0.1, 0x5EED_0123_4567
_PAIRS_HELD = 1 << 22


@dataclass(frozen=True)
class DropoutCheck:
    """The last head of the last batch entry, by the formulas, a block of rows at a time."""

    visibility: Visibility

    def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
        q, k, v = (arguments[name][-1, -1].detach() for name in QKV)
        batch, heads, length, head_dim = arguments["q"].shape
        results = {"out": torch.zeros_like(v)}
        if grad_out is not None:
            results |= {f"grad of {name}": torch.zeros_like(x) for name, x in zip(QKV, (q, k, v), strict=True)}
        seen, key = self.visibility.mask(length, length).to(q.device), torch.arange(length, device=q.device)
        b, h = (torch.tensor(n - 1, device=q.device) for n in (batch, heads))
        height = max(16, _PAIRS_HELD // length)
        for start in range(0, length, height):
            rows = slice(start, min(start + height, length))
            leaves = [x.clone().requires_grad_(grad_out is not None) for x in (q[rows], k, v)]
            logits = (leaves[0] @ leaves[1].T * head_dim**-0.5).masked_fill(~seen[rows], -torch.inf)
            kept = random_bits(SEED, b, h, key[rows, None], key) >= round(CHANCE * 65536)
            out = torch.where(kept, torch.softmax(logits, -1) / (1 - CHANCE), 0.0) @ leaves[2]
            results["out"][rows] = out.detach()
            if grad_out is not None:
                dq, dk, dv = torch.autograd.grad(out, leaves, grad_out[-1, -1, rows].to(out.dtype))
                results["grad of q"][rows] = dq
                results["grad of k"] += dk
                results["grad of v"] += dv
        return results

    def pick(self, results: Outputs) -> Outputs:
        return {name: x[-1, -1] for name, x in results.items()}


def dropout_cases(
    shapes: list[tuple[str, Shape]], yardsticks: tuple[Contender, ...], requirements: tuple[Requirement, ...],
    dtype: torch.dtype = torch.float32, directions: tuple[Direction, ...] = BOTH,
) -> list[BenchCase]:  # fmt: skip
    """Full and causal. The seed is an int: like one that is drawn, it costs a launch in every call."""
    return [
        replace(
            attention_case(
                f"dropout {CHANCE:g} {pattern} {name}", "dropout", shape, direction, visibility,
                features=lambda maker: {"dropout": CHANCE, "dropout_seed": SEED}, peers=yardsticks,
                requirements=requirements, dtype=dtype,
            ),
            check=DropoutCheck(visibility),
        )
        for (name, shape), direction, (pattern, visibility) in product(shapes, directions, PATTERNS.items())
    ]  # fmt: skip


def on_cuda(shape_of: Callable[[int, int, int], Shape], shrink: int) -> list[BenchCase]:
    """``shape_of(length, head_dim, shrink)``. As fast as PyTorch's own kernels with dropout, at least."""
    shapes = []
    for head_dim, length in product((64, 128), (2048, 8192)):
        shape = shape_of(length, head_dim, shrink)
        shapes.append((f"S {shape.length} D {head_dim}", shape))
    yardsticks = sdpa_yardsticks(sdpa_dropping, FA2, EFFICIENT)
    return dropout_cases(shapes, yardsticks, (Within(1.0, FA2), Within(1.0, EFFICIENT)), torch.bfloat16)


def on_cpu(shrink: int) -> list[BenchCase]:
    """PyTorch keeps the S × S probabilities for its backward, and we draw the numbers again: so both directions count."""
    shapes = [(f"S {length // shrink} D 64 H 4", Shape(1, 4, 4, length // shrink, 64)) for length in (1024, 4096)]
    yardsticks = (Contender(SDPA, sdpa_dropping, yardstick=True),)
    return dropout_cases(shapes, yardsticks, (Within(1.0, SDPA),), directions=("forward", "forward+backward"))


def on_webgpu(shrink: int) -> list[BenchCase]:
    """Beside our attention without dropout: what the random numbers cost."""
    shape = Shape(1, 16, 16, 2048 // shrink, 64)
    return dropout_cases([(f"S {shape.length} D 64", shape)], (our_yardstick(PLAIN, plain),), ())


def sdpa_dropping(arguments: Arguments) -> Callable[[], Tensor]:
    q, k, v = (arguments[name] for name in QKV)
    causal, chance = arguments["causal"], arguments["dropout"]
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=chance)

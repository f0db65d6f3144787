"""Masks and biases at the speed of the hardware: cases of the suite for Hopper GPUs.

A mask is dense, padding, causal written as a mask, or eight documents; a bias has a number for every head, query and key,
with or without a gradient. Beside them PyTorch's kernels with the same tensor, and FlexAttention with a prepared
BlockMask. Counted is the work of a call without them, so that a tile that is skipped shows as speed.

A mask that hides much has our own plain call beside it: causal as a mask may take little longer than ``causal=True``,
documents as a mask a fraction of the full call. Soft caps, which no peer has, are beside our plain call too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.benchmark.case import Absent, BenchCase, Contender, our_yardstick
from headwise.benchmark.correctness import WholeCheck, oracle
from headwise.benchmark.requirements import AtLeast, PeerRequirement, Within
from headwise.benchmark.suites.attention import (
    BOTH,
    PATTERNS,
    PLAIN,
    QKV,
    attention_bytes,
    attention_case,
    attention_flops,
    ours,
    plain,
)
from headwise.benchmark.suites.cuda import BF16, table_shape
from headwise.benchmark.suites.peers import CUDNN, EFFICIENT, FLEX, sdpa_peers_of, tried
from headwise.testing import Arguments, Maker, Outputs

_DOCUMENTS = 8
_SOFTCAP = 30.0
FLAG, FULL = "our causal=True", "our full call"


@dataclass(frozen=True)
class LastHead:
    """Checks the last head of the last batch entry: a wrong offset often leaves the first one right."""

    def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
        part = {name: x[-1:, -1:] if isinstance(x, Tensor) else x for name, x in arguments.items()}
        return WholeCheck(oracle("attention"), QKV).compute(part, None if grad_out is None else grad_out[-1:, -1:])

    def pick(self, results: Outputs) -> Outputs:
        return {name: x[-1:, -1:] for name, x in results.items() if name != "grad of bias"}


def _position(maker: Maker, length: int) -> Tensor:
    return torch.arange(length, device=maker.device)


def _padding(maker: Maker, batch: int, length: int) -> Tensor:
    lengths = length - length // 8 * torch.arange(batch, device=maker.device) // max(1, batch)
    return (_position(maker, length) < lengths[:, None])[:, None, None]


def _causal(maker: Maker, batch: int, length: int) -> Tensor:
    position = _position(maker, length)
    return (position[:, None] >= position)[None, None]


def _documents(maker: Maker, batch: int, length: int) -> Tensor:
    document = _position(maker, length) // -(-length // _DOCUMENTS)
    return (document[:, None] == document)[None, None]


def _dense(maker: Maker, batch: int, length: int) -> Tensor:
    return maker.coin(1, 1, length, length, chance=0.9)


MASKS: dict[str, Callable[[Maker, int, int], Tensor]] = {
    "dense mask": _dense,
    "padding as a mask": _padding,
    "causal as a mask": _causal,
    "8 documents as a mask": _documents,
}


def _sdpa(arguments: Arguments) -> Callable[[], Tensor]:
    q, k, v = (arguments[name] for name in QKV)
    scores = arguments["mask"] if "mask" in arguments else arguments["bias"]
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=scores)


def _flex(arguments: Arguments) -> Callable[[], Tensor]:
    # Imported here: it loads the compiler.
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if "mask" not in arguments:
        raise Absent("its block masks are for masks")
    (q, k, v), mask = (arguments[name] for name in QKV), arguments["mask"]
    entries, rows = mask.shape[0] > 1, mask.shape[2] > 1

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[batch if entries else 0, 0, query if rows else 0, key]

    torch.compiler.reset()  # otherwise later cases reach the limit on recompilations
    blocks = create_block_mask(
        visible, q.shape[0] if entries else None, None, q.shape[2], k.shape[2], device=str(q.device)
    )
    functorch_config.donated_buffer = False  # the timed backward runs many times on the tensors that one forward saved
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return tried(lambda: compiled(q, k, v, block_mask=blocks), arguments)


def _without_mask(causal: bool) -> Callable[[Arguments], Callable[[], Tensor]]:
    def prepare(arguments: Arguments) -> Callable[[], Tensor]:
        q, k, v = (arguments[name] for name in QKV)
        return lambda: hw.attention(q, k, v, causal=causal)

    return prepare


# Beside which call of ours a mask is timed, and what is required.
_YARDSTICKS: dict[str, tuple[Contender, PeerRequirement]] = {
    "causal as a mask": (our_yardstick(FLAG, _without_mask(causal=True)), Within(1.25, FLAG)),
    "8 documents as a mask": (our_yardstick(FULL, _without_mask(causal=False)), AtLeast(4.0, FULL)),
}


def cases(shrink: int) -> list[BenchCase]:
    built = []
    kinds = (*MASKS, "bias", "bias with a gradient")
    for direction, head_dim, length, kind in product(BOTH, (64, 128), (2048, 8192), kinds):
        if kind == "bias with a gradient" and direction == "forward":
            continue
        shape = table_shape(length, head_dim, shrink)
        wanted = kind == "bias with a gradient"
        # PyTorch's cuDNN attention has no gradient of a bias; FlexAttention would read it inside a function of its own.
        names = (EFFICIENT,) if wanted else (CUDNN, EFFICIENT)
        peers = [*sdpa_peers_of(_sdpa, *names)]
        needed: list[PeerRequirement] = [AtLeast(1.5 if wanted else 1.0, name) for name in names]
        if kind in MASKS:
            peers.append(Contender(FLEX, _flex))
            needed.append(AtLeast(1.2, FLEX))
        if kind in _YARDSTICKS:
            yardstick, required = _YARDSTICKS[kind]
            peers.append(yardstick)
            needed.append(required)
        built.append(
            BenchCase(
                name=f"{kind} S {shape.length} D {head_dim}",
                group="features",
                direction=direction,
                make=_maker(kind, shape),
                ours=ours,
                check=LastHead(),
                differentiable=(*QKV, "bias") if wanted else QKV,
                peers=tuple(peers),
                flops=attention_flops(shape.batch * shape.heads * shape.length**2, head_dim, direction),
                bytes=attention_bytes(shape, direction, BF16),
                requirements=tuple(needed),
                dtype=BF16,
            )
        )
    return built


def softcap_cases(shrink: int) -> list[BenchCase]:
    """What a soft cap costs, beside the same call without it."""
    built = []
    for direction, head_dim, pattern, length in product(BOTH, (64, 128, 256), PATTERNS, (2048, 8192)):
        shape = table_shape(length, head_dim, shrink)
        case = attention_case(
            f"{pattern} S {shape.length} D {head_dim}", "softcap", shape, direction, PATTERNS[pattern],
            features=lambda maker: {"softcap": _SOFTCAP}, peers=(our_yardstick(PLAIN, plain),),
            requirements=(Within(1.35, PLAIN),), dtype=BF16, heads_inside=True,
        )  # fmt: skip
        built.append(case)
    return built


def _maker(kind: str, shape: Any) -> Callable[[Maker], Arguments]:
    batch, heads, _, length, head_dim = shape

    def make(maker: Maker) -> Arguments:
        arguments: Arguments = {name: maker.normal(batch, length, heads, head_dim).transpose(1, 2) for name in QKV}
        if kind in MASKS:
            arguments["mask"] = MASKS[kind](maker, batch, length)
        else:
            arguments["bias"] = maker.normal(1, heads, length, length)
        return arguments

    return make

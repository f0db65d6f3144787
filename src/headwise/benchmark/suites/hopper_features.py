"""Masks and biases at the speed of the hardware: cases of the suite for Hopper GPUs.

A mask is dense, padding, causal written as a mask, or eight documents; a bias has a number for every head, query and key,
with or without a gradient. Beside them PyTorch's kernels with the same tensor, and FlexAttention with a prepared
BlockMask. Counted is the work of a call without them, so that a tile that is skipped shows as speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.benchmark.case import Absent, BenchCase, Contender
from headwise.benchmark.correctness import WholeCheck, oracle
from headwise.benchmark.requirements import AtLeast
from headwise.benchmark.suites.attention import BOTH, QKV, attention_bytes, attention_flops, ours
from headwise.benchmark.suites.cuda import BF16, table_shape
from headwise.benchmark.suites.peers import CUDNN, EFFICIENT, FLEX, sdpa_peers_of, tried
from headwise.testing import Arguments, Maker, Outputs

_DOCUMENTS = 8


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
        needed = [AtLeast(1.5 if wanted else 1.0, name) for name in names]
        if kind in MASKS:
            peers.append(Contender(FLEX, _flex))
            needed.append(AtLeast(1.2, FLEX))
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

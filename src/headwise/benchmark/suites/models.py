"""Whole training steps: `headwise.nn.TransformerLM` in the shape of a Llama, against the same weights computed by others.

A step here is the loss and the gradients of all weights; the optimizer is the same for everybody. Every contender gets
the same weights, and all gradients are checked before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headwise.benchmark.case import BenchCase, BenchSuite, Contender
from headwise.benchmark.correctness import WholeCheck
from headwise.benchmark.requirements import AtLeast, MemoryShare
from headwise.benchmark.suites import transformers_models
from headwise.nn import RotaryEmbedding, TransformerConfig, TransformerLM
from headwise.testing import Arguments, Maker, Outputs

TORCH, COMPILED, LIGER, LIGER_SDPA = "PyTorch SDPA", "torch.compile", "Liger + FA4", "Liger + SDPA"
LLAMA = TransformerConfig(
    vocabulary=128256, dim=2048, layers=16, heads=32, key_heads=16, hidden=8192, positions=4096, rotary_base=500_000.0
)
TINY = TransformerConfig(vocabulary=256, dim=64, layers=2, heads=4, key_heads=2, hidden=128, positions=64)


class Parts(NamedTuple):
    """What differs between the contenders; the matrix products are PyTorch's for all of them."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # q, k (B, H, S, D), cos, sin (S, D)
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]  # causal, (B, H, S, D)
    glu: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden (N, H), weight (V, H), targets (N,)


def pytorch_parts() -> Parts:
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos.to(x.dtype) + torch.cat((-b, a), -1) * sin.to(x.dtype)

    return Parts(
        rms_norm=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
        rope=lambda q, k, cos, sin: (rotated(q, cos, sin), rotated(k, cos, sin)),
        attention=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        glu=lambda gate, up: F.silu(gate) * up,
        loss=lambda hidden, weight, targets: F.cross_entropy(F.linear(hidden, weight), targets),
    )


def liger_parts() -> Parts:
    """Liger's kernels around PyTorch's attention. Raises ImportError where Liger is missing."""
    from liger_kernel.transformers import functional as liger  # type: ignore[import-not-found,unused-ignore]

    return pytorch_parts()._replace(
        rms_norm=partial(_liger_norm, liger),
        rope=lambda q, k, cos, sin: liger.liger_rope(q, k, cos[None].to(q.dtype), sin[None].to(q.dtype)),
        glu=liger.liger_swiglu,
        loss=liger.liger_fused_linear_cross_entropy,
    )


def liger_fa4_parts() -> Parts:
    """Liger's kernels around FlashAttention-4. Raises ImportError where one is missing."""
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first.transpose(1, 2)

    return liger_parts()._replace(attention=attention)


def _liger_norm(liger: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = liger.liger_rms_norm(x, weight, eps)
    return out


def rotary_tables(config: TransformerConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (S, D), both halves, in float32 at least."""
    rotary = RotaryEmbedding(config.head_width, length, config.rotary_base, device=like.device)
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.cat((rotary.cos, rotary.cos), -1).to(dtype), torch.cat((rotary.sin, rotary.sin), -1).to(dtype)


def step(
    config: TransformerConfig, parts: Parts, tables: tuple[Tensor, Tensor], arguments: Arguments,
    layer: Callable[..., Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The loss of a `TransformerLM` of this config, from its weights by name; ``layer`` stands in for `_layer`."""
    table = arguments["embedding.weight"]
    x = F.embedding(arguments["ids"], table)
    for index in range(config.layers):
        prefix = f"blocks.{index}."
        own = {name.removeprefix(prefix): w for name, w in arguments.items() if name.startswith(prefix)}
        x = (layer or _layer)(config, parts, own, x, *tables)
    normed = parts.rms_norm(x, arguments["norm.weight"], config.norm_eps)
    return parts.loss(normed.flatten(0, 1), table, arguments["targets"].flatten())


def _layer(
    config: TransformerConfig, parts: Parts, w: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    heads, key_heads = config.heads, config.key_heads or config.heads
    normed = parts.rms_norm(x, w["attention_norm.weight"], config.norm_eps)
    mixed = F.linear(normed, w["attention.qkv.weight"]).unflatten(-1, (-1, config.head_width)).transpose(1, 2)
    q, k, v = mixed.split((heads, key_heads, key_heads), 1)
    q, k = parts.rope(q, k, cos, sin)
    x = x + F.linear(parts.attention(q, k, v).transpose(1, 2).flatten(2), w["attention.out.weight"])
    gate, up = F.linear(parts.rms_norm(x, w["mlp_norm.weight"], config.norm_eps), w["mlp.gate_up.weight"]).chunk(2, -1)
    return x + F.linear(parts.glu(gate, up), w["mlp.down.weight"])


def _truth(config: TransformerConfig, arguments: Arguments) -> Outputs:
    """In float64 a layer is computed again in its backward: all of them would not fit the memory."""

    def layer(*given: Any) -> Tensor:
        out: Tensor = checkpoint(_layer, *given, use_reentrant=False)
        return out

    tables = rotary_tables(config, arguments["ids"].shape[1], arguments["norm.weight"])
    return {"out": step(config, pytorch_parts(), tables, arguments, layer)}


def training_step(name: str, config: TransformerConfig, batch: int, length: int) -> BenchCase:
    with torch.device("meta"):
        model = TransformerLM(config)
    shapes = {parameter: tuple(x.shape) for parameter, x in model.named_parameters()}

    def make(maker: Maker) -> Arguments:
        weights = {
            parameter: 1 + maker.normal(*shape, scale=0.1)
            if len(shape) == 1
            else maker.normal(*shape, scale=shape[1] ** -0.5)
            for parameter, shape in shapes.items()
        }
        drawn = {part: maker.integers(0, config.vocabulary, batch, length) for part in ("ids", "targets")}
        return {**weights, **drawn}

    def ours(arguments: Arguments) -> Callable[[], Tensor]:
        with torch.device("meta"):
            built = TransformerLM(config)
        for module in built.modules():
            if isinstance(module, RotaryEmbedding):
                module.to_empty(device=arguments["ids"].device)
        weights = {parameter: arguments[parameter] for parameter in shapes}
        given = (arguments["ids"], arguments["targets"])
        return lambda: torch.func.functional_call(built, weights, given)

    def peer(parts: Callable[[], Parts], compiled: bool = False) -> Callable[[Arguments], Callable[[], Tensor]]:
        def prepare(arguments: Arguments) -> Callable[[], Tensor]:
            tables = rotary_tables(config, length, arguments["norm.weight"])
            run: Callable[[Arguments], Tensor] = partial(step, config, parts(), tables)
            if compiled:
                run = torch.compile(run)
            return lambda: run(arguments)

        return prepare

    tokens = batch * length
    matrices = sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)
    attention = config.layers * config.heads * config.head_width * batch * length * length * 2  # causal: half of 4
    return BenchCase(
        deterministic=None,
        name=name,
        group="training step",
        direction="forward+backward",
        make=make,
        ours=ours,
        check=WholeCheck(partial(_truth, config), tuple(shapes)),
        differentiable=tuple(shapes),
        peers=(
            Contender(TORCH, peer(pytorch_parts)),
            Contender(COMPILED, peer(pytorch_parts, compiled=True)),
            Contender(LIGER_SDPA, peer(liger_parts)),
            Contender(LIGER, peer(liger_fa4_parts)),
        ),
        flops=float(6 * tokens * matrices + 3.5 * attention),
        requirements=(AtLeast(1.25, TORCH), MemoryShare(0.6, TORCH), AtLeast(1.0, LIGER)),
    )


def cases(quick: bool) -> list[BenchCase]:
    found = [
        training_step("tiny, B 2 S 64", TINY, 2, 64) if quick else training_step("Llama 1B, B 2 S 4096", LLAMA, 2, 4096)
    ]
    if find_spec("transformers") is None:
        return found
    theirs = transformers_models
    if quick:
        return [*found, theirs.training_step("tiny", theirs.TINY, 2, 64), theirs.decoding("tiny", theirs.TINY, 2, 48)]
    # Generation of 256 tokens from a prompt of 256, in the middle of it.
    return [
        *found,
        theirs.training_step("Llama 1B, B 2 S 4096", theirs.LLAMA, 2, 4096),
        theirs.decoding("Llama 1B, B 8, 384 of 512 tokens", theirs.LLAMA._replace(positions=512), 8, 384),
    ]


SUITE = BenchSuite(name="models", device="cuda", dtype=torch.bfloat16, cases=cases, backend="triton")

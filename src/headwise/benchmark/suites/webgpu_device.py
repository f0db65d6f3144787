"""``device="webgpu"`` itself: matrix products, PyTorch's operators, and whole steps, captured and eager.

A training step is the loss, the gradients of all weights and AdamW with a learning rate of 0: all of its work, and weights
that stay as they are, so that every call computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.benchmark.case import BenchCase, our_yardstick
from headwise.benchmark.correctness import WholeCheck, with_leaves
from headwise.benchmark.requirements import FlopRate, TimeLimit, Within
from headwise.benchmark.suites import models
from headwise.nn import KVCache, RotaryEmbedding, TransformerConfig, TransformerLM
from headwise.ops._checks import short
from headwise.testing import Arguments, Maker, Outputs

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CAPTURED, NN, COPY = "captured", "a · b", "WGSL copy"
RATES = {F32: 36.0, F16: 40.0, BF16: 30.0}  # TFLOP/s that 4096³ has to reach
F32_LIMIT = 57.0  # what the processors could do
EAGER_US, REPLAYED_US = 20.0, 2.0  # of the host, for an operator and for a dispatch of a replay
CHAIN = 50

# The sizes of GPT-2 small, with three matrices of 2048 in place of two of 3072: 124 million parameters.
GPT2_SMALL = TransformerConfig(vocabulary=50257, dim=768, layers=12, heads=12, hidden=2048, positions=1024)
LLAMA_1B = models.LLAMA

Run = Callable[[], tuple[Tensor, ...]]


def cases(shrink: int, beside_a_copy: Callable[[BenchCase, float], BenchCase]) -> list[BenchCase]:
    quick = shrink > 1
    return [
        *_products(shrink),
        beside_a_copy(_row(16384 // shrink, 4096), 0.75),
        *[beside_a_copy(case, 0.85) for case in _elements(1 << (16 if quick else 26))],
        *_host(),
        *(_training("tiny, B 2 S 64", models.TINY, 2, 64) if quick else _training("124M, B 4 S 1024", GPT2_SMALL, 4, 1024)),
        *[
            beside_a_copy(case, share)
            for case, share in zip(
                _decoding("tiny, 48 tokens", models.TINY, 48) if quick else _decoding("1B, 512 tokens", LLAMA_1B, 512),
                (0.6, 0.0), strict=True,
            )
        ],
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- operators


def _product_check(arguments: Arguments) -> Outputs:
    a, b = arguments["a"], arguments["b"]
    return {"out": (a.mT if "turned a" in arguments else a) @ (b.mT if "turned b" in arguments else b)}


def _products(shrink: int) -> list[BenchCase]:
    built = []
    for dtype, size, layout in [
        *[(dtype, 4096, layout) for dtype in RATES for layout in (NN, "a · bᵀ", "aᵀ · b")],
        (F32, 2048, NN),
    ]:
        turned: dict[str, Any] = {"turned a": True} if "aᵀ" in layout else {"turned b": True} if "bᵀ" in layout else {}
        n = size // shrink

        def make(maker: Maker, n: int = n, turned: dict[str, Any] = turned) -> Arguments:
            return {"a": maker.normal(n, n), "b": maker.normal(n, n), **turned}

        def ours(arguments: Arguments) -> Callable[[], Tensor]:
            return lambda: _product_check(arguments)["out"]

        def plain(arguments: Arguments) -> Callable[[], tuple[Tensor]]:
            return lambda: (arguments["a"] @ arguments["b"],)

        required = FlopRate(RATES[dtype] * (0.9 if size < 4096 else 1.0)) if layout == NN else Within(1 / 0.9, NN)
        built.append(
            BenchCase(
                name=f"{layout}, {n} cubed", group=f"matmul {short(dtype)}", direction="forward", make=make, ours=ours,
                check=WholeCheck(_product_check, ("a", "b")), flops=2.0 * n**3, requirements=(required,), dtype=dtype,
                peers=() if layout == NN else (our_yardstick(NN, plain, explicit=True),),
            )
        )  # fmt: skip
    return built


def _row(columns: int, k: int) -> BenchCase:
    """One row times a matrix, as a linear layer of a decoded token."""
    return BenchCase(
        name=f"1 × {k} · ({columns} × {k})ᵀ", group="matmul float16", direction="forward", dtype=F16,
        make=lambda maker: {"a": maker.normal(1, k), "b": maker.normal(columns, k), "turned b": True},
        ours=lambda arguments: lambda: _product_check(arguments)["out"], check=WholeCheck(_product_check, ("a", "b")),
        bytes=2.0 * columns * k,
    )  # fmt: skip


def _elements(count: int) -> list[BenchCase]:
    """Operators that wait for memory."""
    operators: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {
        "x + y": (12, lambda x, y: x + y),
        "sum of rows": (4, lambda x, y: x.sum(-1)),
        "to float16": (6, lambda x, y: x.to(F16)),
    }

    def case(name: str, moved: int, function: Callable[[Tensor, Tensor], Tensor]) -> BenchCase:
        def reference(arguments: Arguments) -> Outputs:
            x, y = arguments["x"], arguments["y"]
            return {"out": function(x, y)}

        return BenchCase(
            name=f"{name}, {count} elements", group="operators", direction="forward", dtype=F32,
            make=lambda maker: {"x": maker.normal(count // 4096, 4096), "y": maker.normal(count // 4096, 4096)},
            ours=lambda arguments: lambda: function(arguments["x"], arguments["y"]),
            check=WholeCheck(reference, ("x", "y")), bytes=float(moved * count),
        )  # fmt: skip

    return [case(name, moved, function) for name, (moved, function) in operators.items()]


def _host() -> list[BenchCase]:
    """tanh in a row: the Python of an eager operator, and the host's part of a dispatch that is replayed."""

    def reference(arguments: Arguments) -> Outputs:
        x = arguments["x"]
        for _ in range(CHAIN):
            x = torch.tanh(x)
        return {"out": x}

    def eager(arguments: Arguments) -> Callable[[], Tensor]:
        return lambda: reference(arguments)["out"]

    def captured(arguments: Arguments) -> Callable[[], Tensor]:
        run = _captured(lambda: (reference(arguments)["out"],))
        return lambda: run()[0]

    first = BenchCase(
        name=f"{CHAIN} tanh in a row, eager", group="host of operators", direction="forward", dtype=F32, timed="host",
        make=lambda maker: {"x": maker.normal(64, 256)}, ours=eager, check=WholeCheck(reference, ("x",)),
        bytes=4.0 * CHAIN * 2 * 64 * 256, requirements=(TimeLimit(CHAIN * EAGER_US),),
    )  # fmt: skip
    requirements = (TimeLimit(CHAIN * REPLAYED_US),)
    return [first, replace(first, name=f"{CHAIN} tanh in a row, captured", ours=captured, requirements=requirements)]


# ----------------------------------------------------------------------------------------------------------------- steps


def _captured(run: Run) -> Run:
    """A replay of the step; what the replay computes is what the step gave."""
    from headwise.webgpu import capture

    run()  # what is made once is there: the state of an optimizer, tables
    with capture() as step:
        results = run()

    def replay() -> tuple[Tensor, ...]:
        step()
        return results

    return replay


def _training(name: str, config: TransformerConfig, batch: int, length: int) -> list[BenchCase]:
    base = models.training_step(name, config, batch, length)

    def eager(arguments: Arguments) -> Run:
        values, leaves = with_leaves(arguments, base.differentiable)
        loss_of = base.ours(values)
        optimizer = torch.optim.AdamW(leaves.values(), lr=0.0, fused=True)

        def run() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                loss = loss_of()
                gradients = torch.autograd.grad(loss, list(leaves.values()))
            for leaf, gradient in zip(leaves.values(), gradients, strict=True):
                leaf.grad = gradient
            optimizer.step()
            return loss.detach(), *gradients

        return run

    def captured(arguments: Arguments) -> Run:
        return _captured(eager(arguments))

    shared = replace(base, group="training step", explicit=True, timed="calls", dtype=F32)
    return [
        replace(
            shared, name=f"{name}, captured", ours=captured, peers=(), requirements=(FlopRate(0.45 * F32_LIMIT),)
        ),
        replace(
            shared, name=f"{name}, eager", ours=eager, requirements=(Within(1.4, CAPTURED),),
            peers=(our_yardstick(CAPTURED, captured, explicit=True),),
        ),
    ]  # fmt: skip


def _decoding(name: str, config: TransformerConfig, length: int) -> list[BenchCase]:
    """The logits of the last token, over a cache that holds the others."""
    base = models.training_step(name, config, 1, length)
    weights = sum(x.numel() for x in _empty_model(config).parameters())
    cached = 2 * config.layers * length * (config.key_heads or config.heads) * config.head_width

    def make(maker: Maker) -> Arguments:
        arguments = base.make(maker)
        del arguments["targets"]
        return arguments

    def eager(arguments: Arguments) -> Run:
        ids, model = arguments["ids"], _empty_model(config)
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module.to_empty(device=ids.device)
        given = {parameter: arguments[parameter] for parameter in base.differentiable}
        cache = KVCache(
            config.layers, 1, config.key_heads or config.heads, length, config.head_width, device=ids.device,
            dtype=given["embedding.weight"].dtype,
        )  # fmt: skip

        def logits(tokens: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(model, given, (tokens,), {"cache": cache})
            return out

        cache.extend(length - 1)
        logits(ids[:, :-1])

        def run() -> tuple[Tensor, ...]:
            cache.reset()
            cache.extend(length - 1)
            cache.extend(1)
            return (logits(ids[:, -1:]),)

        return run

    def call(arguments: Arguments, run_of: Callable[[Run], Run]) -> Callable[[], Tensor]:
        run = run_of(eager(arguments))
        return lambda: run()[0]

    def reference(arguments: Arguments) -> Outputs:
        tables = models.rotary_tables(config, length, arguments["norm.weight"])
        parts = models.pytorch_parts()._replace(
            loss=lambda hidden, weight, targets: (hidden[-1:] @ weight.T)[None]  # in place of the loss: logits
        )
        return {"out": models.step(config, parts, tables, {**arguments, "targets": arguments["ids"]})}

    captured = BenchCase(
        name=f"{name}, captured", group="decoding step", direction="forward", dtype=F16, timed="calls", make=make,
        ours=partial(call, run_of=_captured), check=WholeCheck(reference, ()), bytes=2.0 * (weights + cached),
    )  # fmt: skip
    return [captured, replace(captured, name=f"{name}, eager", ours=partial(call, run_of=lambda run: run))]


def _empty_model(config: TransformerConfig) -> TransformerLM:
    with torch.device("meta"):
        return TransformerLM(config)

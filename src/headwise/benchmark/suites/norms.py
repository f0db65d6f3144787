"""Cases of layer_norm and add_rms_norm, with PyTorch, torch.compile, Liger and quack as peers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise import reference
from headwise.benchmark.case import BenchCase, Contender, Direction, Prepare
from headwise.benchmark.correctness import WholeCheck, oracle
from headwise.benchmark.requirements import AtLeast, Bandwidth
from headwise.benchmark.suites.attention import BOTH
from headwise.benchmark.suites.peers import tried
from headwise.benchmark.suites.quack_peers import QUACK, layer_norm_peer
from headwise.benchmark.suites.training import PLAIN, TORCH, Setting
from headwise.testing import Arguments

COMPILED, LIGER = "torch.compile", "Liger"
LAYER_EPS, RMS_EPS = 1e-5, 1e-6
COPY_RATE = 4.24  # TB/s of a copy on one H200
SHARES = {"forward": 0.9, "backward": 0.85}  # of that, required at 16384 × 4096
OTHER_WIDTHS = 0.85  # of those, elsewhere
SHAPES = ((16384, 4096), (65536, 1024), (524288, 128), (4096, 16384), (512, 131072))

Call = Callable[..., Any]


class _Both(torch.autograd.Function):
    """The first of two results; the second gets the same gradient. So that a case with one result times both."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, h: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, grad


def _both(results: tuple[Tensor, Tensor]) -> Tensor:
    return cast(Tensor, _Both.apply(*results)) if results[0].requires_grad else results[0]


def layer_norm_case(
    rows: int, width: int, direction: Direction, setting: Setting = PLAIN, *, gpu: bool = False
) -> BenchCase:
    differentiable = ("x", "weight", "bias")

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias, LAYER_EPS)

    return BenchCase(
        name=f"layer_norm {rows} × {width}",
        direction=direction,
        make=lambda maker: {"x": maker.normal(rows, width), "weight": maker.normal(width), "bias": maker.normal(width)},
        ours=lambda a: lambda: hw.layer_norm(**a),
        check=WholeCheck(oracle("layer_norm"), differentiable),
        differentiable=differentiable,
        peers=(*_peers(plain, gpu, {LIGER: _liger_layer_norm}), *([layer_norm_peer(LAYER_EPS)] if gpu else ())),
        flops=_times(direction, 8, 14) * rows * width,
        bytes=setting.dtype.itemsize * _times(direction, 2, 3) * rows * width,
        **setting.fields(),
    )


def add_rms_norm_case(
    rows: int, width: int, direction: Direction, setting: Setting = PLAIN, *, gpu: bool = False
) -> BenchCase:
    """Backward: gradients arrive at both results."""
    differentiable = ("x", "residual", "weight")

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return F.rms_norm(h, (width,), weight, RMS_EPS), h

    return BenchCase(
        name=f"add_rms_norm {rows} × {width}",
        direction=direction,
        make=lambda maker: {
            "x": maker.normal(rows, width), "residual": maker.normal(rows, width), "weight": maker.normal(width),
        },
        ours=lambda a: lambda: _both(hw.add_rms_norm(**a)),
        check=WholeCheck(lambda a: {"out": _both(reference.add_rms_norm(**a))}, differentiable),
        differentiable=differentiable,
        peers=_peers(plain, gpu, {LIGER: _liger_add_rms_norm, QUACK: _quack_add_rms_norm}, _both),
        flops=_times(direction, 5, 10) * rows * width,
        # Backward: h and the one gradient of both results are read, the one gradient of both inputs is written.
        bytes=setting.dtype.itemsize * _times(direction, 4, 3) * rows * width,
        **setting.fields(),
    )  # fmt: skip


def cuda_norm_cases(shrink: int, dtype: torch.dtype) -> list[BenchCase]:
    built = []
    for build, direction, (rows, width) in product((layer_norm_case, add_rms_norm_case), BOTH, SHAPES):
        least = COPY_RATE * SHARES[direction] * (1.0 if (rows, width) == SHAPES[0] else OTHER_WIDTHS)
        setting = Setting(dtype, "other norms", (Bandwidth(round(least, 2)),))
        built.append(build(max(1, rows // shrink), width, direction, setting, gpu=True))
    return built


def cpu_norm_cases(shrink: int) -> list[BenchCase]:
    setting = Setting(requirements=(AtLeast(1.0, TORCH),))
    builders = (layer_norm_case, add_rms_norm_case)
    return [build(8192 // shrink, 2048, direction, setting) for build, direction in product(builders, BOTH)]


def _times(direction: Direction, forward: int, backward: int) -> float:
    return float({"forward": forward, "backward": backward, "forward+backward": forward + backward}[direction])


def _peers(
    plain: Call, gpu: bool, others: dict[str, Call], joined: Callable[[Any], Tensor] = lambda results: results
) -> tuple[Contender, ...]:
    """PyTorch everywhere; on a GPU also its compiler and the others, each absent where it does not run.

    ``joined`` makes one tensor of the results, outside the compiled call, which computes them all.
    """
    peers = [Contender(TORCH, lambda a: lambda: joined(plain(**a)))]
    if gpu:
        peers.append(Contender(COMPILED, _compiled(plain, joined)))
        peers += [Contender(name, cast(Prepare, prepare)) for name, prepare in others.items()]
    return tuple(peers)


def _compiled(plain: Call, joined: Callable[[Any], Tensor]) -> Prepare:
    def prepare(arguments: Arguments) -> Callable[[], Tensor]:
        from torch._functorch import config as functorch_config

        torch.compiler.reset()  # otherwise later cases reach the limit on recompilations
        functorch_config.donated_buffer = False  # the timed backward runs many times on what one forward saved
        compiled = torch.compile(plain, dynamic=False)
        return tried(lambda: joined(compiled(**arguments)), arguments)

    return cast(Prepare, prepare)


def _liger_layer_norm(arguments: Arguments) -> Callable[[], Tensor]:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # type: ignore[import-not-found,unused-ignore]

    given = [arguments[name] for name in ("x", "weight", "bias")]
    return tried(lambda: LigerLayerNormFunction.apply(*given, LAYER_EPS), arguments)


def _liger_add_rms_norm(arguments: Arguments) -> Callable[[], Tensor]:
    from liger_kernel.ops.fused_add_rms_norm import (  # type: ignore[import-not-found,unused-ignore]
        LigerFusedAddRMSNormFunction,
    )

    given = [arguments[name] for name in ("x", "residual", "weight")]
    return tried(
        lambda: _both(LigerFusedAddRMSNormFunction.apply(*given, RMS_EPS, 0.0, "llama", False)), arguments
    )  # fmt: skip


def _quack_add_rms_norm(arguments: Arguments) -> Callable[[], Tensor]:
    from quack.rmsnorm import rmsnorm  # type: ignore[import-not-found,unused-ignore]

    x, residual, weight = (arguments[name] for name in ("x", "residual", "weight"))
    return tried(lambda: _both(rmsnorm(x, weight, residual=residual, eps=RMS_EPS, prenorm=True)), arguments)

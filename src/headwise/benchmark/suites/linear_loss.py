"""Cases of linear_cross_entropy: loss and both gradients, with PyTorch (eager, compiled) and Liger as peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.benchmark.case import Absent, BenchCase, Contender
from headwise.benchmark.correctness import first_output, oracle
from headwise.benchmark.requirements import PeakMemory, Requirement
from headwise.benchmark.suites.training import TORCH
from headwise.testing import Arguments, Maker, Outputs

COMPILED, LIGER = "torch.compile", "Liger"
DIFFERENTIABLE = ("hidden", "weight")


def linear_loss_case(
    rows: int, width: int, classes: int, dtype: torch.dtype, *, group: str = "linear loss",
    peers: tuple[Contender, ...] = (), requirements: tuple[Requirement, ...] = (),
) -> BenchCase:  # fmt: skip
    def make(maker: Maker) -> Arguments:
        return {
            "hidden": maker.normal(rows, width),
            "weight": maker.normal(classes, width, scale=2 / width**0.5),
            "targets": maker.integers(0, classes, rows),
        }

    return BenchCase(
        name=f"linear_cross_entropy {rows} × {width} to {classes}",
        group=group,
        direction="forward+backward",
        make=make,
        ours=lambda a: lambda: hw.linear_cross_entropy(**a),
        check=LinearLossCheck(),
        differentiable=DIFFERENTIABLE,
        peers=peers,
        flops=3 * 2.0 * rows * width * classes,  # the least: logits and two gradients
        bytes=2.0 * dtype.itemsize * width * (rows + classes),
        requirements=requirements,
        dtype=dtype,
    )


def beside_gradients(rows: int, width: int, classes: int, dtype: torch.dtype, scratch: int) -> PeakMemory:
    gradients = dtype.itemsize * width * (rows + classes)
    return PeakMemory(gradients + scratch, f"{scratch / 2**20:g} MiB beside the two gradients")


def pytorch_peer() -> Contender:
    return Contender(TORCH, lambda arguments: lambda: _plain(arguments))


def compiled_peer() -> Contender:
    def prepare(arguments: Arguments) -> Callable[[], Tensor]:
        torch.compiler.reset()  # otherwise later cases reach the limit on recompilations
        compiled = torch.compile(_plain, dynamic=False)
        return lambda: compiled(arguments)

    return Contender(COMPILED, prepare)


def liger_peer() -> Contender:
    def prepare(arguments: Arguments) -> Callable[[], Tensor]:
        try:
            from liger_kernel.transformers import (  # type: ignore[import-not-found,unused-ignore]
                LigerFusedLinearCrossEntropyLoss,
            )
        except ImportError as error:
            raise Absent(f"liger-kernel: {error}") from error
        loss = LigerFusedLinearCrossEntropyLoss()
        hidden, weight, targets = (arguments[name] for name in (*DIFFERENTIABLE, "targets"))
        return lambda: loss(weight, hidden, targets)

    return Contender(LIGER, prepare)


def _plain(arguments: Arguments) -> Tensor:
    return F.cross_entropy(F.linear(arguments["hidden"], arguments["weight"]), arguments["targets"])


@dataclass(frozen=True)
class LinearLossCheck:
    """The mean loss and both gradients, a few rows at a time: all logits in float64 would take many gigabytes.

    No target is ignored, so the mean divides by the number of rows. Sums over chunks are float64 in every dtype.
    """

    rows_at_once: int = 512

    def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
        assert grad_out is not None
        hidden, weight, targets = (arguments[name].detach() for name in (*DIFFERENTIABLE, "targets"))
        rows, total = hidden.shape[0], torch.zeros((), dtype=torch.float64, device=hidden.device)
        dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float64)
        for i in range(0, rows, self.rows_at_once):
            part = slice(i, i + self.rows_at_once)
            leaves = hidden[part].requires_grad_(), weight.requires_grad_()
            chosen = {"hidden": leaves[0], "weight": leaves[1], "targets": targets[part], "reduction": "sum"}
            loss = first_output(oracle("linear_cross_entropy")(chosen))
            dhidden[part], of_weight = torch.autograd.grad(loss / rows, leaves, grad_out.to(loss.dtype))
            dweight += of_weight
            total += loss.detach()
        return {
            "out": (total / rows).to(hidden.dtype),
            "grad of hidden": dhidden,
            "grad of weight": dweight.to(weight.dtype),
        }

    def pick(self, results: Outputs) -> Outputs:
        return results

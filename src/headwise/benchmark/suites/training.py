"""The other training ops: builders for any device, with PyTorch's own ops as peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.benchmark.case import BenchCase, Contender, Direction, Requirement
from headwise.benchmark.correctness import WholeCheck, first_output, oracle
from headwise.testing import Arguments, Maker, Outputs

TORCH = "PyTorch"
GROUP = "training ops"
_FLOAT32 = 4  # bytes of an element, unless a suite says otherwise


def _pytorch(call: Callable[[Arguments], Tensor]) -> tuple[Contender, ...]:
    return (Contender(TORCH, lambda arguments: lambda: call(arguments)),)


def rms_norm_case(rows: int, width: int, direction: Direction, element: int = _FLOAT32) -> BenchCase:
    differentiable = ("x", "weight")
    return BenchCase(
        name=f"rms_norm {rows} × {width}",
        group=GROUP,
        direction=direction,
        make=lambda maker: {"x": maker.normal(rows, width), "weight": maker.normal(width)},
        ours=lambda a: lambda: hw.rms_norm(**a),
        check=WholeCheck(oracle("rms_norm"), differentiable),
        differentiable=differentiable,
        peers=_pytorch(lambda a: F.rms_norm(a["x"], (width,), a["weight"], 1e-6)),
        bytes=element * _moved(rows * width, direction, forward=2, backward=3),
    )


def softmax_case(rows: int, width: int, direction: Direction, element: int = _FLOAT32) -> BenchCase:
    return BenchCase(
        name=f"softmax {rows} × {width}",
        group=GROUP,
        direction=direction,
        make=lambda maker: {"x": maker.normal(rows, width, scale=3.0)},
        ours=lambda a: lambda: hw.softmax(**a),
        check=WholeCheck(oracle("softmax"), ("x",)),
        differentiable=("x",),
        peers=_pytorch(lambda a: torch.softmax(a["x"], -1)),
        bytes=element * _moved(rows * width, direction, forward=2, backward=3),
    )


def embedding_case(ids: int, entries: int, width: int, direction: Direction, element: int = _FLOAT32) -> BenchCase:
    moved = 2.0 * ids * width if direction == "forward" else (ids + entries) * float(width)
    return BenchCase(
        name=f"embedding {ids} of {entries} × {width}",
        group=GROUP,
        direction=direction,
        make=lambda maker: {"ids": maker.integers(0, entries, ids), "weight": maker.normal(entries, width)},
        ours=lambda a: lambda: hw.embedding(**a),
        check=WholeCheck(oracle("embedding"), ("weight",)),
        differentiable=("weight",),
        peers=_pytorch(lambda a: F.embedding(a["ids"], a["weight"])),
        bytes=element * moved,
    )


def transpose_case(rows: int, width: int, element: int = _FLOAT32) -> BenchCase:
    """Forward only: backward is the same kernel again, while PyTorch's returns a view and leaves the work to others."""
    return BenchCase(
        name=f"transpose {rows} × {width}",
        group=GROUP,
        direction="forward",
        make=lambda maker: {"x": maker.normal(rows, width)},
        ours=lambda a: lambda: hw.transpose(**a),
        check=WholeCheck(oracle("transpose"), ("x",)),
        differentiable=("x",),
        peers=_pytorch(lambda a: a["x"].mT.contiguous()),
        bytes=element * 2.0 * rows * width,
    )


def cross_entropy_case(
    rows: int, vocabulary: int, requirements: tuple[Requirement, ...] = (), element: int = _FLOAT32
) -> BenchCase:
    def make(maker: Maker) -> Arguments:
        return {"logits": maker.normal(rows, vocabulary, scale=2.0), "targets": maker.integers(0, vocabulary, rows)}

    return BenchCase(
        name=f"cross_entropy {rows} × {vocabulary}",
        group="cross entropy",
        direction="forward+backward",
        make=make,
        ours=lambda a: lambda: hw.cross_entropy(**a),
        check=CrossEntropyCheck(),
        differentiable=("logits",),
        peers=_pytorch(lambda a: F.cross_entropy(a["logits"], a["targets"])),
        # One read of the logits and one write of their gradient.
        bytes=element * 2.0 * rows * vocabulary,
        requirements=requirements,
    )


@dataclass(frozen=True)
class CrossEntropyCheck:
    """The mean loss over all rows, exactly, and the gradient of every sixteenth row.

    Rows share nothing but the mean's divisor, which is their number (no target here is ignored). So the oracle may take
    a few rows at a time, with the sum in place of the mean: float64 of all logits at once would be several gigabytes.
    """

    rows_at_once: int = 64
    every: int = 16

    def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
        assert grad_out is not None
        logits, targets = arguments["logits"], arguments["targets"]
        rows = logits.shape[0]
        losses = [
            self._sum(logits[i : i + self.rows_at_once], targets[i : i + self.rows_at_once])
            for i in range(0, rows, self.rows_at_once)
        ]
        sampled = logits[:: self.every].detach().requires_grad_()
        (grad,) = torch.autograd.grad(self._sum(sampled, targets[:: self.every]), sampled, grad_out.to(logits.dtype))
        return {"out": torch.stack(losses).sum() / rows, "grad of logits": grad / rows}

    def pick(self, results: Outputs) -> Outputs:
        return {**results, "grad of logits": results["grad of logits"][:: self.every]}

    @staticmethod
    def _sum(logits: Tensor, targets: Tensor) -> Tensor:
        arguments = {"logits": logits, "targets": targets, "reduction": "sum"}
        return first_output(oracle("cross_entropy")(arguments))


def _moved(elements: int, direction: Direction, *, forward: int, backward: int) -> float:
    """Elements moved when every operand is read or written once."""
    passes = {"forward": forward, "backward": backward, "forward+backward": forward + backward}[direction]
    return float(elements * passes)

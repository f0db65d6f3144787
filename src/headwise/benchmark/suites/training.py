"""Cases of the other training ops: builders for any device, with PyTorch's own ops as peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.benchmark.case import BenchCase, Contender, Direction
from headwise.benchmark.correctness import WholeCheck, first_output, oracle
from headwise.benchmark.requirements import Requirement
from headwise.testing import Arguments, Maker, Outputs

TORCH = "PyTorch"
RMS_EPS = 1e-6


@dataclass(frozen=True)
class Setting:
    """What a suite sets for a case besides its shape."""

    dtype: torch.dtype = torch.float32
    group: str = "training ops"
    requirements: tuple[Requirement, ...] = ()

    def fields(self) -> dict[str, Any]:
        """As fields of a memory-bound case."""
        return {
            "dtype": self.dtype,
            "group": self.group,
            "requirements": self.requirements,
            "counted": "bytes",
        }


PLAIN = Setting()


def _pytorch(call: Callable[[Arguments], Tensor]) -> tuple[Contender, ...]:
    return (Contender(TORCH, lambda arguments: lambda: call(arguments)),)


def rms_norm_case(
    rows: int, width: int, direction: Direction, setting: Setting = PLAIN, *, peers: tuple[Contender, ...] = ()
) -> BenchCase:
    """peers: beside PyTorch, here and below."""
    differentiable = ("x", "weight")
    return BenchCase(
        name=f"rms_norm {rows} × {width}",
        direction=direction,
        make=lambda maker: {"x": maker.normal(rows, width), "weight": maker.normal(width)},
        ours=lambda a: lambda: hw.rms_norm(**a),
        check=WholeCheck(oracle("rms_norm"), differentiable),
        differentiable=differentiable,
        peers=(*_pytorch(lambda a: F.rms_norm(a["x"], (width,), a["weight"], RMS_EPS)), *peers),
        flops=_per_element(rows * width, direction, forward=4, backward=9),
        bytes=setting.dtype.itemsize * _per_element(rows * width, direction, forward=2, backward=3),
        **setting.fields(),
    )


def softmax_case(
    rows: int, width: int, direction: Direction, setting: Setting = PLAIN, *, peers: tuple[Contender, ...] = ()
) -> BenchCase:
    return BenchCase(
        name=f"softmax {rows} × {width}",
        direction=direction,
        make=lambda maker: {"x": maker.normal(rows, width, scale=3.0)},
        ours=lambda a: lambda: hw.softmax(**a),
        check=WholeCheck(oracle("softmax"), ("x",)),
        differentiable=("x",),
        peers=(*_pytorch(lambda a: torch.softmax(a["x"], -1)), *peers),
        flops=_per_element(rows * width, direction, forward=5, backward=4),
        bytes=setting.dtype.itemsize * _per_element(rows * width, direction, forward=2, backward=3),
        **setting.fields(),
    )


def embedding_case(
    ids: int, entries: int, width: int, direction: Direction, setting: Setting = PLAIN, *, one_id: bool = False
) -> BenchCase:
    """one_id: all ids are the same, so that backward adds all rows into one."""
    moved = 2.0 * ids * width if direction == "forward" else (ids + entries) * float(width)

    def make(maker: Maker) -> Arguments:
        drawn = maker.integers(0, entries, ids)
        if one_id:
            drawn = drawn[:1].expand(ids).contiguous()
        return {"ids": drawn, "weight": maker.normal(entries, width)}

    return BenchCase(
        name=f"embedding {ids} of {entries} × {width}" + (", one id" if one_id else ""),
        direction=direction,
        make=make,
        ours=lambda a: lambda: hw.embedding(**a),
        check=WholeCheck(oracle("embedding"), ("weight",)),
        differentiable=("weight",),
        peers=_pytorch(lambda a: F.embedding(a["ids"], a["weight"])),
        flops=0.0 if direction == "forward" else float(ids * width),
        bytes=setting.dtype.itemsize * moved,
        **setting.fields(),
    )


def transpose_case(rows: int, width: int, setting: Setting = PLAIN) -> BenchCase:
    """Forward only: our backward is the same kernel, and PyTorch's only returns a view."""
    return BenchCase(
        name=f"transpose {rows} × {width}",
        direction="forward",
        make=lambda maker: {"x": maker.normal(rows, width)},
        ours=lambda a: lambda: hw.transpose(**a),
        check=WholeCheck(oracle("transpose"), ("x",)),
        differentiable=("x",),
        peers=_pytorch(lambda a: a["x"].mT.contiguous()),
        bytes=setting.dtype.itemsize * 2.0 * rows * width,
        **setting.fields(),
    )


def cross_entropy_case(
    rows: int, vocabulary: int, setting: Setting = PLAIN, *, fused: bool = False, peers: tuple[Contender, ...] = ()
) -> BenchCase:
    """fused: ours computes loss and gradient in one pass; otherwise it goes through autograd."""

    def make(maker: Maker) -> Arguments:
        return {"logits": maker.normal(rows, vocabulary, scale=2.0), "targets": maker.integers(0, vocabulary, rows)}

    def ours(arguments: Arguments) -> Callable[[], Any]:
        if fused:
            return lambda: hw.cross_entropy_forward_backward(**arguments)
        return lambda: hw.cross_entropy(**arguments)

    return BenchCase(
        name=f"cross_entropy {rows} × {vocabulary}" + (", one pass" if fused else ""),
        direction="forward+backward",
        make=make,
        ours=ours,
        explicit=fused,
        check=CrossEntropyCheck(),
        differentiable=("logits",),
        peers=(*_pytorch(lambda a: F.cross_entropy(a["logits"], a["targets"])), *peers),
        flops=8.0 * rows * vocabulary,
        # One read of the logits and one write of their gradient.
        bytes=setting.dtype.itemsize * 2.0 * rows * vocabulary,
        **setting.fields(),
    )


@dataclass(frozen=True)
class CrossEntropyCheck:
    """Checks the mean loss over all rows, and the gradient of every sixteenth row.

    Rows share only the divisor of the mean, which is their number (no target is ignored). So the oracle sums a few rows
    at a time: all logits in float64 would take several gigabytes.
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


def _per_element(elements: int, direction: Direction, *, forward: int, backward: int) -> float:
    """Operations, or operands read and written, of all elements, from the number per element."""
    times = {"forward": forward, "backward": backward, "forward+backward": forward + backward}[direction]
    return float(elements * times)

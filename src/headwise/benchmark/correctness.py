"""The gate: a wrong result is not timed.

Our result must be within the error budget of `headwise.testing`, against the oracle in float64. Where that does not fit
in memory, a case's `Check` computes a part of the result (one head, some rows). The whole result is always compared
with the peers' results, which finds errors outside that part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.cases import SUITES
from headwise.testing import Arguments, Outputs


@dataclass(frozen=True)
class WholeCheck:
    """The whole result by an op's oracle: the first output, and the gradients of the differentiable arguments."""

    reference: Callable[[Arguments], Outputs]
    differentiable: tuple[str, ...]

    def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
        if grad_out is None:
            return {"out": first_output(self.reference(arguments))}
        values, leaves = with_leaves(arguments, self.differentiable)
        out = first_output(self.reference(values))
        grads = torch.autograd.grad(out, list(leaves.values()), grad_out.to(out.dtype))
        return {"out": out.detach(), **{f"grad of {n}": g for n, g in zip(leaves, grads, strict=True)}}

    def pick(self, results: Outputs) -> Outputs:
        return results


def oracle(op: str) -> Callable[[Arguments], Outputs]:
    """The oracle of an op, from the case table that its tests use."""
    return lambda arguments: SUITES[op].reference(arguments)


def disagreement(ours: Outputs, theirs: Outputs) -> str:
    """What differs between two full results; empty if they agree up to rounding.

    Different flags, a missing head or a wrong mask show as a relative distance near 1; two float32 results of the same
    sum differ by about 1e-6. The limit is half the digits of the dtype.
    """
    for name, mine in ours.items():
        other = theirs[name]
        if mine.shape != other.shape:
            return f"{name}: shape {tuple(mine.shape)} against {tuple(other.shape)}"
        size = other.norm().item()
        distance = (mine - other).norm().item()
        if not distance <= max(size, torch.finfo(other.dtype).tiny) * torch.finfo(other.dtype).eps ** 0.5:
            return f"{name}: relative distance {distance / size if size else float('inf'):.2g}"
    return ""


def first_output(outputs: Outputs) -> Tensor:
    return next(iter(outputs.values()))


def with_leaves(arguments: Arguments, differentiable: tuple[str, ...]) -> tuple[Arguments, dict[str, Tensor]]:
    """The arguments with fresh leaves (over the same memory) in place of those that get gradients."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in differentiable}
    return {**arguments, **leaves}, leaves

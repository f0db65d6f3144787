"""The choice between the two engines, and what is the same for both.

Forward goes through PyTorch's flash kernel on visible ranges where that covers the problem, through our tiles where it does
not (softcap). Backward does too, and leaves to the tiles also gradients of a bias, gradients into the lse, and
large logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.backends.cpu.attention_flash import flash_backward, flash_forward
from headwise.backends.cpu.attention_problem import Problem
from headwise.backends.cpu.attention_tiled import tiled_backward, tiled_forward
from headwise.layout import lse_dtype

_LARGE_LSE = 14.0


def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill out ``(B, Hq, Sq, Dv)`` and lse ``(B, Hq, Sq)``, the sink not yet in them."""
    if out.numel() == 0:
        return
    if problem.k.shape[2] == 0:
        out.fill_(0.0)
        lse.fill_(-torch.inf)
    elif problem.softcap:
        tiled_forward(problem, out, lse)
    else:
        flash_forward(problem, out, lse)


def backward(
    problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, dbias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` in the dtype that sums are kept in; adds into ``dbias`` if given."""
    empty = (lse == -torch.inf)[..., None]
    some_empty = bool(empty.any())
    if some_empty:  # such a query may hold anything, and so may its gradient: zero times NaN would reach the keys
        grad_out, out, q = (torch.where(empty, 0.0, x) for x in (grad_out, out, problem.q))
        grad_lse = None if grad_lse is None else torch.where(empty[..., 0], 0.0, grad_lse)
        problem = problem._replace(q=q)
    if problem.softcap or grad_lse is not None or dbias is not None or _has_large_lse(lse):
        dq, dk, dv = tiled_backward(problem, grad_out, row_delta(grad_out, grad_lse, out), lse, dbias)
    else:
        dq, dk, dv = flash_backward(problem, grad_out, out, lse)
    # Nor does what other queries see reach it: zero times their NaN is NaN.
    return dq.masked_fill_(empty, 0.0) if some_empty else dq, dk, dv


def _has_large_lse(lse: Tensor) -> bool:
    """PyTorch's backward loses digits as logits grow: four times the error of plain PyTorch at an lse of 30."""
    return bool((lse.abs() > _LARGE_LSE).logical_and_(lse != -torch.inf).any())


def row_delta(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor) -> Tensor:
    """``rowsum(grad_out · out) - grad_lse``: what every score's gradient is measured from."""
    dtype = lse_dtype(out.dtype)
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)
    return delta if grad_lse is None else delta - grad_lse


def join_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> None:
    """Let the sink into the denominator of the rows that see something, in place."""
    if sink is None or lse.numel() == 0:
        return
    joined = torch.logaddexp(lse, sink.to(lse.dtype)[None, :, None])
    present = lse > -torch.inf
    out.mul_(torch.where(present, torch.exp(lse - joined), 1.0)[..., None])
    lse.copy_(torch.where(present, joined, lse))


def sink_gradient(sink: Tensor, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """The sink takes its share of the denominator and gives no value, so only ``-delta`` reaches it: ``(Hq,)``."""
    share = torch.exp(sink.to(lse.dtype)[None, :, None] - lse)
    reached = torch.where(lse == -torch.inf, 0.0, share * row_delta(grad_out, grad_lse, out))
    return -reached.sum((0, 2)).to(sink.dtype)

"""The choice between the two engines, and what they have in common: sinks, and rows that see nothing.

PyTorch's flash kernel does what it covers. Our tiles do the rest: softcap and dropout in both directions, and in backward
also gradients of a bias, gradients into the lse, and large logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.backends.cpu.attention_flash import flash_backward, flash_forward
from headwise.backends.cpu.attention_problem import Problem, Saved, accumulator
from headwise.backends.cpu.attention_tiled import tiled_backward, tiled_forward

_LARGE_LSE = 14.0


def forward(problem: Problem, sink: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Fill out ``(B, Hq, Sq, Dv)`` and lse ``(B, Hq, Sq)``."""
    if out.numel() == 0:
        return
    # A sink shrinks the output: in the dtype of the arithmetic, before it is rounded.
    exact = out if sink is None else torch.empty_like(out, dtype=lse.dtype)
    if problem.k.shape[2] == 0:
        exact.fill_(0.0)
        lse.fill_(-torch.inf)
    elif problem.softcap or problem.dropout is not None:
        tiled_forward(problem, exact, lse)
    else:
        flash_forward(problem, exact, lse)
    if sink is not None:
        join_sink(exact, lse, sink)
        out.copy_(exact)


def join_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Let the sink into the denominators, in place."""
    joined = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    out.mul_(torch.where(lse == -torch.inf, 0.0, torch.exp(lse - joined))[..., None])
    lse.copy_(joined)


def backward(
    problem: Problem, sink: Tensor | None, saved: Saved, dbias: Tensor | None, dsink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` in the dtype that sums are kept in; adds into ``dbias`` and ``dsink`` where they are given."""
    empty = _empty_rows(saved, sink)
    if empty is not None:
        # Such a query may hold anything, and so may its gradient: zero times NaN would reach the keys and the sink.
        problem = problem._replace(q=_finite_in(empty, problem.q))
        saved = saved._replace(grad_out=_finite_in(empty, saved.grad_out), out=_finite_in(empty, saved.out))
    grad_out, grad_lse, out, lse = saved
    has_scores = problem.q.numel() > 0 and problem.k.numel() > 0
    ours = problem.softcap > 0 or problem.dropout is not None or grad_lse is not None or dbias is not None
    tiled = has_scores and (ours or _has_large_values(lse))
    delta = _row_delta(saved) if tiled or dsink is not None else None
    if dsink is not None and sink is not None:
        assert delta is not None
        # The sink has a share of the denominator and no value, so its logit's gradient is -share · delta.
        share = torch.exp(sink.to(lse.dtype)[:, None] - lse)
        dsink -= torch.where(lse == -torch.inf, 0.0, share * delta).sum((0, 2))
    if not has_scores:
        return accumulator(problem.q), accumulator(problem.k), accumulator(problem.v)
    # exp(score - lse) of a row without a denominator has to be 0, not NaN.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    if tiled:
        assert delta is not None
        delta = delta if empty is None else _finite_in(empty[..., 0], delta)
        dq, dk, dv = tiled_backward(problem, grad_out, delta, lse, dbias)
    else:
        dq, dk, dv = flash_backward(problem, grad_out, out, lse)
    # Nor may NaN in keys that other queries see reach such a query.
    return dq if empty is None else _finite_in(empty, dq), dk, dv


def _empty_rows(saved: Saved, sink: Tensor | None) -> Tensor | None:
    """``(B, Hq, Sq, 1)``: the rows that see nothing; None if there are none.

    Without a sink they have an lse of -inf. With one their lse is the sink's logit, and so is that of a row whose scores
    are far below the sink; but only an empty row has an output of zeros as well, or one that vanished in rounding.
    """
    level = torch.full((), -torch.inf) if sink is None else sink.to(saved.lse.dtype)[:, None]
    empty = (saved.lse == level)[..., None]
    if sink is not None and empty.any():
        empty &= (saved.out == 0).all(-1, keepdim=True)
    return empty if empty.any() else None


def _finite_in(rows: Tensor, x: Tensor) -> Tensor:
    """x with zeros for what is not finite in these rows. Finite values stay, because a row may be only nearly empty."""
    return x.masked_fill(rows & ~x.isfinite(), 0.0)


def _has_large_values(lse: Tensor) -> bool:
    """PyTorch's backward loses digits as logits grow: four times the error of plain PyTorch at an lse of 30."""
    return bool((lse.abs() > _LARGE_LSE).logical_and_(lse != -torch.inf).any())


def _row_delta(saved: Saved) -> Tensor:
    """``rowsum(grad_out · out) - grad_lse``, ``(B, Hq, Sq)``: what the gradients of a row's scores are measured from."""
    dtype = saved.lse.dtype
    delta = (saved.grad_out.to(dtype) * saved.out.to(dtype)).sum(-1)
    return delta if saved.grad_lse is None else delta - saved.grad_lse

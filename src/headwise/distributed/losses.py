"""Cross entropy with the vocabulary sharded over ranks.

    lse = log sum_r exp(lse_r)        loss = lse - x_t        dx_v = exp(x_v - lse) - [v = t]

Two numbers per row and rank are exchanged: the log-sum-exp of the rank's classes, and the target's logit from the rank that
has it. The gradient of a rank's logits needs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise import layout
from headwise.distributed.groups import Description, Group, Peers, agree, gather, peers_of
from headwise.ops import _checks
from headwise.ops.cross_entropy import check_options

OP = "vocabulary_parallel_cross_entropy"
CHUNK = 2**22  # logits that are float32 at one time


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: Group, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """`cross_entropy` of logits whose last dimension is sharded over ranks: the same loss on every rank.

    logits   ``(..., V_local)``: the classes that follow those of the ranks before; V_local may differ between ranks
    targets  ``(...,)``, classes of the whole vocabulary, the same on every rank

    The gradient of the logits is that of this one loss, which all ranks hold: a hidden state that every rank multiplied
    with its part of the weight gets a part of its gradient on each, to be summed over ranks. label_smoothing, z_loss and
    softcap are not there yet. Differentiable once.
    """
    peers = peers_of(OP, group)

    def check() -> Description:
        _checks.floating(OP, "logits", logits)
        _checks.at_least_dims(OP, "logits", logits, 1)
        if logits.shape[-1] == 0:
            raise ValueError(f"{OP}: logits has shape {_checks.shape_of(logits)}; it needs at least one class per rank")
        _checks.integer(OP, "targets", targets)
        _checks.shape(OP, "targets", targets, logits.shape[:-1], "the shape of logits without its last dimension")
        _checks.same_device(OP, "targets", targets, "logits", logits)
        check_options(OP, ignore_index, reduction, 0.0, 0.0, None)
        same = {
            "shape of targets": tuple(targets.shape), "dtype of logits": str(logits.dtype),
            "device": logits.device.type, "ignore_index": ignore_index, "reduction": reduction,
        }  # fmt: skip
        return Description(same, (logits.shape[-1],))

    widths = tuple(width for (width,) in agree(peers, check))
    rows = logits.reshape(-1, logits.shape[-1])
    losses: Tensor = _Loss.apply(rows, targets.reshape(-1).long(), _Classes(peers, widths, ignore_index))
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (targets != ignore_index).sum().clamp(min=1)


class _Classes(NamedTuple):
    peers: Peers
    widths: tuple[int, ...]  # of every rank
    ignore_index: int

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Whether this rank has the target of a row, and where; 0 if not."""
        own = targets - sum(self.widths[: self.peers.rank])
        here = (own >= 0) & (own < self.widths[self.peers.rank]) & (targets != self.ignore_index)
        return here, own.masked_fill(~here, 0)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Rows whose float32 copy is small."""
    step = max(CHUNK // logits.shape[1], 1)
    return (slice(start, start + step) for start in range(0, logits.shape[0], step))


class _Loss(torch.autograd.Function):
    """The loss of every row (N,) of logits (N, V_local)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, classes: _Classes) -> Tensor:
        count, dtype = logits.shape[0], layout.statistics_dtype(logits.dtype)
        here, own = classes.local(targets)
        mine = logits.new_zeros(2, count, dtype=dtype)
        for rows in _chunks(logits):
            mine[0, rows] = logits[rows].to(dtype).logsumexp(-1)
        mine[1] = torch.where(here, logits.gather(1, own[:, None])[:, 0].to(dtype), 0.0)
        parts = gather(classes.peers, mine.reshape(-1), [2 * count] * classes.peers.ranks, "merging parts")
        lses, found = torch.stack(parts).view(-1, 2, count).unbind(1)
        lse = lses.logsumexp(0)
        ignored = targets == classes.ignore_index
        outside = ((targets < 0) | (targets >= sum(classes.widths))) & ~ignored
        ctx.save_for_backward(logits, targets, lse, outside)
        ctx.classes = classes
        return (lse - found.sum(0)).masked_fill(outside, torch.nan).masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse, outside = ctx.saved_tensors
        here, own = ctx.classes.local(targets)
        ignored, weight = targets == ctx.classes.ignore_index, grad.masked_fill(outside, torch.nan)
        found = torch.empty_like(logits)
        for rows in _chunks(logits):
            probs = (logits[rows].to(lse.dtype) - lse[rows, None]).exp()
            probs.scatter_add_(1, own[rows, None], -here[rows, None].to(probs.dtype))
            found[rows] = (probs * weight[rows, None]).masked_fill(ignored[rows, None], 0.0).to(logits.dtype)
        return found, None, None

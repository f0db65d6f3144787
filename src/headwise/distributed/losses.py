"""Cross entropy with the vocabulary sharded over ranks, of logits or of a linear layer whose logits never exist as a whole.

With z = c tanh(x / c) where a soft cap c is given (else z = x), over all V classes:

    lse  = log sum_r exp(lse_r)        loss = (1 - a) (lse - z_t) + a (lse - sum_v z_v / V) + b lse²
    dz_v = g (exp(z_v - lse) (1 + 2 b lse) - a / V - (1 - a) [v = t])        dx_v = dz_v (1 - (z_v / c)²)

Two numbers per row and rank are exchanged: the log-sum-exp of the rank's classes, and the target's logit from the rank that
has it; with label smoothing (a) a third, the sum of the rank's logits. The gradient of a rank's logits needs nothing more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise import layout
from headwise.distributed.groups import Description, Group, Peers, agree, gather, peers_of, sum_parts
from headwise.ops import _autocast, _checks
from headwise.ops.cross_entropy import check_options

LOGITS, LINEAR = "vocabulary_parallel_cross_entropy", "vocabulary_parallel_linear_cross_entropy"
CHUNK = 2**22  # logits that are float32 at one time


@torch.compiler.disable  # type: ignore[untyped-decorator]  # ranks talk about the call before it runs: a graph ends here
def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: Group, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """`cross_entropy` of logits whose last dimension is sharded over ranks: the same loss on every rank.

    logits   ``(..., V_local)``: the classes that follow those of the ranks before; V_local may differ between ranks
    targets  ``(...,)``, classes of the whole vocabulary, the same on every rank
    other    as in `cross_entropy`

    The gradient of the logits is that of this one loss, which all ranks hold: a hidden state that every rank multiplied
    with its part of the weight gets a part of its gradient on each, to be summed over ranks. Differentiable once.
    """

    def check() -> dict[str, Any]:
        _checks.floating(LOGITS, "logits", logits)
        _checks.at_least_dims(LOGITS, "logits", logits, 1)
        _check_targets(LOGITS, "logits", logits, targets)
        return {"dtype": str(logits.dtype), "gradient": logits.requires_grad}

    options = ignore_index, reduction, label_smoothing, z_loss, softcap
    classes = _classes(LOGITS, group, check, lambda: logits.shape[-1], targets, options)
    rows = logits.reshape(-1, logits.shape[-1])
    losses: Tensor = _Loss.apply(rows, targets.reshape(-1).long(), classes)
    return _reduced(losses, targets, None, ignore_index, reduction)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def vocabulary_parallel_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, bias: Tensor | None = None,
    token_weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`linear_cross_entropy` with the rows of the weight sharded over ranks: the same loss on every rank.

    hidden         ``(..., H)``, the same on every rank
    weight, bias   ``(V_local, H)``, ``(V_local,)``: the classes that follow those of the ranks before
    targets        ``(...,)``, and token_weights ``(...,)`` if given: the same on every rank
    other          as in `linear_cross_entropy`

    The gradient of hidden is summed over ranks here, so it is the whole one on every rank; those of weight and bias belong
    to this rank's classes. The logits are made in chunks of rows, in float32, forward and again backward. Differentiable
    once.
    """
    hidden, weight, bias = _autocast.lowered(hidden, weight, bias)

    def check() -> dict[str, Any]:
        _checks.floating(LINEAR, "hidden", hidden)
        _checks.at_least_dims(LINEAR, "hidden", hidden, 1)
        _checks.same_dtype(LINEAR, "weight", weight, "hidden", hidden)
        _checks.same_device(LINEAR, "weight", weight, "hidden", hidden)
        _checks.shape(LINEAR, "weight", weight, (weight.shape[0], hidden.shape[-1]), "(V_local, H)")
        if bias is not None:
            _checks.own_or_float32(LINEAR, "bias", bias, "hidden", hidden)
            _checks.shape(LINEAR, "bias", bias, (weight.shape[0],), "(V_local,)")
        if token_weights is not None:
            _checks.floating(LINEAR, "token_weights", token_weights)
            _checks.shape(LINEAR, "token_weights", token_weights, targets.shape, "the shape of targets")
            if token_weights.requires_grad:
                raise NotImplementedError(
                    f"{LINEAR}: token_weights requires a gradient, and there is none across ranks"
                )
        _check_targets(LINEAR, "hidden", hidden, targets)
        needed = tuple(x is not None and x.requires_grad for x in (hidden, weight, bias))
        weighted = None if token_weights is None else str(token_weights.dtype)
        return {"dtype": str(hidden.dtype), "H": hidden.shape[-1], "gradient": needed, "token_weights": weighted}

    options = ignore_index, reduction, label_smoothing, z_loss, softcap
    classes = _classes(LINEAR, group, check, lambda: weight.shape[0], targets, options)
    rows = hidden.reshape(-1, hidden.shape[-1])
    losses: Tensor = _LinearLoss.apply(rows, weight, bias, targets.reshape(-1).long(), classes)
    return _reduced(losses, targets, token_weights, ignore_index, reduction)


class _Classes(NamedTuple):
    peers: Peers
    widths: tuple[int, ...]  # of every rank
    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float | None

    @property
    def width(self) -> int:
        return self.widths[self.peers.rank]

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Whether this rank has the target of a row, and where; 0 if not."""
        own = targets - sum(self.widths[: self.peers.rank])
        here = (own >= 0) & (own < self.width) & (targets != self.ignore_index)
        return here, own.masked_fill(~here, 0)

    def capped(self, x: Tensor) -> Tensor:
        return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)

    def numbers(self, z: Tensor, targets: Tensor) -> list[Tensor]:
        """What the others need of a rank's logits z ``(n, V_local)``."""
        here, own = self.local(targets)
        found = torch.where(here, z.gather(1, own[:, None])[:, 0], 0.0)
        return [z.logsumexp(-1), found, *([z.sum(-1)] if self.smoothing else [])]

    def losses(self, mine: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss and the lse of every row, and where a target is no class, from the numbers ``(2 or 3, n)``."""
        parts = gather(self.peers, mine.reshape(-1), [mine.numel()] * self.peers.ranks, "merging parts")
        everyone = torch.stack(parts).view(-1, *mine.shape)
        lse = everyone[:, 0].logsumexp(0)
        loss = (1 - self.smoothing) * (lse - everyone[:, 1].sum(0))
        if self.smoothing:
            loss = loss + self.smoothing * (lse - everyone[:, 2].sum(0) / sum(self.widths))
        if self.z_loss:
            loss = loss + self.z_loss * lse.square()
        ignored = targets == self.ignore_index
        outside = ((targets < 0) | (targets >= sum(self.widths))) & ~ignored
        return loss.masked_fill(outside, torch.nan).masked_fill(ignored, 0.0), lse, outside

    def gradient(self, z: Tensor, lse: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """Of a rank's logits before the soft cap, in place of the capped ones z."""
        here, own = self.local(targets)
        share = 1.0 if self.softcap is None else 1 - (z / self.softcap).square()
        dz = z.sub_(lse[:, None]).exp_()
        if self.z_loss:
            dz *= (1 + 2 * self.z_loss * lse)[:, None]
        if self.smoothing:
            dz -= self.smoothing / sum(self.widths)
        dz.scatter_add_(1, own[:, None], (self.smoothing - 1) * here[:, None].to(dz.dtype))
        dz *= weight[:, None] * share
        return dz.masked_fill_((targets == self.ignore_index)[:, None], 0.0)


def _check_targets(op: str, name: str, x: Tensor, targets: Tensor) -> None:
    _checks.integer(op, "targets", targets)
    _checks.shape(op, "targets", targets, x.shape[:-1], f"the shape of {name} without its last dimension")
    _checks.same_device(op, "targets", targets, name, x)


def _classes(
    op: str, group: Group, check: Callable[[], dict[str, Any]], width: Callable[[], int], targets: Tensor,
    options: tuple[int, str, float, float, float | None],
) -> _Classes:  # fmt: skip
    peers = peers_of(op, group)

    def describe() -> Description:
        same = check()
        if width() == 0:
            raise ValueError(f"{op}: this rank has no class; it needs at least one class per rank")
        check_options(op, *options)
        names = ("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap")
        same |= dict(zip(names, options, strict=True)) | {"shape of targets": tuple(targets.shape)}
        return Description(same | {"device": targets.device.type}, (width(),))

    widths = tuple(found for (found,) in agree(peers, describe))
    ignore_index, _, smoothing, z_loss, softcap = options
    return _Classes(peers, widths, ignore_index, smoothing, z_loss, softcap)


def _reduced(
    losses: Tensor, targets: Tensor, token_weights: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    losses, ignored = losses.view(targets.shape), targets == ignore_index
    weights = (~ignored).to(losses.dtype)
    if token_weights is not None:
        weights = token_weights.to(losses.dtype).masked_fill(ignored, 0.0)
        losses = losses * weights
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    whole = weights.sum()
    return total * torch.where(whole == 0, 0.0, 1 / whole)


def _chunks(count: int, width: int) -> Iterator[slice]:
    """Rows whose float32 logits are small."""
    step = max(CHUNK // width, 1)
    return (slice(start, start + step) for start in range(0, count, step))


class _Loss(torch.autograd.Function):
    """The loss of every row (N,) of logits (N, V_local)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, classes: _Classes) -> Tensor:
        mine = _empty_numbers(logits, classes)
        for rows in _chunks(*logits.shape):
            z = classes.capped(logits[rows].to(mine.dtype))
            mine[:, rows] = torch.stack(classes.numbers(z, targets[rows]))
        loss, lse, outside = classes.losses(mine, targets)
        ctx.save_for_backward(logits, targets, lse, outside)
        ctx.classes = classes
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse, outside = ctx.saved_tensors
        weight, found = grad.masked_fill(outside, torch.nan), torch.empty_like(logits)
        for rows in _chunks(*logits.shape):
            z = ctx.classes.capped(logits[rows].to(lse.dtype, copy=True))
            found[rows] = ctx.classes.gradient(z, lse[rows], targets[rows], weight[rows]).to(logits.dtype)
        return found, None, None


class _LinearLoss(torch.autograd.Function):
    """The loss of every row (N,) of hidden (N, H) with weight (V_local, H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, classes: _Classes
    ) -> Tensor:
        mine, operand = _empty_numbers(hidden, classes), _operand(weight)
        for rows in _chunks(hidden.shape[0], classes.width):
            z = classes.capped(_logits(hidden[rows], operand, bias))
            mine[:, rows] = torch.stack(classes.numbers(z, targets[rows]))
        loss, lse, outside = classes.losses(mine, targets)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, outside)
        ctx.classes = classes
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, outside = ctx.saved_tensors
        classes, operand = ctx.classes, _operand(weight)
        given = grad.masked_fill(outside, torch.nan)
        # What an ignored row holds reaches nothing, not even as NaN times zero.
        hidden = hidden.masked_fill((targets == classes.ignore_index)[:, None], 0.0)
        dhidden = torch.zeros_like(hidden, dtype=lse.dtype)
        dweight, dbias = torch.zeros_like(weight, dtype=lse.dtype), weight.new_zeros(weight.shape[0], dtype=lse.dtype)
        for rows in _chunks(hidden.shape[0], classes.width):
            z = classes.capped(_logits(hidden[rows], operand, bias))
            dx = classes.gradient(z, lse[rows], targets[rows], given[rows])
            dbias += dx.sum(0)
            dx = dx.to(operand.dtype)
            dhidden[rows] = _product(dx, operand)
            dweight += _product(dx.T, _operand(hidden[rows]))
        if ctx.needs_input_grad[0]:
            dhidden = _summed(classes.peers, dhidden)
        found = dhidden.to(hidden.dtype), dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype)
        return *found, None, None


def _empty_numbers(x: Tensor, classes: _Classes) -> Tensor:
    return x.new_empty(3 if classes.smoothing else 2, x.shape[0], dtype=layout.statistics_dtype(x.dtype))


def _operand(x: Tensor) -> Tensor:
    """As `_product` takes it: 16 bits where products of 16-bit operands come in float32, else float32."""
    return x if x.is_cuda or x.dtype == torch.float64 else x.float()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """In float32 at least, under autocast too."""
    with torch.autocast(a.device.type, enabled=False):
        return _multiplied(a, b)


def _multiplied(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def _logits(hidden: Tensor, operand: Tensor, bias: Tensor | None) -> Tensor:
    x = _product(_operand(hidden), operand.T)
    return x if bias is None else x.add_(bias.to(x.dtype))


def _summed(peers: Peers, x: Tensor) -> Tensor:
    """The sum over ranks, on every rank, added in their order: a reduce-scatter and a gather."""
    flat = x.reshape(-1)
    bounds = [rank * flat.numel() // peers.ranks for rank in range(peers.ranks + 1)]
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    phase = "the sum of the gradient of hidden"
    own = sum_parts(peers, flat, sizes, phase)
    return torch.cat(gather(peers, own, sizes, phase)).view_as(x)

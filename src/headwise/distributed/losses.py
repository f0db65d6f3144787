"""Cross entropy with the vocabulary sharded over ranks, of logits or of a linear layer whose logits never exist as a whole.

With z = c tanh(x / c) where a soft cap c is given (else z = x), over all V classes, and p_v = exp(z_v - lse):

    lse  = log sum_r exp(lse_r)        loss = (1 - a) (lse - z_t) + a (lse - sum_v z_v / V) + b lse²
    logprob = z_t - lse                entropy = sum_r exp(lse_r - lse) (entropy_r + lse - lse_r)
    dz_v = g (p_v (1 + 2 b lse) - a / V - (1 - a) [v = t]) + g_logprob ([v = t] - p_v) - g_entropy p_v (z_v - lse + entropy)
    dx_v = dz_v (1 - (z_v / c)²)

Two numbers per row and rank are exchanged: the log-sum-exp of the rank's classes, and the target's logit from the rank that
has it; with label smoothing (a) one more, the sum of the rank's logits, and with entropies the entropy of the distribution
over the rank's classes alone (no term of the whole one is negative, so nothing cancels). The gradient of a rank's logits
needs nothing more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise import layout
from headwise.distributed.groups import (
    Description,
    Group,
    Peers,
    agree,
    check_plain,
    fingerprint,
    gather,
    needs_gradient,
    peers_of,
    same_backward,
    sum_parts,
)  # fmt: skip
from headwise.ops import _autocast, _checks
from headwise.ops.cross_entropy import check_options

LOGITS, LINEAR = "vocabulary_parallel_cross_entropy", "vocabulary_parallel_linear_cross_entropy"
CHUNK = 2**22  # logits that are float32 at one time


@overload
def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: Group, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    return_logprobs: Literal[False] = False, return_entropy: Literal[False] = False, backend: str | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: Group, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, return_logprobs: bool = False,
    return_entropy: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]  # ranks talk about the call before it runs: a graph ends here
def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: Group, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, return_logprobs: bool = False,
    return_entropy: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`cross_entropy` of logits whose last dimension is sharded over ranks: the same loss on every rank.

    logits   ``(..., V_local)``: the classes that follow those of the ranks before; V_local may differ between ranks, or be 0
    targets  ``(...,)``, classes of the whole vocabulary, the same on every rank
    return_logprobs, return_entropy   add these per token, in this order, as `linear_cross_entropy` does
    backend  PyTorch's own operators compute it on the device of the logits: None, or "cpu" on the CPU
    other    as in `cross_entropy`

    The gradient of the logits is that of this one loss, which all ranks hold: a hidden state that every rank multiplied
    with its part of the weight gets a part of its gradient on each, to be summed over ranks. Differentiable once.
    """

    def check() -> dict[str, Any]:
        check_plain(LOGITS, logits=logits, targets=targets)
        _checks.floating(LOGITS, "logits", logits)
        _checks.at_least_dims(LOGITS, "logits", logits, 1)
        _check_targets(LOGITS, "logits", logits, targets)
        return {"dtype": str(logits.dtype), "gradient": needs_gradient(logits)}

    options = ignore_index, reduction, label_smoothing, z_loss, softcap
    asked = return_logprobs, return_entropy
    classes = _classes(LOGITS, group, check, lambda: logits.shape[-1], targets, options, asked, backend)
    rows = logits.reshape(targets.numel(), logits.shape[-1])
    found = _Loss.apply(rows, targets.reshape(-1).long(), classes)
    return _results(found, targets, None, ignore_index, reduction, asked)


@overload
def vocabulary_parallel_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, bias: Tensor | None = None,
    token_weights: Tensor | None = None, return_logprobs: Literal[False] = False, return_entropy: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def vocabulary_parallel_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, bias: Tensor | None = None,
    token_weights: Tensor | None = None, return_logprobs: bool = False, return_entropy: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]
def vocabulary_parallel_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, bias: Tensor | None = None,
    token_weights: Tensor | None = None, return_logprobs: bool = False, return_entropy: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`linear_cross_entropy` with the rows of the weight sharded over ranks: the same loss on every rank.

    hidden         ``(..., H)``, the same on every rank
    weight, bias   ``(V_local, H)``, ``(V_local,)``: the classes that follow those of the ranks before
    targets        ``(...,)``, and token_weights ``(...,)`` if given: the same on every rank
    backend        as in `vocabulary_parallel_cross_entropy`
    other          as in `linear_cross_entropy`, return_logprobs and return_entropy too

    The gradient of hidden is summed over ranks here: it is whole on every rank, as is that of token_weights; those of
    weight and bias belong to this rank's classes. The logits are made in chunks of rows, in float32, forward and again
    backward. Differentiable once.
    """
    hidden, weight, bias = _autocast.cast_operands(hidden, weight, bias)

    def check() -> dict[str, Any]:
        check_plain(
            LINEAR, hidden=hidden, weight=weight, bias=bias, targets=targets, token_weights=token_weights
        )  # fmt: skip
        _checks.floating(LINEAR, "hidden", hidden)
        _checks.at_least_dims(LINEAR, "hidden", hidden, 1)
        _checks.floating(LINEAR, "weight", weight)
        _checks.dims(LINEAR, "weight", weight, 2, "(V_local, H)")
        _checks.same_dtype(LINEAR, "weight", weight, "hidden", hidden)
        _checks.same_device(LINEAR, "weight", weight, "hidden", hidden)
        _checks.shape(LINEAR, "weight", weight, (weight.shape[0], hidden.shape[-1]), "(V_local, H)")
        if bias is not None:
            _checks.own_or_float32(LINEAR, "bias", bias, "hidden", hidden)
            _checks.shape(LINEAR, "bias", bias, (weight.shape[0],), "(V_local,)")
        if token_weights is not None:
            _checks.floating(LINEAR, "token_weights", token_weights)
            _checks.own_or_float32(LINEAR, "token_weights", token_weights, "hidden", hidden)
            _checks.shape(LINEAR, "token_weights", token_weights, tuple(targets.shape), "the shape of targets")
            _checks.same_device(LINEAR, "token_weights", token_weights, "hidden", hidden)
        _check_targets(LINEAR, "hidden", hidden, targets)
        needed = tuple(map(needs_gradient, (hidden, weight, bias, token_weights)))
        weighted = None if token_weights is None else str(token_weights.dtype)
        return {"dtype": str(hidden.dtype), "H": hidden.shape[-1], "gradient": needed, "token_weights": weighted}

    options = ignore_index, reduction, label_smoothing, z_loss, softcap
    asked = return_logprobs, return_entropy
    classes = _classes(LINEAR, group, check, lambda: weight.shape[0], targets, options, asked, backend)
    rows = hidden.reshape(targets.numel(), hidden.shape[-1])
    found = _LinearLoss.apply(rows, weight, bias, targets.reshape(-1).long(), classes)
    return _results(found, targets, token_weights, ignore_index, reduction, asked)


class _Merged(NamedTuple):
    """Of every row, over all ranks."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor
    outside: Tensor  # whether its target is no class


class _Grads(NamedTuple):
    """Of a row's results."""

    loss: Tensor
    logprobs: Tensor | None
    entropy: Tensor | None

    def at(self, rows: slice) -> _Grads:
        return _Grads(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class _Classes(NamedTuple):
    peers: Peers
    widths: tuple[int, ...]  # of every rank
    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float | None
    entropy: bool
    call: int

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
        lse, found = z.logsumexp(-1), z.new_zeros(z.shape[0])
        if self.width:
            here, own = self.local(targets)
            found = torch.where(here, z.gather(1, own[:, None])[:, 0], 0.0)
        summed = [z.sum(-1)] if self.smoothing else []
        return [lse, found, *summed, *([_entropy_of(z, lse)] if self.entropy else [])]

    def merged(self, mine: Tensor, targets: Tensor) -> _Merged:
        """From the numbers ``(2 to 4, n)``."""
        parts = gather(self.peers, mine.reshape(-1), [mine.numel()] * self.peers.ranks, "merging parts")
        everyone = torch.stack(parts).view(self.peers.ranks, *mine.shape)
        lses = everyone[:, 0]
        lse = lses.logsumexp(0)
        logprobs = everyone[:, 1].sum(0) - lse
        loss = (self.smoothing - 1) * logprobs
        if self.smoothing:
            loss = loss + self.smoothing * (lse - everyone[:, 2].sum(0) / sum(self.widths))
        if self.z_loss:
            loss = loss + self.z_loss * lse.square()
        ignored = targets == self.ignore_index
        outside = ((targets < 0) | (targets >= sum(self.widths))) & ~ignored

        def marked(x: Tensor) -> Tensor:
            return x.masked_fill(outside, torch.nan).masked_fill(ignored, 0.0)

        entropy = None
        if self.entropy:
            behind = (lse - lses).masked_fill(lses == -torch.inf, 0.0)  # a rank without any probability
            entropy = marked(((lses - lse).exp() * (everyone[:, -1] + behind)).sum(0))
        return _Merged(marked(loss), marked(logprobs), entropy, lse, outside)

    def gradient(self, z: Tensor, lse: Tensor, entropy: Tensor | None, targets: Tensor, grads: _Grads) -> Tensor:
        """Of a rank's logits before the soft cap, in place of the capped ones z."""
        here, own = self.local(targets)
        share = None if self.softcap is None else 1 - (z / self.softcap).square()
        of_p, of_target = grads.loss * (1 + 2 * self.z_loss * lse), (self.smoothing - 1) * grads.loss
        if grads.logprobs is not None:
            of_p, of_target = of_p - grads.logprobs, of_target + grads.logprobs
        dz = z.sub_(lse[:, None])
        if grads.entropy is None or entropy is None:
            dz = dz.exp_().mul_(of_p[:, None])
        else:
            p = dz.exp()
            dz.add_(entropy[:, None]).mul_(-grads.entropy[:, None]).add_(of_p[:, None]).mul_(p)
            dz.masked_fill_(p == 0, 0.0)  # not 0 times infinity
        if self.smoothing:
            dz -= (self.smoothing / sum(self.widths) * grads.loss)[:, None]
        if self.width:
            dz.scatter_add_(1, own[:, None], (of_target * here)[:, None])
        if share is not None:
            dz *= share
        return dz.masked_fill_((targets == self.ignore_index)[:, None], 0.0)


def _entropy_of(z: Tensor, lse: Tensor) -> Tensor:
    """Of the distribution over a rank's classes alone; 0 where none has any probability."""
    logs = z - lse[:, None]
    return (
        -(logs.exp() * logs.masked_fill(~logs.isfinite(), 0.0)).masked_fill((lse == -torch.inf)[:, None], 0.0).sum(-1)
    )


def _check_targets(op: str, name: str, x: Tensor, targets: Tensor) -> None:
    _checks.integer(op, "targets", targets)
    _checks.shape(op, "targets", targets, x.shape[:-1], f"the shape of {name} without its last dimension")
    _checks.same_device(op, "targets", targets, name, x)


def _classes(
    op: str, group: Group, check: Callable[[], dict[str, Any]], width: Callable[[], int], targets: Tensor,
    options: tuple[int, str, float, float, float | None], asked: tuple[bool, bool], backend: str | None,
) -> _Classes:  # fmt: skip
    peers = peers_of(op, group)

    def describe() -> Description:
        same = check()
        check_options(op, *options)
        names = (
            "ignore_index",
            "reduction",
            "label_smoothing",
            "z_loss",
            "softcap",
            "return_logprobs",
            "return_entropy",
        )
        for name, value in zip(names[-2:], asked, strict=True):
            _checks.boolean(op, name, value)
        if backend is not None and (backend, targets.device.type) != ("cpu", "cpu"):
            raise ValueError(
                f"{op}: backend={backend!r} cannot run this call: its kernels compute whole rows, and not what the classes "
                f"of a rank add to one. PyTorch's own operators do, on {targets.device.type!r}: it needs None"
                + (" or 'cpu'" if targets.device.type == "cpu" else "")
            )
        same |= dict(zip(names, (*options, *asked), strict=True)) | {"fingerprint of targets": fingerprint(targets)}
        return Description(same | {"device": targets.device.type, "backend": backend}, (width(),))

    agreed = agree(peers, describe)
    widths = tuple(found for (found,) in agreed.lengths)
    if not sum(widths):
        raise ValueError(f"{op}: no rank has a class; the vocabulary needs at least one")
    ignore_index, _, smoothing, z_loss, softcap = options
    return _Classes(peers, widths, ignore_index, smoothing, z_loss, softcap, asked[1], agreed.call)


def _results(
    found: tuple[Tensor, Tensor, Tensor | None], targets: Tensor, token_weights: Tensor | None, ignore_index: int,
    reduction: str, asked: tuple[bool, bool],
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    loss = _reduced(found[0], targets, token_weights, ignore_index, reduction)
    per_token = [x.view(targets.shape) for x, wanted in zip(found[1:], asked, strict=True) if wanted and x is not None]
    return (loss, *per_token) if per_token else loss


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
    none = whole == 0  # the gradient of weights that add up to nothing is 0, too
    return (total / whole.masked_fill(none, 1.0)).masked_fill(none, 0.0)


def _chunks(count: int, width: int) -> Iterator[slice]:
    """Rows whose float32 logits are small."""
    step = CHUNK // max(width, 1) or 1
    return (slice(start, start + step) for start in range(0, count, step))


def _kept(ctx: Any, merged: _Merged, classes: _Classes, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """What the backward needs, kept; what the forward returns."""
    ctx.save_for_backward(*inputs, merged.lse, merged.entropy, merged.outside)
    ctx.classes = classes
    ctx.set_materialize_grads(False)
    return merged.loss, merged.logprobs, merged.entropy


def _given(outside: Tensor, lse: Tensor, grads: tuple[Tensor | None, ...]) -> _Grads:
    loss, *others = (None if x is None else x.masked_fill(outside, torch.nan) for x in grads)
    return _Grads(torch.zeros_like(lse) if loss is None else loss, *others)


class _Loss(torch.autograd.Function):
    """The loss, log-probability and entropy of every row (N,) of logits (N, V_local)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, classes: _Classes) -> tuple[Tensor | None, ...]:
        mine = _empty_numbers(logits, classes)
        for rows in _chunks(*logits.shape):
            z = classes.capped(logits[rows].to(mine.dtype))
            mine[:, rows] = torch.stack(classes.numbers(z, targets[rows]))
        return _kept(ctx, classes.merged(mine, targets), classes, logits, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, lse, entropy, outside = ctx.saved_tensors
        given, found = _given(outside, lse, grads), torch.empty_like(logits)
        for rows in _chunks(*logits.shape):
            z = ctx.classes.capped(logits[rows].to(lse.dtype, copy=True))
            of_rows = None if entropy is None else entropy[rows]
            found[rows] = ctx.classes.gradient(z, lse[rows], of_rows, targets[rows], given.at(rows)).to(logits.dtype)
        return found, None, None


class _LinearLoss(torch.autograd.Function):
    """The same of hidden (N, H) with weight (V_local, H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, classes: _Classes
    ) -> tuple[Tensor | None, ...]:
        mine, operand = _empty_numbers(hidden, classes), _operand(weight)
        for rows in _chunks(hidden.shape[0], classes.width):
            z = classes.capped(_logits(hidden[rows], operand, bias))
            mine[:, rows] = torch.stack(classes.numbers(z, targets[rows]))
        return _kept(ctx, classes.merged(mine, targets), classes, hidden, weight, bias, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy, outside = ctx.saved_tensors
        classes, operand, given = ctx.classes, _operand(weight), _given(outside, lse, grads)
        if ctx.needs_input_grad[0]:
            same_backward(classes.peers, classes.call)
        # What an ignored row holds reaches nothing, not even as NaN times zero.
        hidden = hidden.masked_fill((targets == classes.ignore_index)[:, None], 0.0)
        dhidden = torch.zeros_like(hidden, dtype=lse.dtype)
        dweight, dbias = torch.zeros_like(weight, dtype=lse.dtype), weight.new_zeros(weight.shape[0], dtype=lse.dtype)
        for rows in _chunks(hidden.shape[0], classes.width):
            z = classes.capped(_logits(hidden[rows], operand, bias))
            of_rows = None if entropy is None else entropy[rows]
            dx = classes.gradient(z, lse[rows], of_rows, targets[rows], given.at(rows))
            dbias += dx.sum(0)
            dx = dx.to(operand.dtype)
            dhidden[rows] = _product(dx, operand)
            dweight += _product(dx.T, _operand(hidden[rows]))
        if ctx.needs_input_grad[0]:
            dhidden = _summed(classes.peers, dhidden)
        found = dhidden.to(hidden.dtype), dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype)
        return *found, None, None


def _empty_numbers(x: Tensor, classes: _Classes) -> Tensor:
    count = 2 + bool(classes.smoothing) + classes.entropy
    return x.new_empty(count, x.shape[0], dtype=layout.statistics_dtype(x.dtype))


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

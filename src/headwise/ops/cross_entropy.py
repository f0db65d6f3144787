"""Cross entropy of logits and target classes, with label smoothing, z-loss and a soft cap, and its backward.

For a row x of V logits with target t, and z = c tanh(x / c) where a soft cap c is given (else z = x):

    lse  = log sum_v exp(z_v)
    loss = (1 - a) (lse - z_t) + a (lse - mean_v z_v) + b lse²            a: label_smoothing, b: z_loss
    dz_v = exp(z_v - lse) (1 + 2 b lse) - a / V - (1 - a) [v = t]
    dx_v = dz_v (1 - (z_v / c)²)

Backends work row by row and know no reductions: they give a loss per row, and take a gradient per row. Label smoothing:
Szegedy et al. 2015 (arXiv 1512.00567). z-loss: Chowdhery et al., PaLM, 2022 (arXiv 2204.02311). Soft cap: Gemma 2, 2024
(arXiv 2408.00118).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.backends import registry
from headwise.config import settings
from headwise.ops import _checks, _device_values, _library

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Cross entropy of ``logits`` (..., V) and ``targets`` (...,), int32 or int64.

    A target equal to ``ignore_index`` contributes nothing and is not counted, even where it is a valid class. "mean"
    divides by the number of counted targets; if there is none, the loss is 0 with zero gradients. "none" gives the loss
    per row, of the shape of ``targets``, 0 where ignored. Any other target outside [0, V) makes its row's loss and
    gradient NaN.

    The loss is float32 (float64 for float64 logits) whatever the dtype of the logits. Differentiable in ``logits``:
    kept for backward are the logits, the targets and two numbers per row, and the only array of the size of the logits
    that is made is their gradient.
    """
    call = cross_entropy_call(logits, targets, ignore_index, reduction, label_smoothing, z_loss, softcap)
    chosen = registry.choose(call, backend)
    return _forward(logits, targets, ignore_index, reduction, *_floats(label_smoothing, z_loss, softcap), chosen)[0]


def cross_entropy_forward_backward(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``(loss, dlogits)`` of `cross_entropy` in one pass over the logits.

    dlogits is the gradient of the returned loss, for "none" of its sum; contiguous, of the logits' dtype.
    """
    arguments = (logits, targets, ignore_index, reduction, label_smoothing, z_loss, softcap)
    call = cross_entropy_forward_backward_call(*arguments)
    chosen = registry.choose(call, backend)
    return _forward_backward(
        logits, targets, ignore_index, reduction, *_floats(label_smoothing, z_loss, softcap), chosen
    )


def cross_entropy_call(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> registry.Call:
    """Check the arguments of `cross_entropy` and describe the call to the backends."""
    op = "cross_entropy"
    _checks.floating(op, "logits", logits)
    backward = ("cross_entropy_backward",) if _checks.wants_gradient(logits) else ()
    launchers = ("cross_entropy_forward", *backward)
    return _describe(op, launchers, logits, targets, ignore_index, reduction, label_smoothing, z_loss, softcap)


def cross_entropy_forward_backward_call(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> registry.Call:
    """Check the arguments of `cross_entropy_forward_backward` and describe the call to the backends."""
    op = "cross_entropy_forward_backward"
    return _describe(op, (op,), logits, targets, ignore_index, reduction, label_smoothing, z_loss, softcap)


def _describe(
    op: str,
    launchers: tuple[str, ...],
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> registry.Call:
    _checks.floating(op, "logits", logits)
    _checks.at_least_dims(op, "logits", logits, 1)
    _checks.integer(op, "targets", targets)
    _checks.shape(op, "targets", targets, logits.shape[:-1], "the shape of logits without its last dimension")
    _checks.same_device(op, "targets", targets, "logits", logits)
    _checks.whole(op, "ignore_index", ignore_index, -(2**63))
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}; it needs to be {', '.join(map(repr, REDUCTIONS))}")
    if _checks.not_negative(op, "label_smoothing", label_smoothing) > 1:
        raise ValueError(f"{op}: label_smoothing is {label_smoothing!r}; it needs to be in [0, 1]")
    _checks.not_negative(op, "z_loss", z_loss)
    if softcap is not None:
        _checks.positive(op, "softcap", softcap)
    features = {"label_smoothing": label_smoothing != 0, "z_loss": z_loss != 0, "softcap": softcap is not None}
    used = tuple(name for name, present in features.items() if present)
    return registry.Call(op, launchers, _checks.device_type(logits), logits.dtype, {"V": logits.shape[-1]}, used)


def _floats(label_smoothing: float, z_loss: float, softcap: float | None) -> tuple[float, float, float | None]:
    return float(label_smoothing), float(z_loss), None if softcap is None else float(softcap)


def _loss_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _validate(logits: Tensor, targets: Tensor, ignore_index: int) -> None:
    if settings.validate:
        _device_values.in_range("cross_entropy", "targets", targets, logits.shape[-1], allowed=ignore_index)


def _counted(targets: Tensor, ignore_index: int) -> Tensor:
    # In int64: an ignore_index beyond the targets' own dtype must not wrap around to one of them.
    return (targets.long() != ignore_index).sum().clamp(min=1)


def _reduce(row_losses: Tensor, targets: Tensor, ignore_index: int, reduction: str, backend: str) -> Tensor:
    """The loss from the losses of the rows (N,), which are 0 where the target is ignored."""
    if reduction == "none":
        return row_losses.view(targets.shape)
    if hasattr(row_losses, "headwise_device"):  # a GPU that PyTorch's own operators do not run on
        return registry.launcher(backend, "cross_entropy_reduce")(
            row_losses, targets, ignore_index, reduction == "mean"
        )
    total = row_losses.sum()
    return total / _counted(targets, ignore_index) if reduction == "mean" else total


def _row_grads(
    grad: Tensor | None, logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, backend: str
) -> Tensor:
    """The gradient of each row's loss, (N,), from the gradient of the loss: the backward of `_reduce`. None is 1."""
    dtype, mean = _loss_dtype(logits), reduction == "mean"
    if reduction != "none" and hasattr(logits, "headwise_device"):
        launch = registry.launcher(backend, "cross_entropy_row_grads")
        return launch(None if grad is None else grad.to(dtype), targets, ignore_index, mean)
    if grad is None:
        grad = logits.new_ones((), dtype=dtype).expand(targets.shape if reduction == "none" else ())
    grad = grad.to(dtype)
    if reduction == "none":
        return grad.reshape(-1)
    return (grad / _counted(targets, ignore_index) if mean else grad).expand(targets.numel())


def _run_forward(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    _validate(logits, targets, ignore_index)
    launch = registry.launcher(backend, "cross_entropy_forward")
    # row_losses (N,); row_stats (2, N): the two numbers that a row's softmax is rebuilt from. Which two is up to the
    # backend, whose own backward reads them.
    row_losses, row_stats = launch(logits, targets, ignore_index, label_smoothing, z_loss, softcap)
    return _reduce(row_losses, targets, ignore_index, reduction, backend), row_stats


def _run_backward(
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    row_stats: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    backend: str,
) -> Tensor:
    row_grads = _row_grads(grad, logits, targets, ignore_index, reduction, backend)
    launch = registry.launcher(backend, "cross_entropy_backward")
    return launch(row_grads, logits, targets, row_stats, ignore_index, label_smoothing, z_loss, softcap)


def _run_forward_backward(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    _validate(logits, targets, ignore_index)
    row_grads = _row_grads(None, logits, targets, ignore_index, reduction, backend)
    launch = registry.launcher(backend, "cross_entropy_forward_backward")
    row_losses, dlogits = launch(row_grads, logits, targets, ignore_index, label_smoothing, z_loss, softcap)
    return _reduce(row_losses, targets, ignore_index, reduction, backend), dlogits


def _fake_loss(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return logits.new_empty(targets.shape if reduction == "none" else (), dtype=_loss_dtype(logits))


def _fake_forward(
    logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, *others: Any
) -> tuple[Tensor, Tensor]:
    row_stats = logits.new_empty((2, targets.numel()), dtype=_loss_dtype(logits))
    return _fake_loss(logits, targets, reduction), row_stats


def _fake_backward(grad: Tensor, logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _fake_forward_backward(
    logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, *others: Any
) -> tuple[Tensor, Tensor]:
    return _fake_loss(logits, targets, reduction), logits.new_empty(logits.shape)


def _save(ctx: Any, args: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    logits, targets, *ctx.options = args
    row_stats = outputs[1]
    ctx.mark_non_differentiable(row_stats)
    ctx.save_for_backward(logits, targets, row_stats)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    no_more = (None,) * 7
    if grad is None:
        return None, *no_more
    return _backward(grad, *ctx.saved_tensors, *ctx.options), *no_more


_OPTIONS = "SymInt ignore_index, str reduction, float label_smoothing, float z_loss, float? softcap, str backend"

_forward = _library.define(
    "cross_entropy_forward",
    f"(Tensor logits, Tensor targets, {_OPTIONS}) -> (Tensor, Tensor)",
    run=_run_forward,
    fake=_fake_forward,
    save=_save,
    backward=_differentiate,
)
_backward = _library.define(
    "cross_entropy_backward",
    f"(Tensor grad, Tensor logits, Tensor targets, Tensor row_stats, {_OPTIONS}) -> Tensor",
    run=_run_backward,
    fake=_fake_backward,
)
_forward_backward = _library.define(
    "cross_entropy_forward_backward",
    f"(Tensor logits, Tensor targets, {_OPTIONS}) -> (Tensor, Tensor)",
    run=_run_forward_backward,
    fake=_fake_forward_backward,
)

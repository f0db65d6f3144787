"""Cross entropy of logits and target classes, with label smoothing, z-loss and a soft cap, and its backward.

For a row x of V logits with target t, and z = c tanh(x / c) where a soft cap c is given (else z = x):

    lse  = log sum_v exp(z_v)
    loss = (1 - a) (lse - z_t) + a (lse - mean_v z_v) + b lse²            a: label_smoothing, b: z_loss
    dz_v = exp(z_v - lse) (1 + 2 b lse) - a / V - (1 - a) [v = t]
    dx_v = dz_v (1 - (z_v / c)²)

Label smoothing: Szegedy et al. 2015 (arXiv 1512.00567). z-loss: Chowdhery et al., PaLM, 2022 (arXiv 2204.02311). Soft cap:
Gemma 2, 2024 (arXiv 2408.00118).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headwise import layout
from headwise.ops import _checks, _device_values
from headwise.ops._op import Described, Op, Saved

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, *, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Cross entropy of ``logits`` (..., V) and ``targets`` (...,), int32 or int64.

    A target equal to ``ignore_index`` contributes nothing and is not counted, even where it is a valid class. "mean"
    divides by the number of counted targets; if there is none, the loss is 0 with zero gradients. "none" gives the loss
    per row, of the shape of ``targets``, 0 where ignored. Any other target outside [0, V) makes its row's loss and
    gradient NaN.

    The loss is float32 (float64 for float64 logits) whatever the dtype of the logits. Differentiable in ``logits``:
    kept for backward are the logits, the targets and two numbers per row, and the only array of the size of the logits
    that is made is their gradient.

    >>> logits, targets = torch.zeros(3, 8), torch.tensor([1, 5, -100])  # the last one is ignored
    >>> hw.cross_entropy(logits, targets)
    tensor(2.0794)
    """
    options = (ignore_index, reduction, label_smoothing, z_loss, softcap)
    loss: Tensor = _forward((logits, targets), options, backend)[0]
    return loss


def cross_entropy_forward_backward(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, *, backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(loss, dlogits)`` of `cross_entropy` in one pass over the logits.

    dlogits is the gradient of the returned loss, for "none" of its sum; contiguous, of the logits' dtype.

    >>> loss, dlogits = hw.cross_entropy_forward_backward(torch.randn(3, 8), torch.tensor([1, 5, 0]))
    >>> dlogits.shape
    torch.Size([3, 8])
    """
    options = (ignore_index, reduction, label_smoothing, z_loss, softcap)
    loss, dlogits = _forward_backward((logits, targets), options, backend)
    return loss, dlogits


class CrossEntropy(NamedTuple):
    logits: Tensor
    targets: Tensor
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None


class CrossEntropyBackward(NamedTuple):
    grad: Tensor
    row_stats: Tensor  # (2, N): what a row's softmax is rebuilt from; which two numbers is up to the backend
    forward: CrossEntropy


def _check(
    op: str, logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float,
    softcap: float | None,
) -> CrossEntropy:  # fmt: skip
    _checks.floating(op, "logits", logits)
    _checks.at_least_dims(op, "logits", logits, 1)
    _checks.integer(op, "targets", targets)
    _checks.shape(op, "targets", targets, logits.shape[:-1], "the shape of logits without its last dimension")
    _checks.same_device(op, "targets", targets, "logits", logits)
    smoothing, z_loss, cap = check_options(op, ignore_index, reduction, label_smoothing, z_loss, softcap)
    return CrossEntropy(logits, targets, ignore_index, reduction, smoothing, z_loss, cap)


def check_options(
    op: str, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None
) -> tuple[float, float, float | None]:
    """The options of a loss that are numbers: label_smoothing, z_loss and softcap as they are passed on."""
    _checks.whole(op, "ignore_index", ignore_index, -(2**63))
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}; it needs to be {', '.join(map(repr, REDUCTIONS))}")
    smoothing = _checks.not_negative(op, "label_smoothing", label_smoothing)
    if smoothing > 1:
        raise ValueError(f"{op}: label_smoothing is {label_smoothing!r}; it needs to be in [0, 1]")
    cap = None if softcap is None else _checks.positive(op, "softcap", softcap)
    return smoothing, _checks.not_negative(op, "z_loss", z_loss), cap


def _describe(args: CrossEntropy) -> Described:
    features = {"label_smoothing": args.label_smoothing, "z_loss": args.z_loss, "softcap": args.softcap}
    used = tuple(name for name, value in features.items() if value)
    return Described(args.logits, {"V": args.logits.shape[-1]}, used)


def _validate(args: CrossEntropy) -> None:
    _device_values.in_range("cross_entropy", "targets", args.targets, args.logits.shape[-1], allowed=args.ignore_index)


def _fake_loss(args: CrossEntropy) -> Tensor:
    shape = args.targets.shape if args.reduction == "none" else ()
    return args.logits.new_empty(shape, dtype=layout.statistics_dtype(args.logits.dtype))


def _fake(args: CrossEntropy) -> tuple[Tensor, Tensor]:
    loss = _fake_loss(args)
    return loss, loss.new_empty((2, args.targets.numel()))


def _fake_backward(args: CrossEntropyBackward) -> Tensor:
    return args.forward.logits.new_empty(args.forward.logits.shape)


def _fake_forward_backward(args: CrossEntropy) -> tuple[Tensor, Tensor]:
    return _fake_loss(args), args.logits.new_empty(args.logits.shape)


def _differentiate(saved: Saved, grad: Tensor, _: None) -> tuple[Tensor, None]:
    return saved.run(_backward, CrossEntropyBackward(grad, saved.results[1], saved.args)), None


_BOTH: dict[str, Any] = {"describe": _describe, "validate": _validate, "returns": "(Tensor, Tensor)"}
_forward = Op(
    "cross_entropy_forward", CrossEntropy, public="cross_entropy", check=_check, fake=_fake, backward=_differentiate,
    backward_launchers=("cross_entropy_backward",), saves=("logits", "targets"), saves_results=(1,), statistics=(1,),
    **_BOTH,
)  # fmt: skip
_backward = Op(
    "cross_entropy_backward", CrossEntropyBackward, describe=lambda args: _describe(args.forward), fake=_fake_backward
)
_forward_backward = Op(
    "cross_entropy_forward_backward", CrossEntropy, check=_check, fake=_fake_forward_backward, **_BOTH
)

"""Cross entropy of a linear layer's logits, ``hidden @ weight.T (+ bias)``, which never exist as a whole, and its
backward.

For a token with hidden state h (H), target t and weight w, and z = c tanh(x / c) where a soft cap c is given (else z
= x):

    x_v     = h · weight_v + bias_v
    lse     = log sum_v exp(z_v),    p_v = exp(z_v - lse)
    loss    = w ((1 - a) (lse - z_t) + a (lse - mean_v z_v) + b lse²)      a: label_smoothing, b: z_loss
    logprob = z_t - lse
    entropy = lse - sum_v p_v z_v
    dz_v    = g w (p_v (1 + 2 b lse) - a / V - (1 - a) [v = t])            g: gradient of w's loss
              + g_logprob ([v = t] - p_v) - g_entropy p_v (z_v - lse + entropy)
    dx_v    = dz_v (1 - (z_v / c)²)
    dhidden = dx · weight,  dweight = dxᵀ · hidden,  dbias = sum over tokens of dx

The logits are made in chunks, in float32, and used at once. Three matmuls are the least: logits, dhidden, dweight. A
loss of one number ("mean", "sum") whose gradient may be asked for makes the gradients with the loss, for a gradient
of 1, and the backward multiplies them by the gradient that arrives (by 1 it leaves them as they are). That needs a
dtype of float32's range: what is 1e-9 for a gradient of 1 would be lost in float16 whatever a loss scale says later.
So float16, "none", and gradients of log-probabilities and entropies make the logits again in the backward, from two
numbers kept for each token: a fourth matmul. How chunks are chosen, and what is kept between forward and backward of
a chunk, is up to the backends: by sizes alone, never by free memory.

Entropy and log-probabilities per token are what policy gradients need. Formulas of the loss:
`headwise.ops.cross_entropy`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from headwise import arguments, layout
from headwise.ops import _autocast, _checks, _device_values
from headwise.ops._op import Described, Op, Saved
from headwise.ops.cross_entropy import check_options

_WIDE_RANGE = (torch.float32, torch.bfloat16, torch.float64)


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, *, bias: Tensor | None = None,
    token_weights: Tensor | None = None, return_logprobs: Literal[False] = False, return_entropy: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, *, bias: Tensor | None = None,
    token_weights: Tensor | None = None, return_logprobs: Literal[True], return_entropy: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]: ...  # fmt: skip


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, *, bias: Tensor | None = None,
    token_weights: Tensor | None = None, return_logprobs: bool = False, return_entropy: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, ...]: ...  # fmt: skip


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, *, bias: Tensor | None = None,
    token_weights: Tensor | None = None, return_logprobs: bool, return_entropy: bool,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, *, bias: Tensor | None = None,
    token_weights: Tensor | None = None, return_logprobs: bool = False, return_entropy: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Cross entropy of ``hidden @ weight.T + bias`` and ``targets``, without an array of the size of the logits.

    hidden (..., H), weight (V, H), targets (...,) int32 or int64, bias (V,), token_weights (...,) float32 or of hidden's
    dtype. The options are those of `cross_entropy`: a target equal to ``ignore_index`` contributes nothing and is not
    counted; any other target outside [0, V) makes the loss of its token NaN, and the gradients that it has a part in.

    The loss of each token is multiplied by its weight. "mean" divides by the sum of the weights of the tokens that are not
    ignored, without weights by their number; where that is 0, the loss is 0 with zero gradients. Weights are constants: they
    get no gradient.

    ``return_logprobs`` and ``return_entropy`` add per token, in this order: the log-probability of its target and the
    entropy of its distribution (both after the soft cap; no label smoothing, no weight), of the shape of targets, 0 where
    ignored, NaN where the target is out of range. Both are differentiable.

    Loss, log-probabilities and entropies are float32 (float64 for float64). Gradients of hidden, weight and bias are
    summed in float32 and rounded once; only those that are asked for are computed. "mean" and "sum" round once more
    where the gradient that arrives at the loss is not a power of two, and hidden is bfloat16. Hidden states of ignored
    tokens have to be finite.

    >>> hidden, weight, targets = torch.randn(4, 32), torch.zeros(8, 32), torch.tensor([1, 5, 0, -100])
    >>> hw.linear_cross_entropy(hidden, weight, targets)
    tensor(2.0794)
    >>> loss, logprobs = hw.linear_cross_entropy(hidden, weight, targets, return_logprobs=True)
    >>> logprobs
    tensor([-2.0794, -2.0794, -2.0794,  0.0000])
    """
    wanted = ""
    if torch.is_grad_enabled() and not (return_logprobs or return_entropy) and reduction != "none":
        wanted = _gradients_at_once(hidden, weight, bias)
    options = (ignore_index, reduction, label_smoothing, z_loss, softcap, return_logprobs, return_entropy, wanted)
    tensors = (hidden, weight, targets, bias, token_weights)
    if not (return_logprobs or return_entropy):
        loss: Tensor = _forward(tensors, options, backend)[0]
        return loss
    found = _forward(tensors, options, backend, keep=True)
    return tuple(found[i] for i, asked in enumerate((True, return_logprobs, return_entropy)) if asked)


def linear_cross_entropy_forward_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, *, bias: Tensor | None = None,
    token_weights: Tensor | None = None, backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """``(loss, dhidden, dweight, dbias)`` of `linear_cross_entropy` at once; dbias is None without a bias.

    The gradients are those of the returned loss, for "none" of its sum; contiguous, each of its input's dtype.

    >>> hidden, weight, targets = torch.randn(4, 32), torch.randn(8, 32), torch.tensor([1, 5, 0, 2])
    >>> fused = hw.linear_cross_entropy_forward_backward
    >>> loss, dhidden, dweight, dbias = fused(hidden, weight, targets)
    >>> dweight.shape, dbias
    (torch.Size([8, 32]), None)
    """
    letters = "hw" if bias is None else "hwb"
    options = (ignore_index, reduction, label_smoothing, z_loss, softcap, False, False, letters)
    found = _forward_backward((hidden, weight, targets, bias, token_weights), options, backend)
    loss, _, _, _, dhidden, dweight, dbias = found
    return loss, dhidden, dweight, None if bias is None else dbias


def _gradients_at_once(hidden: Any, weight: Any, bias: Any) -> str:
    """Which gradients the forward makes: letters of hidden, weight, bias."""
    if not isinstance(hidden, Tensor) or _autocast.autocast_dtype_of(hidden) not in _WIDE_RANGE:
        return ""
    named = (("h", hidden), ("w", weight), ("b", bias))
    return "".join(letter for letter, x in named if isinstance(x, Tensor) and x.requires_grad)


class LinearCrossEntropy(NamedTuple):
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    token_weights: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    return_logprobs: bool
    return_entropy: bool
    gradients: str  # made with the loss, for a gradient of 1: letters of hidden, weight, bias


class LinearCrossEntropyBackward(NamedTuple):
    grad: Tensor | None  # of the loss
    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None
    row_stats: Tensor  # (2, N): what a token's softmax is rebuilt from; which two numbers is up to the backend
    entropy: Tensor | None  # where grad_entropy is given
    forward: LinearCrossEntropy  # ``gradients``: those that are asked for


class LinearCrossEntropyScale(NamedTuple):
    grad: Tensor
    dhidden: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    in_place: bool
    # Not read: where a graph of the backward is wanted, autograd sees here what the gradients depend on, and raises.
    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def _check(
    op: str, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, token_weights: Tensor | None,
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
    return_logprobs: bool, return_entropy: bool, gradients: str,
) -> LinearCrossEntropy:  # fmt: skip
    _checks.floating(op, "hidden", hidden)
    _checks.at_least_dims(op, "hidden", hidden, 1)
    _checks.floating(op, "weight", weight)
    _checks.dims(op, "weight", weight, 2, "(V, H)")
    _checks.shape(op, "weight", weight, (weight.shape[0], hidden.shape[-1]), "(V, H) with the H of hidden")
    _checks.same_dtype(op, "weight", weight, "hidden", hidden)
    _checks.same_device(op, "weight", weight, "hidden", hidden)
    _checks.integer(op, "targets", targets)
    _checks.shape(op, "targets", targets, hidden.shape[:-1], "the shape of hidden without its last dimension")
    _checks.same_device(op, "targets", targets, "hidden", hidden)
    if bias is not None:
        _checks.floating(op, "bias", bias)
        _checks.shape(op, "bias", bias, (weight.shape[0],), "(V,)")
        _checks.same_dtype(op, "bias", bias, "hidden", hidden)
        _checks.same_device(op, "bias", bias, "hidden", hidden)
    if token_weights is not None:
        _checks.floating(op, "token_weights", token_weights)
        _checks.own_or_float32(op, "token_weights", token_weights, "hidden", hidden)
        _checks.shape(op, "token_weights", token_weights, tuple(targets.shape), "the shape of targets")
        _checks.same_device(op, "token_weights", token_weights, "hidden", hidden)
        if token_weights.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{op}: token_weights requires a gradient; it needs to be a constant (token_weights.detach()). For its "
                'gradient, multiply the losses of reduction="none" by it'
            )
    _checks.boolean(op, "return_logprobs", return_logprobs)
    _checks.boolean(op, "return_entropy", return_entropy)
    smoothing, z_loss, cap = check_options(op, ignore_index, reduction, label_smoothing, z_loss, softcap)
    return LinearCrossEntropy(
        hidden, weight, targets, bias, token_weights, ignore_index, reduction, smoothing, z_loss, cap, return_logprobs,
        return_entropy, gradients,
    )  # fmt: skip


def _describe(args: LinearCrossEntropy) -> Described:
    features = {
        "label_smoothing": args.label_smoothing, "z_loss": args.z_loss, "softcap": args.softcap,
        "bias": args.bias is not None, "token_weights": args.token_weights is not None,
        "logprobs": args.return_logprobs, "entropy": args.return_entropy,
    }  # fmt: skip
    used = tuple(name for name, value in features.items() if value)
    sizes = {"N": args.targets.numel(), "H": args.hidden.shape[-1], "V": args.weight.shape[0]}
    return Described(args.hidden, sizes, used)


def _validate(args: LinearCrossEntropy) -> None:
    classes = args.weight.shape[0]
    _device_values.in_range("linear_cross_entropy", "targets", args.targets, classes, allowed=args.ignore_index)


def _fake(args: LinearCrossEntropy) -> tuple[Tensor | None, ...]:
    per_token = args.hidden.new_empty(args.targets.shape, dtype=layout.statistics_dtype(args.hidden.dtype))
    loss = per_token if args.reduction == "none" else per_token.new_empty(())
    return (
        loss,
        torch.empty_like(per_token) if args.return_logprobs else None,
        torch.empty_like(per_token) if args.return_entropy else None,
        per_token.new_empty((2, args.targets.numel())),
        *_fake_gradients(args),
    )


def _fake_gradients(args: LinearCrossEntropy) -> tuple[Tensor | None, ...]:
    inputs = (("h", args.hidden), ("w", args.weight), ("b", args.bias))
    return tuple(x.new_empty(x.shape) if x is not None and s in args.gradients else None for s, x in inputs)


def _fake_backward(args: LinearCrossEntropyBackward) -> tuple[Tensor | None, ...]:
    return _fake_gradients(args.forward)


def _fake_scale(args: LinearCrossEntropyScale) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else torch.empty_like(x) for x in args[1:4])


def _differentiate(saved: Saved, grad: Any, grad_logprobs: Any, grad_entropy: Any, *_: None) -> tuple[Any, ...]:
    names = (("h", "hidden"), ("w", "weight"), ("b", "bias"))
    wanted = "".join(letter for letter, name in names if saved.need(name))
    args, made = saved.args, saved.results[4:]
    if wanted and set(wanted) <= set(args.gradients):
        kept = [x if letter in wanted else None for (letter, _), x in zip(names, made, strict=True)]
        dhidden, dweight, dbias = _scaled(saved, grad, *kept)
    else:
        forward = args._replace(gradients=wanted)
        given = (
            grad,
            grad_logprobs,
            grad_entropy,
            saved.results[3],
            None if grad_entropy is None else saved.results[2],
        )
        dhidden, dweight, dbias = saved.run(_backward, LinearCrossEntropyBackward(*given, forward))
    found = {"h": dhidden, "w": dweight, "b": dbias}
    of_hidden, of_weight, of_bias = (found[letter] if letter in wanted else None for letter, _ in names)
    return of_hidden, of_weight, None, of_bias, None


def graph_is_kept() -> bool:
    """Within a backward: was it asked to keep the graph? (private in PyTorch, seen in 2.11 to 2.13)"""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _scaled(saved: Saved, grad: Tensor, dhidden: Any, dweight: Any, dbias: Any) -> Any:
    """The gradients that the forward made, times the gradient of the loss.

    In place, unless somebody may want them again: at most one copy of a weight's gradient exists. Whether the graph is kept
    is not part of a cache key, so this is decided at every call.
    """
    args = LinearCrossEntropyScale(grad, dhidden, dweight, dbias, False)
    if torch.is_grad_enabled():  # create_graph=True
        forward = saved.args
        args = args._replace(hidden=forward.hidden, weight=forward.weight, bias=forward.bias)
        return saved.run(_scale, args)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return saved.run(_scale, args)
    if not graph_is_kept():
        args = args._replace(in_place=True)
    tensors = arguments.tensors_of(args)
    run = _scale.find(args, tensors, saved.entry.backend)
    return _scale.through_operator(args._replace(in_place=False), saved.entry.backend) if run is None else run(*tensors)


_RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
_BOTH: dict[str, Any] = {
    "check": _check, "describe": _describe, "validate": _validate, "fake": _fake, "returns": _RESULTS,
}  # fmt: skip
_forward = Op(
    "linear_cross_entropy_forward", LinearCrossEntropy, public="linear_cross_entropy", backward=_differentiate,
    backward_launchers=("linear_cross_entropy_backward", "linear_cross_entropy_scale"),
    saves=("hidden", "weight", "targets", "bias", "token_weights"), saves_results=(2, 3, 4, 5, 6),
    statistics=(3, 4, 5, 6), **_BOTH,
    autocast=_autocast.Rule(_autocast.low, operands=4),
)  # fmt: skip
_forward_backward = Op(
    "linear_cross_entropy_forward_backward", LinearCrossEntropy, launcher="linear_cross_entropy_forward", **_BOTH
)
_backward = Op(
    "linear_cross_entropy_backward", LinearCrossEntropyBackward, describe=lambda args: _describe(args.forward),
    fake=_fake_backward, returns="(Tensor, Tensor, Tensor)",
)  # fmt: skip
_scale = Op(
    "linear_cross_entropy_scale", LinearCrossEntropyScale, describe=lambda args: Described(args.grad, {}),
    fake=_fake_scale, returns="(Tensor, Tensor, Tensor)",
)  # fmt: skip

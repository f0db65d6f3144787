"""Logits that are not there: what they would be computed from, until somebody reads them.

To the code of a model and its loss they are a tensor ``(..., V)``. `torch.nn.functional.cross_entropy` of them is
`headwise.linear_cross_entropy`, which never has them as a whole. Reshaping, casting and a soft cap, as models do on the way
there, are written down and not done. Whatever else asks for their values gets the real ones, with their gradient.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from headwise.ops import _autocast
from headwise.ops.linear_cross_entropy import linear_cross_entropy

_GETTERS = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")
_ABOUT = {getattr(Tensor, name).__get__ for name in _GETTERS} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, torch.is_floating_point,
}  # fmt: skip
_RESHAPED = ("view", "reshape", "flatten", "contiguous")
_CAST = ("float", "to", "double", "type")
_ARITHMETIC = {"__truediv__": "div", "div": "div", "__mul__": "mul", "__rmul__": "mul", "mul": "mul", "tanh": "tanh"}
_CROSS_ENTROPY = inspect.signature(functional.cross_entropy)


class LazyLogits(Tensor):
    """``hidden @ weight.T + bias``, and then the steps on the way from the source. It has no memory of its own."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    versions: tuple[int, int]  # of hidden and weight: later changes in place would change the logits
    source: LazyLogits | None  # of which this is one step
    step: Any  # source's values to this one's
    arithmetic: tuple[tuple[str, Any], ...]  # all steps that change values other than by rounding
    built: Tensor | None  # the values, once they were read

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LazyLogits:
        return _make(hidden, weight, bias, hidden.new_empty(0), (*hidden.shape[:-1], weight.shape[0]))

    def was_read(self) -> bool:
        return self.built is not None or (self.source is not None and self.source.was_read())

    def read(self) -> Tensor:
        """The real logits."""
        if self.built is None:
            with torch.enable_grad():
                self.built = self.step(self.source.read()) if self.source is not None else self._linear()
        return self.built

    def _linear(self) -> Tensor:
        if self.versions != (self.hidden._version, self.weight._version):
            raise RuntimeError(
                "headwise: the logits of a training step are read after the weights were changed; read them before the "
                "optimizer's step, or call unpatch(model)"
            )
        return functional.linear(self.hidden, self.weight, self.bias)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            return super().__torch_function__(func, types, args, kwargs)
        if func is functional.cross_entropy:
            loss = _loss(*args, **kwargs)
            if loss is not None:
                return loss
        elif args and isinstance(args[0], LazyLogits) and not args[0].was_read():
            stepped = _step(func, args[0], args[1:], kwargs)
            if stepped is not None:
                return stepped
        return func(*tree_map(_real, args), **tree_map(_real, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise NotImplementedError(f"headwise: {func} was called on logits that were not computed; call unpatch(model)")


def _make(hidden: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> LazyLogits:
    asked = any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    logits: LazyLogits = Tensor._make_wrapper_subclass(
        LazyLogits, shape, dtype=like.dtype, device=hidden.device, requires_grad=asked
    )
    logits.hidden, logits.weight, logits.bias = hidden, weight, bias
    logits.versions = (hidden._version, weight._version)
    logits.source, logits.step, logits.arithmetic, logits.built = None, None, (), None
    return logits


def _real(x: Any) -> Any:
    return x.read() if isinstance(x, LazyLogits) else x


def _step(func: Any, logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    """The result of one step that can be written down; None for any other."""
    name = getattr(func, "__name__", "")
    arithmetic = _ARITHMETIC.get(name)
    if name not in _RESHAPED + _CAST and arithmetic is None:
        return None
    given = (*args, *kwargs.values())
    if any(isinstance(x, Tensor) for x in given) or (arithmetic is not None and kwargs):
        return None
    if (name in _CAST) != all(isinstance(x, torch.dtype) for x in given) and given:
        return None  # a move to another device, or bits seen as another dtype
    # What the step does to shape and dtype, found without data.
    like = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *args, **kwargs)
    if not isinstance(like, Tensor) or like.shape[-1:] != logits.shape[-1:] or not like.is_floating_point():
        return None
    result = _make(logits.hidden, logits.weight, logits.bias, like, tuple(like.shape))
    result.versions, result.source = logits.versions, logits
    result.step = lambda values: func(values, *args, **kwargs)
    result.arithmetic = logits.arithmetic
    if arithmetic is not None:
        result.arithmetic += ((arithmetic, args[0] if args else None),)
    return result


def _loss(*args: Any, **kwargs: Any) -> Tensor | None:
    """`linear_cross_entropy` in the place of cross_entropy; None if it has no argument for what is asked."""
    given = _CROSS_ENTROPY.bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    logits, target = asked["input"], asked["target"]
    if not isinstance(logits, LazyLogits) or logits.was_read():
        return None
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.dtype != torch.int64:
        return (
            None  # classes in another dimension, probabilities as targets, or a mistake that PyTorch has the words for
        )
    known, softcap = _softcap(logits.arithmetic)
    others = [name for name in ("weight", "size_average", "reduce") if asked[name] is not None]
    if others or not known:
        what = f"cross_entropy with {others[0]}" if others else "the model's arithmetic on its logits"
        warnings.warn(f"headwise: {what} is not in linear_cross_entropy; the logits are built", stacklevel=3)
        return None
    loss = linear_cross_entropy(
        logits.hidden.reshape(-1, logits.hidden.shape[-1]), logits.weight, target, asked["ignore_index"],
        asked["reduction"], asked["label_smoothing"], softcap=softcap, bias=logits.bias,
    )  # fmt: skip
    # In float16 the loss could not be multiplied by the scale that its gradients need.
    under_autocast = _autocast.device_of((logits.hidden,)) is not None
    return loss.to(torch.promote_types(logits.dtype, torch.float32) if under_autocast else logits.dtype)


def _softcap(steps: tuple[tuple[str, Any], ...]) -> tuple[bool, float | None]:
    """Whether the steps are none or ``c · tanh(x / c)``, and c."""
    if not steps:
        return True, None
    if [name for name, _ in steps] != ["div", "tanh", "mul"] or steps[0][1] != steps[2][1] or not steps[0][1] > 0:
        return False, None
    return True, float(steps[0][1])

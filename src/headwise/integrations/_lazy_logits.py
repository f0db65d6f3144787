"""Logits that are not there: what they would be computed from, until somebody reads them.

To the code of a model and its loss they are a tensor ``(..., V)``. `torch.nn.functional.cross_entropy` of them is
`headwise.linear_cross_entropy`, which never has them as a whole. Reshaping, casting and a soft cap, as models do on the way
there, are written down and not done. Whatever else asks for their values gets the real ones, with their gradient.

They stand in the graph where the real ones would: their ``grad_fn`` is that of the linear layer, or of a step after it. So
an `autograd.Function` that they are given to, module hooks among them, sends its gradient on to the layers below. The fused
loss goes past them. It looks in the backward whether somebody waits for their gradient, and then computes it.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from headwise.ops import _autocast
from headwise.ops.linear_cross_entropy import graph_is_kept, linear_cross_entropy

_GETTERS = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "grad_fn", "is_leaf", "grad", "retains_grad",
    "_backward_hooks", "_base",
)  # fmt: skip
_GRAD: Any = Tensor.grad  # in the class: what reads and writes the field
_ABOUT = {getattr(Tensor, name).__get__ for name in _GETTERS} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, torch.is_floating_point,
    Tensor.register_hook, Tensor.retain_grad, _GRAD.__set__, _GRAD.__delete__,
}  # fmt: skip
_RESHAPED = ("view", "reshape", "flatten", "contiguous")
_CAST = ("float", "to", "double", "type")
_ARITHMETIC = {"__truediv__": "div", "div": "div", "__mul__": "mul", "__rmul__": "mul", "mul": "mul", "tanh": "tanh"}
_CROSS_ENTROPY = inspect.signature(functional.cross_entropy)
# Steps of fused optimizers on the weights of heads: they are no changes in place to PyTorch's count of those.
_fused_steps = WeakTensorKeyDictionary()


def _count_fused_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):
            for weight in group["params"]:
                if weight in _fused_steps:
                    _fused_steps[weight] += 1


register_optimizer_step_post_hook(_count_fused_step)


def _versions(*tensors: Tensor | None) -> list[int]:
    return [x._version + _fused_steps.get(x, 0) for x in tensors if x is not None]


class LazyLogits(Tensor):
    """``hidden @ weight.T + bias``, and then the steps on the way from the source. It has no memory of its own."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    versions: list[int]  # of hidden, weight and bias: later changes in place would change the logits
    source: LazyLogits | None  # of which this is one step
    step: Any  # source's values to this one's
    arithmetic: tuple[tuple[str, Any], ...]  # all steps that change values other than by rounding
    passed: bool  # the source, as somebody's autograd.Function returned it: its backward has to run
    built: Tensor | None  # the values, once they were read
    built_version: int  # of `built`, before somebody wrote into it

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LazyLogits:
        logits: LazyLogits = _Linear.apply(hidden, weight, bias)
        logits.hidden, logits.weight, logits.bias = hidden, weight, bias
        for x in (weight, bias):
            if isinstance(x, torch.nn.Parameter):
                _fused_steps.setdefault(x, 0)
        logits.versions = _versions(hidden, weight, bias)
        logits.source, logits.step, logits.arithmetic, logits.passed, logits.built = None, None, (), False, None
        return logits

    def then(self, step: Any, like: Tensor) -> LazyLogits:
        """One step later; ``like`` has its shape and dtype."""
        logits: LazyLogits = _Step.apply(self, step, like)
        logits.hidden, logits.weight, logits.bias, logits.versions = self.hidden, self.weight, self.bias, self.versions
        logits.source, logits.step, logits.arithmetic = self, step, self.arithmetic
        logits.passed, logits.built = False, None
        return logits

    def chain(self) -> list[LazyLogits]:
        """Itself, its source, and so on."""
        return [self] if self.source is None else [self, *self.source.chain()]

    def was_read(self) -> bool:
        return any(logits.built is not None for logits in self.chain())

    def read(self) -> Tensor:
        """The real logits."""
        # Within a Function's forward what it returns is not yet in the graph.
        if self.built is None or (self.requires_grad and not self.built.requires_grad):
            with torch.inference_mode(False), torch.enable_grad():
                self.built = self._read()
            self.built_version = self.built._version
        return self.built

    def _read(self) -> Tensor:
        if self.source is None or self.passed or _awaited(self):
            return _Values.apply(self, self.values)
        values = self.step(self.source.read())
        if values is self.source.built or values._is_view():
            return values
        if self.source.was_written_into():
            return _Values.apply(self, self.values)
        return _Values.apply(self, values.detach)  # behind the node of this step: it may get hooks later

    def values(self) -> Tensor:
        """The real logits without a graph."""
        if self.source is None:
            return self._product()
        source = self.source.read().detach()
        values = self.step(source)
        shared = values is source or values._is_view()
        return self.untouched() if self.source.was_written_into() and not shared else values

    def untouched(self) -> Tensor:
        """The same as the model made them, whatever was written into them or their sources since."""
        with torch.inference_mode(False), torch.no_grad():
            return self._product() if self.source is None else self.step(self.source.untouched())

    def was_written_into(self) -> bool:
        return self.built is not None and self.built._version != self.built_version

    def _product(self) -> Tensor:
        if self.versions != _versions(self.hidden, self.weight, self.bias):
            raise RuntimeError(
                "headwise: the logits of a training step are read after the weights were changed; read them before the "
                "optimizer's step, or call unpatch(model)"
            )
        bias = None if self.bias is None else self.bias.detach()
        with _autocast.disabled():  # as far as it was on in the model, the operands are cast
            return functional.linear(self.hidden.detach(), self.weight.detach(), bias)

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


def _without_memory(shape: tuple[int, ...], like: Tensor, device: torch.device) -> LazyLogits:
    logits: LazyLogits = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=like.dtype, device=device)
    return logits


class _Linear(torch.autograd.Function):
    """The place of the linear layer in the graph. Its backward has something to do where the logits had a reader."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LazyLogits:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight)
        return _without_memory((*hidden.shape[:-1], weight.shape[0]), hidden, hidden.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None
        hidden, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        dhidden = grad @ weight if ctx.needs_input_grad[0] else None
        dweight = rows.t() @ hidden.reshape(-1, hidden.shape[-1]) if ctx.needs_input_grad[1] else None
        return dhidden, dweight, rows.sum(0) if ctx.needs_input_grad[2] else None


class _Step(torch.autograd.Function):
    """The place of one step in the graph."""

    @staticmethod
    def forward(ctx: Any, source: LazyLogits, step: Any, like: Tensor) -> LazyLogits:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.step = source, step
        return _without_memory(tuple(like.shape), like, source.hidden.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        source, step = _taken(ctx, "source", "step")
        if grad is None:
            return None, None, None
        again = torch.is_grad_enabled()  # create_graph=True
        with torch.inference_mode(False), torch.enable_grad():
            x = source.read() if again else source.untouched().requires_grad_()
            (dx,) = torch.autograd.grad(step(x), x, grad, create_graph=again)
        return dx, None, None


class _Values(torch.autograd.Function):
    """Logits, computed."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, compute: Any) -> Tensor:
        values: Tensor = compute()
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Fused(torch.autograd.Function):
    """The fused loss as it is; in the backward, the gradient of the logits in its place if somebody waits for that."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: LazyLogits, plain: Any) -> Tensor:
        ctx.logits, ctx.plain = logits, plain
        return loss.clone()  # not a view: models add to their loss in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, plain = _taken(ctx, "logits", "plain")
        if not any(map(_awaited, logits.chain())):
            return grad, None, None
        again = torch.is_grad_enabled()  # create_graph=True
        with torch.inference_mode(False), torch.enable_grad():
            x = logits.read() if again else logits.untouched().requires_grad_()
            loss = plain(x.to(torch.promote_types(x.dtype, torch.float32)))
            (dx,) = torch.autograd.grad(loss, x, grad.to(loss.dtype), create_graph=again)
        return None, dx, None


def _taken(ctx: Any, *names: str) -> list[Any]:
    """What a node kept for its backward. It keeps it no longer, as saved tensors, unless the graph is kept."""
    kept = [getattr(ctx, name) for name in names]
    if kept[0] is None:
        raise RuntimeError("Trying to backward through the graph a second time; the first needs retain_graph=True")
    if not graph_is_kept():
        for name in names:
            setattr(ctx, name, None)
    return kept


def _awaited(logits: LazyLogits) -> bool:
    """Whether somebody waits for the gradient of these logits."""
    hooks: dict[int, Any] = logits._backward_hooks or {}
    return logits.retains_grad or not all(map(_is_signal, hooks.values()))


def _is_signal(hook: Any) -> bool:
    """Whether a hook is FSDP's: it wants to know that the backward begins, and passes on whatever it is given."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _real(x: Any) -> Any:
    return x.read() if isinstance(x, LazyLogits) else x


def _step(func: Any, logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    """The result of one step that can be written down; None for any other."""
    if not torch.is_grad_enabled():
        # PyTorch asks for this where a Function returns what it was given, and then puts the Function behind it.
        if func is Tensor.view_as and args == (logits,):
            result = logits.then(lambda values: values.view_as(values), logits)
            result.passed = True
            return result
        return None
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
    result = logits.then(lambda values: func(values, *args, **kwargs), like)
    if arithmetic is not None:
        result.arithmetic += ((arithmetic, args[0] if args else None),)
    return result


def _loss(*args: Any, **kwargs: Any) -> Tensor | None:
    """`linear_cross_entropy` in the place of cross_entropy; None if it has no argument for what is asked."""
    given = _CROSS_ENTROPY.bind(*args, **kwargs)
    given.apply_defaults()
    bound = given.arguments
    logits, target = bound["input"], bound["target"]
    if not isinstance(logits, LazyLogits) or logits.was_read() or any(x.passed for x in logits.chain()):
        return None
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.dtype != torch.int64:
        return (
            None  # classes in another dimension, probabilities as targets, or a mistake that PyTorch has the words for
        )
    known, softcap = _softcap(logits.arithmetic)
    others = [name for name in ("weight", "size_average", "reduce") if bound[name] is not None]
    if others or not known:
        what = f"cross_entropy with {others[0]}" if others else "the model's arithmetic on its logits"
        warnings.warn(f"headwise: {what} is not in linear_cross_entropy; the logits are built", stacklevel=3)
        return None
    with _autocast.disabled():  # as far as it was on in the model, the operands are cast
        loss = linear_cross_entropy(
            logits.hidden.reshape(-1, logits.hidden.shape[-1]), logits.weight, target, bound["ignore_index"],
            bound["reduction"], bound["label_smoothing"], softcap=softcap, bias=logits.bias,
        )  # fmt: skip
    # In float16 the loss could not be multiplied by the scale that its gradients need.
    under_autocast = _autocast.device_of((logits.hidden,)) is not None
    loss = loss.to(torch.promote_types(logits.dtype, torch.float32) if under_autocast else logits.dtype)
    fused: Tensor = _Fused.apply(loss, logits, lambda x: functional.cross_entropy(**{**bound, "input": x}))
    return fused


def _softcap(steps: tuple[tuple[str, Any], ...]) -> tuple[bool, float | None]:
    """Whether the steps are none or ``c · tanh(x / c)``, and c."""
    if not steps:
        return True, None
    if [name for name, _ in steps] != ["div", "tanh", "mul"] or steps[0][1] != steps[2][1] or not steps[0][1] > 0:
        return False, None
    return True, float(steps[0][1])

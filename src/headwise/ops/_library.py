"""How an op becomes a PyTorch operator: schema, fake kernel, autograd, all in one call of `define`.

`torch.library.custom_op` with `register_autograd` costs about 10 µs per eager call with gradients. Defining the schema
on a `Library` and putting an `autograd.Function` on the Autograd key costs about half of that and gives the same things:
`opcheck` is clean, `torch.compile(fullgraph=True)` sees one opaque node with a traced backward.

An operator implemented in Python still costs an eager call its ways into C++ and back. Where nobody is there to see the
difference (no tracing, no modes, no transforms, no profiler, plain tensors), an `Operator` goes past it: the same
`autograd.Function`, or the implementation at once. `Operator.prepared` also leaves out what a call has in common with
an earlier one; `_remembered` says which calls those are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

_library = torch.library.Library("headwise", "DEF")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
PLAIN = (torch.Tensor, torch.nn.Parameter)

# Looked up once: every eager call asks all of them.
_STRIDED = torch.strided
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_profiled = torch._C._autograd._profiler_enabled

Save = Callable[[Any, tuple[Any, ...], Any], None]
Backward = Callable[..., tuple[Any, ...]]
Run = Callable[..., Any]


def define(
    name: str,
    schema: str,
    *,
    fake: Run,
    run: Run | None = None,
    prepare: Callable[..., Run] | None = None,
    prepare_alone: Callable[..., Run] | None = None,
    save: Save | None = None,
    backward: Backward | None = None,
) -> Operator:
    """Register ``headwise::name`` and return what calls it.

    run       the implementation, for tensors of any device
    prepare   in place of ``run``, for an op whose tensors are its first arguments: called with all of them, it returns what
              is left to do with tensors of that kind
    prepare_alone   the same where no gradient will be asked for: results that only a backward reads may be None
    fake      the same on shapes alone (`torch.compile`, `torch.export`, meta tensors)
    save      ``save(ctx, args, outputs)`` keeps what backward needs
    backward  ``backward(ctx, *grads)`` gives one gradient per argument; without it, asking for gradients through this
              op raises (the case of the backward ops themselves: no second-order gradients)
    """
    if run is None:
        assert prepare is not None
        run = _in_one_go(schema, prepare)
    op = _define_kernels(name, schema, run, fake)
    function = _autograd_function(name, save, backward)

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def with_autograd(*args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(_has_tangent(a) for a in args):
            raise NotImplementedError(f"headwise: forward-mode gradients are not supported (through {name})")
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return function.apply(*args, below_autograd)
        return below_autograd(*args)

    _library.impl(name, with_autograd, "Autograd")
    return Operator(op, function, run, prepare, prepare_alone or prepare)


class Operator:
    """Calls an op of ours, without PyTorch's dispatcher where that makes no difference that anyone could see."""

    def __init__(
        self, op: Any, function: type[torch.autograd.Function], run: Run, prepare: Callable[..., Run] | None,
        prepare_alone: Callable[..., Run] | None,
    ) -> None:  # fmt: skip
        self._op, self._run, self._prepare, self._prepare_alone = op, run, prepare, prepare_alone
        self._function = function
        # Function.apply in Python looks for functorch's tensors before it calls this; there are none where it is called.
        self._apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]
        self._places = _places_of_tensors(op)

    def where_alone(self, prepare_alone: Callable[..., Run]) -> Operator:
        """The same, prepared otherwise where no gradient will be asked for (see `define`)."""
        return Operator(self._op, self._function, self._run, self._prepare, prepare_alone)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or is_watched():
            return self._op(*args)
        gradient = False
        for place in self._places:
            x = args[place]
            if x is not None:
                if not is_plain(x):
                    return self._op(*args)
                gradient = gradient or x.requires_grad
        return self._directly(args, gradient and torch.is_grad_enabled(), self._run)

    def prepared(self, *args: Any) -> Run:
        """What is left to do for calls of the same kind as this one (see `_remembered`), given their tensors in order."""
        places, run = self._places, self._run
        gradient = torch.is_grad_enabled() and any(args[i] is not None and args[i].requires_grad for i in places)
        if self._prepare is not None and self._prepare_alone is not None:
            if not gradient and not torch._C._is_any_autocast_enabled():
                return self._prepare_alone(*args)
            of_tensors = self._prepare(*args)

            def run(*args: Any) -> Any:
                return of_tensors(*args[: len(places)])

        others = [None if place in places else value for place, value in enumerate(args)]

        def directly(*tensors: Any) -> Any:
            args = others.copy()
            for place, x in zip(places, tensors, strict=True):
                args[place] = x
            return self._directly(args, gradient, run)

        return directly

    def _directly(self, args: Any, gradient: bool, run: Run) -> Any:
        if not gradient:
            return _without_autocast(run, args) if torch._C._is_any_autocast_enabled() else run(*args)
        if torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
            return self._op(*args)
        if torch._C._is_any_autocast_enabled():
            return self._apply(*args, lambda *args: _without_autocast(run, args))
        return self._apply(*args, run)


def is_plain(x: Any) -> bool:
    """Is it what its memory holds? Other types may do things of their own; a negative view and a tensor of zeros without
    memory are something else."""
    if type(x) in PLAIN:
        return x.layout is _STRIDED and not (x.is_neg() or x._is_zerotensor())
    return hasattr(type(x), "headwise_device")


def is_watched() -> bool:
    """Is anything in the way of a call that wants to see the operator: a mode, a transform, a tracer, a profiler?"""
    return (
        _modes() > 0
        or _function_modes() > 0
        or _transforms()
        or _tracing() is not None
        or forward_ad._current_level >= 0
        or _profiled()
    )


def _places_of_tensors(op: Any) -> list[int]:
    return [i for i, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type)]


def _in_one_go(schema: str, prepare: Callable[..., Run]) -> Run:
    tensors = schema.partition("->")[0].count("Tensor")
    return lambda *args: prepare(*args)(*args[:tensors])


def define_with_lists(
    name: str,
    schema: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    save: Save | None = None,
    backward: Backward | None = None,
) -> Callable[..., Any]:
    """As `define`, for an op with lists of tensors: autograd.Function does not look into lists, PyTorch's own way does."""
    op = _define_kernels(name, schema, run, fake)
    torch.library.register_autograd(
        f"headwise::{name}", backward or _no_second_order(name), setup_context=save, lib=_library
    )
    return op


def _define_kernels(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    _library.define(f"{name}{schema}")
    _library.impl(name, lambda *args: _without_autocast(run, args), "CompositeExplicitAutograd")
    torch.library.register_fake(f"headwise::{name}", fake, lib=_library)
    op: Any = getattr(torch.ops.headwise, name).default
    op.headwise_run = run  # what a tensor that lives on a GPU unknown to PyTorch calls (its `__torch_dispatch__`)
    return op


def _without_autocast(run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    # The dtype of a call is that of its tensors: inside, autocast would turn float32 sums into bfloat16 ones.
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return run(*args)


def _has_tangent(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None


def _no_second_order(name: str) -> Backward:
    def raise_(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"headwise: second-order gradients are not supported (differentiating through {name}); "
            "call backward without create_graph=True, or use headwise.reference for small sizes"
        )

    return raise_


def _autograd_function(name: str, save: Save | None, backward: Backward | None) -> type[torch.autograd.Function]:
    """Called with the arguments of the op and, as one more, what computes it from them."""
    differentiate = backward or _no_second_order(name)

    def forward(ctx: Any, *args: Any) -> Any:
        *args_of_op, run = args
        outputs = run(*args_of_op)
        # A gradient nobody asked for arrives as None, not as a tensor of zeros.
        ctx.set_materialize_grads(False)
        if save is not None:
            save(ctx, tuple(args_of_op), outputs)
        return outputs

    return type(
        f"Headwise_{name}",
        (torch.autograd.Function,),
        {
            "forward": staticmethod(forward),
            "backward": staticmethod(lambda ctx, *grads: (*differentiate(ctx, *grads), None)),
        },
    )

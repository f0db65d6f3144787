"""How an op becomes a PyTorch operator: schema, fake kernel, autograd, all in one call of `define`.

`torch.library.custom_op` with `register_autograd` costs about 10 µs per eager call with gradients. Defining the schema
on a `Library` and putting an `autograd.Function` on the Autograd key costs about half of that and gives the same things:
`opcheck` is clean, `torch.compile(fullgraph=True)` sees one opaque node with a traced backward.

An operator implemented in Python still costs an eager call its ways into C++ and back. Where nobody is there to see the
difference (no tracing, no modes, no transforms, no profiler, plain tensors), `define` goes past it: the same
`autograd.Function`, or the implementation at once.
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

Save = Callable[[Any, tuple[Any, ...], Any], None]
Backward = Callable[..., tuple[Any, ...]]


def define(
    name: str,
    schema: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    save: Save | None = None,
    backward: Backward | None = None,
) -> Callable[..., Any]:
    """Register ``headwise::name`` and return what calls it.

    run       the implementation, for tensors of any device
    fake      the same on shapes alone (`torch.compile`, `torch.export`, meta tensors)
    save      ``save(ctx, args, outputs)`` keeps what backward needs
    backward  ``backward(ctx, *grads)`` gives one gradient per argument; without it, asking for gradients through this
              op raises (the case of the backward ops themselves: no second-order gradients)
    """
    op = _define_kernels(name, schema, run, fake)

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    function = _autograd_function(name, below_autograd, save, backward)

    def with_autograd(*args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(_has_tangent(a) for a in args):
            raise NotImplementedError(f"headwise: forward-mode gradients are not supported (through {name})")
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return function.apply(*args)
        return below_autograd(*args)

    _library.impl(name, with_autograd, "Autograd")
    return _shortcut(name, op, run, save, backward)


def _shortcut(
    name: str, op: Any, run: Callable[..., Any], save: Save | None, backward: Backward | None
) -> Callable[..., Any]:
    """``op``, without the dispatcher where that makes no difference that anyone could see."""
    places = [i for i, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type)]

    def directly(*args: Any) -> Any:
        # Autograd needs no telling: gradients are off here, or nothing asks for them.
        if torch._C._is_any_autocast_enabled():
            return _without_autocast(run, args)
        return run(*args)

    function = _autograd_function(name, directly, save, backward)
    # Function.apply in Python looks for functorch's tensors before it calls this; there are none here.
    apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _is_watched():
            return op(*args)
        gradient = False
        for place in places:
            x = args[place]
            if x is not None:
                # Other types may do things of their own; a negative view and a tensor of zeros without memory are not what
                # their memory holds.
                kind = type(x)
                if kind in PLAIN:
                    if x.is_neg() or x._is_zerotensor():
                        return op(*args)
                elif not hasattr(kind, "headwise_device"):
                    return op(*args)
                gradient = gradient or x.requires_grad
        if gradient and torch.is_grad_enabled():
            if torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
                return op(*args)
            return apply(*args)
        return directly(*args)

    return call


def _is_watched() -> bool:
    """Is anything in the way of a call that wants to see the operator: a mode, a transform, a tracer, a profiler?"""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch._C._autograd._profiler_enabled()
    )


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


def _autograd_function(
    name: str, run: Callable[..., Any], save: Save | None, backward: Backward | None
) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        outputs = run(*args)
        # A gradient nobody asked for arrives as None, not as a tensor of zeros.
        ctx.set_materialize_grads(False)
        if save is not None:
            save(ctx, args, outputs)
        return outputs

    return type(
        f"Headwise_{name}",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward or _no_second_order(name))},
    )

"""How an op becomes a PyTorch operator: schema, fake kernel, autograd, all in one call of `define`.

`torch.library.custom_op` with `register_autograd` costs about 10 µs per eager call with gradients. Defining the schema
on a `Library` and putting an `autograd.Function` on the Autograd key costs about half of that and gives the same things:
`opcheck` is clean, `torch.compile(fullgraph=True)` sees one opaque node with a traced backward.
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
    """Register ``headwise::name`` and return the callable operator.

    run       the implementation, for tensors of any device
    fake      the same on shapes alone (`torch.compile`, `torch.export`, meta tensors)
    save      ``save(ctx, args, outputs)`` keeps what backward needs
    backward  ``backward(ctx, *grads)`` gives one gradient per argument; without it, asking for gradients through this
              op raises (the case of the backward ops themselves: no second-order gradients)
    """
    op = _define_kernels(name, schema, run, fake)
    function = _autograd_function(name, op, save, backward)

    def with_autograd(*args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(_has_tangent(a) for a in args):
            raise NotImplementedError(f"headwise: forward-mode gradients are not supported (through {name})")
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return function.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    _library.impl(name, with_autograd, "Autograd")
    return op


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
    def without_autocast(*args: Any) -> Any:
        # The dtype of a call is that of its tensors: inside, autocast would turn float32 sums into bfloat16 ones.
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return run(*args)

    _library.define(f"{name}{schema}")
    _library.impl(name, without_autocast, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headwise::{name}", fake, lib=_library)
    op: Callable[..., Any] = getattr(torch.ops.headwise, name).default
    return op


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
    name: str, op: Callable[..., Any], save: Save | None, backward: Backward | None
) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            outputs = op(*args)
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

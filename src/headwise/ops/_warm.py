"""Compiling what a program will launch before it runs: on all cores, and without a GPU if need be."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from headwise.backends import registry
from headwise.ops._op import OPS

Report = Callable[[int, int, str], None]


class Warmed(NamedTuple):
    """What `warm` did."""

    compiled: int  # kernels
    found: int  # kernels that were in the cache already
    seconds: float


def warm(
    op: str | Callable[..., Any], *args: Any, dtype: torch.dtype = torch.bfloat16, gradient: bool = False,
    arch: str | None = None, workers: int | None = None, report: Report | None = None, **kwargs: Any,
) -> Warmed:  # fmt: skip
    """Compile the Triton kernels that ``headwise.<op>(*args, **kwargs)`` launches, side by side, before it is called.

    The kernels go to Triton's cache on disk, where this process and later ones find them. Nothing is computed.

    op        the name of an op; or a function, of which every Headwise call counts, such as a training step of a model on
              the meta device
    args      of the op. A tensor counts by its shape, strides and dtype; a tuple of ints stands for a contiguous tensor
              of that shape and ``dtype``
    gradient  compile the backward as well; tensors that require gradients ask for it by themselves
    arch      a GPU that need not be here ("sm_90", "gfx942", …); None: the one that is
    workers   processes that compile at once; None: one for each core; 0: this process does it by itself
    report    ``report(done, all, kernel)`` is called after each kernel

    >>> warmed = hw.warm("softmax", (4096, 1024), arch="sm_90", workers=0)
    >>> warmed.compiled + warmed.found
    1
    """
    return compile_planned(plan(op, *args, dtype=dtype, gradient=gradient, **kwargs), arch, workers, report)


def compile_planned(
    planned: registry.Planned, arch: str | None, workers: int | None, report: Report | None
) -> Warmed:  # fmt: skip
    compile_all = importlib.import_module(registry.ahead_of_time(planned.calls, arch)).compile_all
    return Warmed(*compile_all(planned.launchers, arch, workers, report))


def plan(
    op: str | Callable[..., Any], *args: Any, dtype: torch.dtype = torch.bfloat16, gradient: bool = False, **kwargs: Any
) -> registry.Planned:
    """What the call would run."""
    if isinstance(op, str) and op not in OPS:
        raise ValueError(f"warm: op is {op!r}; it needs to be a function or one of {', '.join(sorted(OPS))}")
    function = getattr(importlib.import_module("headwise"), op) if isinstance(op, str) else op

    def without_memory(x: Any) -> Any:
        if isinstance(x, Tensor):
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            wanted = x.requires_grad or (gradient and x.is_floating_point())
            return made.requires_grad_(wanted)
        if type(x) is tuple and len(x) > 0 and all(type(n) is int for n in x):
            return torch.empty(x, dtype=dtype, device="meta", requires_grad=gradient)
        return tree_map_only(Tensor, without_memory, x)

    given = [without_memory(x) for x in args]
    named = {name: without_memory(x) if isinstance(x, (Tensor, list)) else x for name, x in kwargs.items()}
    with registry.planning() as planned:
        results = [x for x in tree_leaves(function(*given, **named)) if isinstance(x, Tensor) and x.requires_grad]
        if results:
            leaves = [x for x in tree_leaves((given, named)) if isinstance(x, Tensor) and x.requires_grad]
            torch.autograd.grad(results, leaves, [torch.empty_like(x) for x in results], allow_unused=True)
    if not planned.calls:
        raise ValueError("warm: the function makes no Headwise call on a tensor of the meta device")
    return planned

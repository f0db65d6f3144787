"""Stand-ins for the modules of a model: the same code and options, small random weights, nothing shared with the model.

A module is known by what it computes. Its own forward runs on a stand-in, in float32 on the CPU, and the result is held
against ours. The model's weights are neither read nor copied, so this works for a model of any size, and on "meta" too.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]
# Float32 sums of a few dozen terms in another order; another formula is off by far more.
TOLERANCE = 1e-4


class Finding(NamedTuple):
    """A module that one of our ops may stand in for: the forwards that would be set, or the reason why none is."""

    path: str
    what: str
    forwards: tuple[tuple[nn.Module, Forward], ...] = ()
    reason: str = ""


def stand_in(
    module: nn.Module, parameters: Mapping[str, Tensor | None], children: Mapping[str, nn.Module], training: bool
) -> nn.Module:
    """The module with other parameters and children, without its hooks."""
    copied = object.__new__(type(module))
    fresh = nn.Module().__dict__  # empty hooks, buffers, parameters
    copied.__dict__.update({**module.__dict__, **fresh})
    copied.__dict__.pop("forward", None)
    copied.__dict__["_parameters"] = OrderedDict(parameters)
    copied.__dict__["_modules"] = OrderedDict(children)
    return copied.train(training)


def run(module: nn.Module, *inputs: Tensor) -> Any:
    """The class's own forward, or the exception that it raised: look-alikes may need what a stand-in does not have."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return type(module).forward(module, *inputs)
    except Exception as error:
        return error


def equal(ours: Any, own: Any) -> bool:
    """Results of two formulas in float32, row by row: a small row may not hide behind a large one."""
    if (
        not isinstance(own, Tensor)
        or not isinstance(ours, Tensor)
        or own.shape != ours.shape
        or own.dtype != ours.dtype
    ):
        return False
    error, size = (ours - own).abs().amax(-1), own.abs().amax(-1)
    return bool((error <= TOLERANCE * size).all())


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments_of(module: nn.Module) -> list[str]:
    """Names of what the class's forward takes beside self."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def is_ours(forward: Any) -> bool:
    return getattr(getattr(forward, "__func__", None), "is_headwise", False)


def replaced(module: nn.Module) -> str:
    """Why the forward of a module is not free to be replaced; empty if it is."""
    forward = module.__dict__.get("forward")
    if forward is None or is_ours(forward):
        return ""
    # A patched model that was pickled comes back with the forward of its class in the place of ours.
    if getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module:
        return ""
    return "its forward is replaced already, by someone else"

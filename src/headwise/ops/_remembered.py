"""Calls that were checked once: the next one of the same kind is not checked again.

Checking the arguments of an attention call and choosing its backend costs the host 10 to 20 µs, as much as launching its
kernel. Neither looks at data: both depend on shapes, strides, dtypes, devices and plain numbers alone. So what they came
to is kept by these. A call that raises is not kept, and raises again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from headwise.backends import registry
from headwise.ops._library import PLAIN

_LIMIT = 4096  # a process that meets ever new sizes must not keep them all
Kind = tuple[Any, ...]

# Threads share it without a lock: an entry is written in one step and depends on its key alone.
_known: dict[Kind, Any] = {}


def kind(op: str, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> Kind | None:
    """All that checks and choice may depend on; None where it cannot be said (while tracing, or wrong arguments)."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return None
    facts: list[Any] = [op, registry.asked(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()]
    for x in tensors:
        if x is None:
            facts.append(None)
            continue
        of = type(x)
        if (of not in PLAIN and not hasattr(of, "headwise_device")) or x.layout is not torch.strided:
            return None
        facts += (of, x.dtype, x.shape, x.stride(), x.device, x.requires_grad)
    for value in others:
        # Types too, those of a window's sides included: True == 1 == 1.0.
        facts += (value, tuple(map(type, value)) if type(value) is tuple else type(value))
    return tuple(facts)


def recall(kind: Kind | None) -> Any:
    """What was kept for such calls; None if nothing was."""
    if kind is None:
        return None
    try:
        return _known.get(kind)
    except TypeError:  # a list, say: fine as an argument, useless as a key
        return None


def keep(kind: Kind | None, decision: Any) -> Any:
    """The same decision for the next call of this kind."""
    if kind is not None:
        if len(_known) >= _LIMIT:
            _known.clear()
        with suppress(TypeError):
            _known[kind] = decision
    return decision

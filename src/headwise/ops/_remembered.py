"""Calls like an earlier one: what the two have in common is worked out once.

Checking the arguments of an attention call, choosing its backend and working its launch out costs the host 20 to 30 µs,
more than the launch. None of it looks at data: it depends on shapes, strides, dtypes, devices and plain numbers alone, the
*kind* of a call. What is left to do is kept by the kind: to make the results and to launch, given the tensors. A call
that raises is not kept, and raises again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import are_deterministic_algorithms_enabled as is_deterministic
from torch import is_grad_enabled
from torch._C import _is_any_autocast_enabled as is_autocast
from torch.compiler import is_compiling

from headwise.backends.registry import asked
from headwise.ops._library import PLAIN, Operator, Run, is_plain, is_watched

_LIMIT = 4096  # a process that meets ever new sizes must not keep them all
Kind = tuple[Any, ...]

# Threads share it without a lock: an entry is written in one step and depends on its key alone.
_known: dict[Kind, Run] = {}


def kind(op: str, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> Kind | None:
    """All that a call may depend on but its data and where that lies (address, stream).

    None where it cannot be said: someone watches who has to see the call itself, or an argument is not what it should be.
    """
    if is_compiling() or is_watched():
        return None
    types: tuple[Any, ...] = tuple(map(type, others))  # because True == 1 == 1.0
    if tuple in types:  # a window, whose sides have types too
        types += tuple([tuple(map(type, value)) for value in others if type(value) is tuple])
    facts: list[Any] = [op, others, types, asked(), is_grad_enabled(), is_deterministic(), is_autocast()]
    for x in tensors:
        if x is None:
            facts.append(None)
        elif not is_plain(x):
            return None
        elif type(x) in PLAIN:
            facts += (type(x), x.dtype, x.shape, x.stride(), x.device, x.requires_grad)
        else:
            facts += x.headwise_facts()
    return tuple(facts)


def recall(kind: Kind | None) -> Run | None:
    """What was kept for such calls; None if nothing was."""
    if kind is None:
        return None
    try:
        return _known.get(kind)
    except TypeError:  # a list, say: fine as an argument, useless as a key
        return None


def keep(kind: Kind | None, op: Operator, *args: Any) -> Run:
    """What is left to do for the call of ``op`` with these arguments, and others of its kind: call it with their tensors."""
    if kind is None:
        return lambda *tensors: op(*args)
    run = op.prepared(*args)
    if len(_known) >= _LIMIT:
        _known.clear()
    with suppress(TypeError):
        _known[kind] = run
    return run

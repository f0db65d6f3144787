"""Which backend runs a call: one static table, one rule.

Automatic choice goes by the tensor's device and by what each backend says it supports. A backend asked for by name runs
or raises with its reason; it never falls back in silence.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch

from headwise.backends import cpu, triton, webgpu
from headwise.config import settings


class Call(NamedTuple):
    """What a backend needs to know to judge a call: no tensor, no data."""

    op: str  # the public name: "attention"
    launchers: tuple[str, ...]  # the kernels it would use: ("attention_forward", "attention_backward")
    device: str  # "cpu", "cuda", …
    dtype: torch.dtype
    sizes: dict[str, int]  # the letters of the contract: B, Hq, Hk, Sq, Sk, D, Dv, N, V
    features: tuple[str, ...] = ()  # "causal", "softcap", …, what the call uses beyond the plain op


class Backend(NamedTuple):
    name: str
    automatic_for: tuple[str, ...]  # device types whose calls go here unless told otherwise
    devices: tuple[str, ...]  # device types whose tensors it takes
    # The package of the backend: `unavailable()`, `supports(call)`, DTYPES and LAUNCHERS. It imports nothing heavy;
    # the modules named in LAUNCHERS do, when they are first used.
    rules: ModuleType


BACKENDS: tuple[Backend, ...] = (
    # Its interpreter runs the kernels on CPU tensors, slowly, for tests without a GPU.
    Backend("triton", ("cuda",), ("cpu",) if settings.triton_interpret else ("cuda",), triton),
    # Tensors of the CPU are uploaded, and results read back; headwise.webgpu.array makes tensors that stay there.
    Backend("webgpu", ("webgpu",), ("cpu", "webgpu"), webgpu),
    Backend("cpu", ("cpu",), ("cpu",), cpu),
)

_NOT_SET = "not set"


class _Forced(threading.local):
    """What `use_backend` asks for, in this thread."""

    name: str | None = _NOT_SET


_forced = _Forced()


class Unsupported(ValueError):
    """No backend, or not the one asked for, runs this call. The message says why."""


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Within the block, every call of this thread that names no backend of its own uses ``name``.

    ``None`` is the automatic choice, even where ``HEADWISE_BACKEND`` says otherwise.

    >>> with hw.use_backend("cpu"):
    ...     out = hw.attention(q, k, v)
    """
    if name is not None:
        _find(name)
    previous = _forced.name
    _forced.name = name
    try:
        yield
    finally:
        _forced.name = previous


def asked() -> tuple[Any, ...]:
    """What a choice depends on that a program may change while it runs, beside the call and the backend that it names."""
    return _forced.name, settings.changes


def choose(call: Call, backend: str | None) -> str:
    """The name of the backend that runs this call, or a ValueError that says why none does."""
    name = backend or _forced.name
    if name == _NOT_SET:
        name = settings.backend
    if name is not None:
        reason = verdict(_find(name), call)
        if reason is None:
            return name
        able = [b.name for b in BACKENDS if verdict(b, call) is None]
        hint = f" Backends that can: {', '.join(able)}." if able else ""
        raise Unsupported(f"{call.op}: backend={name!r} cannot run this call: {reason}.{hint}")
    for row in BACKENDS:
        if call.device in row.automatic_for and verdict(row, call) is None:
            return row.name
    reasons = "; ".join(f"{b.name}: {verdict(b, call)}" for b in BACKENDS)
    raise Unsupported(f"{call.op}: no backend runs this call on device {call.device!r}. {reasons}")


def verdict(row: Backend, call: Call) -> str | None:
    """None when the backend runs this call, else the reason why not."""
    missing = availability(row.name)
    if missing is not None:
        return missing
    if call.device not in row.devices:
        return f"the tensors are on {call.device!r} and it takes tensors on {' or '.join(map(repr, row.devices))}"
    for launcher in call.launchers:
        if launcher not in row.rules.LAUNCHERS:
            return f"it has no {launcher} kernel yet"
    if call.dtype not in row.rules.DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in row.rules.DTYPES)
        return f"it computes in {allowed}, not {str(call.dtype).removeprefix('torch.')}"
    reason: str | None = row.rules.supports(call)
    return reason


def note(name: str, call: Call, arguments: Mapping[str, Any]) -> str | None:
    """What the backend has to say of how it runs this call: which of its kernels, say; None if there is no choice.

    ``arguments``: those of the op by name, as far as they are known.
    """
    say = getattr(_find(name).rules, "note", None)
    return None if say is None else say(call, arguments)


def availability(name: str) -> str | None:
    """None when the backend can run on this machine at all, else what is missing and how to get it."""
    if name not in _availability:
        _availability[name] = _find(name).rules.unavailable()
    return _availability[name]


# What torch.compiler.assume_constant_result does; calling that would import all of torch._dynamo, and triton with it.
availability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def ask_again(name: str) -> None:
    """What `availability` found for a backend holds no longer."""
    _availability.pop(name, None)
    settings.changed()


def offers(backend: str, name: str) -> bool:
    """Is there a kernel ``name`` on ``backend``?"""
    return name in _find(backend).rules.LAUNCHERS


def launcher(backend: str, name: str) -> Callable[..., Any]:
    """The Python function that launches kernel ``name`` on ``backend``; imported on first use, then looked up."""
    key = (backend, name)
    if key not in _launchers:
        rules = _find(backend).rules
        module = importlib.import_module(f"{rules.__name__}.{rules.LAUNCHERS[name]}")
        _launchers[key] = getattr(module, name)
    return _launchers[key]


def prepare(backend: str, name: str, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> Callable[..., Any]:
    """What is left to do for launches of kernel ``name`` that differ from this one in the contents of ``tensors`` alone.

    It is called with such tensors. A launcher that has something to gain from it has a `prepare` of its own, which is called
    with the arguments of the launcher.
    """
    launch = launcher(backend, name)
    if hasattr(launch, "prepare"):
        return launch.prepare(*tensors, *others)
    return lambda *tensors: launch(*tensors, *others)


def _find(name: str) -> Backend:
    for row in BACKENDS:
        if row.name == name:
            return row
    raise ValueError(f"backend={name!r} is not known; there are: {', '.join(b.name for b in BACKENDS)}")


_availability: dict[str, str | None] = {}
_launchers: dict[tuple[str, str], Callable[..., Any]] = {}

"""Which backend runs a call: one static table, one rule.

Automatic choice goes by the tensor's device and by what each backend says it supports. A backend asked for by name runs
or raises with its reason; it never falls back in silence.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
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
    arch: str | None = None  # a GPU to answer for that need not be here: "sm_90"


class Backend(NamedTuple):
    name: str
    automatic_for: tuple[str, ...]  # device types whose calls go here unless told otherwise
    devices: tuple[str, ...]  # device types whose tensors it takes
    # The package of the backend: `unavailable()`, `supports(call)` and DTYPES. It imports nothing heavy; the
    # modules with the launchers do, when they are first used.
    rules: ModuleType


BACKENDS: tuple[Backend, ...] = (
    # Its interpreter runs the kernels on CPU tensors, slowly, for tests without a GPU.
    Backend("triton", ("cuda",), ("cpu",) if settings.triton_interpret else ("cuda",), triton),
    # Tensors of the CPU are uploaded, and results read back; headwise.webgpu.array makes tensors that stay there.
    Backend("webgpu", ("webgpu",), ("cpu", "webgpu"), webgpu),
    Backend("cpu", ("cpu",), ("cpu",), cpu),
)

ARCHITECTURES = triton.ARCHITECTURES  # GPUs that `explain` answers for though they are not here
META = "meta"  # in place of a backend: the tensors have no memory, and nothing is computed
_NOT_SET = "not set"
_plans = itertools.count()
_WAYS_OUT = {"mps": ". On a Mac, x.cpu() runs on the CPU and headwise.webgpu.array(x.cpu()) on the GPU"}


class _Forced(threading.local):
    """What `use_backend` asks for, in this thread; part of the cache key."""

    def __init__(self) -> None:
        # Not attributes of the class: torch.compile would guard on their absence, which it ends by setting them.
        self.name: str | None = _NOT_SET
        self.describing = False
        self.planned: Planned | None = None


class Planned(NamedTuple):
    """What calls on tensors without memory would run: the public calls, and every launcher with its arguments object."""

    calls: list[Call]
    launchers: list[tuple[str, Any]]


forced = _Forced()


class Unsupported(ValueError):
    """No backend, or not the one asked for, runs this call. The message says why.

    >>> try:
    ...     hw.softmax(torch.randn(4, 64, dtype=torch.float64), backend="webgpu")
    ... except hw.Unsupported as error:
    ...     reason = str(error)
    """


class Described(BaseException):
    """In place of running a call: what `explain` wants to know of it."""

    def __init__(self, call: Call, arguments: Any, backend: str | None) -> None:
        super().__init__()
        self.call, self.arguments, self.backend = call, arguments, backend  # Python makes a plain tuple of `args`


@contextmanager
def describing() -> Iterator[None]:
    """Within the block, calls of this thread are checked and raise `Described`."""
    previous = forced.name
    forced.name, forced.describing = f"described, {previous}", True  # another cache key than any call's
    try:
        yield
    finally:
        forced.name, forced.describing = previous, False


@contextmanager
def planning() -> Iterator[Planned]:
    """Within the block, calls of this thread on tensors of the meta device are written down, those of backwards as well."""
    previous, forced.planned = forced.planned, Planned([], [])
    try:
        with settings.apart(f"planned {next(_plans)}"):  # a call that is known already is not looked at again
            yield forced.planned
    finally:
        forced.planned = previous


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Within the block, every call of this thread that names no backend of its own uses ``name``.

    ``None`` is the automatic choice, even where ``HEADWISE_BACKEND`` says otherwise.

    >>> with hw.use_backend("cpu"):
    ...     probs = hw.softmax(torch.randn(4, 64))
    """
    if name is not None:
        _find(name)
    previous = forced.name
    forced.name = name
    try:
        yield
    finally:
        forced.name = previous


def choose(call: Call, backend: str | None) -> str:
    """The name of the backend that runs this call, or a ValueError that says why none does."""
    name = backend or forced.name
    if name == _NOT_SET:
        name = settings.backend
    if call.device == META:
        if forced.planned is not None:
            forced.planned.calls.append(call)
        return META
    if name is not None:
        row = next((row for row in BACKENDS if row.name == name), None) or _find(name)
        reason = verdict(row, call)
        if reason is None:
            return name
        able = [b.name for b in BACKENDS if verdict(b, call) is None]
        hint = f" Backends that can: {', '.join(able)}." if able else ""
        raise Unsupported(f"{call.op}: backend={name!r} cannot run this call: {reason}.{hint}")
    for row in BACKENDS:
        if call.device in row.automatic_for and verdict(row, call) is None:
            return row.name
    reasons = "; ".join(f"{b.name}: {verdict(b, call)}" for b in BACKENDS)
    raise Unsupported(
        f"{call.op}: no backend runs this call on device {call.device!r}. {reasons}{_WAYS_OUT.get(call.device, '')}"
    )


def verdict(row: Backend, call: Call) -> str | None:
    """None when the backend runs this call, else the reason why not."""
    compiling = torch.compiler.is_compiling()  # then a constant is wanted, not a look into what is known
    if call.arch is None or call.device not in row.automatic_for:
        known = not compiling and row.name in _missing
        missing = _missing[row.name] if known else availability(row.name)
        if missing is not None:
            return missing
    if call.device not in row.devices:
        return f"the tensors are on {call.device!r} and it takes tensors on {' or '.join(map(repr, row.devices))}"
    for launcher in call.launchers:
        key = (row.name, launcher)
        known = not compiling and key in _modules
        if (_modules[key] if known else module_of(*key)) is None:
            return f"it has no {launcher} kernel yet"
    if call.dtype not in row.rules.DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in row.rules.DTYPES)
        return f"it computes in {allowed}, not {str(call.dtype).removeprefix('torch.')}"
    reason: str | None = row.rules.supports(call)
    return reason


def ahead_of_time(calls: Sequence[Call], arch: str | None) -> str:
    """The module that compiles for these calls of a GPU; a ValueError where it does not run one of them."""
    if arch is not None and arch not in ARCHITECTURES:
        raise ValueError(f"warm: arch is {arch!r}; it needs to be one of {', '.join(ARCHITECTURES)}")
    row = _find("triton")
    for call in calls:
        reason = verdict(row, call._replace(device="cuda", arch=arch))
        if reason is not None:
            raise Unsupported(f"warm: triton cannot run {call.op}: {reason}")
    return f"{row.rules.__name__}.ahead_of_time"


def note(name: str, call: Call, args: Any) -> str | None:
    """What the backend has to say of how it runs this call: which of its kernels, say; None if there is no choice.

    ``args``: the arguments object, if it is at hand.
    """
    say = getattr(_find(name).rules, "note", None) if name != META and args is not None else None
    return None if say is None else say(call, args)


def availability(name: str) -> str | None:
    """None when the backend can run on this machine at all, else what is missing and how to get it."""
    if name not in _missing:
        _missing[name] = _find(name).rules.unavailable()
    return _missing[name]


def module_of(backend: str, launcher: str) -> str | None:
    """The module that has this launcher of a backend; None where there is none. Nothing is imported to find out.

    It has the name of the launcher, or that of the op ("rms_norm" for "rms_norm_backward"), or a short one of `_SHORT`. A
    backend may have LAUNCHERS: the module of a launcher that lies elsewhere, or None for one that is not there yet.
    """
    key = (backend, launcher)
    if key not in _modules:
        rules = _find(backend).rules
        elsewhere: dict[str, str | None] = getattr(rules, "LAUNCHERS", {})
        if launcher in elsewhere:
            _modules[key] = elsewhere[launcher] and f"{rules.__name__}.{elsewhere[launcher]}"
        else:
            op = launcher.removesuffix("_backward").removesuffix("_forward").removesuffix("_scale")
            names = (f"{rules.__name__}.{name}" for name in (launcher, _SHORT.get(op, op)))
            _modules[key] = next((name for name in names if importlib.util.find_spec(name) is not None), None)
    return _modules[key]


_SHORT = {"attention_decode": "decode", "attention_probs": "probs", "merge_attention": "merge"}

# What torch.compiler.assume_constant_result does; calling that would import all of torch._dynamo, and triton with it.
availability._dynamo_marked_constant = True  # type: ignore[attr-defined]
module_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
_missing: dict[str, str | None] = {}  # of backends
_modules: dict[tuple[str, str], str | None] = {}  # of launchers


def ask_again() -> None:
    """What was found of the backends holds no longer."""
    _missing.clear()
    _modules.clear()
    recorder.cache_clear()
    settings.changed()


@functools.cache
def recorder(backend: str, launcher: str) -> Callable[[Any], Callable[..., Any]]:
    """``recorder(args)``: what runs a launcher for calls that differ from this one in data and addresses alone.

    It is called with their tensors, in the order of `headwise.arguments.tensors_of`.
    """
    module = importlib.import_module(str(module_of(backend, launcher)))
    record = importlib.import_module(f"{_find(backend).rules.__name__}.recorder").record
    return functools.partial(record, getattr(module, launcher))


def _find(name: str) -> Backend:
    for row in BACKENDS:
        if row.name == name:
            return row
    raise ValueError(f"backend={name!r} is not known; there are: {', '.join(b.name for b in BACKENDS)}")

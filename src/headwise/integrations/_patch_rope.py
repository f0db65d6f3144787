"""Rotary embeddings in a model: functions ``f(q, k, cos, sin)`` that its attention layers call, found by what they compute.

Such a function is a global of the model's code and serves every model of the family. So a layer gets its own forward back
with one name changed: the same code, over a copy of its globals in which the function is ours.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.integrations import _patch_probe as probe
from headwise.integrations._patch_probe import Finding
from headwise.ops.rope import rope

_WIDTH, _TOKENS = 8, 5  # of the tensors that a function is tried on


class Layout(NamedTuple):
    """How a function reads cos and sin ``(B, S, C)``."""

    interleaved: bool  # pairs of neighbours
    columns: str  # "halves": C = 2 R, the angles twice. "pairs": C = 2 R, each twice. "once": C = R
    promotes: bool  # the result is wide if cos is

    def tables(self, cos: Tensor) -> Tensor:
        """(B, S, R)"""
        if self.columns == "once":
            return cos
        return cos[..., ::2] if self.columns == "pairs" else cos[..., : cos.shape[-1] // 2]

    def repeated(self, table: Tensor) -> Tensor:
        if self.columns == "once":
            return table
        return table.repeat_interleave(2, -1) if self.columns == "pairs" else torch.cat((table, table), -1)


def find(path: str, module: nn.Module) -> Finding | None:
    """A module whose forward calls a function of cos and sin; None for others."""
    own: Any = type(module).forward
    innermost = inspect.unwrap(own)
    candidates = {
        name: value
        for name in getattr(getattr(innermost, "__code__", None), "co_names", ())
        if (value := innermost.__globals__.get(name)) is not None and _rotates(value)
    }
    if not candidates:
        return None
    reason = probe.replaced(module)
    found = {name: _recognised(function) for name, function in candidates.items()}
    unknown = [name for name, ours in found.items() if ours is None]
    if unknown and not reason:
        reason = f"{unknown[0]} does not compute rope of q and k by the angles of each token"
    if reason:
        return Finding(path, "rope", reason=reason)
    forward = _rebuilt(own, {name: ours for name, ours in found.items() if ours is not None})
    if forward is None:
        return Finding(path, "rope", reason="its forward is decorated by something that hides what it calls")
    return Finding(path, "rope", ((module, forward),))


def _arguments(function: Any) -> list[str]:
    """Names of the arguments; a function that `kernels` has wrapped is a module."""
    called = type(function).forward if isinstance(function, nn.Module) else function
    try:
        names = list(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return []
    return names[1:] if isinstance(function, nn.Module) else names


def _rotates(value: Any) -> bool:
    if isinstance(value, type) or not callable(value):
        return False
    names = _arguments(value)
    return names[:4] == ["q", "k", "cos", "sin"] or names[:3] == ["x", "cos", "sin"]


def _rebuilt(own: Any, replaced: dict[str, Callable[..., Any]]) -> Any:
    """The function with other globals. Of one that is decorated: its decorators, over the innermost with other globals."""
    inner = getattr(own, "__wrapped__", None)
    if inner is None:
        # Without its name, tracers do not look the copy up as the model's own file.
        scope = {name: value for name, value in own.__globals__.items() if name != "__name__"} | replaced
        return _copied(own, scope, own.__closure__)
    rebuilt = _rebuilt(inner, replaced)
    cells = own.__closure__ or ()
    if rebuilt is None or not any(_held(cell) is inner for cell in cells):
        return None
    made = _copied(
        own, own.__globals__, tuple(types.CellType(rebuilt) if _held(cell) is inner else cell for cell in cells)
    )
    made.__wrapped__ = rebuilt
    return made


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _copied(own: Any, scope: dict[str, Any], closure: Any) -> Any:
    made = types.FunctionType(own.__code__, scope, own.__name__, own.__defaults__, closure)
    made.__kwdefaults__ = own.__kwdefaults__
    made.__annotations__ = own.__annotations__
    made.__doc__, made.__qualname__, made.__module__ = own.__doc__, own.__qualname__, own.__module__
    return made


def _recognised(function: Any) -> Callable[..., Any] | None:
    """Ours in the place of the function, or None: it is tried with every layout, on both places of the heads."""
    names = _arguments(function)
    heads_first = {"unsqueeze_dim": 1} if "unsqueeze_dim" in names else {}
    for columns in ("halves", "once", "pairs"):
        for interleaved in (False, True):
            layout = Layout(interleaved, columns, promotes=False)
            if _same(function, layout, names[0] == "x", heads_first):
                promotes = _promotes(function, layout, names[0] == "x", heads_first)
                return _ours(function, layout._replace(promotes=promotes), names[0] == "x")
    return None


def _inputs(layout: Layout, alone: bool, rotated: int) -> tuple[list[Tensor], Tensor, Tensor]:
    xs = [probe.random(2, heads, _TOKENS, _WIDTH, seed=heads) for heads in ((3,) if alone else (3, 2))]
    angles = probe.random(2, _TOKENS, rotated // 2, seed=9)
    return xs, layout.repeated(angles.cos()), layout.repeated(angles.sin())


def _same(function: Any, layout: Layout, alone: bool, options: dict[str, int]) -> bool:
    xs, cos, sin = _inputs(layout, alone, _WIDTH)
    try:
        with torch.no_grad():
            own = function(*xs, cos, sin, **options)
    except Exception:  # another layout's shapes
        return False
    ours = _rope(layout, xs, cos, sin)
    given = [own] if alone else own
    return isinstance(given, list | tuple) and len(given) == len(ours) and all(map(probe.equal, ours, given))


def _promotes(function: Any, layout: Layout, alone: bool, options: dict[str, int]) -> bool:
    """Whether 16-bit queries and float32 angles give a float32 result."""
    xs, cos, sin = _inputs(layout, alone, _WIDTH)
    with torch.no_grad():
        own = function(*(x.bfloat16() for x in xs), cos, sin, **options)
    return (own if alone else own[0]).dtype == torch.float32


def _ours(own: Any, layout: Layout, alone: bool) -> Callable[..., Any]:
    """The function with rope in it. What it was not recognised for goes to the model's own."""

    def single(x: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        axis = _heads_at(others, named)
        if axis is None or not _fits(layout, (x,), cos, axis):
            return own(x, cos, sin, *others, **named)
        return _turned(layout, (x,), cos, sin, axis)[0]

    def pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        axis = _heads_at(others, named)
        if axis is None or not _fits(layout, (q, k), cos, axis):
            return own(q, k, cos, sin, *others, **named)
        return tuple(_turned(layout, (q, k), cos, sin, axis))

    return single if alone else pair


def _heads_at(others: tuple[Any, ...], named: dict[str, Any]) -> int | None:
    """Which dim holds the heads (``unsqueeze_dim``); None: something else was asked for, too."""
    if len(others) > 1 or (others and named) or not named.keys() <= {"unsqueeze_dim"}:
        return None
    axis = others[0] if others else named.get("unsqueeze_dim", 1)
    return axis if axis in (1, 2) else None


def _fits(layout: Layout, xs: tuple[Tensor, ...], cos: Any, axis: int) -> bool:
    x = xs[0]
    if not all(isinstance(y, Tensor) and y.dim() == 4 and y.dtype == x.dtype for y in xs):
        return False
    tokens = x.shape[3 - axis]
    rotated = cos.shape[-1] * (2 if layout.columns == "once" else 1)
    return (
        cos.dim() == 3
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1] == tokens
        and rotated == x.shape[-1]
        and not cos.requires_grad
        and all(y.shape[0] == x.shape[0] and y.shape[3 - axis] == tokens for y in xs)
    )


def _turned(layout: Layout, xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, axis: int) -> list[Tensor]:
    dtype = torch.promote_types(xs[0].dtype, cos.dtype) if layout.promotes else xs[0].dtype
    xs = tuple(x.to(dtype) for x in xs)
    if axis == 1:
        return _rope(layout, xs, cos, sin)
    return [y.transpose(1, 2) for y in _rope(layout, [x.transpose(1, 2) for x in xs], cos, sin)]


def _rope(layout: Layout, xs: Any, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """xs: one or two tensors ``(B, H, S, D)``. Each token has a row of angles of its own."""
    cos, sin, positions = _tables(layout, cos, sin)
    if len(xs) == 1:
        return [rope(xs[0], cos, sin, positions, layout.interleaved)]
    return list(rope((xs[0], xs[1]), cos, sin, positions, layout.interleaved))


# All layers of a forward pass are handed the same cos and sin: what was last made of them, for as long as cos lives.
_last: tuple[Any, ...] = ()


def _tables(layout: Layout, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """cos and sin (B · S, R) in float32 at least, and which row each token reads; None: row s for token s."""
    global _last
    # What is made while a CUDA graph is captured has its values when the graph is replayed, and only then.
    if torch.compiler.is_compiling() or (cos.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _made(layout, cos, sin)
    key = (layout, _version(cos), _version(sin), torch.is_inference_mode_enabled())
    last = _last
    if last and last[0] == key and last[1]() is cos and last[2]() is sin:
        return last[3]
    made = _made(layout, cos, sin)
    _last = (key, weakref.ref(cos, _forget), weakref.ref(sin), made)
    return made


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _forget(dead: Any) -> None:
    global _last
    if _last and _last[1] is dead:
        _last = ()


def _made(layout: Layout, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    wide = torch.promote_types(cos.dtype, torch.float32)
    batch, tokens = cos.shape[:2]
    # Detached, or a view would keep cos alive.
    cos, sin = (layout.tables(x.detach()).to(wide).reshape(batch * tokens, -1) for x in (cos, sin))
    if batch == 1:
        return cos, sin, None
    return cos, sin, torch.arange(batch * tokens, device=cos.device).view(batch, tokens)

"""Gated MLPs in a model, ``down(f(gate(x)) * up(x))``, found by what they compute."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from headwise.integrations import _patch_probe as probe
from headwise.integrations._patch_probe import Finding, Forward
from headwise.ops.glu import ACTIVATIONS, glu

_WIDTH, _INNER = 6, 10  # of a stand-in


class Roles(NamedTuple):
    """Names of the children of a gated MLP. Without ``up`` the gate's layer makes both halves."""

    gate: str
    up: str | None
    down: str
    dropout: str | None


def find(path: str, module: nn.Module) -> Finding | None:
    """Two or three linear layers and children without weights, called with one tensor; None for other modules."""
    if sum(p.dim() == 3 and p.shape[0] > 1 for p in module.parameters(recurse=False)) >= 2:
        return Finding(path, "glu", reason="experts with stacked weights: no op takes them")
    linears = {name: child for name, child in module.named_children() if _is_linear(child)}
    others = {name: child for name, child in module.named_children() if name not in linears}
    if len(linears) not in (2, 3) or any(next(c.parameters(), None) is not None for c in others.values()):
        return None
    if next(module.parameters(recurse=False), None) is not None or len(probe.arguments_of(module)) != 1:
        return None
    found = _roles(linears, others)
    if not found:
        return None
    reason = probe.replaced(module) or _not_plain(linears, others)
    if reason:
        return Finding(path, "glu", reason=reason)
    for roles in found:
        for activation in _matching(module, roles, linears, others):
            forward = _unless_changed(_forward(roles, activation), _remembered(module, list(others)))
            return Finding(path, f"glu, {activation}", ((module, forward),))
    return Finding(path, "glu", reason="its own forward is not down(f(gate(x)) * up(x)) for an f of hw.glu")


def _is_linear(module: nn.Module) -> bool:
    """nn.Linear and what stands for it: adapters and quantised layers say their sizes too."""
    return isinstance(getattr(module, "in_features", None), int) and isinstance(
        getattr(module, "out_features", None), int
    )


def _roles(linears: dict[str, nn.Module], others: dict[str, nn.Module]) -> list[Roles]:
    """Who may be gate, up and down, by sizes."""
    dropouts = [name for name, child in others.items() if isinstance(child, nn.Dropout)]
    dropout = dropouts[0] if len(dropouts) == 1 else None
    found = []
    for names in permutations(linears):
        gate, down = linears[names[0]], linears[names[-1]]
        up = linears[names[1]] if len(names) == 3 else None
        fits = gate.in_features == down.out_features and (
            gate.out_features == 2 * down.in_features  # type: ignore[operator]
            if up is None
            else gate.out_features == up.out_features == down.in_features and up.in_features == gate.in_features
        )
        if fits:
            found.append(Roles(names[0], None if up is None else names[1], names[-1], dropout))
    return found


def _not_plain(linears: dict[str, nn.Module], others: dict[str, nn.Module]) -> str:
    if len({p.dtype for child in linears.values() for p in child.parameters()}) > 1:
        return "its weights have several dtypes"
    for name, child in others.items():
        if _hooked(child) and not isinstance(child, nn.Dropout):
            return f"{name} has hooks, which would not be called"
    return ""


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class Part(NamedTuple):
    """What decides the function that a gated MLP applies, as it was when the MLP was recognised."""

    name: str  # of a submodule its path
    kind: type
    values: tuple[tuple[str, Any], ...]  # of a module: its options; of anything else: itself

    def is_as_before(self, module: Any) -> bool:
        part = module
        for name in self.name.split("."):
            part = (
                part._modules[name]
                if name in getattr(part, "_modules", ())
                else getattr(part, "__dict__", {}).get(name)
            )
        if type(part) is not self.kind:
            return False
        if not isinstance(part, nn.Module):
            return bool(_option(part) == self.values[0][1])
        return not _hooked(part) and all(_option(getattr(part, name, None)) == value for name, value in self.values)


def _remembered(module: nn.Module, others: list[str]) -> list[Part]:
    """Children without weights, functions and options of the module. A copy of the module has equal ones."""
    parts = []
    for name in others:
        child = module.get_submodule(name)
        if not isinstance(child, nn.Dropout):  # is called, whatever it is
            for path, inner in child.named_modules(prefix=name):
                parts.append(Part(path, type(inner), tuple(_options(inner))))
    for name, value in _options(module):
        parts.append(Part(name, type(vars(module)[name]), ((name, value),)))
    return parts


def _options(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        plain = value is None or callable(value) or isinstance(value, bool | int | float | str | tuple)
        if plain and name[0] != "_" and name not in ("training", "forward"):
            yield name, _option(value)


def _option(value: Any) -> Any:
    """Equal for the attributes of two copies of a module: those of its own methods and of partial functions are not."""
    if value is None or isinstance(value, bool | int | float | str | tuple):
        return value
    if isinstance(value, functools.partial):
        return value.func, value.args, tuple(value.keywords.items())
    return getattr(value, "__func__", value)


def _unless_changed(ours: Forward, parts: list[Part]) -> Forward:
    """The forward of the class where its activation was exchanged or has hooks by now."""

    def forward(self: Any, *given: Tensor, **named: Tensor) -> Tensor:
        if not _has_any_global_hook() and all(part.is_as_before(self) for part in parts):
            out: Tensor = ours(self, *given, **named)
        else:
            out = type(self).forward(self, *given, **named)
        return out

    return forward


def _forward(roles: Roles, activation: str) -> Forward:
    """A forward as a function of the module; its layers are called, so that their hooks and adapters work."""

    def forward(self: Any, *given: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*given, *named.values())
        up = None if roles.up is None else self._modules[roles.up](x)
        y = glu(self._modules[roles.gate](x), up, activation)
        if roles.dropout is not None:
            y = self._modules[roles.dropout](y)
        return self._modules[roles.down](y)

    return forward


class _Marker(nn.Module):
    """In the place of dropout: a function that shows where it is called."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x + 1


def _matching(
    module: nn.Module, roles: Roles, linears: dict[str, nn.Module], others: dict[str, nn.Module]
) -> list[str]:
    """The activations with which ours computes what the module's own forward does, in a small size."""
    sizes = {
        roles.gate: (_WIDTH, _INNER if roles.up else 2 * _INNER),
        roles.up: (_WIDTH, _INNER),
        roles.down: (_INNER, _WIDTH),
    }
    children: dict[str, nn.Module] = {
        name: _Marker() if isinstance(child, nn.Dropout) else copy.deepcopy(child) for name, child in others.items()
    }
    children |= {name: _linear(*sizes[name], seed=seed) for seed, name in enumerate(linears)}
    small = probe.stand_in(module, {}, children, module.training)
    # From values where the activations agree to values where no two of them do.
    x = probe.random(2, 12, _WIDTH, seed=9) * torch.linspace(0.2, 4.0, 12)[:, None]
    own = probe.run(small, x)
    if not isinstance(own, Tensor):
        return []
    with torch.no_grad():
        return [name for name in ACTIVATIONS if probe.equal(_forward(roles, name)(small, x), own)]


def _linear(columns: int, rows: int, seed: int) -> nn.Linear:
    layer = nn.Linear(columns, rows, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.copy_(probe.random(rows, columns, seed=seed))
        layer.bias.copy_(probe.random(rows, seed=seed + 10))
    return layer

"""RMS and layer norms in a model, found by what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.integrations import _patch_probe as probe
from headwise.integrations._patch_probe import Finding, Forward
from headwise.ops import _autocast
from headwise.ops.layer_norm import layer_norm
from headwise.ops.rms_norm import rms_norm

_EPS = ("variance_epsilon", "eps", "epsilon")
_NARROW = torch.bfloat16


def find(path: str, module: nn.Module) -> Finding | None:
    """A leaf with an epsilon and at most a weight and a bias of one dimension; None for other modules."""
    eps_name = next((name for name in _EPS if hasattr(module, name)), None)
    parameters = dict(module.named_parameters(recurse=False))
    if eps_name is None or next(module.children(), None) is not None or not parameters.keys() <= {"weight", "bias"}:
        return None
    if any(p.dim() != 1 for p in parameters.values()) or ("bias" in parameters and "weight" not in parameters):
        return None
    reason = probe.replaced(module) or _not_plain(module, eps_name)
    if reason:
        return Finding(path, "norm", reason=reason)
    for what, forward in _candidates(eps_name, "bias" in parameters):
        if _same(module, eps_name, what, forward):
            promotes = _promotes(module)
            return Finding(path, what, ((module, _forward(what, eps_name, promotes)),))
    return Finding(path, "norm", reason="its own forward computes neither rms_norm nor layer_norm")


def _not_plain(module: nn.Module, eps_name: str) -> str:
    arguments = probe.arguments_of(module)
    if len(arguments) != 1:
        return f"its forward takes {', '.join(arguments)}; a norm takes one tensor"
    if next(module.buffers(recurse=False), None) is not None:
        return "it has buffers; a norm over the last dimension has none"
    if not isinstance(getattr(module, eps_name), float | int):
        return f"its {eps_name} is {getattr(module, eps_name)!r}; ours needs a number"
    return ""


def _candidates(eps_name: str, bias: bool) -> list[tuple[str, Forward]]:
    names = ("layer_norm",) if bias else ("rms_norm", "rms_norm, 1 + weight", "layer_norm")
    return [(name, _forward(name, eps_name, promotes=False)) for name in names]


def _forward(what: str, eps_name: str, promotes: bool) -> Forward:
    """A forward as a function of the module, so that a copy of the module computes with its own weights."""
    under_autocast: dict[
        tuple[Any, ...], torch.dtype
    ] = {}  # dtypes of results, by those of x and weight and by autocast's

    def forward(self: Any, *given: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*given, *named.values())
        weight = self._parameters.get("weight")
        if _autocast.device_of((x,)) is not None:
            return _autocasted(self, x, x.dtype if weight is None else weight.dtype)
        if weight is not None and weight.dtype != x.dtype:
            # Wide arithmetic; the result is of the dtype that the module's own code gives.
            result = torch.promote_types(x.dtype, weight.dtype) if promotes else x.dtype
            return _normed(self, x.to(torch.promote_types(x.dtype, weight.dtype))).to(result)
        return _normed(self, x)

    def _autocasted(self: Any, x: Tensor, of_weight: torch.dtype) -> Tensor:
        """Autocast has a rule for PyTorch's norms on some devices and none for norms written out: the module's code is
        asked, by no rows at all."""
        device = x.device.type
        key = (x.dtype, of_weight, device, torch.get_autocast_dtype(device))
        result = None if torch.compiler.is_compiling() else under_autocast.get(key)
        if result is None:
            with torch.no_grad():  # a checkpoint counts what is saved, and this happens once
                result = type(self).forward(self, x.new_empty(0, x.shape[-1])).dtype
            if not torch.compiler.is_compiling():
                under_autocast[key] = result
        wide = torch.promote_types(torch.promote_types(x.dtype, of_weight), result)
        with torch.autocast(device, enabled=False):
            return _normed(self, x.to(wide)).to(result)

    def _normed(self: Any, x: Tensor) -> Tensor:
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if weight is not None and weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        if what == "layer_norm":
            return layer_norm(x, weight, None if bias is None else bias.to(x.dtype), getattr(self, eps_name))
        return rms_norm(x, weight, getattr(self, eps_name), 1.0 if what.endswith("1 + weight") else 0.0)

    return forward


def _stand_in(module: nn.Module, width: int, training: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    names = dict(module._parameters)  # with those that are None
    parameters = {
        name: None if p is None else nn.Parameter(probe.random(width, seed=seed).to(dtype))
        for seed, (name, p) in enumerate(names.items())
    }
    return probe.stand_in(module, parameters, {}, training)


def _width(module: nn.Module) -> int:
    weight = module._parameters.get("weight")
    return 24 if weight is None else weight.shape[0]


def _same(module: nn.Module, eps_name: str, what: str, forward: Forward) -> bool:
    """Ours against the module's own forward: rows of several sizes, among them one where eps decides; ranks 2 to 4."""
    width = _width(module)
    if what == "rms_norm, 1 + weight" and module._parameters.get("weight") is None:
        return False
    small = float(getattr(module, eps_name)) ** 0.5
    scales = torch.tensor([1.0, small or 1.0, 1e3, 0.1])[:, None]
    for training in (False, True):
        copy = _stand_in(module, width, training)
        for shape in ((4, width), (3, 4, width), (2, 3, 4, width)):
            x = probe.random(*shape, seed=len(shape)) * scales
            own = probe.run(copy, x.clone())
            with torch.no_grad():
                if not probe.equal(forward(copy, x), own):
                    return False
    return True


def _promotes(module: nn.Module) -> bool:
    """Whether narrow inputs and a wide weight give a wide result, as Llama's norms do and Gemma's do not."""
    width = _width(module)
    own = probe.run(_stand_in(module, width, False), probe.random(2, width, seed=1).to(_NARROW))
    return isinstance(own, Tensor) and own.dtype == torch.float32

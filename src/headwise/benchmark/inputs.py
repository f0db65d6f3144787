"""Inputs of a case, in so many sets that none is in the GPU's cache when its turn comes again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.testing import Arguments, Maker

# Together, the sets of inputs that take turns are this many times as large as the cache.
_CACHES = 3
_MOST_SETS = 16
_WEBGPU_CACHE = 64 << 20


@dataclass
class DeviceMaker(Maker):
    """Draws on the device: a billion numbers would take half a minute on the CPU."""

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=dtype or self.dtype, device=self.device)
        return x if scale == 1.0 else x.mul_(scale)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def coin(self, *shape: int, chance: float = 0.5) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) < chance


def maker(dtype: torch.dtype, device: str, seed: int) -> Maker:
    if device in ("cpu", "webgpu"):  # inputs for WebGPU are drawn on the CPU
        return Maker(dtype, torch.device("cpu"), seed=seed)
    return DeviceMaker(dtype, torch.device(device), seed=seed)


def placed(arguments: Arguments, device: str) -> Arguments:
    """The arguments on the device of the contenders."""
    if device != "webgpu":
        return arguments
    from headwise.webgpu import array

    return {name: array(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}


def checkable(x: Any, device: str) -> Any:
    """A tensor or a dict of arguments where the oracle is fastest: for WebGPU on CUDA, if it is there."""
    if device != "webgpu" or not torch.cuda.is_available():
        return x
    if isinstance(x, dict):
        return {name: checkable(value, device) for name, value in x.items()}
    return x.cuda() if isinstance(x, Tensor) else x


def like(x: Tensor, out: Any) -> Tensor:
    """x on the device of ``out``."""
    if not hasattr(out, "headwise_device"):
        return x
    from headwise.webgpu import array

    return array(x)


def fetched(x: Any) -> Any:
    """A result as a tensor that PyTorch can compute with."""
    return x.torch() if hasattr(x, "torch") else x


def sets_needed(arguments: Arguments, device: str) -> int:
    """How many sets of inputs must take turns so that none is still in the cache when its turn comes again."""
    if device == "webgpu":
        from headwise.webgpu import capabilities

        # WebGPU does not tell the size of a cache; a software adapter has none.
        return 1 if capabilities().kind == "CPU" else _sets(arguments, _WEBGPU_CACHE)
    if device != "cuda":
        return 1
    return _sets(arguments, torch.cuda.get_device_properties(0).L2_cache_size)


def _sets(arguments: Arguments, cache: int) -> int:
    held = sum(x.nbytes for x in arguments.values() if isinstance(x, Tensor))
    return max(1, min(_MOST_SETS, math.ceil(_CACHES * cache / max(held, 1))))

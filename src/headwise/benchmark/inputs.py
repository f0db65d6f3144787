"""Inputs of a case: drawn where they are needed, and as many sets of them as keep a GPU's cache from knowing them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.testing import Arguments, Maker

# Together, the sets of inputs that take turns are this many times as large as the cache.
_CACHES = 3
_MOST_SETS = 16


@dataclass
class DeviceMaker(Maker):
    """Draws on the device itself: a billion numbers take a moment there and half a minute on the CPU."""

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
    made = Maker if device == "cpu" else DeviceMaker
    return made(dtype, torch.device(device), seed=seed)


def sets_needed(arguments: Arguments, device: str) -> int:
    """How many sets of inputs must take turns so that each is out of the cache when its turn comes again."""
    if device != "cuda":
        return 1
    return _sets(arguments, torch.cuda.get_device_properties(0).L2_cache_size)


def _sets(arguments: Arguments, cache: int) -> int:
    held = sum(x.nbytes for x in arguments.values() if isinstance(x, Tensor))
    return max(1, min(_MOST_SETS, math.ceil(_CACHES * cache / max(held, 1))))

"""Rotary positions (Su et al., "RoFormer", 2021), and the rules that stretch them to longer contexts.

Pair ``i`` of a head turns by ``position · f_i``, with ``f_i = base ** (-2i / dim)``. A scaling rule changes the
frequencies ``f_i``:

linear   all of them divided by the factor (Chen et al., "Extending Context Window of Large Language Models via
         Positional Interpolation", 2023)
Llama 3  the slow ones divided, the fast ones kept, a smooth passage between (Llama 3.1)
YaRN     the same by the number of turns in the original context, and logits that are a little sharper (Peng et al., "YaRN:
         Efficient Context Window Extension of Large Language Models", 2023)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwise.ops.rope import rope


class Scaling(Protocol):
    """A rule: frequencies, and what cos and sin are multiplied by."""

    def frequencies(self, plain: Tensor, dim: int, base: float) -> Tensor: ...

    def magnitude(self) -> float: ...


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by ``factor``.

    >>> rotary = nn.RotaryEmbedding(64, 8192, scaling=nn.LinearScaling(4.0))
    """

    factor: float

    def frequencies(self, plain: Tensor, dim: int, base: float) -> Tensor:
        return plain / self.factor

    def magnitude(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """The rule of Llama 3.1: wavelengths over ``original_positions / low_frequency_factor`` are stretched.

    >>> rotary = nn.RotaryEmbedding(64, 8192, 500_000.0, scaling=nn.Llama3Scaling(8.0, 1.0, 4.0, 2048))
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192

    def frequencies(self, plain: Tensor, dim: int, base: float) -> Tensor:
        turns = self.original_positions * plain / (2 * math.pi)  # in the original context
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # the share that is not stretched
        return plain * (kept + (1 - kept) / self.factor)

    def magnitude(self) -> float:
        return 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: pairs of more than ``fast_turns`` in the original context are kept, those of fewer than ``slow_turns``
    stretched.

    mscale, mscale_all_dim: DeepSeek's form of the magnitude. magnitude_factor: given as a number. whole_pairs: the
    passage begins and ends at whole pairs, as in the paper's code; gpt-oss has it off.

    >>> rotary = nn.RotaryEmbedding(64, 8192, scaling=nn.YarnScaling(4.0, 2048))
    """

    factor: float
    original_positions: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    magnitude_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    whole_pairs: bool = True

    def frequencies(self, plain: Tensor, dim: int, base: float) -> Tensor:
        def pair_of(turns: float) -> float:
            return dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair_of(self.fast_turns), pair_of(self.slow_turns)
        if self.whole_pairs:
            first, last = float(math.floor(first)), float(math.ceil(last))
        first, last = max(first, 0.0), min(last, dim - 1.0)
        pairs = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
        stretched = ((pairs - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
        return plain * (1 - stretched + stretched / self.factor)

    def magnitude(self) -> float:
        if self.magnitude_factor is not None:
            return self.magnitude_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


_WITHOUT_FLOAT64 = ("mps", "webgpu")


class RotaryEmbedding(nn.Module):
    """`headwise.rope` with its tables of cos and sin for positions 0 to ``positions - 1``.

    dim: elements of a head that turn; those behind them pass through. interleaved: pairs (2i, 2i + 1), not halves.

    The angles are computed in float64 and the tables stay float32: ``.to(torch.bfloat16)`` of a model does not round
    them, which would move positions past 256 by whole steps.

    >>> rotary = nn.RotaryEmbedding(64, 8192)
    >>> q, k = rotary(torch.randn(1, 8, 100, 64), torch.randn(1, 2, 100, 64))
    """

    cos: Tensor  # (positions, dim / 2)
    sin: Tensor

    def __init__(
        self, dim: int, positions: int, base: float = 10_000.0, *, scaling: Scaling | None = None,
        interleaved: bool = False, backend: str | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"RotaryEmbedding: dim is {dim}; it needs an even number of at least 2")
        self.dim, self.positions, self.base, self.scaling = dim, positions, base, scaling
        self.interleaved, self.backend = interleaved, backend
        for name, table in zip(
            ("cos", "sin"), self._tables(torch.get_default_device() if device is None else device), strict=True
        ):
            self.register_buffer(name, table, persistent=False)

    def frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """(dim / 2,) float64: radians per position."""
        pairs = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        plain = torch.pow(self.base, -pairs / self.dim)
        return plain if self.scaling is None else self.scaling.frequencies(plain, self.dim, self.base)

    def _tables(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        where = "cpu" if torch.device(device).type in _WITHOUT_FLOAT64 else device
        at = torch.arange(self.positions, dtype=torch.float64, device=where)
        angles = at[:, None] * self.frequencies(at.device)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude()
        return tuple((magnitude * f(angles)).to(torch.float32).to(device) for f in (torch.cos, torch.sin))  # type: ignore[return-value]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RotaryEmbedding:
        """``to``, ``half`` and ``to_empty`` come here: another device gets its own tables, another dtype changes nothing."""
        device = fn(self.cos.new_empty(0)).device
        if device != self.cos.device:
            self.cos, self.sin = self._tables(device)
        return self

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """q and k turned by their positions: ``(B, H, S, D)``, or packed ``(T, H, D)``."""
        if self.cos.is_meta and not q.is_meta:  # the model was built on meta and its weights were assigned
            self.cos, self.sin = self._tables(q.device)
        return rope((q, k), self.cos, self.sin, positions, self.interleaved, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.dim}, positions={self.positions}, base={self.base}, scaling={self.scaling}"

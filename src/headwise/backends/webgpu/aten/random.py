"""Random numbers on the GPU: Philox (``wgsl/random.wgsl``). The same seed gives the same numbers on every GPU.

The stream has a seed and counts its calls. A generator of PyTorch's (on the CPU) gives the seed of the calls it is passed
to: there are none on this device, as PyTorch lets no Python code make one.
"""

from __future__ import annotations

import math
import struct
import threading
from dataclasses import dataclass
from typing import Any, cast

import torch

from headwise.backends.webgpu.array import OPERATORS, Array
from headwise.backends.webgpu.aten import elementwise, making
from headwise.backends.webgpu.aten.reductions import reduced
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.recorder import Drawn, replayed
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten
_WORD = (1 << 32) - 1
_DIGITS = {torch.float16: 11, torch.bfloat16: 8}  # so that no number below 1 is rounded to it


class Stream:
    """Seed and number of the next call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seed(torch.initial_seed())

    def seed(self, seed: int) -> None:
        self._seed, self._calls = seed & ((1 << 64) - 1), 0

    def next(self, generator: torch.Generator | None) -> tuple[int, int]:
        if generator is not None:
            return int(torch.randint(1 << 62, (), generator=generator)), 0
        with self._lock:
            self._calls += 1
            return self._seed, self._calls - 1

    def state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(struct.pack("<QQ", self._seed, self._calls)), dtype=torch.uint8)

    def restore(self, state: torch.Tensor) -> None:
        self._seed, self._calls = struct.unpack("<QQ", bytes(state.cpu().tolist()))


stream = Stream()


def _launch(device: Device, y: Region, law: str) -> tuple[()]:
    target = y if y.contiguous and y.offset == 0 and y.numel % 4 == 0 else device.empty(y.shape, y.dtype)
    kernel = device.kernel("random", dtype=elementwise.name_of(y.dtype), law=law, digits=_DIGITS.get(y.dtype, 24))
    device.run(kernel, -(-target.numel // 1024), (0,) * 6 + (target.numel,), y=target)
    if target is not y:
        from headwise.backends.webgpu import copies

        copies.copy_into(device, target, y, part=True)
    return ()


def draw(y: Array, law: str, generator: Any, first: float, second: float = 0.0) -> Array:
    """Fill y with numbers of a law."""
    elementwise.check_written(y)
    if y.numel():
        replayed(_launch, [y], law, scalars=Drawn.of(_Draw(law == "whole", generator, first, second)))
    return y


@dataclass(frozen=True)
class _Draw:
    """Makes the scalars of one draw after another."""

    whole: bool
    generator: Any
    first: float
    second: float

    def __call__(self) -> bytes:
        form = "<QQ" + ("II" if self.whole else "ff")
        return struct.pack(form, *stream.next(self.generator), self.first, self.second)


def _uniform(y: Array, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Array:
    return draw(y, "uniform", generator, low, high - low)


def _normal(y: Array, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Array:
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    return draw(y, "normal", generator, mean, std)


def _exponential(y: Array, rate: float = 1.0, *, generator: Any = None) -> Array:
    return draw(y, "exponential", generator, rate)


def _bernoulli_in_place(y: Array, p: float = 0.5, *, generator: Any = None) -> Array:
    return draw(y, "bernoulli", generator, p)


def _bernoulli(p: Array, *, generator: Any = None) -> Array:
    return cast(Array, (_uniform(making.empty(tuple(p.shape), torch.float32), generator=generator) < p).to(p.dtype))


def _bernoulli_of(y: Array, p: Any, *, generator: Any = None) -> Array:
    drawn = _uniform(making.empty(tuple(y.shape), torch.float32), generator=generator)
    return cast(Array, y.copy_(drawn < (p if isinstance(p, Array) else p.to(y.device))))


def _whole(y: Array, low: int, high: int | None = None, *, generator: Any = None) -> Array:
    low, high = (low, high) if high is not None else (low, (1 << 31) - 1)
    if high - low > 1 << 32 or low < -(1 << 31) or high > 1 << 32:
        raise NotImplementedError(f"headwise: whole random numbers from {low} to {high} on WebGPU: 32 bits at most")
    return draw(y, "whole", generator, low & _WORD, (high - low) & _WORD)


def _whole_below(y: Array, high: int, *, generator: Any = None) -> Array:
    return _whole(y, 0, high, generator=generator)


def _any_whole(y: Array, *, generator: Any = None) -> Array:
    most = {
        torch.bool: 2,
        torch.uint8: 256,
        torch.int8: 128,
        torch.int16: 1 << 15,
        torch.float16: 2049,
        torch.bfloat16: 257,
        torch.float32: (1 << 24) + 1,
    }
    return _whole(y, 0, most.get(y.dtype, (1 << 31) - 1), generator=generator)


def _dropout(x: Array, p: float, train: bool | None) -> tuple[Array, Array]:
    if train is False or p == 0:
        return cast(Array, x.clone()), cast(Array, torch.ones_like(x, dtype=torch.bool))
    kept = draw(making.empty(tuple(x.shape), torch.bool), "bernoulli", None, 1 - p)
    return cast(Array, x * kept * (0.0 if p == 1 else 1 / (1 - p))), kept


_NO_DRAW = torch.iinfo(torch.int64).min  # in place of a draw: out of range wherever it is used as an index


def _multinomial(p: Array, count: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """Rows of which nothing can be drawn (an infinite, NaN or negative chance, or none above 0) give `_NO_DRAW`: to raise,
    the chances would have to be read back at every draw. So do draws without replacement beyond what has a chance."""
    if not p.dtype.is_floating_point:
        raise RuntimeError(f"multinomial: the chances are {p.dtype}; they need to be floats")
    if p.dim() not in (1, 2) or p.shape[-1] == 0 or count <= 0:
        raise RuntimeError(
            f"multinomial: {count} draws of chances of shape {tuple(p.shape)}; it needs one row or a matrix of rows that "
            "are not empty, and at least one draw"
        )
    if p.shape[-1] < count and not replacement:
        raise RuntimeError(
            f"multinomial: {count} draws without replacement of {p.shape[-1]} chances; cannot sample n_sample > "
            "prob_dist.size(-1) samples without replacement"
        )
    several = replacement and count > 1
    shape = (*p.shape[:-1], count, p.shape[-1]) if several else tuple(p.shape)
    # The race of exponential clocks: the first to ring is a draw, the first few are draws without replacement.
    clocks = _exponential(making.empty(shape, torch.float32), generator=generator)
    race = replayed(_race, [cast(Array, p.unsqueeze(-2)) if several else p, clocks])
    if several:
        best, places = race.max(-1)
    elif count == 1:
        best, places = race.max(-1, keepdim=True)
    else:
        best, places = race.topk(count, -1)
        best = torch.where(best[..., :1].isnan(), math.nan, best)  # of the whole row
    return torch.where(best > 0, places, _NO_DRAW)


def _race(device: Device, p: Region, clocks: Region) -> Region:
    """How fast each entry is, in fractions of the likeliest; NaN, which wins, where a row or an entry is no chance."""
    dim = len(p.shape) - 1
    highest = reduced(device, p, [dim], "max", torch.float32, keepdim=True)
    race = device.empty(clocks.shape, torch.float32)
    inputs = {name: elementwise.Input(x, "f") for name, x in (("p", p), ("h", highest), ("c", clocks))}
    fine = "p >= 0.0 && !is_nan(p) && h > 0.0 && !is_nan(h) && !is_inf(h)"
    elementwise.compute(device, f"select(not_a_number(), p / h / c, {fine})", "f", inputs, race)
    return race


OPERATORS |= {
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal,
    aten.exponential_.default: _exponential,
    aten.bernoulli_.float: _bernoulli_in_place,
    aten.bernoulli_.Tensor: _bernoulli_of,
    aten.bernoulli.default: _bernoulli,
    getattr(aten.random_, "from"): _whole,
    aten.random_.to: _whole_below,
    aten.random_.default: _any_whole,
    aten.native_dropout.default: _dropout,
    aten.multinomial.default: _multinomial,
}

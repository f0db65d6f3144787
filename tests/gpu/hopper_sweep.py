"""Every head dim from 8 to 256 beside masks and biases of every broadcast shape, and values narrower than keys.

No pytest here. On a GPU `test_hopper_dims` measures all of them; without one, tests/test_hopper_sweep.py asks which kernels
take them, counts what has to be compiled, and runs a sample in Triton's interpreter. A broadcast shape keeps its flags, so
that head dims which share a tile share all that is compiled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.backends.triton.hopper.coverage import UNEQUAL, UNEQUAL_VALUES
from headwise.cases import attention
from headwise.testing import Case, Maker

Shape = tuple[bool, ...]  # which of batch, heads, queries and keys a mask or a bias has

FLAGS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (90, 30)},
    "cap and sink": {"softcap": 15.0, "sink": True},
}
SHAPES: list[Shape] = list(itertools.product((False, True), repeat=4))
DIMS = range(8, 257, 8)
# Of no multiple of eight, and values that are narrower or wider than keys in other ways: the plain kernels.
OTHERS = [(1, 1), (20, 20), (57, 57), (111, 111), (250, 250), (40, 96), (128, 64), (64, 128), (256, 128), (192, 136)]


class Sizes(NamedTuple):
    b: int
    hq: int
    hk: int
    sq: int
    sk: int


LARGE = Sizes(2, 16, 8, 400, 456)  # just enough for the Hopper forward
SMALL = Sizes(2, 4, 2, 70, 88)


class SweepCase(NamedTuple):
    group: str  # what is compiled together
    case: Case
    on_hopper: bool


def _named(shape: Shape) -> str:
    return "".join(letter if has else "1" for letter, has in zip("bhqk", shape, strict=True))


def sweep(sizes: Sizes) -> Iterator[SweepCase]:
    full = sizes.b, sizes.hq, sizes.sq, sizes.sk

    def case(
        group: str, d: int, flags: str, on_hopper: bool = True, dv: int | None = None, **scores: Shape
    ) -> SweepCase:
        shapes = {
            name: tuple(n if has else 1 for n, has in zip(full, shape, strict=True)) for name, shape in scores.items()
        }
        name = f"{d}{'' if dv is None else f'/{dv}'} {flags}" + "".join(f" {n} {_named(s)}" for n, s in scores.items())
        return SweepCase(group, Case(name, {**sizes._asdict(), "d": d, "dv": dv, **shapes, **FLAGS[flags]}), on_hopper)

    for d in DIMS:
        group = f"masks, up to {next(w for w in (64, 96, 128, 192, 256) if d <= w)}"
        yield case(group, d, "causal")
        for i, shape in enumerate(SHAPES):
            # Masks that are broadcast over the keys are another variant; they share two sets of flags.
            flags = list(FLAGS)[i // 2 % 4] if shape[3] else ("full", "causal")[i // 2 % 2]
            yield case(group, d, flags, mask=shape)
    for d, (i, shape) in itertools.product(DIMS, enumerate(SHAPES)):
        widest = next((w for w in (64, 96, 128) if d <= w), None)
        taken = shape[3] and widest is not None
        if not taken and (d + i) % 7:  # the plain kernels' part is a sample
            continue
        flags = ("full", "causal" if shape[2] else "window")[i // 4 % 2]
        yield case(f"biases, up to {widest}" if taken else "the plain kernels", d, flags, taken, bias=shape)
        if taken and i == 13:
            yield case(f"biases, up to {widest}", d, "causal", bias=shape, mask=(True, False, True, True))
    for d, dv in itertools.product(UNEQUAL[::8], range(UNEQUAL_VALUES[0], UNEQUAL_VALUES[-1] + 1, 8)):
        yield case("values narrower than keys", d, ("full", "causal")[(d + dv) // 8 % 2], dv=dv)
    for i, (d, dv) in enumerate(OTHERS):
        dv_if_other = None if dv == d else dv
        for scores in ({}, {"mask": SHAPES[3 * i % 16]}, {"bias": SHAPES[(5 * i + 1) % 16]}):
            yield case("the plain kernels", d, list(FLAGS)[i % 3], False, dv=dv_if_other, **scores)


def make(maker: Maker, *, mask: tuple[int, ...] | None = None, **params: Any) -> dict[str, Any]:
    """As the conformance cases, with masks that hide blocks and rows, and NaN in keys that no query of an entry sees."""
    arguments = attention.make(maker, **params)
    if mask is not None:
        seen = arguments["mask"] = maker.coin(*mask, chance=0.6)
        if mask[3] > 1:
            seen[..., mask[3] // 3 : mask[3] // 2] = False
        if mask[2] > 1:
            seen[..., mask[2] // 3 : mask[2] // 2, : mask[3] // 4 or 1] = False
            seen[..., 3, :] = False
        hide_with_nan(arguments, maker.device)
    return arguments


def hide_with_nan(arguments: dict[str, Any], device: Any) -> None:
    """NaN in the keys and values that no query of their batch entry sees through the mask and the band."""
    q, k, mask = arguments["q"], arguments["k"], arguments["mask"]
    position = torch.arange(q.shape[2], device=device)[:, None] + k.shape[2] - q.shape[2]
    distance = torch.arange(k.shape[2], device=device) - position
    left, right = arguments.get("window", (None, 0 if arguments.get("causal") else None))
    band = (distance >= (-math.inf if left is None else -left)) & (distance <= (math.inf if right is None else right))
    group = q.shape[1] // k.shape[1]
    seen: Tensor = (mask & band).expand(*q.shape[:3], k.shape[2]).any(2).unflatten(1, (-1, group)).any(2)
    for x in (k, arguments["v"]):
        x.masked_fill_(~seen[..., None], math.nan)

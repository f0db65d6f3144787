"""Programs of real sizes for the page to time: cases of ``headwise bench``, in sizes that grow while a GPU is fast.

The page draws the inputs itself. Of the results it only checks that they are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headwise.benchmark.case import BenchCase
from headwise.benchmark.suites import training
from headwise.benchmark.suites.attention import Shape, Visibility, attention_case
from headwise.benchmark.suites.decode import Cache, decode_case
from headwise.testing import Maker
from headwise.web.checks import placed
from headwise.web.recording import Buffer, Program, Tape, recording, region
from headwise.web.tiers import Tier

F32 = torch.float32
HEADS, HEAD_DIM = 8, 64
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
CACHES = (256, 1024, 4096, 16384)
ROWS, WIDTH = (64, 256, 1024, 4096, 16384), 1024
SIDES = (256, 512, 1024, 2048, 4096)


class Measure(NamedTuple):
    """One program to time. Those of one name are a line of the page, smallest first."""

    name: str
    size: str
    unit: Literal["flop", "byte"]
    work: float  # in these units
    program: Program


def measures(tier: Tier) -> Iterator[Measure]:
    for words in SIDES:
        yield _copy(tier, words * words)
    for name, cases in _cases().items():
        for size, case in cases:
            yield _measure(tier, name, size, case)


def _cases() -> dict[str, list[tuple[str, BenchCase]]]:
    setting = training.Setting(F32, "memory bound")

    def attention(direction: Literal["forward", "backward"], causal: bool) -> list[tuple[str, BenchCase]]:
        shapes = [Shape(1, HEADS, HEADS, length, HEAD_DIM) for length in LENGTHS]
        return [(f"S {s.length}", attention_case("", "", s, direction, Visibility(causal))) for s in shapes]

    def rows(case: Callable[[int], BenchCase]) -> list[tuple[str, BenchCase]]:
        return [(f"{count} × {WIDTH}", case(count)) for count in ROWS]

    heads = f"H {HEADS}, D {HEAD_DIM}"
    return {
        f"attention, {heads}": attention("forward", False),
        f"attention, causal, {heads}": attention("forward", True),
        f"attention backward, {heads}": attention("backward", False),
        f"attention backward, causal, {heads}": attention("backward", True),
        "attention_decode, H 32:8, D 128": [
            (f"length {length}", decode_case("", Cache(1, length), "device", F32)) for length in CACHES
        ],
        "rms_norm": rows(lambda count: training.rms_norm_case(count, WIDTH, "forward", setting)),
        "rms_norm backward": rows(lambda count: training.rms_norm_case(count, WIDTH, "backward", setting)),
        "softmax": rows(lambda count: training.softmax_case(count, WIDTH, "forward", setting)),
        "softmax backward": rows(lambda count: training.softmax_case(count, WIDTH, "backward", setting)),
        "cross_entropy, loss and gradient": rows(
            lambda count: training.cross_entropy_case(count, WIDTH, setting, fused=True)
        ),
        "transpose": [(f"{side} × {side}", training.transpose_case(side, side, setting)) for side in SIDES],
    }


class _Zeros(Maker):
    """Zeros for random floats, which the page draws itself; integers are drawn as usual."""

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype)


def _measure(tier: Tier, name: str, size: str, case: BenchCase) -> Measure:
    maker = _Zeros(F32, torch.device("cpu"))
    with recording(tier.capabilities) as tape:
        arguments = {key: placed(value) for key, value in case.make(maker).items()}
        given = [x for x in arguments.values() if isinstance(x, Tensor)]
        if case.direction == "backward":
            results = _backward(case, arguments, given, tape)
        else:
            results = case.ours(arguments)()
        outputs = results if isinstance(results, (list, tuple)) else (results,)
        program = tape.program({f"output {i}": x.detach() for i, x in enumerate(outputs)})
    _drawn_there(given)
    unit: Literal["flop", "byte"] = "flop" if case.counts_flops else "byte"
    return Measure(name, size, unit, case.work, program)


def _backward(case: BenchCase, arguments: dict[str, Any], given: list[Tensor], tape: Tape) -> Sequence[Tensor]:
    leaves = [arguments[key].requires_grad_() for key in case.differentiable]
    out = case.ours(arguments)()
    gradient = placed(torch.zeros(out.shape, dtype=out.dtype))
    given.append(gradient)
    tape.prepared()
    found: Sequence[Tensor] = torch.autograd.grad(out, leaves, gradient)
    return found


def _drawn_there(given: Sequence[Tensor]) -> None:
    for x in given:
        if x.is_floating_point():
            buffer: Buffer = region(x).storage.buffer
            buffer.content, buffer.random = None, x.dtype


def _copy(tier: Tier, words: int) -> Measure:
    """The most that the GPU's memory can do: a plain copy, sixteen bytes per thread."""
    from headwise.backends.webgpu import copies, runtime
    from headwise.backends.webgpu.array import Array

    with recording(tier.capabilities) as tape:
        device = runtime.device()
        x = placed(torch.zeros(words))
        y = device.empty((words,), F32)
        copies.copy_flat(device, region(x), y)
        program = tape.program({"copy": Array(y, device)})
    _drawn_there([x])
    return Measure("plain copy", f"{words * 4 / 2**20:g} MiB", "byte", 8.0 * words, program)

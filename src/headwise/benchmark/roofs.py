"""The roofs of the machine: how fast it copies memory, and how fast it multiplies matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwise.benchmark import timing

_COPIED = 1 << 31  # bytes read, and as many written: far more than any cache holds
_SIDE = 8192  # of the matrices


@dataclass(frozen=True)
class Roof:
    name: str
    dtype: str
    seconds: timing.Spread
    rounds: int
    flops: float = 0.0
    bytes: float = 0.0

    def __str__(self) -> str:
        if self.flops:
            return f"{self.name} {self.flops / self.seconds.median / 1e12:.3g} TFLOP/s"
        return f"{self.name} {self.bytes / self.seconds.median / 1e12:.3g} TB/s"


def measure(quick: bool, device: str = "cuda") -> list[Roof]:
    """On the current GPU, with random data: a multiplication of zeros draws less power and runs faster."""
    if device == "webgpu":
        return [_webgpu_copy(quick)]
    copied, side = (_COPIED >> 6, _SIDE >> 4) if quick else (_COPIED, _SIDE)
    source = torch.randint(-(2**31), 2**31, (copied // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    actions = {"copy": lambda: target.copy_(source), "bfloat16 matmul": lambda: a @ b}
    plan = timing.Plan(repeats=3 if quick else 15, sample_s=0.01, most_calls=100)
    seconds = timing.interleave(actions, timing.clock_for("cuda"), plan)
    spreads = {name: timing.Spread.of(values) for name, values in seconds.items()}
    return [
        Roof("copy", "int32", spreads["copy"], plan.repeats or 0, bytes=2.0 * copied),
        Roof("bfloat16 matmul", "bfloat16", spreads["bfloat16 matmul"], plan.repeats or 0, flops=2.0 * side**3),
    ]


def _webgpu_copy(quick: bool) -> Roof:
    """A plain copy in WGSL, sixteen bytes per thread."""
    from headwise.backends.webgpu import copies, runtime

    device = runtime.device()
    copied = min(_COPIED >> 1 if not quick else 1 << 20, device.capabilities.binding_bytes // 256 * 256)
    source = device.upload(torch.randint(-(2**31), 2**31, (copied // 4,), dtype=torch.int32))
    target = device.empty(source.shape, source.dtype)
    plan = timing.Plan(repeats=3 if quick else 15, sample_s=0.01, most_calls=32)
    seconds = timing.interleave(
        {"copy": lambda: copies.copy_flat(device, source, target)}, timing.clock_for("webgpu"), plan
    )
    return Roof("copy", "int32", timing.Spread.of(seconds["copy"]), plan.repeats or 0, bytes=2.0 * copied)

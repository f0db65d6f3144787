"""The WebGPU suite: resident arrays, float32 unless a case says otherwise. Targets are for one H200 through Vulkan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

import headwise as hw
from headwise.benchmark.case import BenchCase, BenchSuite, Contender, Direction, our_yardstick
from headwise.benchmark.correctness import WholeCheck, first_output, oracle
from headwise.benchmark.requirements import AtLeast, FlopRate, Requirement, SameRate, TimeLimit, Within
from headwise.benchmark.suites import dropout, linear_loss, pointwise, training, webgpu_device, webgpu_features
from headwise.benchmark.suites.attention import BOTH, PATTERNS, Shape, attention_case, attention_flops, ours
from headwise.benchmark.suites.decode import Cache, decode_case
from headwise.benchmark.suites.norms import add_rms_norm_case, layer_norm_case
from headwise.benchmark.suites.onnx_webgpu import ORT, ort_peer
from headwise.benchmark.suites.training import Setting
from headwise.benchmark.timing import Plan
from headwise.config import settings
from headwise.ops._checks import short
from headwise.testing import Arguments, Maker, Outputs

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HEADS = 16
# (length, head dim) of the attention table, and the float32 rate required there in TFLOP/s.
SHAPES = {(4096, 64): 36.0, (2048, 128): 32.0}
FASTER = {(F32, "full"): 2.0, (F32, "causal"): 3.0, (F16, "full"): 1.25, (F16, "causal"): 2.0}
WITHOUT_SUBGROUPS = 1.3
GROWTH = (512, 1024, 2048, 4096, 8192, 16384, 32768)
COPY, FORWARD = "WGSL copy", "our forward"
CHAIN, CHAIN_US = 50, 12.0  # small ops in a row, and microseconds of Python for each


def cases(quick: bool) -> list[BenchCase]:
    shrink = 64 if quick else 1
    return [
        *_forward(shrink),
        *_without_subgroups(shrink),
        *_small_grid(shrink),
        *_backward(shrink),
        *dropout.on_webgpu(shrink),
        *webgpu_features.cases(shrink),
        *_decode(shrink),
        *_memory_bound(shrink),
        *_linear_loss(shrink),
        *_growth(shrink),
        *_host(),
        *webgpu_device.cases(shrink, _beside_a_copy),
    ]


def _forward(shrink: int) -> list[BenchCase]:
    built: list[BenchCase] = []
    for dtype, (length, dim), pattern in product((F32, F16), SHAPES, PATTERNS):
        required: tuple[Requirement, ...] = (AtLeast(FASTER[dtype, pattern], ORT),)
        if dtype == F32:
            required += (FlopRate(SHAPES[length, dim]),)
        group = f"attention {short(dtype)}"
        built.append(_attention(group, length // shrink, dim, pattern, dtype, (ort_peer(),), required))
    built += [
        _attention("attention bfloat16", length // shrink, dim, pattern, BF16)
        for (length, dim), pattern in product(SHAPES, PATTERNS)
    ]
    return built


def _attention(
    group: str,
    length: int,
    dim: int,
    pattern: str,
    dtype: torch.dtype,
    peers: tuple[Contender, ...] = (),
    requirements: tuple[Requirement, ...] = (),
    direction: Direction = "forward",
) -> BenchCase:
    return attention_case(
        f"{pattern} S {length} D {dim}",
        group,
        Shape(1, HEADS, HEADS, length, dim),
        direction,
        PATTERNS[pattern],
        peers=peers,
        requirements=requirements,
        dtype=dtype,
    )


def _without_subgroups(shrink: int) -> list[BenchCase]:
    """On tier A: only what every WebGPU device has."""

    def on_the_floor(arguments: Arguments) -> Callable[[], Tensor]:
        call = ours(arguments)

        def run() -> Tensor:
            with floor_of_webgpu():
                return call()

        return run

    return [
        replace(
            _attention(
                "without subgroups",
                length // shrink,
                dim,
                pattern,
                F32,
                (ort_peer(),),
                (AtLeast(WITHOUT_SUBGROUPS, ORT),),
            ),
            ours=on_the_floor,
        )
        for (length, dim), pattern in product(SHAPES, PATTERNS)
    ]


@contextmanager
def floor_of_webgpu() -> Iterator[None]:
    """Calls inside choose their kernels as on a device of tier A."""
    from headwise.backends.webgpu import adapter, runtime

    device = runtime.device()
    with device.lock, settings.apart("the floor of WebGPU"):
        kept = device.capabilities
        device.capabilities = kept._replace(
            tier="A",
            subgroup_size=0,
            workgroup_memory=adapter.FLOOR_WORKGROUP_MEMORY,
            workgroup_threads=adapter.FLOOR_WORKGROUP_THREADS,
        )
        try:
            yield
        finally:
            device.capabilities = kept


def _small_grid(shrink: int) -> list[BenchCase]:
    length = max(1000 // shrink, 8)
    return [
        _attention("small grid", length, dim, pattern, F32, requirements=(FlopRate(25.0),) if pattern == "full" else ())
        for dim, pattern in product((64, 128), PATTERNS)
    ]


def _backward(shrink: int) -> list[BenchCase]:
    """No peer has a fused backward on WebGPU: the target is relative to our own forward."""

    def forward(arguments: Arguments) -> Callable[[], tuple[Tensor]]:
        kept: Arguments = {name: x.detach() if isinstance(x, Tensor) else x for name, x in arguments.items()}
        return lambda: (hw.attention(**kept),)

    built: list[BenchCase] = []
    for dtype, (length, dim), pattern in product((F32, BF16), SHAPES, PATTERNS):
        size = length // shrink
        flops = attention_flops(HEADS * PATTERNS[pattern].pairs(size, size), dim, "forward")
        yardstick = our_yardstick(FORWARD, forward, flops=flops, explicit=True)
        group = f"attention backward {short(dtype)}"
        required = (SameRate(0.5, FORWARD),)
        built.append(_attention(group, size, dim, pattern, dtype, (yardstick,), required, "backward"))
    return built


def copy_yardstick(bytes_moved: float) -> Contender:
    """A plain WGSL copy whose reads and writes together are as many bytes as the case has to move."""

    def prepare(arguments: Arguments) -> Callable[[], tuple[None]]:
        from headwise.backends.webgpu import copies, runtime

        device = runtime.device()
        words = max(64, int(bytes_moved) // 8 // 64 * 64)
        source, target = (copies.full(device, (words,), 1.0, F32) for _ in range(2))

        def run() -> tuple[None]:
            with device.lock:
                copies.copy_flat(device, source, target)
            return (None,)

        return run

    return our_yardstick(COPY, prepare, explicit=True)


def _beside_a_copy(case: BenchCase, share: float) -> BenchCase:
    requirements = (Within(1 / share, COPY),) if share else ()
    return replace(case, peers=(copy_yardstick(case.bytes),), requirements=requirements)


def _decode(shrink: int) -> list[BenchCase]:
    return [
        _beside_a_copy(
            decode_case(f"decode {short(dtype)}", Cache(batch, length // shrink), "device", dtype),
            0.6 if (batch, length) == (8, 32768) else 0.0,
        )
        for dtype, batch, length in product((F32, F16, BF16), (1, 8), (4096, 32768))
    ]


def _memory_bound(shrink: int) -> list[BenchCase]:
    built: list[BenchCase] = []
    for dtype in (F32, BF16):
        setting = Setting(dtype, f"memory bound {short(dtype)}")
        rows = 16384 // shrink
        built += [
            _beside_a_copy(training.rms_norm_case(rows, 4096, "forward", setting), 0.7),
            _beside_a_copy(training.rms_norm_case(rows, 4096, "backward", setting), 0.7),
            *[
                _beside_a_copy(build(rows, 4096, direction, setting), 0.85)
                for build, direction in product((layer_norm_case, add_rms_norm_case), BOTH)
            ],
            _beside_a_copy(training.softmax_case(rows, 4096, "forward", setting), 0.7),
            _beside_a_copy(training.softmax_case(rows, 4096, "backward", setting), 0.7),
            _beside_a_copy(training.cross_entropy_case(4096 // shrink, 32768, setting, fused=True), 0.7),
            _beside_a_copy(training.transpose_case(8192 // shrink, 8192, setting), 0.7),
        ]
        shape = pointwise.RopeShape(2, 32, 8, 4096 // shrink, 128)
        for direction in BOTH:
            built.append(_beside_a_copy(pointwise.glu_case(8192 // shrink, 14336, direction, setting), 0.85))
            built.append(_beside_a_copy(pointwise.rope_case(shape, direction, setting), 0.85))
    return built


def _linear_loss(shrink: int) -> list[BenchCase]:
    sizes = (2048 // shrink, 2048 // shrink, 32768 // shrink)
    return [linear_loss.linear_loss_case(*sizes, dtype, group=f"linear loss {short(dtype)}") for dtype in (F32, BF16)]


def _growth(shrink: int) -> list[BenchCase]:
    return [
        _attention("growth", max(length // shrink, 8), 64, pattern, F32, (ort_peer(),))
        for length, pattern in product(GROWTH, PATTERNS)
    ]


def _host() -> list[BenchCase]:
    """rms_norm and softmax in turn: the Python of a small op, and of its backward beside that of its forward."""

    def make(maker: Maker) -> Arguments:
        return {"x": maker.normal(64, 256), "weight": maker.normal(256)}

    def by_oracles(arguments: Arguments) -> Outputs:
        x = arguments["x"]
        for _ in range(CHAIN // 2):
            x = first_output(oracle("rms_norm")({"x": x, "weight": arguments["weight"]}))
            x = first_output(oracle("softmax")({"x": x}))
        return {"out": x}

    def chain(arguments: Arguments) -> Callable[[], Tensor]:
        def run() -> Tensor:
            x, weight = arguments["x"], arguments["weight"]
            for _ in range(CHAIN // 2):
                x = hw.softmax(hw.rms_norm(x, weight))
            return x

        return run

    def recorded(arguments: Arguments) -> Callable[[], tuple[Tensor]]:
        call = chain({name: x.detach().requires_grad_() for name, x in arguments.items()})

        def run() -> tuple[Tensor]:
            with torch.enable_grad():
                return (call(),)

        return run

    forward = BenchCase(
        name=f"{CHAIN} small ops in a row, 64 × 256",
        group="host",
        direction="forward",
        make=make,
        ours=chain,
        check=WholeCheck(by_oracles, ("x", "weight")),
        bytes=4.0 * CHAIN * 2 * 64 * 256,
        requirements=(TimeLimit(CHAIN * CHAIN_US),),
        dtype=F32,
        timed="host",
        differentiable=("x", "weight"),
    )
    yardstick = our_yardstick(FORWARD, recorded, explicit=True)
    backward = replace(forward, direction="backward", peers=(yardstick,), requirements=(Within(1.3, FORWARD),))
    return [forward, backward]


PLAN = Plan(target_s=2.0, sample_s=0.01, most_calls=200)
SUITE = BenchSuite(name="webgpu", device="webgpu", dtype=F32, cases=cases, backend="webgpu", plan=PLAN)

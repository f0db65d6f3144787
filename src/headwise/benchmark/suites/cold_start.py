"""What a user waits for before anything runs: first calls in a fresh process with an empty cache of compiled kernels.

Every sample is a process of its own, which times itself; `fresh_process` says what is on its clock. The results of a process
are held to the error budget like those of any other call. `headwise warm` is timed as a command, from its start to its end.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise
from headwise.benchmark import fresh_process
from headwise.benchmark.case import Absent, BenchCase, Contender, Direction
from headwise.benchmark.correctness import WholeCheck, oracle
from headwise.benchmark.requirements import TimeLimit
from headwise.benchmark.suites.attention import BOTH, QKV, Shape
from headwise.benchmark.suites.peers import FA4
from headwise.benchmark.timing import SelfTimed
from headwise.config import environment_with
from headwise.testing import Arguments, Maker, Outputs

GROUP = "cold start"
BF16 = torch.bfloat16
FIRST_CALL: dict[Direction, float] = {"forward": 2.5, "backward": 3.0}  # seconds allowed
NEW_COMBINATION, WARM = 4.0, 20.0
ROUNDS = 3

# What a run of a model may ask for: two head dims, eight kinds of call, forward and backward.
WARMED = [
    f"attention --dtype bf16 --b 2 --hq 16 --sq 4096 --d {head_dim} --gradient {flags}".strip()
    for head_dim, flags in product(
        (64, 128),
        ("", "--causal", "--causal --window 1023,0", "--causal --softcap 30", "--causal --sink", "--mask", "--bias",
         "--kv-lengths"),
    )
]  # fmt: skip
_COMMAND = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from headwise.cli import main; sys.exit(main(sys.argv[1:]))"
)
_ROOT = str(Path(headwise.__file__).resolve().parent.parent)


@dataclass(eq=False)
class FirstCall(SelfTimed):
    """A call that a fresh process makes; see `fresh_process` for the job."""

    job: dict[str, Any]
    tensors: dict[str, Tensor]
    results: tuple[Tensor, ...] | None = None  # of a process that ran already
    fresh = True

    def __call__(self) -> tuple[Tensor, ...]:
        if self.results is None:
            self.results = tuple(self._run()[1])
        return self.results

    def seconds(self, calls: int) -> float:
        return self._run()[0]

    def _run(self) -> tuple[float, list[Tensor]]:
        with tempfile.TemporaryDirectory(prefix="headwise-bench-") as name:
            folder = Path(name)
            (folder / "job.json").write_text(json.dumps(self.job), encoding="utf-8")
            torch.save({name: x.detach().cpu() for name, x in self.tensors.items()}, folder / "inputs.pt")
            # -P: the files beside the script are modules of headwise.benchmark, not of the process.
            _run_process([sys.executable, "-P", fresh_process.__file__, name, _ROOT], folder / "kernels")
            results = torch.load(folder / "results.pt", map_location=self.job["device"])
            return json.loads((folder / "seconds.json").read_text(encoding="utf-8")), results


@dataclass(eq=False)
class Warming(SelfTimed):
    """``headwise warm`` of these calls into an empty cache; the call gives the share that a second command finds there."""

    calls: tuple[str, ...]
    arch: str | None
    fresh = True

    def __call__(self) -> tuple[Tensor, ...]:
        with tempfile.TemporaryDirectory(prefix="headwise-bench-") as name:
            first, second = (json.loads(self._run(Path(name))) for _ in range(2))
        return (torch.tensor(second["found"] / (first["compiled"] + first["found"])),)

    def seconds(self, calls: int) -> float:
        with tempfile.TemporaryDirectory(prefix="headwise-bench-") as name:
            start = time.perf_counter()
            self._run(Path(name))
            return time.perf_counter() - start

    def _run(self, kernels: Path) -> str:
        arch = [] if self.arch is None else ["--arch", self.arch]
        return _run_process([sys.executable, "-c", _COMMAND, _ROOT, "warm", *self.calls, *arch, "--json"], kernels)


def _run_process(command: list[str], kernels: Path) -> str:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment_with(TRITON_CACHE_DIR=str(kernels))
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"the fresh process ended with {done.returncode}: {lines[-1]}")
    return done.stdout


@dataclass(frozen=True)
class FirstCallCheck:
    """The whole result, from a gradient of the output that is among the arguments."""

    differentiable: tuple[str, ...]

    def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
        given = {name: x for name, x in arguments.items() if name != "grad_out"}
        return WholeCheck(oracle("attention"), self.differentiable).compute(given, arguments.get("grad_out"))

    def pick(self, results: Outputs) -> Outputs:
        return results


def cases(shrink: int) -> list[BenchCase]:
    length = 2048 // shrink
    built = [
        _first_call(f"first call causal S {length} D {head_dim}", Shape(2, 8, 8, length, head_dim), direction)
        for direction, head_dim in product(BOTH, (64, 128))
    ]
    return [*built, _new_combination(length), _warm(WARMED if shrink == 1 else ["softmax --n 64 --v 256"])]


def _first_call(name: str, shape: Shape, direction: Direction) -> BenchCase:
    limit = TimeLimit(FIRST_CALL[direction] * 1e6)
    peers = (Contender(FA4, _prepare(direction, FA4), deterministic=False),)
    return _case(name, direction, _maker(shape), _prepare(direction), QKV, limit, peers)


def _new_combination(length: int) -> BenchCase:
    """After a plain causal call in both directions, one with a window, a soft cap, sinks and lengths."""
    shape = Shape(2, 8, 8, length, 128)

    def features(maker: Maker) -> Arguments:
        lengths = torch.tensor([length, length - length // 3], dtype=torch.int32, device=maker.device)
        sink = maker.normal(shape.heads, dtype=torch.float32)
        return {"window": (length // 2, 0), "softcap": 20.0, "sink": sink, "kv_lengths": lengths}

    name = f"new combination: window, softcap, sink, kv_lengths, S {length} D 128"
    differentiable = (*QKV, "sink")
    direction: Direction = "forward+backward"
    ours = _prepare(direction, known=True, differentiable=differentiable)
    return _case(name, direction, _maker(shape, features), ours, differentiable, TimeLimit(NEW_COMBINATION * 1e6))


def _warm(calls: list[str]) -> BenchCase:
    """All kernels of these calls, and found again by a command that follows."""

    def ours(arguments: Arguments) -> Warming:
        return Warming(tuple(calls), None if torch.cuda.is_available() else "sm_90")

    @dataclass(frozen=True)
    class AllFound:
        def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
            return {"out": torch.ones(())}

        def pick(self, results: Outputs) -> Outputs:
            return results

    name = f"headwise warm of {len(calls)} calls"
    return BenchCase(
        name=name, group=GROUP, direction="forward", make=lambda maker: {}, ours=ours, check=AllFound(), dtype=BF16,
        requirements=(TimeLimit(WARM * 1e6),), timed="process", most_rounds=ROUNDS,
    )  # fmt: skip


def _case(
    name: str, direction: Direction, make: Callable[[Maker], Arguments], ours: Callable[[Arguments], FirstCall],
    differentiable: tuple[str, ...], limit: TimeLimit, peers: tuple[Contender, ...] = (),
) -> BenchCase:  # fmt: skip
    return BenchCase(
        name=name, group=GROUP, direction=direction, make=make, ours=ours, check=FirstCallCheck(differentiable),
        differentiable=differentiable, peers=peers, requirements=(limit,), dtype=BF16, timed="process",
        most_rounds=ROUNDS,
    )  # fmt: skip


def _maker(shape: Shape, features: Callable[[Maker], Arguments] = lambda maker: {}) -> Callable[[Maker], Arguments]:
    batch, heads, _, length, head_dim = shape

    def make(maker: Maker) -> Arguments:
        names = (*QKV, "grad_out")
        tensors = {name: maker.normal(batch, length, heads, head_dim).transpose(1, 2) for name in names}
        return {**tensors, "causal": True, **features(maker)}

    return make


def _prepare(
    direction: Direction, library: str = "headwise", known: bool = False, differentiable: tuple[str, ...] = QKV
) -> Callable[[Arguments], FirstCall]:
    def prepare(arguments: Arguments) -> FirstCall:
        if library == FA4 and importlib.util.find_spec("flash_attn.cute") is None:
            raise Absent("flash_attn.cute is not installed")
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        options = {name: x for name, x in arguments.items() if name not in tensors}
        job = {
            "library": library,
            "direction": direction,
            "known": known,
            "device": tensors["q"].device.type,
            "differentiable": differentiable if direction != "forward" else (),
            "options": options,
        }
        call = FirstCall(job, tensors)
        if library == FA4:
            _try(call)
        return call

    return prepare


def _try(call: FirstCall) -> None:
    try:
        call()
    except RuntimeError as error:  # no such kernel, no such GPU
        raise Absent(str(error)) from error

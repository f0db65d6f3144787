"""Cases of rope and glu for any device. Peers: the formulas of models in PyTorch, compiled and not, and Liger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.benchmark.case import BenchCase, Contender, Direction
from headwise.benchmark.correctness import WholeCheck, oracle
from headwise.benchmark.suites.training import PLAIN, TORCH, Setting
from headwise.testing import Arguments, Maker, Outputs

COMPILED, LIGER = "torch.compile", "Liger"
NAMES = ("q", "k")


def glu_case(
    rows: int, width: int, direction: Direction, setting: Setting = PLAIN, *, fast_peers: bool = False
) -> BenchCase:
    """SwiGLU of two tensors. fast_peers: torch.compile and Liger beside PyTorch."""
    differentiable = ("gate", "up")
    operands = {"forward": 3, "backward": 5, "forward+backward": 8}[direction]
    peers = [Contender(TORCH, _eager_glu)]
    if fast_peers:
        peers += [Contender(COMPILED, _compiled_glu), Contender(LIGER, _liger_glu)]
    return BenchCase(
        name=f"glu {rows} × {width}",
        direction=direction,
        make=lambda maker: {name: maker.normal(rows, width) for name in differentiable},
        ours=lambda a: lambda: hw.glu(**a),
        check=WholeCheck(oracle("glu"), differentiable),
        differentiable=differentiable,
        peers=tuple(peers),
        bytes=float(setting.dtype.itemsize * operands * rows * width),
        **setting.fields(),
    )


def _silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _eager_glu(arguments: Arguments) -> Callable[[], Tensor]:
    return lambda: _silu_and_multiply(**arguments)


def _compiled_glu(arguments: Arguments) -> Callable[[], Tensor]:
    compiled = _compiled(_silu_and_multiply)
    return lambda: compiled(**arguments)


def _liger_glu(arguments: Arguments) -> Callable[[], Tensor]:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found,unused-ignore]

    # Its backward writes into what it saved: copies, so that the others find their inputs as they were.
    gate, up = arguments["gate"].clone(), arguments["up"].clone()
    return lambda: LigerSiLUMulFunction.apply(gate, up)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch._functorch import config as functorch_config

    torch.compiler.reset()  # otherwise later cases reach the limit on recompilations
    functorch_config.donated_buffer = False  # the timed backward runs many times on what one forward saved
    return torch.compile(function, dynamic=False)


@dataclass(frozen=True)
class RopeShape:
    batch: int
    heads: int
    key_heads: int
    length: int
    head_dim: int

    @property
    def elements(self) -> int:
        """Of q and k."""
        return self.batch * (self.heads + self.key_heads) * self.length * self.head_dim


def rope_case(
    shape: RopeShape, direction: Direction, setting: Setting = PLAIN, *, fast_peers: bool = False
) -> BenchCase:
    """q and k of a layer in one call, as views of ``(B, S, H, D)``.

    Two results do not go through the one gradient of a case, so the backward is the explicit one: what it is given are
    gradients. Liger rotates q and k in place, and is no peer for a call that leaves them alone.
    """
    b, s, d = shape.batch, shape.length, shape.head_dim
    inverse = direction == "backward"

    def make(maker: Maker) -> Arguments:
        angles = torch.outer(torch.arange(s).double(), 10000.0 ** -(torch.arange(d // 2).double() / (d // 2)))
        cos, sin = (t.to(maker.device, torch.float32) for t in (angles.cos(), angles.sin()))
        q, k = (maker.normal(b, s, h, d).transpose(1, 2) for h in (shape.heads, shape.key_heads))
        return {"q": q, "k": k, "cos": cos, "sin": sin}

    def ours(a: Arguments) -> Callable[[], tuple[Tensor, ...]]:
        run = hw.rope_backward if inverse else hw.rope
        return lambda: run((a["q"], a["k"]), a["cos"], a["sin"])

    ways = {TORCH: _rotate_halves} | ({COMPILED: None} if fast_peers else {})
    return BenchCase(
        name=f"rope {shape.heads} + {shape.key_heads} heads B {b} S {s} D {d}",
        direction=direction,
        make=make,
        ours=ours,
        explicit=inverse,
        outputs=NAMES,
        check=RopeCheck(inverse),
        differentiable=NAMES,
        peers=tuple(_rope_peer(name, formula, inverse) for name, formula in ways.items()),
        bytes=float(setting.dtype.itemsize * 2 * shape.elements),
        **setting.fields(),
    )


def _rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As the models of Hugging Face write it; cos and sin ``(S, D)``, every angle twice."""

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    return rotated(q), rotated(k)


def _rope_peer(name: str, formula: Callable[..., Any] | None, inverse: bool) -> Contender:
    def prepare(arguments: Arguments) -> Callable[[], tuple[Tensor, ...]]:
        run = formula or _compiled(_rotate_halves)
        q, k = arguments["q"], arguments["k"]
        cos, sin = (torch.cat([t, t], -1).to(q.dtype) for t in (arguments["cos"], arguments["sin"]))
        if not inverse:
            return lambda: run(q, k, cos, sin)
        with torch.enable_grad():
            leaves = q.detach().requires_grad_(), k.detach().requires_grad_()
            results = run(*leaves, cos, sin)
        return lambda: torch.autograd.grad(results, leaves, (q, k), retain_graph=True)

    return Contender(name, prepare, explicit=inverse)


@dataclass(frozen=True)
class RopeCheck:
    """q and k of every eighth token: the whole in float64 would take gigabytes."""

    inverse: bool
    every: int = 8

    def compute(self, arguments: Arguments, grad_out: Tensor | None) -> Outputs:
        cos, sin = (arguments[name][:: self.every] for name in ("cos", "sin"))
        sin = -sin if self.inverse else sin
        found = oracle("rope")({"x": [arguments[name][:, :, :: self.every] for name in NAMES], "cos": cos, "sin": sin})
        return {self._name(name): found[name] for name in NAMES}

    def pick(self, results: Outputs) -> Outputs:
        return {name: x[:, :, :: self.every] for name, x in results.items()}

    def _name(self, name: str) -> str:
        return f"grad of {name}" if self.inverse else name

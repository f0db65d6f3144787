"""How close is close enough, decided by data: the error budget, and fresh random inputs.

No tolerance is picked by hand. For a case and a dtype three results are computed on the same inputs:

* the **truth**: the oracle (`headwise.reference`) in float64,
* the **plain** result: the same formulas in plain PyTorch, in the dtype under test,
* **ours**.

Our error may be at most twice the plain error plus the rounding band of the output's dtype. Errors are relative,
measured twice: the L2 norm over the tensor, and the largest element. Infinities and NaN must sit exactly where the truth
has them.

>>> from headwise import cases, testing
>>> suite = cases.SUITES["softmax"]
>>> for result in testing.measure(suite, suite.cases[0], dtype=torch.bfloat16):
...     print(result, result.ok)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = dict[str, Any]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One row of an op's case table: a name and the parameters its suite makes inputs from."""

    name: str
    params: Mapping[str, Any]
    # "quick": small enough for interpreters and software GPUs. "dtype_free": one dtype is enough.
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Suite:
    """What the tests, `headwise check` and the benchmarks know of an op."""

    op: str
    cases: tuple[Case, ...]
    make: Callable[..., Arguments]  # make(maker, **case.params): arguments of the op by name
    run: Callable[..., Outputs]  # run(arguments, backend): the public op, outputs by name
    reference: Callable[[Arguments], Outputs]  # the oracle on the same arguments
    differentiable: tuple[str, ...] = ()  # arguments that get gradients, where they are present
    # explicit(arguments, outputs, output_grads, backend): the public *_backward, gradients by argument name; the
    # gradient of an output may be None
    explicit: Callable[..., Outputs] | None = None
    side_outputs: tuple[str, ...] = ()  # outputs that are often not used, such as an lse
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)

    def case(self, name: str) -> Case:
        return next(c for c in self.cases if c.name == name)


@dataclass
class Maker:
    """Makes inputs: one dtype, one device, one stream of random numbers that depends on the seed alone."""

    dtype: torch.dtype
    device: torch.device
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        # Drawn on the CPU, so that every device gets the same numbers.
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float32) * scale
        return x.to(self.device, dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def coin(self, *shape: int, chance: float = 0.5) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < chance).to(self.device)

    def tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class TensorError:
    """How one tensor of one case compares: relative errors and what they may be."""

    name: str
    error_l2: float
    budget_l2: float
    error_max: float
    budget_max: float
    problem: str = ""  # a mismatch that no budget forgives: shape, dtype, a NaN out of place

    @property
    def ok(self) -> bool:
        return not self.problem and self.error_l2 <= self.budget_l2 and self.error_max <= self.budget_max

    @property
    def usage(self) -> float:
        """The share of its budget that the worse of the two errors takes; above 1 is a violation."""
        if self.problem:
            return float("inf")
        return max(_share(self.error_l2, self.budget_l2), _share(self.error_max, self.budget_max))

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: {self.problem}"
        return (
            f"{self.name}: L2 error {self.error_l2:.3g} (budget {self.budget_l2:.3g}), "
            f"max error {self.error_max:.3g} (budget {self.budget_max:.3g})"
        )


def measure(
    suite: Suite,
    case: Case,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    backend: str | None = None,
    compiled: bool = False,
    explicit: bool = False,
    without_gradient: tuple[str, ...] = (),
    seed: int = 0,
) -> list[TensorError]:
    """Run one case, forward and backward, and compare every output and gradient with its budget.

    compiled: run ours through ``torch.compile(fullgraph=True, dynamic=True)``.
    explicit: take ours from the explicit ``*_backward`` instead of autograd.
    without_gradient: outputs that no gradient arrives at (backends may take a shorter way then).
    """
    maker = maker_of(suite, case, dtype, device, seed)
    arguments = suite.make(maker, **case.params)

    def ours(values: Arguments) -> Outputs:
        return suite.run(values, backend)

    run = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else ours
    output_grads: dict[str, Tensor | None] = dict.fromkeys(without_gradient)
    results = _with_gradients(run, arguments, suite.differentiable, maker, output_grads)
    if explicit:
        assert suite.explicit is not None
        with torch.no_grad():
            outputs = suite.run(arguments, backend)
            grads = suite.explicit(arguments, outputs, output_grads, backend)
        results = {**outputs, **{f"grad of {n}": g for n, g in grads.items()}}
    dtypes = {name: result.dtype for name, result in results.items()}
    truth, plain = expected(suite, arguments, maker, output_grads, dtypes)
    return compare_all(results, truth, plain)


def maker_of(suite: Suite, case: Case, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0) -> Maker:
    """What makes the inputs of a case: its numbers depend on its name and the seed alone."""
    return Maker(dtype, torch.device(device), seed + zlib.crc32(f"{suite.op}/{case.name}".encode()))


def expected(
    suite: Suite,
    arguments: Arguments,
    maker: Maker,
    output_grads: dict[str, Tensor | None],
    dtypes: Mapping[str, torch.dtype],
) -> tuple[Outputs, Outputs]:
    """The truth and the plain result: outputs, and gradients for ``output_grads``. dtypes: of the results under test."""
    truth = _with_gradients(
        suite.reference, upcast(arguments, torch.float64), suite.differentiable, maker, output_grads
    )
    plain = _with_gradients(suite.reference, arguments, suite.differentiable, maker, output_grads)
    if torch.float32 in dtypes.values() and maker.dtype in (torch.float16, torch.bfloat16):
        # An output that is float32 although the inputs are not (an LSE, a loss) is held to the float32 budget.
        single = suite.reference(upcast(arguments, torch.float32))
        plain.update({n: single[n].detach() for n in single if dtypes[n] == torch.float32})
    return truth, plain


def compare_all(results: Outputs, truth: Outputs, plain: Outputs) -> list[TensorError]:
    noise = noise_scales(truth)
    return [compare(n, r, truth[n], plain[n], noise_scale=noise[n]) for n, r in results.items()]


def noise_scales(truth: Outputs) -> dict[str, float]:
    """For every output and gradient of a case, the noise scale of its budget."""
    gradients = [t for n, t in truth.items() if n.startswith("grad of ")]
    largest = max((_peak(g) for g in gradients), default=0.0)
    return {n: largest if n.startswith("grad of ") else 0.0 for n in truth}


class Budget(NamedTuple):
    """What the two errors of a tensor may be, relative to ``norm`` and ``peak``, the sizes of the truth's elements."""

    l2: float
    max: float
    norm: float
    peak: float


def budget(truth: Tensor, plain: Tensor, dtype: torch.dtype, noise_scale: float = 0.0) -> Budget:
    """Of a tensor of ``dtype``; `compare` says what the noise scale is."""
    t, p = truth.detach().to(torch.float64), plain.detach().to(truth.device, torch.float64)
    finite = t.isfinite()
    t, p = t[finite], p[finite]
    if t.numel() == 0:
        return Budget(rounding_band(dtype), rounding_band(dtype), 1.0, 1.0)
    p = torch.where(p.isfinite(), p, t)
    tiny, eps = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).eps
    norm, peak = max(_rms(t), tiny), max(_peak(t), tiny)
    band, noise = rounding_band(dtype), noise_scale * eps
    return Budget(
        2 * _rms(p - t) / norm + band + 4 * noise / norm,
        2 * (p - t).abs().max().item() / peak + band + 16 * noise / peak,
        norm,
        peak,
    )


def compare(name: str, ours: Tensor, truth: Tensor, plain: Tensor, noise_scale: float = 0.0) -> TensorError:
    """Hold one tensor against its budget.

    noise_scale: the size of the terms that gradients are differences of. Where they cancel (a query with one key has no
    gradient at all), what remains is float32 noise of that size.
    """
    if tuple(ours.shape) != tuple(truth.shape):
        return _problem(name, f"shape {tuple(ours.shape)}, expected {tuple(truth.shape)}")
    o, t = (x.detach().to(truth.device, torch.float64) for x in (ours, truth))
    special = ~t.isfinite()
    if not torch.equal(o.isnan(), t.isnan()) or not torch.equal(o[t.isinf()], t[t.isinf()]):
        return _problem(name, f"{int((o.isnan() != t.isnan()).sum())} NaN and infinities out of place")
    if not o[~special].isfinite().all():
        return _problem(name, "infinite where the truth is finite")
    allowed = budget(truth, plain, ours.dtype, noise_scale)
    error = (o - t)[~special]
    if error.numel() == 0:
        return TensorError(name, 0.0, allowed.l2, 0.0, allowed.max)
    return TensorError(
        name,
        error_l2=_rms(error) / allowed.norm,
        budget_l2=allowed.l2,
        error_max=error.abs().max().item() / allowed.peak,
        budget_max=allowed.max,
    )


def rounding_band(dtype: torch.dtype) -> float:
    """What rounding alone may cost, relative to the value.

    A 16-bit result is rounded once, from float32. A float32 result went through a chain of float32 operations in an
    order of its own: sixteen roundings, eight units in the last place (a TF32 product would be off by a thousand).
    """
    roundings = 1 if dtype in (torch.float16, torch.bfloat16) else 16
    return roundings * torch.finfo(dtype).eps / 2


def upcast(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """The same arguments with every float tensor in ``dtype``."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().to(dtype)
        if isinstance(value, (list, tuple)):
            return type(value)(convert(v) for v in value)
        return value

    return {name: convert(value) for name, value in arguments.items()}


def _with_gradients(
    run: Callable[[Arguments], Outputs],
    arguments: Arguments,
    differentiable: tuple[str, ...],
    maker: Maker,
    output_grads: dict[str, Tensor | None],
) -> Outputs:
    """Outputs and gradients of one implementation. The first one called draws the gradients of the outputs."""
    leaves: dict[str, Any] = {}
    values = dict(arguments)
    for name in differentiable:
        value = values.get(name)
        if isinstance(value, Tensor):
            values[name] = leaves[name] = value.detach().requires_grad_()
        elif isinstance(value, (list, tuple)):
            values[name] = [v.detach().requires_grad_() for v in value]
            leaves.update({f"{name}[{i}]": v for i, v in enumerate(values[name])})
    outputs = run(values)
    for name, out in outputs.items():
        if name not in output_grads:
            output_grads[name] = maker.normal(*out.shape, dtype=out.dtype)
    results = {name: out.detach() for name, out in outputs.items()}
    targets = []
    for name, out in outputs.items():
        grad_of_out = output_grads[name]
        if out.requires_grad and grad_of_out is not None:
            targets.append((out, grad_of_out.to(out.dtype)))
    if leaves:
        # Where nothing depends on the inputs (no keys, no rows), their gradients are zero.
        grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if targets:
            grads = torch.autograd.grad(
                [out for out, _ in targets], list(leaves.values()), [g for _, g in targets], allow_unused=True
            )
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            results[f"grad of {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return results


def _rms(x: Tensor) -> float:
    x = x.double()
    x = x[x.isfinite()]
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def _peak(x: Tensor) -> float:
    x = x[x.isfinite()]
    return x.abs().max().item() if x.numel() else 0.0


def _share(error: float, budget: float) -> float:
    return error / budget if budget > 0 else (0.0 if error == 0 else float("inf"))


def _problem(name: str, text: str) -> TensorError:
    return TensorError(name, 0.0, 0.0, 0.0, 0.0, problem=text)

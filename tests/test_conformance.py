"""Every op × every case × every backend of this machine × (eager, compiled), against the data-derived budget.

A new backend or a new case needs no line here: both are tables.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE, verdict

from headwise import testing
from headwise.backends.registry import ARCHITECTURES, BACKENDS, Call, Unsupported
from headwise.cases import SUITES
from headwise.config import settings

CASES = [(suite, case) for suite in SUITES.values() for case in suite.cases]
# shorter: no gradient arrives at the side outputs. threads: three of them, where `make test` gives a worker one.
MODES = ("eager", "shorter", "compiled", "explicit", "threads")


# WebGPU on software with less than it offers: what changes is what the kernels compute, and in how many pieces.
LIMITED = settings.webgpu_tier is not None or settings.webgpu_binding_bytes is not None


def _runs(backend, suite, case, dtype, mode):
    """Whether this combination is worth its time. Every backend runs every case, in an interpreter the quick ones."""
    quick = "quick" in case.tags
    if mode == "explicit" and suite.explicit is None:
        return False
    if mode == "shorter" and not suite.side_outputs:
        return False
    if mode == "threads" and (backend != "cpu" or dtype != torch.float32):
        return False
    if mode != "eager" and dtype == torch.float16:
        return False  # float16 and bfloat16 differ in kernels, not in how PyTorch sees the op
    if mode == "compiled" and backend == "cpu" and dtype != torch.float32 and case not in _few(suite):
        return False  # what compiling may get wrong hardly depends on the dtype
    if backend == "triton" and settings.triton_interpret:
        # A thousand times slower than a GPU: what the kernels compute, no more.
        return quick and mode in ("eager", "explicit") and dtype != torch.float16
    if backend == "webgpu":
        if LIMITED:
            return quick and mode == "eager" and dtype == torch.float32
        # Modes differ in how PyTorch sees the op, dtypes in what the kernels compute.
        return (mode == "eager" and (quick or dtype != torch.float16)) or (quick and dtype == torch.float32)
    return True


def _quick(suite):
    return [case for case in suite.cases if "quick" in case.tags]


def _few(suite):
    """Three quick cases: the first, the last, and one between."""
    quick = _quick(suite)
    return [quick[0], quick[len(quick) // 2], quick[-1]]


def _is_slow(backend, suite, case, dtype, mode):
    """What `make test` leaves to `make test-all`: more of what the others find faults with."""
    if backend == "triton":
        # The interpreter needs three times as long for the products of float32.
        usual = torch.bfloat16 if suite.op.startswith("attention") else torch.float32
        return mode != "eager" or dtype != usual
    if case not in _quick(suite):
        return mode != "eager" or dtype == torch.float16 or (backend == "webgpu" and dtype != torch.float32)
    turn = _quick(suite).index(case)
    if backend == "webgpu":
        # A GPU in software compiles for seconds. Every case is there in float32, and in one of the types of 16 bits; every
        # third in the modes that launch nearly the same kernels.
        left_out = (torch.bfloat16, torch.float16)[turn % 2]
        return mode == "compiled" or dtype == left_out or (mode != "eager" and turn % 3 != 0)
    # Compiling takes a second, too: every third case.
    return mode == "compiled" and (dtype != torch.float32 or turn % 3 != 0)


def _parameters():
    for backend in RUNNABLE:
        for suite, case in CASES:
            if verdict(suite.op, backend) is not None:
                continue
            for dtype in suite.dtypes:
                for mode in MODES:
                    if not _runs(backend, suite, case, dtype, mode):
                        continue
                    name = str(dtype).removeprefix("torch.")
                    marks = pytest.mark.slow if _is_slow(backend, suite, case, dtype, mode) and not LIMITED else ()
                    name = f"{backend}-{suite.op}-{case.name}-{name}-{mode}"
                    yield pytest.param(backend, suite, case, dtype, mode, id=name, marks=marks)


# Calls whose gradients a backend refuses because of the head dim. Of every other call the gradients are compared.
FORWARD_ONLY = {
    (backend, "attention_decode", name)
    for backend in ("triton", "webgpu")
    for name in ("head dim 512", "latent", "latent, paged", "head dims 576 and 512 apart")
}


def _measure(backend, suite, case, **how):
    how |= {"device": DEVICE[backend], "backend": backend}
    try:
        return testing.measure(suite, case, **how)
    except Unsupported as refused:
        widest = max(case.params.get("d", 0), case.params.get("dv", 0))
        about_heads = re.search(rf"gradients of .*head.* {widest}\b", str(refused))
        if (backend, suite.op, case.name) not in FORWARD_ONLY or not about_heads:
            raise
        return testing.measure(replace(suite, differentiable=()), case, **how)


def _failures(results):
    assert results
    return [str(r) for r in results if not r.ok]


@pytest.mark.parametrize(("backend", "suite", "case", "dtype", "mode"), list(_parameters()))
def test_case_is_within_budget(backend, suite, case, dtype, mode):
    torch._dynamo.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(3 if mode == "threads" else before)
    try:
        results = _measure(
            backend,
            suite,
            case,
            dtype=dtype,
            compiled=mode == "compiled",
            explicit=mode == "explicit",
            without_gradient=suite.side_outputs if mode in ("shorter", "threads") else (),
        )
    finally:
        torch.set_num_threads(before)
    failures = _failures(results)
    assert not failures, "\n".join(failures)


def _seeded():
    """Three quick cases of every op on the CPU; the others, and the other backends, in `make test-all`.

    An interpreter takes three as well.
    """
    for backend in RUNNABLE:
        for suite in SUITES.values():
            few = _few(suite)
            for case in few if backend == "triton" and settings.triton_interpret else _quick(suite):
                for dtype in (torch.float32, torch.bfloat16) if backend == "cpu" else (torch.float32,):
                    marks = () if backend == "cpu" and case in few else pytest.mark.slow
                    name = f"{backend}-{suite.op}-{case.name}-{str(dtype).removeprefix('torch.')}"
                    yield pytest.param(backend, suite, case, dtype, id=name, marks=marks)


@pytest.mark.skipif(LIMITED, reason="what is limited changes no budget")
@pytest.mark.parametrize(("backend", "suite", "case", "dtype"), list(_seeded()))
def test_no_budget_is_met_by_luck(backend, suite, case, dtype):
    """Inputs of five seeds; one of them may be unlucky."""
    failures = [_failures(_measure(backend, suite, case, dtype=dtype, seed=seed)) for seed in range(5)]
    assert sum(map(bool, failures)) <= 1, "\n".join(line for lines in failures for line in lines)


def _refused(message):
    def measure(suite, case, **how):
        if suite.differentiable:
            raise Unsupported(message)
        return ["forward"]

    return measure


def test_a_refusal_of_gradients_does_not_drop_their_comparison(monkeypatch):
    decode = SUITES["attention_decode"]
    wide, other = decode.case("head dim 512"), decode.cases[0]
    monkeypatch.setattr(testing, "measure", _refused("its kernels compute gradients of heads of at most 256, and 512"))
    for backend, case, suite in (
        ("cpu", wide, decode),
        ("webgpu", other, decode),
        ("webgpu", SUITES["softmax"].cases[0], SUITES["softmax"]),
    ):
        with pytest.raises(Unsupported):
            _measure(backend, suite, case, dtype=torch.float32)
    assert _measure("webgpu", decode, wide, dtype=torch.float32) == ["forward"]
    monkeypatch.setattr(testing, "measure", _refused("gradients are not there today"))
    with pytest.raises(Unsupported):
        _measure("webgpu", decode, wide, dtype=torch.float32)


def test_every_pinned_refusal_is_one():
    """What no longer is refused, or no longer exists, does not stay in the list."""
    for backend, op, name in FORWARD_ONLY:
        case = SUITES[op].case(name)
        assert max(case.params.get("d", 0), case.params.get("dv", 0)) > 256
        rules = next(row.rules for row in BACKENDS if row.name == backend)
        sizes = {"D": case.params["d"], "Dv": case.params.get("dv", case.params["d"])}
        call = Call(op, ("attention_decode", "attention_backward"), "cuda", torch.float32, sizes)
        said = [rules.supports(call._replace(arch=arch)) for arch in ARCHITECTURES]
        assert any("gradients" in (reason or "") for reason in said)

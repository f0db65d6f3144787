"""Every op × every case × every backend of this machine × (eager, compiled), against the data-derived budget.

A new backend or a new case needs no line here: both are tables.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE, verdict

from headwise import testing
from headwise.backends.registry import Unsupported
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
    if backend == "triton" and settings.triton_interpret:
        # A thousand times slower than a GPU: what the kernels compute, no more.
        return quick and mode in ("eager", "explicit") and dtype != torch.float16
    if backend == "webgpu":
        if LIMITED:
            return quick and mode == "eager" and dtype == torch.float32
        # Modes differ in how PyTorch sees the op, dtypes in what the kernels compute.
        return (mode == "eager" and (quick or dtype != torch.float16)) or (quick and dtype == torch.float32)
    return True


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
                    yield pytest.param(
                        backend, suite, case, dtype, mode, id=f"{backend}-{suite.op}-{case.name}-{name}-{mode}"
                    )


def _measure(suite, case, **how):
    try:
        return testing.measure(suite, case, **how)
    except Unsupported as refused:
        # A backend may have no gradients for a call, and say so; forward it has to run then.
        if "gradients" not in str(refused):
            raise
        return testing.measure(replace(suite, differentiable=()), case, **how)


@pytest.mark.parametrize(("backend", "suite", "case", "dtype", "mode"), list(_parameters()))
def test_case_is_within_budget(backend, suite, case, dtype, mode):
    torch._dynamo.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(3 if mode == "threads" else before)
    try:
        results = _measure(
            suite,
            case,
            dtype=dtype,
            device=DEVICE[backend],
            backend=backend,
            compiled=mode == "compiled",
            explicit=mode == "explicit",
            without_gradient=suite.side_outputs if mode in ("shorter", "threads") else (),
        )
    finally:
        torch.set_num_threads(before)
    assert results
    failures = [str(r) for r in results if not r.ok]
    assert not failures, "\n".join(failures)

"""Every op × every case × every backend of this machine × (eager, compiled), against the data-derived budget.

A new backend or a new case needs no line here: both are tables.
"""

from __future__ import annotations

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE, verdict

from headwise import testing
from headwise.cases import SUITES
from headwise.config import settings

CASES = [(suite, case) for suite in SUITES.values() for case in suite.cases]
# shorter: no gradient arrives at the side outputs. threads: three of them, where `make test` gives a worker one.
MODES = ("eager", "shorter", "compiled", "explicit", "threads")


def _parameters():
    for backend in RUNNABLE:
        interpreted = backend == "triton" and settings.triton_interpret
        for suite, case in CASES:
            if verdict(suite.op, backend) is not None or (interpreted and "quick" not in case.tags):
                continue
            for dtype in suite.dtypes:
                for mode in MODES:
                    if interpreted and (mode not in ("eager", "explicit") or dtype == torch.float16):
                        continue  # a thousand times slower than a GPU: what the kernels compute, no more
                    if mode == "explicit" and suite.explicit is None:
                        continue
                    if mode == "shorter" and not suite.side_outputs:
                        continue
                    if mode == "threads" and (backend != "cpu" or dtype != torch.float32):
                        continue
                    if mode != "eager" and dtype == torch.float16:
                        continue  # float16 and bfloat16 differ in kernels, not in how PyTorch sees the op
                    name = str(dtype).removeprefix("torch.")
                    yield pytest.param(
                        backend, suite, case, dtype, mode, id=f"{backend}-{suite.op}-{case.name}-{name}-{mode}"
                    )


@pytest.mark.parametrize(("backend", "suite", "case", "dtype", "mode"), list(_parameters()))
def test_case_is_within_budget(backend, suite, case, dtype, mode):
    torch._dynamo.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(3 if mode == "threads" else before)
    try:
        results = testing.measure(
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

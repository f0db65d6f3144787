"""Every op × every case × every backend of this machine × (eager, compiled), against the data-derived budget.

A new backend or a new case needs no line here: both are tables.
"""

from __future__ import annotations

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE

from headwise import testing
from headwise.cases import SUITES

CASES = [(suite, case) for suite in SUITES.values() for case in suite.cases]
MODES = ("eager", "compiled", "explicit")


def _parameters():
    for backend in RUNNABLE:
        for suite, case in CASES:
            for dtype in suite.dtypes:
                for mode in MODES:
                    if mode == "explicit" and suite.explicit is None:
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
    results = testing.measure(
        suite,
        case,
        dtype=dtype,
        device=DEVICE[backend],
        backend=backend,
        compiled=mode == "compiled",
        explicit=mode == "explicit",
    )
    assert results
    failures = [str(r) for r in results if not r.ok]
    assert not failures, "\n".join(failures)

"""The case tables, one module per op, shared by the tests, `headwise check` and the benchmarks."""

from __future__ import annotations

import importlib
import pkgutil

from headwise.testing import Suite

SUITES: dict[str, Suite] = {}  # by op; every module here that has a SUITE

for _found in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_found.name}")
    if hasattr(_module, "SUITE"):
        SUITES[_module.SUITE.op] = _module.SUITE

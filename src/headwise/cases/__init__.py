"""The case tables, one module per op, shared by the tests, `headwise check` and the benchmarks."""

from __future__ import annotations

from headwise.cases import softmax
from headwise.testing import Suite

SUITES: dict[str, Suite] = {suite.op: suite for suite in (softmax.SUITE,)}

"""The named suites. A new one is a module here with a `SUITE`, and a row in the table."""

from __future__ import annotations

import importlib

from headwise.benchmark.case import BenchSuite

# Imported on demand: a suite may need packages that are not installed here.
SUITES: dict[str, str] = {
    "cpu": "headwise.benchmark.suites.cpu",
    "cuda": "headwise.benchmark.suites.cuda",
    "hopper": "headwise.benchmark.suites.hopper",
    "models": "headwise.benchmark.suites.models",
    "webgpu": "headwise.benchmark.suites.webgpu",
}


def load(name: str) -> BenchSuite:
    if name not in SUITES:
        raise ValueError(f"suite {name!r} is not known; there are: {', '.join(SUITES)}")
    suite: BenchSuite = importlib.import_module(SUITES[name]).SUITE
    return suite

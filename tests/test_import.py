"""``import headwise`` imports torch and nothing heavier. Each test asks a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

# Top-level packages, and parts of torch that `import torch` itself leaves alone (they take seconds).
HEAVY = (
    "triton",
    "wgpu",
    "jinja2",
    "rich",
    "matplotlib",
    "numpy",
    "sympy",
    "transformers",
    "onnx",
    "hypothesis",
    "pytest",
)
HEAVY_PARTS = ("torch._dynamo", "torch._inductor", "headwise.reference", "headwise.cases", "headwise.cli")

SECONDS = 0.3

PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
started = time.perf_counter()
import headwise
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before)}))
"""


def probe() -> dict:
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert result.stderr == ""  # no warning on import either
    return json.loads(result.stdout)


def test_import_brings_nothing_heavy_along():
    new = set(probe()["new"])
    heavy = [name for name in new if name.split(".")[0] in HEAVY or name in HEAVY_PARTS]
    assert heavy == []


def test_import_is_quick():
    # The best of a few: another process may hold the cores for a moment.
    seconds = []
    for _ in range(4):
        seconds.append(probe()["seconds"])
        if seconds[-1] < SECONDS:
            return
    raise AssertionError(f"import headwise took {min(seconds):.2f} s beyond torch; {SECONDS} s is the limit")

"""Run PyTorch's operator tests on WebGPU and write down what passes: docs/webgpu-operators.md.

    python scripts/write_operators.py

Of float32, float16 and bfloat16; on software Vulkan it takes some minutes. A slow test holds the page's
float32 against a run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import webgpu_operators as tests  # noqa: E402

from headwise.backends.webgpu import runtime  # noqa: E402

PAGE = ROOT / "docs" / "webgpu-operators.md"


def main() -> None:
    tables = {dtype: [tests.row(op, dtype=dtype) for op in tests.operators(dtype)] for dtype in tests.COMPUTED}
    PAGE.write_text(tests.page(tables, runtime.device().capabilities.name, torch.__version__), encoding="utf-8")
    for dtype, rows in tables.items():
        for row in rows:
            if row.wrong:
                print(dtype, row.name, row.wrong[0])


if __name__ == "__main__":
    main()

"""Without a GPU the whole folder is one line of the report. (With `--noconftest`, `gpu_machine` skips test by test.)"""

from __future__ import annotations

import pytest
import torch


def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and PyTorch sees none")

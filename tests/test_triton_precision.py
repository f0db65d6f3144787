"""float32 is multiplied as float32 unless the user turned TF32 on, by whichever switch of PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

SWITCHES = {
    "torch.backends.cuda.matmul.allow_tf32 = True": "tf32",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "tf32",
    "torch.set_float32_matmul_precision('high')": "tf32",
    "torch.backends.cuda.matmul.allow_tf32 = False": "tf32x3",
    "pass": "tf32x3",
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_tf32_only_when_asked_for(switch):
    # In a process of its own: PyTorch does not let the old and the new switch be used in one.
    code = f"""
import torch
import headwise as hw
from headwise.backends.triton.gpu import KNOWN
from headwise.backends.triton.products import dot_precision
from headwise.backends.triton.recording import Recording
{switch}
gpu = Recording(KNOWN["sm_90"], torch.backends.cuda.matmul.fp32_precision == "tf32")
hw.softmax(torch.randn(2, 3))  # the cache key asks too
print(dot_precision(gpu, torch.float32), dot_precision(gpu, torch.bfloat16))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [SWITCHES[switch], "ieee"]

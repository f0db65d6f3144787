"""Values on the device that make no sense: see `hostile_calls`. After each, the GPU still works."""

from __future__ import annotations

import hostile_calls
import pytest
import torch
from gpu_machine import DEVICE, gpu

__all__ = ["gpu"]

CALLS = dict(hostile_calls.calls(DEVICE))


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_value_is_nan_and_harms_nobody_else(name):
    CALLS[name]()
    torch.cuda.synchronize()
    assert torch.ones(3, device=DEVICE).sum() == 3

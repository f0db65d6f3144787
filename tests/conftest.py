from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Every torch.empty comes back full of NaN, so that an output nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)

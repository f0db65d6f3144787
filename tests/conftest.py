from __future__ import annotations

import hypothesis
import pytest
import torch

# The same random calls on every run and every machine; `--hypothesis-profile=deep` draws new ones, and many more.
hypothesis.settings.register_profile(
    "quick",
    max_examples=150,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.register_profile(
    "deep", hypothesis.settings.get_profile("quick"), max_examples=3000, derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("quick")


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        # Several processes with as many threads each as there are cores wait for each other most of the time.
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Every torch.empty comes back full of NaN, so that an output nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)

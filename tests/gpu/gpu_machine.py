"""What the tests of this folder share. They stand alone: no conftest, no hypothesis, no settings of the repository.

    PYTHONPATH=src python3 -m pytest tests/gpu -p no:cacheprovider --noconftest -c /dev/null --rootdir tests/gpu

Where there is no GPU they are skipped, in one line.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    """Skips without a GPU. After a test, everything it left is given back: some need most of the memory there is."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and PyTorch sees none")
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=dtype, device=DEVICE)
    return x if scale == 1.0 else x.mul_(scale)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def bits(x: Tensor) -> Tensor:
    """As integers, which tell -0 from 0 and are equal to themselves where the number is NaN."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def differing(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
    """How many elements differ in a bit, counted on the device, so that nobody waits."""
    return torch.stack([(bits(x) != bits(y)).sum() for x, y in zip(a, b, strict=True)]).sum()


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(a, b, strict=True)) and not differing(a, b)


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30)).item()


def assert_close(ours: Tensor, truth: Tensor, allowed: float = 1e-2) -> None:
    """Relative L2 distance; 1e-2 is what bfloat16 may cost, a wrong row costs far more."""
    assert ours.shape == truth.shape
    error = relative_error(ours, truth)
    assert error <= allowed, f"relative error {error:.3g}"

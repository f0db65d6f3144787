"""The CPU engines cut attention into blocks of hundreds; with blocks of a few, small cases cross every seam."""

from __future__ import annotations

import pytest
import torch

from headwise import testing
from headwise.backends.cpu import attention_flash, attention_tiled, decode
from headwise.cases import SUITES

CASES = [
    (SUITES[op], case)
    for op in ("attention", "attention_varlen", "attention_decode")
    for case in SUITES[op].cases
    if "quick" in case.tags
]


@pytest.mark.parametrize("gradient_of_lse", [True, False], ids=["tiles", "flash"])
@pytest.mark.parametrize(("suite", "case"), CASES, ids=[f"{s.op}-{c.name}" for s, c in CASES])
def test_seams_between_blocks(suite, case, gradient_of_lse, monkeypatch):
    monkeypatch.setattr(attention_tiled, "_TILE_ROWS", 16)
    monkeypatch.setattr(attention_tiled, "_TILE_KEYS", 24)
    monkeypatch.setattr(attention_tiled, "_SCORES_PER_THREAD", 1)
    monkeypatch.setattr(attention_flash, "_MASKED_ROWS", 13)
    monkeypatch.setattr(attention_flash, "_MASK_ELEMENTS", 400)
    monkeypatch.setattr(attention_flash, "_SMALLEST_FULL", 5)
    monkeypatch.setattr(decode, "_KEYS_AT_ONCE", 7)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        results = testing.measure(
            suite, case, dtype=torch.float32, backend="cpu", without_gradient=() if gradient_of_lse else ("lse",)
        )
    finally:
        torch.set_num_threads(before)
    failures = [str(r) for r in results if not r.ok]
    assert not failures, "\n".join(failures)

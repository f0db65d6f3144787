"""Plain numbers of flash_attn as ours."""

from __future__ import annotations

from collections.abc import Sequence


def window_of(causal: bool, window_size: Sequence[int]) -> tuple[int, int]:
    """(left, right), -1 for no bound: below zero there; causal closes the right side whatever it says."""
    left, right = (int(side) for side in window_size)  # elements of a tensor, too
    return max(left, -1), 0 if causal else max(right, -1)


def softcap_or_none(softcap: float) -> float | None:
    return softcap if softcap > 0 else None

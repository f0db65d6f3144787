"""Checks of values that live on the device (ids, targets): in validate mode alone, because they wait for the device.

On the normal path nothing is read back and a kernel marks a bad value with NaN; see `headwise.config`.
"""

from __future__ import annotations

from torch import Tensor


def in_range(op: str, name: str, values: Tensor, high: int, allowed: int | None = None) -> None:
    """Raise a ValueError that names the first of ``values`` outside [0, high), unless it equals ``allowed``."""
    bad = (values < 0) | (values >= high)
    if allowed is not None:
        bad &= values != allowed
    where = bad.nonzero()
    if where.shape[0] == 0:
        return
    index = tuple(where[0].tolist())
    exception = "" if allowed is None else f" or {allowed}"
    position = f"[{', '.join(map(str, index))}]" if index else ""
    raise ValueError(f"{op}: {name}{position} is {int(values[index])}; it needs to be in [0, {high}){exception}")

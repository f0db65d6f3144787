"""The backends this machine runs, found once: the axis of every parametrised test."""

from __future__ import annotations

from headwise.backends.registry import BACKENDS, availability

RUNNABLE = [b.name for b in BACKENDS if availability(b.name) is None]
DEVICE = {b.name: b.devices[0] for b in BACKENDS}
_LAUNCHERS = {b.name: b.rules.LAUNCHERS for b in BACKENDS}


def verdict(op: str, backend: str) -> str | None:
    """None if the backend has kernels for the op at all, else what it lacks."""
    there = op in _LAUNCHERS[backend] or f"{op}_forward" in _LAUNCHERS[backend]
    return None if there else f"{backend} has no {op} kernel yet"

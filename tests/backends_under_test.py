"""The backends this machine runs, found once: the axis of every parametrised test."""

from __future__ import annotations

from headwise.backends.registry import BACKENDS, availability, module_of
from headwise.ops._op import OPS

RUNNABLE = [b.name for b in BACKENDS if availability(b.name) is None]
DEVICE = {b.name: b.devices[0] for b in BACKENDS}


def verdict(op: str, backend: str) -> str | None:
    """None if the backend has kernels for the op at all, else what it lacks."""
    return None if module_of(backend, OPS[op].launcher) else f"{backend} has no {op} kernel yet"

"""The backends this machine runs, found once: the axis of every parametrised test."""

from __future__ import annotations

from headwise.backends.registry import BACKENDS, availability

RUNNABLE = [b.name for b in BACKENDS if availability(b.name) is None]
DEVICE = {b.name: b.devices[0] for b in BACKENDS}

"""Settings of the process. The only module that reads environment variables.

===========================  ====================================================================================
``HEADWISE_BACKEND``         the backend every call uses unless it names one itself (``cpu``, ``triton``, …)
``HEADWISE_VALIDATE``        ``1``: read ids, targets, lengths and tables back and raise on the first bad value
``HEADWISE_TILES``           a tile table written by ``headwise tune``, used in place of the ones that come with Headwise
``HEADWISE_WEBGPU_ADAPTER``  part of the name of the adapter that WebGPU runs on (``headwise env`` lists them)
``HEADWISE_WEBGPU_DEVICE``   ``1``: register the device ``webgpu`` also where PyTorch has a GPU of its own; ``0``: never
``HEADWISE_WEBGPU_TIER``     ``A``, ``B`` or ``C``: use no more of the adapter than this tier of features
``HEADWISE_WEBGPU_BINDING``  bytes of a tensor that a WebGPU kernel may see at once, below what the adapter allows
``TRITON_INTERPRET``         ``1``: Triton's own: kernels run in its interpreter, on CPU tensors, without a GPU
===========================  ====================================================================================
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_numbers = itertools.count(1)
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass
class Settings:
    backend: str | None = None
    validate: bool = False
    tiles: str | None = None
    triton_interpret: bool = False
    webgpu_adapter: str | None = None
    webgpu_device: bool | None = None
    webgpu_tier: str | None = None
    webgpu_binding_bytes: int | None = None
    # After every change another number, and never one that it was before, whichever threads change settings at once: what
    # was worked out from the settings is kept together with it, and not used after it.
    changes: int | str = field(default=0, init=False, repr=False, compare=False)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        self.changed()

    def changed(self) -> None:
        """What was worked out so far holds no longer: a setting is another, or something that counts like one."""
        object.__setattr__(self, "changes", next(_numbers))

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Within the block, calls share no cache entry with those outside: something they depend on is another there."""
        before = self.changes
        object.__setattr__(self, "changes", name)
        try:
            yield
        finally:
            object.__setattr__(self, "changes", before if self.changes == name else next(_numbers))

    @staticmethod
    def from_environment() -> Settings:
        return Settings(
            backend=os.environ.get("HEADWISE_BACKEND") or None,
            validate=_is_on("HEADWISE_VALIDATE"),
            tiles=os.environ.get("HEADWISE_TILES") or None,
            triton_interpret=os.environ.get("TRITON_INTERPRET", "").lower() in (*_ON, "y"),  # as Triton reads it
            webgpu_adapter=os.environ.get("HEADWISE_WEBGPU_ADAPTER") or None,
            webgpu_device=_is_on("HEADWISE_WEBGPU_DEVICE") if os.environ.get("HEADWISE_WEBGPU_DEVICE") else None,
            webgpu_tier=os.environ.get("HEADWISE_WEBGPU_TIER") or None,
            webgpu_binding_bytes=_bytes("HEADWISE_WEBGPU_BINDING", least=4096),
        )


def environment_with(**changes: str) -> dict[str, str]:
    """The environment of this process with some variables changed, for one that it starts."""
    return {**os.environ, **changes}


def _is_on(variable: str) -> bool:
    value = os.environ.get(variable, "").strip().lower()
    if value not in _ON + _OFF:
        raise ValueError(
            f"{variable}={os.environ[variable]!r}; it needs to be 1, true, yes or on, or 0, false, no or off"
        )
    return value in _ON


def _bytes(variable: str, least: int) -> int | None:
    value = os.environ.get(variable)
    if not value:
        return None
    if not value.isdigit() or int(value) < least:
        raise ValueError(f"{variable}={value!r}; it needs to be a number of bytes, at least {least}")
    return int(value)


# Read once: a call must not pay for a look into the environment. Tests set the fields.
settings = Settings.from_environment()

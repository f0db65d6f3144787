"""The constants of a compiled kernel, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise.backends.triton.hopper.gluon_names import gl


class Constants:
    """A variant inside a kernel, where ``X.keys`` has to be a ``constexpr``."""

    def __init__(self, names: Sequence[str], values: Sequence[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, gl.constexpr(value))

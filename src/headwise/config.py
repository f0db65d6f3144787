"""Settings of the process. The only module that reads environment variables.

======================  ==========================================================================
``HEADWISE_BACKEND``    the backend every call uses unless it names one itself (``cpu``, ``triton``, …)
``HEADWISE_VALIDATE``   ``1``: read ids, targets, lengths and tables back and raise on the first bad value
``HEADWISE_TILES``      a tile table written by ``headwise tune``, used in place of the ones that come with Headwise
``TRITON_INTERPRET``    ``1``: Triton's own: kernels run in its interpreter, on CPU tensors, without a GPU
======================  ==========================================================================
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass
class Settings:
    backend: str | None = None
    validate: bool = False
    tiles: str | None = None
    triton_interpret: bool = False

    @staticmethod
    def from_environment() -> Settings:
        return Settings(
            backend=os.environ.get("HEADWISE_BACKEND") or None,
            validate=_is_on("HEADWISE_VALIDATE"),
            tiles=os.environ.get("HEADWISE_TILES") or None,
            triton_interpret=_is_on("TRITON_INTERPRET"),
        )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


# Read once: a call must not pay for a look into the environment. Tests set the fields.
settings = Settings.from_environment()

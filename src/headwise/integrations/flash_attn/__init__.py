"""The functions of the package flash_attn 2.8, on Headwise.

Either import them from here in place of flash_attn, or let a program that nobody wants to edit believe that flash_attn is
installed: ``install()`` before it imports it, or ``headwise run program.py``.

Only names, arguments and results are flash_attn's. There is no CUDA extension: what runs is `headwise.attention` and its
family, on every backend, in every dtype.
"""

from __future__ import annotations

from headwise.integrations.flash_attn import flash_attn_interface
from headwise.integrations.flash_attn._install import VERSION as __version__
from headwise.integrations.flash_attn._install import install, uninstall
from headwise.integrations.flash_attn.flash_attn_interface import *  # noqa: F403

__all__ = ["__version__", "install", "uninstall"]
__all__ += flash_attn_interface.__all__

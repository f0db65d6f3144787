"""``import flash_attn`` finds Headwise: entries in ``sys.modules``, and an answer to who asks for the version."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

VERSION = "2.8.3"  # the release whose functions these are
FOREIGN = "flash_attn"
OURS = "headwise.integrations.flash_attn"
SUBMODULES = (
    "flash_attn_interface", "bert_padding", "layers", "layers.rotary", "ops", "ops.triton", "ops.triton.rotary",
)  # fmt: skip

_displaced: dict[str, ModuleType] | None = None  # what was in sys.modules before; None: not installed


def install() -> None:
    """From now on ``import flash_attn`` and its submodules that are here give Headwise's; others are not found.

    Names that a program has already imported stay what they are. Once is enough: a second call changes nothing.
    """
    global _displaced
    if _displaced is not None:
        return
    ours = {FOREIGN: importlib.import_module(OURS)}
    ours |= {f"{FOREIGN}.{name}": importlib.import_module(f"{OURS}.{name}") for name in SUBMODULES}
    _displaced = _take_out()
    sys.modules.update(ours)
    sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Undo `install`."""
    global _displaced
    if _displaced is None:
        return
    _take_out()
    sys.modules.update(_displaced)
    sys.meta_path.remove(_FINDER)
    _displaced = None


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == FOREIGN or name.startswith(f"{FOREIGN}.")]
    return {name: sys.modules.pop(name) for name in names}


class _Distribution(metadata.Distribution):
    """What ``importlib.metadata.version("flash_attn")`` reads."""

    _files = {  # noqa: RUF012
        "METADATA": f"Metadata-Version: 2.1\nName: {FOREIGN}\nVersion: {VERSION}\nSummary: served by Headwise\n",
        "top_level.txt": f"{FOREIGN}\n",
    }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError("flash_attn is served by Headwise and has no files")


class _Finder(metadata.DistributionFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        return None

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterable[metadata.Distribution]:
        name = getattr(context, "name", None)
        return _only(name is None or re.sub(r"[-_.]+", "_", name).lower() == FOREIGN)


def _only(asked: bool) -> Iterator[metadata.Distribution]:
    if asked:
        yield _Distribution()


_FINDER = _Finder()

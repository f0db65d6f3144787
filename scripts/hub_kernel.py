"""Lay the package out as a Python-only kernel for the library `kernels` of Hugging Face.

    python scripts/hub_kernel.py [folder]            (or: make hub-kernel)

The folder gets ``build/torch-<backend>/`` for each backend: the package, the file that `kernels` imports, and metadata.
Nothing is compiled: Triton and WGSL kernels are built on first use.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwise"
# What `kernels` calls the machines that the package runs on.
BACKENDS = ("cpu", "cuda", "rocm")
# Tools for people; a kernel is called by programs.
LEFT_OUT = ("benchmark", "cases", "cli", "demo", "web", "__pycache__")

ENTRY = '''"""Headwise {version} as a kernel: the functions of flash_attn, and layers for `kernelize`."""

import importlib.util
import sys
from pathlib import Path

# A process has one copy of the package, under its own name: its operators can be registered with PyTorch once.
if importlib.util.find_spec("headwise") is None:
    _folder = Path(__file__).parent / "headwise"
    _spec = importlib.util.spec_from_file_location(
        "headwise", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
    )
    sys.modules["headwise"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["headwise"])

from headwise.integrations.hub_kernel import *  # noqa: E402, F403
from headwise.integrations.hub_kernel import __all__ as __all__  # noqa: E402
'''


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1)


def lay_out(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(PACKAGE, variant / "headwise", ignore=lambda _, names: [n for n in names if n in LEFT_OUT])
        (variant / "__init__.py").write_text(ENTRY.format(version=version()))
        metadata = {
            "id": f"headwise_{backend}_{version().replace('.', '_')}",
            "name": "headwise",
            "version": 1,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / "hub-kernel"
    lay_out(target)
    print(f"headwise: {target} holds build/torch-{{{','.join(BACKENDS)}}}")

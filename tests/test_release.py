"""What is packed: a wheel with everything that runs, an sdist that a wheel can be built from, and one version everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import headwise

ROOT = Path(__file__).resolve().parent.parent
# Folders that only exist while somebody works here.
NOT_PACKED = ("build/", "dist/", ".venv/", "headwise-demo/", ".hypothesis/")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def sdist(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def sources() -> set[str]:
    """Every file of the package that is no leftover of running it."""
    found = (path for path in (ROOT / "src" / "headwise").rglob("*") if path.is_file())
    return {path.relative_to(ROOT / "src").as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    """Kernels in WGSL, tile tables, both web pages, the mark of types: this wheel is built from an sdist, too."""
    assert {name for name in wheel if ".dist-info/" not in name} == sources()
    kinds = {Path(name).suffix for name in wheel}
    assert {".wgsl", ".json", ".js", ".css", ".html", ".typed"} <= kinds


def test_the_wheel_says_what_it_is(wheel):
    metadata = next(text for name, text in wheel.items() if name.endswith("METADATA")).decode()
    assert f"\nVersion: {headwise.__version__}\n" in metadata
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) == set(extras)
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    assert b"headwise = headwise.cli:main" in next(t for n, t in wheel.items() if n.endswith("entry_points.txt"))


def test_the_sdist_can_be_tested_and_holds_no_leftovers(sdist):
    needed = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "constraints.txt", "Makefile", "mkdocs.yml"}
    assert needed <= sdist
    assert {f"src/{name}" for name in sources()} <= sdist
    assert "tests/test_release.py" in sdist
    assert [name for name in sdist if name.startswith(NOT_PACKED)] == []


def test_the_version_is_the_same_everywhere():
    version = headwise.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

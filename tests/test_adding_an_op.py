"""docs/adding-an-op.md is followed to the letter: its blocks go into a copy of the tree, and the new op is tested there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "adding-an-op.md"
MOST_FILES = 8
BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)

TRANSFORMS = """
import torch
import headwise as hw

x, y = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
hw.scale_and_add(x, y, 2.0, backend={backend!r}).sum().backward()
torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))
call = lambda x: hw.scale_and_add(x, y, 3.0, backend={backend!r})
compiled = torch.compile(call, fullgraph=True)
torch.testing.assert_close(compiled(x), 3 * x + y)
torch.testing.assert_close(torch.func.grad(lambda x: call(x).sum())(x), torch.full_like(x, 3.0))
torch.library.opcheck(torch.ops.headwise.scale_and_add_forward.default, (x, y, 2.0, {backend!r}))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what the op needs of the tree, with the files of the page in it."""
    copy = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__", "gpu"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for language, path, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "diff":
            insert(copy / path, text)
        else:
            assert not (copy / path).exists(), path
            (copy / path).write_text(text, encoding="utf-8")
    return copy


def insert(path: Path, diff: str) -> None:
    """Add the lines with a plus after the line before them, which the file has once."""
    (context,) = (line[1:] for line in diff.splitlines() if line.startswith(" "))
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines.count(context) == 1, f"{path.name} has {lines.count(context)} lines {context!r}"
    place = lines.index(context) + 1
    path.write_text("\n".join([*lines[:place], *added, *lines[place:]]) + "\n", encoding="utf-8")


def run(tree: Path, *arguments: str, **environment: str) -> str:
    """What a command in that tree prints; it has to end well."""
    known = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=known, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def passed(output: str) -> int:
    return int(re.search(r"(\d+) passed", output)[1])


def test_the_page_touches_few_files():
    assert len({path for _, path, _ in BLOCK.findall(PAGE.read_text(encoding="utf-8"))}) <= MOST_FILES


def test_the_copy_is_what_is_tested(tree):
    assert run(tree, "-c", "import headwise; print(headwise.__file__)").startswith(str(tree))


def test_on_the_cpu_and_on_webgpu(tree):
    tests = ("tests/test_layout.py", "tests/test_op_table.py", "tests/test_conformance.py")
    output = run(tree, "-m", "pytest", "-q", "-n", "0", *tests, "-k", "scale_and_add")
    assert passed(output) > 60


def test_on_triton(tree):
    output = run(
        tree, "-m", "pytest", "-q", "-n", "0", "tests/test_conformance.py", "-k", "scale_and_add and triton",
        TRITON_INTERPRET="1",
    )  # fmt: skip
    assert passed(output) >= 16


@pytest.mark.parametrize(("backends", "interpret"), [("cpu webgpu", "0"), ("triton", "1")])
def test_with_autograd_and_compiled(tree, backends, interpret):
    run(tree, "-c", "".join(TRANSFORMS.format(backend=b) for b in backends.split()), TRITON_INTERPRET=interpret)


def test_explained(tree):
    told = run(tree, "-m", "headwise", "explain", "scale_and_add", "--arch", "sm_90", "--gradient")
    assert "Runs on triton." in told

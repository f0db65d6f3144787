"""What is public: names and signatures as they are written down, and an example of each that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise import nn

ROOT = Path(__file__).resolve().parent.parent
NAMES = [f"headwise.{name}" for name in hw.__all__] + [f"headwise.nn.{name}" for name in nn.__all__]
PAGES = {"headwise.distributed": "distributed", "headwise.webgpu": "webgpu"}  # the others are integrations
MODULES = ("headwise.distributed", "headwise.webgpu", *(f"headwise.integrations.{name}" for name in (
    "flash_attn", "onnx", "sdpa", "transformers")))  # fmt: skip
# Names that no example calls: what Transformers calls after register(), and the parts of a prepared ONNX model.
WITHOUT_EXAMPLE = {"NAME", "attention_forward", "make_mask", "Operator", "Prepared"}
LISTED = (ROOT / "tests" / "data" / "public_api.txt").read_text(encoding="utf-8")
REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md")))


def public(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_names_and_signatures_are_those_that_are_written_down():
    """A changed line is a changed interface: it belongs into CHANGELOG.md."""
    result = subprocess.run([sys.executable, "scripts/write_api.py", "--check"], cwd=ROOT, check=False)
    assert result.returncode == 0, "python scripts/write_api.py writes tests/data/public_api.txt anew"


@pytest.mark.parametrize("module", MODULES)
def test_what_can_be_imported_is_written_down(module):
    """Where a module takes in the names of another, too."""
    names = {n for n in getattr(importlib.import_module(module), "__all__", ()) if not n.startswith("_")}
    assert names <= set(re.findall(rf"^{re.escape(module)}\.(\w+)", LISTED, re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_its_example_runs(name):
    """Before each example stand: import torch, headwise as hw, and from headwise import nn."""
    examples = doctest.DocTestParser().get_doctest(
        inspect.getdoc(public(name)) or "", {"torch": torch, "hw": hw, "nn": nn}, name, None, 0
    )
    assert examples.examples, f"the docstring of {name} has no example"
    torch.manual_seed(0)
    said: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=said.append)
    assert results.failed == 0, "".join(said)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_in_the_reference(name):
    assert re.search(rf"^::: {re.escape(name)}$", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize("module", MODULES)
def test_an_example_of_its_page_uses_every_name(module):
    """The examples of these pages are programs, which tests/test_docs.py runs."""
    page = ROOT / "docs" / "reference" / f"{PAGES.get(module, 'integrations')}.md"
    examples = "".join(
        re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
    names = re.findall(rf"^{re.escape(module)}\.(\w+)", LISTED, re.MULTILINE)
    assert names
    assert [n for n in names if n not in WITHOUT_EXAMPLE and not re.search(rf"\b{n}\b", examples)] == []

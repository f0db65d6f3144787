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
REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md")))


def public(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_names_and_signatures_are_those_that_are_written_down():
    """A changed line is a changed interface: it belongs into CHANGELOG.md."""
    result = subprocess.run([sys.executable, "scripts/write_api.py", "--check"], cwd=ROOT, check=False)
    assert result.returncode == 0, "python scripts/write_api.py writes tests/data/public_api.txt anew"


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

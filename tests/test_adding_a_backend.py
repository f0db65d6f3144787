"""docs/adding-a-backend.md is followed to the letter: its blocks go into a copy of the package, and it runs there."""

from __future__ import annotations

import json
import shutil

import pytest
from test_adding_an_op import BLOCK, ROOT, insert, run

PAGE = ROOT / "docs" / "adding-a-backend.md"

# The package that the backend is made of. A row of -inf gives zeros, as the contract says.
WONDER = """
import torch


def softmax(x, out):
    nothing = (x == -torch.inf).all(-1, keepdim=True)
    out.copy_(torch.where(nothing, 0.0, torch.softmax(x.double(), -1)))


def softmax_backward(probs, grad, out):
    p, g = probs.double(), grad.double()
    out.copy_(p * (g - (p * g).sum(-1, keepdim=True)))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    copy = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for language, path, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "diff":
            insert(copy / path, text)
        else:
            (copy / path).parent.mkdir(exist_ok=True)
            (copy / path).write_text(text, encoding="utf-8")
    return copy


def test_without_its_package_it_says_what_is_missing(tree):
    said = run(tree, "-c", "from headwise.backends.registry import availability; print(availability('wonder'))")
    assert said.startswith("the package wonder is not installed")


def test_it_passes_the_conformance_cases_of_its_op(tree):
    (tree / "src" / "wonder.py").write_text(WONDER, encoding="utf-8")
    report = json.loads(run(tree, "-m", "headwise", "check", "--backend", "wonder", "--quick", "--json"))
    results = {r["op"]: r for r in report["results"]}
    assert results["softmax"]["ok"]
    assert results["softmax"]["cases"] > 0
    assert [op for op, r in results.items() if r["runs"]] == ["softmax"]

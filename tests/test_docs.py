"""The docs speak of what is there: links lead somewhere, files that are named exist, pictures show what is, examples run."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md")),
    *sorted((ROOT / "bench" / "notes").glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
]
TREE = [str(path.relative_to(ROOT)) for folder in ("src", "tests", "scripts") for path in (ROOT / folder).rglob("*.*")]
NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]

_LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)")
_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|wgsl))`")

# Pages whose blocks do not make one program -> what runs them instead, or why nothing does.
NOT_RUN_HERE = {
    "docs/adding-an-op.md": "tests/test_adding_an_op.py follows the page",
    "docs/adding-a-backend.md": "pieces of a backend that does not exist",
    "docs/distributed.md": "needs the ranks of torchrun; tests/test_distributed.py calls every function of it",
    "docs/transformers.md": "needs a model of the hub; tests/test_integration_transformers.py does the same to a random one",
}
# What a page takes as given: page -> words of a block -> what goes before it.
GIVEN = {
    "docs/integrations.md": {
        "sdpa.override()": """
import torch
model, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 8, 16)
model = (lambda attention: lambda x: attention(x, x, x))(model)
""",
        "Backend.prepare(model)": """
from onnx import TensorProto, helper
node = helper.make_node("RMSNormalization", ["x", "scale"], ["y"])
shapes = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (
    ("x", [2, 8]), ("scale", [8]), ("y", [2, 8]))}
graph = helper.make_graph([node], "norm", [shapes["x"], shapes["scale"]], [shapes["y"]])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
inputs = [torch.randn(2, 8).numpy(), torch.ones(8).numpy()]
""",
    },
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def broken_links(page: Path, text: str) -> list[str]:
    return [link for link in _LINK.findall(_BLOCK.sub("", text)) if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    assert broken_links(page, text_of(page)) == []


def test_a_broken_link_is_seen():
    assert broken_links(DOCS / "faq.md", "[a](nowhere.md) [b](index.md#settings) [c](https://x.org)") == ["nowhere.md"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    named = set(_FILE.findall(_BLOCK.sub("", text_of(page))))
    if page.name == "adding-an-op.md":
        named = {name for name in named if "scale_and_add" not in name}
    missing = [name for name in sorted(named) if not any(f"/{known}".endswith(f"/{name}") for known in TREE)]
    assert missing == []


def test_every_page_is_in_the_navigation():
    """Those that lie in docs/ itself are put there by scripts/site_hooks.py if mkdocs.yml does not name them."""
    pages = {page: page.relative_to(DOCS).as_posix() for page in sorted(DOCS.glob("*/*.md"))}
    assert [name for name in pages.values() if f" {name}\n" not in NAV] == []


def test_the_readme_fits_one_screen_or_two():
    assert text_of(ROOT / "README.md").count("\n") <= 120


@pytest.mark.parametrize("script", ["draw_architecture", "draw_grids"])
def test_drawings_are_current(script):
    drawn = subprocess.run([sys.executable, f"scripts/{script}.py", "--check"], cwd=ROOT, check=False)
    assert drawn.returncode == 0, f"python scripts/{script}.py draws them anew"


def program(page: Path, text: str) -> str:
    """All python blocks of a page, from top to bottom; of a console session what was typed."""
    given = GIVEN.get(name_of(page), {})
    parts = []
    for language, block in _PYTHON.findall(text):
        parts += [code for words, code in given.items() if words in block]
        parts += [e.source for e in doctest.DocTestParser().get_examples(block)] if language == "pycon" else [block]
    return "\n".join(parts)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if _PYTHON.search(text_of(p)) and name_of(p) not in NOT_RUN_HERE], ids=name_of
)
def test_examples_run(page):
    code = program(page, text_of(page))
    if (
        "hw.webgpu" in code
    ):  # a program of its own: PyTorch's autograd learns of devices at the first backward of a process
        run = subprocess.run([sys.executable, "-W", "error", "-c", code], check=False, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return
    exec(compile(code, name_of(page), "exec"), {"__name__": "__main__"})


def test_a_broken_example_is_seen():
    broken = program(DOCS / "faq.md", "```python\nx = 1\n```\n\n```pycon\n>>> print(y)\n1\n```\n")
    with pytest.raises(NameError):
        exec(broken, {})


def test_pages_that_are_not_run_are_there():
    assert [name for name in [*NOT_RUN_HERE, *GIVEN] if not (ROOT / name).exists()] == []

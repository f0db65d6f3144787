"""The docs speak of what is there: links lead somewhere, files that are named exist, the drawing shows the house."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TREE = [str(path.relative_to(ROOT)) for folder in ("src", "tests", "scripts") for path in (ROOT / folder).rglob("*.*")]

_LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)")
_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|wgsl))`")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert [link for link in _LINK.findall(text_of(page)) if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    named = set(_FILE.findall(_BLOCK.sub("", text_of(page))))
    if page.name == "adding-an-op.md":
        named = {name for name in named if "scale_and_add" not in name}
    missing = [name for name in sorted(named) if not any(f"/{known}".endswith(f"/{name}") for known in TREE)]
    assert missing == []


def test_every_page_is_in_the_index():
    index = text_of(ROOT / "docs" / "index.md")
    assert [p.name for p in PAGES[2:] if p.name != "index.md" and f"({p.name})" not in index] == []


def test_the_drawing_of_the_house_is_current():
    drawn = subprocess.run([sys.executable, "scripts/draw_architecture.py", "--check"], cwd=ROOT, check=False)
    assert drawn.returncode == 0, "python scripts/draw_architecture.py draws it anew"


@pytest.mark.parametrize("page", ["nn.md"])
def test_examples_run(page):
    """All blocks of a page, from top to bottom, as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```$", text_of(ROOT / "docs" / page), re.MULTILINE | re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {})

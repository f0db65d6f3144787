"""Hooks of mkdocs: pages that live outside docs/, pages that nobody put into the navigation, the help of the command line.

Results, protocol and notes of the benchmarks stay in bench/, CHANGELOG.md and its like in the root, where people look for
them. In the site they are pages and files like any other; links that lead from docs/ to them, and back, are written anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE")
SHOWN = {".md", ".csv", ".png", ".json", ".svg"}
# A README would be the first page of its section.
RENAMED = {"bench/README.md": "bench/protocol.md"}
_HELP = "<!-- help of every command -->"
_LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)\s#]*)((?:#[^)\s]*)?\))")


def on_config(config: Any, **_: Any) -> Any:
    """A page of docs/ that the navigation does not name stands at the end of Inside, by its own title."""
    named = set(_names(config.nav))
    inside = next(section["Inside"] for section in config.nav if "Inside" in section)
    inside += [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in named]
    return config


def _names(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _names(part)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    outside = [ROOT / name for name in FROM_ROOT]
    outside += [path for path in sorted((ROOT / "bench").rglob("*")) if path.suffix in SHOWN]
    for path in outside:
        if path.exists():
            name = path.relative_to(ROOT).as_posix()
            name = RENAMED.get(name, name)
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    if _HELP in markdown:
        markdown = markdown.replace(_HELP, help_of_every_command())
    return _LINK.sub(
        lambda link: f"{link[1]}{in_site(link[2], page.file.src_uri)}{link[3]}" if link[2] else link[0], markdown
    )


def in_site(link: str, page: str) -> str:
    """A link as it is in the repository, for the site: where docs/ is the root and bench/ lies in it."""
    from_outside = page.startswith("bench/") or page in FROM_ROOT
    folder = ROOT / (os.path.dirname(page) if from_outside else f"docs/{os.path.dirname(page)}")
    target = os.path.relpath(os.path.normpath(folder / link), ROOT).replace(os.sep, "/")
    in_docs = RENAMED.get(target, target).removeprefix("docs/")
    return os.path.relpath(in_docs, os.path.dirname(page) or ".").replace(os.sep, "/")


def help_of_every_command() -> str:
    sys.path.insert(0, str(ROOT / "src"))
    from headwise import cli

    parts = []
    for command in ("", *cli.COMMANDS, "explain attention"):
        parts += [f"## headwise {command}".rstrip(), "", "```text", _help(cli.main, command), "```", ""]
    return "\n".join(parts)


def _help(main: Any, command: str) -> str:
    os.environ["COLUMNS"] = "80"
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return said.getvalue().strip()

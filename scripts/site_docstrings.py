"""Docstrings as Markdown for the site: aligned lists of arguments become lists, examples become code.

An extension of griffe, which mkdocstrings reads the sources with. In the sources docstrings are laid out for `help()`:

    causal         key j is visible iff ``j <= p``
    return_lse     also return the natural log of the softmax denominator,
                   float32
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ALIGNED = re.compile(r"^(\w+(?:,? \w+)*)  +(\S.*)$")


def as_markdown(text: str) -> str:
    lines, made = text.splitlines(), []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(">>> "):
            end = at
            while end < len(lines) and lines[end].strip():
                end += 1
            made += ["", "```pycon", *lines[at:end], "```", ""]
            at = end
        elif (found := _ALIGNED.match(line)) and not line.startswith(" "):
            words, text_of = found.groups()
            at += 1
            while at < len(lines) and lines[at].startswith("  ") and lines[at].strip():
                text_of += f" {lines[at].strip()}"
                at += 1
            names = ", ".join(f"`{word.strip()}`" for word in words.split(","))
            before = [] if made and made[-1].startswith("- **") else [""]
            made += [*before, f"- **{names}** {text_of}"]
        else:
            made.append(line)
            at += 1
    return "\n".join(made)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

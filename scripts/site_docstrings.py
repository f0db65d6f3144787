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

_OF_TORCH = ("extra_repr", "reset_parameters")  # every module has them
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


def fields(of: griffe.Class) -> list[str]:
    """What is said of the fields of a dataclass, in comments behind them."""
    lines, made = of.lines, []
    for name, member in of.members.items():
        if member.is_attribute and "class-attribute" in member.labels and member.lineno is not None:
            comment = lines[member.lineno - (of.lineno or 1)].partition("  # ")[2]
            made += [f"- **`{name}`** {comment}"] if comment and not comment.startswith("type:") else []
    return made


def is_shown(obj: griffe.Object) -> bool:
    """Of what has no docstring: functions, names of a module, and the fields of a named tuple, which no signature lists."""
    if obj.is_function:
        return obj.name not in _OF_TORCH
    return obj.is_attribute and not (
        isinstance(obj.parent, griffe.Class) and "NamedTuple" not in map(str, obj.parent.bases)
    )


class Docstrings(griffe.Extension):
    """What is shown without a docstring gets an empty one; mkdocs.yml leaves out the rest, the attributes of classes."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        elif is_shown(obj):
            obj.docstring = griffe.Docstring("", parent=obj)
        if isinstance(obj, griffe.Class) and obj.docstring is not None and (said := fields(obj)):
            before, example, after = obj.docstring.value.partition("```pycon")
            obj.docstring.value = "\n".join([before, "", *said, "", example + after])

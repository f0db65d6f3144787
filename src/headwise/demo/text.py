"""The text that the demo trains on: documents in a fixed order, each with its last part held out.

By default it is Python's own documentation (`pydoc_data.topics`), which comes with Python.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LEAST = 256  # bytes: less is too little to train on
_HELD_OUT_SHARE = 20  # one byte in 20
_LEAST_TO_HOLD_OUT = 4096  # a shorter document is trained on whole


class TextError(Exception):
    """There is no text to train on. The message says which file and why."""


@dataclass(frozen=True)
class Document:
    name: str
    training: bytes
    held_out: bytes  # its end; empty for a short document


@dataclass(frozen=True)
class Text:
    name: str
    documents: tuple[Document, ...]

    @property
    def size(self) -> int:
        """Bytes of all documents, trained on or held out."""
        return sum(len(d.training) + len(d.held_out) for d in self.documents)

    @property
    def held_out_size(self) -> int:
        return sum(len(d.held_out) for d in self.documents)

    def __str__(self) -> str:
        count = len(self.documents)
        return f"{self.name}, {count} {'document' if count == 1 else 'documents'}, {self.size / 1000:,.0f} kB"

    def fingerprint(self) -> str:
        """A hash of the documents in their order, without their names."""
        digest = hashlib.sha256()
        for document in self.documents:
            for part in (document.training, document.held_out):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        return digest.hexdigest()[:32]


def python_topics() -> Text:
    """Every topic of `pydoc_data.topics` a document, sorted by name."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return _text("pydoc_data.topics", [(name, topics[name].encode()) for name in sorted(topics)])


def files(paths: Sequence[Path]) -> Text:
    """Every file a document, in the order given."""
    found = []
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise TextError(f"{path} cannot be read: {error.strerror or error}") from error
        if not content:
            raise TextError(f"{path} is empty")
        # A file name may not be valid text; what is printed of it must be.
        found.append((path.name.encode(errors="surrogateescape").decode(errors="replace"), content))
    names = [name for name, _ in found]
    return _text(", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} other files", found)


def _text(name: str, documents: list[tuple[str, bytes]]) -> Text:
    made = []
    for document, content in documents:
        held_out = len(content) // _HELD_OUT_SHARE if len(content) >= _LEAST_TO_HOLD_OUT else 0
        cut = len(content) - held_out
        made.append(Document(document, content[:cut], content[cut:]))
    text = Text(name, tuple(made))
    if text.size < LEAST:
        raise TextError(f"{text.name} has {text.size} bytes; it needs at least {LEAST}")
    if all(len(document.training) < 2 for document in text.documents):
        raise TextError(f"{text.name} has documents of one byte alone: there is no next byte to guess")
    return text

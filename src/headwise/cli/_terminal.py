"""What the subcommands share: the console, tables, JSON, and the error for wrong usage."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# The width of a file or a pipe.
_PIPE_WIDTH = 120

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_DTYPE_NICKNAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64", "half": "float16"}


class UsageError(Exception):
    """The command line asks for something that does not exist. The message says what and why; exit code 2."""


def console() -> Console:
    """As wide as the terminal, or as COLUMNS says."""
    width = None if sys.stdout.isatty() else shutil.get_terminal_size((_PIPE_WIDTH, 25)).columns
    return Console(highlight=False, width=width)


def progress_console() -> Console:
    """Standard error: a pipe does not get the progress bar."""
    return Console(stderr=True)


def table(*columns: str, title: str | None = None) -> Table:
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")  # long words are wrapped, not cut
    return made


def verdict(reason: str | None) -> Text:
    """How a backend's "runs" or its reason why not is shown."""
    return Text("✓ runs", "green") if reason is None else Text(f"– {reason}", "dim")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def dtype(name: str) -> torch.dtype:
    """The dtype of a name on the command line: float32 or f32, bfloat16 or bf16, …"""
    full = _DTYPE_NICKNAMES.get(name, name)
    if full not in DTYPES:
        raise UsageError(f"--dtype {name} is not known; there are: {', '.join((*DTYPES, *_DTYPE_NICKNAMES))}")
    return DTYPES[full]

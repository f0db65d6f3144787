"""Swap norms, gated MLPs, rotary and token embeddings and the loss of a model for our ops, and back.

What is swapped is the ``forward`` of an instance: parameters, names, hooks and modes stay, and so does every class. The
forward is a function of its module, so the copy of a patched model computes with its own weights.
"""

from __future__ import annotations

import re
import textwrap
from types import MethodType
from typing import NamedTuple

import torch
from torch import nn

from headwise.backends.registry import use_backend
from headwise.integrations import _patch_embedding, _patch_glu, _patch_loss, _patch_norms, _patch_probe, _patch_rope
from headwise.integrations._patch_probe import Finding

_COLUMNS = 80
_FINDERS = (_patch_norms.find, _patch_glu.find, _patch_rope.find, _patch_embedding.find, _patch_loss.find)


class Row(NamedTuple):
    """One module that an op of ours may stand in for."""

    path: str
    what: str  # "rms_norm", "layer_norm", "glu, silu", "rope", "embedding", "loss"; if refused "norm", "glu", …
    swapped: bool  # by `explain`: or would be
    reason: str  # why not


class Report(tuple[Row, ...]):
    """Rows of `explain` and `patch`. As text: a table, with the layers of a kind in one line."""

    def __str__(self) -> str:
        counts: dict[tuple[str, str, str], int] = {}
        for row in self:
            key = (re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", row.path) or "(the model)", row.what, row.reason)
            counts[key] = counts.get(key, 0) + 1
        lines = []
        for (path, what, reason), count in counts.items():
            lines += textwrap.wrap(f"{count:4}  {what:22}{path}", _COLUMNS, subsequent_indent=" " * 28)
            if reason:
                lines += textwrap.wrap(
                    f"not swapped: {reason}", _COLUMNS, initial_indent=" " * 8, subsequent_indent=" " * 8
                )
        return "\n".join(lines) or "nothing to swap"

    __repr__ = __str__


def patch(model: nn.Module) -> Report:
    """Swap what `explain` says; the rows are its own. Idempotent."""
    found = _findings(model)
    for finding in found:
        for module, forward in finding.forwards:
            forward.is_headwise = True  # type: ignore[attr-defined]
            module.forward = MethodType(forward, module)
    return _report(found)


def unpatch(model: nn.Module) -> None:
    """Undo `patch`, wherever in the model it was called. A model that is not patched stays as it is."""
    for module in model.modules():
        if _patch_probe.is_ours(module.__dict__.get("forward")):
            del module.forward


def explain(model: nn.Module) -> Report:
    """What `patch` would swap, and why it would leave the rest: a row for each module. ``print`` it for a table.

    Nothing is changed. In a patched model the rows are the same.
    """
    return _report(_findings(model))


def _findings(model: nn.Module) -> list[Finding]:
    found = []
    # Stand-ins are on the CPU, wherever the caller makes tensors and whatever backend is to run the model.
    with torch.device("cpu"), use_backend("cpu"):
        for path, module in model.named_modules():
            found += [finding for find in _FINDERS if (finding := find(path, module)) is not None]
    return found


def _report(found: list[Finding]) -> Report:
    return Report(Row(f.path, f.what, bool(f.forwards), f.reason) for f in found)

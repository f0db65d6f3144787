"""Tables of embeddings in a model: plain ``nn.Embedding``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headwise.integrations import _patch_probe as probe
from headwise.integrations._patch_probe import Finding
from headwise.ops.embedding import embedding


def find(path: str, module: nn.Module) -> Finding | None:
    """Any nn.Embedding; None for other modules."""
    if not isinstance(module, nn.Embedding):
        return None
    reason = probe.replaced(module) or _not_plain(module)
    if reason:
        return Finding(path, "embedding", reason=reason)
    return Finding(path, "embedding", ((module, forward),))


def _not_plain(module: nn.Embedding) -> str:
    if type(module).forward is not nn.Embedding.forward:
        return "its own forward does more than look up rows"
    if not module.weight.is_floating_point():
        return f"its weight has dtype {module.weight.dtype}"
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name) not in (None, False):
            return f"its {name} is {getattr(module, name)}; ours has no such option"
    return ""


def forward(self: Any, *given: Tensor, **named: Tensor) -> Tensor:
    (ids,) = (*given, *named.values())
    return embedding(ids, self.weight, self.padding_idx)

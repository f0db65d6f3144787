"""The loss of a language model: the head leaves its logits to be computed, and cross entropy never does.

The model's own forward and the loss function of Transformers run as they are: shifted labels, ``num_items_in_batch`` and
``ignore_index`` are theirs. Only the head returns `LazyLogits`, in a forward pass in training mode that was given labels.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from headwise.integrations import _patch_probe as probe
from headwise.integrations._lazy_logits import LazyLogits
from headwise.integrations._patch_probe import Finding, Forward
from headwise.ops import _autocast

# What a forward calls that ends in a cross entropy: the model's loss_function, or PyTorch's (BERT, T5, Whisper).
_LOSSES = {"loss_function", "CrossEntropyLoss", "cross_entropy"}
# The head of the model that is in its forward pass, with labels.
_head: ContextVar[nn.Module | None] = ContextVar("headwise_head", default=None)


def find(path: str, module: Any) -> Finding | None:
    """A model whose forward takes labels, with a head that makes logits; None for other modules."""
    if not hasattr(module, "get_output_embeddings") or "labels" not in probe.arguments_of(module):
        return None
    head = module.get_output_embeddings()
    if head is None:
        return None
    reason = _not_plain(module, head) or _not_cross_entropy(module)
    if reason:
        return Finding(path, "loss", reason=reason)
    return Finding(path, "loss", ((module, _model_forward(type(module).forward)), (head, _head_forward())))


def _not_plain(module: nn.Module, head: Any) -> str:
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}; ours needs a plain Linear"
    if not _calls(module) & _LOSSES:
        return "its forward has a loss of its own, which is no cross entropy of the logits"
    return probe.replaced(module) or probe.replaced(head)


def _calls(module: Any) -> set[str]:
    """Names in the code of the model's own forward."""
    own = inspect.unwrap(type(module).forward)
    return set(getattr(getattr(own, "__code__", None), "co_names", ()))


def _not_cross_entropy(module: nn.Module) -> str:
    """Runs the model's loss function on a few logits: ours has to give the same without making them."""
    if "loss_function" not in _calls(module):
        return ""  # cross entropy by name; a forward that does more to the logits first gets the real ones
    loss_function: Any = module.loss_function
    hidden, weight = probe.random(2, 5, 6, seed=0), probe.random(11, 6, seed=1)
    labels = torch.tensor([[1, 2, -100, 4, 10], [-100, 0, 3, 3, 7]])
    lazy = LazyLogits.of(hidden, weight, None)
    name = getattr(loss_function, "__name__", type(loss_function).__name__)
    try:
        ours = loss_function(logits=lazy, labels=labels, vocab_size=11)
        own = loss_function(logits=hidden @ weight.T, labels=labels, vocab_size=11)
    except Exception as error:
        return f"its loss_function, {name}, did not run on logits and labels: {error}"
    if lazy.was_read() or not isinstance(ours, Tensor) or not probe.equal(ours[None], own[None]):
        return f"its loss_function, {name}, is not the cross entropy of the logits"
    return ""


def _model_forward(own: Forward) -> Forward:
    position = list(inspect.signature(own).parameters).index("labels")

    @functools.wraps(own)  # others read the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels", args[position - 1] if len(args) >= position else None)
        lazy = labels is not None and self.training and torch.is_grad_enabled()
        if not lazy or torch.compiler.is_compiling():
            return type(self).forward(self, *args, **kwargs)
        token = _head.set(self.get_output_embeddings())
        try:
            return type(self).forward(self, *args, **kwargs)
        finally:
            _head.reset(token)

    return forward


def _head_forward() -> Forward:
    def forward(self: Any, *given: Tensor, **named: Tensor) -> Tensor:
        (hidden,) = (*given, *named.values())
        lazy = not torch.compiler.is_compiling() and _head.get() is self
        # Transforms of torch.func differentiate tensors of their own, behind the graph that lazy logits stand in.
        if not lazy or torch._C._are_functorch_transforms_active() or _is_sharded_alone(self):
            return type(self).forward(self, hidden)
        tensors = _autocast.cast_operands(hidden, self.weight, self.bias)
        if any(x is not None and x.dtype != tensors[0].dtype for x in tensors):
            return type(self).forward(self, hidden)
        return LazyLogits.of(*tensors)

    return forward


def _is_sharded_alone(head: nn.Module) -> bool:
    """Whether the head was made an FSDP unit after the patch; `find` refuses one that was before."""
    if not any(kind.__name__ == "FSDPModule" for kind in type(head).__mro__):
        return False
    warnings.warn(
        "headwise: the head is an FSDP unit of its own, and its weight is gone when the loss is computed; the logits are "
        "built. Leave the head to fully_shard(model) to have them not",
        stacklevel=3,
    )
    return True

"""Autocast: each op states in one line what it does there, and everything else about it is here.

The rules are those of PyTorch's lists for GPUs (torch/csrc/autocast), on every device: products of matrices in autocast's
dtype, norms and softmax in float32, elementwise work in the widest dtype of its inputs. Losses have no rule: they compute in
float32 whatever they are given. The casts come before the op and are seen by autograd, so gradients have the inputs' dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_is_any_enabled = torch._C._is_any_autocast_enabled
_NAMES = ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1")
_KEYS = functools.reduce(
    torch._C.DispatchKeySet.__or__,
    [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{name}")) for name in _NAMES],
)
# Devices without autocast, or whose autocast has no key in `_KEYS`. Arrays on a GPU that PyTorch does not know are "meta"
# where another device is the accelerator of the process.
_LEFT_ALONE = ("meta", "mtia", "maia", "ipu")


class Rule(NamedTuple):
    """What an op does with its tensors under autocast. float64 stays as it is, and so do whole numbers."""

    dtype: Callable[[Sequence[torch.dtype], torch.dtype], torch.dtype]  # given the operands' dtypes and autocast's own
    # tensors[:operands] are cast. The others (a bias, a sink, weights of tokens) may stay float32 beside 16 bits.
    operands: int


def low(dtypes: Sequence[torch.dtype], autocast: torch.dtype) -> torch.dtype:
    """As matmul and scaled_dot_product_attention."""
    return autocast


def float32(dtypes: Sequence[torch.dtype], autocast: torch.dtype) -> torch.dtype:
    """As rms_norm, layer_norm and softmax."""
    return torch.float32


def widest(dtypes: Sequence[torch.dtype], autocast: torch.dtype) -> torch.dtype:
    """As arithmetic between tensors."""
    return functools.reduce(torch.promote_types, dtypes)


def device_of(tensors: Sequence[Any]) -> str | None:
    """The device type of a call, if autocast is on for it."""
    if not _is_any_enabled():
        return None
    x = next((x for x in tensors if isinstance(x, Tensor)), None)
    if x is None or x.device.type in _LEFT_ALONE:
        return None
    return x.device.type if torch.is_autocast_enabled(x.device.type) else None


def cast(rule: Rule, tensors: Sequence[Any], device: str) -> tuple[Any, ...]:
    """The tensors of a call in the dtypes of the rule. Arguments of other types pass; the op's check refuses them."""
    operands = [x for x in tensors[: rule.operands] if _floating(x)]
    if not operands:
        return tuple(tensors)
    wanted = rule.dtype([x.dtype for x in operands], torch.get_autocast_dtype(device))
    count = len(tensors[: rule.operands])  # `rule.operands` may be negative
    made = []
    for i, x in enumerate(tensors):
        fits = not _floating(x) or x.dtype == torch.float64 or (i >= count and x.dtype == torch.float32)
        made.append(x if fits else x.to(wanted))
    return tuple(made)


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def cast_operands(*tensors: Any, rule: Rule | None = None) -> tuple[Any, ...]:
    """Operands of a product that runs later, or in other code, cast as autocast would cast them now.

    rule: that of the op; None: every operand gets autocast's dtype.
    """
    device = device_of(tensors)
    return tensors if device is None else cast(rule or Rule(low, len(tensors)), tensors, device)


def autocast_dtype_of(x: Tensor) -> torch.dtype:
    """The dtype that `cast_operands` gives x."""
    device = device_of((x,))
    return x.dtype if device is None or x.dtype == torch.float64 else torch.get_autocast_dtype(device)


def disabled() -> Any:
    """A context in which autocast is off on every device: the dtype of a call is that of its tensors."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)

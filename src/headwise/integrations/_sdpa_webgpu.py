"""PyTorch's ``F.scaled_dot_product_attention`` on ``device="webgpu"``: Headwise's fused kernels, in both directions.

What they do not take (see `sdpa`) runs as PyTorch's own products and softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from headwise.integrations import sdpa

_func = torch.ops.aten.scaled_dot_product_attention.default
_library = torch.library.Library("aten", "IMPL")  # kept: what is registered goes when it goes


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    try:
        return sdpa.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except (NotImplementedError, TypeError, ValueError):
        # PyTorch's own, which also says what is wrong with a call.
        return _func._op_dk(
            DispatchKey.CompositeImplicitAutograd, query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip


def register(operators: dict[Any, Any], with_autograd: bool) -> None:
    """Into the table of what arrays run (which inference_mode looks into), and for the device, if PyTorch knows it."""
    operators[_func] = _attention
    if with_autograd:
        _library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")

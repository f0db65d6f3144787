"""Headwise as a flash attention implementation of PyTorch's own dispatcher.

`torch.nn.attention.activate_flash_attention_impl` replaces the kernels of two operators of ATen. PyTorch's function sends
there the calls that suit flash attention, those of compiled code and C++ too, so no function is patched. The operators and
what they return were read in PyTorch 2.13; unlike the function's, their causal mask is aligned to the bottom right.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

from headwise.integrations._edges import with_positive_scale
from headwise.ops.attention import attention, attention_backward

NAME = "headwise"
FORWARD, BACKWARD = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"


def register() -> None:
    """Make ``torch.nn.attention.activate_flash_attention_impl("headwise")`` known; it changes nothing yet."""
    import torch.nn.attention as pytorch

    if not hasattr(pytorch, "register_flash_attention_impl"):
        raise NotImplementedError(
            f"torch {torch.__version__} has no register_flash_attention_impl; headwise.integrations.sdpa.enable() needs none"
        )
    pytorch.register_flash_attention_impl(NAME, register_fn=Installed)


class Installed:
    """The kernels in place, until `remove`."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self.library: Library | None = Library("aten", "IMPL", dispatch_key)
        self.library.impl(FORWARD, _forward, dispatch_key)
        self.library.impl(BACKWARD, _backward, dispatch_key)

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:  # fmt: skip
    if return_debug_mask:
        raise NotImplementedError(
            f"{FORWARD}: return_debug_mask is not supported; headwise.attention_probs shows dropout"
        )
    query, scale = with_positive_scale(f"{FORWARD}: scale", query, scale)
    seed = query.new_zeros(2, dtype=torch.int64)  # what PyTorch keeps for the backward
    if dropout_p:
        seed.random_()
    out, lse = attention(
        query, key, value, causal=is_causal, scale=scale, dropout=dropout_p, dropout_seed=seed[:1] if dropout_p else None,
        return_lse=True,
    )  # fmt: skip
    offset = query.new_zeros((), dtype=torch.int64).view(torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], seed.view(torch.uint64), offset, query.new_empty(0)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if grad_out.stride()[-1] != 1:
        grad_out = grad_out.contiguous()
    seed = philox_seed.view(torch.int64)[:1] if dropout_p else None
    given = query
    query, factor = with_positive_scale(f"{BACKWARD}: scale", query, scale)
    dq, dk, dv = attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        causal=is_causal,
        scale=factor,
        dropout=dropout_p,
        dropout_seed=seed,
    )
    if query is not given:
        dq = -dq if scale else dq * 0.0
    return _lying_like(dq, query), _lying_like(dk, key), _lying_like(dv, value)


def _lying_like(grad: Tensor, x: Tensor) -> Tensor:
    """Compiled code counts on gradients that lie in memory as their inputs do."""
    wanted = torch.empty_like(x)
    return grad if grad.stride() == wanted.stride() else wanted.copy_(grad)

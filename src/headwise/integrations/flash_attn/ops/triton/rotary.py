"""``flash_attn.ops.triton.rotary``: the rotation without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.integrations.flash_attn.layers.rotary import apply_rotary_emb


@torch.no_grad()
def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, interleaved: bool = False, inplace: bool = False, conjugate: bool = False,
) -> Tensor:  # fmt: skip
    """`apply_rotary_emb` with its arguments in another order. conjugate: by the negative angles, which is the gradient."""
    out: Tensor = apply_rotary_emb(
        x, cos, -sin if conjugate else sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen
    )
    return out

"""What the package offers as a kernel of the Hugging Face Hub: the functions of flash_attn, and layers without state.

``make hub-kernel`` lays the package out for the library `kernels`; this module is its face. A layer is the ``forward`` that
``kernelize`` puts into modules of the same shape, so it has no constructor and reads what the module has.

>>> from kernels import get_local_kernel
>>> kernel = get_local_kernel(Path("dist/hub-kernel"))
>>> kernel.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.integrations.flash_attn import flash_attn_interface
from headwise.integrations.flash_attn.flash_attn_interface import *  # noqa: F403
from headwise.ops.glu import glu
from headwise.ops.linear_cross_entropy import linear_cross_entropy
from headwise.ops.rms_norm import rms_norm
from headwise.ops.rope import rope

__all__ = ["glu", "layers", "linear_cross_entropy", "rms_norm", "rope"]
__all__ += flash_attn_interface.__all__


class RMSNorm(nn.Module):
    """``weight · x / rms(x)``: the "RMSNorm" of Transformers, with ``weight`` and ``variance_epsilon``."""

    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        return rms_norm(hidden_states.to(wide), self.weight.to(wide), self.variance_epsilon)


class SwiGLU(nn.Module):
    """``down_proj(silu(gate_proj(x)) · up_proj(x))``: the "MLP" of Transformers, where its activation is silu."""

    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(glu(self.gate_proj(x), self.up_proj(x), "silu"))
        return out


class RotaryEmbedding(nn.Module):
    """The function "rotary_pos_emb" of Transformers: q, k ``(B, H, S, D)``, cos and sin ``(B, S, D)``, the angles twice."""

    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if unsqueeze_dim != 1:
            raise NotImplementedError(
                f"RotaryEmbedding: unsqueeze_dim is {unsqueeze_dim}; it needs to be 1: q and k (B, H, S, D)"
            )
        batch, tokens, columns = cos.shape
        wide = torch.promote_types(cos.dtype, torch.float32)
        cos, sin = (x[..., : columns // 2].reshape(batch * tokens, -1).to(wide) for x in (cos, sin))
        positions = None
        if batch > 1:
            positions = torch.arange(batch * tokens, device=q.device).view(batch, tokens)
        return rope((q, k), cos, sin, positions)


layers = SimpleNamespace(RMSNorm=RMSNorm, SwiGLU=SwiGLU, RotaryEmbedding=RotaryEmbedding)

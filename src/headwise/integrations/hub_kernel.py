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
        x, wide = hidden_states, torch.promote_types(hidden_states.dtype, self.weight.dtype)
        result = wide
        if type(self) is not RMSNorm and (x.dtype != self.weight.dtype or torch.is_autocast_enabled(x.device.type)):
            # Some give the dtype of x, some the wider one: the code of the module says it on no rows at all.
            with torch.no_grad():
                result = type(self).forward(self, x.new_empty(0, x.shape[-1])).dtype
        return rms_norm(x.to(wide), self.weight.to(wide), self.variance_epsilon).to(result)


class SwiGLU(nn.Module):
    """``down_proj(silu(gate_proj(x)) · up_proj(x))``: the "MLP" of Transformers, where its ``act_fn`` is silu."""

    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        activation = getattr(self, "act_fn", None)
        if not _is_silu(activation):
            raise NotImplementedError(
                f"SwiGLU: act_fn is {activation}; it needs to be silu: leave the layer out of the mapping, or call "
                "headwise.glu, which has other activations"
            )
        out: Tensor = self.down_proj(glu(self.gate_proj(x), self.up_proj(x), "silu"))
        return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_silu(activation: Any) -> bool:
    key = type(activation) if isinstance(activation, nn.Module) else activation
    if key not in _ARE_SILU:
        x = torch.linspace(-4, 4, 16, device="cpu")
        with torch.no_grad():
            _ARE_SILU[key] = callable(activation) and bool(torch.allclose(activation(x), nn.functional.silu(x)))
    return _ARE_SILU[key]


_ARE_SILU: dict[Any, bool] = {}  # by class, or function


class RotaryEmbedding(nn.Module):
    """The function "rotary_pos_emb" of Transformers: q, k ``(B, H, S, D)``, cos and sin ``(B, S, D)``, the angles twice."""

    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if unsqueeze_dim != 1:
            raise NotImplementedError(
                f"RotaryEmbedding: unsqueeze_dim is {unsqueeze_dim}; it needs to be 1: q and k (B, H, S, D)"
            )
        if cos.dim() != 3 or cos.shape[-1] > q.shape[-1] or cos.shape[-1] % 2:
            raise NotImplementedError(
                f"RotaryEmbedding: cos has shape {tuple(cos.shape)} beside q of {tuple(q.shape)}; it needs (B, S, D) with "
                "the angles twice: leave the function out of the mapping, or call headwise.rope"
            )
        result = q.dtype
        if type(self) is not RotaryEmbedding:
            _check_that_it_rotates_halves(self)
            if cos.dtype != q.dtype:
                with torch.no_grad():
                    result = type(self).forward(self, q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0])[0].dtype
        batch, tokens, columns = cos.shape
        wide = torch.promote_types(cos.dtype, torch.float32)
        cos, sin = (x[..., : columns // 2].reshape(batch * tokens, -1).to(wide) for x in (cos, sin))
        positions = None
        if batch > 1:
            positions = torch.arange(batch * tokens, device=q.device).view(batch, tokens)
        return rope((q.to(result), k.to(result)), cos, sin, positions)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check_that_it_rotates_halves(function: nn.Module) -> None:
    """The function that the layer stands in for, on a few numbers: some take each angle once, some rotate pairs."""
    kind = type(function)
    if kind not in _ROTATES_HALVES:
        q, k = (
            torch.linspace(-1, 1, 96, device="cpu").view(1, 2, 6, 8),
            torch.linspace(2, -1, 48, device="cpu").view(1, 1, 6, 8),
        )
        angles = torch.linspace(0.1, 3, 24, device="cpu").view(1, 6, 4)
        cos, sin = (torch.cat((x, x), -1) for x in (angles.cos(), angles.sin()))
        with torch.no_grad():
            try:
                own = kind.forward(function, q, k, cos, sin)
            except Exception:  # angles of another shape
                own = (q, k)
            ours = RotaryEmbedding()(q, k, cos, sin)
            _ROTATES_HALVES[kind] = all(
                x.shape == y.shape and torch.allclose(x, y, atol=1e-5) for x, y in zip(own, ours, strict=True)
            )
    if not _ROTATES_HALVES[kind]:
        raise NotImplementedError(
            f"RotaryEmbedding: {kind.__module__}.{kind.__qualname__} does not rotate halves by angles given twice: leave "
            "the function out of the mapping, or call headwise.rope"
        )


_ROTATES_HALVES: dict[type, bool] = {}


layers = SimpleNamespace(RMSNorm=RMSNorm, SwiGLU=SwiGLU, RotaryEmbedding=RotaryEmbedding)

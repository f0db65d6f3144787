"""Thin `torch.nn` modules over the ops: they hold the weights and the options, and call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.ops.cross_entropy import cross_entropy
from headwise.ops.embedding import embedding
from headwise.ops.rms_norm import rms_norm

__all__ = ["CrossEntropyLoss", "Embedding", "RMSNorm"]


class RMSNorm(nn.Module):
    """`headwise.rms_norm` over a last dimension of ``dim``, with its weight.

    elementwise_affine: False for no weight. weight_offset: added to the weight, which starts where their sum is one.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        *,
        elementwise_affine: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.weight_offset, self.backend = dim, eps, weight_offset, backend
        weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.weight: nn.Parameter | None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.weight_offset, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, weight_offset={self.weight_offset}"


class Embedding(nn.Module):
    """`headwise.embedding` with its table, (num_embeddings, embedding_dim); the padding row starts as zeros."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.backend = padding_idx, backend
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, self.padding_idx, backend=self.backend)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class CrossEntropyLoss(nn.Module):
    """`headwise.cross_entropy` with its options. Classes are the last dimension of the logits."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.softcap, self.backend = z_loss, softcap, backend

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(
            logits,
            targets,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            self.z_loss,
            self.softcap,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, softcap={self.softcap}"
        )

"""A table of embeddings as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.ops.embedding import embedding


class Embedding(nn.Module):
    """`headwise.embedding` with its table, (num_embeddings, embedding_dim); the padding row starts as zeros.

    >>> nn.Embedding(100, 16)(torch.tensor([[1, 2, 1]])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, *, backend: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
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

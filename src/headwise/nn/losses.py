"""Losses as modules: they hold the options, and call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headwise.ops.cross_entropy import cross_entropy
from headwise.ops.linear_cross_entropy import linear_cross_entropy


class _Loss(nn.Module):
    """The options that both losses have."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0,
        softcap: float | None = None, *, backend: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.softcap, self.backend = z_loss, softcap, backend

    def options(self) -> dict[str, Any]:
        return {
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
        }

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


class CrossEntropyLoss(_Loss):
    """`headwise.cross_entropy` with its options. Classes are the last dimension of the logits.

    >>> loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    >>> loss(torch.randn(4, 100), torch.randint(100, (4,))).shape
    torch.Size([])
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, **self.options(), backend=self.backend)


class LinearCrossEntropyLoss(_Loss):
    """`headwise.linear_cross_entropy` with its options: the loss of ``hidden @ weight.T + bias``, without the logits.

    The weight, (V, H), is given to each call: it is the model's head, often its table of embeddings.

    >>> loss, head = nn.LinearCrossEntropyLoss(), torch.randn(100, 64)
    >>> loss(torch.randn(4, 64), head, torch.randint(100, (4,))).shape
    torch.Size([])
    """

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor:
        loss = linear_cross_entropy(
            hidden, weight, targets, **self.options(), bias=bias, token_weights=token_weights, backend=self.backend
        )
        assert isinstance(loss, Tensor)
        return loss

"""The demo's model: a byte-level `headwise.nn.TransformerLM` in the style of Gemma, over packed documents.

Grouped heads with normalised queries and keys; rotary positions that restart in every document; sliding-window layers
alternating with global ones; RMSNorm with gain 1 + weight, where the weight starts at zero; SwiGLU; tied embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from headwise.demo.packing import Batch
from headwise.distributed import sum_gradients
from headwise.nn import TransformerConfig, TransformerLM

BYTES = 256
HEAD_DIM = 32


@dataclass(frozen=True)
class Shape:
    """The hyperparameters that define the weights and the computation."""

    layers: int = 4
    width: int = 128
    window: int = 64  # keys that a query of a window layer sees, its own included

    def __post_init__(self) -> None:
        for name in ("layers", "width", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it needs to be at least 1")
        if self.width % (2 * HEAD_DIM):
            raise ValueError(
                f"width is {self.width}; it needs to be a multiple of {2 * HEAD_DIM}: "
                f"heads of {HEAD_DIM}, two query heads for each key head"
            )

    @property
    def query_heads(self) -> int:
        return self.width // HEAD_DIM

    @property
    def key_heads(self) -> int:
        return self.query_heads // 2

    def window_of(self, layer: int) -> int | None:
        """Window layers and global layers alternate; the first has a window."""
        return self.window if layer % 2 == 0 else None

    def config(self) -> TransformerConfig:
        return TransformerConfig(
            vocabulary=BYTES, dim=self.width, layers=self.layers, heads=self.query_heads, key_heads=self.key_heads,
            head_dim=HEAD_DIM, hidden=3 * self.width, windows=(self.window, None), qk_norm=True, norm_offset=1.0,
            positions=4096, embedding_scale=math.sqrt(self.width),
        )  # fmt: skip


def make_model(shape: Shape, backend: str, seed: int | None) -> TransformerLM:
    """The same seed gives the same weights, whatever the backend and the device. None: any, to load others into."""
    model = TransformerLM(shape.config(), backend=backend)
    if seed is not None:
        model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


def parameter_count(model: TransformerLM) -> int:
    return sum(p.numel() for p in model.parameters())


class Computation(Protocol):
    """Who computes the loss of a model's weights: Headwise, or plain PyTorch."""

    @property
    def name(self) -> str: ...

    @property
    def backend(self) -> str:
        """Of the model's modules."""
        ...

    def loss(self, model: TransformerLM, batch: Batch) -> Tensor:
        """The mean over the targets that are not IGNORED."""
        ...

    def finish_gradients(self, model: TransformerLM) -> None:
        """After a backward: what is missing in the gradients of the weights."""
        ...


@dataclass(frozen=True)
class Headwise:
    """The model as it is."""

    backend: str

    @property
    def name(self) -> str:
        return f"Headwise ({self.backend})"

    def loss(self, model: TransformerLM, batch: Batch) -> Tensor:
        loss: Tensor = model(batch.ids, batch.targets, packing=batch.packing)
        return loss

    def finish_gradients(self, model: TransformerLM) -> None:
        pass


@dataclass(frozen=True)
class ContextParallel(Headwise):
    """The same, over the ranks of a group: the model is one that `headwise.distributed.context_parallel` has sharded."""

    group: ProcessGroup

    @property
    def name(self) -> str:
        return f"Headwise ({self.backend}, {self.group.size()} ranks)"

    def finish_gradients(self, model: TransformerLM) -> None:
        sum_gradients(model, self.group)

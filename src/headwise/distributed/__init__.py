"""Attention over a sequence, and the loss over a vocabulary, that lie on many devices (docs/distributed.md)."""

from headwise.distributed.attention import context_parallel_attention
from headwise.distributed.decode import context_parallel_decode
from headwise.distributed.groups import RankLostError
from headwise.distributed.losses import vocabulary_parallel_cross_entropy, vocabulary_parallel_linear_cross_entropy
from headwise.distributed.models import context_parallel, sum_gradients
from headwise.distributed.shards import shard, shard_positions, unshard

__all__ = [
    "RankLostError",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_decode",
    "shard",
    "shard_positions",
    "sum_gradients",
    "unshard",
    "vocabulary_parallel_cross_entropy",
    "vocabulary_parallel_linear_cross_entropy",
]  # fmt: skip

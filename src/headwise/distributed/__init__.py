"""Attention over a sequence that lies on many devices, on PyTorch's process groups (docs/distributed.md)."""

from headwise.distributed.attention import context_parallel_attention
from headwise.distributed.decode import context_parallel_decode
from headwise.distributed.shards import shard, shard_positions, unshard

__all__ = ["context_parallel_attention", "context_parallel_decode", "shard", "shard_positions", "unshard"]

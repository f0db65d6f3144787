"""Attention and transformer-training kernels that mean the same thing on every processor."""

from headwise.backends.registry import use_backend
from headwise.ops._explain import explain
from headwise.ops.attention import (
    attention,
    attention_backward,
    attention_decode,
    attention_probs,
    attention_probs_backward,
    attention_varlen,
    attention_varlen_backward,
    merge_attention,
    merge_attention_backward,
)
from headwise.ops.cross_entropy import cross_entropy, cross_entropy_forward_backward
from headwise.ops.embedding import embedding, embedding_backward
from headwise.ops.rms_norm import rms_norm, rms_norm_backward
from headwise.ops.softmax import softmax, softmax_backward
from headwise.ops.transpose import transpose

__version__ = "0.1.0.dev0"

__all__ = [
    "attention",
    "attention_backward",
    "attention_decode",
    "attention_probs",
    "attention_probs_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "cross_entropy",
    "cross_entropy_forward_backward",
    "embedding",
    "embedding_backward",
    "explain",
    "merge_attention",
    "merge_attention_backward",
    "rms_norm",
    "rms_norm_backward",
    "softmax",
    "softmax_backward",
    "transpose",
    "use_backend",
]

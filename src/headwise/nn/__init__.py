"""`torch.nn` modules over the ops: norms, losses, rotary positions, attention with a cache, a transformer."""

from headwise.nn.attention import Attention
from headwise.nn.cache import KVCache, PagedKVCache
from headwise.nn.embedding import Embedding
from headwise.nn.glu import GLU, GatedMLP
from headwise.nn.losses import CrossEntropyLoss, LinearCrossEntropyLoss
from headwise.nn.norms import LayerNorm, RMSNorm
from headwise.nn.packing import Packing
from headwise.nn.rotary import LinearScaling, Llama3Scaling, RotaryEmbedding, YarnScaling
from headwise.nn.transformer import TransformerBlock, TransformerConfig, TransformerLM

__all__ = [
    "GLU",
    "Attention",
    "CrossEntropyLoss",
    "Embedding",
    "GatedMLP",
    "KVCache",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LinearScaling",
    "Llama3Scaling",
    "Packing",
    "PagedKVCache",
    "RMSNorm",
    "RotaryEmbedding",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerLM",
    "YarnScaling",
]

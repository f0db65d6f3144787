"""Attention and transformer-training kernels that mean the same thing on every processor."""

from headwise.backends.registry import use_backend
from headwise.ops.softmax import softmax, softmax_backward

__version__ = "0.1.0.dev0"

__all__ = ["softmax", "softmax_backward", "use_backend"]

"""Attention and transformer-training kernels that mean the same thing on every processor."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from headwise.backends.registry import Unsupported, use_backend
from headwise.ops._explain import explain
from headwise.ops._warm import warm
from headwise.ops.add_rms_norm import add_rms_norm, add_rms_norm_backward
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
from headwise.ops.glu import glu, glu_backward
from headwise.ops.layer_norm import layer_norm, layer_norm_backward
from headwise.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_forward_backward
from headwise.ops.rms_norm import rms_norm, rms_norm_backward
from headwise.ops.rope import rope, rope_backward
from headwise.ops.softmax import softmax, softmax_backward
from headwise.ops.transpose import transpose

if _TYPE_CHECKING:
    from headwise import distributed as distributed
    from headwise import nn as nn
    from headwise import reference as reference
    from headwise import testing as testing
    from headwise import webgpu as webgpu

__version__ = "0.1.0"

__all__ = [
    "Unsupported",
    "add_rms_norm",
    "add_rms_norm_backward",
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
    "glu",
    "glu_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear_cross_entropy",
    "linear_cross_entropy_forward_backward",
    "merge_attention",
    "merge_attention_backward",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_backward",
    "softmax",
    "softmax_backward",
    "transpose",
    "use_backend",
    "warm",
]

# Imported when they are first used: `import headwise` imports torch alone.
_LATE = ("distributed", "nn", "reference", "testing", "webgpu")


def __getattr__(name: str) -> _Any:
    if name not in _LATE:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    try:
        return _import_module(f"headwise.{name}")
    except ModuleNotFoundError as error:
        raise ImportError(f"headwise.{name} needs the package {error.name}: pip install 'headwise[{name}]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})

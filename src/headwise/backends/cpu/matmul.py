"""Linear layers in float32 by oneDNN, which PyTorch otherwise keeps for 16 bits.

PyTorch multiplies float32 matrices by MKL, which on processors of AMD takes its AVX2 kernels: 59 to 108 GFLOP/s on one
core of an AMD EPYC, where oneDNN, which is in the same build, has 184 to 235. The operator is the one that torch.compile
calls for a linear layer: private, seen in PyTorch 2.13. Where it is missing, `torch.nn.functional.linear` does the work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` of matrices of one dtype."""
    call = _onednn()
    if call is None or x.dtype != torch.float32 or 0 in (*x.shape, *weight.shape):
        return F.linear(x, weight, bias)
    return call(x, weight, bias, "none", [], "")


@functools.cache
def _onednn() -> Callable[..., Any] | None:
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


@functools.cache
def fast_in_bfloat16() -> bool:
    """Does PyTorch multiply bfloat16 matrices by oneDNN, whose sums are float32?"""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())

"""PyTorch's matmul (cuBLAS, hipBLASLt) as launchers use it: sums in float32, and a float32 result of 16-bit inputs.

With a 16-bit result, cuBLAS may split a long sum and add its parts in 16 bits (PyTorch allows it by default). With a float32
one it cannot, and the caller rounds once. float32 inputs use TF32 only where the user turned it on in PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out (M, N) = a (M, K) @ b (K, N)."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # Triton's interpreter: PyTorch has no such product on the CPU
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def matmul_added(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), out=out)

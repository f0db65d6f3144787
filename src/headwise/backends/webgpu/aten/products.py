"""Matrix products: ``wgsl/matmul.wgsl``, sums in float32."""

from __future__ import annotations

from typing import Any, cast

import torch

from headwise.backends.webgpu import copies, matmul
from headwise.backends.webgpu.array import OPERATORS, Array
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _checked(name: str, a: Array, b: Array) -> None:
    if not isinstance(a, Array) or not isinstance(b, Array):
        raise RuntimeError(f"{name}: expected all tensors to be on webgpu, but found at least one elsewhere")
    if a.dtype != b.dtype:
        raise RuntimeError(f"{name}: expected mat1 and mat2 to have the same dtype, but got: {a.dtype} != {b.dtype}")
    if a.dtype not in _FLOATS:
        raise NotImplementedError(f"headwise: {name} of {a.dtype} on WebGPU; floats are, or use x.cpu()")
    if a.dim() != b.dim() or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise RuntimeError(f"{name}: mat1 and mat2 shapes cannot be multiplied ({tuple(a.shape)} and {tuple(b.shape)})")


def _product(device: Device, a: Region, b: Region, *bias: Region) -> Region:
    if a.shape[-1] == 0:
        return copies.full(device, (*a.shape[:-1], b.shape[-1]), 0.0, a.dtype)
    return matmul.matmul(device, a, b, a.dtype, *(copies.contiguous(device, x) for x in bias))


def _mm(a: Array, b: Array) -> Array:
    _checked("mm", a, b)
    return cast(Array, replayed(_product, [a, b]))


def _bmm(a: Array, b: Array) -> Array:
    _checked("bmm", a, b)
    return cast(Array, replayed(_product, [a, b]))


def _added_product(product: Any) -> Any:
    def run(x: Array, a: Array, b: Array, *, beta: float = 1, alpha: float = 1) -> Any:
        _checked("addmm", a, b)
        if alpha == 1 and beta == 1 and x.dim() == 1 and a.dim() == 2 and a.shape[1] and x.dtype == a.dtype and x.shape[0] == b.shape[1]:
            return replayed(_product, [a, b, x])
        # In float32: rounded once, as PyTorch does.
        wide = [y.float() for y in (a, b)] if a.dtype != torch.float32 else [a, b]
        made = product(*wide)
        if alpha != 1:
            made = made * alpha
        if beta != 0:
            made = made + (x.float() if beta == 1 else x.float() * beta)
        return made.to(a.dtype)

    return run


def _mv(a: Array, x: Array) -> Any:
    return _mm(a, cast(Array, x.unsqueeze(1))).squeeze(1)


def _dot(a: Array, b: Array) -> Any:
    if a.dim() != 1 or a.shape != b.shape:
        raise RuntimeError(f"inconsistent tensor size, expected tensors of one dim and size, but got {tuple(a.shape)} and {tuple(b.shape)}")
    return _mm(cast(Array, a.unsqueeze(0)), cast(Array, b.unsqueeze(1))).view(())


def _in_place(run: Any) -> Any:
    return lambda x, a, b, *, beta=1, alpha=1: x.copy_(run(x, a, b, beta=beta, alpha=alpha))


def _flat(run: Any) -> Any:
    return lambda x, a, b, *, beta=1, alpha=1: run(x, a.transpose(0, 1).reshape(a.shape[1], -1), b.reshape(-1, b.shape[2]), beta=beta, alpha=alpha)


_addmm, _baddbmm = _added_product(_mm), _added_product(_bmm)

OPERATORS |= {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _addmm,
    aten.addmm_.default: _in_place(_addmm),
    aten.baddbmm.default: _baddbmm,
    aten.baddbmm_.default: _in_place(_baddbmm),
    aten.addbmm.default: _flat(_addmm),
    aten.addmv.default: lambda x, a, b, *, beta=1, alpha=1: (
        _mv(a, b) * alpha + x * beta if beta else (_mv(a, b) * alpha).expand(a.shape[0])
    ),
    aten.addr.default: lambda x, a, b, *, beta=1, alpha=1: (
        a.unsqueeze(1) * b * alpha + x * beta if beta else (a.unsqueeze(1) * b * alpha)
    ),
    aten.mv.default: _mv,
    aten.dot.default: _dot,
    aten.vdot.default: _dot,
}  # fmt: skip

"""Average pooling, and the gradients of pooling, interpolation and padding.

All of these are linear and treat one spatial dim after the other: each dim has a matrix (out, in), which PyTorch's operator
gives when it is run on the CPU on the unit vectors. The gradient is a product with the transposed matrices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from headwise.backends.webgpu.array import OPERATORS, Array, uploaded

aten = torch.ops.aten

# In one spatial dim: x (1, channels, size) to (1, channels, size of the result), as an operator of x and numbers.
Line = Callable[..., torch.Tensor]


@functools.lru_cache(maxsize=256)
def _matrix(line: Line, size: int, *options: Any) -> torch.Tensor:
    """(in, out) on the CPU: its row i is what becomes of unit vector i."""
    return line(torch.eye(size, dtype=torch.float64).unsqueeze(0), *options)[0].float()


def _back(grad: Array, line: Line, sizes: Sequence[int], options: Sequence[tuple[Any, ...]]) -> Any:
    """The gradient of x (…, *sizes) from that of the result; options of `line` for each spatial dim."""
    dims, dtype = len(sizes), grad.dtype
    made: Any = grad.float()
    for d, (size, given) in enumerate(zip(sizes, options, strict=True)):
        dim = made.dim() - dims + d
        matrix = uploaded(_matrix(line, size, *given), constant=True).t()
        made = (made.transpose(dim, -1) @ matrix).transpose(dim, -1)
    return made.contiguous().to(dtype)


# --------------------------------------------------------------------------------------------------------------- pooling


def _pairs(*given: Any) -> list[tuple[int, ...]]:
    return [tuple(x) if len(x) == 2 else tuple(x) * 2 for x in given]


def _average(x: torch.Tensor, kernel: int, stride: int, pad: int, ceil: bool, with_padding: bool, whole: bool) -> Any:
    """whole: the sum, not the mean."""
    made = aten.avg_pool2d(
        x.unsqueeze(-1), (kernel, 1), (stride, 1), (pad, 0), ceil, with_padding, 1 if whole else None
    )
    return made.squeeze(-1)


def _avg_pool2d(
    x: Array, kernel: Any, stride: Any = (), pad: Any = 0, ceil: bool = False, with_padding: bool = True,
    divisor: int | None = None,
) -> Any:  # fmt: skip
    (kernel, stride, pad) = _pairs(kernel, stride or kernel, [pad] if isinstance(pad, int) else pad)
    # PyTorch itself says what is wrong with the sizes, and what the result's are.
    shape = aten.avg_pool2d(torch.empty(x.shape, device="meta"), kernel, stride, pad, ceil, with_padding, divisor).shape
    if not x.is_floating_point():
        raise NotImplementedError(f"headwise: avg_pool2d of {x.dtype} on WebGPU; floats are, or use x.cpu()")
    sizes = tuple(x.shape[-2:])
    # Zeros around, up to the end of the last window, and a view of all windows.
    ends = [(n - 1) * s + k for n, s, k in zip(shape[-2:], stride, kernel, strict=True)]
    after = [max(0, end - size - p) for end, size, p in zip(ends, sizes, pad, strict=True)]
    padded: Any = x
    if any(pad) or any(after):
        padded = torch.nn.functional.pad(cast(Any, x), (pad[1], after[1], pad[0], after[0]))
    windows = padded.unfold(-2, kernel[0], stride[0]).unfold(-2, kernel[1], stride[1])
    windows = windows[..., : shape[-2], : shape[-1], :, :]
    total = windows.float().sum((-2, -1))
    counts = [
        _counts(size, k, s, p, ceil, with_padding) for size, k, s, p in zip(sizes, kernel, stride, pad, strict=True)
    ]
    by: Any = divisor if divisor is not None else uploaded(torch.outer(*counts), constant=True)
    return (total / by).to(x.dtype)


@functools.lru_cache(maxsize=256)
def _counts(size: int, kernel: int, stride: int, pad: int, ceil: bool, with_padding: bool) -> torch.Tensor:
    """What the elements of each window are divided by."""
    one = torch.ones(1, 1, size, dtype=torch.float64)
    summed, averaged = (_average(one, kernel, stride, pad, ceil, with_padding, whole) for whole in (True, False))
    return cast(torch.Tensor, (summed / averaged).flatten().round().float())


def _avg_pool2d_backward(
    grad: Array, x: Array, kernel: Any, stride: Any, pad: Any, ceil: bool, with_padding: bool, divisor: int | None
) -> Any:
    (kernel, stride, pad) = _pairs(kernel, stride or kernel, pad)
    options = [(k, s, p, ceil, with_padding, divisor is not None) for k, s, p in zip(kernel, stride, pad, strict=True)]
    made = _back(grad, _average, tuple(x.shape[-2:]), options)
    return made if divisor is None else made / divisor


def _adaptive(x: torch.Tensor, size: int) -> torch.Tensor:
    return cast(torch.Tensor, aten._adaptive_avg_pool2d(x.unsqueeze(-1), (size, 1)).squeeze(-1))


def _adaptive_backward(grad: Array, x: Array) -> Any:
    return _back(grad, _adaptive, tuple(x.shape[-2:]), [(size,) for size in grad.shape[-2:]])


# --------------------------------------------------------------------------------------------- interpolation and padding


def _interpolation(name: str, dims: int, corners: bool) -> tuple[Line, Callable[..., Any], Callable[..., Any]]:
    func = getattr(aten, name).default
    # Two columns alike, where there are any: PyTorch takes a tensor of one for one with its channels last (seen in 2.13).
    rest = (2,) * (dims - 1)

    def line(x: torch.Tensor, size: int, align: tuple[bool, ...], scale: float | None) -> Any:
        columns = x.view(*x.shape, *[1] * len(rest)).expand(*x.shape, *rest).contiguous()
        made = func(columns, (size, *rest), *align, scale, *[None] * len(rest))
        return made[..., 0] if rest else made

    def parted(given: Sequence[Any]) -> tuple[tuple[bool, ...], list[float | None]]:
        align, scales = ((given[0],), list(given[1:])) if corners else ((), list(given))
        return align, scales + [None] * (dims - len(scales))

    def backward(grad: Array, size: Any, shape: Any, *given: Any, **named: Any) -> Any:
        align, scales = parted((*given, *named.values()))
        options = [(n, align, s) for n, s in zip(size, scales, strict=True)]
        return _back(grad, line, tuple(shape[2:]), options)

    def forward(x: Array, size: Any, *given: Any, **named: Any) -> Any:
        align, scales = parted((*given, *named.values()))
        made: Any = x.float()
        for d, (n, s) in enumerate(zip(size, scales, strict=True)):
            dim = 2 + d
            matrix = uploaded(_matrix(line, x.shape[dim], n, align, s), constant=True)
            made = (made.transpose(dim, -1) @ matrix).transpose(dim, -1)
        return made.contiguous().to(x.dtype)

    return line, forward, backward


def _replicate(x: torch.Tensor, before: int, after: int) -> Any:
    return aten.replication_pad1d(x, (before, after))


def _replicated_backward(grad: Array, x: Array, pad: Any) -> Any:
    pairs = [tuple(pad[i : i + 2]) for i in range(0, len(pad), 2)][::-1]  # the last dim comes first
    return _back(grad, _replicate, tuple(x.shape[-len(pairs) :]), pairs)


def _max_pool_backward(
    grad: Any, x: Any, size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, indices: Any
) -> Any:
    """PyTorch's decomposition refuses where deterministic algorithms are asked for; sums have a fixed order here."""
    flat = torch.zeros_like(x, memory_format=torch.contiguous_format).flatten(-2)
    return flat.scatter_add(-1, indices.flatten(-2), grad.flatten(-2)).view(x.shape)


OPERATORS |= {
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    aten.avg_pool2d.default: _avg_pool2d,
    aten.avg_pool2d_backward.default: _avg_pool2d_backward,
    aten._adaptive_avg_pool2d_backward.default: _adaptive_backward,
    aten.replication_pad1d_backward.default: _replicated_backward,
    aten.replication_pad2d_backward.default: _replicated_backward,
}
for _name, _dims, _corners in (
    ("upsample_nearest1d", 1, False), ("upsample_nearest2d", 2, False), ("_upsample_nearest_exact1d", 1, False),
    ("_upsample_nearest_exact2d", 2, False), ("upsample_linear1d", 1, True), ("upsample_bilinear2d", 2, True),
    ("upsample_bicubic2d", 2, True), ("_upsample_bilinear2d_aa", 2, True), ("_upsample_bicubic2d_aa", 2, True),
):  # fmt: skip
    _, _forward, _backward = _interpolation(_name, _dims, _corners)
    OPERATORS[getattr(aten, f"{_name}_backward").default] = _backward
    if _name.endswith("_aa"):  # the others are taken apart by PyTorch
        OPERATORS[getattr(aten, _name).default] = _forward

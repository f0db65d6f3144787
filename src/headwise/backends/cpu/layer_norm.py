"""Layer normalisation on the CPU: PyTorch's own kernels where they are sound, cache-sized blocks of rows where not.

PyTorch's kernels read a row once, with Welford's statistics, but then compute ``x · rstd - mean · rstd``: the difference of
two large numbers where the mean is many deviations away from zero, or the row nearly constant. Such rows are computed here,
from ``x - mean``. For 16 bits they also add up dweight in 16 bits, and keep statistics in the dtype of the weight: so
backward hands them float32, block by block, and forward float32 weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.backends.cpu.memory import ALWAYS_FRESH, huge_pages
from headwise.backends.cpu.row_blocks import BLOCK, row_blocks, scratch_for, working_copy
from headwise.backends.cpu.threads import Shared, in_threads, one_thread
from headwise.layout import statistics_dtype

if TYPE_CHECKING:
    from headwise.ops.layer_norm import LayerNorm, LayerNormBackward

# Deviations between zero and the mean of a row from which on PyTorch's formula is not used: it loses three bits there.
FAR = 8.0
_ELEMENTS = BLOCK // 2


def layer_norm_forward(args: LayerNorm) -> tuple[Tensor, Tensor]:
    x, shape = args.x, args.x.shape[-1:]
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype), torch.zeros((*x.shape[:-1], 3), dtype=statistics_dtype(x.dtype))
    weight, bias = _parameters(args)
    if x.nbytes < ALWAYS_FRESH:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, args.eps)
    else:
        y, mean, rstd = _in_our_memory(x, weight, bias, args.eps)
    some_far = _some_far(mean, rstd)
    if not (some_far or args.with_statistics):
        return y, mean  # nobody reads it
    statistics = torch.cat((mean, torch.zeros_like(mean), rstd), -1)  # from three of (..., 1)
    if some_far:
        far = _far(mean, rstd).view(-1)
        y_rows, of_rows = y.view(-1, *shape), statistics.view(-1, 3)
        (scratch,) = scratch_for(x, 1)
        for rows, (block,) in row_blocks(x):
            if far[rows].any():
                n, of_rows[rows] = _normalised(working_copy(block, scratch), args.eps)
                y_rows[rows] = torch.addcmul(bias, n, weight, out=n)
    return y, statistics


def _in_our_memory(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """What PyTorch's kernel gives, copied block by block: faster than the fresh pages of a large result of its own."""
    shape = x.shape[-1:]
    results = [
        huge_pages(torch.empty(x.shape, dtype=x.dtype)),
        *(torch.empty((*x.shape[:-1], 1), dtype=weight.dtype) for _ in range(2)),
    ]
    of_rows = [result.view(-1, result.shape[-1]) for result in results]
    blocks = Shared(row_blocks(x, elements=_ELEMENTS))

    def work(thread: int, threads: int) -> None:
        for rows, (block,) in blocks:
            made = torch.native_layer_norm(block, shape, weight, bias, eps)
            for result, of_block in zip(of_rows, made, strict=True):
                result[rows] = of_block

    in_threads(work, most=-(-x.numel() // _ELEMENTS))
    return results[0], results[1], results[2]


def layer_norm_backward(args: LayerNormBackward) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, width = args.x, args.x.shape[-1]
    weight, bias = _parameters(args)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype), _total(args.weight, []), _total(args.bias, [])
    known = None
    if args.statistics is not None:
        mean, _, rstd = args.statistics.reshape(-1, 3).T.contiguous().unsqueeze(-1)
        known = mean, rstd

    def of_block(rows: slice, x: Tensor, grad: Tensor) -> _Gradients:
        if known is None:
            _, mean, rstd = torch.native_layer_norm(x, (width,), weight, bias, args.eps)
        else:
            mean, rstd = known[0][rows], known[1][rows]
        if _some_far(mean, rstd):
            return _careful_gradients(grad, x, weight, args.eps)
        with one_thread():  # it adds up dweight in as many parts as it has threads
            return _Gradients(
                *torch.ops.aten.native_layer_norm_backward(
                    grad, x, (width,), mean, rstd, weight, bias, [True, True, True]
                )
            )

    if x.numel() <= _ELEMENTS and x.dtype == weight.dtype:  # nothing to copy
        dx, *sums = of_block(slice(None), x.reshape(-1, width), args.grad.reshape(-1, width))
        return dx.view(x.shape), _total(args.weight, sums[:1]), _total(args.bias, sums[1:])
    dx = huge_pages(torch.empty(x.shape, dtype=x.dtype))
    dx_rows = dx.view(-1, width)
    found: dict[int, tuple[Tensor, Tensor]] = {}  # dweight and dbias of each block

    blocks = Shared(enumerate(row_blocks(x, args.grad, elements=_ELEMENTS)))

    def work(thread: int, threads: int) -> None:
        x_copy, grad_copy = scratch_for(x, 2, _ELEMENTS)
        for i, (rows, (x_block, grad_block)) in blocks:
            of_rows = of_block(rows, working_copy(x_block, x_copy), working_copy(grad_block, grad_copy))
            dx_rows[rows] = of_rows.x
            found[i] = of_rows.weight, of_rows.bias

    in_threads(work, most=-(-x.numel() // _ELEMENTS))
    of_blocks = [found[i] for i in range(len(found))]
    return dx, _total(args.weight, [s[0] for s in of_blocks]), _total(args.bias, [s[1] for s in of_blocks])


class _Gradients(NamedTuple):
    """Of a block of rows."""

    x: Tensor
    weight: Tensor
    bias: Tensor


def _far(mean: Tensor, rstd: Tensor) -> Tensor:
    """Is the mean far from zero? Also where it is NaN."""
    return ~((mean * rstd).abs() < FAR)


def _some_far(mean: Tensor, rstd: Tensor) -> bool:
    return not float(torch.linalg.vector_norm(mean * rstd, torch.inf)) < FAR


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(x - mean) · rstd`` of a block (rows, D), and (mean, rest of the mean, rstd) of each row."""
    pivot = x.mean(-1, keepdim=True)
    deviation = x - pivot
    rest = deviation.mean(-1, keepdim=True)  # what the rounding of the mean left
    deviation -= rest
    rstd = deviation.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return deviation.mul_(rstd), torch.cat((pivot, rest, rstd), -1)


def _careful_gradients(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> _Gradients:
    n, statistics = _normalised(x, eps)
    h = grad * weight
    dx = (h - h.mean(-1, keepdim=True)).addcmul_(n, (h * n).mean(-1, keepdim=True), value=-1)
    return _Gradients(dx.mul_(statistics[:, 2:]), (grad * n).sum(0), grad.sum(0))


def _total(like: Tensor | None, sums: list[Tensor]) -> Tensor | None:
    """Blocks are summed in float32, their sums in float64: it costs nothing and adds no rounding of its own."""
    if like is None:
        return None
    if len(sums) == 1:
        return sums[0].to(like.dtype)
    total = torch.zeros(like.shape, dtype=torch.float64)
    for of_block in sums:
        total += of_block
    return total.to(like.dtype)


def _parameters(args: LayerNorm | LayerNormBackward) -> tuple[Tensor, Tensor]:
    """Weight and bias in the dtype of the statistics."""
    width, dtype = args.x.shape[-1], statistics_dtype(args.x.dtype)
    weight = torch.ones(width, dtype=dtype) if args.weight is None else args.weight.to(dtype)
    bias = torch.zeros(width, dtype=dtype) if args.bias is None else args.bias.to(dtype)
    return weight, bias

"""Layer normalisation on the CPU: PyTorch's own kernels where they are sound, cache-sized blocks of rows where not.

PyTorch's kernels read a row once, with Welford's statistics, but then compute ``x · rstd - mean · rstd``: the difference of
two large numbers where the mean is many deviations away from zero, or the row nearly constant. Such rows are computed here,
from ``x - mean``. For 16 bits they also add up dweight in 16 bits, and keep statistics in the dtype of the weight: so they
are given float32 weights, and the sums are made from float32 copies, block by block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.backends.cpu.memory import huge_pages, would_be_fresh
from headwise.backends.cpu.row_blocks import BLOCK, row_blocks, scratch_for, sharing, working_copy
from headwise.backends.cpu.threads import Shared, in_threads
from headwise.layout import statistics_dtype

if TYPE_CHECKING:
    from headwise.ops.layer_norm import LayerNorm, LayerNormBackward

# Deviations between zero and the mean of a row from which on PyTorch's formula is not used: it loses three bits there.
FAR = 8.0
_ELEMENTS = BLOCK // 2
# Rows that one thread may add up in float32, one after the other. The errors of T threads' parts average: T² times as many.
_ROWS = 2048
_aten = torch.ops.aten


def layer_norm_forward(args: LayerNorm) -> tuple[Tensor, Tensor]:
    x, shape = args.x, args.x.shape[-1:]
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype), torch.zeros((*x.shape[:-1], 3), dtype=statistics_dtype(x.dtype))
    weight, bias = _parameters(args)
    if would_be_fresh(x.shape, x.dtype):
        y, mean, rstd = _in_our_memory(x, weight, bias, args.eps)
    else:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, args.eps)
    some_far = _some_far(mean, rstd)
    if not (some_far or args.with_statistics):
        return y, mean  # nobody reads it
    statistics = torch.zeros((*x.shape[:-1], 3), dtype=mean.dtype)
    for column, of_rows in ((0, mean), (2, rstd)):
        statistics[..., column] = of_rows.squeeze(-1)
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
    x = args.x
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype), _total(args.weight, []), _total(args.bias, [])
    weight, bias = _parameters(args)
    mean, rstd = _statistics(args, weight, bias)
    rows = _Rows(args.grad, x, mean, rstd, weight, bias, args.eps)
    if _some_far(mean, rstd) or not (x.is_contiguous() and args.grad.is_contiguous()):
        dx, sums = _block_by_block(rows)
    else:
        dx, sums = _whole(rows)
    return dx, _total(args.weight, [s.weight for s in sums]), _total(args.bias, [s.bias for s in sums])


class _Rows(NamedTuple):
    """What the gradients of all rows are made from."""

    grad: Tensor
    x: Tensor
    mean: Tensor  # (rows, 1), as rstd
    rstd: Tensor
    weight: Tensor
    bias: Tensor
    eps: float

    def part(self, at: slice, x: Tensor, grad: Tensor) -> _Rows:
        return self._replace(grad=grad, x=x, mean=self.mean[at], rstd=self.rstd[at])


class _Sums(NamedTuple):
    """dweight and dbias of some rows."""

    weight: Tensor
    bias: Tensor


def _statistics(args: LayerNormBackward, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and rstd of each row, as PyTorch's kernel has them."""
    if args.statistics is not None:
        mean, _, rstd = args.statistics.unbind(-1)
        return mean.reshape(-1, 1).contiguous(), rstd.reshape(-1, 1).contiguous()
    (elements, most), found = sharing(args.x, _ELEMENTS), dict[int, tuple[Tensor, ...]]()
    blocks = Shared(enumerate(row_blocks(args.x, elements=elements)))

    def work(thread: int, threads: int) -> None:
        for i, (_, (block,)) in blocks:
            found[i] = torch.native_layer_norm(block, weight.shape, weight, bias, args.eps)[1:]

    in_threads(work, most=most)
    means, rstds = zip(*(found[i] for i in range(len(found))), strict=True)
    return torch.cat(means), torch.cat(rstds)


def _whole(rows: _Rows) -> tuple[Tensor, list[_Sums]]:
    """By calls of PyTorch's kernel for the whole tensor, in its threads, as far as that is sound.

    It adds up dweight and dbias as it goes, in as many parts as there are threads. Where that would lose digits, many rows
    or 16 bits, they are made by blocks. How they are added up must not depend on what memory there is for dx.
    """
    fresh, width = would_be_fresh(rows.x.shape, rows.x.dtype), rows.x.shape[-1]
    if rows.x.dtype != rows.weight.dtype or rows.x.numel() > _ROWS * torch.get_num_threads() ** 2 * width:
        sums = _sums_of_blocks(rows)
    elif fresh:
        sums = [_kernel(rows, dx=False)[1]]
    else:
        dx, of_all = _kernel(rows)
        return dx, [of_all]
    return (_dx_of_blocks(rows) if fresh else _kernel(rows, sums=False)[0]), sums


def _dx_of_blocks(rows: _Rows) -> Tensor:
    """What one call gives, copied block by block: faster than the fresh pages of a large result of its own."""
    dx = huge_pages(torch.empty(rows.x.shape, dtype=rows.x.dtype))
    dx_rows = dx.view(-1, rows.x.shape[-1])
    blocks = Shared(row_blocks(rows.x, rows.grad, elements=_ELEMENTS))

    def work(thread: int, threads: int) -> None:
        for at, (x, grad) in blocks:
            dx_rows[at], _ = _kernel(rows.part(at, x, grad), sums=False)

    in_threads(work, most=-(-rows.x.numel() // _ELEMENTS))
    return dx


def _sums_of_blocks(rows: _Rows) -> list[_Sums]:
    """In float32 at least."""
    (elements, most), found = sharing(rows.x, min(_ELEMENTS, _ROWS * rows.x.shape[-1])), dict[int, _Sums]()
    blocks = Shared(enumerate(row_blocks(rows.x, rows.grad, elements=elements)))

    def work(thread: int, threads: int) -> None:
        x_copy, grad_copy = scratch_for(rows.x, 2, elements)
        for i, (at, (x, grad)) in blocks:
            part = rows.part(at, working_copy(x, x_copy), working_copy(grad, grad_copy))
            found[i] = _kernel(part, dx=False)[1]

    in_threads(work, most=most)
    return [found[i] for i in range(len(found))]


def _block_by_block(rows: _Rows) -> tuple[Tensor, list[_Sums]]:
    """Whatever the strides are, and rows whose mean is far from zero."""
    x, elements = rows.x, min(_ELEMENTS, _ROWS * rows.x.shape[-1])
    dx = huge_pages(torch.empty(x.shape, dtype=x.dtype))
    dx_rows, found = dx.view(-1, x.shape[-1]), dict[int, _Sums]()
    blocks = Shared(enumerate(row_blocks(x, rows.grad, elements=elements)))

    def work(thread: int, threads: int) -> None:
        x_copy, grad_copy = scratch_for(x, 2, elements)
        for i, (at, (x_block, grad_block)) in blocks:
            part = rows.part(at, working_copy(x_block, x_copy), working_copy(grad_block, grad_copy))
            some_far = _some_far(part.mean, part.rstd)
            dx_rows[at], found[i] = _careful_gradients(part) if some_far else _kernel(part)

    in_threads(work, most=-(-x.numel() // elements))
    return dx, [found[i] for i in range(len(found))]


def _kernel(rows: _Rows, dx: bool = True, sums: bool = True) -> tuple[Tensor, _Sums]:
    """PyTorch's own, of x and the gradient in any dtype; what is not wanted is None."""
    grad, x, mean, rstd, weight, bias, _ = rows
    wanted = [dx, sums, sums]
    of_x, *others = _aten.native_layer_norm_backward(grad, x, x.shape[-1:], mean, rstd, weight, bias, wanted)
    return of_x, _Sums(*others)


def _far(mean: Tensor, rstd: Tensor) -> Tensor:
    """Is the mean far from zero? Also where it is NaN."""
    return ~((mean * rstd).abs() < FAR)


def _some_far(mean: Tensor, rstd: Tensor) -> bool:
    low, high = torch.aminmax(mean * rstd)  # a fifth of the time of a norm; NaN where there is one
    return not -FAR < float(low) <= float(high) < FAR


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(x - mean) · rstd`` of a block (rows, D), and (mean, rest of the mean, rstd) of each row."""
    pivot = x.mean(-1, keepdim=True)
    deviation = x - pivot
    rest = deviation.mean(-1, keepdim=True)  # what the rounding of the mean left
    deviation -= rest
    rstd = deviation.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return deviation.mul_(rstd), torch.cat((pivot, rest, rstd), -1)


def _careful_gradients(rows: _Rows) -> tuple[Tensor, _Sums]:
    n, statistics = _normalised(rows.x, rows.eps)
    h = rows.grad * rows.weight
    dx = (h - h.mean(-1, keepdim=True)).addcmul_(n, (h * n).mean(-1, keepdim=True), value=-1)
    return dx.mul_(statistics[:, 2:]), _Sums((rows.grad * n).sum(0), rows.grad.sum(0))


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

"""Sums, products, extremes, norms and variances over any dims: ``wgsl/reduce.wgsl``. In a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from headwise.backends.webgpu import copies
from headwise.backends.webgpu.array import OPERATORS, Array
from headwise.backends.webgpu.aten import elementwise, making
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.recorder import replayed
from headwise.backends.webgpu.storage import Region

aten = torch.ops.aten

_CHAIN = 64  # elements that one thread reduces, where the sum of more is split
_BLOCK = 8  # elements that are added up one after the other
_BY_THREAD = 32  # reduced elements for which a thread is enough
_COLUMNS = 32  # neighbouring results for which threads side by side read memory side by side
_JOINED = {"squares": "sum", "norm": "sum"}


def _dims(x: Any, dim: Any) -> tuple[int, ...]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(x.dim()))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    rank = max(x.dim(), 1)
    for d in dims:
        if not -rank <= d < rank:
            raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {d})")
    return tuple(sorted({d % rank for d in dims})) if x.dim() else ()


def _shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> tuple[int, ...]:
    if keepdim:
        return tuple(1 if d in dims else n for d, n in enumerate(shape))
    return tuple(n for d, n in enumerate(shape) if d not in dims)


def reduced(
    device: Device, x: Region, dims: Sequence[int], op: str, dtype: torch.dtype, keepdim: bool = False,
    power: Any = 2, mean: Region | None = None,
) -> Region:  # fmt: skip
    """The reduction of x over dims, in a new tensor of ``dtype``."""
    kept = [d for d in range(len(x.shape)) if d not in dims]
    out = device.empty(_shape(x.shape, dims, keepdim), dtype)
    if out.numel == 0:
        return out
    rows = x.permuted([*kept, *dims])
    k_shape, (k_strides,) = copies.merged(rows.shape[: len(kept)], [rows.strides[: len(kept)]])
    r_shape, (r_strides,) = copies.merged(rows.shape[len(kept) :], [rows.strides[len(kept) :]])
    count = math.prod(x.shape[d] for d in dims)
    kind = elementwise.kind_of(x.dtype)
    kind = "f" if dtype.is_floating_point and op not in ("max", "min") else "i" if kind == "b" else kind
    if op == "sum" and kind == "i" and dtype == torch.int64:
        kind = "l"
    if op in ("argmax", "argmin") and elementwise.kind_of(x.dtype) == "f":
        kind = "f"
    results = out.numel
    norm_of = power if op == "norm" and power in (0, 1, 2) else "inf" if op == "norm" and math.isinf(power) else "p"
    # Where neighbouring results lie side by side in memory, a thread for each; else a workgroup for each.
    few = 4096 if op.startswith("arg") else _COLUMNS
    columns = k_strides[-1] == 1 and r_strides[-1] != 1 and (k_shape[-1] >= few or results >= 4096)
    mode = "thread" if columns or count <= _BY_THREAD else "group"
    most = _CHAIN if mode == "thread" else 256 * _CHAIN
    parts = -(-count // most) if count > most and not op.startswith("arg") else 1
    length = -(-count // parts)
    target = out
    if parts > 1:
        between = {"f": torch.float32, "i": torch.int32, "l": torch.int64}[kind]
        target = device.empty((parts, *out.shape), between)
    name = elementwise.name_of(target.dtype)
    kernel = device.kernel(
        "reduce", x=elementwise.name_of(x.dtype), y=name, kind=kind, op=op, norm_of=norm_of, kept=len(k_shape),
        reduced=len(r_shape), mode=mode, block=_BLOCK,
    )  # fmt: skip
    width = {"f16": 2, "bf16": 2, "i16": 2, "u8": 4, "i8": 4, "bool": 4}.get(name, 1)
    items = -(-results * parts // width)
    bound = {"x": x, "y": target} | ({} if mean is None else {"mean": mean})
    sizes = [v for pair in (*zip(k_shape, k_strides, strict=True), *zip(r_shape, r_strides, strict=True)) for v in pair]
    parameters = (
        count,
        results * parts,
        results,
        length,
        float(power) if norm_of == "p" and op == "norm" else 0.0,
        *sizes,
    )
    device.run(kernel, items if mode == "group" else -(-items // 256), parameters, **bound)
    if parts > 1:
        joining = "max" if norm_of == "inf" and op == "norm" else _JOINED.get(op, op)
        return reduced(device, target, [0], joining, dtype)
    return out


def _checked(x: Array, op: str) -> None:
    elementwise.name_of(x.dtype)
    if x.numel() >= 1 << 32:
        raise NotImplementedError(f"headwise: {op} of more than 2^32 elements on WebGPU")


def _sum(x: Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    _checked(x, "sum")
    to = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    if dtype is not None and not dtype.is_floating_point and x.dtype.is_floating_point:
        return _sum(cast(Array, x.to(dtype)), dim, keepdim, dtype=dtype)
    return cast(Array, replayed(reduced, [x], _dims(x, dim), "sum", to, keepdim))


def _mean(x: Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    to = dtype or x.dtype
    if not to.is_floating_point:
        raise RuntimeError(
            f"mean(): could not infer output dtype. Input dtype must be a floating point dtype. Got: {to}"
        )
    dims = _dims(x, dim)
    return cast(Array, replayed(_mean_of, [x], dims, keepdim, to))


def _scaled(device: Device, x: Region, by: float, dtype: torch.dtype, text: str = "x * scalar0") -> Region:
    """An expression of x and one constant number."""
    out = device.empty(x.shape, dtype)
    written = text.replace("scalar0", f"f32({by!r})" if math.isfinite(by) else "not_a_number()")
    elementwise.compute(device, written, "f", {"x": elementwise.Input(x, "f")}, out)
    return out


def _inverse(count: int) -> float:
    return 1 / count if count > 0 else math.nan


def _mean_of(device: Device, x: Region, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Region:
    total = reduced(device, x, dims, "sum", torch.float32, keepdim)
    return _scaled(device, total, _inverse(math.prod(x.shape[d] for d in dims)), dtype)


def _extreme(op: str) -> Callable[..., Any]:
    def run(x: Array, dim: Any = (), keepdim: bool = False) -> Array:
        _checked(x, op)
        dims = _dims(x, dim)
        if any(x.shape[d] == 0 for d in dims):
            raise IndexError(f"a{op}(): Expected reduction dim to have non-zero size.")
        return cast(Array, replayed(reduced, [x], dims, op, x.dtype, keepdim))

    return run


def _extreme_and_place(op: str) -> Callable[..., Any]:
    def run(x: Array, dim: int, keepdim: bool = False) -> Any:
        places = _place(f"arg{op}")(x, dim, keepdim)
        if x.dim() == 0:
            return x.clone(), places
        kept = places if keepdim else places.unsqueeze(dim)
        values = x.gather(dim, kept)
        return (values if keepdim else values.squeeze(dim)), places

    return run


def _place(op: str) -> Callable[..., Any]:
    def run(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
        _checked(x, op)
        if (x.numel() if dim is None or x.dim() == 0 else x.shape[dim]) == 0:
            raise IndexError(f"{op}(): Expected reduction dim {dim} to have non-zero size.")
        return cast(Array, replayed(reduced, [x], _dims(x, dim), op, torch.int64, keepdim))

    return run


def _logic(op: str) -> Callable[..., Any]:
    def run(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
        _checked(x, op)
        to = torch.uint8 if x.dtype == torch.uint8 else torch.bool
        return cast(Array, replayed(reduced, [x], _dims(x, dim), op, to, keepdim))

    return run


def _prod(x: Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    _checked(x, "prod")
    to = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    source = x if x.dtype == to or to.is_floating_point else cast(Array, x.to(to))
    return cast(Array, replayed(reduced, [source], _dims(x, dim), "prod", to, keepdim))


def _norm(x: Array, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    if not x.dtype.is_floating_point:
        raise RuntimeError(f"linalg.vector_norm: Expected a floating point or complex tensor as input. Got {x.dtype}")
    to = dtype or x.dtype
    if math.isinf(order) and order < 0:
        return cast(Array, x.abs().amin(_dims(x, dim), keepdim).to(to))
    return cast(Array, replayed(_norm_of, [x], _dims(x, dim), float(order), keepdim, to))


def _norm_of(
    device: Device, x: Region, dims: tuple[int, ...], order: float, keepdim: bool, dtype: torch.dtype
) -> Region:
    total = reduced(device, x, dims, "norm", torch.float32, keepdim, power=order)
    if order in (0.0, 1.0) or math.isinf(order):
        return making.cast_to(device, total, dtype)
    return _scaled(device, total, 1 / order, dtype, "sqrt(x)" if order == 2 else "pow_of(x, scalar0)")


def _variance(x: Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False, both: bool = False) -> Any:
    if not x.dtype.is_floating_point:
        raise RuntimeError("var only support tensors with floating point dtypes")
    freedom = float(1 if correction is None else correction)
    made = replayed(_variance_of, [x], _dims(x, dim), freedom, keepdim)
    return made if both else made[0]


def _variance_of(
    device: Device, x: Region, dims: tuple[int, ...], correction: float, keepdim: bool
) -> tuple[Region, Region]:
    """Variance and mean."""
    count = math.prod(x.shape[d] for d in dims)
    mean = _mean_of(device, x, dims, keepdim, torch.float32)
    squares = reduced(device, x, dims, "squares", torch.float32, keepdim, mean=mean)
    left = count - correction
    # Divided by zero: NaN where nothing is to be divided.
    nothing_left = "select(select(infinity(), not_a_number(), x == 0.0), x, is_nan(x))"
    variance = _scaled(
        device, squares, 1 / left if left > 0 else 0.0, x.dtype, "x * scalar0" if left > 0 else nothing_left
    )
    return variance, making.cast_to(device, mean, x.dtype)


def _variance_and_mean(x: Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _variance(x, dim, correction=correction, keepdim=keepdim, both=True)


def _equal(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _logsumexp(x: Array, dim: Any, keepdim: bool = False) -> Any:
    dims = _dims(x, dim)
    wide: Any = x.float()
    to = x.dtype if x.dtype.is_floating_point else torch.float32
    if any(x.shape[d] == 0 for d in dims):
        return _sum(cast(Array, wide), dims, keepdim, dtype=to).log()  # of nothing, where anything is asked for
    highest: Any = wide.amax(dims, True) if dims else wide
    highest = highest.masked_fill(highest.isinf(), 0.0)
    made = (wide - highest).exp().sum(dims, True).log() + highest if dims else wide.clone()
    return made.to(to).view(_shape(x.shape, dims, keepdim))


OPERATORS |= {
    aten.logsumexp.default: _logsumexp,
    aten.equal.default: _equal,
    aten.sum.default: lambda x, *, dtype=None: _sum(x, dtype=dtype),
    aten.sum.dim_IntList: _sum,
    aten.mean.default: lambda x, *, dtype=None: _mean(x, dtype=dtype),
    aten.mean.dim: _mean,
    aten.prod.default: lambda x, *, dtype=None: _prod(x, dtype=dtype),
    aten.prod.dim_int: _prod,
    aten.amax.default: _extreme("max"),
    aten.amin.default: _extreme("min"),
    aten.max.default: _extreme("max"),
    aten.min.default: _extreme("min"),
    aten.max.dim: _extreme_and_place("max"),
    aten.min.dim: _extreme_and_place("min"),
    aten.argmax.default: _place("argmax"),
    aten.argmin.default: _place("argmin"),
    aten.any.default: _logic("any"),
    aten.any.dim: _logic("any"),
    aten.any.dims: _logic("any"),
    aten.all.default: _logic("all"),
    aten.all.dim: _logic("all"),
    aten.all.dims: _logic("all"),
    aten.linalg_vector_norm.default: _norm,
    aten.var.correction: _variance,
    aten.var_mean.correction: _variance_and_mean,
}  # fmt: skip

"""What the norm kernels of both GPU backends are given. ``T``: a tensor for Triton, a region of a buffer for WebGPU."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Norm(NamedTuple, Generic[T]):
    """What is normalised, and how."""

    x: T
    residual: T | None = None
    weight: T | None = None
    bias: T | None = None
    eps: float = 0.0
    weight_offset: float = 0.0
    centre: bool = False

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = tuple(self.x.shape[:-1])  # type: ignore[attr-defined]
        return (*shape, 3) if self.centre else shape


def about_zero(args: Any, x: T, residual: T | None = None) -> Norm[T]:
    """RMSNorm of ``x``, or of its sum with a residual, with the options of ``args``."""
    return Norm(x, residual, args.weight, eps=args.eps, weight_offset=args.weight_offset)


def about_mean(args: Any, x: T) -> Norm[T]:
    """LayerNorm of ``x`` with the options of ``args``."""
    return Norm(x, weight=args.weight, bias=args.bias, eps=args.eps, centre=True)

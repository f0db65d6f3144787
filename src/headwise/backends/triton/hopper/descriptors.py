"""How kernels read and write tensors through TMA: a descriptor is an address, sizes, strides and a box.

A tensor may be without memory (device meta): then the descriptor says everything but the address.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from headwise.backends.triton.hopper.gluon_names import TensorDescriptor, gl


class Box(NamedTuple):
    """So many rows of so many elements at once of a tensor ``(B, H, S, D)``."""

    rows: int
    width: int

    def descriptor(self, x: Tensor) -> TensorDescriptor:
        # A dim of size 1 may have any stride, also one that TMA does not take.
        strides = [s if n > 1 else 8 for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
        layout = gl.NVMMASharedLayout(min(128, self.width * x.element_size()), 8 * x.element_size(), 4)
        return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, self.rows, self.width], layout)


class BiasBox(NamedTuple):
    """So many rows of so many elements at once of a bias ``(B, H, Sq, Sk)``, or of its only row."""

    rows: int
    width: int

    def descriptor(self, x: Tensor) -> TensorDescriptor:
        if self.rows > 1:
            return Box(self.rows, self.width).descriptor(x)
        strides = [s if n > 1 else 8 for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
        layout = gl.NVMMASharedLayout(0, 8 * x.element_size(), 4)
        return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, 1, self.width], layout)


class PackedBox(NamedTuple):
    """Rows of one sequence of ``(1, H, T, D)``: what is past its end is not read (zeros) and not written.

    Two dims go before the others, with steps so long that an address comes round: 2³⁰ (2³⁴ - s) + e s + (2³⁰ - n + i) s is
    (e - n + i) s modulo 2⁶⁴, and the third dim ends at 2³⁰: at i = n.
    """

    rows: int
    width: int

    def descriptor(self, x: Tensor) -> TensorDescriptor:
        _, heads, tokens, dim = x.shape
        _, head, token, _ = x.stride()
        # Where there is one of something, any step will do that TMA takes.
        head, token = head if heads > 1 else dim, token if tokens > 1 else dim
        endless = 0x7FFF0000
        layout = gl.NVMMASharedLayout(min(128, self.width * x.element_size()), 8 * x.element_size(), 5)
        return TensorDescriptor(
            x, [endless, endless, 2**30, heads, dim], [2**34 - token, token, token, head, 1],
            [1, 1, self.rows, 1, self.width], layout,
        )  # fmt: skip


Described = tuple[Tensor, Box | PackedBox]


def in_pieces(x: Tensor, rows: int, widths: tuple[int, int], packed: bool) -> tuple[Described | None, Described | None]:
    """Boxes of so many rows for one or two pieces of a head dim; a width of 0: there is no such piece."""
    box = PackedBox if packed else Box
    first, second = ((x, box(rows, width)) if width else None for width in widths)
    return first, second


class StatisticsBox(NamedTuple):
    """One row of an array ``(N, rows)``."""

    rows: int

    def descriptor(self, x: Tensor) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), [self.rows, 1], [1, self.rows], gl.NVMMASharedLayout(0, 32, 2))

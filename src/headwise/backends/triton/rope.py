"""Rotary position embedding in Triton: one launch for x, or for q and k, in either direction.

A program has some tokens and some heads. The angles of its tokens stay in registers while it goes through its heads, of
which it holds one at a time: programs side by side keep enough loads under way. The backward is the same kernel with -sin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from headwise import layout
from headwise.backends.triton.blocks import common_alignment, power_of_two

if TYPE_CHECKING:
    from headwise.backends.triton.gpu import Gpu
    from headwise.ops.rope import Rope

_HEADS = 8  # that a program goes through
_TILE_BYTES = 4096  # of a head that a program of four warps holds: two vectors for each thread
_INT32 = 2**31


@triton.jit
def _table(table, row, there, stride, PAIRS: tl.constexpr, ALIGN: tl.constexpr):
    """[TOKENS, PAIRS]: rows ``row`` of cos or sin; NaN where a row is not there."""
    at = table + tl.multiple_of(row * stride, ALIGN)[:, None] + tl.arange(0, PAIRS)[None, :]
    return tl.load(at, mask=there, other=float("nan"))


@triton.jit
def _rotate(
    x, y, c, s, known, batch, token, inside, first_head, heads, x_b, x_h, x_s, y_b, y_h, y_s,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Rotate heads ``first_head`` … of tokens ``token`` of batch entries ``batch``, by c and s [TOKENS, PAIRS]."""
    x_rows = tl.multiple_of(batch * x_b + token * x_s, ALIGN)[:, None]  # [TOKENS, 1]
    y_rows = tl.multiple_of(batch * y_b + token * y_s, ALIGN)[:, None]
    inside = inside[:, None]
    for i in range(first_head, tl.minimum(first_head + HEADS, heads)):
        head = tl.full((), 0, tl.int64) + i
        from_x = x + tl.multiple_of(head * x_h, ALIGN) + x_rows
        to_y = y + tl.multiple_of(head * y_h, ALIGN) + y_rows
        if R > 0:
            if INTERLEAVED:
                column = tl.arange(0, 2 * PAIRS)[None, :]
                rotated = inside if R == PAIRS else inside & (column < 2 * R)
                both = tl.load(from_x + column, mask=rotated, other=0.0).to(tl.float32)
                a, b = tl.split(tl.reshape(both, [both.shape[0], PAIRS, 2]))
                turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), both.shape)
                tl.store(to_y + column, turned.to(y.dtype.element_ty), mask=rotated)
            else:
                pair = tl.arange(0, PAIRS)[None, :]
                rotated = inside if R == PAIRS else inside & (pair < R)
                a = tl.load(from_x + pair, mask=rotated, other=0.0).to(tl.float32)
                b = tl.load(from_x + (R + pair), mask=rotated, other=0.0).to(tl.float32)
                tl.store(to_y + pair, (a * c - b * s).to(y.dtype.element_ty), mask=rotated)
                tl.store(to_y + (R + pair), (b * c + a * s).to(y.dtype.element_ty), mask=rotated)
        if REST > 0:
            column = 2 * R + tl.arange(0, REST)[None, :]
            passing = inside if 2 * R + REST == D else inside & (column < D)
            passed = tl.load(from_x + column, mask=passing, other=0.0).to(tl.float32)
            passed = tl.where(known[:, None], passed, float("nan"))
            tl.store(to_y + column, passed.to(y.dtype.element_ty), mask=passing)


@triton.jit(
    do_not_specialize=[
        "tokens", "length", "rows", "q_heads", "k_heads", "q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "yq_b", "yq_h", "yq_s",
        "yk_b", "yk_h", "yk_s", "p_b", "p_s", "cos_stride", "sin_stride",
    ]
)  # fmt: skip
def _rope(
    q, k, yq, yk, cos, sin, positions, tokens, length, rows, q_heads, k_heads, q_b, q_h, q_s, k_b, k_h, k_s,
    yq_b, yq_h, yq_s, yk_b, yk_h, yk_s, p_b, p_s, cos_stride, sin_stride,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``tokens`` = B · S in all, ``length`` = S of a batch entry, ``rows`` = P of the tables. k may be None."""
    q_groups = tl.cdiv(q_heads, HEADS)
    groups = q_groups
    if k is not None:
        groups += tl.cdiv(k_heads, HEADS)
    # Programs of the same tokens follow each other, and find the angles in the cache.
    program = tl.program_id(0)
    group = program % groups
    block = program // groups
    index = (block.to(tl.int64) if WIDE else block) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    inside = index < tokens
    batch = (index // length).to(tl.int64)
    token = index.to(tl.int64) - batch * length
    row = token
    if positions is not None:
        row = tl.load(positions + batch * p_b + token * p_s, mask=inside, other=0).to(tl.int64)
    known = (row >= 0) & (row < rows)
    c, s = 0.0, 0.0
    if R > 0:
        there = (known & inside)[:, None]
        if R != PAIRS:
            there = there & (tl.arange(0, PAIRS) < R)[None, :]
        c = _table(cos, row, there, cos_stride, PAIRS, TABLE_ALIGN)
        s = _table(sin, row, there, sin_stride, PAIRS, TABLE_ALIGN)
        if INVERSE:
            s = -s
    if group < q_groups:
        _rotate(
            q, yq, c, s, known, batch, token, inside, group * HEADS, q_heads, q_b, q_h, q_s, yq_b, yq_h, yq_s,
            HEADS, D, R, PAIRS, REST, INTERLEAVED, ALIGN,
        )  # fmt: skip
    elif k is not None:
        _rotate(
            k, yk, c, s, known, batch, token, inside, (group - q_groups) * HEADS, k_heads, k_b, k_h, k_s, yk_b, yk_h, yk_s,
            HEADS, D, R, PAIRS, REST, INTERLEAVED, ALIGN,
        )  # fmt: skip


def rope_forward(gpu: Gpu, args: Rope) -> tuple[Tensor, ...]:
    return _rotated(gpu, args, inverse=False)


def rope_backward(gpu: Gpu, args: Rope) -> tuple[Tensor, ...]:
    return _rotated(gpu, args, inverse=True)


def _rotated(gpu: Gpu, args: Rope, inverse: bool) -> tuple[Tensor, ...]:
    ys = tuple(gpu.empty(x.shape, x.dtype, layout.strides_like_heads(x, x.shape[-1])) for x in args.xs)
    jobs = [(_contiguous_rows(gpu, x), y) for x, y in zip(args.xs, ys, strict=True) if x.numel() > 0]
    if jobs:
        _launch(gpu, args, [tuple(map(_heads_outside, job)) for job in jobs], inverse)
    return ys


def _launch(gpu: Gpu, args: Rope, jobs: list[tuple[Tensor, ...]], inverse: bool) -> None:
    (q, yq), (k, yk) = jobs[0], jobs[1] if len(jobs) > 1 else (None, None)
    batch, _, length, dim = q.shape
    cos, sin, positions = _contiguous_rows(gpu, args.cos), _contiguous_rows(gpu, args.sin), args.positions
    pairs = cos.shape[1]
    position_strides = (0, 0) if positions is None else (0, *positions.stride())[-2:]
    there = [x for x in (q, k, yq, yk) if x is not None]
    columns, rest = power_of_two(max(pairs, 1)), dim - 2 * pairs
    heads = min(_HEADS, power_of_two(max(x.shape[1] for x in there)))
    tokens = max(1, _TILE_BYTES // (q.element_size() * max(2 * columns, power_of_two(rest))))
    groups = sum(triton.cdiv(x.shape[1], heads) for x in (q, k) if x is not None)
    count = batch * length
    constants = (
        heads, tokens, dim, pairs, columns, power_of_two(rest) if rest else 0, args.interleaved, inverse,
        _alignment(gpu, *there), _alignment(gpu, cos, sin), count + tokens >= _INT32,
    )  # fmt: skip
    numbers = (
        count, length, cos.shape[0], q.shape[1], 0 if k is None else k.shape[1],
        *_strides(q), *_strides(k), *_strides(yq), *_strides(yk), *position_strides, cos.stride(0), sin.stride(0),
    )  # fmt: skip
    grid = (groups * triton.cdiv(count, tokens),)
    gpu.launch(_rope, grid, (q, k, yq, yk, cos, sin, positions), numbers, constants)


def _heads_outside(x: Tensor) -> Tensor:
    """A packed ``(T, H, D)`` as ``(1, H, T, D)``."""
    return x if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0)


def _contiguous_rows(gpu: Gpu, x: Tensor) -> Tensor:
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else gpu.contiguous(x)


def _alignment(gpu: Gpu, *tensors: Tensor) -> int:
    """Elements that the beginnings of all rows are a multiple of."""
    if not all(gpu.aligned(x) for x in tensors):
        return 1
    return common_alignment(tensors[0].element_size(), *(x.stride() for x in tensors))


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]

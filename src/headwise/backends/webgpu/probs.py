"""Attention probabilities on WebGPU, forward and backward.

One stage walks over the keys and leaves a record per row, what its probabilities are made of; the next writes them, tile
by tile. The backward writes the gradients of the scores instead, which are as large as the result was, and plain matmuls
make dq and dk of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headwise.backends.webgpu import copies, scores
from headwise.backends.webgpu.array import launcher
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

if TYPE_CHECKING:
    from headwise.ops.attention._arguments import Flags

_RECORD = 8  # words
_KEYS = 64  # of a tile
_MOST_CHUNKS = 64  # that a sum is divided into, where there are fewer elements than this many workgroups:
_WORKGROUPS = 1024


@launcher
def attention_probs(
    device: Device, q: Region, k: Region, rows: Region | None, mask: Region | None, bias: Region | None,
    kv_lengths: Region | None, sink: Region | None, flags: Flags,
) -> Region:  # fmt: skip
    shape = _shape(q, k, rows)
    if q.shape[2] == 0:
        return copies.full(device, shape, math.nan, q.dtype)  # no row exists, so none of those named
    probs = device.empty(shape, q.dtype)
    if probs.numel == 0:
        return probs
    problem = _problem(device, q, k, rows, mask, bias, kv_lengths, sink, None, flags)
    columns = shape[3] if q.itemsize == 4 else shape[3] + shape[3] % 2  # two of 16 bits are written as one word
    written = probs if columns == shape[3] else device.empty((*shape[:3], columns), q.dtype)
    stats = device.empty((*shape[:3], _RECORD), torch.int32)
    for part in _parts(device, problem, stats, written):
        _records(device, problem, part, stats)
        _write(device, problem, part, stats, part.of(written), None)
    if written is not probs:
        copies.copy_into(device, written, probs)
    return probs


@launcher
def attention_probs_backward(
    device: Device, grad: Region, probs: Region, q: Region, k: Region, rows: Region | None, mask: Region | None,
    bias: Region | None, kv_lengths: Region | None, sink: Region | None, flags: Flags, need_bias_grad: bool,
    need_sink_grad: bool,
) -> tuple[Region, Region, Region, Region]:  # fmt: skip
    wanted_bias = bias if need_bias_grad else None
    wanted_sink = sink if need_sink_grad else None
    shape = _shape(q, k, rows)
    if q.shape[2] == 0 or 0 in shape:
        return _trivial(device, q, k, wanted_bias, wanted_sink, shape)
    problem = _problem(device, q, k, rows, mask, bias, kv_lengths, sink, grad, flags)
    stats = device.empty((*shape[:3], _RECORD), torch.int32)
    columns = -(-shape[3] // 4) * 4
    parts = list(_parts(device, problem, stats, None, columns * (8 if wanted_bias else q.itemsize)))
    dq = scores.empty_rows(device, q.shape, q.dtype)
    dk = scores.empty_rows(device, k.shape, k.dtype)
    d4 = problem.d4
    # Rows that were named more than once meet in float32.
    dq_lines = dq.written if rows is None else device.empty((*shape[:3], 4 * d4), torch.float32)
    dbias = None if wanted_bias is None else _Sum(device, wanted_bias, len(parts) > 1)
    dsink = None if wanted_sink is None else _Sum(device, wanted_sink, len(parts) > 1)
    before: Region | None = None  # of dk, from other rows of the same key head
    for i, part in enumerate(parts):
        _records(device, problem, part, stats)
        part_shape = (part.batches, part.heads, part.lines, columns)
        dproducts = device.empty(part_shape, q.dtype)
        dlogits = None if dbias is None else device.empty(part_shape, torch.float32)
        _write(device, problem, part, stats, dproducts, dlogits)
        _product(device, problem, part, dproducts, None, None, part.of(dq_lines))
        if i + 1 == len(parts) or part.key_head(problem) != parts[i + 1].key_head(problem):
            _product(device, problem, part, dproducts, part.of(stats), before, part.of_keys(dk.written, problem))
            before = None
        else:
            made = device.empty((part.batches, 1, k.shape[2], 4 * d4), torch.float32)
            _product(device, problem, part, dproducts, part.of(stats), before, made)
            before = made
        if dbias is not None and wanted_bias is not None and dlogits is not None:
            matched = rows is not None and wanted_bias.shape[2] > 1
            to = part.of_scores(dbias.y, rows is not None)
            dbias.add(dlogits, shape[3], to, part.of(stats) if matched else None)
        if dsink is not None:
            of_sink = part.of(stats)
            batches, heads, lines, _ = of_sink.shape
            b, h, s, _ = of_sink.strides
            x = Region(of_sink.storage, torch.float32, (batches, heads, 1, lines), (b, h, 0, s), of_sink.offset + 7)
            to = dsink.y.narrow(0, part.head, heads)
            dsink.add(x, lines, to.with_shape((1, heads, 1, 1)), None)
    if rows is not None:
        _into_rows(device, dq_lines, stats, dq.written)
    nothing = device.empty((0,), q.dtype)
    return (
        scores.finish(device, dq), scores.finish(device, dk), nothing if dbias is None else dbias.result(),
        nothing if dsink is None else dsink.result(),
    )  # fmt: skip


class _Problem(NamedTuple):
    q: Region  # rows of q and k are aligned
    k: Region
    rows: Region | None
    scores: scores.Scores
    grad: Region | None
    group: int
    micro: int  # rows of a thread: there are few where few rows are asked for

    @property
    def d4(self) -> int:
        return -(-self.q.shape[3] // 4)

    @property
    def lines(self) -> int:
        return self.q.shape[2] if self.rows is None else self.rows.shape[0]


def _problem(
    device: Device, q: Region, k: Region, rows: Region | None, mask: Region | None, bias: Region | None,
    kv_lengths: Region | None, sink: Region | None, grad: Region | None, flags: Flags,
) -> _Problem:  # fmt: skip
    q, k = scores.aligned(device, q), scores.aligned(device, k)
    found = scores.of_call(device, q, k, mask, bias, kv_lengths, sink, flags)
    count = q.shape[2] if rows is None else rows.shape[0]
    return _Problem(q, k, rows, found, grad, q.shape[1] // k.shape[1], 4 if count > 16 else 1)


class _Part(NamedTuple):
    """The results that are worked on at once: all, or some lines of one head of one batch entry."""

    batch: int
    batches: int
    head: int
    heads: int
    line: int
    lines: int

    def of(self, x: Region) -> Region:
        """Of ``(B, Hq, count, ·)``."""
        return x.narrow(0, self.batch, self.batches).narrow(1, self.head, self.heads).narrow(2, self.line, self.lines)

    def of_queries(self, x: Region, named: bool) -> Region:
        """Of ``(B, Hq, Sq, ·)``: all rows, where some are named."""
        x = x.narrow(0, self.batch, self.batches).narrow(1, self.head, self.heads)
        return x if named else x.narrow(2, self.line, self.lines)

    def of_keys(self, x: Region, problem: _Problem) -> Region:
        """Of ``(B, Hk, Sk, ·)``."""
        if self.heads == problem.q.shape[1]:
            return x.narrow(0, self.batch, self.batches)
        return x.narrow(0, self.batch, 1).narrow(1, self.head // problem.group, 1)

    def of_scores(self, x: Region, named: bool) -> Region:
        """Of a mask or bias, whose dims may be 1."""
        starts = ((self.batch, self.batches), (self.head, self.heads), (self.line, self.lines))
        for dim, (start, length) in enumerate(starts):
            if x.shape[dim] > 1 and not (dim == 2 and named):
                x = x.narrow(dim, start, length)
        return x

    def key_head(self, problem: _Problem) -> tuple[int, int]:
        return self.batch, self.head // problem.group


def _parts(
    device: Device, problem: _Problem, stats: Region, written: Region | None, line_bytes: int = 0
) -> Iterator[_Part]:
    """All of it, unless a tensor is larger than a kernel may bind; ``line_bytes`` of each line are made on the way."""
    q, k = problem.q, problem.k
    batch, heads, count = q.shape[0], q.shape[1], problem.lines
    most = device.capabilities.binding_bytes
    regions = [q, k, stats, *problem.scores.regions.values()] + [x for x in (written, problem.grad) if x is not None]
    if all(x.storage.size <= most for x in regions) and batch * heads * count * line_bytes <= most:
        yield _Part(0, batch, 0, heads, 0, count)
        return
    # Everything that has lines, by what a line takes of it.
    with_lines = [x for x in (written, problem.grad, stats) if x is not None]
    if problem.rows is None:
        with_lines += [q, *(x for n, x in problem.scores.regions.items() if n != "aux")]
    longest = max(line_bytes, *(x.strides[2] * x.itemsize for x in with_lines if x.shape[2] > 1), 4 * k.shape[2])
    length = max(1, (most - 512) // longest)
    for b in range(batch):
        for h in range(heads):
            for line in range(0, count, length):
                yield _Part(b, 1, h, 1, line, min(length, count - line))


def _records(device: Device, problem: _Problem, part: _Part, stats: Region) -> None:
    rows, grad = problem.rows, problem.grad
    kernel = device.kernel(
        "probs", stage="stats", dtype=DTYPES[problem.q.dtype], variant=problem.scores.variant,
        rows="" if rows is None else DTYPES[rows.dtype], grad=grad is not None, raw=False, micro=problem.micro,
    )  # fmt: skip
    regions = _inputs(problem, part, with_aux=True)
    if rows is not None:
        regions["rows"] = rows.narrow(0, part.line, part.lines)
    parameters = _parameters(problem, part, regions, 1, 0)
    device.run(kernel, int(parameters[0]), parameters, **regions, stats=part.of(stats))


def _write(device: Device, problem: _Problem, part: _Part, stats: Region, to: Region, raw: Region | None) -> None:
    kernel = device.kernel(
        "probs", stage="write", dtype=DTYPES[problem.q.dtype],
        variant=problem.scores.variant._replace(lengths=False, sink=False),  # they are in the records
        rows="" if problem.rows is None else "named", grad=problem.grad is not None, raw=raw is not None,
        micro=problem.micro,
    )  # fmt: skip
    regions = _inputs(problem, part, with_aux=False)
    columns = to.shape[3]
    parameters = _parameters(problem, part, regions, -(-columns // _KEYS), columns)
    if raw is not None:
        regions["raw"] = raw
    device.run(kernel, int(parameters[0]), parameters, **regions, stats=part.of(stats), to=to)


def _inputs(problem: _Problem, part: _Part, with_aux: bool) -> dict[str, Region]:
    named = problem.rows is not None
    regions = {"q": part.of_queries(problem.q, named), "k": part.of_keys(problem.k, problem)}
    for name, x in problem.scores.regions.items():
        if name != "aux":
            regions[name] = part.of_scores(x, named)
        elif with_aux:
            regions[name] = x
    if problem.grad is not None:
        regions["grad"] = part.of(problem.grad)
    return regions


def _parameters(
    problem: _Problem, part: _Part, regions: dict[str, Region], key_tiles: int, columns: int
) -> tuple[float, ...]:
    tiles = -(-part.lines // (16 * problem.micro))
    rows, grad = problem.rows, problem.grad
    batch, _, *others = problem.scores.parameters
    return (
        tiles * key_tiles * part.heads * part.batches, tiles, key_tiles, part.lines, columns, part.batch, part.head,
        part.line, problem.d4, 0 if rows is None else rows.strides[0], *scores.vectors(regions["q"]),
        *scores.vectors(regions["k"]), *((0, 0, 0, 0) if grad is None else grad.strides), batch, part.heads, *others,
    )  # fmt: skip


def _product(
    device: Device, problem: _Problem, part: _Part, dproducts: Region, stats: Region | None, before: Region | None,
    out: Region,
) -> None:  # fmt: skip
    """Gradients of rows of q; of keys, where the records of the rows are given."""
    transposed = stats is not None
    kernel = device.kernel(
        "probs_product", dtype=DTYPES[problem.q.dtype], to=DTYPES[out.dtype], transposed=transposed,
        adds=before is not None,
    )  # fmt: skip
    group = problem.group if part.heads == problem.q.shape[1] else 1
    row_tiles, column_tiles = -(-out.shape[2] // 64), -(-problem.d4 // 16)
    programs = row_tiles * column_tiles * out.shape[0] * out.shape[1]
    regions: dict[str, Region] = {"d": dproducts, "out": out}
    if stats is not None:
        regions |= {"x": part.of_queries(problem.q, problem.rows is not None), "stats": stats}
    else:
        regions["x"] = part.of_keys(problem.k, problem)
    if before is not None:
        regions["before"] = before
    parameters = (
        programs, row_tiles, column_tiles, part.heads, group, part.lines, problem.k.shape[2], dproducts.shape[3] // 4,
        problem.d4, *scores.vectors(regions["x"]),
    )  # fmt: skip
    device.run(kernel, programs, parameters, **regions)


class _Sum:
    """A gradient that is a sum over broadcast dims: of one part, or in float32 of several."""

    def __init__(self, device: Device, like: Region, several: bool) -> None:
        self._device, self._dtype, self._several = device, like.dtype, several
        if several:
            self.y = copies.full(device, like.shape, 0.0, torch.float32)
        else:
            self.y = device.empty(like.shape, like.dtype)

    def add(self, x: Region, columns: int, y: Region, stats: Region | None) -> None:
        """Add the sums over x's first ``columns`` to y, a part of `self.y` in four dims."""
        _reduce(self._device, x.narrow(3, 0, columns), y, stats, adds=self._several)

    def result(self) -> Region:
        if self.y.dtype == self._dtype:
            return self.y
        made = self._device.empty(self.y.shape, self._dtype)
        most = (self._device.capabilities.binding_bytes - 512) // 8 * 2
        x, y = (r.with_shape((r.numel,)) for r in (self.y, made))
        for start in range(0, x.numel, most):
            length = min(most, x.numel - start)
            _add_chunks(self._device, x.narrow(0, start, length), 1, y.narrow(0, start, length), adds=False)
        return made


def _reduce(device: Device, x: Region, y: Region, stats: Region | None, *, adds: bool) -> None:
    """Sum x ``(B, H, L, K)`` over the dims that are 1 in y, which is contiguous; given stats, lines by the row they show."""
    over_columns = y.shape[3] == 1 and x.shape[3] > 1
    summed = [size == 1 for size in y.shape]
    summed[2] = summed[2] or stats is not None
    terms = [size if over else 1 for size, over in zip(x.shape[:3], summed, strict=False)]
    elements = y.numel
    blocks = elements if over_columns else -(-elements // 64)
    room = device.capabilities.binding_bytes // (4 * elements)
    chunks = max(1, min(math.prod(terms), _MOST_CHUNKS, _WORKGROUPS // blocks, room))
    sums = device.empty((chunks * elements,), torch.float32)
    parameters: tuple[Any, ...] = (
        blocks * chunks, blocks, chunks, elements, *y.shape[1:], *(int(not over) for over in summed[:3]), *terms,
        x.shape[3], *x.strides,
    )  # fmt: skip
    kernel = device.kernel("probs_reduce", matched=stats is not None, over_columns=over_columns)
    matched = {} if stats is None else {"stats": stats}
    device.run(kernel, blocks * chunks, parameters, x=x, **matched, y=sums)
    _add_chunks(device, sums, chunks, y, adds=adds)


def _add_chunks(device: Device, x: Region, chunks: int, y: Region, *, adds: bool) -> None:
    kernel = device.kernel("probs_sum", dtype=DTYPES[y.dtype], adds=adds)
    elements = y.numel
    threads = elements if y.itemsize == 4 else -(-elements // 2)
    device.run(kernel, -(-threads // 256), (chunks, elements), x=x, y=y)


def _into_rows(device: Device, lines: Region, stats: Region, dq: Region) -> None:
    """Add the gradients of lines to the rows they show."""
    most = device.capabilities.binding_bytes
    if max(x.storage.size for x in (lines, stats, dq)) <= most and dq.numel * 4 <= most:
        _reduce(device, lines, dq, stats, adds=False)
        return
    for b in range(lines.shape[0]):
        for h in range(lines.shape[1]):
            part = _Part(b, 1, h, 1, 0, lines.shape[2])
            _reduce(device, part.of(lines), part.of_queries(dq, True), part.of(stats), adds=False)


def _trivial(
    device: Device, q: Region, k: Region, bias: Region | None, sink: Region | None, shape: tuple[int, ...]
) -> tuple[Region, Region, Region, Region]:
    """Nothing to see, or no row at all: then those that were named are NaN."""
    value = math.nan if q.shape[2] == 0 and 0 not in shape else 0.0
    nothing = device.empty((0,), q.dtype)
    return (
        copies.full(device, q.shape, 0.0, q.dtype), copies.full(device, k.shape, value, k.dtype),
        nothing if bias is None else copies.full(device, bias.shape, value, bias.dtype),
        nothing if sink is None else copies.full(device, sink.shape, value, sink.dtype),
    )  # fmt: skip


def _shape(q: Region, k: Region, rows: Region | None) -> tuple[int, int, int, int]:
    return q.shape[0], q.shape[1], q.shape[2] if rows is None else rows.shape[0], k.shape[2]

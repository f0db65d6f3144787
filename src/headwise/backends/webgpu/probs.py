"""Attention probabilities on WebGPU, forward and backward.

The first stage walks over the keys and writes a record of each row with its softmax statistics; the second writes the
probabilities, tile by tile. The backward writes the gradients of the scores instead, and computes dq and dk from them by
plain matmuls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from headwise.backends.webgpu import copies, scores
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region

_RECORD = 8  # words
_KEYS = 64  # of a tile
_WORKGROUPS = 1024  # a sum with fewer elements than this is divided into chunks
_MOST_CHUNKS = 64


def attention_probs(device: Device, args: Any) -> Region:
    shape = _shape(args)
    if args.q.shape[2] == 0:
        return copies.full(device, shape, math.nan, args.q.dtype)  # every row that is named is out of range
    probs = device.empty(shape, args.q.dtype)
    if probs.numel == 0:
        return probs
    problem = _problem(device, args, None)
    columns = shape[3] if probs.itemsize == 4 else shape[3] + shape[3] % 2  # 16-bit results are written in pairs
    written = probs if columns == shape[3] else device.empty((*shape[:3], columns), probs.dtype)
    stats = device.empty((*shape[:3], _RECORD), torch.int32)
    for part in _parts(device, problem, stats, written):
        _records(device, problem, part, stats)
        _write(device, problem, part, stats, part.of(written), None)
    if written is not probs:
        copies.copy_into(device, written.narrow(3, 0, shape[3]), probs)
    return probs


def attention_probs_backward(device: Device, args: Any) -> tuple[Region | None, ...]:
    forward, shape = args.forward, _shape(args.forward)
    q, k, rows = forward.q, forward.k, forward.rows
    bias = forward.bias.with_leading(4) if args.need_bias and forward.bias is not None else None
    sink = forward.sink if args.need_sink else None
    if q.shape[2] == 0 or 0 in shape:
        return _trivial(device, forward, bias, sink, shape)
    problem = _problem(device, forward, args.grad)
    stats = device.empty((*shape[:3], _RECORD), torch.int32)
    columns = -(-shape[3] // 4) * 4
    parts = list(_parts(device, problem, stats, None, columns * (8 if bias else q.itemsize)))
    dq = scores.empty_rows(device, q.shape, q.dtype)
    dk = scores.empty_rows(device, k.shape, k.dtype)
    d4 = problem.d4
    # A row may be named more than once: its gradients are summed in float32.
    dq_lines = dq.written if rows is None else device.empty((*shape[:3], 4 * d4), torch.float32)
    dbias = None if bias is None else _Sum(device, bias, len(parts) > 1)
    dsink = None if sink is None else _Sum(device, sink, len(parts) > 1)
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
        if dbias is not None and dlogits is not None:
            matched = rows is not None and dbias.y.shape[2] > 1
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
    return (
        scores.finish(device, dq), scores.finish(device, dk),
        None if dbias is None else dbias.result().with_shape(forward.bias.shape),
        None if dsink is None else dsink.result(),
    )  # fmt: skip


class _Problem(NamedTuple):
    q: Region  # rows of q and k are aligned
    k: Region
    rows: Region | None
    scores: scores.Scores
    grad: Region | None
    micro: int  # rows of a thread

    @property
    def group(self) -> int:
        return self.scores.numbers.group

    @property
    def d4(self) -> int:
        return -(-self.q.shape[3] // 4)

    @property
    def lines(self) -> int:
        return self.q.shape[2] if self.rows is None else self.rows.shape[0]


def _problem(device: Device, args: Any, grad: Region | None) -> _Problem:
    q, k = scores.aligned(device, args.q), scores.aligned(device, args.k)
    found = _Problem(q, k, args.rows, scores.describe(device, args, q, k, pack=False), grad, 1)
    return found._replace(micro=4) if found.lines > 16 else found


class _Part(NamedTuple):
    """The results that one dispatch computes: all, or some lines of one head of one batch entry."""

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
        x = x.narrow_broadcast(0, self.batch, self.batches).narrow_broadcast(1, self.head, self.heads)
        return self.of_lines(x, named)

    def of_lines(self, x: Region, named: bool) -> Region:
        return x if named else x.narrow_broadcast(2, self.line, self.lines)

    def key_head(self, problem: _Problem) -> tuple[int, int]:
        return self.batch, self.head // problem.group


def _parts(
    device: Device, problem: _Problem, stats: Region, written: Region | None, line_bytes: int = 0
) -> Iterator[_Part]:
    """One part, unless a tensor is larger than a kernel may bind; each line takes ``line_bytes`` of temporary memory."""
    q, k = problem.q, problem.k
    batch, heads, count = q.shape[0], q.shape[1], problem.lines
    most = device.capabilities.binding_bytes
    regions = [q, k, stats, *problem.scores.regions.values()] + [x for x in (written, problem.grad) if x is not None]
    if all(x.storage.size <= most for x in regions) and batch * heads * count * line_bytes <= most:
        yield _Part(0, batch, 0, heads, 0, count)
        return
    # All tensors with lines: the one with the longest decides.
    with_lines = [x for x in (written, problem.grad, stats) if x is not None]
    if problem.rows is None:
        with_lines += [q, *problem.scores.pairs.values()]
    longest = max(line_bytes, *(x.strides[2] * x.itemsize for x in with_lines if x.shape[2] > 1), 4 * k.shape[2])
    length = max(1, (most - 512) // longest)
    for b in range(batch):
        for h in range(heads):
            for line in range(0, count, length):
                yield _Part(b, 1, h, 1, line, min(length, count - line))


def _records(device: Device, problem: _Problem, part: _Part, stats: Region) -> None:
    rows, call_scores = problem.rows, problem.scores
    kernel = device.kernel(
        "probs", stage="stats", dtype=DTYPES[problem.q.dtype], variant=call_scores.variant,
        rows="" if rows is None else DTYPES[rows.dtype], grad=problem.grad is not None, to=False, raw=False,
        micro=problem.micro,
    )  # fmt: skip
    regions, parameters = _inputs(problem, part, call_scores, 1, 0)
    if rows is not None:
        regions["rows"] = rows.narrow(0, part.line, part.lines)
    device.run(kernel, int(parameters[0]), parameters, **regions, stats=part.of(stats))


def _write(device: Device, problem: _Problem, part: _Part, stats: Region, to: Region, raw: Region | None) -> None:
    written = {"to": to} if raw is None else {"to": to, "raw": raw}
    # The records already account for lengths and sinks.
    variant = problem.scores.variant._replace(lengths=False, sink=False)
    call_scores = problem.scores if variant.dropout else problem.scores._replace(aux=None)
    columns = to.shape[3]
    regions, parameters = _inputs(problem, part, call_scores, -(-columns // _KEYS), columns)
    regions["stats"] = part.of(stats)
    # One after the other, if mask, bias and seed take up the buffers that a kernel may bind.
    together = [written] if len(regions) + len(written) <= 8 else [{name: x} for name, x in written.items()]
    for results in together:
        kernel = device.kernel(
            "probs", stage="write", dtype=DTYPES[problem.q.dtype], variant=variant,
            rows="" if problem.rows is None else "named", grad=problem.grad is not None, to="to" in results,
            raw="raw" in results, micro=problem.micro,
        )  # fmt: skip
        device.run(kernel, int(parameters[0]), parameters, **regions, **results)


def _inputs(
    problem: _Problem, part: _Part, call_scores: scores.Scores, key_tiles: int, columns: int
) -> tuple[dict[str, Region], tuple[float, ...]]:
    """Bindings and parameters of either stage; the first parameter is the number of workgroups."""
    rows, grad, named = problem.rows, problem.grad, problem.rows is not None
    q, k = part.of_queries(problem.q, named), part.of_keys(problem.k, problem)
    call_scores = call_scores.narrow(part.batch, part.batches, part.head, part.heads, call_scores.numbers.group)
    call_scores = call_scores.with_pairs({n: part.of_lines(x, named) for n, x in call_scores.pairs.items()})
    tiles = -(-part.lines // (16 * problem.micro))
    parameters = (
        tiles * key_tiles * part.heads * part.batches, tiles, key_tiles, part.lines, columns, part.line, problem.d4,
        0 if rows is None else rows.strides[0], *scores.vectors(q), *scores.vectors(k),
        *((0, 0, 0, 0) if grad is None else grad.strides), *call_scores.parameters,
    )  # fmt: skip
    given = {} if grad is None else {"grad": part.of(grad)}
    return {"q": q, "k": k, **call_scores.regions, **given}, parameters


def _product(
    device: Device, problem: _Problem, part: _Part, dproducts: Region, stats: Region | None, before: Region | None,
    out: Region,
) -> None:  # fmt: skip
    """Gradients of rows of q; or of keys, if the records of the rows are given."""
    transposed = stats is not None
    kernel = device.kernel(
        "probs_product", dtype=DTYPES[problem.q.dtype], to=DTYPES[out.dtype], transposed=transposed,
        adds=before is not None,
    )  # fmt: skip
    group = problem.group if part.heads == problem.q.shape[1] else 1
    row_tiles, column_tiles = -(-out.shape[2] // 64), -(-problem.d4 // 16)
    workgroups = row_tiles * column_tiles * out.shape[0] * out.shape[1]
    regions: dict[str, Region] = {"d": dproducts, "out": out}
    if stats is not None:
        regions |= {"x": part.of_queries(problem.q, problem.rows is not None), "stats": stats}
    else:
        regions["x"] = part.of_keys(problem.k, problem)
    if before is not None:
        regions["before"] = before
    parameters = (
        workgroups, row_tiles, column_tiles, part.heads, group, part.lines, problem.k.shape[2],
        dproducts.shape[3] // 4, problem.d4, *scores.vectors(regions["x"]),
    )  # fmt: skip
    device.run(kernel, workgroups, parameters, **regions)


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
        x, y = self.y.flat(), made.flat()
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
    device: Device, forward: Any, bias: Region | None, sink: Region | None, shape: tuple[int, ...]
) -> tuple[Region | None, ...]:
    """Gradients if there are no keys or no results; NaN if rows are named of a q that has none."""
    value = math.nan if forward.q.shape[2] == 0 and 0 not in shape else 0.0
    return (
        copies.full(device, forward.q.shape, 0.0, forward.q.dtype),
        copies.full(device, forward.k.shape, value, forward.k.dtype),
        None if bias is None else copies.full(device, forward.bias.shape, value, bias.dtype),
        None if sink is None else copies.full(device, sink.shape, value, sink.dtype),
    )


def _shape(args: Any) -> tuple[int, int, int, int]:
    lines = args.q.shape[2] if args.rows is None else args.rows.shape[0]
    return args.q.shape[0], args.q.shape[1], lines, args.k.shape[2]

"""The gradient of an attention bias in WGSL: see ``wgsl/attention_bias.wgsl``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from headwise.backends.webgpu import copies, scores
from headwise.backends.webgpu.backward_kernels import Problem, ranges
from headwise.backends.webgpu.device import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region, contiguous_strides

_TILE = 32  # rows and keys of a tile of scores
_WORKGROUPS = 512  # enough to fill a large GPU
_MOST_PARTIALS = 1 << 20  # elements of all splits, if there are more than four


def bias_gradient(
    device: Device, problems: Sequence[Problem], given: Region, q_shape: tuple[int, ...], k_shape: tuple[int, ...]
) -> Region:
    """``problems``: the pieces of the call, in the order of batch entries, then heads."""
    bias = given.with_leading(4)
    batch, heads, q_length, _ = q_shape
    if bias.numel == 0 or batch * heads * q_length * k_shape[2] == 0:
        return copies.full(device, given.shape, 0.0, bias.dtype)
    per = tuple(size > 1 for size in bias.shape)
    if len(problems) == 1 and 4 * _rounded(bias) <= device.capabilities.binding_bytes:
        owners, readers = _owners_and_readers(batch, heads, q_length, k_shape[2], per)
        fitting = device.capabilities.binding_bytes // (4 * _rounded(bias))
        splits = max(1, min(readers, _WORKGROUPS // owners, max(4, _MOST_PARTIALS // bias.numel), fitting))
        partials = _empty_partials(device, splits, bias)
        _add(device, problems[0], partials, splits, per, bias.shape, (0, q_length), False)
        return _sum_of_splits(device, partials, bias).with_shape(given.shape)
    # Too large to bind at once: one head at a time, each adding to the sums of those before it.
    partials = _empty_partials(device, 1, bias)
    for problem in problems:
        for head, single in _single_heads(device, problem):
            one = partials.with_shape(bias.shape)
            for dim, first in ((0, single.piece.batch), (1, head)):
                one = one.narrow_broadcast(dim, first, 1)
            for own_range, seen in ranges(device, single, 2, *((one,) if per[2] else ())):
                add = any(
                    at > 0 and not owned
                    for at, owned in zip((single.piece.batch, head, own_range[0]), per, strict=False)
                )
                part = one.narrow_broadcast(2, own_range[0], own_range[1] - own_range[0])
                _add(device, seen, part, 1, per, bias.shape, own_range, add)
    return _sum_of_splits(device, partials, bias).with_shape(given.shape)


def _empty_partials(device: Device, splits: int, bias: Region) -> Region:
    return device.empty((splits, _rounded(bias)), torch.float32)


def _rounded(bias: Region) -> int:
    """Elements of the bias in whole vectors of four."""
    return -(-bias.numel // 4) * 4


def _owners_and_readers(batch: int, heads: int, q_length: int, k_length: int, per: tuple[bool, ...]) -> tuple[int, int]:
    """Tiles of the bias, and tiles of scores that read each of them."""
    owners, readers = 1, 1
    counts = (batch, heads, -(-q_length // _TILE), -(-k_length // _TILE))
    for count, owned in zip(counts, per, strict=True):
        owners, readers = (owners * count, readers) if owned else (owners, readers * count)
    return owners, readers


def _single_heads(device: Device, problem: Problem) -> Iterator[tuple[int, Problem]]:
    """Each query head of a problem, by its number in the call, as a problem of its own."""
    for b, h in itertools.product(*map(range, problem.q.shape[:2])):
        yield problem.piece.key_head * problem.piece.group + h, problem.single_head(b, h).bound(device)


def _add(
    device: Device, problem: Problem, partials: Region, splits: int, per: tuple[bool, ...], shape: tuple[int, ...],
    own_range: tuple[int, int], add: bool,
) -> None:  # fmt: skip
    """One dispatch, into ``partials`` of a bias of ``shape``, over the rows in ``own_range``."""
    q, k, v, grad = problem.q, problem.k, problem.v, problem.grad
    per_batch, per_head, per_query, per_key = per
    owners, _ = _owners_and_readers(q.shape[0], q.shape[1], own_range[1] - own_range[0], k.shape[2], per)
    kernel = device.kernel(
        "attention_bias", variant=problem.scores.variant, dtype=DTYPES[q.dtype], first=q.shape[3] // 4,
        second=v.shape[3] // 4, per_batch=per_batch, per_head=per_head, per_query=per_query, per_key=per_key,
    )  # fmt: skip
    strides = tuple(s if owned else 0 for s, owned in zip(contiguous_strides(shape), per, strict=True))
    parameters = (
        splits, int(add), *own_range, problem.stats_first, *(n for x in (q, k, v, grad) for n in scores.vectors(x)),
        -(-math.prod(shape) // 4) * 4, *strides, *problem.scores.parameters,
    )  # fmt: skip
    regions = {"q": q, "k": k, "v": v, "grad": grad, "stats": problem.stats, **problem.scores.tensors}
    device.run(kernel, owners * splits, parameters, **regions, partials=partials)


def _sum_of_splits(device: Device, partials: Region, bias: Region) -> Region:
    splits, rounded = partials.shape
    if splits == 1 and bias.dtype == torch.float32:
        return partials
    dbias = device.empty(bias.shape, bias.dtype)
    kernel = device.kernel("attention_bias_sum", dtype=DTYPES[bias.dtype])
    # Several splits are always small; a single one may be larger than a binding.
    step = rounded if splits > 1 else (device.capabilities.binding_bytes - 512) // 4 // 64 * 64
    for start in range(0, rounded, step):
        count = min(step, rounded - start)
        source = partials.narrow(1, start, count)
        target = Region(dbias.storage, dbias.dtype, (count,), (1,), dbias.offset + start)
        device.run(kernel, -(-count // 1024), (count // 4, splits), partials=source, dbias=target)
    return dbias

"""The gradient of an attention bias in WGSL: see ``wgsl/attention_bias.wgsl``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from headwise.backends.webgpu import copies, scores
from headwise.backends.webgpu.runtime import Device
from headwise.backends.webgpu.shaders import DTYPES
from headwise.backends.webgpu.storage import Region, contiguous_strides

if TYPE_CHECKING:
    from headwise.backends.webgpu.backward_kernels import Problem

    Windows = Callable[..., Iterator[tuple[tuple[int, int], Problem]]]

_TILE = 32  # rows and keys of a tile of scores
_WORKGROUPS = 512  # enough to fill a large GPU
_MOST_PARTS = 1 << 20  # elements of all shares, beyond four


def bias_gradient(
    device: Device, problems: Sequence[Problem], windows: Windows, bias: Region, q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
) -> Region:  # fmt: skip
    """``problems`` are the pieces that make up the call, batch entry after batch entry, head after head."""
    batch, heads, q_length, _ = q_shape
    if bias.numel == 0 or batch * heads * q_length * k_shape[2] == 0:
        return copies.full(device, bias.shape, 0.0, bias.dtype)
    per = tuple(size > 1 for size in bias.shape)
    if len(problems) == 1 and 4 * bias.numel <= device.capabilities.binding_bytes:
        owners, readers = _owners_and_readers(batch, heads, q_length, k_shape[2], per)
        shares = max(1, min(readers, _WORKGROUPS // owners, max(4, _MOST_PARTS // bias.numel)))
        parts = _empty_parts(device, shares, bias)
        _add(device, problems[0], parts, shares, per, bias.shape, (0, q_length), False)
        return _sum_of_shares(device, parts, bias)
    # Too large to be seen at once: one head after the other, and each adds to what the ones before it left.
    parts = _empty_parts(device, 1, bias)
    for problem in problems:
        for head, single in _single_heads(device, problem):
            one = parts.with_shape(bias.shape)
            for dim, first in ((0, single.piece.batch), (1, head)):
                one = one.narrow(dim, first, 1) if per[dim] else one
            for window, seen in windows(device, single, 2, *((one,) if per[2] else ())):
                add = any(
                    at > 0 and not owned for at, owned in zip((single.piece.batch, head, window[0]), per, strict=False)
                )
                part = one.narrow(2, window[0], window[1] - window[0]) if per[2] else one
                _add(device, seen, part, 1, per, bias.shape, window, add)
    return _sum_of_shares(device, parts, bias)


def _empty_parts(device: Device, shares: int, bias: Region) -> Region:
    return device.empty((shares, -(-bias.numel // 4) * 4), torch.float32)


def _owners_and_readers(batch: int, heads: int, q_length: int, k_length: int, per: tuple[bool, ...]) -> tuple[int, int]:
    """Tiles of the bias, and tiles of scores that read each of them."""
    owners, readers = 1, 1
    counts = (batch, heads, -(-q_length // _TILE), -(-k_length // _TILE))
    for count, owned in zip(counts, per, strict=True):
        owners, readers = (owners * count, readers) if owned else (owners, readers * count)
    return owners, readers


def _single_heads(device: Device, problem: Problem) -> Iterator[tuple[int, Problem]]:
    """Each query head of the call that a problem has, and the problem of it alone."""
    piece, of_call = problem.piece, problem.scores
    batches, heads, length, _ = problem.q.shape
    for b, h in itertools.product(range(batches), range(heads)):
        of_query = (x.narrow(0, b, 1).narrow(1, h, 1) for x in (problem.q, problem.grad))
        of_key = (x.narrow(0, b, 1).narrow(1, h // piece.group, 1) for x in (problem.k, problem.v))
        q, grad, k, v = (scores.bindable(device, x) for x in (*of_query, *of_key))
        regions = dict(of_call.regions)
        for name, x in regions.items():
            x = x.narrow(0, b, 1) if x.shape[0] > 1 else x
            regions[name] = x.narrow(1, h, 1) if x.shape[1] > 1 else x
        head = piece.key_head * piece.group + h
        yield head, problem._replace(
            piece=piece._replace(batch=piece.batch + b, batches=1, key_head=head // piece.group, key_heads=1),
            q=q, k=k, v=v, grad=grad, stats_first=problem.stats_first + (b * heads + h) * length,
            scores=of_call._replace(parameters=(1, 1, 1, *of_call.parameters[3:]), regions=regions),
        )  # fmt: skip


def _add(
    device: Device, problem: Problem, parts: Region, shares: int, per: tuple[bool, ...], shape: tuple[int, ...],
    window: tuple[int, int], add: bool,
) -> None:  # fmt: skip
    """One dispatch, into ``parts`` of a bias of ``shape``; rows in ``window`` of the scores alone."""
    q, k, v, grad = problem.q, problem.k, problem.v, problem.grad
    per_batch, per_head, per_query, per_key = per
    owners, _ = _owners_and_readers(q.shape[0], q.shape[1], window[1] - window[0], k.shape[2], per)
    kernel = device.kernel(
        "attention_bias", variant=problem.scores.variant, dtype=DTYPES[q.dtype], first=q.shape[3] // 4,
        second=v.shape[3] // 4, per_batch=per_batch, per_head=per_head, per_query=per_query, per_key=per_key,
    )  # fmt: skip
    strides = tuple(s if owned else 0 for s, owned in zip(contiguous_strides(shape), per, strict=True))
    parameters = (
        shares, int(add), *window, problem.stats_first, problem.piece.batch,
        *(n for x in (q, k, v, grad) for n in scores.vectors(x)), -(-math.prod(shape) // 4) * 4, *strides,
    )  # fmt: skip
    regions = {"q": q, "k": k, "v": v, "grad": grad, "stats": problem.stats, "parts": parts, **problem.scores.regions}
    device.run(kernel, owners * shares, parameters + problem.scores.parameters, **regions)


def _sum_of_shares(device: Device, parts: Region, bias: Region) -> Region:
    shares, rounded = parts.shape
    if shares == 1 and bias.dtype == torch.float32:
        return parts.with_shape(bias.shape)
    dbias = device.empty(bias.shape, bias.dtype)
    kernel = device.kernel("attention_bias_sum", dtype=DTYPES[bias.dtype])
    # Several shares are few elements by choice; one share may be larger than a kernel can see.
    step = rounded if shares > 1 else (device.capabilities.binding_bytes - 512) // 4 // 64 * 64
    for start in range(0, rounded, step):
        count = min(step, rounded - start)
        source = parts.narrow(1, start, count)
        target = Region(dbias.storage, dbias.dtype, (count,), (1,), dbias.offset + start)
        device.run(kernel, -(-count // 1024), (count // 4, shares), parts=source, dbias=target)
    return dbias

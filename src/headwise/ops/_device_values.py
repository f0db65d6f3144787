"""Checks of values that live on the device (ids, targets, lengths, tables).

In validate mode alone, because they wait for the device. On the normal path nothing is read back and a kernel marks a
bad value with NaN; see `headwise.config`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def _readable(values: Tensor) -> Tensor:
    """``values``, or a copy where PyTorch can look at them: a `headwise.webgpu.Array` compares nothing."""
    return values.torch() if hasattr(values, "headwise_device") else values  # type: ignore[attr-defined]


def in_range(op: str, name: str, values: Tensor | None, high: int, allowed: int | None = None) -> None:
    """Raise a ValueError that names the first of ``values`` outside [0, high), unless it equals ``allowed``."""
    if values is None:
        return
    values = _readable(values)
    bad = (values < 0) | (values >= high)
    if allowed is not None:
        bad &= values != allowed
    where = bad.nonzero()
    if where.shape[0] == 0:
        return
    index = tuple(where[0].tolist())
    exception = "" if allowed is None else f" or {allowed}"
    position = f"[{', '.join(map(str, index))}]" if index else ""
    raise ValueError(f"{op}: {name}{position} is {int(values[index])}; it needs to be from 0 to {high - 1}{exception}")


def packed(op: str, name: str, cu_seqlens: Tensor, total: int, longest: int) -> None:
    """Offsets of packed sequences: from 0 upwards, inside the tensor, no sequence longer than announced."""
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"{op}: {name}[0] is {offsets[0]}; it needs to be 0")
    for i, (start, stop) in enumerate(pairwise(offsets), start=1):
        if stop < start:
            raise ValueError(f"{op}: {name}[{i}] is {stop}, below {name}[{i - 1}] = {start}; it needs to grow")
        if stop > total:
            raise ValueError(f"{op}: {name}[{i}] is {stop}; it needs to be at most the {total} packed rows")
        if stop - start > longest:
            raise ValueError(
                f"{op}: {name}[{i}] ends a sequence of {stop - start} rows; max_seqlen says at most {longest}"
            )


def pages(op: str, block_table: Tensor, lengths: Tensor, kv_starts: Tensor | None, page_size: int, pages: int) -> None:
    """Every entry that a sequence reads, from its start to its length, names a page that exists."""
    block_table, lengths = _readable(block_table), _readable(lengths)
    starts = torch.zeros_like(lengths) if kv_starts is None else _readable(kv_starts)
    first = torch.arange(block_table.shape[1], device=block_table.device)[None, :] * page_size
    used = torch.maximum(first, starts[:, None]) < torch.minimum(first + page_size, lengths[:, None])
    bad = used & ((block_table < 0) | (block_table >= pages))
    if bad.any():
        row, column = (int(i) for i in bad.nonzero()[0])
        value = int(block_table[row, column])
        raise ValueError(
            f"{op}: block_table[{row}, {column}] is {value}; it needs to be from 0 to {pages - 1}, the pages of the cache"
        )


def rows(op: str, values: Tensor, limit: int) -> None:
    values = _readable(values)
    bad = (values < -limit) | (values >= limit)
    if bad.any():
        index = int(bad.nonzero()[0])
        raise ValueError(f"{op}: rows[{index}] is {int(values[index])}; it needs to be from {-limit} to {limit - 1}")

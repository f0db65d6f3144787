"""Decoding against a cache that is sharded along the sequence: each rank attends over its part, and the parts are merged.

By one gather of all (out, lse), float32: they are small, and time is latency. Where they are not (many ranks and sequences)
each rank merges a share of the rows, and those are gathered: the bytes of an all-reduce, in a fixed order. An all-reduce has
none, and could not do it at once, since a log-sum-exp needs the greatest of all first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise import layout as memory
from headwise.distributed import costs
from headwise.distributed.groups import (
    Description,
    Group,
    Peers,
    agree,
    check_plain,
    exchange,
    flag_values,
    gather,
    needs_gradient,
    peers_of,
)  # fmt: skip
from headwise.ops import _autocast, _checks
from headwise.ops.attention import _arguments, merge_attention, unrounded
from headwise.ops.attention._arguments import UNBOUNDED, Window
from headwise.ops.attention.decode import AUTOCAST
from headwise.ops.attention.decode import _check as check_decode

OP = "context_parallel_decode"


@torch.compiler.disable  # type: ignore[untyped-decorator]  # ranks talk about the call before it runs
def context_parallel_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, group: Group, *, block_table: Tensor | None = None,
    kv_starts: Tensor | None = None, window: Window = None, scale: float | None = None, softcap: float | None = None,
    sink: Tensor | None = None, return_lse: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention_decode` over a cache of which every rank holds a part: the same whole result on every rank.

    q                 ``(B, Hq, D)`` or ``(B, Hq, Sq, D)``, the same on every rank
    k_cache, v_cache  ``(B, Hk, C, D)`` and ``(B, Hk, C, Dv)``: the next C positions after those of the ranks before; C may
                      differ between ranks. With block_table this rank's pages, as in `attention_decode`
    block_table       ``(B, max_pages)`` int32, of this rank: its C is ``max_pages * page_size``
    lengths           ``(B,)`` ints, the same on every rank: valid positions of the whole cache, the new tokens included
    kv_starts         ``(B,)`` ints, the same on every rank: positions before it do not exist
    other flags       as in `attention_decode`

    For inference: it has no gradient.
    """
    q, k_cache, v_cache = _autocast.cast_operands(q, k_cache, v_cache, rule=AUTOCAST)
    peers = peers_of(OP, group)
    flags: list[_arguments.Flags] = []

    def check() -> Description:
        given = {"lengths": lengths, "kv_starts": kv_starts, "block_table": block_table, "sink": sink}
        check_plain(OP, q=q, k_cache=k_cache, v_cache=v_cache, **given)
        decode = _check(q, k_cache, v_cache, lengths, kv_starts, block_table, sink, return_lse, window, scale, softcap)
        flags.append(decode.flags)
        same = {
            "shape of q": tuple(q.shape), "Hk, Dv": (k_cache.shape[1], v_cache.shape[3]), "dtype": str(q.dtype),
            "device": q.device.type, "sink": None if sink is None else str(sink.dtype), "return_lse": return_lse,
            "backend": backend, "kv_starts": None if kv_starts is None else tuple(kv_starts.tolist()),
            "lengths": tuple(lengths.tolist()), **flag_values(flags[0]),
        }  # fmt: skip
        return Description(same, (k_cache.shape[2] * (1 if block_table is None else block_table.shape[1]),))

    agreed = agree(peers, check)
    rooms = [room for (room,) in agreed.lengths]
    dtype = memory.statistics_dtype(q.dtype)  # of partials, as in `blocks`
    queries = q[:, :, None] if q.dim() == 3 else q
    parts = []
    for row in range(queries.shape[2]):
        # A query sees the keys up to its own position: one length and, under a window, one start for every row.
        stop = lengths.long() - (queries.shape[2] - 1 - row)
        start = torch.zeros_like(stop) if flags[0].left == UNBOUNDED else stop - 1 - flags[0].left
        if kv_starts is not None:
            start = torch.maximum(start, kv_starts.long())
        stop, start = ((x - sum(rooms[: peers.rank])).clamp(0, rooms[peers.rank]) for x in (stop, start))
        parts.append(
            unrounded.attention_decode(
                queries[:, :, row], k_cache, v_cache, stop, kv_starts=torch.minimum(start, stop),
                block_table=block_table, scale=flags[0].scale, softcap=flags[0].softcap or None, backend=backend,
            )
        )  # fmt: skip
    shape = (*queries.shape[:3], v_cache.shape[3] + 1)
    mine = queries.new_zeros(shape, dtype=dtype)
    for row, (out, lse) in enumerate(parts):
        mine[:, :, row, :-1], mine[:, :, row, -1] = out, lse
    rows, machine = mine.view(-1, mine.shape[-1]), costs.machine_of(q.device, agreed.one_host)
    way = costs.way_of_decode(rows.shape[0], rows.shape[1], mine.element_size(), peers.ranks, machine)
    of_sink = None if sink is None else sink.to(dtype)[:, None].expand(shape[:3]).reshape(-1)
    merged = (_gathered if way == "gather" else _scattered)(peers, rows, of_sink, backend).view(shape)
    out, lse = merged[..., :-1], merged[..., -1]
    # Loud, as in `attention_decode`.
    bad = (lengths < 0) | (lengths > sum(rooms))
    if kv_starts is not None:
        bad = bad | (kv_starts < 0) | (kv_starts > sum(rooms))
    bad = bad[:, None, None]
    out, lse = out.to(q.dtype).masked_fill(bad[..., None], torch.nan), lse.masked_fill(bad, torch.nan)
    if q.dim() == 3:
        out, lse = out[:, :, 0], lse[:, :, 0]
    return (out, lse) if return_lse else out


# A row is (out, lse) of one query and head. Ranks are merged in their order, and every rank gets the same bits.


def _gathered(peers: Peers, rows: Tensor, sink: Tensor | None, backend: str | None) -> Tensor:
    parts = gather(peers, rows.reshape(-1), [rows.numel()] * peers.ranks, "merging parts")
    return _merged([part.view(rows.shape) for part in parts], sink, backend)


def _scattered(peers: Peers, rows: Tensor, sink: Tensor | None, backend: str | None) -> Tensor:
    """Each rank merges its share of the rows and sends that to the others."""
    count, width = rows.shape
    shares = [costs.share_of(count, rank, peers.ranks) for rank in range(peers.ranks)]
    own, first = shares[peers.rank], sum(shares[: peers.rank])
    sent = [part.reshape(-1).view(torch.uint8) for part in rows.split(shares)]
    received = exchange(peers, sent, [own * width * rows.element_size()] * peers.ranks, "scattering parts")
    parts = [part.view(rows.dtype).view(own, width) for part in received]
    mine = _merged(parts, None if sink is None else sink[first : first + own], backend)
    gathered = gather(peers, mine.reshape(-1), [share * width for share in shares], "gathering merged parts")
    return torch.cat(gathered).view(count, width)


def _merged(parts: list[Tensor], sink: Tensor | None, backend: str | None) -> Tensor:
    outs, lses = (
        [x[None, None].contiguous() for x in xs] for xs in zip(*((p[:, :-1], p[:, -1]) for p in parts), strict=True)
    )
    if sink is not None:  # an empty part with the sink in its denominator: counted once
        outs.append(torch.zeros_like(outs[0]))
        lses.append(sink[None, None].contiguous())
    out, lse = merge_attention(outs, lses, backend=backend)
    return torch.cat([out[0, 0], lse[0, 0, :, None]], 1)


def _check(
    q: Any, k_cache: Any, v_cache: Any, lengths: Any, kv_starts: Any, block_table: Any, sink: Any, return_lse: Any,
    window: Window, scale: float | None, softcap: float | None,
) -> _arguments.Decode:  # fmt: skip
    found = check_decode(OP, q, k_cache, v_cache, lengths, kv_starts, block_table, sink, window, scale, softcap, None)
    _checks.boolean(OP, "return_lse", return_lse)
    if any(map(needs_gradient, (q, k_cache, v_cache, sink))):
        raise NotImplementedError(
            f"{OP}: an input requires a gradient, and there is none: call it under torch.no_grad()"
        )
    return found

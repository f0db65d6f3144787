"""Attention over a sequence that is sharded over ranks, forward and backward: the public function and its checks.

`ring` and `ulysses` compute it, `costs` chooses between them.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headwise import layout as memory
from headwise.distributed import costs, dtensors, ring, ulysses
from headwise.distributed.blocks import Dropping, Options, Plan, Region, length_of
from headwise.distributed.groups import (
    Description,
    Group,
    Peers,
    agree,
    check_plain,
    flag_values,
    needs_gradient,
    peers_of,
)  # fmt: skip
from headwise.distributed.shards import Segment, check_layout, parts_of
from headwise.ops import _autocast, _checks
from headwise.ops.attention import _arguments, unrounded
from headwise.ops.attention._arguments import Window
from headwise.ops.attention.dense import LETTERS

METHODS = ("auto", "ring", "gather", "ulysses")
OP = "context_parallel_attention"
LENGTHS = ("kv_lengths", "q_lengths", "kv_starts")
SCORES = ("mask", "bias")


@torch.compiler.disable  # type: ignore[untyped-decorator]  # ranks talk about the call before it runs: a graph ends here
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group, *, method: str = "auto", layout: str | None = None,
    causal: bool = False, window: Window = None, mask: Tensor | None = None, bias: Tensor | None = None,
    kv_lengths: Tensor | None = None, q_lengths: Tensor | None = None, kv_starts: Tensor | None = None,
    cu_seqlens: Tensor | None = None, scale: float | None = None, softcap: float | None = None,
    sink: Tensor | None = None, dropout: float = 0, dropout_seed: int | Tensor | None = None,
    deterministic: bool = True, return_lse: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` over the whole sequence, of which q, k and v are this rank's shards: this rank's rows of the result.

    group          a process group, or a DeviceMesh of one dimension
    method         "ring": blocks of keys go round, two of them in memory; "gather": all keys on every rank; "ulysses": all
                   of the sequence for some of the heads; "auto": the cheapest by `costs`
    layout         how q, k and v are sharded, as in `shard`: "zigzag" or "contiguous". None: zigzag; of DTensors, contiguous
    mask, bias     the rows of this rank's queries (or 1), the keys of the whole sequence (or 1)
    kv_lengths, q_lengths, kv_starts   as in `attention`, of the whole sequence, the same on every rank
    cu_seqlens     ``(documents + 1,)`` ints, the same on every rank: the sequence is documents end to end, which see nothing
                   of each other; their borders may lie anywhere
    dropout, dropout_seed   as in `attention` of the whole sequence, which drops the same entries; with cu_seqlens as in
                   `attention_varlen`, in a batch of 1. Without a seed rank 0 draws one. It is read on the host
    other flags    as in `attention`, positions being those of the whole sequence

    q, k and v may be DTensors, sharded along dimension 2 on the dimension of the mesh that group is, as in mesh["context"],
    and along dimension 0 or 1 or not at all on others; so are the results then. Other DTensors lie as q does, and the
    gradients of those that are the same on several ranks are Partial there. Tensors that are none are this rank's part.
    With method "ulysses" there is no mask or bias beside cu_seqlens.

    Every rank of the group calls it, and calls backward, in the same order. Arguments that differ between ranks are refused
    on all of them. The lengths and cu_seqlens are read on the host. The gradients of k and v come from the queries of all
    ranks; that of sink, and of a bias that all queries share, from what the rank computed: sum it over ranks.
    Differentiable once.
    """
    if isinstance(q, DTensor):
        arguments = {name: value for name, value in locals().items() if name not in ("q", "k", "v", "group", "layout")}
        return _of_dtensors(q, k, v, group, layout or "contiguous", arguments)
    layout = layout or "zigzag"
    q, k, v = _autocast.cast_operands(q, k, v)
    peers = peers_of(OP, group)
    scores = {"mask": mask, "bias": bias}
    lengths = {"kv_lengths": kv_lengths, "q_lengths": q_lengths, "kv_starts": kv_starts}
    flags: list[_arguments.Flags] = []
    values: dict[str, tuple[int, ...]] = {}

    def check() -> Description:
        check_plain(OP, k=k, v=v, sink=sink, cu_seqlens=cu_seqlens, **scores, **lengths)
        flags.append(
            _check(q, k, v, sink, method, layout, return_lse, causal, window, scale, softcap, deterministic, dropout)
        )
        seed = _seed(q, dropout, dropout_seed, cu_seqlens)
        _check_scores(q, scores)
        values.update(_check_lengths(q, lengths, cu_seqlens))
        if method == "ulysses" and cu_seqlens is not None and any(x is not None for x in scores.values()):
            raise NotImplementedError(
                f"{OP}: cu_seqlens and a mask or bias are given with method='ulysses', whose kernels take packed documents "
                "without them; it needs another method"
            )
        if backend is not None:  # it may refuse: better here than in the middle of an exchange
            few = (x[:1, :, :1] for x in (q, k, v))
            unrounded.attention(
                *few, window=None, scale=flags[0].scale, softcap=softcap, deterministic=deterministic, backend=backend
            )
        found = _describe(q, k, v, sink, scores, values, flags[0], method, layout, return_lse, backend)
        same = {**found.same, "dropout_seed": None if dropout_seed is None else seed}
        return Description(same, (*found.lengths, seed))

    told, number, one_host = agree(peers, check)
    of_q, of_k = (parts_of(OP, name, [x[n] for x in told], layout) for n, name in ((0, "q"), (1, "k and v")))
    regions = _regions(q.shape[0], length_of(of_q), length_of(of_k), values)
    for n, name in enumerate(SCORES):
        rows = [x[2 + n] for x in told]
        if not all(row == 1 for row in rows) and rows != [x[0] for x in told]:
            raise ValueError(
                f"{OP}: {name} has {rows} rows on the ranks, whose queries are {[x[0] for x in told]}; it needs 1 on all of "
                "them, or as many as their queries"
            )
    if q.shape[0] == 0:
        none = (x.reshape(-1)[:0].sum() for x in (q, k, v, bias, sink) if x is not None)
        nothing = q.new_zeros(*q.shape[:3], v.shape[3]) + sum(none)  # gradients are zeros, as in one process
        return (nothing, nothing.sum(-1).to(memory.statistics_dtype(q.dtype))) if return_lse else nothing
    for name, x in scores.items():
        if x is not None and _keys(x) not in (1, length_of(of_k)):
            raise ValueError(
                f"{OP}: {name} has shape {_checks.shape_of(x)}; its last dim needs the keys of the whole sequence, "
                f"{length_of(of_k)}, or 1"
            )
    plan = Plan(
        peers.rank, of_q, of_k, flags[0].left, flags[0].right, regions, packed=cu_seqlens is not None
    )  # fmt: skip
    dropping = Dropping(flags[0].dropout, told[0][-1]) if dropout else None  # the seed of rank 0, if each has drawn one
    options = Options(flags[0].scale, flags[0].softcap or None, flags[0].deterministic, backend, dropping)
    if method == "auto":  # as for training: a forward without gradients may be computed again with them
        scored = any(x is not None for x in scores.values())
        method = costs.choose(costs.Sizes.of(q, k, v), plan, costs.machine_of(q.device, one_host), True, scored)
    call = ring.Call(peers, plan, options, method, number)
    with _autocast.disabled():  # the float32 parts of a row stay float32
        if method == "ulysses":
            given = {name: x for name, x in lengths.items() if x is not None}
            # One rank alone may have a single query: what all of them say decides.
            sharded = {name: all(x[2 + n] == x[0] for x in told) for n, name in enumerate(SCORES)}
            out, lse = ulysses.attend(call, q, k, v, mask, bias, sink, given, cu_seqlens, return_lse, sharded)
        else:
            out, lse = ring.attend(call, q, k, v, mask, bias, sink)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def _of_dtensors(
    q: DTensor, k: Any, v: Any, group: Group, layout: str, arguments: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    placed = dtensors.placed(OP, q, k, v, group, arguments)
    found = context_parallel_attention(*placed.local, placed.group, layout=layout, **placed.arguments)
    if isinstance(found, tuple):
        return placed.whole(found[0], v.shape[3]), placed.whole(found[1])
    return placed.whole(found, v.shape[3])


def _check(
    q: Any, k: Any, v: Any, sink: Any, method: Any, layout: Any, return_lse: Any, causal: bool, window: Window,
    scale: float | None, softcap: float | None, deterministic: bool, dropout: float,
) -> _arguments.Flags:  # fmt: skip
    _arguments.qkv(OP, q, k, v, 4, LETTERS)
    batch, heads, _, head_dim = q.shape
    _checks.shape(OP, "k", k, (batch, k.shape[1], k.shape[2], head_dim), "(B, Hk, Sk, D)")
    _checks.shape(OP, "v", v, (batch, k.shape[1], k.shape[2], v.shape[3]), "(B, Hk, Sk, Dv)")
    _arguments.grouped_heads(OP, heads, k.shape[1])
    _arguments.per_head(OP, sink, q, heads)
    _checks.boolean(OP, "return_lse", return_lse)
    check_layout(OP, layout)
    if method not in METHODS:
        raise ValueError(f"{OP}: method is {method!r}; it needs to be one of {', '.join(map(repr, METHODS))}")
    return _arguments.flags(OP, q, causal, window, scale, softcap, deterministic, dropout)


def _seed(q: Tensor, dropout: float, seed: Any, cu_seqlens: Any) -> int:
    """A number on the host: where a block lies goes to the kernels beside it."""
    if not dropout:
        return 0
    found = _arguments.seed_beside(OP, q, dropout, seed)
    _arguments.check_seed(OP, found, q)
    if cu_seqlens is not None and q.shape[0] != 1:
        raise NotImplementedError(
            f"{OP}: dropout is {dropout!r} with cu_seqlens and {q.shape[0]} batch entries; dropout counts "
            "documents or by batch entries, not both: it needs a batch of 1"
        )
    return int(found)


def _keys(x: Tensor) -> int:
    return x.shape[-1] if x.dim() else 1


def _rows(x: Tensor | None) -> int:
    return 1 if x is None or x.dim() < 2 else x.shape[-2]


def _check_scores(q: Tensor, scores: dict[str, Tensor | None]) -> None:
    for name, x in scores.items():
        if isinstance(x, Tensor):  # its keys are looked at when the ranks have told their lengths
            _arguments.per_score(OP, name, x, (*q.shape[:3], _keys(x)), q)
        elif x is not None:
            _checks.tensor(OP, name, x)


def _check_lengths(q: Tensor, lengths: dict[str, Tensor | None], cu_seqlens: Any) -> dict[str, tuple[int, ...]]:
    """The values, on the host."""
    for name, x in lengths.items():
        _arguments.per_batch(OP, name, x, q, q.shape[0])
    found = {name: tuple(x.tolist()) for name, x in lengths.items() if x is not None}
    if cu_seqlens is not None:
        if found:
            raise ValueError(f"{OP}: cu_seqlens and {', '.join(found)} are given; it takes one of them")
        _checks.integer(OP, "cu_seqlens", cu_seqlens)
        _checks.dims(OP, "cu_seqlens", cu_seqlens, 1, "(documents + 1,)")
        _checks.same_device(OP, "cu_seqlens", cu_seqlens, "q", q)
        found["cu_seqlens"] = tuple(cu_seqlens.tolist())
    return found


def _regions(batch: int, queries: int, keys: int, values: dict[str, tuple[int, ...]]) -> tuple[Region, ...]:
    """What sees what. The same on every rank, as are the errors."""
    for name, most in (("kv_lengths", keys), ("q_lengths", queries), ("kv_starts", keys)):
        for index, value in enumerate(values.get(name, ())):
            if not 0 <= value <= most:
                raise ValueError(f"{OP}: {name}[{index}] is {value}; it needs to be from 0 to {most}")
    if "cu_seqlens" in values:
        offsets = values["cu_seqlens"]
        if queries != keys:
            raise ValueError(
                f"{OP}: cu_seqlens is given with {queries} queries and {keys} keys; they need to be as many"
            )
        if not offsets or offsets[0] != 0 or list(offsets) != sorted(offsets) or offsets[-1] > keys:
            raise ValueError(
                f"{OP}: cu_seqlens is {list(offsets)}; it needs 0, then where each document ends, {keys} at most"
            )
        documents = (Segment(*ends) for ends in itertools.pairwise(offsets))
        return tuple(Region(document, document, number=number) for number, document in enumerate(documents))
    if not values:
        return (Region(Segment(0, queries), Segment(0, keys)),)
    whole = {"kv_lengths": (keys,) * batch, "q_lengths": (queries,) * batch, "kv_starts": (0,) * batch}
    entries = list(zip(*({**whole, **values}[name] for name in LENGTHS), strict=True))
    regions: list[Region] = []
    for entry, (stop, rows, start) in enumerate(entries):
        if entry and entries[entry - 1] == entries[entry]:  # one call for both
            regions[-1] = regions[-1]._replace(past=entry + 1)
        else:
            regions.append(Region(Segment(0, rows), Segment(min(start, stop), stop), entry, entry + 1))
    return tuple(regions)


def _describe(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scores: dict[str, Tensor | None],
    values: dict[str, tuple[int, ...]], flags: _arguments.Flags, method: str, layout: str, return_lse: bool,
    backend: str | None,
) -> Description:  # fmt: skip
    tensors = {"q": q, "k": k, "v": v, "sink": sink, "bias": scores["bias"]}
    needed = tuple(name for name, x in tensors.items() if needs_gradient(x))
    same: dict[str, Any] = {
        "B, Hq, D": (*q.shape[:2], q.shape[3]), "Hk, Dv": (k.shape[1], v.shape[3]), "dtype": str(q.dtype),
        "device": q.device.type, "sink": None if sink is None else str(sink.dtype), "method": method, "layout": layout,
        "return_lse": return_lse, "backend": backend, "tensors that need a gradient": needed, **flag_values(flags),
        **{f"shape of {name} without its rows": _without_rows(x) for name, x in scores.items()},
        **{name: values.get(name) for name in (*LENGTHS, "cu_seqlens")},
    }  # fmt: skip
    return Description(same, (q.shape[2], k.shape[2], *(_rows(scores[name]) for name in SCORES)))


class _Shape(NamedTuple):
    dtype: str
    leading: tuple[int, ...]
    keys: int


def _without_rows(x: Tensor | None) -> _Shape | None:
    return None if x is None else _Shape(str(x.dtype), tuple(x.shape[:-2]), _keys(x))


__all__ = ["METHODS", "Peers", "context_parallel_attention"]

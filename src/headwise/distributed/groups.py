"""Process groups: who takes part, whether all of them mean the same call, and the exchanges that attention needs.

Every message is sized by what all ranks know beforehand, and empty ones are not sent at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.ops.attention._arguments import Flags

Group = dist.ProcessGroup | DeviceMesh


class Peers(NamedTuple):
    group: dist.ProcessGroup
    rank: int  # inside the group
    ranks: int


class Description(NamedTuple):
    """What a rank was called with."""

    same: Mapping[str, Any]  # needs to be equal on every rank
    lengths: tuple[int, ...]  # its own, of every sharded dimension


def peers_of(op: str, group: Any) -> Peers:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{op}: group is a DeviceMesh of {group.ndim} dimensions; it needs one: name it, as in mesh['context']"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{op}: group is {group!r}; it needs to be a ProcessGroup that this process is in, or a DeviceMesh"
        )
    return Peers(group, dist.get_rank(group), dist.get_world_size(group))


def agree(op: str, peers: Peers, check: Callable[[], Description]) -> list[tuple[int, ...]]:
    """The lengths on every rank, once all of them are known to mean the same call.

    A rank whose own check fails still takes part, so that nobody waits for it: every rank raises, before any tensor is sent.
    """
    mine: Description | None = None
    error: Exception | None = None
    try:
        mine = check()
    except Exception as caught:
        error = caught
    told = (mine and (dict(mine.same), mine.lengths), error and f"{type(error).__name__}: {error}")
    everyone: list[Any] = [None] * peers.ranks
    dist.all_gather_object(everyone, told, group=peers.group)
    if error is not None:
        raise error
    for rank, (_, refusal) in enumerate(everyone):
        if refusal:
            raise ValueError(f"{op}: rank {rank} refused its arguments, so every rank does: {refusal}")
    first = everyone[0][0][0]
    for rank, ((same, _), _) in enumerate(everyone):
        for name, value in same.items():
            if value != first[name]:
                raise ValueError(
                    f"{op}: {name} is {first[name]!r} on rank 0 and {value!r} on rank {rank}; it needs to be the same "
                    "on every rank"
                )
    return [lengths for (_, lengths), _ in everyone]


def flag_values(flags: Flags) -> dict[str, Any]:
    """The flags of an attention call by the names a user knows."""
    return {
        "window (right = 0: causal)": (flags.left, flags.right), "scale": flags.scale, "softcap": flags.softcap,
        "deterministic": flags.deterministic,
    }  # fmt: skip


def gather(peers: Peers, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The flat x of every rank, of ``sizes`` elements each."""
    # As bytes: not every backend knows every dtype. Padded: not every backend gathers unequal parts.
    padded = x.new_zeros(max(sizes))
    padded[: x.numel()] = x
    parts = [torch.zeros_like(padded) for _ in sizes]
    if max(sizes):
        dist.all_gather([part.view(torch.uint8) for part in parts], padded.view(torch.uint8), group=peers.group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def sum_parts(peers: Peers, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The sum over ranks of this rank's part of the flat x, whose parts have these sizes: a reduce-scatter.

    Added here in the order of the ranks, so that the bits are the same run after run.
    """
    own = sizes[peers.rank]
    received = x.new_empty(peers.ranks * own)
    if sum(sizes):
        dist.all_to_all_single(received, x, [own] * peers.ranks, list(sizes), group=peers.group)
    total = x.new_zeros(own)
    for part in received.view(peers.ranks, own):
        total += part
    return total


class Exchange:
    """Messages under way. What is sent is kept until `wait`."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._messages: list[dist.P2POp] = []
        self._kept: list[Tensor] = []
        self._works: list[dist.Work] = []

    def send(self, x: Tensor, rank: int) -> None:
        self._add(dist.isend, x, rank)

    def receive(self, like: Tensor, size: int, rank: int) -> Tensor:
        x = like.new_zeros(size)
        self._add(dist.irecv, x, rank)
        return x

    def start(self) -> None:
        if self._messages:
            self._works = dist.batch_isend_irecv(self._messages)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._kept.clear()

    def _add(self, kind: Callable[..., Any], x: Tensor, rank: int) -> None:
        if x.numel():
            group = self._peers.group
            self._messages.append(dist.P2POp(kind, x, dist.get_global_rank(group, rank % self._peers.ranks), group))
            self._kept.append(x)

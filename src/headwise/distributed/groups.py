"""Process groups: who takes part, whether all of them mean the same call, and the exchanges that attention needs.

Every message is sized by what all ranks know beforehand, and empty ones are not sent at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from headwise.ops.attention._arguments import Flags

Group = dist.ProcessGroup | DeviceMesh


class RankLostError(RuntimeError):
    """Another rank did not take part in an exchange: it died, hangs, or raised. The process group is of no use any more."""


class Peers(NamedTuple):
    group: dist.ProcessGroup
    rank: int  # inside the group
    ranks: int
    op: str  # who asks, for messages


class Description(NamedTuple):
    """What a rank was called with."""

    same: Mapping[str, Any]  # needs to be equal on every rank
    lengths: tuple[int, ...]  # its own, of every sharded dimension


class Agreed(NamedTuple):
    """What all ranks know once they have compared their arguments."""

    lengths: list[tuple[int, ...]]  # of every rank
    call: int  # a number that no other call of the group has


_calls = itertools.count()
_connected: WeakKeyDictionary[dist.ProcessGroup, set[str]] = (
    WeakKeyDictionary()
)  # to the kinds of device they were used on


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
    return Peers(group, dist.get_rank(group), dist.get_world_size(group), op)


@contextmanager
def answered(peers: Peers, phase: str) -> Iterator[None]:
    """Within it, what a process group says of a rank that is gone becomes one error that names op and phase."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(
            f"{peers.op}: rank {peers.rank} of {peers.ranks} got no answer in {phase}: another rank died, hangs, raised "
            "an error of its own, or was called with another group. Start the processes again and go on from the last "
            "checkpoint, with any number of ranks. "
            f"The process group says: {error}"
        ) from error


def agree(peers: Peers, check: Callable[[], Description]) -> Agreed:
    """Returns once all ranks are known to mean the same call.

    A rank whose own check fails still takes part, so that nobody waits for it: every rank raises, before any tensor is sent.
    """
    mine: Description | None = None
    error: Exception | None = None
    try:
        mine = check()
    except Exception as caught:
        error = caught
    told = (
        mine and ({"the function": peers.op, **mine.same}, mine.lengths),
        error and f"{type(error).__name__}: {error}",
        next(_calls),  # that of rank 0 counts
    )
    everyone: list[Any] = [None] * peers.ranks
    with answered(peers, "comparing arguments"):
        dist.all_gather_object(everyone, told, group=peers.group)
    if error is not None:
        raise error
    for rank, (_, refusal, _) in enumerate(everyone):
        if refusal:
            raise ValueError(f"{peers.op}: rank {rank} refused its arguments, so every rank does: {refusal}")
    first = everyone[0][0][0]
    for rank, ((same, _), _, _) in enumerate(everyone):
        for name in {**first, **same}:
            if same.get(name) != first.get(name):
                raise ValueError(
                    f"{peers.op}: {name} is {first.get(name)!r} on rank 0 and {same.get(name)!r} on rank {rank}; it needs "
                    "to be the same on every rank"
                )
    return Agreed([lengths for (_, lengths), _, _ in everyone], everyone[0][2])


def connect(peers: Peers, device: torch.device) -> None:
    """Before the first messages between some ranks only: NCCL needs a collective of all of them first, on this device.

    The comparison of arguments does not count: it may have gone over gloo, in a group that has a backend for each device.
    """
    kinds = _connected.setdefault(peers.group, set())
    if device.type not in kinds:
        with answered(peers, "connecting"):
            dist.all_reduce(torch.zeros(1, device=device), group=peers.group)
        kinds.add(device.type)


def same_backward(peers: Peers, call: int, device: torch.device, part: int = 0) -> None:
    """All ranks need to be in the backward of one call, and in one part of it: those of two calls may exchange messages of
    the same sizes, and every number would be wrong in silence.

    On a GPU nothing waits for the answer: where calls differ, the assertion fails there.
    """
    if peers.ranks == 1:
        return
    mine = torch.tensor([call, part], device=device)
    told = [torch.empty_like(mine) for _ in range(peers.ranks)]
    with answered(peers, "comparing calls, backward"):
        dist.all_gather(told, mine, group=peers.group)
    same = (torch.stack(told) == mine).all()
    if device.type != "cpu":
        torch._assert_async(same)
    elif not same:
        raise ValueError(
            f"{peers.op}: the ranks are in the backward of calls {[int(x[0]) for x in told]}; every rank needs to call "
            "backward in the same order"
        )


def check_plain(op: str, **tensors: Any) -> None:
    """No DTensor: part of them on one rank would be taken for the whole."""
    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise TypeError(f"{op}: {name} is a DTensor; it needs to be a plain tensor: {name}.to_local()")


def fingerprint(x: Tensor | None) -> tuple[Any, ...] | None:
    """Of ints that all ranks need to hold alike: shape, dtype, and a number that other values would hardly give.

    Value and place are mixed before they are added: sums of their products are alike for masks such as 1001 and 0110.
    """
    if x is None:
        return None
    mixed = x.detach().reshape(-1).long() * 0x1E3779B97F4A7C15
    mixed += torch.arange(mixed.numel(), device=x.device) * 0x2545F4914F6CDD1D
    for _ in range(2):
        mixed ^= mixed >> 32
        mixed *= 0x5851F42D4C957F2D
    return tuple(x.shape), str(x.dtype), int((mixed ^ (mixed >> 32)).sum())


def flag_values(flags: Flags) -> dict[str, Any]:
    """The flags of an attention call by the names a user knows."""
    return {
        "window (right = 0: causal)": (flags.left, flags.right), "scale": flags.scale, "softcap": flags.softcap,
        "deterministic": flags.deterministic,
    }  # fmt: skip


def gather(peers: Peers, x: Tensor, sizes: Sequence[int], phase: str) -> list[Tensor]:
    """The flat x of every rank, of ``sizes`` elements each."""
    # As bytes: not every backend knows every dtype.
    size = x.element_size()
    if len(set(sizes)) > 1:  # not every backend gathers unequal parts, and padded ones would be sent padded
        parts = exchange(peers, [x.view(torch.uint8)] * peers.ranks, [n * size for n in sizes], phase)
        return [part.view(x.dtype) for part in parts]
    parts = [torch.empty_like(x) for _ in sizes]
    if sizes[0]:
        with answered(peers, phase):
            dist.all_gather([part.view(torch.uint8) for part in parts], x.view(torch.uint8), group=peers.group)
    return parts


def exchange(peers: Peers, parts: Sequence[Tensor], sizes: Sequence[int], phase: str) -> list[Tensor]:
    """Bytes ``parts[r]`` to every rank r, and those of this rank from all of them, ``sizes[r]`` of rank r: an all-to-all.

    Each result has memory of its own, so that it can be seen as any dtype.
    """
    sent = [part.numel() for part in parts]
    own, received = parts[peers.rank], [n if rank != peers.rank else 0 for rank, n in enumerate(sizes)]
    sent[peers.rank] = 0
    whole = own.new_empty(sum(received))
    if peers.ranks > 1:  # all ranks or none, also where one of them has nothing to say
        message = torch.cat([part for rank, part in enumerate(parts) if rank != peers.rank])
        with answered(peers, phase):
            dist.all_to_all_single(whole, message, received, sent, group=peers.group)
    found = [part.clone() for part in whole.split(received)]
    found[peers.rank] = own
    return found


def sum_parts(peers: Peers, x: Tensor, sizes: Sequence[int], phase: str) -> Tensor:
    """The sum over ranks of this rank's part of the flat x, whose parts have these sizes: a reduce-scatter.

    Added here in the order of the ranks, so that the bits are the same run after run.
    """
    own = sizes[peers.rank]
    parts = [part.view(torch.uint8) for part in x.split(list(sizes))]
    received = exchange(peers, parts, [own * x.element_size()] * peers.ranks, phase)
    total = x.new_zeros(own)
    for part in received:
        total += part.view(x.dtype)
    return total


class Exchange:
    """Messages under way. What is sent is kept until `wait`."""

    def __init__(self, peers: Peers, phase: str) -> None:
        self._peers, self._phase = peers, phase
        self._messages: list[dist.P2POp] = []
        self._kept: list[Tensor] = []
        self._works: list[dist.Work] = []

    def send(self, x: Tensor, rank: int) -> None:
        self._add(dist.isend, x, rank)

    def receive(self, like: Tensor, size: int, rank: int) -> Tensor:
        x = like.new_empty(size)
        self._add(dist.irecv, x, rank)
        return x

    def start(self) -> None:
        if self._messages:
            with answered(self._peers, self._phase):
                self._works = dist.batch_isend_irecv(self._messages)

    def wait(self) -> None:
        with answered(self._peers, self._phase):
            for work in self._works:
                work.wait()
        self._kept.clear()

    def _add(self, kind: Callable[..., Any], x: Tensor, rank: int) -> None:
        if x.numel():
            group = self._peers.group
            self._messages.append(dist.P2POp(kind, x, dist.get_global_rank(group, rank % self._peers.ranks), group))
            self._kept.append(x)

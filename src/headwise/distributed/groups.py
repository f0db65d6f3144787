"""Process groups: who takes part, whether all of them mean the same call, and the exchanges that attention needs.

Every message is sized by what all ranks know beforehand, and empty ones are not sent at all.
"""

from __future__ import annotations

import enum
import itertools
import pickle
import socket
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
    one_host: bool  # whether all ranks run on one machine


class Kind(enum.IntEnum):
    """What a rank is about to do, the first word of what it tells the others."""

    CALL = 0
    BACKWARD = 1
    LOSS = 2


_calls = itertools.count()
_places: WeakKeyDictionary[dist.ProcessGroup, torch.device] = WeakKeyDictionary()  # where its ranks compare arguments
_connected: WeakKeyDictionary[dist.ProcessGroup, set[str]] = (
    WeakKeyDictionary()
)  # to the kinds of device they were used on


def peers_of(op: str, group: Any) -> Peers:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{op}: group is a DeviceMesh of {group.ndim} dimensions, {group.mesh_dim_names}; it needs one: name it, as "
                "in mesh['context']"
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
    told = pickle.dumps(
        (
            mine and ({"the function": peers.op, **mine.same}, mine.lengths),
            error and f"{type(error).__name__}: {error}",
            host_name(),
        )
    )
    with answered(peers, "comparing arguments"):
        headers = _meet(peers, Kind.CALL, next(_calls), 0, len(told)).tolist()
    if error is None:
        _check_kinds(peers, headers)
    if all(header[0] == Kind.CALL for header in headers):
        with answered(peers, "comparing arguments"):
            everyone = [pickle.loads(x) for x in _told(peers, told, [header[3] for header in headers])]
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
    lengths, hosts = [lengths for (_, lengths), _, _ in everyone], {host for _, _, host in everyone}
    return Agreed(lengths, headers[0][1], len(hosts) == 1)  # the number of rank 0 counts


def host_name() -> str:
    """By which ranks know whether they share a machine."""
    return socket.gethostname()


def _meet(peers: Peers, kind: Kind, call: int, part: int, size: int = 0) -> Tensor:
    """``(ranks, 4)``: what every rank is about to do, and how many bytes it has to say about it.

    Everything that ranks do together begins with this one message of one size on one device. So ranks that are about to do
    different things learn it; messages of different sizes would end a process inside of gloo.
    """
    mine = torch.tensor([kind, call, part, size], device=_meeting_place(peers.group))
    told = mine.new_empty(peers.ranks, mine.numel())
    dist.all_gather(list(told), mine, group=peers.group)
    return told


def _meeting_place(group: dist.ProcessGroup) -> torch.device:
    """The CPU where the group has a backend for it: the answer is read there."""
    found = _places.get(group)
    if found is None:
        kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
        found = _places[group] = torch.device("cpu" if "cpu" in kinds else kinds[0])
    return found


def _told(peers: Peers, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The bytes of every rank."""
    padded = torch.frombuffer(bytearray(mine.ljust(max(sizes))), dtype=torch.uint8).to(_meeting_place(peers.group))
    told = padded.new_empty(peers.ranks, padded.numel())
    dist.all_gather(list(told), padded, group=peers.group)
    return [bytes(row[:size]) for row, size in zip(told.cpu().numpy(), sizes, strict=True)]


def _check_kinds(peers: Peers, headers: Sequence[Sequence[int]]) -> None:
    for rank, (kind, call, *_) in enumerate(headers):
        if kind != headers[0][0]:
            raise ValueError(
                f"{peers.op}: rank {rank} is {_doing(kind, call)}, rank 0 {_doing(*headers[0][:2])}; every rank needs to "
                "call forward and backward in the same order"
            )


def _doing(kind: int, call: int) -> str:
    return {
        Kind.CALL: "in a forward or another call", Kind.BACKWARD: f"in the backward of call {call}",
        Kind.LOSS: "at the sum of the loss",
    }[Kind(kind)]  # fmt: skip


def connect(peers: Peers, device: torch.device) -> None:
    """Before the first messages between some ranks only: NCCL needs a collective of all of them first, on this device.

    The comparison of arguments does not count: it may have gone over gloo, in a group that has a backend for each device.
    """
    kinds = _connected.setdefault(peers.group, set())
    if device.type not in kinds:
        sum_everywhere(peers, torch.zeros(1, device=device), "connecting")
        kinds.add(device.type)


def same_backward(peers: Peers, call: int, part: int = 0) -> None:
    """All ranks need to be in the backward of one call, and in one part of it: those of two calls may exchange messages of
    the same sizes, and every number would be wrong in silence.

    In a group of NCCL alone nothing waits for the answer: where calls differ, the assertion fails on the GPU.
    """
    same_turn(peers, Kind.BACKWARD, "comparing calls, backward", call, part)


def same_turn(peers: Peers, kind: Kind, phase: str, call: int = 0, part: int = 0) -> None:
    """All ranks are about to do this."""
    if peers.ranks == 1:
        return
    with answered(peers, phase):
        told = _meet(peers, kind, call, part)
        same = (told == told[peers.rank]).all()
        if told.device.type != "cpu":
            torch._assert_async(same)
            return
    if not same:
        headers = told.tolist()
        _check_kinds(peers, headers)
        raise ValueError(
            f"{peers.op}: the ranks are in the backward of calls {[header[1] for header in headers]}; every rank needs to "
            "call backward in the same order"
        )


def needs_gradient(x: Tensor | None) -> bool:
    """Whether a backward will come to x: not under no_grad, which one rank alone may be in."""
    return x is not None and x.requires_grad and torch.is_grad_enabled()


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
        "deterministic": flags.deterministic, "dropout": flags.dropout,
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


def sum_everywhere(peers: Peers, x: Tensor, phase: str) -> None:
    """x becomes its sum over ranks."""
    with answered(peers, phase):
        dist.all_reduce(x, group=peers.group)


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

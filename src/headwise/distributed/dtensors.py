"""DTensors as inputs of `context_parallel_attention`: what lies where on a DeviceMesh, and what the gradients are there.

One dimension of the mesh has the sequence. Over the others batch entries or heads may be sharded, which attention keeps
apart, or all may be replicated. What a mask, a bias or a sink needs follows from where q lies: a dimension that it shares
with q is sharded as that of q is, and what it holds for all of them is replicated. Its gradient is a part on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from headwise.distributed.groups import Description, Group, agree, peers_of

SEQUENCE = 2  # of (B, H, S, D)
KEPT_APART = (Shard(0), Shard(1), Replicate())


class Placed(NamedTuple):
    """What this rank has, and where it lies."""

    local: tuple[Tensor, ...]  # q, k and v
    arguments: dict[str, Any]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size  # of q
    group: Group

    def whole(self, x: Tensor, *last: int) -> DTensor:
        """A result of this rank's queries as the DTensor that they are part of."""
        shape = torch.Size((*self.shape[:3], *last))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x.contiguous(), self.mesh, self.placements, shape=shape, stride=stride)


def placed(op: str, q: DTensor, k: Any, v: Any, group: Group, arguments: Mapping[str, Any]) -> Placed:
    """Agreed with the other ranks of the group."""
    mesh = q.device_mesh
    peers = peers_of(op, mesh if mesh.ndim == 1 else group)

    def check() -> Description:
        _check(op, q, k, v, group, arguments)
        same = {"kind of tensor": "DTensor", "placements of q": str(q.placements), "shape of q": tuple(q.shape)}
        return Description(same, ())

    agree(peers, check)
    found = dict(arguments)
    for name, x in arguments.items():
        if isinstance(x, DTensor):
            found[name] = x.to_local(grad_placements=_of_gradient(name, x, q))
    return Placed(
        tuple(x.to_local() for x in (q, k, v)), found, mesh, tuple(q.placements), q.shape, peers.group
    )  # fmt: skip


def _check(op: str, q: DTensor, k: Any, v: Any, group: Group, arguments: Mapping[str, Any]) -> None:
    mesh, own = q.device_mesh, peers_of(op, group).group
    of_group = [dim for dim in range(mesh.ndim) if mesh.get_group(dim) is own]
    if not of_group:
        raise ValueError(
            f"{op}: group is {group!r} and q lies on {mesh}; group needs to be the dimension of that mesh which has the "
            f"sequence{'' if mesh.ndim == 1 else _named(mesh)}"
        )
    wanted = f"Shard({SEQUENCE}) on the dimension of group, {of_group[0]}" + (
        "" if mesh.ndim == 1 else ", and Shard(0), Shard(1) or Replicate() on every other one"
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{op}: q is a DTensor and {name} is {type(x).__name__}; q, k and v need to be of one kind")
        right = all(
            placement == Shard(SEQUENCE) if dim in of_group else placement in KEPT_APART
            for dim, placement in enumerate(x.placements)
        )
        if x.device_mesh != mesh or tuple(x.placements) != tuple(q.placements) or not right:
            raise ValueError(
                f"{op}: {name} is a DTensor with placements {x.placements} on {x.device_mesh}; it needs {wanted}, as "
                f"q on the mesh of q: {mesh}"
            )
        for dim, placement in enumerate(x.placements):
            if placement == Shard(1) and x.shape[1] % mesh.size(dim):
                raise ValueError(
                    f"{op}: {name} has {x.shape[1]} heads, sharded over {mesh.size(dim)} ranks; they need to be divisible"
                )
    if arguments["dropout"] and not {Shard(0), Shard(1)}.isdisjoint(q.placements):
        raise NotImplementedError(
            f"{op}: dropout is {arguments['dropout']!r} and q has placements {q.placements}; entries that dropout drops are "
            "counted from the first batch entry and head of a rank, so it needs Replicate() beside the sequence"
        )
    for name, x in arguments.items():
        if isinstance(x, DTensor) and (x.device_mesh != mesh or tuple(x.placements) != _of(name, x, q)):
            raise ValueError(
                f"{op}: {name} is a DTensor of shape {tuple(x.shape)} with placements {x.placements} on {x.device_mesh}; "
                f"beside this q it needs {_of(name, x, q)} on the mesh of q: {mesh}"
            )


def _named(mesh: DeviceMesh) -> str:
    return f": mesh[name], with a name from {mesh.mesh_dim_names}"


def _dims(name: str, x: Tensor) -> dict[int, int]:
    """Which dimension of q each one of x goes with, other than those that hold one value for all."""
    if name == "sink":
        return {1: 0}
    if name in ("kv_lengths", "q_lengths", "kv_starts"):
        return {0: 0}
    if name in ("mask", "bias"):
        return {dim: dim + x.dim() - 4 for dim in range(3) if dim + x.dim() >= 4 and x.shape[dim + x.dim() - 4] > 1}
    return {}


def _of(name: str, x: DTensor, q: DTensor) -> tuple[Placement, ...]:
    dims = _dims(name, x)
    return tuple(Shard(dims[p.dim]) if isinstance(p, Shard) and p.dim in dims else Replicate() for p in q.placements)


def _of_gradient(name: str, x: DTensor, q: DTensor) -> tuple[Placement, ...]:
    """Where q is sharded and x is not, every rank has the part of its own queries."""
    pairs = zip(q.placements, _of(name, x, q), strict=True)
    return tuple(Partial() if p != Replicate() and own == Replicate() else own for p, own in pairs)

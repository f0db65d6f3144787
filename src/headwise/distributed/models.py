"""A model of `headwise.nn` with its sequence sharded over ranks: every rank is given the whole batch and keeps its part.

`context_parallel` hooks the model's forward. Tokens, targets, positions and packing are cut to this rank's shard on the way
in; attention goes across ranks; a loss comes out as that of the whole batch, the same on every rank. The weights' gradients
are then each rank's part, and `sum_gradients` makes them whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from headwise.distributed.attention import context_parallel_attention
from headwise.distributed.groups import (
    Description,
    Group,
    Kind,
    Peers,
    agree,
    fingerprint,
    peers_of,
    same_turn,
    sum_everywhere,
)  # fmt: skip
from headwise.distributed.shards import segments, shard_length, shard_positions, taken
from headwise.nn import Attention, Packing

OP = "context_parallel"


class Sharding:
    """A group and a layout: what cuts the inputs of a model, and puts its loss together."""

    def __init__(self, group: Group, method: str, layout: str, averaged: bool) -> None:
        self.group, self.layout, self.method, self.averaged = group, layout, method, averaged
        self.peers = peers_of(OP, group)
        self.attend = functools.partial(context_parallel_attention, group=group, method=method, layout=layout)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def same_batch(self, check: Callable[[], dict[str, Tensor | None]]) -> None:
        """All ranks are called with the same ints, which ``check`` gives by their names, or ``check`` raises: all do."""
        agree(self.peers, lambda: Description({name: fingerprint(x) for name, x in check().items()}, ()))

    def cut(self, x: Tensor, dim: int) -> Tensor:
        return taken(x, segments(x.shape[dim], self.peers.rank, self.peers.ranks, self.layout), dim)

    def check_tokens(self, total: int) -> None:
        """Every rank gets some of a sequence, for models that cannot be called without any."""
        ranks = self.peers.ranks
        for rank in range(ranks):
            if not shard_length(total, rank, ranks, self.layout):
                raise ValueError(
                    f"{OP}: the model is called with {total} tokens on {ranks} ranks, of which rank {rank} gets none in the "
                    f"{self.layout} layout; it needs one at least on every rank: {2 * ranks} are always enough"
                )

    def positions(self, total: int, device: torch.device) -> Tensor:
        return shard_positions(total, self.group, layout=self.layout, device=device)

    def whole_loss(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, whose gradient goes to each rank's own."""
        total: Tensor = _Total.apply(part, self.peers, self.peers.ranks if self.averaged else 1)
        return total


class ContextParallel:
    """What `context_parallel` did to a model. ``remove()`` undoes it."""

    def __init__(self, sharding: Sharding, handles: Iterable[Any], undo: Any) -> None:
        self.sharding, self._handles, self._undo = sharding, list(handles), undo

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._undo()


def context_parallel(
    model: nn.Module, group: Group, *, method: str = "auto", layout: str = "zigzag", averaged: bool = False
) -> ContextParallel:
    """A `headwise.nn.TransformerLM`, or a module that is called like one, over the ranks of a group.

    model     called with the whole ids ``(B, S)``, or packed ``(T,)``, on every rank; with targets it returns the loss of
              all of them, else the logits of this rank's tokens (`shard` says which, `unshard` puts them together)
    method, layout   as in `context_parallel_attention`
    averaged  the gradients will be averaged over the same ranks, as DDP and FSDP do, so the loss's gradient is multiplied by
              their number. Without it call `sum_gradients` after the backward

    Generation and caches are for one process: `ContextParallel.remove` first.
    """
    sharding = Sharding(group, method, layout, averaged)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise ValueError(
            f"{OP}: model is a {type(model).__name__} without a headwise.nn.Attention; it needs one. Models of Transformers "
            "have headwise.integrations.transformers.context_parallel"
        )
    for layer in layers:
        if layer.attend is not None:
            raise ValueError(f"{OP}: model is sharded already; call remove() first")
    for layer in layers:
        layer.attend = sharding.attend
    counts: list[Tensor] = []

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(zip(("ids", "targets"), args, strict=False)) | kwargs

        def check() -> dict[str, Tensor | None]:
            if len(args) > 2:
                raise TypeError(
                    f"{OP}: the model is called with {len(args)} positional arguments; it needs ids and targets"
                )
            for name in ("cache", "lengths"):
                if given.get(name) is not None:
                    raise NotImplementedError(f"{OP}: {name} is given, and it is not there across ranks")
            reduction = getattr(getattr(model, "loss", None), "reduction", "mean")
            if given.get("targets") is not None and reduction != "mean":
                raise NotImplementedError(
                    f"{OP}: the model's loss has reduction {reduction!r}; across ranks it needs 'mean'"
                )
            offsets = None if given.get("packing") is None else given["packing"].cu_seqlens
            ints = {name: given.get(name) for name in ("ids", "targets", "positions")}
            return {f"fingerprint of {name}": x for name, x in (ints | {"packing": offsets}).items()}

        sharding.same_batch(check)
        ids, targets, packing = given["ids"], given.get("targets"), given.get("packing")
        counts.clear()
        if targets is not None:
            real = targets != getattr(getattr(model, "loss", None), "ignore_index", -100)
            counts.append(sharding.cut(real, -1).sum() / real.sum().clamp(min=1))
            given["targets"] = sharding.cut(targets, -1)
        if packing is not None:
            given["packing"] = Packing(packing.cu_seqlens, packing.longest, sharding.cut(packing.positions, 0))
        elif given.get("positions") is None:
            given["positions"] = sharding.positions(ids.shape[-1], ids.device)
        else:
            given["positions"] = sharding.cut(given["positions"], -1)
        given["ids"] = sharding.cut(ids, -1)
        return (), given

    def after(module: nn.Module, args: Any, kwargs: Any, result: Tensor) -> Tensor:
        return sharding.whole_loss(result * counts[0].to(result.dtype)) if counts else result

    def undo() -> None:
        for layer in layers:
            layer.attend = None

    handles = (
        model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after, with_kwargs=True)
    )  # fmt: skip
    return ContextParallel(sharding, handles, undo)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sum_gradients(model: nn.Module, group: Group) -> None:
    """Every parameter's gradient becomes its sum over the ranks. Without one on any rank it stays None.

    Parameters may be sharded over other ranks, as FSDP2 over another dimension of the mesh leaves them.
    """
    peers = peers_of("sum_gradients", group)
    parameters: list[Tensor] = []

    def check() -> Description:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parameters.extend(named.values())
        for name, p in named.items():
            _check_shards(peers, name, p)
        same = {f"shape and dtype of {name}": (tuple(_own(p).shape), str(p.dtype)) for name, p in named.items()}
        return Description(same, ())

    agree(peers, check)
    if not parameters:
        return
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    # Behind the gradients: who has one at all.
    grads = [(torch.zeros_like(_own(p)) if p.grad is None else _own(p.grad)).reshape(-1).to(dtype) for p in parameters]
    flat = torch.cat([*grads, grads[0].new_tensor([p.grad is not None for p in parameters])])
    sum_everywhere(peers, flat, "the sum of the gradients of the weights")
    *totals, present = flat.split([*(x.numel() for x in grads), len(parameters)])
    for parameter, total, some in zip(parameters, totals, present.tolist(), strict=True):
        own = _own(parameter)
        parameter.grad = _placed_as(parameter, total.view_as(own).to(own.dtype, copy=True)) if some else None


def _own(x: Tensor) -> Tensor:
    """What this rank has of it."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def _placed_as(parameter: Tensor, own: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def _check_shards(peers: Peers, name: str, parameter: Tensor) -> None:
    """Ranks whose gradients are summed hold the same part of it."""
    if not isinstance(parameter, DTensor):
        return
    grad, mesh, own = parameter.grad, parameter.device_mesh, set(dist.get_process_group_ranks(peers.group))
    for dim, placement in enumerate(parameter.placements):
        if placement != Replicate() and len(own & set(dist.get_process_group_ranks(mesh.get_group(dim)))) > 1:
            raise ValueError(
                f"{peers.op}: {name} has placements {parameter.placements} on {mesh}, sharded over ranks of group, where "
                "FSDP has averaged its gradient; it needs other ranks, or context_parallel(…, averaged=True) and no "
                "sum_gradients"
            )
    if grad is not None and (not isinstance(grad, DTensor) or tuple(grad.placements) != tuple(parameter.placements)):
        raise ValueError(
            f"{peers.op}: the gradient of {name} has placements {getattr(grad, 'placements', None)}; it needs those of the "
            f"parameter, {parameter.placements}"
        )


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, peers: Peers, factor: int) -> Tensor:
        ctx.factor = factor
        total = part.detach().clone()
        # A rank that gave up on this batch may be at the next one.
        same_turn(peers, Kind.LOSS, "the sum of the loss")
        sum_everywhere(peers, total, "the sum of the loss")
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.factor, None, None

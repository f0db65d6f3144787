"""Optimizers inside of a capture: what a replay would not bring forward is refused.

An optimizer keeps moments and step counts. A replay advances those that are tensors on the GPU and were there before the
block; it cannot make them anew, and it does not see numbers of Python's, nor tensors that take the place of others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from headwise.backends.webgpu.array import Array
from headwise.backends.webgpu.capture_errors import CaptureError
from headwise.backends.webgpu.storage import Pool, Storage

_AGAIN = "Capture the step anew"


class _Group(NamedTuple):
    """A group of parameters of an optimizer, as its step was recorded."""

    group: dict[str, Any]
    options: dict[str, Any]  # what `_fact` says of them
    memory: list[Storage | None]  # of its parameters
    gradients: list[Storage | None]  # those that were there before the block


class Optimizers:
    """The optimizers that step inside of the block, with the options and memory that their steps were recorded with."""

    def __init__(self, made_inside: Pool) -> None:
        """made_inside: the pool of what the block makes."""
        self._made_inside = made_inside
        self._before: dict[int, dict[tuple[int, str], Any]] = {}
        self._recorded: dict[int, tuple[Any, list[_Group]]] = {}
        self._hooks = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        ]

    def recorded(self) -> None:
        """Stop listening: the block is over."""
        for hook in self._hooks:
            hook.remove()

    def check(self) -> None:
        """Before a replay: an error if an option or a tensor was exchanged since, for the replay would not see it."""
        for optimizer, groups in self._recorded.values():
            name, now = type(optimizer).__name__, optimizer.param_groups
            if len(now) != len(groups) or any(a is not b.group for a, b in zip(now, groups, strict=True)):
                raise CaptureError(
                    f"headwise: {name} has other groups of parameters than when the step was captured (load_state_dict and "
                    f"add_param_group make such), and a replay would go on with the old. {_AGAIN}"
                )
            for group, options, memory, gradients in groups:
                for option, fact in options.items():
                    value = _fact(group.get(option))
                    if value is not fact and value != fact:
                        raise CaptureError(_changed(name, option, value, fact))
                if [_memory(p) for p in group["params"]] != memory:
                    raise CaptureError(
                        f"headwise: a parameter of {name} lies in other memory than when the step was captured (p.data = x "
                        f"does that), and a replay would change the old. Write in place: p.data.copy_(x), or c{_AGAIN[1:]}"
                    )
                if any(
                    old is not None and _memory(p.grad) is not old
                    for p, old in zip(group["params"], gradients, strict=True)
                ):
                    raise CaptureError(
                        f"headwise: a gradient that {name} took from before the capture is gone or lies in other memory now "
                        "(zero_grad() and a backward pass do that), and a replay would go on with the old. Let the block "
                        f"make the gradients, or keep them with zero_grad(set_to_none=False) and c{_AGAIN[1:]}"
                    )

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not any(isinstance(p, Array) for group in optimizer.param_groups for p in group["params"]):
            return
        self._before[id(optimizer)] = before = _state(optimizer)
        for (_, name), value in before.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, Array):
                raise CaptureError(
                    f"headwise: {type(optimizer).__name__} keeps {name!r} on the CPU, where no replay advances it. Make the "
                    "optimizer with capturable=True, so that it is on webgpu"
                )

    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        before, name = self._before.pop(id(optimizer), None), type(optimizer).__name__
        if before is None:
            return
        for key, value in _state(optimizer).items():
            if isinstance(value, Array):
                old = before.get(key)
                if not isinstance(old, Array) or old._storage is not value._storage:
                    raise CaptureError(
                        f"headwise: {name} made its state ({key[1]!r}) inside of the capture, and every replay would make "
                        "it anew. Run one step before the capture"
                    )
            elif value != before.get(key):
                raise CaptureError(
                    f"headwise: {name} keeps {key[1]!r} on the CPU, where no replay advances it. Make the optimizer with "
                    "capturable=True, or use another"
                )
        self._recorded[id(optimizer)] = (
            optimizer,
            [
                _Group(
                    group,
                    {option: _fact(value) for option, value in group.items() if option != "params"},
                    [_memory(p) for p in group["params"]],
                    [self._of_before(p.grad) for p in group["params"]],
                )
                for group in optimizer.param_groups
            ],
        )

    def _of_before(self, grad: Any) -> Storage | None:
        storage = _memory(grad)
        return None if storage is None or storage.pool is self._made_inside else storage


def _state(optimizer: Any) -> dict[tuple[int, str], Any]:
    found = optimizer.state.items()
    return {
        (id(p), name): x for p, kept in found if isinstance(kept, dict) for name, x in kept.items() if x is not None
    }


def _memory(p: Any) -> Storage | None:
    return p._storage if isinstance(p, Array) else None


def _fact(value: Any) -> Any:
    """What a recording depends on: the memory of a tensor on the GPU, the value of all else."""
    if isinstance(value, torch.Tensor):
        return _memory(value) or value.tolist()
    return tuple(_fact(x) for x in value) if isinstance(value, tuple) else value


def _changed(name: str, option: str, value: Any, fact: Any) -> str:
    if isinstance(fact, Storage):
        return (
            f"headwise: {option} of {name} is another tensor now than when the step was captured: change that one in place "
            f"({option}.fill_(…)). {_AGAIN}"
        )
    number = isinstance(fact, (int, float, tuple)) and not isinstance(fact, bool)
    way_out = f"Make it a tensor on webgpu, and change that in place ({option}.fill_(…)), or pass it to capture(…)"
    return (
        f"headwise: {option} of {name} is {'a tensor' if isinstance(value, Storage) else value} now and was {fact} when the "
        f"step was captured: it is part of the recording. {way_out if number else _AGAIN}"
    )

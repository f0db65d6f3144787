"""Optimizers inside of a capture: what a replay would not bring forward is refused.

An optimizer keeps moments and step counts. A replay advances those that are tensors on the GPU and were there before the
block; it cannot make them anew, and it does not see numbers of Python's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from headwise.backends.webgpu.array import Array
from headwise.backends.webgpu.capture_errors import CaptureError

_Options = list[tuple[str, dict[str, Any], dict[str, Any]]]  # name of the optimizer, its group, the group's numbers


class Optimizers:
    """Those that make a step inside of the block, and the numbers that their steps were recorded with."""

    def __init__(self) -> None:
        self._before: dict[int, dict[tuple[int, str], Any]] = {}
        self._options: _Options = []
        self._hooks = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        ]

    def recorded(self) -> None:
        """The block is over."""
        for hook in self._hooks:
            hook.remove()

    def check(self) -> None:
        """Before a replay: a learning rate that was set since would be without effect."""
        for name, group, numbers in self._options:
            for option, number in numbers.items():
                if group.get(option) is not number and group.get(option) != number:
                    raise CaptureError(
                        f"headwise: {option} of {name} is {group.get(option)} now and was {number} when the step was "
                        f"captured: a number is part of the recording. Make it a tensor on webgpu, and change that in place "
                        f"({option}.fill_(…)), or pass it to capture(…)"
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
        for group in optimizer.param_groups:
            numbers = {k: v for k, v in group.items() if isinstance(v, (int, float, tuple)) and not isinstance(v, bool)}
            self._options.append((name, group, {k: v for k, v in numbers.items() if not _has_tensors(v)}))


def _state(optimizer: Any) -> dict[tuple[int, str], Any]:
    found = optimizer.state.items()
    return {
        (id(p), name): x for p, kept in found if isinstance(kept, dict) for name, x in kept.items() if x is not None
    }


def _has_tensors(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(x, torch.Tensor) for x in value)

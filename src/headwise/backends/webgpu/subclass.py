"""Who may take an array for a wrapper of other tensors: a private way into PyTorch (seen in 2.13).

PyTorch calls a tensor subclass with ``__tensor_flatten__`` a "traceable wrapper". Two callers need to hear yes: `Module.to`,
which then exchanges a parameter in its place (weights stay tied, optimizers know them), and Dynamo, which else does not
trace a tensor of a class with a dispatch of its own. All others would look for tensors within; there are none, and an array
is traced as a plain tensor of its device. If PyTorch renames the two, modules get new parameters when they move, and
`torch.compile` breaks its graph; tests/test_webgpu_compile.py sees it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_CHECKS = "_python_dispatch.py"  # the file of PyTorch that looks for the attributes
_CALLERS = {("module.py", "_apply"), ("builder.py", "_wrap")}


class VisibleToTwoCallers:
    """An attribute that the two callers above find, and nobody else."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, x: Any, owner: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.endswith(_CHECKS):
            frame = frame.f_back
        if frame is None or (_name(frame.f_code.co_filename), frame.f_code.co_name) not in _CALLERS:
            raise AttributeError("an array on WebGPU wraps no tensors")
        return self._function


def _name(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def refused(*given: Any) -> Any:
    raise NotImplementedError("headwise: an array on WebGPU wraps no tensors")

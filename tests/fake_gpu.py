"""A GPU that is not there: records are made for it and replayed on CPU memory, by kernels that are Python functions."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from headwise.backends import registry
from headwise.backends.triton import private, recorder, replay
from headwise.backends.triton.gpu import KNOWN, Facts
from headwise.config import settings

DEVICE, STREAM = -1, 77  # what PyTorch calls the device of a CPU tensor; any stream


class FakeGpu:
    """Patches what the recorder asks of CUDA. ``launches`` are those that went straight to the compiled kernel."""

    def __init__(self, monkeypatch: Any, arch: str = "sm_90") -> None:
        self.facts: Facts = KNOWN[arch]
        self.current, self.stream, self.capturing = DEVICE, STREAM, False
        self.entered: list[int] = []
        self.launches: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = []
        monkeypatch.setattr(settings, "triton_interpret", False)
        monkeypatch.setattr(recorder, "facts", lambda device: self.facts)
        monkeypatch.setattr(replay, "_current_device", lambda: self.current)
        monkeypatch.setattr(replay, "_raw_stream", lambda device: self.stream)
        monkeypatch.setattr(replay, "_empty", lambda device, dtype: torch.empty(0, dtype=dtype))
        monkeypatch.setattr(replay, "_counters_kept", {})
        monkeypatch.setattr(torch.cuda, "device", self._on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(private, "compiled", self._compiled)
        monkeypatch.setattr(private, "direct", self.direct)
        # Calls of CPU tensors that ask for this backend are recorded and "launched" like those of a GPU's own.
        rows = [row._replace(devices=("cpu",)) if row.name == "triton" else row for row in registry.BACKENDS]
        monkeypatch.setattr(registry, "BACKENDS", tuple(rows))
        monkeypatch.setattr(registry, "_missing", {**registry._missing, "triton": None})
        settings.changed()

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        self.entered.append(device)
        yield
        self.current = before

    def _compiled(self, kernel: Any, grid: Any, arguments: list[Any], options: dict[str, Any]) -> Any:
        """Kernels of this file take note of what they are compiled for; those of the backend are not compiled."""
        if isinstance(kernel, Kernel):
            kernel.compiled_for.append((grid, arguments, options))
        return kernel

    def direct(self, kernel: Any) -> private.Direct | None:
        return private.Direct(lambda *given: self.launch(kernel, *given), ("function", "metadata"), False, (1, 2, 3, 4))

    def launch(self, kernel: Any, x: int, y: int, z: int, stream: int, *given: Any) -> None:
        assert stream == self.stream
        assert given[:2] == ("function", "metadata")
        self.launches.append((kernel.__name__, (x, y, z), given[2:]))
        if isinstance(kernel, Kernel):
            kernel.function(*given[2:])

    def record(self, function: Callable[..., Any], args: Any) -> Callable[..., Any]:
        return recorder.record(function, args)


class Kernel:
    """Stands for a JIT function: a Python function of addresses and numbers."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.__name__ = function, function.__name__
        self.compiled_for: list[tuple[Any, list[Any], dict[str, Any]]] = []
        self.through_triton: list[tuple[Any, ...]] = []  # launches through Triton's own Python

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*given: Any, **options: Any) -> None:
            self.through_triton.append((grid, given, options))
            self.function(*[x.data_ptr() if isinstance(x, private.Pointer) else x for x in given])

        return run


def at(address: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The elements at an address, as a kernel sees them."""
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class Box(SimpleNamespace):
    """How a kernel reads a tensor through TMA; the descriptor says what it was made of."""

    def descriptor(self, x: Tensor) -> Any:
        return SimpleNamespace(base=x, shape=list(x.shape), strides=list(x.stride()), box=self.name)

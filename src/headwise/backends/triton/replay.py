"""The replay of a recording, as straight Python source: a line for each allocation and each launch, and nothing else.

    def replay(m0, m1):
        …
        stream = raw_stream(0)
        m2 = empty_2((64, 512), (512, 1))
        launch_0(64, 1, 1, stream, function, …, m0.data_ptr(), m1.data_ptr(), m2.data_ptr(), 512)
        return m2

A loop over lists of steps would cost the host as much as the launch of a small kernel. Memory is numbered as in the
recording: arguments first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.backends.triton import private
from headwise.backends.triton.recording import Call, Counters, Launch, Place, Recording, Take

_DESCRIPTORS_KEPT = 1024  # by address, for each launch: an allocator hands out the same addresses again and again
_SCRATCH_ALIGNMENT = 256
_LEAST_COUNTERS = 1024  # so that few sizes do for all
_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one name for many streams

# Not there in a build of PyTorch without CUDA, which can record all the same.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_REPLAY = """\
def replay({arguments}):
    if current_device() != {device}:
        with on_device({device}):
            return replay({arguments})
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook  # as private.hooked, without a call
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return watched({arguments})
    stream = raw_stream({device})
    {lines}
"""
_WATCHED = """\
def watched({arguments}):
    stream = raw_stream({device})
    {lines}
"""


def written_out(recording: Recording, results: Any, device: int) -> Callable[..., Any]:
    """``run(*tensors)``: what the launcher did, with these tensors. Its kernels are compiled now."""
    writer = _Writer(recording, results, device)
    arguments = ", ".join(f"m{i}" for i in range(recording.arguments))
    for form, direct in ((_REPLAY, True), (_WATCHED, False)):
        source = form.format(arguments=arguments, device=device, lines="\n    ".join(writer.lines(direct)))
        exec(compile(source, "<headwise replay>", "exec"), writer.names)
    run: Callable[..., Any] = writer.names["replay"]
    return run


class _Writer:
    """Writes the lines; ``names`` is what they refer to."""

    def __init__(self, recording: Recording, results: Any, device: int) -> None:
        self._recording, self._device = recording, device
        self._one = isinstance(results, Tensor)
        self._results = [None if x is None else recording.place(x) for x in ([results] if self._one else results)]
        seen = {p.memory for p in self._results if p is not None}
        takes = [s for s in recording.steps if isinstance(s, Take)]
        self._own = [t for t in takes if t.memory in seen or t.value is not None]
        self._scratch = [t for t in takes if not (t.memory in seen or t.value is not None)]
        self.names: dict[str, Any] = {
            "current_device": _current_device, "raw_stream": _raw_stream, "on_device": torch.cuda.device,
            "hooks": private.HOOKS, "counters": _counters,
        }  # fmt: skip
        self._launchers = [
            _Launcher(s, private.direct(private.compiled(s.kernel, s.grid, recording.sample(s), s.options)))
            for s in recording.steps
            if isinstance(s, Launch)
        ]

    def lines(self, direct: bool) -> list[str]:
        """direct: past Triton's own launch, which is the one that profilers hear of."""
        lines = []
        for take in self._own:
            maker = _empty(self._device, take.dtype)  # new_empty with a dtype costs a quarter more
            if take.value is None:
                make, what = self._name("make", maker.new_empty_strided), str(tuple(take.strides))
            else:
                make, what = self._name("make", maker.new_full), self._constant(take.value)
            lines.append(f"m{take.memory} = {make}({tuple(take.shape)}, {what})")
        lines += self._scratch_lines()
        at_once = [*range(self._recording.arguments), *(take.memory for take in self._own)]
        lines += self._address_lines(at_once)
        launchers = iter(self._launchers)
        for step in self._recording.steps:
            if isinstance(step, Counters):
                lines.append(f"m{step.memory} = counters({self._device}, stream, {step.size})")
                lines += self._address_lines([step.memory])
            elif isinstance(step, Call):
                results = ", ".join(f"m{number}" for number in step.memory) + "," * (not step.one) + " = "
                given = ", ".join(map(self._tensor, step.inputs))
                call = f"{self._name('function', step.function)}({given})"
                lines.append(results + call if step.memory else call)
                lines += self._address_lines(step.memory)
            elif isinstance(step, Launch):
                lines += self._launch(step, next(launchers), direct)
        found = [self._tensor(p) for p in self._results]
        return [*lines, f"return {found[0] if self._one else _tuple(found)}"]

    def _address_lines(self, numbers: Iterable[int]) -> list[str]:
        launches = [s for s in self._recording.steps if isinstance(s, Launch)]
        places = [p for s in launches for p in (*s.tensors, *(d and d[0] for d in s.described)) if p is not None]
        used = {p.memory for p in places}
        return [f"p{number} = m{number}.data_ptr()" for number in numbers if number in used]

    def _scratch_lines(self) -> list[str]:
        """Memory that nobody outside sees is one allocation."""
        if not self._scratch:
            return []
        lines, first = [], 0
        as_tensors = {p.memory for s in self._recording.steps if isinstance(s, Call) for p in s.inputs}
        for take in self._scratch:
            lines.append(f"p{take.memory} = scratch_at + {first}")
            if take.memory in as_tensors:
                lines.append(f"m{take.memory} = scratch.narrow(0, {first}, {take.bytes})")
            first += -(-take.bytes // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        make = self._name("make", _empty(self._device, torch.uint8).new_empty_strided)
        return [f"scratch = {make}(({first},), (1,))", "scratch_at = scratch.data_ptr()", *lines]

    def _launch(self, step: Launch, launcher: _Launcher, direct: bool) -> list[str]:
        boxes = _tuple([_address(None if d is None else d[0]) for d in step.described])
        tensors = [_address(p) for p in step.tensors]
        if not direct or launcher.direct is None:
            return [f"{self._name('launch', launcher.launch_through_triton)}({boxes}, {_tuple(tensors)})"]
        call, before, one_tuple, _ = launcher.direct
        lines, values = [], [*tensors, *map(self._constant, step.tail)]
        if step.described:
            known, encode = self._name("known", launcher.encoded), self._name("encode", launcher.encode)
            lines = [f"boxes = {boxes}", f"described = {known}.get(boxes) or {encode}(boxes)"]
            values.insert(0, "*described")
        given = [
            *map(str, step.grid),
            "stream",
            *map(self._constant, before),
            *([_tuple(values)] if one_tuple else values),
        ]
        return [*lines, f"{self._name('launch', call)}({', '.join(given)})"]

    def _name(self, prefix: str, value: Any) -> str:
        name = f"{prefix}_{len(self.names)}"
        self.names[name] = value
        return name

    def _constant(self, value: Any) -> str:
        return repr(value) if value is None or type(value) in (int, bool) else self._name("constant", value)

    def _tensor(self, place: Place | None) -> str:
        if place is None:
            return "None"
        x, base = place.like, self._recording.memory[place.memory]
        assert base is not None
        in_scratch = any(take.memory == place.memory for take in self._scratch)
        whole = place.offset == 0 and (x.shape, x.stride(), x.dtype) == (base.shape, base.stride(), base.dtype)
        name = f"m{place.memory}"
        return name if whole and not in_scratch else f"{self._name('view', place.of)}({name})"


def _address(place: Place | None) -> str:
    return "None" if place is None else f"p{place.memory}" + (f" + {place.offset}" if place.offset else "")


def _tuple(values: Sequence[str]) -> str:
    return f"({', '.join(values)},)" if values else "()"


class _Launcher:
    """One launch of a compiled kernel, given addresses."""

    def __init__(self, step: Launch, direct: private.Direct | None) -> None:
        self._step, self.direct = step, direct
        self.encoded: dict[tuple[int | None, ...], list[Any]] = {}  # descriptors, by the addresses of their tensors

    def encode(self, at: tuple[int | None, ...]) -> list[Any]:
        """The TMA descriptors of tensors at these addresses, as the kernel takes them."""
        assert self.direct is not None
        arguments: list[Any] = []
        metas = iter(self.direct.descriptors)
        for descriptor in self._descriptors(at):
            arguments += [None] if descriptor is None else private.encoded(descriptor, next(metas))
        if len(self.encoded) >= _DESCRIPTORS_KEPT:
            self.encoded.clear()
        self.encoded[at] = arguments
        return arguments

    def _descriptors(self, at: tuple[int | None, ...]) -> list[Any]:
        made: list[Any] = []
        for described, address in zip(self._step.described, at, strict=True):
            if described is None or address is None:
                made.append(None)
                continue
            place, box = described
            descriptor = box.descriptor(place.like)
            descriptor.base = private.Pointer(place.like.dtype, address, 0)
            made.append(descriptor)
        return made

    def launch_through_triton(self, described_at: tuple[int | None, ...], tensors_at: tuple[int | None, ...]) -> None:
        """Triton's own launch, which tells those who listen."""
        step = self._step
        pointers = [
            None if p is None or a is None else private.Pointer(p.like.dtype, a, p.like.untyped_storage().nbytes())
            for p, a in zip(step.tensors, tensors_at, strict=True)
        ]
        step.kernel[step.grid](*self._descriptors(described_at), *pointers, *step.tail, **step.options)


@functools.cache
def _empty(device: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=f"cuda:{device}")


_counters_kept: dict[tuple[int, int], Tensor] = {}


def _counters(device: int, stream: int, count: int) -> Tensor:
    """At least ``count`` int32 zeros for a launch on this stream that leaves zeros behind.

    Launches on one stream come one after the other and share one array, which is kept. Not so where that might not hold: a
    launch that is captured in a CUDA graph gets one of its own, zeroed by the graph itself; "per-thread default stream" is
    one name for many streams; and while Inductor makes graphs, its rounds before the capture allocate from the memory of
    the graph, so that nothing that is made then may be kept.
    """
    empty = _empty(device, torch.int32)
    if stream == _PER_THREAD_STREAM or torch.cuda.is_current_stream_capturing():
        return empty.new_zeros(count)
    kept = _counters_kept.get((device, stream))
    if kept is None or kept.numel() < count:
        kept = empty.new_zeros(max(count, _LEAST_COUNTERS))
        if "torch._inductor.cudagraph_trees" not in sys.modules:
            _counters_kept[device, stream] = kept
    return kept

"""Compiling kernels before they are launched, in processes of their own, for a GPU that need not be here.

A launcher is recorded as for a call, and each of its launches compiled for the arguments it was recorded with. Triton
writes what it compiled to its cache on disk, under a name made of source, constants, alignment and GPU: the process that
launches, and every later one, finds it there. A worker opens no GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import torch

from headwise import arguments
from headwise.backends import registry
from headwise.backends.triton import private
from headwise.backends.triton.gpu import KNOWN, Facts, facts
from headwise.backends.triton.recording import Launch, Recording
from headwise.config import settings

Report = Callable[[int, int, str], None]


class Job(NamedTuple):
    """One launch of a launcher."""

    launcher: str
    args: Any  # of tensors without memory
    facts: Facts
    tf32: bool
    number: int  # of the launch

    def launches(self) -> tuple[Recording, list[Launch]]:
        module = importlib.import_module(str(registry.module_of("triton", self.launcher)))
        recording = Recording(self.facts, self.tf32)
        recording.run(getattr(module, self.launcher), self.args, [0] * len(arguments.tensors_of(self.args)))
        return recording, [step for step in recording.steps if isinstance(step, Launch)]

    def compile(self) -> bool:
        """Whether there was something to compile: False if the cache had it."""
        recording, launches = self.launches()
        launch = launches[self.number]
        return private.compiled_for(self.facts, launch.kernel, launch.grid, recording.sample(launch), launch.options)


def compile_all(
    launchers: Sequence[tuple[str, Any]], arch: str | None, workers: int | None, report: Report | None
) -> tuple[int, int, float]:
    """How many kernels were compiled and how many found, and the seconds it took."""
    if settings.triton_interpret:
        raise ValueError("warm: TRITON_INTERPRET is set, and Triton's interpreter compiles nothing")
    began = time.perf_counter()
    jobs = jobs_of(launchers, facts(torch.cuda.current_device()) if arch is None else KNOWN[arch])
    count = min(_cores() if workers is None else workers, len(jobs))
    found = compiled = 0
    for name, new in _in_others(jobs, count) if count else _in_this_process(jobs):
        if isinstance(new, str):
            raise RuntimeError(f"warm: the kernel {name} did not compile: {new}")
        found, compiled = found + (not new), compiled + new
        if report is not None:
            report(found + compiled, len(jobs), name)
    return compiled, found, time.perf_counter() - began


def jobs_of(launchers: Sequence[tuple[str, Any]], gpu: Facts) -> dict[str, tuple[str, Job]]:
    """The kernels to compile, each once: by what makes it another kernel, its name and how it comes about."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    jobs: dict[str, tuple[str, Job]] = {}
    for launcher, args in launchers:
        bare = [
            None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            for x in arguments.tensors_of(args)
        ]
        first = Job(launcher, arguments.with_tensors(args, bare), gpu, tf32, 0)
        recording, launches = first.launches()
        for number, launch in enumerate(launches):
            shown = [
                (x.dtype, x.address) if isinstance(x, private.Pointer) else x for x in recording.sample(launch)
            ]  # fmt: skip
            name = launch.kernel.__name__
            key = repr((launch.kernel.__module__, name, shown, launch.options))
            jobs.setdefault(key, (name, first._replace(number=number)))
    return jobs


def _in_this_process(jobs: dict[str, tuple[str, Job]]) -> Iterator[tuple[str, bool | str]]:
    for name, job in jobs.values():
        yield name, job.compile()


def _in_others(jobs: dict[str, tuple[str, Job]], count: int) -> Iterator[tuple[str, bool | str]]:
    """Results as they come, of ``count`` workers."""
    waiting: queue.SimpleQueue[tuple[str, Job]] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[str, bool | str]] = queue.SimpleQueue()
    for named in jobs.values():
        waiting.put(named)
    workers = [_Worker() for _ in range(count)]
    threads = [threading.Thread(target=w.serve, args=(waiting, results), daemon=True) for w in workers]
    try:
        for thread in threads:
            thread.start()
        for _ in jobs:
            yield results.get()
    finally:  # also where the caller stops listening
        for worker, thread in zip(workers, threads, strict=True):
            worker.process.kill()
            thread.join()
            worker.close()


class _Worker:
    """A Python of its own. Not `multiprocessing`: its workers run the caller's program again, or are forks of a process
    that has threads and perhaps a GPU."""

    def __init__(self) -> None:
        source = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work()"
        self.process = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # a job that was never read
                pipe.close()  # type: ignore[union-attr]

    def serve(self, waiting: queue.SimpleQueue[Any], results: queue.SimpleQueue[Any]) -> None:
        """Give the worker one job after the other."""
        while True:
            try:
                name, job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                assert self.process.stdin is not None
                assert self.process.stdout is not None
                pickle.dump(job, self.process.stdin)
                self.process.stdin.flush()
                results.put((name, pickle.load(self.process.stdout)))
            except (OSError, EOFError):
                results.put((name, "the process that compiled it ended"))


def work() -> None:
    """A worker: jobs from standard input, results to standard output, until there are no more."""
    answers: IO[bytes] = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no answer
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result: bool | str = job.compile()
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        pickle.dump(result, answers)
        answers.flush()


def _cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

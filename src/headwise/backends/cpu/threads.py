"""Work shared among threads, each running PyTorch's operations on its own share.

Operations on cache-sized blocks are short. Spread over all cores, every one of them would end in a barrier, and where
another program holds a core each barrier waits for that program's time slice: a call of a tenth of a second takes ten.
So each thread gets a share of the work and runs single-threaded operations on it, with one barrier at the end. A share
also stays in its core's cache. Python's lock does not matter: PyTorch releases it while it computes.

The threads stay between calls: starting them takes longer than a small call, and with a thread goes the memory that its
scratch was made of, so that the next one would have to ask the system for fresh pages.

The work is divided by shapes alone, so results do not depend on the number of threads. Blocks go to whichever thread is free
(`Shared`): one that was woken late, or whose core somebody else holds, takes fewer of them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Lock
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")


class Shared(Generic[Item]):
    """Items that several threads iterate over together: each is given to one of them."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items, self._lock = iter(items), Lock()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._lock:
            return next(self._items)


def in_threads(work: Callable[[int, int], None], most: int) -> None:
    """Call ``work(thread, threads)`` in every thread: at most ``most`` of them, and no more than PyTorch uses.

    Each share should be worth a tenth of a millisecond: that is what waking a thread and waiting for it costs. The caller
    takes the first share itself.
    """
    before, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    threads = min(before, most)
    if threads <= 1:
        if most > 0:
            work(0, 1)
        return

    def on_one_core(thread: int) -> None:
        torch.set_num_threads(1)  # the setting is per thread, and a new thread starts with the machine's default
        with torch.inference_mode(inference), torch.no_grad():  # a new thread has gradients enabled
            work(thread, threads)

    torch.set_num_threads(1)  # the matmul library has one setting for the whole process
    others = [_pool(threads - 1).submit(on_one_core, thread) for thread in range(1, threads)]
    try:
        on_one_core(0)
    finally:
        wait(others)  # also where the first share failed: the others write into memory of this call
        torch.set_num_threads(before)
    for other in others:
        other.result()


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's operations inside run in the calling thread alone. For sums whose bits depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="headwise")


if hasattr(os, "register_at_fork"):  # threads do not survive a fork: the child makes its own
    os.register_at_fork(after_in_child=_pool.cache_clear)

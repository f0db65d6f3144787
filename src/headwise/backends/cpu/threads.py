"""Work shared among threads, each running PyTorch's operations on its own share.

Operations on cache-sized blocks are short. Spread over all cores, every one of them would end in a barrier, and where
another program holds a core each barrier waits for that program's time slice: a call of a tenth of a second takes ten.
So each thread gets a share of the work and runs single-threaded operations on it, with one barrier at the end. A share
also stays in its core's cache. Python's lock does not matter: PyTorch releases it while it computes.

The work is divided by shapes alone, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def in_threads(work: Callable[[int, int], None], most: int) -> None:
    """Call ``work(thread, threads)`` in every thread: at most ``most`` of them, and no more than PyTorch uses.

    Each share should be worth a millisecond, because threads are started for every call and end with it.
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
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="headwise") as pool:
            list(pool.map(on_one_core, range(threads)))
    finally:
        torch.set_num_threads(before)

"""Work shared among threads, each running PyTorch's operations on its own part.

Operations on cache-sized blocks are short. If each of them were spread over all cores, every one would end in a barrier;
where another program holds a core, each barrier waits for that program's time slice, and a call of a tenth of a second
takes ten. So the work is cut into one part per thread instead, operations run on one core each, and there is one barrier,
at the end. A part stays in its core's cache, too. Python's lock is no hindrance: PyTorch lets go of it while it computes.

How the work is cut follows from shapes alone, so that results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def in_threads(work: Callable[[int, int], None], most: int) -> None:
    """Call ``work(part, parts)`` for every part, at once; at most ``most`` parts, at most as many as PyTorch has threads.

    Each part should be worth a millisecond: threads are made anew each time, and nothing of them outlives the call.
    """
    before, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    parts = min(before, most)
    if parts <= 1:
        if most > 0:
            work(0, 1)
        return

    def on_one_core(part: int) -> None:
        torch.set_num_threads(1)  # each thread has a number of its own, and a new one starts with that of the machine
        with torch.inference_mode(inference), torch.no_grad():  # and with gradients on
            work(part, parts)

    torch.set_num_threads(1)  # the matmul library has one number for all threads
    try:
        with ThreadPoolExecutor(parts, thread_name_prefix="headwise") as pool:
            list(pool.map(on_one_core, range(parts)))
    finally:
        torch.set_num_threads(before)

"""The demo on several processes: who takes part, who speaks, when all of them stop.

``torchrun --nproc-per-node 4 -m headwise demo --context-parallel 4``
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from headwise.demo.model import ContextParallel
from headwise.demo.train import Training
from headwise.distributed import context_parallel
from headwise.distributed.groups import answered, peers_of

TIMEOUT = timedelta(seconds=120)  # of a rank that does not answer


class NotLaunched(Exception):
    """The processes are not there. The message says how to start them."""


class Ranks:
    """One process, or a group of them that share every batch."""

    def __init__(self, wanted: int | None) -> None:
        self.group: dist.ProcessGroup | None = None
        if wanted is None:
            return
        if not dist.is_torchelastic_launched():
            raise NotLaunched(
                f"--context-parallel {wanted} needs {wanted} processes: "
                f"torchrun --nproc-per-node {wanted} -m headwise demo --context-parallel {wanted}"
            )
        dist.init_process_group("gloo", timeout=TIMEOUT)
        self.group = dist.group.WORLD
        if dist.get_world_size() != wanted:
            self.close()
            raise NotLaunched(f"--context-parallel is {wanted}, and torchrun started {dist.get_world_size()} processes")

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes."""
        return self.group is None or dist.get_rank(self.group) == 0

    @contextmanager
    def sharing(self, training: Training) -> Iterator[None]:
        """Within the block the training's model is sharded. After it every process is for itself."""
        if self.group is None:
            yield
            return
        alone, shared = training.computation, context_parallel(training.model, self.group)
        training.computation = ContextParallel(alone.backend, self.group)
        yield
        with answered(peers_of("the demo", self.group), "waiting for the last checkpoint"):
            dist.barrier(self.group)  # torchrun may end the others when one has ended
        shared.remove()
        training.computation = alone
        self.close()

    def any(self, wish: bool) -> bool:
        """Whether one of them has the wish: Ctrl-C does not reach all of them in the same step."""
        if self.group is None:
            return wish
        flag = torch.tensor(float(wish))
        with answered(peers_of("the demo", self.group), "agreeing whether to stop"):
            dist.all_reduce(flag, group=self.group)
        return bool(flag)

    def close(self) -> None:
        # gloo joins its threads with the last reference; left to the exit of Python it aborts now and then.
        self.group = None
        if dist.is_initialized():
            dist.destroy_process_group()

"""One rank of ``headwise demo``, as torchrun starts it: ``demo_rank.py STEP …`` with the arguments of the demo.

Checkpoints are written after every step, and rank 1 is killed in the middle of step STEP (0: never).
"""

from __future__ import annotations

import os
import signal
import sys

import torch.distributed as dist

from headwise.cli import demo, main
from headwise.demo.train import Training


def killed_at(step):
    real = Training._make_step

    def make_step(training):
        if dist.is_initialized() and dist.get_rank() == 1 and training.step + 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(training)

    Training._make_step = make_step


if __name__ == "__main__":
    demo._SECONDS_BETWEEN_CHECKPOINTS = 0.0
    killed_at(int(sys.argv[1]))
    sys.exit(main(["demo", *sys.argv[2:]]))

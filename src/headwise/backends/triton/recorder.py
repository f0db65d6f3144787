"""Record once, replay: a launcher runs once on tensors without memory, and what it did is done again with real memory.

A launcher never looks at data, so calls that share a cache key record the same steps: memory taken, kernels launched, and
which memory each launch gets. Kernels are compiled while recording; one that does not fit the GPU raises then, before
anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headwise import arguments
from headwise.backends.triton import replay
from headwise.backends.triton.gpu import ALIGNMENT, Interpreter, facts
from headwise.backends.triton.recording import Recording
from headwise.config import settings


def record(function: Callable[..., Any], args: Any) -> Callable[..., Any]:
    """What runs the launcher ``function`` for calls like this one, given their tensors."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    tensors, _, options = arguments.split(args)
    if settings.triton_interpret:
        gpu = Interpreter(tf32)
        return lambda *given: function(gpu, arguments.with_tensors(options, given))
    device = next(x.get_device() for x in tensors if x is not None)
    recording = Recording(facts(device), tf32)
    results = recording.run(function, args, [0 if x is None else x.data_ptr() % ALIGNMENT for x in tensors])
    with torch.cuda.device(device):
        return replay.written_out(recording, results, device)

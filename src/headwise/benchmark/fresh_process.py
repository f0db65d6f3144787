"""A process that makes one call of attention for the first time, and says how long that took.

Run as a script: ``python -P fresh_process.py FOLDER ROOT``. FOLDER holds ``job.json`` (what to call), ``inputs.pt`` and an
empty cache of compiled kernels; ``results.pt`` and ``seconds.json`` are written there. ROOT is where headwise is. Before the
clock starts there is PyTorch, a context of the GPU and the inputs; the library that is called is imported on the clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Call = Callable[..., Any]


def _headwise() -> Call:
    import headwise as hw

    return hw.attention


def _fa4() -> Call:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    def call(q: Any, k: Any, v: Any, causal: bool) -> Any:
        out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


LIBRARIES = {"headwise": _headwise, "FA4": _fa4}


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    device = torch.device(job["device"])
    inputs = {
        name: x.to(device).requires_grad_(name in job["differentiable"])
        for name, x in torch.load(folder / "inputs.pt").items()
    }
    grad_out = inputs.pop("grad_out", None)
    plain = {name: inputs[name] for name in "qkv"}
    arguments = {**inputs, **job["options"]}
    _wait(device)

    library = LIBRARIES[job["library"]]
    direction, start = job["direction"], time.perf_counter()
    call = library()
    if job["known"]:  # the process has made a plain call, forward and backward: what is new is the combination
        out = call(**plain, causal=job["options"]["causal"])
        torch.autograd.grad(out, list(plain.values()), grad_out)
        _wait(device)
        start = time.perf_counter()
    out = call(**arguments)
    if direction == "backward":
        _wait(device)
        start = time.perf_counter()
    results = [out] if direction != "backward" else []
    if direction != "forward":
        results += torch.autograd.grad(out, [inputs[name] for name in job["differentiable"]], grad_out)
    _wait(device)
    seconds = time.perf_counter() - start

    torch.save([x.detach() for x in results], folder / "results.pt")
    (folder / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])
    main(Path(sys.argv[1]))

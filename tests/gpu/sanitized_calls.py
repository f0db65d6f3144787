"""Small calls of every op, forward and backward, hostile values included: what scripts/gpu-sanitize runs.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src compute-sanitizer python3 tests/gpu/sanitized_calls.py

Results are looked at only where they cost nothing; it is the accesses that count. PyTorch's own allocator would hand out
parts of large blocks, inside which nobody notices a step too far: the variable turns it off.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import hopper_calls
import hostile_calls
import torch

from headwise.cases import SUITES
from headwise.testing import Case, Maker, Suite

BACKEND = "triton"
# One width of numbers for all cases, the other one for the first of each op.
DTYPE, OTHER_DTYPE = torch.bfloat16, torch.float32


def calls(device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    for suite in SUITES.values():
        quick = [case for case in suite.cases if "quick" in case.tags]
        for i, case in enumerate(quick):
            for dtype in (DTYPE, OTHER_DTYPE) if i == 0 else (DTYPE,):
                name = f"{suite.op}, {case.name}, {str(dtype).removeprefix('torch.')}"
                yield name, partial(run_case, suite, case, dtype, device)
    for name, call in hopper_calls.calls(device):
        yield f"Hopper: {name}", call
    for name, call in hostile_calls.calls(device):
        yield f"hostile: {name}", call


def run_case(suite: Suite, case: Case, dtype: torch.dtype, device: str) -> None:
    """Forward, backward through autograd, and the explicit backward where there is one."""
    arguments = suite.make(Maker(dtype, torch.device(device)), **case.params)
    leaves: list[torch.Tensor] = []
    for name in suite.differentiable:
        value = arguments.get(name)
        if isinstance(value, torch.Tensor):
            arguments[name] = value.detach().requires_grad_()
            leaves.append(arguments[name])
        elif isinstance(value, list | tuple):
            arguments[name] = [x.detach().requires_grad_() for x in value]
            leaves += arguments[name]
    outputs = suite.run(arguments, BACKEND)
    reached = {name: out for name, out in outputs.items() if out.requires_grad}
    if reached and leaves:
        grads = [torch.ones_like(out) for out in reached.values()]
        torch.autograd.grad(list(reached.values()), leaves, grads, allow_unused=True)
    if suite.explicit is not None:
        with torch.no_grad():
            of_outputs = {name: torch.ones_like(out) for name, out in outputs.items()}
            suite.explicit(arguments, {name: out.detach() for name, out in outputs.items()}, of_outputs, BACKEND)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--filter", default="", help="only calls whose name has every word of this")
    parser.add_argument("--without", default="", help="no calls whose name has this")
    parser.add_argument("--verbose", action="store_true", help="name every call before it runs")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("sanitized_calls: needs a CUDA GPU, and PyTorch sees none", file=sys.stderr)
        return 2
    failed, started = [], time.perf_counter()
    chosen = [(n, c) for n, c in calls("cuda") if all(word in n for word in args.filter.split())]
    if args.without:
        chosen = [(n, c) for n, c in chosen if args.without not in n]
    for name, call in chosen:
        if args.verbose:
            print(name, flush=True)
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:  # one call that breaks must not hide the findings in the others
            failed.append(name)
            print(f"✗ {name}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(chosen)} calls, {len(failed)} failed, {time.perf_counter() - started:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

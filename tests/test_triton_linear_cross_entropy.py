"""linear_cross_entropy on Triton GPUs that need not be here: its kernels compile, its memory is what was promised, and
chunks, windows and recorded matmuls do what one matmul would."""

from __future__ import annotations

import re

import pytest
import torch
from ahead_of_time import TARGETS, TUNED, Recorded, stack
from fake_gpu import FakeGpu

from headwise.backends.triton import linear_cross_entropy, recorder
from headwise.backends.triton.gpu import KNOWN
from headwise.backends.triton.recording import Call, Take
from headwise.ops.cross_entropy import CrossEntropy
from headwise.ops.linear_cross_entropy import (
    LinearCrossEntropy,
    LinearCrossEntropyBackward,
    LinearCrossEntropyScale,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, ALL_FLAGS = ("mean", 0.0, 0.0, None), ("mean", 0.1, 0.1, 9.0)


def meta(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(rows, width, classes, dtype, options=PLAIN, *, gradients="hw", extra=False, results=False):
    """extra: bias and weights; results: log-probabilities and entropies."""
    return LinearCrossEntropy(
        meta(rows, width, dtype=dtype), meta(classes, width, dtype=dtype), meta(rows, dtype=torch.int64),
        meta(classes, dtype=dtype) if extra else None, meta(rows) if extra else None, -100, *options, results, results,
        gradients,
    )  # fmt: skip


def backward(args):
    rows = len(args.targets)
    others = (meta(rows), meta(rows)) if args.return_entropy else (None, None)
    grad = meta(rows) if args.reduction == "none" else meta()
    return LinearCrossEntropyBackward(grad, *others, meta(2, rows), others[0], args)


def recorded(args, arch="sm_90"):
    name = {
        LinearCrossEntropy: "linear_cross_entropy_forward", LinearCrossEntropyBackward: "linear_cross_entropy_backward",
        LinearCrossEntropyScale: "linear_cross_entropy_scale",
    }[type(args)]  # fmt: skip
    return Recorded(getattr(linear_cross_entropy, name), args, arch)


CALLS = {
    "loss and gradients, bfloat16": arguments(512, 256, 131072, BF16),
    "loss and gradients, 50257 classes, all flags": arguments(
        512, 256, 50257, BF16, ALL_FLAGS, gradients="hwb", extra=True
    ),
    "loss and gradients, float32": arguments(512, 256, 131072, F32, ALL_FLAGS),
    "frozen head": arguments(512, 256, 131072, BF16, gradients="h"),
    "loss, all results": arguments(512, 256, 131072, F16, ALL_FLAGS, gradients="", extra=True, results=True),
    "backward": backward(arguments(512, 256, 131072, F16, ("none", 0.0, 0.0, None))),
    "backward, all results": backward(arguments(512, 256, 50257, BF16, ALL_FLAGS, extra=True, results=True)),
    "scale": LinearCrossEntropyScale(meta(), meta(512, 256, dtype=BF16), meta(1000, 256, dtype=BF16), None, True),
}


def variants(made):
    """One launch of each variant: chunks launch the same kernel again and again."""
    found = {}
    for launch in made.launches:
        tail = [
            v for p, v in zip(launch.kernel.params[len(launch.tensors) :], launch.tail, strict=True) if p.is_constexpr
        ]
        found[launch.kernel.fn.__name__, tuple(tail), *(t is None for t in launch.tensors)] = launch
    return list(found.values())


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_launched_compiles_and_fits(call, arch):
    made = recorded(CALLS[call], arch)
    assert made.launches
    for launch in variants(made):
        assert made.compiled(launch).metadata.shared <= KNOWN[arch].shared_memory


@pytest.mark.skipif(not TUNED, reason="the blocks were chosen with another release of Triton")
@pytest.mark.parametrize("call", CALLS)
def test_kernels_keep_to_the_registers(call, tmp_path):
    made = recorded(CALLS[call])
    for launch in variants(made):
        assert stack(made.compiled(launch), tmp_path) == 0, launch


@pytest.mark.parametrize("call", ["loss and gradients, bfloat16", "loss and gradients, 50257 classes, all flags"])
def test_logits_are_read_and_gradients_written_16_bytes_at_once(call):
    made = recorded(CALLS[call])
    launch = next(x for x in variants(made) if x.kernel.fn.__name__ == "_cross_entropy" and x.tensors[6] is not None)
    ptx = made.compiled(launch).asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
    # Four float32 logits are one line; their gradients are eight bytes of bfloat16.
    assert re.search(r"st\.global\S*\.v2\.b32", ptx)


def memory(args):
    """(bytes of results and inputs' gradients, bytes of everything else that is taken)."""
    recording = recorded(args)._recording
    taken = [step for step in recording.steps if isinstance(step, Take)]
    scratch = sum(t.bytes for t in taken if t.dtype == torch.uint8)
    return sum(t.bytes for t in taken) - scratch, scratch


GIB = 1 << 30


def test_the_large_call_takes_a_quarter_gibibyte_beside_its_gradients():
    args = arguments(8192, 4096, 131072, BF16)
    of_results, scratch = memory(args)
    gradients = 2 * 4096 * (8192 + 131072)
    assert scratch <= GIB // 4
    assert gradients <= of_results <= gradients + (1 << 20)


@pytest.mark.parametrize("classes", [32000, 50257, 131072, 262144])
@pytest.mark.parametrize(("rows", "width"), [(2048, 4096), (8192, 4096), (16384, 2048), (8192, 8192)])
def test_scratch_never_grows_with_rows_times_classes(rows, width, classes):
    sums = 4 * rows * width  # of dhidden
    for args in (arguments(rows, width, classes, BF16), backward(arguments(rows, width, classes, F16))):
        assert memory(args)[1] <= max(GIB // 4, sums + GIB // 8), args


def matmul_flops(args):
    calls = [step for step in recorded(args)._recording.steps if isinstance(step, Call) and len(step.inputs) == 3]
    return sum(2 * a.like.shape[0] * a.like.shape[1] * b.like.shape[1] for _, a, b in (c.inputs for c in calls))


@pytest.mark.parametrize(
    ("gradients", "rows", "dtype", "matmuls"),
    [
        ("hw", 4096, BF16, 3.0),  # the gradients of the logits of as many rows as H fit into dweight
        ("hw", 8192, BF16, 3.5),
        ("hw", 8192, F32, 3.0),
        ("h", 8192, BF16, 2.0),
        ("w", 4096, BF16, 2.0),
        ("w", 8192, F32, 2.0),
        ("", 8192, BF16, 1.0),
    ],
)
def test_no_more_matmuls_than_needed(gradients, rows, dtype, matmuls):
    args = arguments(rows, 4096, 32768, dtype, gradients=gradients)
    assert matmul_flops(args) == matmuls * 2 * rows * 4096 * 32768


def test_a_backward_of_one_side_does_not_compute_the_other():
    one = 2 * 512 * 256 * 1024
    for gradients, matmuls in (("h", 2), ("w", 2), ("hw", 3)):
        assert matmul_flops(backward(arguments(512, 256, 1024, F16, gradients=gradients))) == matmuls * one


def test_matmuls_and_copies_are_replayed(monkeypatch):
    """Into views of results and of scratch, on memory of other calls than the recorded one."""
    FakeGpu(monkeypatch)

    def launcher(gpu, args):
        out, scratch = gpu.empty((8, 6), torch.float32), gpu.empty((2, 4, 6), torch.float32)
        for i in range(2):
            rows = slice(4 * i, 4 * i + 4)
            gpu.matmul(args.logits[rows], args.targets, scratch[i])
            gpu.matmul(args.logits[rows], args.targets, scratch[i], add=True)
            gpu.copy(scratch[i], out[rows])
        return out

    def call():
        return CrossEntropy(torch.randn(8, 5), torch.randn(5, 6), 0, "mean", 0.0, 0.0, None)

    run = recorder.record(launcher, call())
    for _ in range(2):
        args = call()
        torch.testing.assert_close(run(args.logits, args.targets), 2 * args.logits @ args.targets)


# ------------------------------------------------------------------------------------------------- in the interpreter

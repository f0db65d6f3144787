"""The suite of CUDA and ROCm GPUs, bfloat16: the training ops so far, PyTorch's own as peers."""

from __future__ import annotations

import torch

from headwise.benchmark.case import AtLeast, BenchCase, BenchSuite, Direction
from headwise.benchmark.suites import training

_BFLOAT16 = 2  # bytes
BOTH: tuple[Direction, Direction] = ("forward", "backward")


def cases(quick: bool) -> list[BenchCase]:
    shrink = 64 if quick else 1
    built: list[BenchCase] = []
    for direction in BOTH:
        for rows, width in ((16384, 4096), (524288, 128), (512, 131072)):
            built.append(training.rms_norm_case(rows // shrink, width, direction, _BFLOAT16))
        for rows, width in ((16384, 16384), (524288, 128), (512, 131072)):
            built.append(training.softmax_case(rows // shrink, width, direction, _BFLOAT16))
        built.append(training.embedding_case(16384 // shrink, 131072 // shrink, 4096, direction, _BFLOAT16))
    built.append(training.transpose_case(16384 // shrink, 16384, _BFLOAT16))
    faster = (AtLeast(1.0, training.TORCH),)
    built.append(training.cross_entropy_case(8192 // shrink, 131072, faster, _BFLOAT16))
    return built


SUITE = BenchSuite(name="cuda", device="cuda", dtype=torch.bfloat16, cases=cases, backend="triton")

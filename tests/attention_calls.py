"""The attention ops and the direct formula behind one face: functions of tensors that give ``(out, lse)``."""

from __future__ import annotations

import itertools

import direct_attention as direct
import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE

import headwise as hw
from headwise.testing import Maker

on_every_backend = pytest.mark.parametrize("backend", RUNNABLE)


def maker(backend: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Maker:
    return Maker(dtype, torch.device(DEVICE[backend]), seed)


def ours(backend: str, **flags):
    return lambda **x: hw.attention(**x, **flags, return_lse=True, backend=backend)


def theirs(**flags):
    return lambda **x: direct.attention(**x, **flags)


def ints(backend: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE[backend])


def packed_call(backend: str, cu_q: list[int], cu_k: list[int], **flags):
    longest_q = max(b - a for a, b in itertools.pairwise(cu_q))
    longest_k = max(b - a for a, b in itertools.pairwise(cu_k))
    bounds = (ints(backend, *cu_q), ints(backend, *cu_k), longest_q, longest_k)
    return lambda q, k, v: hw.attention_varlen(q, k, v, *bounds, **flags, return_lse=True, backend=backend)

"""Decoding on a GPU: however many shares a program has, and whoever merges, a sequence gives the same bits."""

from __future__ import annotations

import pytest
import torch
from gpu_machine import DEVICE, gpu, normal
from torch import Tensor

import headwise as hw

__all__ = ["gpu"]

BATCH, CAPACITY = 64, 3000


def inputs(dim: int) -> tuple[Tensor, ...]:
    q = normal(BATCH, 32, dim, seed=1)
    k, v = (normal(BATCH, 8, CAPACITY, dim, seed=seed) for seed in (2, 3))
    lengths = torch.randint(0, CAPACITY + 1, (BATCH,), generator=torch.Generator().manual_seed(dim)).int()
    lengths[:3] = torch.tensor([CAPACITY, 0, 1])
    return q, k, v, lengths.to(DEVICE)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_sequence_gives_the_same_bits_alone_in_a_few_and_in_many(dim, in_graph):
    from headwise.backends.triton import decode  # which needs triton

    x = inputs(dim)
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    shares = {decode.splits_of_a_program(12, 8 * batch, processors) for batch in (1, 24, 64)}
    assert len(shares) == 3 or processors != 132  # one, a bundle, all
    expected = hw.attention_decode(*x, return_lse=True)
    for first, batch in ((0, 1), (1, 1), (2, 1), (40, 1), (0, 8), (16, 8), (8, 24)):
        some = [t[first : first + batch] for t in x]
        if in_graph:
            hw.attention_decode(*some)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = hw.attention_decode(*some, return_lse=True)
            graph.replay()
        else:
            result = hw.attention_decode(*some, return_lse=True)
        for of_some, of_all in zip(result, expected, strict=True):
            assert torch.equal(of_some, of_all[first : first + batch])

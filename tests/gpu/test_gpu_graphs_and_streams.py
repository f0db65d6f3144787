"""CUDA graphs that are replayed over fresh inputs, and two streams at once: the bits of a plain call each time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from gpu_machine import DEVICE, gpu, ints, normal, same_bits
from torch import Tensor

import headwise as hw

__all__ = ["gpu"]

Run = Callable[[list[Tensor]], tuple[Tensor, ...]]
Make = Callable[[int], list[Tensor]]  # inputs of a seed; the shapes are always the same


def attention_forward(x: list[Tensor]) -> tuple[Tensor, ...]:
    return hw.attention(*x[:3], causal=True, return_lse=True)


def attention_gradients(x: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    out = hw.attention(*leaves, causal=True)
    return (out.detach(), *torch.autograd.grad(out, leaves, x[3]))


def attention_backward(x: list[Tensor]) -> tuple[Tensor, ...]:
    out, lse = hw.attention(*x[:3], window=(100, 0), return_lse=True)
    return hw.attention_backward(x[3], *x[:3], out, lse, window=(100, 0))


def dense_inputs(seed: int) -> list[Tensor]:
    q, grad = normal(2, 8, 500, 64, seed=seed), normal(2, 8, 500, 64, seed=seed + 100)
    return [q, normal(2, 2, 600, 64, seed=seed + 200), normal(2, 2, 600, 64, seed=seed + 300), grad]


def packed(x: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    out = hw.attention_varlen(*leaves, x[3], x[3], 500, 500, causal=True)
    return (out.detach(), *torch.autograd.grad(out, leaves, x[4]))


def packed_inputs(seed: int) -> list[Tensor]:
    cu = ints(0, 100 + 10 * seed, 400, 400, 700 + seed)
    return [*(normal(900, 4, 64, seed=seed + s) for s in (0, 100, 200)), cu, normal(900, 4, 64, seed=seed + 300)]


def decode(x: list[Tensor]) -> tuple[Tensor, ...]:
    return hw.attention_decode(*x, return_lse=True)


def decode_inputs(seed: int) -> list[Tensor]:
    caches = (normal(3, 2, 3000, 128, seed=seed + s) for s in (100, 200))
    return [normal(3, 8, 128, seed=seed), *caches, ints(3000 - 300 * seed, 17 * seed, 1000)]


def paged_decode(x: list[Tensor]) -> tuple[Tensor, ...]:
    return hw.attention_decode(*x[:4], block_table=x[4], return_lse=True)


def paged_inputs(seed: int) -> list[Tensor]:
    caches = (normal(40, 2, 64, 128, seed=seed + s) for s in (100, 200))
    table = torch.randperm(40, generator=torch.Generator().manual_seed(seed)).reshape(2, 20)
    return [normal(2, 8, 128, seed=seed), *caches, ints(1280 - seed, 100 * seed), table.to(DEVICE, torch.int32)]


def rows(x: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    norm = hw.rms_norm(leaves[0], leaves[1])
    loss = hw.cross_entropy(norm, x[3]) + hw.embedding(x[3], leaves[2]).float().mean() + hw.softmax(norm).float().mean()
    return (loss.detach(), hw.transpose(x[0]), *torch.autograd.grad(loss, leaves))


def row_inputs(seed: int) -> list[Tensor]:
    targets = torch.randint(0, 1000, (700,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return [normal(700, 1000, seed=seed), normal(1000, seed=seed + 1), normal(1000, 96, seed=seed + 2), targets]


CALLS: dict[str, tuple[Run, Make]] = {
    "attention forward": (attention_forward, dense_inputs),
    "attention forward and backward": (attention_gradients, dense_inputs),
    "attention_backward": (attention_backward, dense_inputs),
    "attention_varlen": (packed, packed_inputs),
    "attention_decode": (decode, decode_inputs),
    "attention_decode, paged": (paged_decode, paged_inputs),
    "the other ops": (rows, row_inputs),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_graph_replays_over_fresh_inputs(call):
    run, make = CALLS[call]
    static = make(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static)
    for seed in (1, 2, 3, 1):
        fresh = make(seed)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        assert same_bits(captured, run(fresh)), f"inputs {seed}"


def two_calls(name: str) -> tuple[Run, list[list[Tensor]], list[tuple[Tensor, ...]]]:
    """A call, two sets of its inputs, and the results of both, all there."""
    run, make = CALLS[name]
    inputs = [make(seed) for seed in (1, 2)]
    expected = [run(x) for x in inputs]
    torch.cuda.synchronize()
    return run, inputs, expected


@pytest.mark.parametrize("call", CALLS)
def test_two_streams_at_once(call):
    run, inputs, expected = two_calls(call)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(20):
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(x))
        torch.cuda.synchronize()
        assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("call", CALLS)
def test_two_threads_with_a_stream_each(call):
    run, inputs, expected = two_calls(call)
    problems: list[str] = []

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for repeat in range(10):
                result = run(inputs[index])
                stream.synchronize()
                if not same_bits(result, expected[index]):
                    problems.append(f"thread {index}, repeat {repeat}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_stream_that_is_not_current_at_creation_is_used():
    """Work queued on a busy stream is not overtaken by kernels on the default one."""
    q, k, v, _ = dense_inputs(1)
    expected = hw.attention(q, k, v)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        out = hw.attention(late, k, v)
    torch.cuda.synchronize()
    assert same_bits((out,), (expected,))

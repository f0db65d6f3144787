"""Replayed records: devices, threads, lifetimes, arguments that begin inside a larger tensor."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from test_triton_recorder import F32, N, Two, add, add_one, gpu, multiply

from headwise.backends.triton import recorder
from headwise.config import settings

__all__ = ["gpu"]  # a fixture


def test_views_of_an_argument_that_begins_inside_a_tensor(gpu):
    def launcher(device, args):
        return device.call(torch.neg, args.x[4:]), args.x[4:]

    run = gpu.record(launcher, Two(torch.randn(N), None))
    x = torch.randn(4 * N)[8 : 8 + N]
    negative, view = run(x, None)
    assert torch.equal(negative, -x[4:])
    assert view.data_ptr() == x[4:].data_ptr()
    assert torch.equal(view, x[4:])


VIEWS = {
    "of an input": lambda x: x.view(2, -1),
    "that begins later": lambda x: x.clone()[1:],
    "two of one storage": lambda x: x.clone().view(2, -1).unbind(0),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_recorded_call_returns_no_view(gpu, name):
    with pytest.raises(RuntimeError, match="returned a view"):
        gpu.record(lambda device, args: device.call(VIEWS[name], args.x), Two(torch.randn(N), None))


def test_a_function_that_returns_a_tuple_of_one(gpu):
    run = gpu.record(lambda device, args: device.call(lambda x: (x + 1,), args.x), Two(torch.randn(N), None))
    x = torch.randn(N)
    (found,) = run(x, None)
    assert torch.equal(found, x + 1)


def test_another_device_is_made_the_current_one(gpu):
    x = torch.randn(N)
    run = gpu.record(add_one, Two(x, None))
    gpu.entered.clear()
    gpu.current = 3
    assert torch.equal(run(x, None), x + 1)
    assert gpu.entered == [-1]
    assert gpu.current == 3


def test_a_record_keeps_no_tensor_alive(gpu):
    given = [torch.randn(N), torch.randn(N)]
    run = gpu.record(through_scratch_and_calls, Two(*given))
    results = list(run(*given))
    held = [weakref.ref(t) for t in (*given, *results)]
    given.clear()
    results.clear()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert run(torch.randn(N), torch.randn(N))


def through_scratch_and_calls(device, args):
    scratch, y = device.empty((N,), F32), device.empty((N,), F32)
    device.launch(add, (1,), (args.x, scratch), (N, 1.0))
    device.launch(multiply, (1,), (device.call(torch.neg, scratch), args.other, y), (N,))
    return y, device.call(torch.neg, y)


def test_threads_share_a_record(gpu):
    runs = [gpu.record(f, Two(torch.randn(N), torch.randn(N))) for f in (add_one, through_scratch_and_calls)]
    wrong = []

    def work():
        try:
            for _ in range(200):
                x, other = torch.randn(N), torch.randn(N)
                assert torch.equal(runs[0](x, other), x + 1)
                torch.testing.assert_close(runs[1](x, other)[0], -(x + 1) * other)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_the_interpreter_runs_the_launcher_itself(monkeypatch):
    monkeypatch.setattr(settings, "triton_interpret", True)
    seen = []

    def launcher(gpu, args):
        seen.append((gpu.interpreted, args.x, args.times))
        return gpu.contiguous(args.x)

    run = recorder.record(launcher, Two(torch.zeros(N), None, 0.5))
    x = torch.randn(N)
    assert run(x, None) is x
    assert seen == [(True, x, 0.5)]

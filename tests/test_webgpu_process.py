"""WebGPU and the process it is in: forked children, and what drivers print when they are loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import headwise as hw
from headwise.backends.webgpu import adapter
from headwise.webgpu import array


def in_a_fork(function):
    """What the function says in a forked child, which is killed if it hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
            said = "nothing was raised"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    with os.fdopen(reading) as said:
        return said.read()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_at_once():
    x = array(torch.ones(3, 4))
    hw.softmax(x)
    on_cpu = torch.ones(3, 4)
    for use in (
        lambda: hw.softmax(x), lambda: x + x, lambda: x.torch(), lambda: array(on_cpu),
        lambda: hw.softmax(on_cpu, backend="webgpu"),
    ):  # fmt: skip
        said = in_a_fork(use)
        assert said.startswith("ForkedProcess: WebGPU was opened before this process was forked"), said
        assert "'spawn'" in said
    assert in_a_fork(lambda: hw.softmax(on_cpu)) == "nothing was raised"
    assert torch.equal(hw.softmax(x).torch(), torch.full((3, 4), 0.25))


class Doubled(torch.utils.data.Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return hw.softmax(self.x, backend="webgpu")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_worker_of_a_data_loader_is_told():
    array(torch.ones(3))
    loader = torch.utils.data.DataLoader(Doubled(torch.ones(4)), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="WebGPU was opened before this process was forked"):
        list(loader)


def test_drivers_print_nothing(capfd):
    """What they say of a display that is not there is held back, and the rest is not."""
    with adapter._without_noise():
        os.write(2, b"error: XDG_RUNTIME_DIR is invalid or not set in the environment.\na real error\n")
    assert capfd.readouterr().err == "a real error\n"
    quiet = "import torch, headwise.webgpu as w; w.array(torch.ones(3)).torch()"
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    done = subprocess.run([sys.executable, "-c", quiet], capture_output=True, text=True, env=environment, check=True)
    assert (done.stdout, done.stderr) == ("", "")

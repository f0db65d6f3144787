"""`hw.warm`: which kernels a call would launch, compiled in other processes for a GPU that is not here, and found again."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import triton

import headwise as hw
from headwise import cli
from headwise.backends.triton import ahead_of_time
from headwise.backends.triton.gpu import KNOWN
from headwise.config import settings
from headwise.ops._warm import plan

X, W = (64, 96), (96,)
QKV = ((1, 4, 512, 128), (1, 2, 512, 128), (1, 2, 512, 128))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of compiled kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(settings, "triton_interpret", False)
    return tmp_path


def test_a_plan_has_the_launchers_of_both_directions():
    names = [name for name, _ in plan("attention", *QKV, causal=True).launchers]
    assert names == ["attention_forward"]
    planned = plan("attention", *QKV, causal=True, gradient=True)
    assert [name for name, _ in planned.launchers] == ["attention_forward", "attention_backward"]
    assert planned.launchers[0][1].q.dtype == torch.bfloat16
    assert [name for name, _ in plan("attention", *QKV, causal=True).launchers] == names  # though it is known by now


def test_a_plan_of_a_function_has_every_call_in_it():
    def step(x, weight):
        y = hw.rms_norm(x, weight) + hw.rms_norm(x, weight)  # the same kernels twice
        hw.softmax(y).sum().backward()

    x, weight = torch.randn(4, 8, device="meta"), torch.randn(8, device="meta", requires_grad=True)
    planned = plan(step, x, weight)
    names = ["rms_norm_forward", "softmax_forward", "softmax_backward", "rms_norm_backward"]
    assert [name for name, _ in planned.launchers] == names
    assert [call.op for call in planned.calls] == ["rms_norm", "softmax"]


def test_a_tensor_counts_by_its_strides():
    args = plan("transpose", torch.zeros(5, 7).t()).launchers[0][1]
    assert args.x.stride() == (1, 7)
    assert args.x.is_meta


def test_what_a_worker_compiled_is_found_by_other_processes(cache):
    told = []
    warmed = hw.warm("rms_norm", X, W, gradient=True, arch="sm_90", workers=2, report=lambda *x: told.append(x))
    assert warmed.compiled == len(told) > 1
    assert warmed.found == 0
    assert [done for done, *_ in told] == list(range(1, len(told) + 1))
    assert len(list(cache.rglob("*.cubin"))) == len(told)
    again = hw.warm("rms_norm", X, W, gradient=True, arch="sm_90", workers=0)
    assert again[:2] == (0, len(told))
    # Another length is the same kernels, another dtype is not.
    assert hw.warm("rms_norm", (80, 96), W, gradient=True, arch="sm_90", workers=0).compiled == 0
    assert hw.warm("rms_norm", X, W, dtype=torch.float32, arch="sm_90", workers=0).compiled == 1


_KEYS = """
import sys
from headwise.backends.triton import ahead_of_time, private
from headwise.backends.triton.gpu import KNOWN
from headwise.ops._warm import plan
planned = plan("attention", (1, 4, 512, 128), (1, 2, 512, 128), (1, 2, 512, 128), causal=True, gradient=True)
kernels = {}
for name, job in ahead_of_time.jobs_of(planned.launchers, KNOWN["sm_90"]).values():
    kernels[name] = job.launches()[1][job.number].kernel
for name in sorted(kernels, reverse=sys.argv[1] == "backwards"):
    private._hash_in_full(kernels[name])
    print(name, kernels[name].cache_key)
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="later releases need not be told")
def test_what_a_kernel_is_kept_under_does_not_depend_on_the_kernels_before_it():
    orders = [
        subprocess.run([sys.executable, "-c", _KEYS, order], capture_output=True, text=True, check=True)
        for order in ("forwards", "backwards")
    ]
    found = [sorted(order.stdout.splitlines()) for order in orders]
    assert len(found[0]) > 2
    assert found[0] == found[1]


def test_a_kernel_that_does_not_compile_is_an_error(cache, monkeypatch):
    whole = ahead_of_time.jobs_of
    monkeypatch.setattr(
        ahead_of_time, "jobs_of",
        lambda *args: {key: (name, job._replace(number=99)) for key, (name, job) in whole(*args).items()},
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"warm: the kernel \w+ did not compile: IndexError"):
        hw.warm("rms_norm", X, W, arch="sm_90", workers=1)


def test_a_worker_that_ends_is_an_error(cache, monkeypatch):
    monkeypatch.setattr(ahead_of_time, "work", None)
    monkeypatch.setattr(ahead_of_time.sys, "executable", "/bin/false" if os.name == "posix" else sys.executable)
    with pytest.raises(RuntimeError, match="the process that compiled it ended"):
        hw.warm("rms_norm", X, W, arch="sm_90", workers=1)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (("rms_nom", X), {"arch": "sm_90"}, "op is 'rms_nom'; it needs to be a function or one of add_rms_norm"),
        (("softmax", X), {"arch": "sm_70"}, "arch is 'sm_70'; it needs to be one of sm_80"),
        (
            ("attention", *[(1, 1, 4, 600)] * 3),
            {"arch": "sm_90"},
            "triton cannot run attention: its kernels hold heads",
        ),
        ((lambda: 3,), {"arch": "sm_90"}, "makes no Headwise call on a tensor of the meta device"),
        (("rms_norm", X, (95,)), {"arch": "sm_90"}, "weight has shape"),
    ],
)
def test_bad_calls(cache, given, options, message):
    with pytest.raises(ValueError, match=message):
        hw.warm(*given, **options)


def test_without_a_gpu_one_has_to_be_named(cache, monkeypatch):
    from headwise.backends import registry

    monkeypatch.setitem(registry._missing, "triton", "PyTorch sees no CUDA or ROCm GPU")
    with pytest.raises(ValueError, match="PyTorch sees no CUDA or ROCm GPU"):
        hw.warm("softmax", X)


def test_an_interpreter_compiles_nothing(cache, monkeypatch):
    monkeypatch.setattr(settings, "triton_interpret", True)
    with pytest.raises(ValueError, match="TRITON_INTERPRET is set"):
        hw.warm("softmax", X, arch="sm_90")


def test_on_the_command_line(cache, tmp_path, capsys):
    calls = tmp_path / "calls.txt"
    calls.write_text("# two of them\nsoftmax --n 8 --v 64 --dtype bf16\n\nrms_norm --n 8 --d 64\n")
    options = ["--arch", "sm_90", "--workers", "0"]
    assert cli.main(["warm", f"@{calls}", "softmax --n 8 --v 64 --dtype bf16", *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["compiled"], said["found"]) == (2, 0)
    assert cli.main(["warm", f"@{calls}", *options]) == 0
    assert "0 kernels compiled, 2 were there" in capsys.readouterr().out
    assert cli.main(["env", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert kernels["folder"] == str(cache)
    assert kernels["count"] == 2
    assert kernels["bytes"] > 1000
    for wrong in (["@nowhere.txt"], ["softmax --v 64", "--workers", "-1"], ["attention --d 600", "--arch", "sm_90"]):
        assert cli.main(["warm", *wrong]) == 2


def test_every_architecture_can_be_compiled_for(cache):
    for arch in KNOWN:
        assert hw.warm("softmax", X, arch=arch, workers=0).compiled == 1

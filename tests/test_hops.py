"""How many functions of ours a call passes: what somebody who follows it has to read.

Counted by the interpreter itself (`sys.setprofile`): Python functions of src/headwise. Not counted are

* the launcher, and what it calls. Of a GPU backend the launcher runs while its record is made, so the making of the record
  is its part (and so is binding it to new buffers), and the replaying is not;
* argument checks: the op's own ``check`` and the modules of the checks;
* comprehensions and generator expressions, which are functions to some Pythons and not to others.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from backends_under_test import RUNNABLE
from fake_gpu import FakeGpu

import headwise as hw
from headwise.ops import rms_norm
from headwise.ops.attention import dense

FIRST, REPEATED, CALLS_OF_AN_ARRAY = 12, 5, 12
SOURCE = Path(hw.__file__).parent
CHECKS = (SOURCE / "ops/_checks.py", SOURCE / "ops/attention/_arguments.py")
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Walk:
    """The functions of ours that are called, in order; ``launched``: those that begin what is not counted."""

    def __init__(self, check: Callable[..., Any]) -> None:
        self.calls: list[str] = []
        self.launched: list[str] = []
        self._check = check.__code__
        self._skipping = 0  # frames below a function that is not counted, itself included

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            skipped = self._skipping or self._is_skipped(frame.f_code)
            self._skipping += bool(skipped)
            if not skipped and self._is_ours(frame.f_code):
                where = frame.f_code.co_filename.removeprefix(f"{SOURCE}/")
                self.calls.append(f"{where}: {frame.f_code.co_qualname}")
        elif event == "return" and self._skipping:
            self._skipping -= 1

    def _is_ours(self, code: CodeType) -> bool:
        written = code.co_filename.startswith("<headwise")  # while the program runs
        return (written or Path(code.co_filename).is_relative_to(SOURCE)) and code.co_name not in COMPREHENSIONS

    def _is_skipped(self, code: CodeType) -> bool:
        path = Path(code.co_filename)
        if code is self._check or path in CHECKS:
            return True
        in_backend = path.is_relative_to(SOURCE / "backends") and path.parent != SOURCE / "backends"
        makes_record = path.name == "recorder.py" and code.co_name in ("record", "_bind")
        if in_backend and (makes_record or code.co_name.endswith(("_forward", "_backward"))):
            self.launched.append(code.co_name)
            return True
        return False


def walk(call: Callable[[], Any], check: Callable[..., Any]) -> Walk:
    seen, before = Walk(check), sys.getprofile()
    gc.disable()  # so that nobody's destructor is counted as a part of the call
    sys.setprofile(seen)
    try:
        result = call()
    finally:
        sys.setprofile(before)
        gc.enable()
    del result
    return seen


def assert_short(seen: Walk, most: int, calls: int | None = None) -> None:
    distinct = list(dict.fromkeys(seen.calls))
    assert distinct, "nothing was counted"
    assert len(distinct) <= most, f"{len(distinct)} functions, {most} are allowed:\n" + "\n".join(distinct)
    assert calls is None or len(seen.calls) <= calls, f"{len(seen.calls)} calls, {calls} are allowed: {seen.calls}"


def inputs(length: int, gradient: bool = False, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, 2, length, 64, dtype=dtype).requires_grad_(gradient) for _ in range(3)]


def test_attention_on_the_cpu():
    hw.attention(*inputs(9), causal=True)  # modules are imported, backends found
    q, k, v = inputs(10)
    first = walk(lambda: hw.attention(q, k, v, causal=True), dense._check)
    again = walk(lambda: hw.attention(q, k, v, causal=True), dense._check)
    assert first.launched == ["record", "attention_forward"]
    assert again.launched == ["attention_forward"]
    assert_short(again, REPEATED)
    assert_short(first, FIRST)


def test_attention_on_a_gpu_with_gradient(monkeypatch):
    gpu = FakeGpu(monkeypatch)

    def forward(leaves: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: hw.attention(*leaves, causal=True, backend="triton")

    of_another_length = inputs(69, True, torch.bfloat16)
    forward(of_another_length)().sum().backward()
    leaves = inputs(70, True, torch.bfloat16)
    first, again = walk(forward(leaves), dense._check), walk(forward(leaves), dense._check)
    assert first.launched == ["record"]
    assert gpu.launches
    assert again.launched == []
    outs = [forward(leaves)() for _ in range(3)]
    grad = torch.randn_like(outs[0])
    backwards = [walk(lambda out=out: torch.autograd.grad(out, leaves, grad), dense._check) for out in outs]
    assert [seen.launched for seen in backwards] == [["record"], [], []]
    assert_short(backwards[-1], REPEATED)
    assert_short(again, REPEATED)
    assert_short(first, FIRST)


def test_rms_norm_on_a_webgpu_array():
    assert "webgpu" in RUNNABLE, "this test needs a WebGPU device; software does"
    from headwise import webgpu
    from headwise.backends.webgpu import runtime

    weight = webgpu.array(torch.randn(64))
    hw.rms_norm(webgpu.array(torch.randn(4, 64)), weight)
    x = webgpu.array(torch.randn(5, 64))
    runtime.device().flush()  # so that the call has to open a pass, the longer way
    first = walk(lambda: hw.rms_norm(x, weight), rms_norm._check)
    for _ in range(3):
        hw.rms_norm(x, weight)  # the buffers of its results are handed out in turn
    runtime.device().flush()
    again = walk(lambda: hw.rms_norm(x, weight), rms_norm._check)
    assert first.launched == ["record", "_bind"]
    assert again.launched == []
    assert_short(again, REPEATED, CALLS_OF_AN_ARRAY)
    assert_short(first, FIRST)


def test_what_is_counted():
    """Every function outside the launcher and the checks, once each in ``distinct``."""
    q, k, v = inputs(11)
    seen = walk(lambda: hw.attention(q, k, v), dense._check)
    assert seen.calls[:3] == [
        "ops/attention/dense.py: attention",
        "ops/_op.py: Op.__call__",
        "ops/_cache.py: Cache.find",
    ]
    assert not any("_checks.py" in name or "_check" in name.split(": ")[1] for name in seen.calls if "Op." not in name)
    count = len(set(seen.calls))
    assert_short(seen, count, calls=len(seen.calls))
    with pytest.raises(AssertionError, match=f"{count} functions"):
        assert_short(seen, count - 1)
    with pytest.raises(AssertionError, match="calls"):
        assert_short(seen, count, calls=len(seen.calls) - 1)

"""What runs on a GPU under compute-sanitizer, and over and over, are the Hopper kernels, all of them. No GPU is needed."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest
import torch
from ahead_of_time import Recorded
from hopper_variants import gradients_of

import headwise as hw
from headwise.backends.triton.hopper import attention_forward, coverage, padded
from headwise.backends.triton.hopper.tiles import BackwardTile, ForwardTile
from headwise.ops._explain import describe

sys.path.append(str(Path(__file__).parent / "gpu"))

import hopper_calls
from hopper_calls import CALLS

HOPPER = Path(attention_forward.__file__).parent


@functools.cache
def launches(name):
    """What a call launches, forward and backward: (kernel, numbers and constants)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # it would overrule what a call asks for
    try:
        call = hopper_calls.make(name, "meta")
        args = describe(call.op, **call.arguments).arguments
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)
    forward = padded.forward if call.tile is None else functools.partial(attention_forward.forward, tile=call.tile)
    of_backward = gradients_of(args)._replace(need_bias=args.bias is not None)
    recorded = Recorded(forward, args), Recorded(padded.backward, of_backward)
    return [(launch.kernel.fn.__name__, launch.tail) for one in recorded for launch in one.launches]


def variants(kernels):
    return [tail[-1] for name in CALLS for kernel, tail in launches(name) if kernel in kernels]


@pytest.mark.parametrize("name", CALLS)
def test_the_hopper_kernels_take_it(name):
    call = hopper_calls.make(name, "meta")
    note = hw.explain(call.op, **call.arguments, arch="sm_90").note
    assert note == "forward: the Hopper kernel; backward: the Hopper kernel"


def test_every_kernel_is_repeated():
    """Ten thousand times each: all but those that `test_hopper` and `test_hopper_backward` repeat."""
    repeated = ast.parse((Path(hopper_calls.__file__).parent / "test_hopper_repeats.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in repeated.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "CALLS"
    )
    found = {(kernel, tail[-1]) for name in names for kernel, tail in launches(name) if kernel.endswith("ward_kernel")}
    masked = {(kernel, v.dim) for kernel, v in found if kernel != "forward_kernel" and v.masked}
    assert masked == {
        ("backward_kernel", 64), ("backward_kernel", 128), ("wide_backward_kernel", 192), ("wide_backward_kernel", 256),
    }  # fmt: skip
    forward = [v for kernel, v in found if kernel == "forward_kernel"]
    assert {v.tile for v in forward} >= {coverage.FORWARD_UNEQUAL, coverage._80, coverage._96, coverage._160}
    assert any(v.bias_rows > 1 for v in forward)
    assert any(v.bias_rows == 1 for v in forward)
    assert any(v.has_cap for v in forward)
    assert {kernel for name in names for kernel, _ in launches(name)} >= {"_dense_bias_gradient", "_write_offsets"}


def launched_kernels():
    """The names of all kernels that the launchers of the Hopper folder launch."""
    found = set()
    for file in HOPPER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "launch":
                first = node.args[0]
                found |= {x.id for x in ast.walk(first) if isinstance(x, ast.Name)} - {"wide"}
    return found


def test_every_kernel_is_reached():
    reached = {kernel for name in CALLS for kernel, _ in launches(name)}
    expected = launched_kernels()
    assert {
        "forward_kernel",
        "backward_kernel",
        "wide_backward_kernel",
        "pack_mask",
        "_dense_bias_gradient",
    } <= expected
    assert expected <= reached


def table(kind):
    """All tiles of the tables of `coverage`."""
    found = set()
    for value in vars(coverage).values():
        rows = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        if isinstance(value, kind):
            rows = (value,)
        for row in rows:
            found |= {row} if isinstance(row, kind) else set()
    return found


def test_every_forward_tile_and_flag_is_reached():
    found = variants({"forward_kernel"})
    assert len(table(ForwardTile)) > 15
    assert table(ForwardTile) <= {v.tile for v in found}
    for flag in ("has_left", "has_right", "has_cap", "packed", "cut", "masked", "mask_is_endless"):
        assert {bool(getattr(v, flag)) for v in found} == {False, True}, flag
    assert {v.bias_rows > 1 for v in found if v.bias_rows} == {False, True}
    assert any(v.masked and v.bias_rows for v in found)
    assert any(v.has_cap and v.masked for v in found)


def test_every_backward_tile_and_flag_is_reached():
    found = variants({"backward_kernel", "wide_backward_kernel"})
    pieces = {(v.dim, v.d0, v.d1, v.e1) for v in found}
    assert pieces == {(t.width, t.d0, t.d1, t.e1) for t in table(BackwardTile)}
    for flag in ("has_left", "has_right", "has_cap", "packed", "deterministic", "masked"):
        assert {bool(getattr(v, flag)) for v in found} == {False, True}, flag
    assert {v.bias_rows > 1 for v in found if v.bias_rows} == {False, True}
    assert {v.dim for v in found if v.masked} == {64, 128, 192, 256}
    assert {v.dim for v in found if v.has_cap} >= {64, 128, 192, 256}

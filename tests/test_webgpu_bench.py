"""The suite of WebGPU: what it asks for, that its cases run on resident arrays, its peer and its picture."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from headwise.benchmark import timing
from headwise.benchmark.case import Absent
from headwise.benchmark.requirements import AtLeast, FlopRate, SameRate, TimeLimit, Within
from headwise.benchmark.runner import NOTHING_CROSSED, run_case
from headwise.benchmark.suites import onnx_webgpu, webgpu
from headwise.cli import main

ONCE = timing.Plan(repeats=1, sample_s=0.0)
FULL, QUICK = webgpu.cases(False), webgpu.cases(True)


def targets(group):
    return [case.requirements for case in FULL if case.group == group]


def test_targets():
    assert targets("attention float32") == [
        (AtLeast(2.0, "ONNX Runtime"), FlopRate(36.0)),
        (AtLeast(3.0, "ONNX Runtime"), FlopRate(36.0)),
        (AtLeast(2.0, "ONNX Runtime"), FlopRate(32.0)),
        (AtLeast(3.0, "ONNX Runtime"), FlopRate(32.0)),
    ]
    assert targets("attention float16") == [(AtLeast(1.25, "ONNX Runtime"),), (AtLeast(2.0, "ONNX Runtime"),)] * 2
    assert set(targets("without subgroups")) == {(AtLeast(1.3, "ONNX Runtime"),)}
    assert set(targets("small grid")) == {(FlopRate(25.0),), ()}
    assert set(targets("attention backward float32")) == {(SameRate(0.5, "our forward"),)}
    assert set(targets("memory bound float32")) == {(Within(1 / 0.7, "WGSL copy"),), (Within(1 / 0.85, "WGSL copy"),)}
    rows = [case for case in FULL if case.group.startswith("memory bound")]
    closest = {(case.name, case.direction) for case in rows if case.requirements == (Within(1 / 0.85, "WGSL copy"),)}
    assert {(name.split()[0], direction) for name, direction in closest} == {
        (op, direction) for op in ("add_rms_norm", "glu", "layer_norm", "rope") for direction in ("forward", "backward")
    }
    judged = [case.name for case in FULL if case.group.startswith("decode") and case.requirements]
    assert judged == ["B 8 length 32768"] * 3
    assert targets("host") == [(TimeLimit(600.0),), (Within(1.3, "our forward"),)]
    for dtype, rate in (("float32", 36.0), ("float16", 40.0), ("bfloat16", 30.0)):
        required = targets(f"matmul {dtype}")
        assert required[:3] == [(FlopRate(rate),), (Within(1 / 0.9, "a · b"),), (Within(1 / 0.9, "a · b"),)]
    assert targets("matmul float32")[3:] == [(FlopRate(32.4),)]
    assert targets("matmul float16")[3:] == [(Within(1 / 0.75, "WGSL copy"),)]
    assert set(targets("operators")) == {(Within(1 / 0.85, "WGSL copy"),)}
    assert targets("host of operators") == [(TimeLimit(1000.0),), (TimeLimit(100.0),)]
    assert targets("training step") == [(FlopRate(0.45 * 57.0),), (Within(1.4, "captured"),)]
    assert targets("decoding step") == [(Within(1 / 0.6, "WGSL copy"),), ()]
    growth = [case for case in FULL if case.group == "growth"]
    assert [case.flops for case in growth[::2]] == [4.0 * 16 * n * n * 64 for n in webgpu.GROWTH]


def of_every_group():
    """The smallest case of every group, and what goes backward."""
    chosen = {}
    for case in QUICK:
        chosen.setdefault((case.group, case.direction), case)
    return list(chosen.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", of_every_group(), ids=lambda case: case.key)
def test_cases_run_on_resident_arrays(case):
    result = run_case(case, webgpu.SUITE, ONCE)
    assert result.status == "ok", result.detail
    assert result.note.startswith(NOTHING_CROSSED)
    measured = {m.contender: m for m in result.measurements}
    assert measured["headwise"].seconds.median > 0
    assert all(p.name in measured or p.name in result.absent for p in case.peers)


def test_a_wrong_result_is_refused():
    case = next(case for case in QUICK if case.group == "small grid")
    wrong = replace(case, ours=lambda arguments: lambda: arguments["v"])
    result = run_case(wrong, webgpu.SUITE, ONCE)
    assert result.status == "refused"
    assert "outside the error budget" in result.detail


def test_the_floor_changes_the_kernels_and_nothing_else():
    import headwise as hw
    from headwise.backends.webgpu import runtime
    from headwise.webgpu import array

    q = array(torch.randn(1, 2, 40, 64))
    tier = runtime.device().capabilities.tier
    with webgpu.floor_of_webgpu():
        assert runtime.device().capabilities.tier == "A"
        ours = hw.attention(q, q, q)
    assert runtime.device().capabilities.tier == tier
    torch.testing.assert_close(ours.torch(), hw.attention(q, q, q).torch())


def test_the_peer_says_why_it_is_not_here():
    q = torch.randn(1, 2, 8, 16)
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        with pytest.raises(ImportError, match=str(error)):
            onnx_webgpu.OrtAttention(q, q, q, causal=False)
        return
    try:
        peer = onnx_webgpu.OrtAttention(q, q, q, causal=True)
    except Absent:
        return  # its Dawn finds no GPU here
    (out,) = peer()
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))


def test_the_picture_of_growth(tmp_path, capsys):
    arguments = ["bench", "--suite", "webgpu", "--quick", "--group", "growth", "--filter", "S 16", "--repeats", "1"]
    assert main([*arguments, "--out", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (csv,) = told["written"]
    assert told["machine"]["device"] == "webgpu"
    assert "copy" in {row["case"] for row in told["results"] if row["group"] == "roofs"}
    assert main(["bench", "--plot-csv", csv, "--json"]) == 0
    assert any(path.endswith("-growth.png") for path in json.loads(capsys.readouterr().out)["written"])

"""The suite of the GPUs, as far as a machine without one can tell: what it asks for, that its cases run, and its
pictures."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace

import pytest
import torch

from headwise.benchmark import inputs, report, timing
from headwise.benchmark.case import OURS, BenchCase
from headwise.benchmark.requirements import AtLeast, Bandwidth, Measurement, PeakMemory, SameRate, Within
from headwise.benchmark.roofs import Roof
from headwise.benchmark.runner import CaseResult, run_case
from headwise.benchmark.suites import cuda
from headwise.benchmark.suites.peers import CUDNN, FA2, FLEX
from headwise.cli import main

ONCE = timing.Plan(repeats=2, sample_s=0.0)
ON_CPU = replace(cuda.SUITE, device="cpu", backend="cpu")
MACHINE = report.Machine(
    "cuda", "NVIDIA H200", "Some CPU", 16, "2.11.0+cu130", "0.1", "3.12.3", "2026-01-01T00:00:00+00:00", "3.6.0"
)
FULL, QUICK = cuda.cases(False), cuda.cases(True)


def group(name: str, cases: list[BenchCase] = FULL) -> list[BenchCase]:
    return [case for case in cases if case.group == name]


# What is asked for


def test_attention_is_the_table_of_24_shapes_both_ways():
    for head_dim in (64, 128, 256):
        cases = group(f"attention D {head_dim}")
        assert len(cases) == 16
        for case in cases:
            assert case.requirements == (AtLeast(1.3, FA2), AtLeast(1.0, FLEX))
            assert {p.name for p in case.peers} == {FA2, CUDNN, FLEX}
    flops = {(c.group, c.name, c.direction): c.flops for c in FULL}
    # B·S = 16384, H·D = 2048: 4 · pairs · D · heads · batch
    assert flops["attention D 128", "full S 8192", "forward"] == 4 * 16384 * 8192 * 2048
    assert flops["attention D 64", "full S 512", "backward"] == 2.5 * 4 * 16384 * 512 * 2048


def test_targets_of_the_other_groups():
    def targets(name: str) -> set[str]:
        return {str(r) for case in group(name) for r in case.requirements}

    assert targets("attention float32") == {"≥ 1.5× as fast as SDPA efficient", "≥ 1.5× as fast as SDPA math"}
    assert {case.dtype for case in group("attention float32")} == {torch.float32}
    assert [c.requirements for c in group("packed")] == [(SameRate(0.95, cuda.DENSE),)] * 2
    assert [c.requirements for c in group("window")] == [(AtLeast(6.0, cuda.CAUSAL),)] * 2
    assert {c.timed for c in group("decode as CUDA graphs")} == {"graph"}
    assert {c.timed for c in group("decode as plain calls")} == {"calls"}
    assert len(group("decode as CUDA graphs")) == len(group("decode as plain calls")) == len(group("decode paged")) == 6
    fastest = [c for c in FULL if Bandwidth(3.2) in c.requirements]
    assert {c.name for c in fastest} == {"B 1 length 32768", "cross_entropy 8192 × 131072, one pass"}
    assert {c.requirements for c in group("decode paged")} == {(Within(1.05, "our contiguous"),)}
    (memory,) = group("memory")
    assert memory.requirements == (
        PeakMemory(3 * 131072 * 16 * 128 * 2 + 2 * 10**9, "2 GB beyond the three gradients"),
    )
    host = {c.name: c.requirements for c in group("host")}
    assert host["attention, recorded"] == host["attention, backward"] == (Within(1.2, "SDPA"),)
    assert host["softmax, recorded"] == host["cross_entropy, backward"] == (Within(1.5, "PyTorch"),)
    assert host["attention_varlen, recorded"] == (Within(1.3, "our attention"),)
    assert len(host) == 18


@pytest.mark.parametrize(
    ("op", "direction", "shape", "rate"),
    [
        ("rms_norm", "forward", (16384, 4096), 3.85),
        ("rms_norm", "backward", (16384, 4096), 3.6),
        ("softmax", "backward", (16384, 16384), 4.15),
        ("rms_norm", "forward", (524288, 128), 0.85 * 3.85),
        ("softmax", "backward", (256, 262144), 0.85 * 4.15),
        ("rms_norm", "backward", (64, 262144), 0.85 * 3.6),
    ],
)
def test_rates_of_rows(op, direction, shape, rate):
    name = f"{op} {shape[0]} × {shape[1]}"
    (case,) = [c for c in group(op) if (c.name, c.direction) == (name, direction)]
    assert case.requirements == (Bandwidth(rate),)
    assert case.bytes == (2 if direction == "forward" else 3) * 2 * shape[0] * shape[1]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rates_of_rope_and_glu(direction):
    cases = {c.name: c for c in group("training ops") if c.direction == direction}
    glu, rope = cases["glu 16384 × 14336"], cases["rope 32 + 8 heads B 2 S 8192 D 128"]
    assert glu.requirements == (AtLeast(0.98, "torch.compile"), AtLeast(0.98, "Liger"))
    assert glu.bytes == (3 if direction == "forward" else 5) * 2 * 16384 * 14336
    assert rope.requirements == (Bandwidth(0.9 * 4.24), AtLeast(1.0, "torch.compile"))
    assert rope.bytes == 2 * 2 * (2 * 40 * 8192 * 128)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rope_of_a_pair_is_checked_and_timed(direction):
    """Both results are compared: a wrong k is refused."""
    (case,) = [c for c in group("training ops", QUICK) if c.direction == direction and c.name.startswith("rope")]
    case = replace(case, peers=case.peers[:1])
    result = run_case(case, ON_CPU, ONCE)
    assert (result.status, result.detail) == ("ok", "")

    def wrong(arguments):
        right = case.ours(arguments)
        return lambda: (right()[0], right()[1] * 1.5)

    refused = run_case(replace(case, ours=wrong), ON_CPU, ONCE)
    assert refused.status == "refused"
    assert "k" in refused.detail


def test_packed_lengths_are_random_and_their_dense_twin_has_the_same_work():
    lengths = cuda.random_lengths(64, 32768)
    assert (len(lengths), sum(lengths), min(lengths) >= 1) == (64, 32768, True)
    assert max(lengths) > 1.7 * 512
    batch, length = cuda.dense_equal(lengths)
    assert batch * length == pytest.approx(32768, rel=0.1)
    work = sum(n * (n + 1) / 2 for n in lengths)
    assert batch * length * (length + 1) / 2 == pytest.approx(work, rel=0.02)


# The cases run (on the CPU's kernels: it is the harness that is tested)


def smallest(name: str, direction: str, index: int = 0) -> BenchCase:
    case = [c for c in group(name, QUICK) if c.direction == direction][index]
    return replace(case, peers=tuple(p for p in case.peers if p.name != FLEX))


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("attention D 64", "forward"),
        ("attention D 64", "backward"),
        ("attention float32", "forward"),
        ("packed", "forward"),
        ("window", "backward"),
        ("decode as CUDA graphs", "forward"),
        ("decode paged", "forward"),
        ("training ops", "forward+backward"),
        ("host", "forward"),
        ("host", "backward"),
    ],
)
def test_cases_run(name, direction):
    case = smallest(name, direction)
    if name == "training ops":
        case = cuda.training.cross_entropy_case(
            32, 1000, replace(cuda.training.PLAIN, dtype=torch.bfloat16), fused=True
        )
    result = run_case(case, ON_CPU, ONCE)
    assert (result.status, result.detail) == ("ok", "")
    if FA2 in {p.name for p in case.peers}:
        # A CPU has a flash kernel, and no cuDNN: who cannot run is named.
        assert result.measurement(FA2) is not None
        assert set(result.absent) == {CUDNN}


def test_a_yardstick_with_work_of_its_own_is_rated_by_it():
    result = run_case(smallest("packed", "forward"), ON_CPU, ONCE)
    dense = result.measurement(cuda.DENSE)
    assert dense is not None
    assert dense.flops != result.case.flops
    ours, theirs = report.rows(result, "cuda", "bfloat16", MACHINE, quick=True)
    assert theirs.gflops_per_s == pytest.approx(dense.flops / dense.seconds.median / 1e9)
    assert theirs.required_ratio == pytest.approx(0.95 * dense.flops / result.case.flops)
    assert theirs.gbytes_per_s is None
    assert ours.gbytes_per_s is not None


def test_gradients_of_the_dense_twin_are_computed():
    """They go to tensors of its own; autograd would skip a backward whose results nobody asked for."""
    case = smallest("packed", "backward")
    maker = inputs.maker(torch.bfloat16, "cpu", 0)
    arguments = case.make(maker)
    for name in ("q", "k", "v"):
        arguments[name].requires_grad_()
    call = case.peers[0].prepare(arguments)
    assert all(x.requires_grad for x in call.leaves)
    assert call().requires_grad


def test_input_sets_outgrow_the_cache():
    megabyte = {"x": torch.empty(1 << 20, dtype=torch.uint8), "causal": True}
    assert inputs._sets(megabyte, cache=1 << 18) == 1
    assert inputs._sets(megabyte, cache=1 << 20) == 3
    assert inputs._sets(megabyte, cache=1 << 30) == 16
    assert inputs.sets_needed(megabyte, "cpu") == 1


def test_input_sets_take_turns():
    asked = []

    def prepare(arguments):
        return lambda: asked.append(int(arguments["x"][0, 0])) or torch.softmax(arguments["x"], -1)

    case = smallest("softmax", "forward")
    case = replace(
        case, make=lambda maker: {"x": maker.normal(4, 8, dtype=torch.float32) * 100}, ours=prepare, peers=()
    )
    pool = [case.make(inputs.maker(torch.float32, "cpu", seed)) for seed in range(3)]
    drawn = iter([*pool])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "sets_needed", lambda arguments, device: 3)
        result = run_case(replace(case, make=lambda maker: next(drawn)), ON_CPU, timing.Plan(repeats=1, sample_s=0.0))
    assert result.status == "ok", result.detail
    firsts = [int(a["x"][0, 0]) for a in pool]
    assert asked[-3:] == firsts  # one lap over all sets


# Rows and pictures


def fake_result(case: BenchCase, draw: random.Random) -> CaseResult:
    """A result as an H200 might give it: attention at a few hundred TFLOP/s, the rest near the bandwidth."""
    compute = case.flops / (draw.uniform(350, 600) * 1e12) if case.counts_flops else 0.0
    ours_s = max(compute, case.bytes / (draw.uniform(3.0, 4.2) * 1e12)) + 3e-6
    result = CaseResult(case)
    for contender in case.contenders():
        factor = 1.0 if contender.name == OURS else draw.uniform(0.8, 2.0)
        seconds = timing.Spread(ours_s * factor, ours_s * factor * 0.98, ours_s * factor * 1.03)
        ratio = None if contender.name == OURS else timing.Spread(factor, factor * 0.97, factor * 1.02)
        flops = case.flops if contender.flops is None else contender.flops
        result.measurements.append(Measurement(contender.name, contender.yardstick, flops, seconds, 9, 1 << 20, ratio))
    return result


def fake_rows() -> list[report.Row]:
    draw = random.Random(1)
    rows = [
        report.roof_row(roof, "cuda", MACHINE, quick=False)
        for roof in (
            Roof("copy", "int32", timing.Spread(1e-3, 1e-3, 1e-3), 15, bytes=4.24e9),
            Roof("bfloat16 matmul", "bfloat16", timing.Spread(1e-3, 1e-3, 1e-3), 15, flops=7.89e11),
        )
    ]
    for case in FULL:
        rows += report.rows(
            fake_result(case, draw), "cuda", str(case.dtype).removeprefix("torch."), MACHINE, quick=False
        )
    return rows


def test_pictures_are_drawn_from_a_csv(tmp_path, capsys):
    path = report.csv_path(tmp_path, "cuda", MACHINE)
    known = [("cuda", c.group, c.name, c.direction) for c in FULL]
    report.write_csv(path, fake_rows(), known)
    assert main(["bench", "--plot-csv", str(path), "--out", str(tmp_path / "pictures"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    kinds = [name.rsplit("-", 1)[-1].removesuffix(".png") for name in written]
    assert kinds == ["ratios", "attention", "decode", "rows", "roofline"]
    assert all((tmp_path / "pictures" / w.rsplit("/", 1)[-1]).read_bytes().startswith(b"\x89PNG") for w in written)


def test_a_csv_without_attention_has_fewer_pictures(tmp_path, capsys):
    path = tmp_path / "cuda-some.csv"
    rows = [row for row in fake_rows() if row.group == "rms_norm"]
    report.write_csv(path, rows, [])
    assert main(["bench", "--plot-csv", str(path)]) == 0
    assert capsys.readouterr().out.replace("\n", "") == f"wrote {tmp_path / 'cuda-some-rows.png'}"


@pytest.mark.parametrize("content", [None, "a,b\n1,2\n"])
def test_a_csv_that_is_none_is_told(tmp_path, content, capsys):
    path = tmp_path / "other.csv"
    if content is not None:
        path.write_text(content)
    assert main(["bench", "--plot-csv", str(path)]) == 2
    assert "other.csv" in capsys.readouterr().err


def test_a_csv_of_an_older_version_still_reads(tmp_path):
    path = tmp_path / "old.csv"
    report.write_csv(path, fake_rows()[:4], [])
    rows = report.read_csv(path)
    older = [name for name in report.COLUMNS if name not in ("triton", "timed", "required_ratio")]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, older, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    read = report.read_csv(path)
    assert [r["case"] for r in read] == [r["case"] for r in rows]
    assert {r["triton"] for r in read} == {""}


# The command


def test_the_list_needs_no_gpu(capsys):
    assert main(["bench", "--suite", "cuda", "--list", "--json", "--group", "Window"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["requirements"] for entry in listed] == [["≥ 6× as fast as our causal"]] * 2


@pytest.mark.parametrize(
    "wrong", [["--group", "abacus"], ["--without", "abacus"], ["--group", "window", "--filter", "abacus"]]
)
def test_wrong_names_are_told(wrong, capsys):
    assert main(["bench", "--suite", "cuda", "--list", *wrong]) == 2
    assert "abacus" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_measured(capsys):
    assert main(["bench", "--suite", "cuda", "--quick"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_without_leaves_a_peer_out(capsys):
    command = ["bench", "--suite", "cpu", "--quick", "--json", "--repeats", "1", "--filter", "softmax 128 forward"]
    assert main([*command, "--without", "pytorch"]) == 0
    assert {r["contender"] for r in json.loads(capsys.readouterr().out)["results"]} == {OURS}

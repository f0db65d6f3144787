"""The harness: it refuses what is wrong, interleaves, pairs its ratios, counts memory, and writes what reads back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from headwise.benchmark import inputs, memory, report, timing
from headwise.benchmark.case import OURS, Absent, BenchCase, BenchSuite, Contender, concerned, matches
from headwise.benchmark.correctness import WholeCheck, oracle
from headwise.benchmark.plot import save_ratios
from headwise.benchmark.requirements import AtLeast, Bandwidth, MemoryShare, PeakMemory, SameRate, TimeLimit, Within
from headwise.benchmark.runner import run_case
from headwise.benchmark.suites import SUITES, load, models, transformers_models
from headwise.benchmark.suites.attention import (
    QKV,
    Shape,
    Visibility,
    attention_case,
    attention_flops,
    packed_case,
    sdpa,
    sdpa_packed,
)
from headwise.benchmark.suites.cpu import DOCUMENTS, document_lengths
from headwise.benchmark.suites.training import cross_entropy_case
from headwise.cli import main

ONCE = timing.Plan(repeats=2, sample_s=0.0)
SUITE = BenchSuite("test", "cpu", torch.float32, cases=lambda quick: [])
MACHINE = report.Machine("cpu", "Some CPU (TM) 9", "Some CPU (TM) 9", 2, "2", "0", "3", "2026-01-01")


def softmax_like(call):
    return lambda arguments: lambda: call(arguments["x"])


def softmax_case(ours=lambda x: torch.softmax(x, -1), **changes) -> BenchCase:
    case = BenchCase(
        name="softmax 16 × 32",
        group="rows",
        direction="backward",
        make=lambda maker: {"x": maker.normal(16, 32)},
        ours=softmax_like(ours),
        check=WholeCheck(oracle("softmax"), ("x",)),
        differentiable=("x",),
        peers=(Contender("PyTorch", softmax_like(lambda x: torch.softmax(x, -1))),),
        bytes=3.0 * 4 * 16 * 32,
    )
    return replace(case, **changes)


class SteppingClock:
    """Time as a script tells it: seconds per call by action, drifting up with every round."""

    def __init__(self, seconds: dict):
        self.seconds, self.log, self.drift = seconds, [], 1.0

    def measure(self, action, calls):
        name = action()
        self.log.append(name)
        self.drift *= 1.01
        return self.seconds[name] * self.drift


# What is wrong is not timed


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
def test_a_right_result_is_measured(direction):
    result = run_case(softmax_case(direction=direction), SUITE, ONCE)
    assert (result.status, result.detail) == ("ok", "")
    assert [m.contender for m in result.measurements] == [OURS, "PyTorch"]
    assert result.budget_share <= 1


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
def test_a_result_outside_its_budget_is_refused(direction):
    result = run_case(softmax_case(lambda x: torch.softmax(x, -1) * (1 + 1e-5), direction=direction), SUITE, ONCE)
    assert result.status == "refused"
    assert "outside the error budget" in result.detail
    assert not result.measurements
    (row,) = report.rows(result, "test", "float32", MACHINE, quick=False)
    assert row.status == "refused"
    assert row.median_ms is None


def test_a_peer_that_computes_something_else_is_refused():
    peer = Contender("wrong", softmax_like(lambda x: torch.softmax(1.01 * x, -1)))
    result = run_case(softmax_case(peers=(peer,)), SUITE, ONCE)
    assert result.status == "refused"
    assert "wrong computes something else: grad of x" in result.detail


def test_a_yardstick_may_compute_something_else_and_ignore_arguments():
    peer = Contender("other", lambda a: lambda: a["x"] * 2, yardstick=True)
    assert run_case(softmax_case(peers=(peer,)), SUITE, ONCE).status == "ok"


def test_what_raises_is_reported_and_does_not_stop_the_run():
    def broken(x):
        raise RuntimeError("no such kernel")

    result = run_case(softmax_case(broken), SUITE, ONCE)
    assert (result.status, result.detail) == ("error", "RuntimeError: no such kernel")


@pytest.mark.parametrize("error", [ImportError, Absent])
def test_a_peer_that_is_not_there_is_left_out(error):
    def absent(arguments):
        raise error("No module named 'peer'")

    result = run_case(softmax_case(peers=(Contender("peer", absent),), requirements=(AtLeast(1, "peer"),)), SUITE, ONCE)
    assert result.absent == {"peer": "No module named 'peer'"}
    assert [v.outcome for v in result.verdicts] == ["not judged"]


def wrong_in_one_head(arguments):
    """Right but for the first query head, which the truth of the last heads does not see; the peer does."""

    def run():
        out = sdpa(arguments)()
        return torch.cat([out[:, :1] * 1.01, out[:, 1:]], 1)

    return run


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_is_checked_beyond_the_heads_that_have_a_truth(direction, monkeypatch):
    monkeypatch.setattr("headwise.benchmark.suites.attention._PAIRS_CHECKED", 1)  # one key head
    shape = Shape(1, 4, 2, 48, 8)
    case = attention_case("c", "g", shape, direction, Visibility(causal=True), peers=(Contender("SDPA", sdpa),))
    case = replace(case, ours=wrong_in_one_head)
    result = run_case(case, SUITE, ONCE)
    assert all(e.ok for e in result.errors)
    assert (result.status, result.detail[:29]) == ("refused", "SDPA computes something else:")
    monkeypatch.undo()
    case = attention_case("c", "g", shape, direction, Visibility(causal=True))
    assert "error budget" in run_case(replace(case, ours=wrong_in_one_head), SUITE, ONCE).detail


# The truth of a part is the truth


@pytest.mark.parametrize(
    ("visibility", "features"),
    [
        (Visibility(), {}),
        (Visibility(causal=True), {"softcap": 5.0}),
        (Visibility(window=(7, 0)), {"sink": True}),
        (Visibility(window=(5, 9)), {}),
        (Visibility(causal=True), {"kv_lengths": [40, 23]}),
    ],
)
def test_head_by_head_truth_equals_the_oracle(visibility, features, monkeypatch):
    monkeypatch.setattr("headwise.benchmark.suites.attention._PAIRS_HELD", 500)  # many blocks of queries
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    arguments = {"q": normal(2, 4, 40, 8), "k": normal(2, 2, 40, 8), "v": normal(2, 2, 40, 8), **visibility.flags()}
    differentiable = QKV
    if "sink" in features:
        arguments["sink"], differentiable = normal(4), (*QKV, "sink")
    if "softcap" in features:
        arguments["softcap"] = features["softcap"]
    if "kv_lengths" in features:
        arguments["kv_lengths"] = torch.tensor(features["kv_lengths"], dtype=torch.int32)
    grad_out = normal(2, 4, 40, 8)
    case = attention_case("c", "g", Shape(2, 4, 2, 40, 8), "backward", visibility, differentiable=differentiable)
    whole = WholeCheck(oracle("attention"), differentiable).compute(arguments, grad_out)
    part = case.check.compute(arguments, grad_out)
    expected = case.check.pick(whole)
    assert part.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(part[name], expected[name], rtol=1e-10, atol=1e-12)


def test_row_by_row_cross_entropy_truth_equals_the_oracle():
    case = cross_entropy_case(100, 50)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(100, 50, generator=generator, dtype=torch.float64)
    arguments = {"logits": logits, "targets": torch.arange(100) % 50}
    grad_out = torch.ones((), dtype=torch.float64)
    whole = WholeCheck(oracle("cross_entropy"), ("logits",)).compute(arguments, grad_out)
    part = case.check.compute(arguments, grad_out)
    for name, expected in case.check.pick(whole).items():
        torch.testing.assert_close(part[name], expected)


def test_the_dense_masks_of_the_peers_mean_what_the_flags_mean():
    for direction in ("forward", "backward"):
        peers = (Contender("SDPA", sdpa),)
        window = attention_case("c", "g", Shape(1, 2, 2, 40, 8), direction, Visibility(window=(6, 0)), peers=peers)
        packed = packed_case(
            "c", "g", [5, 17, 1, 9], 2, 8, direction, causal=True, peers=(Contender("SDPA", sdpa_packed),)
        )
        for case in (window, packed):
            result = run_case(case, SUITE, ONCE)
            assert result.status != "error", result.detail
            assert "something else" not in result.detail


# Time


def test_contenders_take_turns_in_shuffled_order():
    clock = SteppingClock({"a": 1.0, "b": 1.0, "c": 1.0})
    actions = {name: (lambda name=name: name) for name in "abc"}
    timing.interleave(actions, clock, timing.Plan(repeats=20))
    rounds = clock.log[timing.WARM_UPS * 3 :]
    orders = ["".join(rounds[i : i + 3]) for i in range(0, len(rounds), 3)]
    assert len(orders) == 20
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 2


def test_ratios_are_paired_so_that_drift_does_not_show():
    clock = SteppingClock({"ours": 0.1, "theirs": 0.25})
    actions = {name: (lambda name=name: name) for name in ("ours", "theirs")}
    seconds = timing.interleave(actions, clock, timing.Plan(repeats=15))
    assert max(seconds["ours"]) > 1.3 * min(seconds["ours"])  # the machine got slower all the time
    ratio = timing.paired_ratio(seconds["theirs"], seconds["ours"])
    assert ratio.low == pytest.approx(2.5, rel=0.011)
    assert ratio.median == pytest.approx(2.5, rel=0.011)
    assert ratio.high == pytest.approx(2.5, rel=0.011)


def test_spread_is_the_median_and_the_middle_three_fifths():
    assert timing.Spread.of([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == timing.Spread(3.5, 2.0, 5.0)
    assert timing.Spread.of([7.0]) == timing.Spread(7.0, 7.0, 7.0)


class OneSecond(timing.SelfTimed):
    """A peer that says of itself that a call takes a second."""

    def __init__(self, x):
        self._x = x

    def __call__(self):
        return (torch.softmax(self._x, -1),)

    def seconds(self, calls):
        return 1.0


def test_what_times_itself_is_not_divided_among_the_sets_of_inputs(monkeypatch):
    monkeypatch.setattr(inputs, "sets_needed", lambda arguments, device: 4)

    class Clock(timing.WallClock):
        def measure(self, action, calls):
            return action.seconds(calls) if isinstance(action, timing.SelfTimed) else super().measure(action, calls)

    peer = Contender("itself", lambda arguments: OneSecond(arguments["x"]))
    case = softmax_case(direction="forward", peers=(peer,))
    result = run_case(case, SUITE, ONCE, clock=Clock())
    assert result.status == "ok", result.detail
    assert {m.contender: m.seconds.median for m in result.measurements}["itself"] == 1.0


def test_short_calls_are_repeated_within_a_sample():
    calls = []

    class Clock:
        def measure(self, action, number):
            calls.append(number)
            return 0.004

    timing.interleave({"a": lambda: None}, Clock(), timing.Plan(repeats=1, sample_s=0.02))
    assert calls == [1] * timing.WARM_UPS + [5]


def test_requirements_are_judged():
    requirements = (
        AtLeast(2.0, "PyTorch"),
        AtLeast(4.0, "PyTorch"),
        Within(1.5, "PyTorch"),
        PeakMemory(1, "1 byte"),
        Bandwidth(6.1e-9),
        Bandwidth(6.2e-9),
        TimeLimit(1e6),
        TimeLimit(0.9e6),
        SameRate(0.4, "twice the work"),
        SameRate(0.6, "twice the work"),
        MemoryShare(10.0, "PyTorch"),
        MemoryShare(0.1, "PyTorch"),
    )
    twice = Contender("twice the work", softmax_like(lambda x: x * 1), yardstick=True, flops=4096.0)
    case = softmax_case(requirements=requirements, peers=(*softmax_case().peers, twice), flops=2048.0)

    class Clock:
        def measure(self, action, calls):
            return 1.0

    result = run_case(case, SUITE, ONCE, clock=Clock())
    assert [v.outcome for v in result.verdicts[:4]] == ["missed", "missed", "met", "missed"]
    assert [v.outcome for v in result.verdicts[4:]] == ["met", "missed"] * 4
    unjudged = run_case(case, SUITE, ONCE, judged=False, clock=Clock())
    assert {v.outcome for v in unjudged.verdicts} == {"not judged"}


# Memory and work


def test_memory_inside_an_operator_is_counted():
    library = torch.library.Library("headwise_bench_test", "DEF")
    library.define("scratch(Tensor x) -> Tensor")

    def scratch(x):
        a = torch.empty(3 << 20, dtype=torch.uint8)
        b = torch.empty(2 << 20, dtype=torch.uint8)
        del a, b
        return x.clone()

    library.impl("scratch", scratch, "CompositeExplicitAutograd")
    x = torch.zeros(1 << 20, dtype=torch.uint8)
    assert memory.peak_extra(lambda: torch.ops.headwise_bench_test.scratch(x), "cpu") == 5 << 20
    assert memory.peak_extra(lambda: None, "cpu") == 0
    q = torch.zeros(1, 2, 64, 16)
    assert memory.peak_extra(lambda: F.scaled_dot_product_attention(q, q, q), "cpu") >= q.nbytes


def test_work_is_what_is_visible():
    assert Visibility().pairs(10, 10) == 100
    assert Visibility(causal=True).pairs(10, 10) == 55
    assert Visibility(causal=True).pairs(1, 10) == 10
    assert Visibility(window=(3, 0)).pairs(10, 10) == int(Visibility(window=(3, 0)).mask(10, 10).sum()) == 34
    assert Visibility(causal=True, window=(0, 5)).pairs(10, 10) == 10
    assert attention_flops(100, 8, "backward") == 2.5 * attention_flops(100, 8, "forward") == 2.5 * 3200
    lengths = document_lengths(8192)
    assert (sum(lengths), len(lengths), min(lengths) > 0) == (8192, DOCUMENTS, True)
    assert max(lengths) > 10 * min(lengths)


# Reports


def test_csv_reads_back_and_keeps_the_rows_of_cases_not_run(tmp_path):
    path = report.csv_path(tmp_path, "test", MACHINE)
    assert path.name == "test-some-cpu-tm-9.csv"
    first, second = (softmax_case(name=name, requirements=(AtLeast(1.0, "PyTorch"),)) for name in ("one", "two"))
    known = [("test", "rows", name, "backward") for name in ("one", "two")]

    def rows(case):
        return report.rows(run_case(case, SUITE, ONCE), "test", "float32", MACHINE, quick=False)

    report.write_csv(path, rows(first) + rows(second), known)
    report.write_csv(path, rows(second), known)
    read = report.read_csv(path)
    assert [(r["case"], r["contender"], r["role"]) for r in read] == [
        ("one", OURS, "ours"),
        ("one", "PyTorch", "peer"),
        ("two", OURS, "ours"),
        ("two", "PyTorch", "peer"),
    ]
    assert list(read[0]) == report.COLUMNS
    assert float(read[1]["ratio"]) > 0
    assert read[1]["outcome"] in ("met", "missed")
    assert read[0]["ratio"] == ""
    assert float(read[0]["gbytes_per_s"]) == pytest.approx(6144 / float(read[0]["median_ms"]) / 1e6, rel=1e-4)
    report.write_csv(path, rows(second), known[1:])  # a case that no longer exists goes
    assert {r["case"] for r in report.read_csv(path)} == {"two"}


def test_the_plot_is_a_picture(tmp_path):
    result = run_case(softmax_case(requirements=(AtLeast(1.0, "PyTorch"),)), SUITE, ONCE)
    path = tmp_path / "new" / "ratios.png"
    rows = [report.as_text(row) for row in report.rows(result, "test", "float32", MACHINE, quick=False)]
    assert save_ratios(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not save_ratios([], path)


# Suites and the command


@pytest.mark.parametrize("name", list(SUITES))
@pytest.mark.parametrize("quick", [True, False])
def test_suites_name_each_case_once_and_require_of_contenders_they_have(name, quick):
    cases = load(name).cases(quick)
    keys = [case.key for case in cases]
    assert len(keys) == len(set(keys))
    for case in cases:
        assert case.flops or case.bytes or case.timed == "process"
        names = {c.name for c in case.contenders()}
        assert {concerned(r) for r in case.requirements} <= names


def test_a_training_step_of_a_model_is_checked_against_pytorch():
    case = models.training_step("tiny", models.TINY, 2, 40)
    assert len(case.differentiable) == 2 + 6 * models.TINY.layers
    case = replace(case, peers=tuple(peer for peer in case.peers if peer.name == models.TORCH))
    result = run_case(case, replace(models.SUITE, device="cpu", dtype=torch.float32, backend="cpu"), ONCE)
    assert result.status == "ok", result.detail
    assert [v.outcome for v in result.verdicts if v.requirement == MemoryShare(0.6, models.TORCH)] != ["not judged"]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("make", [transformers_models.training_step, transformers_models.decoding])
def test_a_model_of_transformers_is_checked_against_pytorchs_attention(make):
    case = make("tiny", transformers_models.TINY, 2, 40)
    case = replace(case, peers=tuple(peer for peer in case.peers if peer.name != transformers_models.COMPILED))
    result = run_case(case, replace(models.SUITE, device="cpu", dtype=torch.float32, backend="cpu"), ONCE)
    assert result.status == "ok", result.detail
    assert set(result.absent) <= {transformers_models.LIGER, transformers_models.LIGER_FA4}  # they need a GPU
    assert {m.contender for m in result.measurements} == {"headwise", transformers_models.SDPA}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_compiled_model_of_transformers_is_checked_too():
    case = transformers_models.training_step("tiny", transformers_models.TINY, 2, 40)
    case = replace(case, peers=tuple(peer for peer in case.peers if peer.name == transformers_models.COMPILED))
    result = run_case(case, replace(models.SUITE, device="cpu", dtype=torch.float32, backend="cpu"), ONCE)
    assert result.status == "ok", result.detail
    assert {m.contender for m in result.measurements} == {"headwise", transformers_models.COMPILED}


def test_filter_takes_every_word():
    case = softmax_case()
    assert matches(case, None)
    assert matches(case, "back SOFT")
    assert not matches(case, "soft forward")


def test_quick_json_end_to_end(tmp_path, capsys):
    command = ["bench", "--suite", "cpu", "--quick", "--json", "--filter", "softmax 128", "--repeats", "1"]
    before = torch.get_num_threads()
    assert main([*command, "--threads", "1", "--out", str(tmp_path)]) == 0
    assert torch.get_num_threads() == before
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"]
    assert answer["machine"]["threads"] == 1
    assert {(r["direction"], r["contender"]) for r in answer["results"]} == {
        (direction, contender) for direction in ("forward", "backward") for contender in (OURS, "PyTorch")
    }
    assert all(r["status"] == "ok" and r["median_ms"] > 0 and r["quick"] for r in answer["results"])
    (written,) = answer["written"]
    assert len(report.read_csv(tmp_path / written.rsplit("/", 1)[-1])) == 4


def test_table_end_to_end(capsys):
    assert main(["bench", "--quick", "--repeats", "1", "--filter", "transpose"]) == 0
    shown = capsys.readouterr().out
    assert "transpose 128 × 4096" in shown
    assert "1 cases" in shown
    assert main(["bench", "--list", "--filter", "cross"]) == 0
    assert "one logits buffer" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--suite", "abacus"], ["--filter", "no such case"], ["--repeats", "0"]])
def test_wrong_use_is_told(wrong, capsys):
    assert main(["bench", "--quick", *wrong]) == 2
    assert wrong[1] in capsys.readouterr().err

"""The cases that the targets ask for: what they require, that they run, and the order of sums that every row names.

Sizes are tiny and the kernels those of the CPU: it is the harness that is tested.
"""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
import torch

from headwise.benchmark import inputs, means, report, timing
from headwise.benchmark.case import ANY_ORDER, OURS, Absent, BenchCase, Contender
from headwise.benchmark.correctness import WholeCheck, oracle
from headwise.benchmark.requirements import AtLeast, Bandwidth, FlopRate, Mean, TimeLimit, Within
from headwise.benchmark.runner import CaseResult, run_case
from headwise.benchmark.suites import cold_start, cuda, decode, hopper, hopper_features, webgpu_features
from headwise.benchmark.suites.attention import BOTH, PLAIN, Shape, Visibility, attention_case, attention_flops
from headwise.benchmark.suites.peers import CUDNN, EFFICIENT, FA4, FLASH_MLA, FLEX
from headwise.benchmark.suites.quack_peers import QUACK
from headwise.cli import bench, warm

ONCE = timing.Plan(repeats=2, sample_s=0.0)
ON_CPU = replace(hopper.SUITE, device="cpu", backend="cpu")
MACHINE = report.Machine(
    "cuda", "NVIDIA H200", "Some CPU", 16, "2.11.0+cu130", "0.1", "3.12.3", "2026-12-01T00:00:00+00:00", "3.6.0"
)
HOPPER, HOPPER_QUICK = hopper.cases(False), hopper.cases(True)
CUDA, CUDA_QUICK = cuda.cases(False), cuda.cases(True)


def of(cases: list[BenchCase], group: str, name: str = "", direction: str = "") -> list[BenchCase]:
    return [c for c in cases if c.group == group and name in c.name and direction in c.direction]


def names(case: BenchCase) -> list[str]:
    return [peer.name for peer in case.peers]


# What is asked for


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize(("head_dim", "length"), [(64, 2048), (64, 8192), (128, 2048), (128, 8192)])
def test_masks_that_hide_much_are_beside_the_call_that_they_replace(head_dim, length, direction):
    at = f"S {length} D {head_dim}"
    (causal,) = of(HOPPER, "features", f"causal as a mask {at}", direction)
    (documents,) = of(HOPPER, "features", f"8 documents as a mask {at}", direction)
    assert Within(1.25, hopper_features.FLAG) in causal.requirements
    assert AtLeast(4.0, hopper_features.FULL) in documents.requirements
    for case in (causal, documents):
        assert AtLeast(1.2, FLEX) in case.requirements
        assert FLEX in names(case)


@pytest.mark.parametrize("direction", BOTH)
def test_head_dims_that_are_no_powers_of_two(direction):
    cases = of(HOPPER, "head dims", direction=direction)
    shapes = {c.name.split(" S ")[0] + " D" + c.name.split(" D", 1)[1] for c in cases}
    assert shapes == {"causal D 192 Dv 128", "full D 192 Dv 128", "full D 80", "causal D 96"}
    assert len(cases) == 4 * 3
    for case in cases:
        assert set(names(case)) - {ANY_ORDER} == {CUDNN, FA4}
        assert case.requirements == tuple(
            AtLeast(1.0, peer, any_order=direction == "backward") for peer in (CUDNN, FA4)
        )
    (wide,) = of(cases, "head dims", "full S 4096 D 192")
    arguments = replace(wide, make=of(HOPPER_QUICK, "head dims", "full S 64 D 192", direction)[0].make).make(
        inputs.maker(torch.bfloat16, "cpu", 0)
    )
    assert (arguments["k"].shape[-1], arguments["v"].shape[-1]) == (192, 128)
    pairs = 4 * 16 * 4096**2
    assert wide.flops == 2 * pairs * ((192 + 128) if direction == "forward" else (3 * 192 + 2 * 128))


def test_work_of_unequal_head_dims_is_that_of_equal_ones_where_they_are():
    assert attention_flops(10, 64, "backward", 64) == attention_flops(10, 64, "backward") == 2.5 * 4 * 10 * 64


def test_soft_caps_are_beside_the_plain_call():
    cases = of(HOPPER, "softcap")
    assert len(cases) == 2 * 3 * 2 * 2
    assert {c.requirements for c in cases} == {(Within(1.35, PLAIN),)}


def test_absorbed_latent_decoding_has_a_rate_for_few_and_for_many_heads():
    cases = of(CUDA, "latent decode")
    assert {(c.name, c.requirements) for c in cases} == {
        (f"{heads} heads B 32 length 32768{pages}", (required,))
        for heads, required in ((16, Bandwidth(2.8)), (128, FlopRate(450.0)))
        for pages in ("", " pages of 64")
    }
    many = of(CUDA, "latent decode", "128 heads")[0]
    assert many.bytes == 2 * 32 * 32768 * 576  # keys and values are the same memory
    assert many.flops == 2 * 32 * 128 * 32768 * (576 + 512)
    assert names(many) == [FLASH_MLA]


def test_quack_is_a_peer_where_it_has_the_op():
    (loss,) = [c for c in of(CUDA, "training ops", "cross_entropy 8192") if not c.explicit]
    assert AtLeast(1.05, QUACK) in loss.requirements
    for group in ("rms_norm", "softmax", "other norms"):
        assert all(QUACK in names(case) for case in of(CUDA, group)), group
    (through_autograd,) = of(CUDA, "rms_norm as plain calls")
    assert (through_autograd.timed, through_autograd.requirements) == ("calls", (Bandwidth(3.6),))


def test_what_a_user_waits_for_first_has_a_limit_in_seconds():
    limits = {(c.name, c.direction): str(c.requirements[0]) for c in of(CUDA, "cold start")}
    assert limits == {
        ("first call causal S 2048 D 64", "forward"): "≤ 2.5 s",
        ("first call causal S 2048 D 128", "forward"): "≤ 2.5 s",
        ("first call causal S 2048 D 64", "backward"): "≤ 3 s",
        ("first call causal S 2048 D 128", "backward"): "≤ 3 s",
        ("new combination: window, softcap, sink, kv_lengths, S 2048 D 128", "forward+backward"): "≤ 4 s",
        ("headwise warm of 16 calls", "forward"): "≤ 20 s",
    }
    assert len(set(cold_start.WARMED)) == 16


def test_masks_and_biases_on_webgpu_in_every_dtype():
    kinds = {(c.dtype, c.name.split(" S ")[0], c.direction) for c in webgpu_features.cases(1)}
    floats = (torch.float32, torch.float16, torch.bfloat16)
    assert kinds >= {(d, kind, way) for d in floats for kind in ("dense mask", "bias") for way in BOTH}


# They run


@pytest.mark.parametrize(
    ("group", "name", "direction"),
    [
        ("features", "causal as a mask S 32 D 64", "forward"),
        ("features", "8 documents as a mask S 32 D 64", "backward"),
        ("head dims", "causal S 64 D 192", "forward"),
        ("head dims", "full S 64 D 80", "backward"),
        ("softcap", "causal S 32 D 64", "backward"),
        ("packed", "random lengths", "backward"),
    ],
)
def test_cases_of_the_hopper_suite_run(group, name, direction):
    case = of(HOPPER_QUICK, group, name, direction)[0]
    result = run_case(replace(case, peers=tuple(p for p in case.peers if p.name != FLEX)), ON_CPU, ONCE)
    assert (result.status, result.detail) == ("ok", "")
    absent = {CUDNN, EFFICIENT, FA4} & set(names(case))
    assert set(result.absent) == absent
    assert {m.contender for m in result.measurements} == {OURS, *names(case)} - absent - {FLEX}


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_latent_decoding_runs_over_one_cache(heads, page_size):
    """Its truth is of some heads, in the entry that is checked."""
    cache = decode.Cache(3, 200, heads, 1, decode.LATENT)
    case = decode.latent_case("latent", cache, "calls", torch.float32, page_size=page_size)
    arguments = case.make(inputs.maker(torch.float32, "cpu", 0))
    assert arguments["v_cache"].data_ptr() == arguments["k_cache"].data_ptr()
    assert arguments["v_cache"].stride() == arguments["k_cache"].stride()
    result = run_case(case, ON_CPU, ONCE)
    assert (result.status, result.detail) == ("ok", "")

    def wrong_in_the_last_head(arguments):
        call = case.ours(arguments)

        def run():
            out = call()
            out[-1, -1] *= 1.01
            return out

        return run

    assert run_case(replace(case, ours=wrong_in_the_last_head), ON_CPU, ONCE).status == "refused"


@pytest.mark.parametrize("index", [0, 1], ids=["backward", "new combination"])
def test_first_calls_are_made_in_processes_and_their_results_are_checked(index):
    _, _, backward, _, combination, _ = of(CUDA_QUICK, "cold start")
    case = (backward, combination)[index]
    result = run_case(case, ON_CPU, timing.Plan(repeats=1, sample_s=0.0))
    assert (result.status, result.detail) == ("ok", "")
    assert set(result.absent) == set(names(case))  # FA4, where it is not installed
    measured = result.measurement(OURS)
    assert measured is not None
    assert (measured.rounds, measured.peak_extra_bytes) == (1, 0)
    assert 0.0 < measured.seconds.median < 60.0


def test_a_first_call_with_a_wrong_result_is_refused(monkeypatch):
    (case, *_) = of(CUDA_QUICK, "cold start")
    right = cold_start.FirstCall._run
    monkeypatch.setattr(
        cold_start.FirstCall, "_run", lambda self: (1.0, [x * 1.1 for x in right(self)[1]])
    )  # fmt: skip
    assert run_case(case, ON_CPU, ONCE).status == "refused"


def test_a_process_that_fails_says_why_and_a_peer_that_does_is_absent():
    call = cold_start.FirstCall({"library": "abacus", "device": "cpu", "differentiable": [], "options": {}}, {})
    with pytest.raises(RuntimeError, match="ended with 1: KeyError"):
        call()
    with pytest.raises(Absent, match="ended with 1: KeyError"):
        cold_start._try(call)


def test_warming_is_a_command_whose_kernels_are_found_again():
    case = of(CUDA_QUICK, "cold start", "warm")[0]
    result = run_case(case, ON_CPU, timing.Plan(repeats=1, sample_s=0.0))
    assert (result.status, result.detail) == ("ok", "")
    assert [str(v.requirement) for v in result.verdicts] == ["≤ 20 s"]


def test_every_call_that_is_warmed_is_one_that_the_command_plans():
    assert [len(warm._plan(call).launchers) for call in cold_start.WARMED] == [2] * 16  # forward and backward


def test_a_call_that_takes_long_has_few_rounds():
    case = replace(of(HOPPER_QUICK, "softcap")[0], most_rounds=1)
    measured = run_case(case, ON_CPU, timing.Plan(repeats=3, sample_s=0.0)).measurement(OURS)
    assert measured is not None
    assert measured.rounds == 1


# The order of sums


def gradient_case(loose, requirements=()) -> BenchCase:
    """Attention backward beside itself: `loose` makes the call that stands for sums in any order."""
    peers = (
        Contender(ANY_ORDER, loose, deterministic=False, variant=True),
        Contender("peer", lambda a: lambda: torch.softmax(a["x"], -1), deterministic=False),
    )
    return BenchCase(
        name="softmax", group="rows", direction="backward", make=lambda maker: {"x": maker.normal(16, 32)},
        ours=lambda a: lambda: torch.softmax(a["x"], -1), check=WholeCheck(oracle("softmax"), ("x",)),
        differentiable=("x",), peers=peers, bytes=1.0, requirements=requirements, dtype=torch.float32,
    )  # fmt: skip


class PerContender:
    """The seconds of each call, by what it computes: a clock for fake results."""

    def __init__(self, *seconds: float):
        self._seconds, self._known = list(seconds), dict[int, float]()

    def measure(self, action, calls):
        return self._known.setdefault(id(action), self._seconds[len(self._known) % len(self._seconds)])


def test_both_orders_run_in_the_same_rounds_and_peers_are_held_to_theirs():
    """Ours takes 2 s, in any order 1 s, the peer 1.5 s: faster than the default, slower than the other."""
    requirements = (AtLeast(1.0, "peer", any_order=True), AtLeast(1.0, "peer"))
    case = gradient_case(lambda a: lambda: torch.softmax(a["x"], -1), requirements)
    result = run_case(case, ON_CPU, timing.Plan(repeats=3), clock=PerContender(2.0, 1.0, 1.5))
    assert result.status == "ok", result.detail
    assert [v.outcome for v in result.verdicts] == ["met", "missed"]
    ours, loose, peer = report.rows(result, "hopper", "bfloat16", MACHINE, quick=False)
    assert [r.role for r in (ours, loose, peer)] == ["ours", "variant", "peer"]
    assert [r.deterministic for r in (ours, loose, peer)] == [True, False, False]
    assert (loose.ratio, loose.ratio_any_order) == (pytest.approx(0.5), None)
    assert (peer.ratio, peer.ratio_any_order) == (pytest.approx(0.75), pytest.approx(1.5))
    assert peer.requirement == "≥ 1× as fast as peer, in any order; ≥ 1× as fast as peer"
    assert peer.required_ratio == 1.0  # of `ratio`
    *_, cells = bench._cells(result, 1e12)
    assert [str(cells[i]) for i in (5, 7, 10)] == ["peer", "0.75× (1.50×)", "≥ 1× any order\n≥ 1×"]


def test_a_wrong_gradient_in_any_order_is_refused():
    result = run_case(gradient_case(lambda a: lambda: torch.softmax(a["x"] * (1 + 1e-5), -1)), ON_CPU, ONCE)
    assert (result.status, result.detail[:46]) == ("refused", "headwise, any order is outside the error budge")


def test_a_call_of_ours_in_any_order_that_raises_is_an_error():
    def broken(arguments):
        raise RuntimeError("no such kernel")

    assert run_case(gradient_case(broken), ON_CPU, ONCE).status == "error"


def test_the_24_shapes_are_run_in_both_orders():
    for direction in BOTH:
        cases = [c for c in HOPPER if c.group.startswith("attention D") and c.direction == direction]
        assert len(cases) == 24
        assert all((ANY_ORDER in names(case)) == (direction == "backward") for case in cases)
    bounds = {(m.direction, m.any_order): m.bound for m in hopper.MEANS}
    assert bounds == {("forward", False): 1.05, ("backward", True): 1.05, ("backward", False): 0.95}
    case = attention_case("c", "g", Shape(1, 2, 2, 40, 16), "backward", Visibility(causal=True))
    flags = []
    contender = hopper.any_order_contender(lambda **arguments: flags.append(arguments["deterministic"]))
    contender.prepare(case.make(inputs.maker(torch.float32, "cpu", 0)))()
    assert flags == [False]


def row(**changes) -> dict[str, str]:
    known = dict.fromkeys(report.COLUMNS, "") | {
        "suite": "hopper", "group": "attention D 64", "case": "full S 512", "direction": "backward", "role": "ours",
        "contender": OURS, "device": "cuda", "dtype": "bfloat16", "date": "2026-11-15T12:00:00+00:00", "median_ms": "1",
    }  # fmt: skip
    return known | changes


def test_older_rows_are_labelled_by_what_is_known_of_them():
    assert report.order_of_sums(row()) == "any order where faster"
    assert report.order_of_sums(row(group="grouped heads")) == "any order where faster"
    assert report.order_of_sums(row(direction="forward")) == "fixed order"
    assert report.order_of_sums(row(group="features", date="2026-11-19T00:00:00")) == "fixed order"
    assert report.order_of_sums(row(group="attention float32", dtype="float32")) == "fixed order"
    assert report.order_of_sums(row(group="rms_norm")) == "fixed order"
    assert report.order_of_sums(row(role="peer", contender=FA4)) == ""  # nobody wrote it down
    assert report.order_of_sums(row(suite="models", group="training step")) == ""
    assert report.order_of_sums(row(deterministic="False")) == "any order"
    assert report.order_of_sums(row(deterministic="True")) == "fixed order"


def test_rows_without_the_column_are_kept_when_others_are_written(tmp_path):
    path, older = tmp_path / "hopper.csv", [name for name in report.COLUMNS if name not in _NEW]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, older, extrasaction="ignore")
        writer.writeheader()
        writer.writerow(row())
    case = gradient_case(lambda a: lambda: torch.softmax(a["x"], -1))
    new = report.rows(run_case(case, ON_CPU, ONCE), "hopper", "float32", MACHINE, quick=False)
    known = [("hopper", "attention D 64", "full S 512", "backward"), ("hopper", "rows", "softmax", "backward")]
    report.write_csv(path, new, known)
    read = report.read_csv(path)
    assert [r["deterministic"] for r in read] == ["", "True", "False", "False"]
    assert report.order_of_sums(read[0]) == "any order where faster"


_NEW = ("deterministic", "ratio_any_order")


def peer_row(name: str, ratio: float, any_order: float | None = None, **changes: str) -> dict[str, str]:
    loose = "" if any_order is None else str(any_order)
    return row(role="peer", contender=name, ratio=str(ratio), ratio_any_order=loose, **changes)


TWO = Mean("2 shapes", "backward", ("attention D 64",), (CUDNN, FA4), 1.0)
RECENT = {"date": "2026-12-01T00:00:00+00:00"}
MEASURED = [
    row(deterministic="True", **RECENT),
    peer_row(CUDNN, 2.0, 2.5, **RECENT), peer_row(FA4, 0.5, 0.8, **RECENT),
    row(case="causal S 512", deterministic="True", **RECENT),
    peer_row(CUDNN, 2.0, 3.0, case="causal S 512", **RECENT), peer_row(FA4, 4.0, 5.0, case="causal S 512", **RECENT),
]  # fmt: skip


def test_a_mean_is_over_the_better_peer_of_each_case_in_one_order():
    loose = replace(TWO, any_order=True, bound=1.6)
    default, in_any = means.found([TWO, loose], MEASURED)
    assert default.ratio == pytest.approx((0.5 * 2.0) ** 0.5)
    assert in_any.ratio == pytest.approx((0.8 * 3.0) ** 0.5)
    assert (default.outcome, in_any.outcome) == ("met", "missed")
    assert (default.order, in_any.order) == ("fixed order", "any order")
    assert default.against == "the best of cuDNN, FA4"
    assert "geometric mean 1.00× of the best of cuDNN, FA4 over 2 cases" in str(default)


def test_a_mean_of_older_rows_is_one_of_any_order_and_no_other():
    older = [r | {"date": "2026-11-15T12:00:00", "deterministic": "", "ratio_any_order": ""} for r in MEASURED]
    (only,) = means.found([TWO, replace(TWO, any_order=True)], older)
    assert only.mean.any_order
    assert only.order == "any order where faster"
    assert only.ratio == pytest.approx(1.0)


def test_a_mean_without_all_of_its_peers_or_cases_is_not_judged():
    (one,) = means.found([TWO], [r for r in MEASURED if r["contender"] != CUDNN])
    assert (one.outcome, one.against) == ("not judged", FA4)
    lonely = [r for r in MEASURED if r["role"] == "ours" or r["case"] != "full S 512"]
    assert means.found([TWO], lonely) == []  # a case without a peer
    assert means.found([replace(TWO, groups=("attention D 64", "attention D 128"))], MEASURED) == []


def test_time_limits_are_in_units_that_people_read():
    assert str(TimeLimit(600.0)) == "≤ 600 µs"
    assert str(TimeLimit(2.5e6)) == "≤ 2.5 s"


def test_every_contender_of_ours_names_its_order():
    for case in (*HOPPER, *CUDA):
        for contender in case.contenders():
            ours = contender.name.startswith(("headwise", "our "))
            assert ours == (contender.deterministic is not None and contender.name not in _IN_ANY_ORDER), contender
    result = CaseResult(HOPPER[0])
    assert result.case.contenders()[0].deterministic


_IN_ANY_ORDER = (CUDNN, FA4, "FA2", "SDPA efficient")

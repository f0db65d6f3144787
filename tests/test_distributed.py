"""Context parallelism: gloo processes against the oracle, and the geometry of blocks in one process."""

from __future__ import annotations

import csv
import itertools
import json
import random
import runpy
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from distributed_faults import GRACE, SCENARIOS, TIMEOUT, tells

from headwise import reference as oracle
from headwise import testing
from headwise.benchmark.distributed import JOBS, Row, judged
from headwise.distributed import costs, routes
from headwise.distributed.blocks import Gradients, Options, Partial, Plan, Region, Scores, pieces
from headwise.distributed.groups import fingerprint
from headwise.distributed.routes import columns_of, route
from headwise.distributed.shards import Segment, segments
from headwise.ops.attention import attention, attention_backward, unrounded
from headwise.reference.attention import visible_keys

RANK = Path(__file__).with_name("distributed_rank.py")
MODELS = Path(__file__).with_name("distributed_models.py")
MESHES = Path(__file__).with_name("distributed_meshes.py")
FAULTS = Path(__file__).with_name("distributed_faults.py")
SECONDS = 120


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_ranks_agree_with_the_oracle(ranks, tmp_path):
    """`distributed_rank.main` in every process: attention with gradients, decoding, losses, shards, refusals, bytes."""
    _run(ranks, tmp_path)


@pytest.mark.slow
def test_bytes_of_eight_ranks(tmp_path):
    _run(8, tmp_path, "check_bytes")


def _run(ranks, folder, *names, script=RANK):
    logs = [folder / f"rank{rank}" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-W", "error", str(script), str(rank), str(ranks), str(folder / "meeting"), *names]
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = "\n".join(f"--- rank {rank}\n{log.read_text()}" for rank, log in enumerate(logs))
    assert [process.returncode for process in processes] == [0] * ranks, said
    assert said.count("all checks ran") == ranks, said


def test_models_over_ranks(tmp_path):
    """`distributed_models`: headwise.nn and Transformers, DDP, FSDP2, checkpointing, torch.compile, DTensor."""
    _run(2, tmp_path, script=MODELS)


@pytest.mark.slow
def test_two_by_two_ranks(tmp_path):
    """`distributed_meshes`: DTensors on a mesh of two dimensions; DDP, HSDP and FSDP2 beside a dimension of context."""
    _run(4, tmp_path, script=MESHES)


@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_a_lost_rank_is_an_error_on_the_others(which, tmp_path):
    """Raised, killed with -9 or hanging, in every phase: no hang, no wrong number, one kind of error."""
    command = [sys.executable, "-W", "error", str(FAULTS), str(tmp_path), which]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, "0 processes had to be killed\n"), done.stdout + done.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    expected = {(*phase, way, rank) for phase, way in SCENARIOS[which] for rank in tells(way)}
    assert {(r["what"], r["phase"], r["way"], r["rank"]) for r in results} == expected
    for result in results:
        assert result["right"] == [True], result
        assert result["error"].startswith("RankLostError: "), result
        assert "got no answer in" in result["error"], result
        assert result["seconds"] < TIMEOUT + GRACE, result
        assert result["again"] == ("RankLostError" if result["way"] == "wakes" else ""), result
    assert time.monotonic() - begun < SECONDS


def _wait(processes):
    """Until all are done, one failed, or the time is over. The others of one that failed would wait for it."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes):
            time.sleep(2)  # for what the others have to say
            return
        time.sleep(0.1)


def plan_of(ranks, queries, keys, layout, left, right, regions=None, packed=False, rank=0):
    parts = (tuple(segments(total, r, ranks, layout) for r in range(ranks)) for total in (queries, keys))
    whole = (Region(Segment(0, queries), Segment(0, keys)),)
    return Plan(rank, *parts, left, right, whole if regions is None else regions, packed)


def _random_plan(draw):
    keys, queries = draw.randrange(0, 30), draw.randrange(0, 30)
    sides = [draw.choice([-1, 0, draw.randrange(12)]) for _ in range(2)]
    regions, packed = None, draw.random() < 0.4
    if packed:
        queries = keys
        ends = sorted(draw.randrange(0, keys + 1) for _ in range(draw.randrange(1, 9)))
        documents = [Segment(*pair) for pair in itertools.pairwise([0, *ends])]
        regions = tuple(Region(part, part, number=n) for n, part in enumerate(documents))
    elif draw.random() < 0.5:
        stop = draw.randrange(0, keys + 1)
        regions = (Region(Segment(0, draw.randrange(0, queries + 1)), Segment(draw.randrange(0, stop + 1), stop)),)
    layout = draw.choice(["zigzag", "contiguous"])
    return plan_of(draw.randrange(1, 6), queries, keys, layout, *sides, regions, packed)


def _sees(plan, i, j):
    for queries, keys, *_ in plan.regions:
        if queries.start <= i < queries.stop and keys.start <= j < keys.stop:
            p = i + keys.stop - queries.stop
            return (plan.left < 0 or j >= p - plan.left) and (plan.right < 0 or j <= p + plan.right)
    return False


def test_a_fingerprint_knows_masks_and_positions_apart():
    """Of padding and of packed documents, where many differ in few places by small numbers."""
    lengths = itertools.product(range(1, 10), repeat=3)
    masks = [torch.arange(9) < torch.tensor(of_rows)[:, None] for of_rows in lengths]
    borders = itertools.product((False, True), repeat=9)
    positions = [
        torch.tensor([i - max((j for j in range(i + 1) if j and starts[j - 1]), default=0) for i in range(10)])
        for starts in borders
    ]
    for given in (masks, positions):
        assert len({fingerprint(x) for x in given}) == len(given)
    assert fingerprint(masks[5]) == fingerprint(masks[5].clone())
    assert fingerprint(torch.zeros(0, dtype=torch.int64)) != fingerprint(None)


def test_pieces_are_what_can_be_seen():
    """Every visible pair of a query and a key is in one piece, and no other pair in any; the cost model counts them."""
    draw, straight = random.Random(0), 0
    for _ in range(600):
        plan = _random_plan(draw)
        whole, needed = 0, [[0] * plan.ranks for _ in range(plan.ranks)]
        way = route(plan)
        for rank in range(plan.ranks):
            queries = [i for a, b in plan.of_q[rank] for i in range(a, b)]
            for owner in range(plan.ranks):
                keys = [j for a, b in plan.of_k[owner] for j in range(a, b)]
                seen = torch.zeros(len(queries), len(keys), dtype=torch.int)
                for _, rows, columns, of_keys, (left, right), _ in pieces(plan, plan.of_q[rank], plan.of_k[owner]):
                    part = seen[rows, columns]
                    part += visible_keys(
                        *part.shape, part.shape[0], 0, part.shape[1], -1 if left is None else left,
                        -1 if right is None else right, part.device,
                    )  # fmt: skip
                    assert all(side is None or side >= 0 for side in (left, right))
                    assert keys[columns] == list(range(of_keys.start, of_keys.stop))
                expected = [[_sees(plan, i, j) for j in keys] for i in queries]
                assert torch.equal(seen, torch.tensor(expected, dtype=torch.int).reshape(seen.shape)), plan
                whole += int(seen.sum())
                assert [j for a, b in way.seen[rank][owner] for j in range(a, b)] == [
                    j for j, some in zip(keys, seen.any(0).tolist(), strict=True) if some
                ], plan
                local = [j for a, b in columns_of(plan.of_k[owner], way.seen[rank][owner]) for j in range(a, b)]
                assert local == seen.any(0).nonzero()[:, 0].tolist()
                needed[owner][rank] = len(local) if owner != rank else 0
        sizes = costs.Sizes(1, 1, 1, 8, 8, 4)
        for method in ("ring", "gather"):
            counted = [costs.cost(method, sizes, plan._replace(rank=r), False).pairs for r in range(plan.ranks)]
            assert sum(counted) == whole, (method, plan)
        for gradient in (False, True):  # a key is 1 · (8 + 8) elements of 4 bytes
            sent = [costs.cost("ring", sizes, plan._replace(rank=r), gradient).sent / 64 for r in range(plan.ranks)]
            least = [sum(row) * (1 + gradient) for row in needed]
            if gradient:
                least = [a + sum(b) for a, b in zip(least, zip(*needed, strict=True), strict=True)]
            assert not way.direct or sent == least, plan
            assert way.direct or gradient or max(sent) * 0.95 <= max(least), plan
        straight += way.direct
    assert 100 < straight < 500


def test_pieces_know_where_they_lie():
    """Their first query and key in the sequence, or in their document; their first batch entry, or the document's number."""
    draw = random.Random(2)
    for _ in range(200):
        plan = _random_plan(draw)
        for rank in range(plan.ranks):
            mine = [i for a, b in plan.of_q[rank] for i in range(a, b)]
            for piece in itertools.chain(*(pieces(plan, plan.of_q[rank], part) for part in plan.of_k)):
                number, row, key = piece.first
                region = plan.regions[number] if plan.packed else Region(Segment(0, 0), Segment(0, 0))
                assert mine[piece.rows][0] == row + region.queries.start
                assert piece.keys.start == key + region.keys.start
                assert number == (piece.first[0] if plan.packed else piece.batch.start or 0)


def test_blocks_go_no_further_than_they_are_seen():
    assert route(plan_of(4, 40, 40, "contiguous", 3, 0)).far == (1, 1, 1, 0)
    assert route(plan_of(4, 40, 40, "contiguous", 12, 0)).far == (2, 2, 1, 0)
    assert route(plan_of(4, 40, 40, "contiguous", -1, 0)).far == (3, 2, 1, 0)
    assert route(plan_of(4, 40, 40, "zigzag", -1, 0)).far == (3, 3, 3, 3)
    assert route(plan_of(4, 40, 40, "contiguous", 0, 0)).far == (0, 0, 0, 0)
    documents = tuple(Region(s, s) for s in (Segment(0, 15), Segment(15, 20), Segment(20, 40)))
    assert route(plan_of(4, 40, 40, "contiguous", -1, 0, documents, packed=True)).far == (1, 0, 1, 0)


def test_a_route_looks_at_few_of_many_lengths(monkeypatch):
    """A batch has new lengths at every step: most blocks are seen as a whole by the longest entries."""
    asked, real = [], routes.pieces
    monkeypatch.setattr(routes, "pieces", lambda *args: (asked.append(1) or piece for piece in real(*args)))
    draw = random.Random(1)
    parts = [Segment(0, draw.randrange(801)) for _ in range(64)]
    regions = tuple(Region(part, part, n, n + 1) for n, part in enumerate(parts))
    assert route(plan_of(8, 800, 800, "zigzag", -1, 0, regions)).far == (7,) * 8
    assert len(asked) < 8 * 8 * 64 / 2


def test_a_window_sends_what_is_seen_and_no_more():
    """In both layouts: of 1000 keys on a rank the 100 before its chunk, two chunks of them under zigzag."""
    for layout, borders in (("contiguous", 1), ("zigzag", 2)):
        plan, sizes = plan_of(8, 8000, 8000, layout, 100, 0), costs.Sizes(1, 2, 2, 8, 8, 4)
        assert route(plan).direct
        for gradient, copies in ((False, 1), (True, 3)):  # the gradients of the parts that a rank got, too
            sent = [costs.cost("ring", sizes, plan._replace(rank=r), gradient).sent for r in range(8)]
            assert max(sent) == copies * borders * 100 * 2 * 16 * 4
    assert not route(plan_of(8, 8007, 8007, "zigzag", -1, 0)).direct  # the busiest rank's keys are seen by all


def test_the_cost_model_in_closed_form():
    for ranks, method, gradient in itertools.product((2, 4, 8), costs.METHODS, (False, True)):
        sizes = costs.Sizes(2, 8, 4, 16, 24, 2)
        plan = plan_of(ranks, 64, 64, "zigzag", -1, 0)
        assert costs.cost(method, sizes, plan, gradient) == costs.of_causal(method, sizes, 64, ranks, gradient)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_zigzag_shards_of_causal_attention_are_balanced(ranks):
    """Within 10 %; contiguous ones are not."""
    for layout, balanced in (("zigzag", True), ("contiguous", False)):
        plan = plan_of(ranks, 40 * ranks + 7, 40 * ranks + 7, layout, -1, 0)
        sizes = costs.Sizes(1, 1, 1, 8, 8, 4)
        pairs = [costs.cost("ring", sizes, plan._replace(rank=rank), False).pairs for rank in range(ranks)]
        assert (max(pairs) <= 1.1 * sum(pairs) / ranks) == balanced


def test_auto_chooses_by_cost():
    """Few ranks with fast links gather; few key heads make the ring and the gather cheap, many the exchange of heads."""
    plan = plan_of(8, 2**17, 2**17, "zigzag", -1, 0)
    for machine, sizes, scores, best in (
        (costs.NVLINK, costs.Sizes(1, 32, 32, 128, 128, 2), False, "ulysses"),
        (costs.NVLINK, costs.Sizes(1, 32, 32, 128, 128, 2), True, "gather"),
        (costs.NVLINK, costs.Sizes(1, 4, 1, 128, 128, 2), False, "gather"),
        (costs.CPU, costs.Sizes(1, 4, 1, 64, 64, 4), False, "ring"),
    ):
        assert costs.choose(sizes, plan, machine, True, scores) == best, sizes
    links = [costs.machine_of(torch.device(kind), one) for kind in ("cpu", "cuda") for one in (True, False)]
    assert links == [costs.CPU, costs.CPU, costs.NVLINK, costs.INFINIBAND]
    few = costs.Sizes(1, 4, 1, 128, 128, 2)  # in one machine gathered; a network is slow enough to be worth an overlap
    assert costs.choose(few, plan, costs.INFINIBAND, True) == "ring"
    assert costs.choose(sizes, plan_of(1, 64, 64, "zigzag", -1, 0), costs.CPU, True) == "gather"


def test_decoding_is_merged_by_the_cheaper_way():
    """Few rows in one exchange; many rows over many ranks in two, of fewer bytes."""
    for rows, ranks, machine, best in (
        (32, 8, costs.NVLINK, "gather"), (32 * 64, 8, costs.NVLINK, "gather"), (32 * 64, 64, costs.INFINIBAND, "scatter"),
        (10**6, 2, costs.CPU, "gather"), (10**5, 4, costs.CPU, "scatter"), (1, 1, costs.CPU, "gather"),
    ):  # fmt: skip
        assert costs.way_of_decode(rows, 129, 4, ranks, machine) == best, (rows, ranks)
    for rows, ranks in ((7, 3), (2, 5), (64, 4)):
        sent = [costs.of_decode(rows, 1, 1, rank, ranks, "scatter").sent for rank in range(ranks)]
        assert sum(sent) == 2 * (ranks - 1) * rows
        loss = [costs.of_loss(rows, 3, 2, rank, ranks, True).sent for rank in range(ranks)]
        assert sum(loss) == 4 * (ranks - 1) * (3 * rows * ranks + 2 * 2 * rows)


def test_partial_results_are_float32():
    """Of bfloat16 inputs, over many blocks, before the one rounding at the end: as close as float32 attention is."""
    maker = testing.Maker(torch.bfloat16, torch.device("cpu"), 1)
    q, k, v = maker.normal(1, 4, 96, 16), maker.normal(1, 2, 96, 16), maker.normal(1, 2, 96, 16)
    plan = plan_of(1, 96, 96, "contiguous", -1, 0)
    ring = Partial(plan, q, 16, None, Scores(), Options(0.25, None, True, None), merges=True)
    for start in range(0, 96, 6):
        todo = pieces(plan, plan.of_q[0], (Segment(start, start + 6),))
        ring.add(todo, k[:, :, start : start + 6], v[:, :, start : start + 6])
    truth, plain = (
        oracle.attention(*(x.to(to) for x in (q, k, v)), causal=True)[0] for to in (torch.float64, torch.float32)
    )
    error = testing.compare("out", ring.out, truth, plain)
    assert error.ok, error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_ring_of_eight_blocks_loses_no_digits(dtype, monkeypatch):
    """Kernels are given 16-bit blocks, and what is merged and summed is as close as if it were one float32 call."""
    given = []

    def noted(run, *tensors, **flags):
        given.append({x.dtype for x in tensors[:4]})
        return run(*tensors, **flags)

    for name in ("attention", "attention_backward"):
        monkeypatch.setattr(unrounded, name, partial(noted, getattr(unrounded, name)))
    maker = testing.Maker(dtype, torch.device("cpu"), 2)
    q, k, v, grad = (maker.normal(1, heads, 128, 16) for heads in (4, 2, 2, 4))
    plan, options = plan_of(1, 128, 128, "contiguous", -1, 0), Options(0.25, None, True, None)
    blocks = [(slice(start, start + 16), (Segment(start, start + 16),)) for start in range(0, 128, 16)]
    ring = Partial(plan, q, 16, None, Scores(), options, merges=True)
    for part, keys in blocks:
        ring.add(pieces(plan, plan.of_q[0], keys), k[:, :, part], v[:, :, part])
    out = ring.out.to(dtype)
    gradients = Gradients(q, out, ring.lse, grad, None, Scores(), options, False, summed=True)
    dk, dv = (torch.zeros(1, 2, 128, 16) for _ in range(2))
    for part, keys in blocks:
        gradients.add(pieces(plan, plan.of_q[0], keys), k[:, :, part], v[:, :, part], dk[:, :, part], dv[:, :, part])
    assert given == [{dtype}] * 16
    saved = grad, q, k, v, out
    true_out, true_lse = attention(*(x.double() for x in (q, k, v)), causal=True, return_lse=True)
    truth = attention_backward(*(x.double() for x in saved), true_lse, causal=True)
    for ours, true in zip((ring.out, gradients.dq, dk, dv), (true_out, *truth), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - true).norm() < 1e-6 * true.norm()


def test_the_script_that_times_ranks_one_after_the_other(tmp_path, monkeypatch):
    """On the CPU; a row for every rank, and the first of them before the time is over."""
    script, path = RANK.parents[1] / "scripts" / "time_context_parallel_ranks.py", tmp_path / "rows.csv"
    for seconds, expected in (("60", 41), ("0", 1)):
        monkeypatch.setattr(sys, "argv", [str(script), str(path), "--tokens", "2048", "--seconds", seconds])
        runpy.run_path(str(script), run_name="__main__")
        rows = list(csv.DictReader(path.read_text().splitlines()))
        assert len(rows) == expected
        assert all(float(row[name]) > 0 for row in rows for name in ("seconds", "modelled", "pairs", "tflops"))
        if len(rows) > 1:
            kinds = {(row["method"], row["direction"], row["results"]) for row in rows}
            assert len(kinds) == 5
            pairs = {int(row["pairs"]) for row in rows if (row["ranks"], row["layout"]) == ("64", "zigzag")}
            assert pairs == {8 * 2048 * 2049 // 2 // 64}


def test_the_bench_judges_bytes_balance_and_memory():
    good = Row(2, 64, "ring", "zigzag", None, False, sent=100, modelled=100, balance=1.05, memory=1000, seconds=1.0)
    outcomes = {
        "met": good, "bytes": replace(good, sent=106), "fewer bytes": replace(good, sent=94),
        "balance": replace(good, balance=1.11), "memory": replace(good, ranks=4, memory=1200),
    }  # fmt: skip
    for name, row in outcomes.items():
        found = judged([good, row])
        assert [one.outcome for one in found] == ["met", "met" if name == "met" else "missed"], name
    assert judged([good, replace(good, ranks=4, memory=1100)])[1].requirement.count(";") == 2
    assert judged([replace(good, layout="contiguous", balance=1.7)])[0].outcome == "met"


def test_the_bench_of_two_processes(tmp_path):
    command = [
        sys.executable, "-m", "headwise", "bench", "--suite", "distributed", "--quick", "--json", "--out", str(tmp_path)
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert {row["method"] for row in results} == {job.method for job in JOBS} > set(costs.METHODS)
    for row in results:
        assert abs(row["excess"]) <= 0.05, row
        assert row["layout"] != "zigzag" or row["window"] or row["balance"] <= 1.1, row
        assert row["outcome"] == "met", row
    assert len((tmp_path / "distributed-gloo.csv").read_text().splitlines()) == len(results) + 1

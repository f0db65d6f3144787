"""`headwise bench report`: one page of all results, and what became slower since another revision."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headwise.benchmark import html_charts, html_page, regression, report
from headwise.cli import _bench_report, main

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
SUITES = {path.stem: report.read_csv(path) for path in sorted(RESULTS.glob("*.csv"))}
SUITES = {name: rows for name, rows in SUITES.items() if rows}  # the distributed suite has a table of its own

# In place of headwise, in a repository of its own: a bench that takes as long as its source says.
BENCH = """
import sys
from pathlib import Path
HEADER, MILLISECONDS = {header!r}, {milliseconds}
def main(arguments):
    assert arguments[0] == "bench" and "--quick" in arguments
    out = Path(arguments[arguments.index("--out") + 1])
    out.mkdir(parents=True)
    row = {{"suite": "cpu", "group": "rows", "case": "softmax", "direction": "forward", "role": "ours"}}
    row["median_ms"] = str(MILLISECONDS)
    lines = [HEADER, [row.get(name, "") for name in HEADER]]
    (out / "cpu.csv").write_text("\\n".join(",".join(line) for line in lines))
    return 0
"""


class Reader(HTMLParser):
    """Remembers what a page loads or leads to, and which tags were left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [given[name] for name in ("src", "href") if name in given]
        self.ids |= {given["id"]} if "id" in given else set()
        if tag not in ("meta", "html"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page():
    return Reader(html_page.page(SUITES))


def test_the_page_is_whole_and_loads_nothing(page):
    assert page.open == []
    assert page.links
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)


@pytest.mark.parametrize("name", SUITES)
def test_every_ratio_and_every_target_is_in_it(page, name):
    """Also those that were missed."""
    rows = SUITES[name]
    for row in rows:
        if row["ratio"]:
            assert f"{row['case']}, {row['direction']}: {float(row['ratio']):.2f}× " in page.text
    missed = [outcome for row in rows for outcome in row["outcome"].split("; ")].count("missed")
    assert f"{missed} missed" in page.text


def test_both_orders_of_sums_are_shown():
    base = next(r for r in SUITES["hopper-nvidia-h200"] if r["direction"] == "backward" and r["role"] == "ours")
    rows = [
        base | {"deterministic": "True"},
        base | {"contender": "headwise, any order", "role": "variant", "ratio": "0.91", "deterministic": "False"},
        base | {"contender": "FA4", "role": "peer", "ratio": "0.97", "ratio_any_order": "1.07"},
    ]
    text = Reader(html_page.page({"one": rows})).text
    assert "fixed order" in text
    assert "headwise, any order" in text
    assert "(another task)" not in text
    assert f"{base['case']}, backward: 1.07× " in text
    assert "FA4, ours in any order" in text


def test_older_rows_say_that_they_took_any_order_and_what_their_mean_is(page):
    assert "any order where faster" in page.text
    assert "24 shapes, backward, any order where faster: geometric mean 1.05×" in page.text


def test_growth_and_rooflines_are_drawn_where_they_were_measured(page):
    assert "attention D 128 causal forward" in page.text
    assert "% of the roof" in page.text
    assert "Extra memory" in page.text


def test_memory_is_in_plain_numbers(page):
    """11,346 and not 1.135e+04; a peer on WebGPU, whose memory nobody counts, has none."""
    training = next(r for r in SUITES["models-nvidia-h200"] if r["role"] == "ours")
    assert f"{float(training['peak_extra_bytes']) / 2**20:,.0f}" in page.text
    assert "not seen" in page.text
    assert not re.search(r"\de[+-]\d", page.text)


def test_what_comes_from_a_file_is_escaped():
    hostile = dict.fromkeys(report.COLUMNS, "") | {
        "suite": "<b>", "group": "<script>x</script>", "case": "a & b", "direction": "forward", "contender": "PyTorch",
        "role": "peer", "ratio": "1.5", "date": "2026-01-01", "device_name": "<i>", "median_ms": "1", "bytes": "0",
    }  # fmt: skip
    text = html_page.page({"one": [hostile]})
    assert "<script>" not in text
    assert Reader(text).open == []


def test_a_point_lies_where_its_number_is():
    axis = html_charts.Axis(1.0, 100.0, 0.0, 200.0, True)
    assert axis.at(10.0) == pytest.approx(100.0)
    assert html_charts.Axis(0.0, 4.0, 100.0, 0.0, False).at(1.0) == pytest.approx(75.0)


def test_an_axis_has_numbers_enough_to_read_it():
    assert html_charts.Axis(0.8, 30.0, 0.0, 1.0, True).ticks() == [1, 2, 4, 8, 16]
    assert html_charts.Axis(400.0, 40000.0, 0.0, 1.0, True).ticks() == [512 * 2**i for i in range(7)]
    assert html_charts.Axis(0.05, 60000.0, 0.0, 1.0, True).ticks() == pytest.approx([10.0**i for i in range(-1, 5)])


CASE = ("rows", "softmax", "forward")


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [((1.0, 1.02), (1.2, 1.21), "slower"), ((1.0, 1.2), (1.1, 1.3), ""), ((1.0, 1.0), (1.04, 1.04), ""),
     ((1.2, 1.21), (1.0, 1.02), "faster")],
)  # fmt: skip
def test_slower_is_what_every_pair_of_turns_says(before, now, verdict):
    found = regression.changes([{CASE: t} for t in before], [{CASE: t, ("new",): 1.0} for t in now])
    assert [(change.case, change.verdict) for change in found] == [(CASE, verdict)]


def git(folder: Path, *arguments: str) -> None:
    named = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", "-C", str(folder), *named, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """Two revisions; the second one takes twice as long."""
    package = tmp_path / "src" / "headwise"
    package.mkdir(parents=True)
    git(tmp_path, "init")
    (package / "__init__.py").write_text("")
    for milliseconds in (1.0, 2.0):
        text = BENCH.format(header=list(report.COLUMNS), milliseconds=milliseconds)
        (package / "cli.py").write_text(text)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-m", "x")
    return tmp_path


def test_both_revisions_run_and_the_slower_one_is_named(repository):
    (change,) = regression.measure("HEAD~1", ["--quick"], repository)
    assert (change.case, change.before, change.now, change.verdict) == (CASE, 1.0, 2.0, "slower")
    text = Reader(html_page.page({}, [change], "HEAD~1")).text
    assert "1 of 1 cases are slower than at HEAD~1" in text
    trees = subprocess.run(
        ["git", "-C", str(repository), "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert trees.stdout.count("\n") == 1  # the tree of the base is gone


def test_a_revision_that_is_not_there(repository):
    with pytest.raises(RuntimeError, match="nowhere"):
        regression.measure("nowhere", [], repository)


def test_the_command_writes_the_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["bench", "report", "--out", str(RESULTS), "--page", str(page), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["suites"] == list(SUITES)
    assert Reader(page.read_text(encoding="utf-8")).open == []


def test_wrong_use(tmp_path, capsys):
    assert main(["bench", "report", "--out", str(tmp_path)]) == 2
    assert "holds no results" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "--base", "main"])
    assert "usage: headwise bench" in capsys.readouterr().err


def test_the_page_has_a_usage_of_its_own(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "report", "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown.startswith("usage: headwise bench report ")
    assert "--base REV" in shown
    assert "--plot-csv" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_options_of_the_comparison_are_passed_on():
    parser = argparse.ArgumentParser()
    _bench_report.add_arguments(parser)
    args = parser.parse_args(["report", "--base", "main", "--suite", "cpu", "--group", "softmax", "--group", "rope"])
    assert _bench_report.options(args) == ["--suite", "cpu", "--group", "softmax", "--group", "rope"]

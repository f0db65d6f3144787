"""The command line: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import headwise as hw
from headwise import cases, cli
from headwise.backends.registry import Unsupported
from headwise.cli import check, explain, tour


def headwise(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *arguments: str) -> str:
    """What argparse says before it exits with 2."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ headwise


def test_no_command_prints_help(capsys):
    code, out, _ = headwise(capsys)
    assert code == 2
    for command in cli.COMMANDS:
        assert command in out


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"headwise {hw.__version__}"


def test_unknown_command(capsys):
    assert "nonsense" in refused(capsys, "nonsense")


@pytest.mark.parametrize("command", ["", *cli.COMMANDS, *(f"explain {op}" for op in explain.OPS)])
def test_help(capsys, monkeypatch, command):
    """Without markup, within 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command.split(), "--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "--json" in out or command in (
        "",
        "explain",
        "run",
    )  # explain has it on each op; what run prints is its program's
    assert out.startswith(f"usage: headwise {command}".rstrip())
    assert "`" not in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", [*cli.COMMANDS, "explain attention", "explain softmax"])
def test_a_command_that_is_used_wrongly_shows_its_own_usage(capsys, command):
    said = refused(capsys, *command.split(), *["softmax"] * (command in ("explain", "warm")), "--bad")
    assert said.startswith(f"usage: headwise {command} ")
    assert "unrecognized arguments: --bad" in said


@pytest.mark.parametrize(
    "command",
    [
        "env",
        "explain attention --arch sm_90 --gradient",
        "check --op softmax --backend cpu --quick",
        "bench --list",
        "tour",
    ],
)
def test_nothing_is_clipped_at_80_columns(capsys, monkeypatch, command):
    shown = {}
    for columns in (80, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        code, out, err = headwise(capsys, *command.split())
        assert (code, err) == (0, "")
        assert max(len(line.rstrip()) for line in out.splitlines()) <= columns
        shown[columns] = sorted(filter(str.isalpha, out))
    assert shown[80] == shown[300]


def test_the_driver_says_nothing():
    result = subprocess.run([sys.executable, "-m", "headwise", "env"], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert "XDG_RUNTIME_DIR" not in result.stdout


def test_exit_code_reaches_the_shell():
    result = subprocess.run(
        [sys.executable, "-m", "headwise", "check", "--backend", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == "headwise check: --backend nonsense is not known; there are: triton, webgpu, cpu\n"
    assert result.stdout == ""


# ----------------------------------------------------------------------------------------------------------------- env


def test_env(capsys):
    code, out, _ = headwise(capsys, "env")
    assert code == 0
    for word in (hw.__version__, torch.__version__, "triton", "webgpu", "cpu", "✓ runs"):
        assert word in out


def test_env_json(capsys):
    code, out, _ = headwise(capsys, "env", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["versions"]["torch"] == torch.__version__
    backends = {row["name"]: row for row in facts["backends"]}
    assert backends["cpu"]["runs"]
    assert all(row["runs"] or row["reason"] for row in backends.values())


# ------------------------------------------------------------------------------------------------------------- explain


@pytest.mark.parametrize("op", explain.OPS)
def test_explain_every_op(capsys, op):
    code, out, _ = headwise(capsys, "explain", op, "--dtype", "bf16", "--gradient")
    assert code == 0
    assert out.startswith(f"{op} ")
    assert "Runs on cpu." in out


def test_explain_describes_every_op_but_the_explicit_backward():
    public = set(hw.__all__) - {"Unsupported", "explain", "use_backend", "warm"}
    assert set(explain.OPS) == {name for name in public if not name.endswith("_backward")}


def test_explain_takes_a_case_for_an_op_it_has_no_options_for(capsys, monkeypatch):
    monkeypatch.setitem(explain.OPS, "softmax", explain.Described(("case",), explain._of_case))
    assert "V=1 " in headwise(capsys, "explain", "softmax")[1].replace("\n", " ")
    assert "V=111" in headwise(capsys, "explain", "softmax", "--case", "rows of 111", "--gradient")[1]
    code, _, err = headwise(capsys, "explain", "softmax", "--case", "rows of rain")
    assert code == 2
    assert "--case rows of rain is not known; there are: rows of 1, " in err


def test_explain_json_has_the_sizes_and_flags(capsys):
    arguments = "explain attention --dtype bf16 --d 192 --dv 128 --hq 16 --hk 2 --sq 5 --sk 7 --causal --window 3,"
    extra = (
        "--softcap 30 --sink --mask --bias --kv-lengths --q-lengths --kv-starts --no-deterministic --gradient --json"
    )
    code, out, _ = headwise(capsys, *arguments.split(), *extra.split())
    told = json.loads(out)
    assert code == 0
    assert told["dtype"] == "bfloat16"
    assert told["sizes"] == {"B": 1, "Hq": 16, "Hk": 2, "Sq": 5, "Sk": 7, "D": 192, "Dv": 128}
    lengths = {"kv_lengths", "q_lengths", "kv_starts"}
    assert {"causal", "window", "softcap", "sink", "mask", "bias", "gradient", *lengths} == set(told["features"])
    assert told["kernels"] == ["attention_forward", "attention_backward"]
    assert told["chosen"] == "cpu"


def test_explain_on_a_device_that_is_not_here(capsys):
    code, out, _ = headwise(capsys, "explain", "softmax", "--device", "abacus", "--json")
    told = json.loads(out)
    assert code == 1
    assert (told["device"], told["chosen"]) == ("abacus", None)
    assert not any(v["runs"] for v in told["verdicts"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_explain_says_how_to_ask_about_a_gpu(capsys):
    code, out, _ = headwise(capsys, "explain", "softmax", "--device", "cuda")
    assert code == 1
    assert "For a GPU that is not here: --arch sm_80, sm_86, sm_90, sm_100, gfx942" in out


def test_explain_a_gpu_that_is_not_here(capsys):
    arguments = "explain attention --arch sm_90 --dtype bf16 --b 4 --hq 16 --gradient"
    code, out, _ = headwise(capsys, *arguments.split())
    assert code == 0
    assert "Runs on triton.\nforward: the Hopper kernel\nbackward: the Hopper kernel\n" in out
    code, out, _ = headwise(capsys, *arguments.split(), "--mask", "--json")
    told = json.loads(out)
    assert (told["device"], told["arch"]) == ("cuda", "sm_90")
    assert told["note"] == "forward: the Hopper kernel; backward: the Hopper kernel"
    code, out, _ = headwise(capsys, *arguments.split(), "--q-lengths", "--json")
    assert "the plain kernel (it reads no q_lengths yet)" in json.loads(out)["note"]


@pytest.mark.parametrize(
    ("arch", "dtype", "runs"), [("sm_86", "f32", False), ("sm_86", "bf16", True), ("sm_80", "f32", True)]
)
def test_explain_refuses_what_does_not_fit_the_shared_memory(capsys, arch, dtype, runs):
    sizes = ("--d", "576", "--dv", "512", "--hk", "1", "--dtype", dtype, "--arch", arch)
    out = headwise(capsys, "explain", "attention_decode", *sizes, "--json")[1]
    told = next(verdict for verdict in json.loads(out)["verdicts"] if verdict["backend"] == "triton")
    assert (told["reason"] is None) == runs, told
    assert runs or "shared memory" in told["reason"]


def test_explain_decoding_from_a_later_start(capsys):
    told = json.loads(headwise(capsys, "explain", "attention_decode", "--kv-starts", "--arch", "sm_80", "--json")[1])
    assert "kv_starts" in told["features"]
    assert told["chosen"] == "triton"


def test_explain_hints(capsys):
    code, out, _ = headwise(capsys, "explain", "attention", "--hq", "1024", "--sq", "16")
    assert code == 0
    assert "Note: q has 1024 heads of 16 tokens" in out


def test_explain_a_named_backend_that_cannot(capsys):
    code, out, _ = headwise(capsys, "explain", "softmax", "--backend", "webgpu", "--device", "cuda")
    assert code == 1
    assert "ValueError: softmax: backend='webgpu' cannot run this call" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention", "--hq", "8", "--hk", "3"), "attention: q has 8 heads and k has 3"),
        (("attention", "--window=-2,0"), "window has left=-2"),
        (("softmax", "--dtype", "int8"), "--dtype int8 is not known"),
        (("softmax", "--backend", "nonsense"), "--backend nonsense is not known; there are: triton, webgpu, cpu"),
        (("softmax", "--arch", "sm_90", "--device", "cpu"), "--arch sm_90 is a GPU of --device cuda, not of cpu"),
    ],
)
def test_explain_refuses_what_the_op_refuses(capsys, arguments, message):
    code, out, err = headwise(capsys, "explain", *arguments)
    assert code == 2
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    "arguments", [("--sq", "-1"), ("--sq", "x"), ("--window", "3"), ("--window", "a,b"), ("--arch", "sm_75")]
)
def test_explain_refuses_malformed_options(capsys, arguments):
    assert arguments[0] in refused(capsys, "explain", "attention", *arguments)


# --------------------------------------------------------------------------------------------------------------- check


def test_check(capsys):
    code, out, err = headwise(capsys, "check", "--op", "softmax", "--backend", "cpu", "--quick")
    assert code == 0
    assert "✓   softmax   cpu" in out
    assert "within their error budget" in out
    assert err == ""  # no progress bar where nobody watches


def test_check_json_is_a_table_of_ops_and_backends(capsys):
    code, out, _ = headwise(capsys, "check", "--op", "softmax", "--quick", "--dtype", "f32", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["ok"]
    (row,) = (row for row in told["results"] if row["backend"] == "cpu")
    assert row["op"] == "softmax"
    assert row["dtypes"] == ["float32"]
    assert row["cases"] == row["runs"] == len([c for c in cases.SUITES["softmax"].cases if "quick" in c.tags])
    assert 0 < row["worst"]["usage"] <= 1
    assert {b["name"] for b in told["environment"]["backends"]} == {"triton", "webgpu", "cpu"}


def test_check_runs_the_explicit_backward_unless_quick(capsys):
    def modes(*arguments):
        namespace = _parsed("check", "--op", "softmax", "--dtype", "f32", *arguments)
        return {job.mode for job in check._jobs(namespace)}

    assert modes() == {"eager", "explicit"}
    assert modes("--quick") == {"eager"}
    assert modes("--mode", "compiled") == {"compiled"}


def _parsed(*arguments: str):
    parser, _ = cli._parser(arguments[0])
    return parser.parse_args(arguments)


@pytest.fixture
def bad_softmax(monkeypatch):
    """A suite whose op is off by a thousandth, and raises on one case."""
    suite = cases.SUITES["softmax"]

    def run(arguments, backend=None):
        if arguments["x"].shape == (5, 1):
            raise RuntimeError("no columns to speak of")
        return {"probs": suite.run(arguments, backend)["probs"] * 1.001}

    monkeypatch.setitem(cases.SUITES, "softmax", replace(suite, run=run))


def test_check_fails_on_a_violation(capsys, bad_softmax):
    code, out, _ = headwise(capsys, "check", "--op", "softmax", "--quick", "--dtype", "f32")
    assert code == 1
    assert "✗   softmax" in out
    assert "L2 error" in out
    assert "raised RuntimeError: no columns to speak of" in out
    assert "violations" in out


def test_check_json_fails_on_a_violation(capsys, bad_softmax):
    code, out, _ = headwise(capsys, "check", "--op", "softmax", "--quick", "--dtype", "f32", "--json")
    told = json.loads(out)
    assert code == 1
    assert not told["ok"]
    assert any("RuntimeError" in failure["problem"] for failure in told["results"][0]["failures"])


def test_check_tells_what_a_backend_does_not_cover(capsys, monkeypatch):
    suite = cases.SUITES["softmax"]

    def run(arguments, backend=None):
        if arguments["x"].shape[-1] > 1000:
            raise Unsupported(f"softmax: backend={backend!r} cannot run this call: rows are too long.")
        return suite.run(arguments, backend)

    monkeypatch.setitem(cases.SUITES, "softmax", replace(suite, run=run))
    code, out, _ = headwise(capsys, "check", "--op", "softmax", "--quick", "--backend", "cpu")
    assert code == 0
    assert "6 of 7" in out
    assert "1 cases not covered: rows are too long." in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "nonsense"), "--op nonsense has no cases; there are: "),
        (("--backend", "nonsense"), "--backend nonsense is not known; there are: triton, webgpu, cpu"),
        (("--dtype", "int8"), "--dtype int8 is not known"),
        (("--op", "softmax", "--dtype", "f64"), "no case is left"),
    ],
)
def test_check_refuses(capsys, arguments, message):
    code, out, err = headwise(capsys, "check", *arguments)
    assert code == 2
    assert message in err
    assert out == ""


def test_check_says_why_a_backend_does_not_run_here(capsys, monkeypatch):
    monkeypatch.setattr(check, "availability", lambda name: "it stayed at home" if name == "triton" else None)
    code, _, err = headwise(capsys, "check", "--backend", "triton")
    assert code == 2
    assert err == "headwise check: --backend triton does not run here: it stayed at home\n"


# ---------------------------------------------------------------------------------------------------------------- tour


def test_tour(capsys):
    code, out, _ = headwise(capsys, "tour")
    assert code == 0
    for step in tour.STEPS:
        assert step.title in out
    assert "hw.attention(q, k, v" in out


def test_tour_shows_what_the_ops_give(capsys):
    code, out, _ = headwise(capsys, "tour", "--json")
    results = [step["result"] for step in json.loads(out)]
    assert code == 0
    assert len(results) == len(tour.STEPS)
    assert results[0] == "(1, 8, 1024, 64)   (1, 8, 1024)   (1, 8, 1024, 64)"
    assert results[1] == "0   -inf"
    assert results[2] == "(1, 8, 64)   True"


def test_a_step_that_was_to_raise_and_does_not_is_an_error():
    with pytest.raises(AssertionError, match="was to raise"):
        tour.perform("1 + 1", {}, raises=True)

"""``headwise demo``: what it leaves, going on after an interruption, and every way in which it can go wrong."""

from __future__ import annotations

import json
import math
import os
import resource
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from headwise import cli
from headwise.cli import demo
from headwise.demo import checkpoint, record
from headwise.demo.model import Shape
from headwise.demo.train import Recipe, Training

SMALL = ("--layers", "1", "--width", "64", "--backend", "cpu")
TEXT = b"".join(b"line %d: the quick brown fox jumps over the lazy dog\n" % i for i in range(200))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text) -> Path:
    """The folder of a run of four steps. Tests that change it work on copies."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert cli.main(["demo", *SMALL, "--steps", "4", "--text", str(text), "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, text) -> bytes:
    """The checkpoint of a run that was to make six steps and was stopped after three."""
    folder = tmp_path_factory.mktemp("stopped")
    run = Training.run

    def three_steps(training, until, after_step=None):
        run(training, min(until, 3), after_step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_write", lambda result, sample, folder: [])
        patch.setattr(Training, "run", three_steps)
        cli.main(["demo", *SMALL, "--steps", "6", "--text", str(text), "--out", str(folder)])
    return (folder / record.CHECKPOINT).read_bytes()


@pytest.fixture
def half_way(tmp_path, stopped) -> Path:
    """A folder with that checkpoint."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / record.CHECKPOINT).write_bytes(stopped)
    return tmp_path / "run"


@pytest.fixture
def quick(monkeypatch):
    """Without the report, for tests of what comes before it."""
    monkeypatch.setattr(demo, "_write", lambda result, sample, folder: record.save_run(result, folder) or [])


def headwise(capsys, *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def one_line(err: str) -> str:
    assert err.startswith("headwise demo: ")
    assert err.count("\n") == 1
    return err.removeprefix("headwise demo: ").rstrip()


@contextmanager
def disk_with(free: int):
    """Writes beyond so many bytes of a file fail, as on a full disk: the kernel refuses them half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ------------------------------------------------------------------------------------------------------ what it leaves


def test_a_run_leaves_everything(finished):
    for name in (record.RUN, record.ATTENTION, record.CHECKPOINT, record.REPORT, "loss.png", "attention.png"):
        assert (finished / name).stat().st_size > 0, name
    assert not list(finished.glob("*.part"))
    run = record.load_run(finished)
    assert run.backend == "cpu"
    assert run.text == "fox.txt, 1 document, 11 kB"
    assert len(run.curve.losses) == 4
    assert run.curve.tokens_per_second > 0
    assert run.options["layers"] == 1
    assert run.options["steps"] == 4
    assert not run.interrupted
    assert run.plain is not None
    assert run.plain.losses == pytest.approx(run.curve.losses, rel=1e-4)
    assert run.decode is not None
    assert run.decode.passed
    assert run.prompt == "line 0: the quick brown fox jump"
    assert run.held_out_loss is not None
    assert 0 < run.held_out_loss < math.log(256)
    sample = record.load_attention(finished)
    assert bytes(sample.tokens) in TEXT
    assert [layer.name for layer in sample.layers] == ["layer 1, window 64"]


def test_what_it_prints(capsys, tmp_path, text, quick):
    code, out, err = headwise(capsys, "demo", *SMALL, "--steps", 2, "--text", text, "--out", tmp_path / "a run")
    assert code == 0
    assert err == ""  # nobody is looking: no progress bar
    for words in ("fox.txt", "Headwise (cpu)", "plain PyTorch", "held out", "✓ decoding", "line 0: the quick brown fox",
                  "ln 256 = 5.545", "headwise view '"):  # fmt: skip
        assert words in out


def test_live_progress(capsys, monkeypatch, tmp_path, text, quick):
    monkeypatch.setattr(
        demo._terminal, "progress_console", lambda: Console(stderr=True, force_terminal=True, width=110)
    )
    code, _, err = headwise(capsys, "demo", *SMALL, "--steps", 3, "--text", text, "--out", tmp_path)
    assert code == 0
    for words in ("Headwise (cpu)", "3/3", "loss", "bytes/s", "plain PyTorch", "generating text"):
        assert words in err


def test_json(capsys, tmp_path, text):
    arguments = ("--steps", 2, "--text", text, "--out", tmp_path, "--prompt", "quick ", "--seed", 7)
    code, out, err = headwise(capsys, "demo", *SMALL, *arguments, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["folder"] == str(tmp_path)
    assert {Path(p).name for p in told["files"]} == {record.REPORT, "loss.png", "attention.png"}
    assert all(Path(p).exists() for p in told["files"])
    assert len(told["headwise"]["losses"]) == 2
    assert told["headwise"]["last_loss"] == pytest.approx(sum(told["headwise"]["losses"]) / 2)
    assert told["decode"]["passed"] is True
    assert told["prompt"] == "quick "
    assert told["options"]["seed"] == 7
    assert len(told["generated"].encode()) >= 500 - len("quick ")


def test_terminal_codes_do_not_reach_the_terminal(capsys, tmp_path, quick):
    assert demo._printable("a\x1b[2Jb\x07\n\tc") == "a�[2Jb�\n�c"
    path = tmp_path / "codes[bold].txt"
    path.write_bytes(b"\x1b]0;title\x07\x1b[31mred\n" + TEXT)
    code, out, _ = headwise(capsys, "demo", *SMALL, "--steps", 1, "--text", path, "--out", tmp_path / "run")
    assert code == 0
    assert "\x1b" not in out
    assert out.count("codes[bold].txt") >= 2  # brackets are no markup


def test_a_file_name_that_is_no_text(capsys, tmp_path):
    path = tmp_path / "bad\udcff.txt"
    path.write_bytes(TEXT)
    code, _, err = headwise(capsys, "demo", *SMALL, "--steps", 1, "--text", path, "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    assert record.load_run(tmp_path / "run").text.startswith("bad�.txt")


def test_a_terminal_without_unicode(tmp_path, text):
    arguments = [*SMALL, "--steps", "1", "--text", str(text), "--out", str(tmp_path / "run")]
    ran = subprocess.run(
        [sys.executable, "-m", "headwise", "demo", *arguments],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert b"Report: " in ran.stdout


def test_a_failed_check_of_decoding_is_a_failure(capsys, monkeypatch, tmp_path, text, quick):
    monkeypatch.setattr(demo, "check_decoding", lambda *args: record.DecodeCheck(160, 0.25, 1e-5))
    code, out, _ = headwise(capsys, "demo", *SMALL, "--steps", 1, "--text", text, "--out", tmp_path)
    assert code == 1
    assert "✗ decoding" in out


@pytest.mark.parametrize(("width", "threads"), [(64, 1), (128, 1), (256, 2), (1024, 3)])
def test_a_small_model_does_not_take_all_cores(monkeypatch, width, threads):
    asked = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    with demo._threads(Recipe(shape=Shape(width=width))):
        assert asked == [threads]
    assert asked == [threads, 3]


def test_the_default_backend_is_one_that_runs(monkeypatch):
    monkeypatch.setattr(demo, "availability", lambda name: None)
    assert demo._backend(None) == "triton"
    monkeypatch.setattr(demo, "availability", lambda name: "not here" if name == "triton" else None)
    assert demo._backend(None) == "cpu"
    monkeypatch.setattr(demo.settings, "backend", "webgpu")
    assert demo._backend(None) == "webgpu"
    assert demo._backend("cpu") == "cpu"


# --------------------------------------------------------------------------------------- interruptions, and going on


def test_ctrl_c_stops_after_the_step_and_writes_the_report(tmp_path, text, capsys, quick):
    arguments = [*SMALL, "--steps", "100000", "--text", str(text), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-m", "headwise", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("kernels"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "stopping after this step" in err
    assert "Traceback" not in err
    run = record.load_run(tmp_path / "run")
    steps = len(run.curve.losses)
    assert run.interrupted
    assert 1 <= steps < 1000
    assert run.plain is None
    assert f"Stopped after step {steps:,}." in out
    again = next(line for line in out.splitlines() if "To go on: " in line).split("To go on: ")[1]
    assert shlex.split(again) == [
        "headwise", "demo", "--resume", "--out", str(tmp_path / "run"), "--backend", "cpu", "--text", str(text),
    ]  # fmt: skip
    assert (tmp_path / "run" / record.REPORT).exists()
    assert checkpoint.read(tmp_path / "run" / record.CHECKPOINT).losses == run.curve.losses


def test_resuming_gives_the_losses_of_a_run_in_one_go(capsys, tmp_path, text, half_way, quick):
    assert len(checkpoint.read(half_way / record.CHECKPOINT).losses) == 3
    code, out, _ = headwise(capsys, "demo", "--backend", "cpu", "--text", text, "--out", half_way, "--resume")
    assert code == 0
    assert "Going on after step 3." in out
    assert "learning rate" not in out
    assert headwise(capsys, "demo", *SMALL, "--steps", 6, "--text", text, "--out", tmp_path / "whole")[0] == 0
    resumed, whole = record.load_run(half_way), record.load_run(tmp_path / "whole")
    assert resumed.curve.losses == whole.curve.losses
    assert len(whole.curve.losses) == 6
    assert resumed.generated == whole.generated
    first, second = (load_file(folder / record.CHECKPOINT) for folder in (half_way, tmp_path / "whole"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_beginning_anew_keeps_the_checkpoint_that_is_there(capsys, text, half_way, quick):
    before = (half_way / record.CHECKPOINT).read_bytes()
    code, out, _ = headwise(capsys, "demo", *SMALL, "--steps", 1, "--text", text, "--out", half_way)
    assert code == 0
    assert "kept as checkpoint-before.safetensors" in out
    assert (half_way / "checkpoint-before.safetensors").read_bytes() == before
    assert checkpoint.read(half_way / record.CHECKPOINT).step == 1


def test_resuming_to_another_number_of_steps_says_what_that_means(capsys, text, half_way, quick):
    code, out, _ = headwise(
        capsys, "demo", "--backend", "cpu", "--text", text, "--out", half_way, "--resume", "--steps", 5
    )
    assert code == 0
    assert "It was to end at step 6, now at 5" in " ".join(out.split())
    assert len(record.load_run(half_way).curve.losses) == 5


def test_resuming_a_finished_run_makes_the_report_anew(capsys, text, finished, tmp_path, quick):
    kept = (finished / record.CHECKPOINT).read_bytes()
    (tmp_path / record.CHECKPOINT).write_bytes(kept)
    code, out, _ = headwise(capsys, "demo", "--backend", "cpu", "--text", text, "--out", tmp_path, "--resume")
    assert code == 0
    assert "All 4 steps are made already" in out
    assert (tmp_path / record.CHECKPOINT).read_bytes() == kept
    again, before = record.load_run(tmp_path), record.load_run(finished)
    assert again.curve == before.curve
    assert again.generated == before.generated


def test_checkpoints_are_saved_on_the_way(monkeypatch, tmp_path, text, quick):
    monkeypatch.setattr(demo, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    saved = []
    write = checkpoint.write

    def writing(training, backend, path):
        write(training, backend, path)
        saved.append(checkpoint.read(path).step)

    monkeypatch.setattr(checkpoint, "write", writing)
    assert cli.main(["demo", *SMALL, "--steps", "3", "--text", str(text), "--out", str(tmp_path)]) == 0
    assert saved == [1, 2, 3]  # and not once more at the end


# ------------------------------------------------------------------------------------------------------------ bad input


def refused(capsys, *arguments: object) -> str:
    code, out, err = headwise(capsys, "demo", *arguments)
    assert code == 2
    assert out == ""
    return one_line(err)


def test_text_that_is_not_there(capsys, tmp_path):
    path = tmp_path / "nothing.txt"
    assert refused(capsys, "--text", path) == f"--text: {path} cannot be read: No such file or directory"
    assert "Is a directory" in refused(capsys, "--text", tmp_path)


def test_text_that_is_empty_or_too_short(capsys, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"hello")
    assert refused(capsys, "--text", tmp_path / "empty") == f"--text: {tmp_path / 'empty'} is empty"
    assert refused(capsys, "--text", tmp_path / "short") == "--text: short has 5 bytes; it needs at least 256"


def test_backend_that_is_not_there(capsys, monkeypatch):
    assert refused(capsys, "--backend", "abacus") == "--backend abacus is not known; there are: triton, webgpu, cpu"
    monkeypatch.setattr(demo, "availability", lambda name: "PyTorch sees no GPU")
    assert refused(capsys, "--backend", "triton") == "--backend triton does not run here: PyTorch sees no GPU"


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--steps", 0, "--steps is 0; it needs to be at least 1"),
        ("--layers", 0, "--layers is 0; it needs to be at least 1"),
        ("--width", 100, "--width is 100; it needs to be a multiple of 64"),
        ("--seed", -1, "--seed is -1; it needs to be from 0 to 2^63 - 1"),
        ("--prompt", "", "--prompt has 0 bytes; it needs to have from 1 to 511"),
        ("--prompt", "é" * 256, "--prompt has 512 bytes; it needs to have from 1 to 511"),
    ],
)
def test_options_that_make_no_sense(capsys, tmp_path, option, value, problem):
    assert refused(capsys, option, value, "--out", tmp_path / "run").startswith(problem)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert refused(capsys, "--out", tmp_path / "file" / "run").startswith(
        f"--out {tmp_path / 'file' / 'run'} cannot be written to"
    )
    assert refused(capsys, "--out", tmp_path / "file").startswith(f"--out {tmp_path / 'file'} cannot be written to")


@pytest.mark.parametrize("package", ["safetensors", "matplotlib"])
def test_a_package_that_is_not_installed(capsys, monkeypatch, package):
    find = demo.importlib.util.find_spec
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    assert "pip install 'headwise[demo]'" in refused(capsys)


# ----------------------------------------------------------------------------------------------------- bad checkpoints


def failed(capsys, *arguments: object) -> str:
    code, _, err = headwise(capsys, "demo", *arguments)
    assert code == 1
    return one_line(err)


def test_no_checkpoint(capsys, tmp_path):
    path = tmp_path / "run" / record.CHECKPOINT
    assert failed(capsys, "--resume", "--out", tmp_path / "run") == f"there is no {path} to resume from"


def test_unreadable_checkpoints(capsys, tmp_path, finished):
    path = tmp_path / record.CHECKPOINT
    whole = (finished / record.CHECKPOINT).read_bytes()
    for content in (b"", b"not a checkpoint at all", whole[: len(whole) // 2], whole[:40]):
        path.write_bytes(content)
        assert failed(capsys, "--resume", "--out", tmp_path).startswith(f"{path} cannot be read: ")
        assert path.read_bytes() == content
    path.unlink()
    path.mkdir()
    assert failed(capsys, "--resume", "--out", tmp_path).startswith(f"{path} cannot be read: ")


def test_a_file_of_somebody_else(capsys, tmp_path):
    save_file({"x": torch.zeros(3)}, tmp_path / record.CHECKPOINT)
    assert "is no checkpoint of this demo" in failed(capsys, "--resume", "--out", tmp_path)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda tensors, about: about.update(format=99), "has format 99; this version reads format 2"),
        (lambda tensors, about: about.pop("recipe"), "is broken: KeyError: 'recipe'"),
        (lambda tensors, about: about["recipe"].update(width=65), "is broken: ValueError: width is 65"),
        (
            lambda tensors, about: about["recipe"].update(width=128),
            "is broken: blocks.0.attention.out.weight is (64, 64), where its recipe needs",
        ),
        (lambda tensors, about: tensors.pop("model.embedding.weight"), "is broken: embedding.weight is missing"),
        (lambda tensors, about: tensors.pop("optimizer.exp_avg.embedding.weight"), "is broken: KeyError: 'exp_avg'"),
        (lambda tensors, about: tensors.pop("losses"), "is broken: KeyError: 'losses'"),
        (lambda tensors, about: tensors.pop("optimizer.step.embedding.weight"), "is broken: KeyError: 'step'"),
        (lambda tensors, about: tensors.update(losses=torch.tensor(2.0)), "is broken: TypeError"),
        (
            lambda tensors, about: tensors.update(losses=tensors["losses"][:2].clone()),
            "is broken: it has 2 losses, and moments of 4 steps",
        ),
        (
            lambda tensors, about: tensors["model.embedding.weight"].fill_(math.nan),
            "is broken: embedding.weight is not finite",
        ),
    ],
)
def test_a_checkpoint_that_contradicts_itself(capsys, tmp_path, finished, damage, problem):
    from safetensors import safe_open

    with safe_open(finished / record.CHECKPOINT, "pt") as file:
        about = json.loads(file.metadata()["headwise demo"])
    tensors = load_file(finished / record.CHECKPOINT)
    damage(tensors, about)
    save_file(tensors, tmp_path / record.CHECKPOINT, {"headwise demo": json.dumps(about)})
    assert problem in failed(capsys, "--resume", "--out", tmp_path)


def test_a_checkpoint_of_another_run(capsys, finished, text, tmp_path):
    """What differs is named, all of it."""
    problem = refused(capsys, "--resume", "--out", finished, "--text", text, "--layers", 3, "--width", 128, "--seed", 5)
    for words in ("layers is 1 there and 3 here", "width is 64 there and 128 here", "seed is 0 there and 5 here"):
        assert words in problem
    assert "another text" not in problem
    assert "it was trained on another text" in refused(capsys, "--resume", "--out", finished)
    steps = refused(capsys, "--resume", "--out", finished, "--text", text, "--steps", 2)
    assert steps == "--steps is 2, and the checkpoint already has 4 steps"


# --------------------------------------------------------------------------------------- the machine has had enough


def test_disk_full_keeps_the_last_checkpoint(capsys, half_way, text):
    path = half_way / record.CHECKPOINT
    before = path.read_bytes()
    with disk_with(free=len(before) // 2):
        problem = failed(capsys, "--resume", "--backend", "cpu", "--text", text, "--out", half_way)
    assert problem.startswith(f"{path} could not be written; the last one that could be is still there: ")
    assert path.read_bytes() == before
    assert sorted(p.name for p in half_way.iterdir()) == [record.CHECKPOINT]  # nothing half-written is left
    assert checkpoint.read(path).step == 3


def test_disk_full_before_the_first_checkpoint(capsys, tmp_path, text):
    with disk_with(free=1000):
        problem = failed(capsys, *SMALL, "--steps", 1, "--text", text, "--out", tmp_path)
    assert problem.startswith(f"{tmp_path / record.CHECKPOINT} could not be written: ")
    assert list(tmp_path.iterdir()) == []


def test_disk_full_when_the_report_is_written(capsys, finished, text, tmp_path):
    (tmp_path / record.CHECKPOINT).write_bytes((finished / record.CHECKPOINT).read_bytes())
    (tmp_path / record.RUN).write_text("the run before")
    with disk_with(free=1000):
        problem = failed(capsys, "--resume", "--backend", "cpu", "--text", text, "--out", tmp_path)
    assert problem.startswith(f"the report could not be written to {tmp_path}: ")
    assert (tmp_path / record.RUN).read_text() == "the run before"
    assert checkpoint.read(tmp_path / record.CHECKPOINT).step == 4


def test_out_of_memory(tmp_path):
    """More than any address space holds."""
    result = subprocess.run(
        [sys.executable, "-m", "headwise", "demo", "--width", str(1 << 23), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert one_line(result.stderr).startswith("out of memory")


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")]
)
def test_out_of_memory_on_the_way(capsys, monkeypatch, half_way, text, error):
    def too_much(self):
        raise error

    monkeypatch.setattr(Training, "_make_step", too_much)
    before = (half_way / record.CHECKPOINT).read_bytes()
    assert "out of memory" in failed(capsys, "--resume", "--backend", "cpu", "--text", text, "--out", half_way)
    assert (half_way / record.CHECKPOINT).read_bytes() == before


def test_an_error_of_our_own_is_not_hidden(monkeypatch, tmp_path, text):
    def broken(self):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(Training, "_make_step", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        cli.main(["demo", *SMALL, "--text", str(text), "--out", str(tmp_path)])


def test_a_loss_that_is_no_number(capsys, monkeypatch, half_way, text):
    monkeypatch.setattr(Training, "_make_step", lambda self: math.inf)
    before = (half_way / record.CHECKPOINT).read_bytes()
    problem = failed(capsys, "--resume", "--backend", "cpu", "--text", text, "--out", half_way)
    assert problem == "the loss is inf at step 4"
    assert (half_way / record.CHECKPOINT).read_bytes() == before

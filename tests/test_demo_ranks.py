"""The demo on several processes: the losses of one process, a rank that is killed, and going on with fewer ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise import testing
from headwise.cli import main
from headwise.demo import checkpoint, record, text
from headwise.demo.plain import Plain
from headwise.demo.train import Recipe, Training

RANK = Path(__file__).with_name("demo_rank.py")
STEPS, KILLED_AT = 8, 5
SECONDS = 150


def torchrun(ranks, kill, *args):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone",
        str(RANK), str(kill), "--context-parallel", str(ranks), "--layers", "2", *args,
    ]  # fmt: skip
    # A session of its own: what torchrun has started goes with it, whatever happens.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
        return subprocess.CompletedProcess(command, process.returncode, out, err)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def losses(double):
    base = Recipe(steps=STEPS)
    training = Training(replace(base, shape=replace(base.shape, layers=2)), text.python_topics(), Plain())
    if double:
        training.model.double()
    training.run(STEPS)
    return torch.tensor(training.losses, dtype=torch.float64)


def test_processes_that_torchrun_has_not_started(capsys):
    assert main(["demo", "--context-parallel", "4"]) == 2
    assert "torchrun --nproc-per-node 4 -m headwise demo --context-parallel 4" in capsys.readouterr().err


def test_a_process_killed_in_the_middle_of_a_checkpoint_leaves_the_last_one(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(b"the last one")
    die = (
        "import os, sys; from pathlib import Path; from headwise.demo.record import write_whole\n"
        "write_whole(Path(sys.argv[1]), lambda part: (part.write_bytes(b'half of'), os.kill(os.getpid(), 9)))"
    )
    assert subprocess.run([sys.executable, "-c", die, str(path)], check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"the last one"
    record.write_whole(path, lambda part: part.write_bytes(b"the next one"))  # over what was left half written
    assert path.read_bytes() == b"the next one"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_killed_rank_and_going_on_with_fewer(tmp_path):
    folder = tmp_path / "run"
    lost = torchrun(4, KILLED_AT, "--steps", str(STEPS), "--out", str(folder))
    assert lost.returncode != 0
    assert "got no answer in" in lost.stderr, lost.stderr
    assert checkpoint.read(folder / "checkpoint.safetensors").step == KILLED_AT - 1
    done = torchrun(2, 0, "--resume", "--json", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["headwise"]
    assert result["name"] == "Headwise (cpu, 2 ranks)"
    truth, plain = losses(double=True), losses(double=False)
    error = testing.compare("losses", torch.tensor(result["losses"]), truth, plain.float())
    assert error.ok, error

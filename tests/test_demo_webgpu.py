"""The demo with ``--device webgpu``: nothing of it leaves the GPU but what it prints, and it computes what the CPU does."""

from __future__ import annotations

import json

import pytest
import torch

from headwise import cli, webgpu
from headwise.cli import demo
from headwise.demo import checkpoint, record
from headwise.demo.attention_sample import attention_sample
from headwise.demo.generate import check_decoding, generate
from headwise.demo.model import Headwise, Shape
from headwise.demo.plain import Plain
from headwise.demo.text import files
from headwise.demo.train import Recipe, Training

SHAPE = Shape(layers=2, width=64, window=16)
RECIPE = Recipe(steps=4, shape=SHAPE, tokens=128, context=64)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = tmp_path_factory.mktemp("text") / "fox.txt"
    made.write_bytes(b"".join(b"line %d: the quick brown fox jumps over the lazy dog\n" % i for i in range(200)))
    return made


@pytest.fixture(scope="module")
def trained(path) -> Training:
    training = Training(RECIPE, files([path]), Headwise("webgpu"), "webgpu")
    training.run(1)
    before, fallbacks = webgpu.counts(), webgpu.fallbacks()
    training.run(RECIPE.steps)
    assert webgpu.fallbacks() == fallbacks
    training.readbacks = webgpu.counts().readbacks - before.readbacks  # type: ignore[attr-defined]
    return training


def test_the_losses_are_the_cpus(trained, path):
    """They may differ from float64's by twice what the CPU's do, and by a few roundings for each step."""
    on_cpu = Training(RECIPE, files([path]), Headwise("cpu"))
    truth = Training(RECIPE, files([path]), Plain())
    truth.model.double()
    for training in (on_cpu, truth):
        training.run(RECIPE.steps)
    ours, cpu, true = (torch.tensor(t.losses, dtype=torch.float64) for t in (trained, on_cpu, truth))
    assert true[-1] < true[0] - 0.3
    band = 16 * torch.finfo(torch.float32).eps / 2 * true * torch.arange(1, RECIPE.steps + 1)
    assert ((ours - true).abs() <= 2 * (cpu - true).abs() + band).all(), (ours - true, cpu - true)


def test_everything_stays_there(trained):
    assert trained.readbacks == RECIPE.steps - 1  # the loss of each step, and nothing else
    state = [x for kept in trained.optimizer.state.values() for x in kept.values() if x.dim()]
    assert {x.device.type for x in (*trained.model.parameters(), *state)} == {"webgpu"}


def test_it_speaks_decodes_and_looks_as_on_the_cpu(trained, path):
    plain = Training(RECIPE, files([path]), Headwise("cpu")).model
    plain.load_state_dict({name: x.cpu() for name, x in trained.model.state_dict().items()})
    assert generate(trained.model, b"line 7", 12, seed=3) == generate(plain, b"line 7", 12, seed=3)
    assert check_decoding(trained.model, b"the quick brown fox jumps").passed
    ours, theirs = (attention_sample(model, SHAPE, b"the quick brown fox") for model in (trained.model, plain))
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(a.probs, b.probs, rtol=1e-4, atol=1e-6)


def test_plain_pytorch_trains_there_too(path):
    training = Training(RECIPE, files([path]), Plain(), "webgpu")
    on_cpu = Training(RECIPE, files([path]), Plain())
    for one in (training, on_cpu):
        one.run(2)
    torch.testing.assert_close(torch.tensor(training.losses), torch.tensor(on_cpu.losses), rtol=2e-6, atol=0)


def test_a_checkpoint_goes_on_there(trained, tmp_path):
    checkpoint.write(trained, "webgpu", tmp_path / record.CHECKPOINT)
    kept = checkpoint.read(tmp_path / record.CHECKPOINT)
    again = Training(RECIPE, trained.text, Headwise("webgpu"), "webgpu")
    again.load(kept.weights, kept.optimizer_state, kept.losses)
    assert again.losses == trained.losses
    assert again._make_step() == trained._make_step()


def test_devices_are_checked(capsys):
    assert demo._device(None, "cpu") == "cpu"
    assert demo._device(None, "webgpu") == "cpu"
    assert demo._backend(None, "webgpu") == "webgpu"
    assert demo._device("webgpu", "webgpu") == "webgpu"
    assert cli.main(["demo", "--device", "webgpu", "--backend", "cpu"]) == 2
    assert "--device webgpu is not for --backend cpu, which runs on cpu" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_command(path, tmp_path, capsys):
    options = ("--device", "webgpu", "--layers", "1", "--width", "64", "--steps", "2", "--text", str(path), "--json")
    assert cli.main(["demo", *options, "--out", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["backend"] == "webgpu"
    assert told["device"] == webgpu.capabilities().name
    assert told["decode"]["passed"]
    assert len(told["headwise"]["losses"]) == len(told["plain"]["losses"]) == 2
    assert (tmp_path / record.REPORT).exists()

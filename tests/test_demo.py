"""The demo's parts: packed documents, the model on every backend, training, decoding, what attention is shown."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE

from headwise.demo import attention_sample as samples
from headwise.demo import generate as generation
from headwise.demo import model as models
from headwise.demo import plain
from headwise.demo import text as texts
from headwise.demo.checkpoint import read, write
from headwise.demo.model import Computation, Headwise, Shape, make_model
from headwise.demo.packing import IGNORED, Batches, Packing, whole_batches
from headwise.demo.plain import Plain
from headwise.demo.train import Diverged, Recipe, StopRequest, Training
from headwise.nn import Attention, RMSNorm, TransformerLM
from headwise.nn import attention as attention_module
from headwise.testing import rounding_band

SMALL = Recipe(steps=30, seed=3, shape=Shape(layers=2, width=64, window=16), tokens=192, context=64)
SHORT_WINDOW = SMALL.shape.window


@pytest.fixture(scope="module")
def topics() -> texts.Text:
    return texts.python_topics()


def trained_like(shape: Shape, backend: str, seed: int = 0) -> TransformerLM:
    """Weights that all matter, those of the norms too (fresh ones are zero)."""
    model = make_model(shape, backend, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.3
            parameter.normal_(0.0, scale, generator=generator)
    return model.to(DEVICE.get(backend, "cpu"))


def some_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed))


def logits(model: TransformerLM, *documents: torch.Tensor) -> list[torch.Tensor]:
    """Of the documents packed into one batch, one by one. A model of the backend "plain" is computed by PyTorch."""
    device = model.embedding.weight.device
    lengths = [len(d) for d in documents]
    tokens, packing = torch.cat(documents).to(device), Packing.of(lengths, device)
    with torch.no_grad():
        plainly = model.backend == "plain"
        out = plain.logits(model, tokens, packing) if plainly else model(tokens, packing=packing)
    return list(out.cpu().split(lengths))


# ---------------------------------------------------------------------------------------------------------------- text


def test_python_topics_are_documents_in_a_fixed_order(topics):
    names = [d.name for d in topics.documents]
    assert names == sorted(names)
    assert len(names) > 50
    assert topics.size > 300_000
    assert 0.03 * topics.size < topics.held_out_size <= topics.size / 20
    assert texts.python_topics().fingerprint() == topics.fingerprint()


def test_the_end_of_a_long_document_is_held_out(tmp_path):
    (tmp_path / "long").write_bytes(bytes(range(250)) * 40)
    (tmp_path / "short").write_bytes(b"x" * 300)
    text = texts.files([tmp_path / "long", tmp_path / "short"])
    assert [d.held_out for d in text.documents] == [(bytes(range(250)) * 40)[-500:], b""]
    assert [len(d.training) for d in text.documents] == [9500, 300]
    assert str(text) == "long, short, 2 documents, 10 kB"


def test_fingerprint_sees_where_documents_end(tmp_path):
    found = set()
    for cut in (100, 101):
        (tmp_path / "a").write_bytes(b"x" * cut)
        (tmp_path / "b").write_bytes(b"x" * (400 - cut))
        found.add(texts.files([tmp_path / "a", tmp_path / "b"]).fingerprint())
    assert len(found) == 2


# ------------------------------------------------------------------------------------------------------------- packing

# In document d every byte is followed by the next higher one of d's own forty bytes.
DOCUMENTS = [bytes(40 * d + i % 40 for i in range(size)) for d, size in enumerate((700, 3, 64, 0, 233, 200))]
EPOCH = sum(map(len, DOCUMENTS))  # 1200


def test_an_epoch_is_every_byte_once():
    batches = Batches(DOCUMENTS, tokens=100, context=64, seed=1)
    for epoch in range(2):
        ids = torch.cat([batches.batch(step).ids for step in range(12 * epoch, 12 * epoch + 12)])
        assert sorted(ids.tolist()) == sorted(b"".join(DOCUMENTS))


def test_targets_are_the_next_byte_of_the_same_document():
    ends = 0
    for step in range(12):
        ids, targets, packing = Batches(DOCUMENTS, tokens=100, context=64, seed=1).batch(step)
        followed = targets != IGNORED
        assert torch.equal(targets[followed], (ids // 40 * 40 + (ids + 1) % 40)[followed])
        last_of_piece = packing.cu_seqlens[1:].long() - 1
        assert set((~followed).nonzero().flatten().tolist()) <= set(last_of_piece.tolist())
        ends += int((~followed).sum())
    assert ends == sum(1 for d in DOCUMENTS if d)  # one for each document, wherever it was cut


def test_positions_restart_in_every_document_and_no_piece_is_longer_than_the_context():
    for step in range(12):
        ids, _, packing = Batches(DOCUMENTS, tokens=100, context=64, seed=1).batch(step)
        edges = packing.cu_seqlens.tolist()
        assert edges[0] == 0
        assert edges[-1] == len(ids) == 100
        assert packing.longest == max(b - a for a, b in pairwise(edges)) <= 64
        for a, b in pairwise(edges):
            assert packing.positions[a:b].tolist() == list(range(b - a))
            assert len(set((ids[a:b] // 40).tolist())) == 1  # of one document


def test_a_batch_follows_from_seed_and_step_alone():
    walked = Batches(DOCUMENTS, tokens=100, context=64, seed=1)
    every = [walked.batch(step).ids for step in range(30)]
    assert torch.equal(Batches(DOCUMENTS, tokens=100, context=64, seed=1).batch(29).ids, every[29])
    assert not torch.equal(Batches(DOCUMENTS, tokens=100, context=64, seed=2).batch(29).ids, every[29])
    assert not torch.equal(every[0], every[12])  # another epoch, another order


def test_a_text_smaller_than_a_batch():
    ids, _, packing = Batches([b"abcdefg"], tokens=100, context=64, seed=0).batch(0)
    assert len(ids) == 100
    assert packing.longest == 7


def test_evaluation_reads_everything_once_in_order():
    batches = list(whole_batches([d for d in DOCUMENTS if d], tokens=128, context=64))
    assert bytes(torch.cat([b.ids for b in batches]).tolist()) == b"".join(DOCUMENTS)
    assert sum(int((b.targets == IGNORED).sum()) for b in batches) == 5
    assert max(len(b.ids) for b in batches) < 128 + 64


@pytest.mark.parametrize("window", [None, 1, 4])
def test_block_diagonal_mask(window):
    packing = Packing.of([3, 6, 1])
    document = [0] * 3 + [1] * 6 + [2]
    expected = [
        [document[i] == document[j] and i >= j and (window is None or i - j < window) for j in range(10)]
        for i in range(10)
    ]
    assert packing.mask(window).tolist() == expected


# --------------------------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize("backend", [*RUNNABLE, "plain"])
def test_documents_do_not_see_each_other(backend):
    model = trained_like(SMALL.shape, backend)
    first, second, third = some_bytes(40, 1), some_bytes(33, 2), some_bytes(50, 3)
    before = logits(model, first, second, third)
    changed = second.clone()
    changed[20] = (changed[20] + 1) % 256
    after = logits(model, first, changed, third)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert torch.equal(before[1][:20], after[1][:20])  # nor does a byte see those after it
    assert (before[1][20:] != after[1][20:]).any(-1).all()


@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_document_alone_and_packed(backend):
    model = trained_like(SMALL.shape, backend)
    second = some_bytes(50, 2)
    alone, packed = logits(model, second)[0], logits(model, some_bytes(70, 1), second)[1]
    torch.testing.assert_close(packed, alone, rtol=0, atol=64 * rounding_band(torch.float32) * alone.abs().max().item())


@pytest.mark.parametrize("backend", [*RUNNABLE, "plain"])
def test_a_window_layer_sees_its_window_and_a_global_layer_everything(backend):
    reach = {}
    for layers in (1, 2):  # the first layer has a window, the second is global
        model = trained_like(replace(SMALL.shape, layers=layers), backend)
        document = some_bytes(60)
        last = logits(model, document)[0][59]
        reach[layers] = []
        for distance in range(60):
            changed = document.clone()
            changed[59 - distance] = (changed[59 - distance] + 1) % 256
            if not torch.equal(logits(model, changed)[0][59], last):
                reach[layers].append(distance)
    assert reach[1] == list(range(SHORT_WINDOW))
    assert reach[2] == list(range(60))


@pytest.mark.parametrize("backend", RUNNABLE)
def test_the_same_weights_give_the_same_logits_on_plain_ops(backend):
    shape = replace(SMALL.shape, layers=4)
    documents = [some_bytes(size, size) for size in (40, 1, 64)]
    ours, plain = (torch.cat(logits(trained_like(shape, b), *documents)) for b in (backend, "plain"))
    exact = torch.cat(logits(trained_like(shape, "plain").double(), *documents))
    budget = 2 * (plain - exact).abs().max() + rounding_band(torch.float32) * exact.abs().max()
    assert (ours - exact).abs().max() <= budget


def test_weights_follow_from_the_seed():
    first, second, third = (make_model(SMALL.shape, *of) for of in (("cpu", 5), ("webgpu", 5), ("cpu", 6)))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, third.embedding.weight)


@pytest.mark.parametrize(("field", "value"), [("layers", 0), ("width", 0), ("width", 96), ("window", 0)])
def test_a_shape_that_cannot_be(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        replace(SMALL.shape, **{field: value})


# ------------------------------------------------------------------------------------------------------------ training


def losses(
    topics: texts.Text, computation: Computation, *, device: str = "cpu", double: bool = False, jitter: int = 0
) -> list[float]:
    training = Training(SMALL, topics, computation, device)
    if double:
        training.model.double()
    if jitter:
        generator = torch.Generator().manual_seed(jitter)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter *= 1 + torch.finfo(torch.float32).eps * (
                    torch.rand(parameter.shape, generator=generator) - 0.5
                )
    training.run(SMALL.steps)
    return training.losses


@pytest.fixture(scope="module")
def loss_budget(topics) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch in float64, and how far from it a float32 run may be at each step.

    Training amplifies rounding errors, so one float32 run is a poor measure: three are made, each from weights rounded
    a little differently. Ours may be off by twice what the worst of them was off by so far, plus the rounding band.
    """
    truth = torch.tensor(losses(topics, Plain(), double=True), dtype=torch.float64)
    plain = torch.tensor([losses(topics, Plain(), jitter=jitter) for jitter in (0, 1, 2)], dtype=torch.float64)
    worst = (plain - truth).abs().amax(0).cummax(0).values
    return truth, 2 * worst + rounding_band(torch.float32) * truth


@pytest.mark.parametrize("backend", RUNNABLE)
def test_thirty_steps_give_the_losses_of_plain_pytorch(backend, topics, loss_budget):
    truth, budget = loss_budget
    ours = torch.tensor(losses(topics, Headwise(backend), device=DEVICE[backend]), dtype=torch.float64)
    assert ((ours - truth).abs() <= budget).all(), ((ours - truth).abs() / budget).tolist()
    assert ours[0] == pytest.approx(math.log(256), abs=0.3)
    assert ours[-5:].mean() < 3.5  # it learns


@dataclass(frozen=True)
class Mistaken(Headwise):
    """The model with one small mistake."""

    mistake: str = ""

    def loss(self, model, batch):
        if self.mistake == "window":
            for block in model.blocks:
                window = block.attention.window
                block.attention.window = window and (SHORT_WINDOW, 0)
        elif self.mistake == "leak":
            leaking = replace(Packing.of([len(batch.ids)]), positions=batch.packing.positions)
            batch = batch._replace(packing=leaking)
        elif self.mistake == "norm" and not model.norm._forward_hooks:
            for norm in filter(lambda module: isinstance(module, RMSNorm), model.modules()):
                norm.register_forward_hook(_slightly_larger)
        elif self.mistake == "target":
            batch = batch._replace(targets=batch.targets.clamp(min=0))
        return super().loss(model, batch)


def _slightly_larger(module, given, result):
    return (result[0] * (1 + 1e-5), result[1]) if isinstance(result, tuple) else result * (1 + 1e-5)


@pytest.mark.parametrize("mistake", ["window", "leak", "norm", "target"])
def test_the_loss_budget_sees_small_mistakes(mistake, topics, loss_budget):
    truth, budget = loss_budget
    found = torch.tensor(losses(topics, Mistaken("cpu", mistake)), dtype=torch.float64)
    assert not ((found - truth).abs() <= budget).all()


@pytest.mark.parametrize("backend", RUNNABLE)
def test_same_seed_same_bits(backend, topics):
    few = replace(SMALL, steps=5)
    runs = []
    for _ in range(2):
        training = Training(few, topics, Headwise(backend), DEVICE[backend])
        training.run(5)
        runs.append(training)
    assert runs[0].losses == runs[1].losses
    assert all(torch.equal(a, b) for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True))
    other = Training(replace(few, seed=4), topics, Headwise(backend), DEVICE[backend])
    other.run(1)
    assert other.losses != runs[0].losses[:1]


@pytest.mark.parametrize("backend", RUNNABLE)
def test_resuming_is_exact(backend, topics, tmp_path):
    recipe = SMALL if backend == "cpu" else replace(SMALL, steps=6)
    half = recipe.steps // 2
    whole = Training(recipe, topics, Headwise(backend), DEVICE[backend])
    whole.run(recipe.steps)
    first = Training(recipe, topics, Headwise(backend), DEVICE[backend])
    first.run(half)
    write(first, backend, tmp_path / "checkpoint")
    kept = read(tmp_path / "checkpoint")
    second = Training(kept.recipe, topics, Headwise(backend), DEVICE[backend])
    second.load(kept.weights, kept.optimizer_state, kept.losses)
    assert second.step == half
    second.run(recipe.steps)
    assert second.losses == whole.losses
    assert all(torch.equal(a, b) for a, b in zip(second.model.parameters(), whole.model.parameters(), strict=True))


def test_learning_rate_rises_and_falls_towards_the_last_step():
    recipe = Recipe(steps=400)
    rates = [recipe.learning_rate_at(step) for step in range(400)]
    top = rates.index(max(rates))
    assert rates[0] < recipe.learning_rate / 10
    assert 10 <= top <= 30
    assert max(rates) == pytest.approx(recipe.learning_rate, rel=0.01)
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] < 0.06 * recipe.learning_rate
    assert Recipe(steps=1).learning_rate_at(0) > 0


def test_a_loss_that_is_no_number_stops_the_run(topics):
    training = Training(SMALL, topics, Headwise("cpu"))
    training.run(2)
    with torch.no_grad():
        training.model.norm.weight[0] = math.nan
    with pytest.raises(Diverged, match="the loss is nan at step 3"):
        training.run(30)
    assert training.step == 2


def test_held_out_loss_is_a_mean_over_bytes(tmp_path):
    (tmp_path / "text").write_bytes(bytes(some_bytes(20_000).tolist()))
    text = texts.files([tmp_path / "text"])
    training = Training(SMALL, text, Headwise("cpu"))
    pieces = torch.tensor(list(text.documents[0].held_out)).split(SMALL.context)
    costs = []
    for index, piece in enumerate(pieces):
        following = torch.cat([piece[1:], pieces[index + 1][:1]]) if index + 1 < len(pieces) else piece[1:]
        found = logits(training.model, piece)[0][: len(following)]
        costs.append(torch.nn.functional.cross_entropy(found, following, reduction="none"))
    assert training.held_out_loss() == pytest.approx(torch.cat(costs).mean().item(), rel=1e-5)


def test_nothing_to_hold_out(tmp_path):
    (tmp_path / "text").write_bytes(b"a short text " * 30)
    assert Training(SMALL, texts.files([tmp_path / "text"]), Headwise("cpu")).held_out_loss() is None


@pytest.fixture
def interruptible():
    """Ctrl-C raises, as in a terminal: a shell that starts a job in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_stopping_is_a_wish_and_then_an_order(interruptible):
    heard = []
    stop = StopRequest()
    with stop.listening(lambda: heard.append(1)):
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop
        assert heard == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # what was before is there again
        signal.raise_signal(signal.SIGINT)


# ------------------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize("backend", RUNNABLE)
def test_decoding_equals_a_forward_pass(backend):
    model = trained_like(replace(SMALL.shape, layers=4), backend)
    found = generation.check_decoding(model, bytes(some_bytes(50).tolist()))
    assert found.passed, found
    assert found.positions == 50
    assert 0 < found.allowed < 1e-3


@pytest.mark.parametrize("mistake", ["window", "position", "stale", "NaN"])
def test_the_check_of_decoding_sees_mistakes(monkeypatch, mistake):
    model = trained_like(SMALL.shape, "cpu")
    decode = attention_module.attention_decode
    if mistake == "window":  # one key too many

        def wider(q, k, v, lengths, *, window, **flags):
            return decode(q, k, v, lengths, window=window and (window[0] + 1, 0), **flags)

        monkeypatch.setattr(attention_module, "attention_decode", wider)
    elif mistake == "stale":  # the new token's key is not in the cache yet
        monkeypatch.setattr(
            attention_module,
            "attention_decode",
            lambda q, k, v, lengths, **flags: decode(q, k, v, lengths - 1, **flags),
        )
    elif mistake == "position":
        project = Attention.project

        def misplaced(module, x, positions, packed=False):
            return project(module, x, positions if packed else positions + (positions > 7), packed)

        monkeypatch.setattr(Attention, "project", misplaced)
    else:
        feed = generation.Decoder.feed
        monkeypatch.setattr(generation.Decoder, "feed", lambda self, text: feed(self, text) * math.nan)
    assert not generation.check_decoding(model, bytes(some_bytes(50).tolist())).passed


@pytest.mark.parametrize("backend", RUNNABLE)
def test_generation_follows_from_the_seed(backend):
    model = trained_like(SMALL.shape, backend)
    first, second, third = (generation.generate(model, b"def ", 12, seed=seed) for seed in (1, 1, 2))
    assert len(first) == 12
    assert first == second != third


def test_generation_is_drawn_from_what_the_model_says():
    """At a temperature near zero every byte is the likeliest one of a forward pass over all before it."""
    model = trained_like(SMALL.shape, "cpu")
    spoken = generation.generate(model, b"def ", 30, seed=0, temperature=1e-4)
    whole = torch.tensor(list(b"def " + spoken))
    likeliest = logits(model, whole)[0].argmax(-1)
    assert bytes(likeliest[3:-1].tolist()) == spoken


# ----------------------------------------------------------------------------------------------------- attention sample


@pytest.mark.parametrize("backend", RUNNABLE)
def test_attention_sample(backend):
    model = trained_like(SMALL.shape, backend)
    text = bytes(some_bytes(40).tolist())
    sample = samples.attention_sample(model, SMALL.shape, text)
    assert bytes(sample.tokens) == text
    assert [(layer.name, layer.window) for layer in sample.layers] == [
        (f"layer 1, window {SHORT_WINDOW}", SHORT_WINDOW),
        ("layer 2, global", None),
    ]
    distance = torch.arange(40)[:, None] - torch.arange(40)
    for layer in sample.layers:
        assert layer.q.shape == (2, 40, models.HEAD_DIM)
        assert layer.k.shape == (1, 40, models.HEAD_DIM)
        seen = (distance >= 0) & (distance < (layer.window or 40))
        scores = layer.scale * layer.q.double() @ layer.k.double().transpose(1, 2)
        expected = scores.masked_fill(~seen, -math.inf).softmax(-1)
        torch.testing.assert_close(layer.probs.double(), expected, rtol=1e-5, atol=1e-6)
        assert (layer.probs[:, ~seen] == 0).all()
        assert layer.probs.dtype == torch.float32
    # What the model really computes with: values weighted by these probabilities.
    assert not torch.allclose(sample.layers[0].probs[0], sample.layers[0].probs[1], atol=0.01)


def test_passage_is_real_text_from_the_start_of_a_line(topics):
    found = samples.passage(topics, 96)
    assert len(found) == 96
    held_out = [d.held_out for d in topics.documents if found in d.held_out]
    assert held_out
    assert held_out[0][held_out[0].index(found) - 1 :].startswith(b"\n")


def test_passage_of_a_short_text(tmp_path):
    (tmp_path / "text").write_bytes(b"one line without an end " * 12)
    text = texts.files([tmp_path / "text"])
    assert samples.passage(text, 96) == (b"one line without an end " * 12)[:96]

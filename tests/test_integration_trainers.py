"""Trainers of the Hugging Face ecosystem over our attention and a patched model: the losses of eager attention."""

from __future__ import annotations

import contextlib
from collections import Counter

import accelerate
import datasets
import peft
import pytest
import tokenizers
import torch
import transformers
import trl
from transformers_models import BY_NAME, VOCAB, Float64Throughout, build, padding, tokens

import headwise.integrations.transformers as adapter
from headwise import testing
from headwise.integrations import _lazy_logits, _patch_glu, _patch_norms

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

STEPS = 10
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]}


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps its state in the process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def calls(monkeypatch, adapter_calls):
    """How often each op of a patched model was called since the last clear(); attention is in adapter_calls."""
    counts = Counter()
    for module, name in ((_patch_norms, "rms_norm"), (_patch_glu, "glu"), (_lazy_logits, "linear_cross_entropy")):
        op = getattr(module, name)

        def spy(*args, op=op, name=name, **kwargs):
            counts[name] += 1
            return op(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)
    return counts


def tokenizer():
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    model = tokenizers.models.WordLevel(words, unk_token="<pad>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def texts():
    """Sequences of 6 to 59 tokens that count upwards: something to learn."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(40):
        length, first = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((6, 60), (0, 93)))
        rows.append({"input_ids": [(first + i) % (VOCAB - 3) + 3 for i in range(length)]})
    return datasets.Dataset.from_list(rows)


def made(kind, dtype=torch.float32, patched=True):
    """The contenders: "truth" and "eager" are eager attention, "sdpa" PyTorch's, "ours" ours in a patched model."""
    adapter.register()
    model = build(BY_NAME["llama"], {"ours": "headwise", "truth": "eager"}.get(kind, kind)).to(dtype)
    if kind == "ours" and patched:
        adapter.patch(model)
    return model


def in_the_dtype_of(kind):
    return Float64Throughout() if kind == "truth" else contextlib.nullcontext()


def arguments(folder, kind, device="cpu", **options):
    return {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 3e-3,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": device == "cpu", "bf16": False, "seed": 0,
        "gradient_checkpointing": False, "dataloader_pin_memory": False, "log_level": "error", **options,
        # A layer that the backward computes again would be outside of Float64Throughout.
        **({"bf16": False, "gradient_checkpointing": False} if kind == "truth" else {}),
    }  # fmt: skip


def losses_of(trainer):
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return torch.tensor(losses, dtype=torch.float64)


def hold(run, plains=("eager",)):
    """The losses of ours, within twice what PyTorch's are off by from eager attention in float64.

    In 16 bits ten steps are one draw of luck: there both of PyTorch's attentions are run, and the worse one counts.
    """
    truth, ours = run("truth"), run("ours").float()
    errors = [testing.compare("losses", ours, truth, run(plain).float()) for plain in plains]
    assert any(error.ok for error in errors), [str(error) for error in errors]
    assert truth[-1] < truth[0] - 0.3, "nothing was learned"


def sft(folder, kind, lora, **options):
    """The losses of TRL's trainer; options: those of `arguments`."""
    config = trl.SFTConfig(**arguments(folder, kind, **options))
    model = made(kind, torch.float64 if kind == "truth" else torch.float32)
    torch.manual_seed(0)  # the first weights of adapters
    with in_the_dtype_of(kind):
        trainer = trl.SFTTrainer(
            model=model, args=config, train_dataset=texts(), processing_class=tokenizer(),
            peft_config=peft.LoraConfig(**LORA) if lora else None,
        )  # fmt: skip
        return losses_of(trainer)


PADDED, PADDING_FREE, PACKED = {}, {"padding_free": True, "max_length": None}, {"packing": True, "max_length": 64}


@pytest.mark.parametrize(
    ("batches", "lora", "checkpoints"),
    [
        pytest.param(PADDED, False, False, id="padded"),
        pytest.param(PADDING_FREE, True, True, id="padding-free, LoRA, checkpoints"),
        pytest.param(PACKED, False, False, id="packed"),
        pytest.param(PADDED, True, True, id="padded, LoRA, checkpoints", marks=pytest.mark.slow),
        pytest.param(PADDING_FREE, False, False, id="padding-free", marks=pytest.mark.slow),
        pytest.param(PACKED, True, True, id="packed, LoRA, checkpoints", marks=pytest.mark.slow),
    ],
)
def test_sft(tmp_path, batches, lora, checkpoints, calls, adapter_calls):
    """TRL has a fused loss of its own, which takes the head's weight; norms and MLPs stay ours."""
    options = {"gradient_checkpointing": checkpoints, **batches}
    if lora:
        options["learning_rate"] = 1e-2
    hold(lambda kind: sft(tmp_path, kind, lora, **options))
    op = "attention" if batches is PADDED else "attention_varlen"
    assert {name for name, *_ in adapter_calls} == {op}
    times = STEPS * (2 if checkpoints else 1)
    assert len(adapter_calls) == times * 2
    assert calls["glu"] >= times * 2
    assert calls["rms_norm"] >= times * 4


@pytest.mark.parametrize(
    "batches",
    [pytest.param(PADDED, id="padded", marks=pytest.mark.slow), pytest.param(PADDING_FREE, id="padding-free")],
)
def test_sft_under_bf16_autocast(tmp_path, batches, adapter_calls):
    hold(
        lambda kind: sft(tmp_path, kind, False, bf16=True, gradient_checkpointing=True, **batches),
        ("eager", "sdpa"),
    )
    assert adapter_calls.dtypes == {torch.bfloat16}


@pytest.mark.parametrize(
    ("precision", "lora"),
    [
        pytest.param("float32", False, id="float32"),
        pytest.param("bf16", True, id="bf16, LoRA"),
        pytest.param("bf16", False, id="bf16", marks=pytest.mark.slow),
        pytest.param("float32", True, id="float32, LoRA", marks=pytest.mark.slow),
    ],
)
def test_trainer(tmp_path, precision, lora, calls, adapter_calls):
    """Transformers' own Trainer: its loss is ours as well, with num_items_in_batch over accumulated batches.

    Adapters are put on before the patch in float32, and after it in bf16.
    """
    adapters_first = precision == "float32"

    def run(kind):
        model = made(kind, torch.float64 if kind == "truth" else torch.float32, patched=not adapters_first)
        torch.manual_seed(0)
        if lora:
            model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
        if kind == "ours" and adapters_first:
            adapter.patch(model)
        options = {
            "bf16": precision == "bf16", "gradient_checkpointing": True, "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 2, "learning_rate": 1e-2 if lora else 3e-3,
        }  # fmt: skip
        config = transformers.TrainingArguments(**arguments(tmp_path, kind, **options))
        collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
        with in_the_dtype_of(kind):
            trainer = transformers.Trainer(model, config, data_collator=collate, train_dataset=texts())
            return losses_of(trainer)

    hold(run, ("eager", "sdpa") if precision == "bf16" else ("eager",))
    assert calls["linear_cross_entropy"] - 1 == 2 * STEPS  # one when patch tried the model's loss function
    assert adapter_calls.dtypes == {torch.bfloat16 if precision == "bf16" else torch.float32}


@pytest.mark.parametrize(
    ("before", "checkpoints"),
    [(True, False), (False, False), (True, True)],
    ids=["patched before prepare", "patched after", "checkpoints"],
)
def test_accelerate(before, checkpoints, calls):
    """A loop of one's own under Accelerate with bf16. It wraps the model's forward, so only what is patched before has
    our loss; norms and MLPs are ours either way."""
    called = hold_accelerate(before, calls, checkpoints=checkpoints)
    fused = {"linear_cross_entropy": STEPS} if before else {}
    times = STEPS * (2 if checkpoints else 1)
    assert called["ours"] == {"rms_norm": STEPS + 4 * times, "glu": 2 * times, **fused}


def hold_accelerate(before, calls, device="cpu", checkpoints=False):
    def run(kind):
        model = made(kind, torch.float64 if kind == "truth" else torch.float32, patched=before).train()
        if checkpoints and kind != "truth":
            model.gradient_checkpointing_enable()
        accelerate.state.AcceleratorState._reset_state()
        precision = "no" if kind == "truth" else "bf16"
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=device == "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        if kind == "ours" and not before:
            rows = {row.what: row for row in adapter.patch(model)}
            assert "someone else" in rows["loss"].reason
        losses = []
        calls.clear()
        for step in range(STEPS):
            ids, mask = tokens(seed=step % 2).to(accelerator.device), padding("right").to(accelerator.device)
            with in_the_dtype_of(kind):
                output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
                accelerator.backward(output.loss)
            if kind == "ours" and before:
                assert not output.logits.was_read()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(output.loss.detach().double().cpu())
        called[kind] = dict(calls)
        return torch.stack(losses)

    called = {}
    hold(run, ("eager", "sdpa"))
    return called

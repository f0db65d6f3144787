"""Whole models of Transformers on ``device="webgpu"``: small ones with random weights train and generate as on the CPU."""

from __future__ import annotations

import copy

import accelerate
import peft
import pytest
import torch
import transformers as tf

import headwise.webgpu  # noqa: F401  registers the device

DEVICE = "webgpu"
IDS = torch.randint(1, 198, (3, 24), generator=torch.Generator().manual_seed(0))
_SMALL = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SMALL, num_key_value_heads=2)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(
        vocab_size=200, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=199, **_NO_DROPOUT)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_SMALL, num_key_value_heads=2, head_dim=16)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**_SMALL, num_key_value_heads=2, head_dim=16, sliding_window=8)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**_SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
}  # fmt: skip


def _trained(make, device, dtype, steps, rate=1e-3):
    torch.manual_seed(1)
    model = make().to(dtype).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    ids, losses = IDS.to(device), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), torch.tensor(losses, dtype=torch.float64)


def _with_adapters():
    """Llama with LoRA: only the adapters train."""
    config = peft.LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(MODELS["llama"](), config)


def test_adapters_train_as_on_the_cpu_and_are_saved(tmp_path):
    _, truth = _trained(_with_adapters, "cpu", torch.float64, 4, rate=0.03)
    _, on_cpu = _trained(_with_adapters, "cpu", torch.float32, 4, rate=0.03)
    model, losses = _trained(_with_adapters, DEVICE, torch.float32, 4, rate=0.03)
    assert losses[-1] < losses[0] - 0.1
    band = 16 * torch.finfo(torch.float32).eps / 2 * truth * torch.arange(1, 5)
    assert ((losses - truth).abs() <= 2 * (on_cpu - truth).abs() + band).all(), (losses - truth, on_cpu - truth)
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    again = peft.PeftModel.from_pretrained(MODELS["llama"]().to(DEVICE), tmp_path).eval()
    ids = IDS[:1, :9].to(DEVICE)
    expected = model(input_ids=ids).logits
    assert torch.equal(again(input_ids=ids).logits.cpu(), expected.cpu())
    merged = model.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(merged.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("llama", "gpt2") else pytest.mark.slow) for n in MODELS]
)
def test_a_model_trains_and_generates_as_on_the_cpu_webgpu(name):
    """The losses of ten steps may differ from float64's by twice what the CPU's do, and by sixteen roundings."""
    _, truth = _trained(MODELS[name], "cpu", torch.float64, 10)
    plain, on_cpu = _trained(MODELS[name], "cpu", torch.float32, 10)
    model, losses = _trained(MODELS[name], DEVICE, torch.float32, 10)
    assert losses[-1] < losses[0] - 0.5
    band = 16 * torch.finfo(torch.float32).eps / 2 * truth
    # A step of AdamW divides small gradients by their size: what rounding changes grows with the steps.
    steps = torch.arange(1, 11)
    assert ((losses - truth).abs() <= 2 * (on_cpu - truth).abs() + band * steps).all(), (losses - truth, on_cpu - truth)
    if name != "bert":
        wanted = plain.generate(
            IDS[:2, :5], attention_mask=torch.ones(2, 5), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        ids = IDS[:2, :5].to(DEVICE)
        found = model.generate(
            ids, attention_mask=torch.ones(2, 5, device=DEVICE), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        assert found.tolist() == wanted.tolist()


# ---------------------------------------------------------------------------------------------------- trainers of Accelerate


@pytest.fixture
def accelerated(monkeypatch):
    """Accelerate's own variable names the device; it keeps what it chose in the process."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", DEVICE)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_loop_of_accelerate_trains_there_webgpu(accelerated):
    torch.manual_seed(0)
    plain = torch.nn.Linear(8, 4)
    model, data = copy.deepcopy(plain), torch.randn(32, 8)
    accelerator = accelerate.Accelerator()
    assert accelerator.device.type == DEVICE
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for (x,), y in zip(loader, data.split(8), strict=True):
        assert x.device.type == DEVICE
        for net, step, given in ((model, optimizer, x), (plain, reference, y)):
            step.zero_grad()
            loss = net(given).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            step.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the trainer
def test_the_trainer_of_transformers_trains_saves_and_resumes_there_webgpu(accelerated, tmp_path):
    data = [{"input_ids": torch.arange(i, i + 24) % 198, "labels": torch.arange(i, i + 24) % 198} for i in range(32)]

    def train(folder, steps, resume=False):
        torch.manual_seed(0)
        model = MODELS["llama"]()
        options = tf.TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=steps, per_device_train_batch_size=4, report_to=[], logging_steps=1,
            learning_rate=1e-2, lr_scheduler_type="constant", save_steps=3, disable_tqdm=True,
        )  # fmt: skip
        trainer = tf.Trainer(model, options, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        assert next(model.parameters()).device.type == DEVICE
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = train("whole", 5)
    assert whole[-1] < whole[0] - 0.5
    assert train("parts", 3) == whole[:3]
    assert train("parts", 5, resume=True) == whole


# -------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"top_k": 5, "top_p": 1.0}, {"top_k": 0, "top_p": 0.4}], ids=["top-k", "top-p"])
def test_samples_come_from_the_nucleus_webgpu(options):
    """Each token is one that may be drawn after those before it, by the CPU's logits; and they are drawn, not chosen."""
    model, _ = _trained(MODELS["llama"], DEVICE, torch.float32, 10, rate=3e-3)
    plain = copy.deepcopy(model).cpu().double()
    start = IDS[:2, :5].repeat_interleave(4, 0)
    torch.manual_seed(0)
    made = model.generate(
        start.to(DEVICE), attention_mask=torch.ones_like(start).to(DEVICE), max_new_tokens=12, do_sample=True,
        temperature=0.7, pad_token_id=0, **options,
    ).cpu()  # fmt: skip
    assert torch.equal(made[:, :5], start)
    logits = plain(input_ids=made).logits[:, 4:-1] / 0.7
    chances = logits.softmax(-1)
    drawn = made[:, 5:, None]
    chance = chances.gather(-1, drawn)
    # Two chances that are equal but for rounding may change places.
    better = torch.where(chances > chance * (1 + 1e-4), chances, 0.0)
    if options["top_k"]:
        assert ((better > 0).sum(-1) < options["top_k"]).all()
    else:
        assert (better.sum(-1) < options["top_p"] + 1e-4).all()
    assert len({tuple(row) for row in made.tolist()}) > 2
    assert (made[:, 5:] != logits.argmax(-1)).any()

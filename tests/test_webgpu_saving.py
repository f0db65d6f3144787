"""What is saved from ``device="webgpu"`` and loaded to it: PyTorch's files, safetensors, Transformers; and pinned memory."""

from __future__ import annotations

import io

import pytest
import safetensors.torch
import torch
import transformers as tf
from torch import nn

import headwise.webgpu  # noqa: F401  registers the device

DEVICE = "webgpu"


def file_of(value) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("location", [DEVICE, "webgpu:0", torch.device(DEVICE), {"cpu": DEVICE}], ids=str)
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_file_from_the_cpu_loads_to_the_gpu(location, weights_only):
    x = torch.randn(4, 6)
    saved = {
        "x": x, "part": x[1:3, ::2], "turned": x.t(), "half": x.half(), "bits": x > 0, "number": torch.tensor(3),
        "none": torch.empty(0, 3), "parameter": nn.Parameter(x.clone()),
    }  # fmt: skip
    found = torch.load(file_of(saved), map_location=location, weights_only=weights_only)
    for name, expected in saved.items():
        assert found[name].device == torch.device(DEVICE, 0)
        assert isinstance(found[name], nn.Parameter) == isinstance(expected, nn.Parameter)
        assert found[name].stride() == expected.stride()
        assert torch.equal(found[name].detach().cpu(), expected.detach())
    found["x"][1, 0] = 7  # what shared memory shares it again
    assert found["part"][0, 0].item() == found["turned"][0, 1].item() == 7
    (found["parameter"] * 2).sum().backward()
    assert found["parameter"].grad.tolist() == [[2.0] * 6] * 4


def test_a_file_loads_to_the_device_that_it_is_asked_for():
    found = torch.load(file_of(torch.ones(3, device=DEVICE)), map_location="cpu", weights_only=True)
    assert found.device.type == "cpu"
    with pytest.raises(RuntimeError, match="one device of this kind, webgpu:0; webgpu:1 is not there"):
        torch.load(file_of(torch.ones(3)), map_location="webgpu:1")
    for make in (lambda d: torch.ones(3).to(d), lambda d: torch.ones(3, device=d), lambda d: torch.arange(3, device=d)):
        with pytest.raises(RuntimeError, match="webgpu:1 is not there"):
            make("webgpu:1")


def test_storages_say_who_shares_memory():
    x, y = torch.ones(4, 4, device=DEVICE), torch.ones(4, 4, device=DEVICE)
    assert x.untyped_storage().data_ptr() == x[1:].t().untyped_storage().data_ptr() == x.data_ptr() != 0
    assert x[1:].data_ptr() == x.data_ptr() + 16
    assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
    x.data = y
    assert x.untyped_storage().data_ptr() == y.data_ptr()


def test_a_model_with_tied_weights_is_saved_and_loaded(tmp_path):
    config = tf.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).to(DEVICE)
    model.save_pretrained(tmp_path)
    for device in ("cpu", DEVICE):
        again = tf.LlamaForCausalLM.from_pretrained(tmp_path, device_map=device)
        assert again.device.type == device
        assert again.lm_head.weight is again.model.embed_tokens.weight
        for name, p in again.named_parameters():
            assert torch.equal(p.detach().cpu(), model.get_parameter(name).detach().cpu())
    path = tmp_path / "one.safetensors"
    safetensors.torch.save_model(model, path)
    with torch.no_grad():
        expected = [p.detach().cpu() for p in model.parameters()]
        for p in model.parameters():
            p.zero_()
    safetensors.torch.load_model(model, path)
    assert all(torch.equal(p.detach().cpu(), e) for p, e in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_pinning_is_harmless(workers):
    assert torch.equal(torch.arange(3.0).pin_memory(), torch.arange(3.0))
    data = torch.utils.data.TensorDataset(torch.arange(12.0).view(6, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers)
    assert sum(x.to(DEVICE, non_blocking=True).sum().item() for (x,) in loader) == 66.0

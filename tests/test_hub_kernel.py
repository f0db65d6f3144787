"""The package as a kernel for the library `kernels`: laid out in a folder, loaded from there where none is installed."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from headwise.integrations import hub_kernel

ROOT = Path(__file__).resolve().parent.parent

# In a process of its own, in which no headwise is installed.
USE = """
import sys
from pathlib import Path
folder, tests = sys.argv[1:]
sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "") + getattr(f, "__name__", "")]
sys.path = [p for p in sys.path if not (Path(p) / "headwise").is_dir()]
import importlib.util
assert importlib.util.find_spec("headwise") is None
import kernels, torch, transformers

kernel = kernels.get_local_kernel(Path(folder))
assert Path(sys.modules["headwise"].__file__).is_relative_to(folder)

# The functions of flash_attn.
q, k, v = (torch.randn(9, 4, 16, dtype=torch.float64).requires_grad_() for _ in range(3))
offsets = torch.tensor([0, 3, 9], dtype=torch.int32)
out = kernel.flash_attn_varlen_func(q, k, v, offsets, offsets, 6, 6, causal=True)
expected = torch.cat([
    torch.nn.functional.scaled_dot_product_attention(
        *(x[s].transpose(0, 1) for x in (q, k, v)), is_causal=True
    ).transpose(0, 1)
    for s in (slice(0, 3), slice(3, 9))
])
torch.testing.assert_close(out, expected)

# Layers for kernelize, in a model of Transformers.
sys.path.insert(0, tests)
config = transformers.LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0,
)
# Transformers names norms and the rotation for kernels; a program may name other layers.
kernels.replace_kernel_forward_from_hub(transformers.models.llama.modeling_llama.LlamaMLP, "MLP")
torch.manual_seed(0)
own = transformers.LlamaForCausalLM(config).double().train()
ours = transformers.LlamaForCausalLM(config).double().train()
ours.load_state_dict(own.state_dict())
names = {"RMSNorm": "RMSNorm", "MLP": "SwiGLU", "rotary_pos_emb": "RotaryEmbedding"}
mapping = {
    name: {"cpu": {mode: kernels.LocalLayerRepository(Path(folder), layer_name=layer) for mode in (
        kernels.Mode.TRAINING, kernels.Mode.INFERENCE, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)}}
    for name, layer in names.items()
}
from headwise.integrations import hub_kernel
called = set()
for name in ("rms_norm", "glu", "rope"):
    def spy(*args, op=getattr(hub_kernel, name), name=name):
        called.add(name)
        return op(*args)
    setattr(hub_kernel, name, spy)
with kernels.use_kernel_mapping(mapping):
    ours = kernels.kernelize(ours, mode=kernels.Mode.TRAINING, device="cpu")
ids = torch.randint(3, 96, (2, 20))
positions = torch.stack([torch.arange(20), torch.arange(5, 25)])
losses = [model(ids, labels=ids, position_ids=positions).loss for model in (own, ours)]
assert "rms_norm" in called, called
torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
for loss in losses:
    loss.backward()
for a, b in zip(ours.parameters(), own.parameters()):
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
print("called", sorted(called))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("hub") / "kernel"
    runpy.run_path(str(ROOT / "scripts" / "hub_kernel.py"))["lay_out"](target)
    return target


def test_layout(folder):
    for backend in ("cpu", "cuda", "rocm"):
        variant = folder / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        assert (variant / "headwise" / "integrations" / "hub_kernel.py").is_file()
        assert not (variant / "headwise" / "cli").exists()
        assert not list(variant.rglob("*.so"))


def test_layers_have_no_state_of_their_own():
    """The rules by which `kernels` accepts a layer."""
    from torch import nn

    from headwise.integrations.hub_kernel import layers

    for layer in vars(layers).values():
        assert layer.__init__ is nn.Module.__init__
        assert set(dir(layer)) - set(dir(nn.Module)) <= {"can_torch_compile", "has_backward"}


def _decorated(name, pattern):
    """What Transformers offers to kernels under a name."""
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        found = re.findall(rf'hub\("{name}"\)\s*\n{pattern} (\w+)', file.read_text())
        if found:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            yield from (getattr(module, attribute) for attribute in found)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "olmo2", "nemotron_h"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_the_norm_has_the_dtype_of_the_module(name, dtypes):
    """Some modules give the dtype of their input, some the wider one."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    (kind,) = (
        value for key, value in vars(module).items() if key.endswith("RMSNorm") and value.__module__ == module.__name__
    )
    norm, x = kind(16).to(dtypes[0]), torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(dtypes[1])
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            own, ours = norm(x), hub_kernel.RMSNorm.forward(norm, x)
        assert ours.dtype == own.dtype
        torch.testing.assert_close(ours, own, rtol=2e-2, atol=2e-2)


def test_another_activation_is_refused():
    from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    mlp = LlamaMLP(transformers.LlamaConfig(**sizes))
    torch.testing.assert_close(hub_kernel.SwiGLU.forward(mlp, x), mlp(x))
    for other in (
        LlamaMLP(transformers.LlamaConfig(**sizes, hidden_act="gelu")),
        Gemma2MLP(transformers.Gemma2Config(**sizes)),
    ):
        with pytest.raises(NotImplementedError, match=r"SwiGLU: act_fn is GELU.* needs to be silu"):
            hub_kernel.SwiGLU.forward(other, x)


@pytest.mark.slow
def test_every_rotation_of_transformers():
    """Computed as the model's own function does, in its dtype, or refused."""
    generator = torch.Generator().manual_seed(0)
    q, k, angles = (torch.randn(shape, generator=generator) for shape in ((2, 4, 5, 8), (2, 2, 5, 8), (1, 5, 4)))
    cos, sin = (torch.cat((x, x), -1) for x in (angles.cos(), angles.sin()))
    refused, count = set(), 0
    for function in _decorated("rotary_pos_emb", "def"):
        for dtype in (torch.float32, torch.bfloat16):
            given = (q.to(dtype), k.to(dtype), cos, sin)
            try:
                ours = hub_kernel.RotaryEmbedding.forward(function, *given)
            except NotImplementedError as error:
                refused.add((type(function).__module__.split(".")[-2], "does not rotate halves" in str(error)))
                continue
            own, count = function(*given), count + 1
            for x, y in zip(own, ours, strict=True):
                assert x.dtype == y.dtype
                torch.testing.assert_close(
                    x, y, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=2e-2 if dtype == torch.bfloat16 else 1e-5
                )
    assert count > 200
    assert len(refused) < 8
    assert all(named for _, named in refused)


def test_rotations_that_are_others():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves
    from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as narrow

    q, k, angles = torch.randn(1, 2, 5, 8).bfloat16(), torch.randn(1, 1, 5, 8).bfloat16(), torch.randn(1, 5, 4)
    cos, sin = (torch.cat((x, x), -1) for x in (angles.cos(), angles.sin()))
    for function in (halves, narrow):
        own, ours = function(q, k, cos, sin), hub_kernel.RotaryEmbedding.forward(function, q, k, cos, sin)
        assert [x.dtype for x in ours] == [x.dtype for x in own]
        torch.testing.assert_close(ours, own, rtol=2e-2, atol=2e-2)

    class Backwards(type(halves)):
        def forward(self, q, k, cos, sin, unsqueeze_dim=1):
            return super().forward(q, k, cos, -sin)

    with pytest.raises(NotImplementedError, match="Backwards does not rotate halves"):
        hub_kernel.RotaryEmbedding.forward(Backwards(), q, k, cos, sin)
    with pytest.raises(NotImplementedError, match=r"cos has shape \(5, 8\)"):
        hub_kernel.RotaryEmbedding()(q, k, cos[0], sin[0])


def test_loaded_from_the_folder(folder):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", USE, str(folder), str(ROOT / "tests")],
        capture_output=True, text=True, env=environment | {"HF_HUB_OFFLINE": "1"}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip().endswith("called ['glu', 'rms_norm', 'rope']"), run.stdout

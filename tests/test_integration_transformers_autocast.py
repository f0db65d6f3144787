"""Patched models under autocast: every module gives the dtype that its own code gives there."""

from __future__ import annotations

import copy

import pytest
import torch
from test_integration_transformers import inputs_of
from torch import nn
from transformers_models import BY_NAME, build

import headwise.integrations.transformers as adapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "t5"])
def test_dtypes_of_all_modules(name, weights):
    hold_dtypes(name, weights)


def hold_dtypes(name, weights, device="cpu"):
    """What each is given, and what it returns."""
    if name not in BY_NAME:
        pytest.skip("this release has attention code of its own in the model")
    inputs, _ = inputs_of(name, "right")
    found = []
    for patched in (False, True):
        model, dtypes = build(BY_NAME[name], "eager").to(device, weights), {}
        if patched:
            adapter.patch(model)
        for path, module in model.named_modules():

            def note(module, given, out, path=path, dtypes=dtypes):
                out = out[0] if isinstance(out, tuple) else out
                dtypes[path] = getattr(out, "dtype", None), *(x.dtype for x in given if isinstance(x, torch.Tensor))

            module.register_forward_hook(note)
        with torch.autocast(device, torch.bfloat16):
            model(**{name: x.to(device) for name, x in inputs.items()})
        found.append(dtypes)
    shared = found[0].keys() & found[1].keys()  # functions inside of a swapped module are not called
    assert len(shared) > 15
    assert {path: found[1][path] for path in shared} == {path: found[0][path] for path in shared}


class AsOnGpus(nn.LayerNorm):
    """PyTorch's norm where autocast has a rule for it, as it has on CUDA."""

    def forward(self, x):
        return super().forward(x.float() if torch.is_autocast_enabled(x.device.type) else x)


@pytest.mark.parametrize("kind", [nn.LayerNorm, AsOnGpus])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_pytorch(kind, weight, given):
    own = kind(16).to(weight)
    ours = copy.deepcopy(own)
    assert [row.swapped for row in adapter.patch(nn.Sequential(ours))] == [True]
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(given)
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            try:
                wanted = own(x)
            except RuntimeError:  # two 16-bit dtypes
                continue
            result = ours(x)
        assert result.dtype == wanted.dtype
        torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
        if enabled and kind is AsOnGpus and weight == torch.float32:
            assert result.dtype == torch.float32
            torch.testing.assert_close(result, wanted)

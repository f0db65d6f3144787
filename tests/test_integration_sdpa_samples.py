"""PyTorch's own sample calls of ``F.scaled_dot_product_attention``, those its operator tests run on, under our override."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from headwise import testing
from headwise.integrations import sdpa


def samples(dtype):
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    found = list(info.sample_inputs("cpu", dtype, requires_grad=True))
    assert len(found) >= 20, "this release of PyTorch has fewer samples"
    return [([sample.input, *sample.args], dict(sample.kwargs)) for sample in found]


def upcast(values):
    return [x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in values]


def results(tensors, options, upstream=None):
    out = F.scaled_dot_product_attention(*tensors, **options)
    if upstream is None:
        upstream = torch.randn(out.squeeze(1).shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaves = [x for x in tensors if x.requires_grad]
    gradients = torch.autograd.grad(out, leaves, upstream.to(out.dtype).view(out.shape), allow_unused=True)
    named = {f"grad of {i}": g for i, g in enumerate(gradients) if g is not None}
    return {"out": out.detach(), **named}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_samples(dtype):
    dropped = 0
    for tensors, options in samples(dtype):
        if options.get("dropout_p", 0.0) > 0:
            # Other entries are dropped than in PyTorch: the shape and the mean of many draws remain.
            dropped += 1
            with sdpa.override():
                out = F.scaled_dot_product_attention(*tensors, **options)
            assert out.shape == F.scaled_dot_product_attention(*tensors, **options).shape
            assert out.isfinite().all()
            continue
        wide = {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in options.items()
        }
        truth = results(upcast(tensors), wide)
        plains = [results(tensors, options)]
        if tensors[0].dim() == 3:  # a head of its own: PyTorch takes its flash kernel
            flash = results([x.detach()[:, None].requires_grad_() for x in tensors], options)
            plains.append({name: x[:, 0] for name, x in flash.items()})
        with sdpa.override():
            ours = results(tensors, copy.copy(options))
        assert ours.keys() == truth.keys()
        if dtype == torch.float64:  # the truth has no more digits
            torch.testing.assert_close(ours, truth)
            continue
        scales = testing.noise_scales(truth)
        for name, value in ours.items():
            errors = [testing.compare(name, value, truth[name], plain[name], scales[name]) for plain in plains]
            shapes = [tuple(x.shape) for x in tensors]
            assert any(error.ok for error in errors), (list(map(str, errors)), options, shapes)
    assert dropped > 0

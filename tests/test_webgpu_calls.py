"""Calls that models make of ``device="webgpu"``: many dims, encoder layers in evaluation, and ``out=``."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise.webgpu  # noqa: F401  registers the device

DEVICE = "webgpu"

# --------------------------------------------------------------------------------------------------------------- many dims


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("order", [(5, 4, 3, 2, 1, 0), (0, 2, 1, 3, 5, 4), (1, 0, 2, 3, 4, 5)], ids=str)
def test_tensors_of_six_dims_are_copied_joined_and_written_webgpu(order, dtype):
    x = torch.randint(0, 100, (2, 3, 4, 5, 3, 2), generator=torch.Generator().manual_seed(0)).to(dtype)
    y = x.to(DEVICE).permute(order)
    x = x.permute(order)
    assert torch.equal(y.cpu(), x)
    for call in (
        lambda x: x.contiguous(),
        lambda x: x.clone(),
        lambda x: torch.cat([x, x.flip(0)], 2),
        lambda x: torch.stack([x, x], 3),
        lambda x: F.pad(x, (1, 1, 0, 2), value=7),
        lambda x: x.reshape(-1, 3),
        lambda x: torch.zeros_like(x)[..., ::2].copy_(x[..., ::2]),
        lambda x: x.to(torch.int32),
    ):
        assert torch.equal(call(y).cpu(), call(x))
    wide, plain = torch.zeros(8, *y.shape[1:], dtype=dtype, device=DEVICE), torch.zeros(8, *x.shape[1:], dtype=dtype)
    wide[1 : 1 + y.shape[0], :, ..., 1:] = y[..., 1:]
    plain[1 : 1 + x.shape[0], :, ..., 1:] = x[..., 1:]
    assert torch.equal(wide.cpu(), plain)


def test_layer_norm_of_seven_permuted_dims_webgpu():
    x = torch.randn(2, 3, 2, 2, 3, 2, 8, generator=torch.Generator().manual_seed(0)).permute(5, 0, 4, 2, 1, 3, 6)
    made = F.layer_norm(x.to(DEVICE), (2, 8))
    torch.testing.assert_close(made.cpu(), F.layer_norm(x, (2, 8)), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------- encoder layers in evaluation


@pytest.fixture
def plain_layers():
    """The same layers, operator by operator: padding stays what it is."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
def test_an_encoder_in_evaluation_webgpu(plain_layers, masks, activation, norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, activation=activation, norm_first=norm_first, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    x, padding = torch.randn(3, 10, 32), torch.zeros(3, 10, dtype=torch.bool)
    padding[1, 7:] = padding[2, 3:] = True
    given = {}
    if masks in ("padding", "both"):
        given["src_key_padding_mask"] = padding
    if masks in ("causal", "both"):
        given["mask"] = torch.ones(10, 10, dtype=torch.bool).triu(1)
    there = copy.deepcopy(net).to(DEVICE)
    with torch.no_grad():
        expected = net(x, **given)
        torch.backends.mha.set_fastpath_enabled(True)
        found = there(x.to(DEVICE), **{name: m.to(DEVICE) for name, m in given.items()}).cpu()
    kept = ~padding if "src_key_padding_mask" in given else torch.ones_like(padding)
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-5, atol=1e-5)


def test_multi_head_attention_in_evaluation_webgpu():
    torch.manual_seed(0)
    net, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(3, 10, 32)
    there, padding = copy.deepcopy(net).to(DEVICE), torch.zeros(3, 10, dtype=torch.bool)
    padding[1, 7:] = True
    for options in ({}, {"need_weights": False}, {"average_attn_weights": False}, {"key_padding_mask": padding}):
        on_device = {name: o.to(DEVICE) if isinstance(o, torch.Tensor) else o for name, o in options.items()}
        with torch.no_grad():
            expected, found = net(x, x, x, **options), there(*[x.to(DEVICE)] * 3, **on_device)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------------------------------------- out=

_X = torch.arange(12.0).view(3, 4) - 5
WITH_OUT = {
    "mm": lambda x, **out: torch.mm(x, x.t(), **out),
    "matmul": lambda x, **out: torch.matmul(x, x.t(), **out),
    "addmm": lambda x, **out: torch.addmm(x[:, :3], x, x.t(), **out),
    "bmm": lambda x, **out: torch.bmm(x[None], x.t()[None], **out),
    "sum": lambda x, **out: torch.sum(x, 0, **out),
    "mean": lambda x, **out: torch.mean(x, 1, **out),
    "amax": lambda x, **out: torch.amax(x, 1, **out),
    "cat": lambda x, **out: torch.cat([x, x], **out),
    "stack": lambda x, **out: torch.stack([x, x], **out),
    "cumsum": lambda x, **out: torch.cumsum(x, 1, **out),
    "softmax": lambda x, **out: torch.softmax(x, 1, **out),
    "add": lambda x, **out: torch.add(x, 2, **out),
    "exp": lambda x, **out: torch.exp(x, **out),
    "where": lambda x, **out: torch.where(x > 0, x, -x, **out),
    "index_select": lambda x, **out: torch.index_select(x, 0, torch.tensor([2, 0], device=x.device), **out),
}


@pytest.mark.parametrize("name", WITH_OUT)
def test_results_are_written_where_out_says_webgpu(name):
    call, x = WITH_OUT[name], _X.to(DEVICE)
    expected = call(_X)
    whole = torch.full((*expected.shape, 2), 7.0, device=DEVICE)
    for out in (torch.zeros(expected.shape, device=DEVICE), whole[..., 1], torch.empty(0, device=DEVICE)):
        made = call(x, out=out)
        assert made is out
        assert out.shape == expected.shape
        torch.testing.assert_close(out.cpu(), expected)
    assert (whole[..., 0] == 7).all()


def test_two_results_are_written_where_out_says_webgpu():
    x = _X.to(DEVICE)
    for call in (
        lambda x, **out: torch.max(x, 1, **out),
        lambda x, **out: torch.topk(x, 2, **out),
        lambda x, **out: torch.sort(x, 1, descending=True, **out),
    ):
        outs = torch.empty(0, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
        call(x, out=outs)
        for ours, theirs in zip(outs, call(_X), strict=True):
            assert torch.equal(ours.cpu(), theirs)
    with pytest.raises(NotImplementedError, match=r"given as out= .* cannot become"):
        torch.sum(x, 0, out=torch.empty(3, device=DEVICE))

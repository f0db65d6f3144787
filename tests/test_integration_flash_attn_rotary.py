"""Rotary embeddings of flash_attn.layers.rotary, against a rotation written out."""

from __future__ import annotations

import pytest
import torch
from test_integration_flash_attn import angles, cumulated, normal, rotated, same

import headwise as hw
from headwise.integrations.flash_attn.layers import rotary
from headwise.integrations.flash_attn.layers.rotary import apply_rotary_emb
from headwise.integrations.flash_attn.ops.triton.rotary import apply_rotary


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rotary_emb(interleaved):
    cos, sin = angles()
    x = normal(2, 5, 3, 8, grad=True)
    for offsets in (0, 4, torch.tensor([3, 11])):
        at = (offsets[:, None] if isinstance(offsets, torch.Tensor) else offsets) + torch.arange(5)
        wanted = rotated(x, at.expand(2, 5), interleaved)
        same(apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets), wanted, (x,))
        y = x.detach().clone()
        assert apply_rotary_emb(y, cos, sin, interleaved, True, offsets) is y
        same(y, wanted.detach())
    packed = normal(7, 3, 8, grad=True)
    for offsets in (2, torch.tensor([3, 11])):
        first = offsets if isinstance(offsets, torch.Tensor) else torch.tensor([offsets, offsets])
        at = torch.cat((first[0] + torch.arange(5), first[1] + torch.arange(2)))[None]
        got = apply_rotary_emb(packed, cos, sin, interleaved, False, offsets, cumulated([5, 2]), 5)
        same(got, rotated(packed[None], at, interleaved)[0], (packed,))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_rotary_in_place(interleaved, compiled):
    """The memory of the input holds the result, also of a leaf with a gradient; the values are left alone."""
    cos, sin = angles()
    calls = [
        (apply_rotary_emb, (2, 5, 3, 8), 3, {"inplace": True}),
        (rotary.apply_rotary_emb_qkv_, (2, 5, 3, 4, 8), 8, {}),
        (rotary.apply_rotary_emb_qkv_, (2, 5, 8, 8), 6, {"num_heads_q": 4}),
        (rotary.apply_rotary_emb_kv_, (2, 5, 2, 4, 8), 4, {}),
    ]
    for function, shape, heads, options in calls:
        if compiled:
            function = torch.compile(function, backend="aot_eager")
        x = normal(*shape, grad=True)
        flat = x.flatten(2, -2)
        turned = rotated(flat[..., :heads, :], (7 + torch.arange(5)).expand(2, 5), interleaved)
        wanted = torch.cat((turned, flat[..., heads:, :]), -2).view(shape)
        for grad in (False, True):
            given = x.detach().clone().requires_grad_(grad)
            got = function(given, cos, sin, interleaved=interleaved, seqlen_offsets=7, **options)
            same(got, wanted)
            same(given, wanted)
        upstream = normal(*shape, seed=3)
        same(torch.autograd.grad(got, given, upstream)[0], torch.autograd.grad(wanted, x, upstream)[0])
    plain = rotary.apply_rotary_emb_torch(x[:, :, 0], cos[:5], sin[:5], interleaved)
    same(plain, rotated(x[:, :, 0], torch.arange(5).expand(2, 5), interleaved), (x,))
    with pytest.raises(ValueError, match="num_heads_q is None"):
        rotary.apply_rotary_emb_qkv_(normal(2, 5, 8, 8), cos, sin)
    with pytest.raises(ValueError, match="kv has shape"):
        rotary.apply_rotary_emb_kv_(normal(2, 5, 3, 4, 8), cos, sin)


def test_rotary_tables_of_16_bits():
    cos, sin = (x.bfloat16() for x in angles())
    x = normal(1, 5, 3, 8, dtype=torch.bfloat16)
    got = apply_rotary_emb(x, cos, sin)
    assert got.dtype == torch.bfloat16
    wanted = hw.rope(x.transpose(1, 2), cos.float(), sin.float()).transpose(1, 2)
    assert torch.equal(got, wanted)


def formula(x, base, interleaved, offsets=0, scale=1.0):
    """x (B, S, H, D) rotated by position · base^(-2 i / D), written out as complex numbers."""
    width = x.shape[-1]
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    first = offsets[:, None] if isinstance(offsets, torch.Tensor) else torch.full((x.shape[0], 1), offsets)
    angle = (first + torch.arange(x.shape[1]))[..., None] * frequency  # (B, S, D/2)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)[:, :, None] * scale
    return (
        torch.stack((turned.real, turned.imag), -1).flatten(-2)
        if interleaved
        else torch.cat((turned.real, turned.imag), -1)
    )


def near(got, wanted):
    """The layer's tables are float32."""
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=3e-5)


def test_rotate_half():
    x = torch.arange(8.0).view(2, 4)
    assert rotary.rotate_half(x).tolist() == [[-2.0, -3.0, 0.0, 1.0], [-6.0, -7.0, 4.0, 5.0]]
    assert rotary.rotate_half(x, True).tolist() == [[-1.0, 0.0, -3.0, 2.0], [-5.0, 4.0, -7.0, 6.0]]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, torch.tensor([3, 40])], ids=["0", "3", "each"])
def test_rotary_embedding(interleaved, offsets):
    """The layer, on qkv, on joined heads and on q beside kv; v stays."""
    layer = rotary.RotaryEmbedding(16, base=500.0, interleaved=interleaved)
    assert not layer.state_dict()
    longest = 45 if isinstance(offsets, torch.Tensor) else None
    if longest:
        with pytest.raises(ValueError, match="max_seqlen"):
            layer(normal(2, 5, 3, 4, 16), seqlen_offset=offsets)
    x = normal(2, 5, 3, 4, 16, grad=True)
    wanted = torch.stack([formula(y, 500.0, interleaved, offsets) for y in x.unbind(2)[:2]] + [x[:, :, 2]], 2)
    given = x.detach().clone().requires_grad_()
    got = layer(given, seqlen_offset=offsets, max_seqlen=longest)
    near(got, wanted)
    near(given, wanted)  # in place
    upstream = normal(2, 5, 3, 4, 16, seed=5)
    near(torch.autograd.grad(got, given, upstream)[0], torch.autograd.grad(wanted, x, upstream)[0])
    joined = normal(2, 5, 8, 16)
    wanted = torch.cat((formula(joined[:, :, :6], 500.0, interleaved, offsets), joined[:, :, 6:]), 2)
    near(layer(joined.clone(), None, offsets, longest, num_heads_q=4), wanted)
    q, kv = normal(2, 5, 4, 16), normal(2, 5, 2, 2, 16, seed=1)
    turned_q, turned_kv = layer(q.clone(), kv.clone(), offsets, longest)
    near(turned_q, formula(q, 500.0, interleaved, offsets))
    near(turned_kv, torch.stack((formula(kv[:, :, 0], 500.0, interleaved, offsets), kv[:, :, 1]), 2))


def test_rotary_embedding_that_decays():
    """xPos: products of q and k hold scale^((p - j) / base), whatever the position."""
    layer = rotary.RotaryEmbedding(16, scale_base=8)
    x = normal(1, 7, 3, 2, 16)
    got = layer(x.clone())
    near(got[:, :, 2], x[:, :, 2])
    scale = (torch.arange(0, 16, 2, dtype=torch.float64) + 6.4) / 22.4
    power = ((torch.arange(7) - 3) / 8.0)[:, None]
    factor = (scale**power)[None, :, None, :]  # (1, S, 1, D/2)
    near(got[:, :, 0], formula(x[:, :, 0], 10000.0, False, scale=factor))
    near(got[:, :, 1], formula(x[:, :, 1], 10000.0, False, scale=1 / factor))
    q, kv = layer(x[:, :, 0].clone(), x[:, :, 1:].clone())
    near(q, got[:, :, 0])
    near(kv, got[:, :, 1:])
    with pytest.raises(NotImplementedError, match="pos_idx_in_fp32"):
        rotary.RotaryEmbedding(16, pos_idx_in_fp32=False)


def test_rotary_embedding_in_16_bits():
    """Cast with a model: angles of far positions are those of float32."""
    layer = rotary.RotaryEmbedding(16).bfloat16()
    x = torch.ones(1, 2, 3, 1, 16, dtype=torch.bfloat16)
    got = layer(x.clone(), seqlen_offset=5001)
    wanted = formula(x[:, :, 0].double(), 10000.0, False, 5001)
    torch.testing.assert_close(got[:, :, 0].double(), wanted, rtol=0, atol=2**-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rotary(interleaved):
    cos, sin = angles()
    x = normal(2, 5, 3, 8, grad=True)
    wanted = rotated(x, (2 + torch.arange(5)).expand(2, 5), interleaved)
    got = apply_rotary(x, cos, sin, 2, interleaved=interleaved)
    assert not got.requires_grad
    same(got, wanted.detach())
    back = apply_rotary(got, cos, sin, 2, interleaved=interleaved, inplace=True, conjugate=True)
    assert back is got
    same(back, x.detach())
    packed = normal(7, 3, 8)
    at = torch.cat((torch.arange(5), torch.arange(2)))[None]
    got = apply_rotary(packed, cos, sin, 0, cumulated([5, 2]), 5, interleaved)
    same(got, rotated(packed[None], at, interleaved)[0])

"""Rotary embeddings of flash_attn.layers.rotary, against a rotation written out."""

from __future__ import annotations

import pytest
import torch
from test_integration_flash_attn import angles, cumulated, normal, rotated, same

import headwise as hw
from headwise.integrations.flash_attn.layers import rotary
from headwise.integrations.flash_attn.layers.rotary import apply_rotary_emb


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
    with pytest.raises(NotImplementedError, match="cos_k"):
        rotary.apply_rotary_emb_qkv_(normal(2, 5, 3, 4, 8), cos, sin, cos)


def test_rotary_tables_of_16_bits():
    cos, sin = (x.bfloat16() for x in angles())
    x = normal(1, 5, 3, 8, dtype=torch.bfloat16)
    got = apply_rotary_emb(x, cos, sin)
    assert got.dtype == torch.bfloat16
    wanted = hw.rope(x.transpose(1, 2), cos.float(), sin.float()).transpose(1, 2)
    assert torch.equal(got, wanted)

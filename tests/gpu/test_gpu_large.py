"""Tensors of more than 2³¹ elements: offsets that wrap at 32 bits would read and write somewhere else."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_machine import DEVICE, assert_close, gpu, ints, normal
from torch import Tensor

import headwise as hw

__all__ = ["gpu"]

# 128 · LONG · 128 elements are a little more than 2³¹.
LONG = 131328
LARGE = 128 * LONG * 128
assert LARGE > 2**31


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention of float32 ``(…, Sq, D)`` over ``(…, Sk, D)``, aligned at the bottom right."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(k.shape[-2] - q.shape[-2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("heads", [128, 1], ids=["many heads", "one head of many rows"])
def test_attention_of_many_queries(heads):
    keys = 96
    q = normal(1, heads, LARGE // 128 // heads, 128, seed=1).requires_grad_()
    k, v = (normal(1, max(1, heads // 16), keys, 128, seed=s).requires_grad_() for s in (2, 3))
    assert q.numel() > 2**31
    out, lse = hw.attention(q, k, v, return_lse=True)
    grad = normal(*q.shape, seed=4)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    for rows in (slice(0, 300), slice(-300, None)):
        for head in {0, heads - 1}:
            of_q, of_k, of_v, of_grad = (
                x[0, h].float().detach()
                for x, h in ((q[:, :, rows], head), (k, head // 16), (v, head // 16), (grad[:, :, rows], head))
            )
            of_q.requires_grad_()
            expected = plain(of_q, of_k, of_v)
            assert_close(out[0, head, rows], expected)
            assert_close(dq[0, head, rows], *torch.autograd.grad(expected, of_q, of_grad))
            scores = of_q.detach() @ of_k.mT / math.sqrt(128)
            assert_close(lse[0, head, rows], torch.logsumexp(scores, -1), 1e-3)
    # The gradients of the last key head, over all its rows.
    group = slice(-16, None) if heads > 1 else slice(None)
    of_k, of_v = (x[0, -1].float().detach().requires_grad_() for x in (k, v))
    total_k, total_v = torch.zeros_like(of_k), torch.zeros_like(of_v)
    rows_at_once = 1 << 20
    for start in range(0, q.shape[2], rows_at_once):
        rows = slice(start, start + rows_at_once)
        for head in range(heads)[group]:
            part = plain(q[0, head, rows].float().detach(), of_k, of_v)
            grads = torch.autograd.grad(part, (of_k, of_v), grad[0, head, rows].float())
            total_k += grads[0]
            total_v += grads[1]
    assert_close(dk[0, -1], total_k, 2e-2)
    assert_close(dv[0, -1], total_v, 2e-2)


def test_attention_of_many_keys():
    q = normal(1, 128, 16, 128, seed=1).requires_grad_()
    k, v = (normal(1, 128, LONG, 128, seed=s).requires_grad_() for s in (2, 3))
    assert k.numel() > 2**31
    out = hw.attention(q, k, v, causal=True)
    grad = normal(*out.shape, seed=4)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    for head in (0, 127):
        parts = [x[0, head].float().detach().requires_grad_() for x in (q, k, v)]
        expected = plain(*parts, causal=True)
        assert_close(out[0, head], expected)
        for ours, truth in zip(grads, torch.autograd.grad(expected, parts, grad[0, head].float()), strict=True):
            assert_close(ours[0, head], truth, 2e-2)


def test_packed_attention():
    length, sequences, heads = 1024, LARGE // (16 * 128) // 1024, 16
    tokens = length * sequences
    q, k, v = (normal(tokens, heads, 128, seed=s).requires_grad_() for s in (1, 2, 3))
    assert q.numel() > 2**31
    cu = torch.arange(sequences + 1, device=DEVICE, dtype=torch.int32) * length
    out = hw.attention_varlen(q, k, v, cu, cu, length, length, causal=True)
    grad = normal(*out.shape, seed=4)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    for rows in (slice(0, length), slice(-length, None)):
        parts = [x[rows].transpose(0, 1).float().detach().requires_grad_() for x in (q, k, v)]
        expected = plain(*parts, causal=True)
        assert_close(out[rows].transpose(0, 1), expected)
        truth = torch.autograd.grad(expected, parts, grad[rows].transpose(0, 1).float())
        for ours, wanted in zip(grads, truth, strict=True):
            assert_close(ours[rows].transpose(0, 1), wanted, 2e-2)


def test_decode_over_a_large_cache():
    k, v = (normal(4, 32, LONG, 128, seed=s) for s in (1, 2))
    q = normal(4, 64, 128, seed=3)
    assert k.numel() > 2**31
    out = hw.attention_decode(q, k, v, ints(LONG, 5, LONG - 1, LONG))
    for entry, length in ((0, LONG), (2, LONG - 1), (3, LONG)):
        keys, values = (x[entry, -1, :length].float() for x in (k, v))
        assert_close(out[entry, -2:], plain(q[entry, -2:].float(), keys, values))


def test_decode_over_many_pages():
    pages, page_size, heads = LARGE // (16 * 64 * 128), 64, 16
    k, v = (normal(pages, heads, page_size, 128, seed=s) for s in (1, 2))
    assert k.numel() > 2**31
    q = normal(2, 32, 128, seed=3)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).reshape(2, -1).to(DEVICE, torch.int32)
    length = table.shape[1] * page_size - 3
    out = hw.attention_decode(q, k, v, ints(length, length), block_table=table)
    for entry in range(2):
        keys, values = (x[table[entry].long(), -1].reshape(-1, 128)[:length].float() for x in (k, v))
        assert_close(out[entry, -2:], plain(q[entry, -2:].float(), keys, values))


def ends(count: int) -> list[slice]:
    return [slice(0, 3), slice(count - 3, count)]


def test_softmax_of_many_rows_that_fill_a_multiprocessor():
    x = normal(9 * torch.cuda.get_device_properties(DEVICE).multi_processor_count + 5, 20000)
    x[3] = -torch.inf
    out = hw.softmax(x)
    assert not out[3].any()
    x[3], out[3] = 0, 1 / 20000
    assert_close(out, torch.softmax(x.float(), -1))


def test_softmax():
    x = normal(LARGE // 131072, 131072, seed=1, scale=3.0).requires_grad_()
    assert x.numel() > 2**31
    out = hw.softmax(x)
    grad = normal(*x.shape, seed=2)
    (dx,) = torch.autograd.grad(out, x, grad)
    for rows in ends(x.shape[0]):
        part = x[rows].detach().float().requires_grad_()
        expected = torch.softmax(part, -1)
        assert_close(out[rows], expected)
        assert_close(dx[rows], *torch.autograd.grad(expected, part, grad[rows].float()))


def test_rms_norm():
    x, weight = normal(LARGE // 4096, 4096, seed=1).requires_grad_(), normal(4096, seed=2).requires_grad_()
    assert x.numel() > 2**31
    out = hw.rms_norm(x, weight)
    grad = normal(*x.shape, seed=3)
    dx, dweight = torch.autograd.grad(out, (x, weight), grad)
    for rows in ends(x.shape[0]):
        part = x[rows].detach().float().requires_grad_()
        expected = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * weight.detach().float()
        assert_close(out[rows], expected)
        assert_close(dx[rows], *torch.autograd.grad(expected, part, grad[rows].float()))
    total = torch.zeros(4096, dtype=torch.float64, device=DEVICE)
    for part, of_grad in zip(x.detach().split(1 << 15), grad.split(1 << 15), strict=True):
        single = part.float()
        normed = single * torch.rsqrt(single.square().mean(-1, keepdim=True) + 1e-6)
        total += (normed * of_grad.float()).sum(0).double()
    assert_close(dweight, total)


def test_cross_entropy():
    rows, classes = LARGE // 131072, 131072
    logits = normal(rows, classes, seed=1, scale=2.0)
    assert logits.numel() > 2**31
    targets = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    targets[-1] = classes - 1
    loss, dlogits = hw.cross_entropy_forward_backward(logits, targets)
    losses = [
        torch.nn.functional.cross_entropy(part.float(), wanted, reduction="sum").double()
        for part, wanted in zip(logits.split(1024), targets.split(1024), strict=True)
    ]
    assert_close(loss, torch.stack(losses).sum() / rows, 1e-4)
    for of in ends(rows):
        expected = torch.softmax(logits[of].float(), -1)
        expected[torch.arange(3), targets[of]] -= 1
        assert_close(dlogits[of], expected / rows)
    (through_autograd,) = torch.autograd.grad(hw.cross_entropy(logits.requires_grad_(), targets), logits)
    for of in ends(rows):
        assert_close(through_autograd[of], dlogits[of])


def test_embedding_of_a_large_table():
    entries = LARGE // 4096
    weight = normal(entries, 4096, seed=1).requires_grad_()
    assert weight.numel() > 2**31
    ids = ints(0, entries - 1, 7, entries - 1, entries - 2, dtype=torch.int64)
    out = hw.embedding(ids, weight)
    assert torch.equal(out, weight.detach()[ids])
    grad = normal(5, 4096, seed=2)
    (dweight,) = torch.autograd.grad(out, weight, grad)
    assert_close(dweight[-1], grad[1].float() + grad[3].float())
    assert torch.equal(dweight[-2], grad[4])
    assert torch.equal(dweight[7], grad[2])
    assert int(dweight.count_nonzero(-1).count_nonzero()) == 4


def test_embedding_of_many_ids():
    count, entries = LARGE // 4096, 1000
    weight = normal(entries, 4096, seed=1).requires_grad_()
    ids = torch.arange(count, device=DEVICE) % entries
    out = hw.embedding(ids, weight)
    assert out.numel() > 2**31
    for of in ends(count):
        assert torch.equal(out[of], weight.detach()[ids[of]])
    grad = normal(*out.shape, seed=2)
    (dweight,) = torch.autograd.grad(out, weight, grad)
    for entry in (0, entries - 1):
        assert_close(dweight[entry], grad[entry::entries].float().sum(0))


def test_transpose():
    side = math.isqrt(LARGE) // 32 * 32 + 64
    x = normal(side, side + 1, seed=1)
    assert x.numel() > 2**31
    out = hw.transpose(x)
    assert out.is_contiguous()
    row = torch.randint(0, side, (1 << 20,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    column = torch.randint(0, side + 1, (1 << 20,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(out[column, row], x[row, column])
    assert torch.equal(out[-70:, -70:], x[-70:, -70:].mT)
    assert torch.equal(out[:70, -70:], x[-70:, :70].mT)


@pytest.mark.parametrize("halves", [True, False])
def test_glu(halves):
    width = 4096
    both = normal(LARGE // width, 2 * width if halves else width, seed=1)
    given = (both,) if halves else (both, normal(*both.shape, seed=2))
    leaves = [x.requires_grad_() for x in given]
    out = hw.glu(*leaves)
    assert out.numel() > 2**31
    grad = normal(*out.shape, seed=3)
    found = torch.autograd.grad(out, leaves, grad)
    for rows in ends(out.shape[0]):
        parts = [x[rows].detach().float().requires_grad_() for x in leaves]
        gate, up = parts[0].chunk(2, -1) if halves else parts
        expected = torch.nn.functional.silu(gate) * up
        assert_close(out[rows], expected)
        for ours, exact in zip(found, torch.autograd.grad(expected, parts, grad[rows].float()), strict=True):
            assert_close(ours[rows], exact)


@pytest.mark.parametrize("inside", [True, False])
def test_rope(inside):
    heads, tokens = (64, LARGE // 64 // 128) if inside else (128, LARGE // 128 // 128)
    shape = (1, tokens, heads, 128) if inside else (1, heads, tokens, 128)
    q = normal(*shape, seed=1)
    q = (q.transpose(1, 2) if inside else q).requires_grad_()
    assert q.numel() > 2**31
    angles = torch.outer(torch.arange(512, device=DEVICE), 100.0 ** -torch.linspace(0, 1, 64, device=DEVICE))
    cos, sin = angles.cos(), angles.sin()
    positions = torch.arange(tokens, device=DEVICE) % 512
    out = hw.rope(q, cos, sin, positions)
    (dq,) = torch.autograd.grad(out, q, out.detach())  # the inverse of the rotation
    for rows in ends(tokens):
        for head in (0, heads - 1):
            x = q[0, head, rows].detach().float()
            a, b = x.chunk(2, -1)
            c, s = cos[positions[rows]], sin[positions[rows]]
            assert_close(out[0, head, rows], torch.cat([a * c - b * s, b * c + a * s], -1))
            assert_close(dq[0, head, rows], x)

"""Dropout of a call that is a part of a larger one: the same entries as in that (`headwise.distributed` computes parts)."""

from __future__ import annotations

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE

import headwise as hw
from headwise import reference as oracle
from headwise.ops.attention import unrounded, varlen

SEED, CHANCE = 0x0123_4567_89AB_CDEF, 0.3
# Of batch entry, head, query and key; by how many numbers a seed has for it.
PLACES = {3: (2, 1, 0, 0), 5: (1, 3, 37, 90), 6: (0, 2, 48, 16)}
on_every_backend = pytest.mark.parametrize("backend", RUNNABLE)


def seed_of(count, place, device):
    return torch.tensor([SEED, *place, 16][:count], device=device)


def kept(place, batch, heads, rows, keys):
    b, h, i, j = place
    whole = oracle.kept(CHANCE, SEED, (b + batch, h + heads, i + rows, j + keys), torch.device("cpu"))
    return whole[b:, h:, i:, j:]


@on_every_backend
def test_which_entries_a_part_keeps(backend):
    """q = 0: all probabilities are the same, and values of an identity matrix show which ones are there."""
    for count, place in PLACES.items():
        rows, keys = 70, 41
        q, k = torch.zeros(2, 4, rows, 16), torch.zeros(2, 2, keys, 16)
        v = torch.eye(keys).expand(2, 2, keys, keys).contiguous()
        seed = seed_of(count, place, DEVICE[backend])
        out, _ = unrounded.attention(
            *(x.to(DEVICE[backend]) for x in (q, k, v)), window=None, scale=1.0, softcap=None, deterministic=True,
            backend=backend, dropout=CHANCE, seed=seed,
        )  # fmt: skip
        assert torch.equal(out.cpu() != 0, kept(place, 2, 4, rows, keys)), (count, rows)


@on_every_backend
def test_gradients_of_a_part(backend):
    """Those of a softmax that is multiplied with the entries of the larger call. A bias and a causal window beside it."""
    generator, device = torch.Generator().manual_seed(1), DEVICE[backend]
    for count in (5, 6):
        place = PLACES[count]
        q, k, v, grad = (torch.randn(1, h, n, 16, generator=generator) for h, n in ((4, 70), (2, 90), (2, 90), (4, 70)))
        bias = torch.randn(1, 1, 70, 90, generator=generator)
        exact = [x.double().requires_grad_() for x in (q, k, v, bias)]
        scores = exact[0] @ exact[1].repeat_interleave(2, 1).mT / 4 + exact[3]
        scores = scores.masked_fill(torch.ones(70, 90).tril(20) == 0, -torch.inf)
        probs = scores.softmax(-1) * kept(place, 1, 4, 70, 90) / (1 - CHANCE)
        truth = probs @ exact[2].repeat_interleave(2, 1)
        wanted = torch.autograd.grad(truth, exact, grad.double())
        given = [x.to(device) for x in (q, k, v)]
        flags = {
            "window": (None, 0), "scale": 0.25, "softcap": None, "deterministic": True, "backend": backend,
            "bias": bias.to(device), "dropout": CHANCE, "seed": seed_of(count, place, device),
        }  # fmt: skip
        out, lse = unrounded.attention(*given, **flags)
        found = unrounded.attention_backward(grad.to(device), *given, out, lse, need_bias_grad=True, **flags)
        for ours, true in zip((out, *found), (truth, *wanted), strict=True):
            assert (ours.cpu() - true).abs().max() < 2e-5 * true.abs().max(), count


@on_every_backend
def test_sequences_of_a_part(backend):
    """Packed: the numbers of the first sequence and of the first head."""
    device, generator = DEVICE[backend], torch.Generator().manual_seed(2)
    q, k, v, grad = (torch.randn(60, h, 16, generator=generator).to(device) for h in (4, 2, 2, 4))
    ends = torch.tensor([0, 7, 40, 60], dtype=torch.int32, device=device)
    whole = [
        torch.cat([torch.zeros_like(x[:9]), x]) for x in (q, k, v, grad)
    ]  # two sequences before them, and a key head
    whole = [torch.cat([torch.zeros_like(x[:, :n]), x], 1) for x, n in zip(whole, (2, 1, 1, 2), strict=True)]
    all_ends = torch.cat([torch.tensor([0, 4], dtype=torch.int32, device=device), ends + 9])
    seed = seed_of(3, (2, 2), device)
    out, lse = varlen._forward(
        (q, k, v, None, None, None, None, None, None, ends, ends, seed), (33, 33, True, None, None, None, True, CHANCE),
        backend, True,
    )  # fmt: skip
    true, true_lse = hw.attention_varlen(
        *whole[:3], all_ends, all_ends, 33, 33, causal=True, dropout=CHANCE, dropout_seed=SEED, return_lse=True,
        backend=backend,
    )  # fmt: skip
    assert torch.allclose(out.cpu(), true[9:, 2:].cpu(), atol=1e-6)
    grads = unrounded.attention_varlen_backward(
        grad, q, k, v, out, lse, ends, 33, window=(None, 0), scale=0.25, softcap=None, deterministic=True,
        backend=backend, dropout=CHANCE, seed=seed,
    )  # fmt: skip
    true_grads = hw.attention_varlen_backward(
        whole[3], *whole[:3], true, true_lse, all_ends, all_ends, 33, 33, causal=True, dropout=CHANCE, dropout_seed=SEED,
        backend=backend,
    )  # fmt: skip
    for ours, other, first in zip(grads, true_grads, (2, 1, 1), strict=True):
        assert torch.allclose(ours.cpu(), other[9:, first:].cpu(), atol=1e-5)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_public_seed_is_one_number(count):
    q, seed = torch.zeros(1, 1, 4, 8), torch.zeros(count, dtype=torch.int64)
    for run in (hw.attention, lambda *x, **flags: hw.attention_probs(*x[:2], **flags)):
        with pytest.raises(ValueError, match=rf"dropout_seed has shape \({count},\); it needs one element"):
            run(q, q, q, dropout=0.1, dropout_seed=seed)

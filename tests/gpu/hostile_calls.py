"""Calls whose lengths, ids, offsets and page tables hold anything: what is bad is NaN, all else is as if it were not there.

No pytest here: `sanitized_calls` runs the same calls under compute-sanitizer, which sees every access outside a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import headwise as hw

I32, I64 = torch.int32, torch.int64
SMALL = (-1, -(2**31), 2**31 - 1)
LARGE = (2**31, 2**40, -(2**40), 2**63 - 1, -(2**63))
BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, DIM = 3, 4, 2, 150, 300, 64


def calls(device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Names, and functions that run a call and assert what its results are."""
    for dtype, values in ((I32, SMALL), (I64, LARGE)):
        for value in (*values, KEYS + 1):
            for name in ("kv_lengths", "q_lengths", "kv_starts"):
                yield f"{name} {value}", partial(bad_length_of_attention, device, name, value, dtype)
            for name in ("lengths", "kv_starts"):
                yield f"decode {name} {value}", partial(bad_length_of_decode, device, name, value, dtype)
        for value in (*values, 97):
            yield f"id {value}", partial(bad_id, device, value, dtype)
            yield f"target {value}", partial(bad_target, device, value, dtype)
    for value in (*SMALL, 20):
        for place in (0, 3):
            yield f"page {value} at {place}", partial(bad_page, device, value, place)
    yield "pages nobody needs", partial(bad_page_beyond_the_length, device)
    for value in (QUERIES, -QUERIES - 1, 2**62, -(2**62)):
        yield f"row {value}", partial(bad_row, device, value)
    for bounds in (
        (1, 40, 90), (0, 40, 30), (0, 40, 101), (0, 70, 90), (-1, 40, 90), (0, 2**31 - 1, 90), (0, -(2**31), 90),
        (0, 40, 2**31 - 1), (-(2**31), 2**31 - 1, -(2**31)), (2**31 - 1, 2**31 - 1, 2**31 - 1),
    ):  # fmt: skip
        yield f"cu_seqlens {bounds}", partial(bad_offsets, device, bounds, I32)
    for bounds in (
        (0, 2**32, 90), (0, 2**32 + 40, 90), (2**32, 40, 90), (0, 40, 2**32 + 90), (0, 40, 2**63 - 1), (0, -(2**63), 90),
        (0, 40, 2**40), (-(2**40), 40, 90),
    ):  # fmt: skip
        yield f"64-bit cu_seqlens {bounds}", partial(bad_offsets, device, bounds, I64)


def normal(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def equal(a: Tensor, b: Tensor) -> bool:
    """Also where both are NaN."""
    return bool(torch.equal(a, b) or ((a == b) | (a.isnan() & b.isnan())).all())


# What a batch of three is given where nothing is wrong.
GOOD = {"kv_lengths": (KEYS, 100, 37), "q_lengths": (QUERIES, 100, 37), "kv_starts": (0, 100, 37)}


def lengths_of(device: str, name: str, second: int | None, dtype: torch.dtype) -> Tensor:
    first, usual, third = GOOD.get(name, GOOD["kv_lengths"])
    return torch.tensor([first, usual if second is None else second, third], dtype=dtype, device=device)


def attention(device: str, **lengths: Tensor) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    q = normal(device, BATCH, HEADS, QUERIES, DIM, seed=1).requires_grad_()
    k, v = (normal(device, BATCH, KEY_HEADS, KEYS, DIM, seed=s).requires_grad_() for s in (2, 3))
    out, lse = hw.attention(q, k, v, causal=True, **lengths, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), normal(device, *out.shape, seed=4))
    return [out.detach(), lse.detach(), *grads]


def bad_length_of_attention(device: str, name: str, value: int, dtype: torch.dtype) -> None:
    good, bad = (attention(device, **{name: lengths_of(device, name, second, dtype)}) for second in (None, value))
    assert bad[0][1].isnan().all(), "the output of the bad entry is not NaN"
    assert bad[1][1].isnan().all(), "the lse of the bad entry is not NaN"
    for ours, expected in zip(bad, good, strict=True):
        for entry in (0, 2):
            assert equal(ours[entry], expected[entry]), "a good entry changed"
    probs = hw.attention_probs(
        normal(device, BATCH, HEADS, QUERIES, DIM), normal(device, BATCH, KEY_HEADS, KEYS, DIM),
        **{name: lengths_of(device, name, value, dtype)},
    )  # fmt: skip
    assert probs[1].isnan().all()
    assert probs[[0, 2]].isfinite().all()


def bad_length_of_decode(device: str, name: str, value: int, dtype: torch.dtype) -> None:
    k, v = (normal(device, BATCH, KEY_HEADS, KEYS, DIM, seed=s) for s in (2, 3))
    q = normal(device, BATCH, HEADS, DIM, seed=1)

    def decode(second: int | None) -> tuple[Tensor, Tensor]:
        given = {"lengths": lengths_of(device, "lengths", None, dtype)}
        given[name] = lengths_of(device, name, second, dtype)
        return hw.attention_decode(q, k, v, **given, return_lse=True)

    for ours, expected in zip(decode(value), decode(None), strict=True):
        assert ours[1].isnan().all(), "the bad entry is not NaN"
        assert equal(ours[[0, 2]], expected[[0, 2]]), "a good entry changed"


def paged(device: str, table: list[list[int]], lengths: list[int]) -> tuple[Tensor, Tensor]:
    k, v = (normal(device, 20, KEY_HEADS, 16, DIM, seed=s) for s in (2, 3))
    return hw.attention_decode(
        normal(device, len(lengths), HEADS, DIM, seed=1), k, v, torch.tensor(lengths, dtype=I32, device=device),
        block_table=torch.tensor(table, dtype=I32, device=device), return_lse=True,
    )  # fmt: skip


def bad_page(device: str, value: int, place: int) -> None:
    good_table = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    bad_table = [row[:] for row in good_table]
    bad_table[1][place] = value
    good, bad = (paged(device, table, [64, 60, 33]) for table in (good_table, bad_table))
    for ours, expected in zip(bad, good, strict=True):
        assert ours[1].isnan().all(), "the bad entry is not NaN"
        assert equal(ours[[0, 2]], expected[[0, 2]]), "a good entry changed"


def bad_page_beyond_the_length(device: str) -> None:
    good = paged(device, [[0, 1, 2, 3], [4, 5, 6, 7]], [33, 0])
    bad = paged(device, [[0, 1, 2, 2**31 - 1], [-1, -(2**31), 20, 7]], [33, 0])
    assert all(equal(a, b) for a, b in zip(bad, good, strict=True)), "a page that no length needs was looked at"


def bad_id(device: str, value: int, dtype: torch.dtype) -> None:
    ids = torch.arange(200, device=device, dtype=dtype) % 97
    ids[[3, 64, 199]] = value
    weight = normal(device, 97, 200, seed=1).requires_grad_()
    out = hw.embedding(ids, weight)
    bad = torch.zeros(200, dtype=torch.bool, device=device)
    bad[[3, 64, 199]] = True
    assert out[bad].isnan().all()
    assert torch.equal(out[~bad], weight.detach()[ids[~bad].long()])
    grad = normal(device, 200, 200, seed=2)
    (dweight,) = torch.autograd.grad(out, weight, grad)
    expected = torch.zeros(97, 200, device=device).index_add_(0, ids[~bad].long(), grad[~bad].float())
    torch.testing.assert_close(dweight.float(), expected, rtol=0.02, atol=0.02)
    every = hw.embedding_backward(grad, torch.full((200,), value, dtype=dtype, device=device), 97)
    assert not every.any(), "ids outside the table have a part in the gradient"


def bad_target(device: str, value: int, dtype: torch.dtype) -> None:
    targets = torch.arange(40, device=device, dtype=dtype)
    targets[[0, 17]] = value
    logits = normal(device, 40, 97, seed=1).requires_grad_()
    losses = hw.cross_entropy(logits, targets, reduction="none")
    _, explicit = hw.cross_entropy_forward_backward(logits.detach(), targets, reduction="none")
    (grad,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
    bad = torch.zeros(40, dtype=torch.bool, device=device)
    bad[[0, 17]] = True
    assert torch.equal(losses.isnan(), bad)
    for of in (grad, explicit):
        assert of[bad].isnan().all()
        assert of[~bad].isfinite().all()


def bad_row(device: str, value: int) -> None:
    q, k = normal(device, 1, HEADS, QUERIES, DIM), normal(device, 1, KEY_HEADS, KEYS, DIM)
    probs = hw.attention_probs(q, k, rows=torch.tensor([0, value, -1], device=device), causal=True)
    assert probs[:, :, 1].isnan().all()
    assert probs[:, :, [0, 2]].isfinite().all()


def bad_offsets(device: str, bounds: tuple[int, ...], dtype: torch.dtype) -> None:
    good = torch.tensor([0, 40, 90], dtype=dtype, device=device)
    bad = torch.tensor(bounds, dtype=dtype, device=device)
    q = normal(device, 100, HEADS, DIM, seed=1).requires_grad_()
    k, v = (normal(device, 100, KEY_HEADS, DIM, seed=s).requires_grad_() for s in (2, 3))
    for of_q, of_k in ((bad, good), (good, bad), (bad, bad)):
        out, lse = hw.attention_varlen(q, k, v, of_q, of_k, 60, 60, causal=True, return_lse=True)
        assert out.isnan().all(), "the output is not NaN everywhere"
        assert lse.isnan().all(), "the lse is not NaN everywhere"
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

"""Attention dropout beyond the case tables: which entries are dropped, bit by bit, and where the seed comes from.

With q = 0 every visible key has the same probability, and with values or gradients of an identity matrix an output shows
which entries a kernel kept.
"""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise import reference as oracle
from headwise.backends.triton import tile_sizes
from headwise.backends.triton.tile_sizes import AttentionTile
from headwise.backends.webgpu import tiles
from headwise.ops.attention import dense

SEED, CHANCE = 0x0123_4567_89AB_CDEF, 0.3
WORD = 2**32 - 1
on_every_backend = pytest.mark.parametrize("backend", RUNNABLE)


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """In Python's own numbers, as the paper has it."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k, right & WORD, (left >> 32) ^ d ^ m, left & WORD
        k, m = (k + 0x9E3779B9) & WORD, (m + 0xBB67AE85) & WORD
    return [a, b, c, d]


# The known answers of Random123 for philox4x32-10.
KNOWN = [
    ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((WORD,) * 4, (WORD,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_oracle_and_this_file_know_the_published_answers(counter, key, words):
    assert [f"{word:08x}" for word in philox(counter, key)] == words.split()
    found = oracle.philox(tuple(torch.tensor(word) for word in counter), key)
    assert [f"{int(word):08x}" for word in found] == words.split()


def is_kept(chance: float, seed: int, b: int, h: int, i: int, j: int) -> bool:
    """docs/contract.md, word by word."""
    words = philox((j & ~9, h, i & ~8, b), (seed & WORD, seed >> 32 & WORD))
    word = words[2 * (i // 8 % 2) + j // 8 % 2]
    return (word >> 16 if j % 2 else word & 0xFFFF) >= min(round(chance * 65536), 65535)


@pytest.mark.parametrize("seed", [0, SEED, -1, -(2**63), 2**63 - 1])
def test_the_oracle_keeps_what_the_contract_says(seed):
    kept = oracle.kept(CHANCE, seed, (2, 3, 21, 37), torch.device("cpu"), 5)
    for b, h, i, j in ((0, 0, 0, 0), (0, 2, 7, 8), (1, 1, 8, 1), (1, 2, 20, 36), (0, 1, 15, 9), (1, 0, 16, 31)):
        assert bool(kept[b, h, i, j]) == is_kept(CHANCE, seed, b + 5, h, i, j)


def shown_by_probs(backend: str, shape: tuple[int, ...], chance: float = CHANCE, seed: int | Tensor = SEED) -> Tensor:
    """bool (B, H, Sq, Sk): the entries that are not zero."""
    q, k = zeros(backend, *shape[:3], 16), zeros(backend, shape[0], shape[1], shape[3], 16)
    return hw.attention_probs(q, k, dropout=chance, dropout_seed=seed, backend=backend).cpu() != 0


def zeros(backend: str, *shape: int, gradient: bool = False) -> Tensor:
    return torch.zeros(shape, device=DEVICE[backend], requires_grad=gradient)


def bits(row: Tensor) -> str:
    return f"{sum(int(kept) << j for j, kept in enumerate(row.tolist())):016x}"


GOLDEN = {
    (0, 0, 0): "bf5dab3fff5fffaa", (0, 0, 8): "a4c38b8fead9f72d", (1, 2, 5): "efc3745bc9bbcbdf",
    (2, 3, 39): "6dfebfabfe8fe3d7",
}  # fmt: skip
GOLDEN_SUM = "f056b7370cbe797046271a5a2c14899e8e38f19760b597b7861498dad17a2aab"


@on_every_backend
def test_the_golden_mask(backend):
    """(3, 4, 40, 64) entries: four rows in full, key 0 in the lowest bit, and a sum over all."""
    kept = shown_by_probs(backend, (3, 4, 40, 64))
    assert {place: bits(kept[place]) for place in GOLDEN} == GOLDEN
    assert hashlib.sha256(np.packbits(kept.numpy().ravel()).tobytes()).hexdigest() == GOLDEN_SUM


def shown_by_attention(backend: str, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """What the forward kept, and what the gradients of v and of k say that it kept: bools (B, H, Sq, Sk)."""
    batch, heads, rows, keys = shape
    q, k = zeros(backend, batch, heads, rows, 16, gradient=True), zeros(backend, batch, heads, keys, 16, gradient=True)
    v = torch.eye(keys, device=DEVICE[backend]).expand(batch, heads, keys, keys).contiguous().requires_grad_()
    out = hw.attention(q, k, v, dropout=CHANCE, dropout_seed=SEED, backend=backend)
    (dv,) = torch.autograd.grad(out, v, torch.eye(rows, keys, device=out.device).expand_as(out))
    # dv_j is column j of (P ∘ D)ᵀ dO, of the first `keys` rows: dO is the identity as far as it goes.
    from_dv = dv.detach().transpose(-1, -2)[:, :, : min(rows, keys)] != 0
    return out.detach().cpu() != 0, from_dv.cpu(), torch.isfinite(dv).all().cpu()


@on_every_backend
def test_forward_and_backward_drop_the_same_entries(backend):
    shape = (2, 3, 100, 90)
    expected = oracle.kept(CHANCE, SEED, shape, torch.device("cpu"))
    forward, backward, finite = shown_by_attention(backend, shape)
    assert finite
    assert torch.equal(forward, expected)
    assert torch.equal(backward, expected[:, :, :90])


@pytest.mark.skipif("triton" not in RUNNABLE, reason="for a GPU, or Triton's interpreter (TRITON_INTERPRET=1)")
@pytest.mark.parametrize("tile", [(16, 16), (32, 16), (16, 64), (64, 32)])
def test_triton_tiles_of_any_size_drop_the_same_entries(tile):
    expected = oracle.kept(CHANCE, SEED, (1, 2, 75, 70), torch.device("cpu"))
    forced = [
        tile_sizes.forced(kernel, AttentionTile(*tile, warps=4, stages=1))
        for kernel in ("attention_forward", "attention_backward_queries", "attention_backward_keys")
    ]
    with forced[0], forced[1], forced[2]:
        forward, backward, _ = shown_by_attention("triton", (1, 2, 75, 70))
    assert torch.equal(forward, expected)
    assert torch.equal(backward, expected[:, :, :70])


@pytest.mark.parametrize(("rows", "lanes", "keys", "unroll"), [(4, 4, 32, 8), (2, 8, 12, 4), (1, 4, 5, 1)])
def test_webgpu_tiles_of_any_size_drop_the_same_entries(rows, lanes, keys, unroll):
    """Also where a run of keys begins at an odd one."""
    window, q, k = (30, 20), zeros("webgpu", 1, 2, 61, 16), zeros("webgpu", 1, 2, 61, 16)
    v = torch.eye(61).expand(1, 2, 61, 61).contiguous()
    flags = {"window": window, "dropout": CHANCE, "dropout_seed": SEED}
    expected = oracle.attention_probs(q, k, **flags) != 0
    with tiles.forced("attention_forward", tiles.ForwardTile(rows, lanes, 64, keys, unroll)):
        out = hw.attention(q, k, v, **flags, backend="webgpu")
    assert torch.equal(out != 0, expected)


@on_every_backend
def test_a_packed_call_drops_what_the_padded_one_drops(backend):
    lengths, heads, longest = [50, 3, 0, 77], 2, 77
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, heads, longest, 16, device=DEVICE[backend]) for _ in range(3))
    of_batch = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    flags = {"causal": True, "dropout": CHANCE, "dropout_seed": SEED, "backend": backend}
    padded = hw.attention(q, k, v, q_lengths=of_batch, kv_lengths=of_batch, **flags)

    def packed(x: Tensor) -> Tensor:
        return torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])

    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=q.device)
    found = hw.attention_varlen(packed(q), packed(k), packed(v), cu, cu, longest, longest, **flags)
    torch.testing.assert_close(
        found, packed(padded), rtol=1e-5, atol=1e-6
    )  # another entry would be off by 0.01 and more


@on_every_backend
def test_the_share_of_what_is_kept_and_its_scale(backend):
    shape = (2, 2, 128, 128)
    for chance in (0.1, 0.5):
        q = zeros(backend, *shape[:3], 16)
        probs = hw.attention_probs(q, q, dropout=chance, dropout_seed=7, backend=backend).cpu()
        count = probs.numel()
        dropped = int((probs == 0).sum())
        assert abs(dropped - chance * count) < 5 * math.sqrt(count * chance * (1 - chance))
        kept = probs[probs != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / 128 / (1 - chance)), rtol=1e-6, atol=0)


def test_neighbours_batches_heads_and_seeds_are_independent():
    """Shares of agreement are those of independent draws: 1 - 2 p (1 - p) is 0.58 here. Five deviations of 65536 draws."""
    shape, chance = (2, 2, 256, 256), CHANCE
    kept = oracle.kept(chance, SEED, shape, torch.device("cpu"))
    other = oracle.kept(chance, SEED + 1, shape, torch.device("cpu"))
    far = oracle.kept(chance, SEED + 2**32, shape, torch.device("cpu"))
    own = kept[0, 0]
    expected, allowed = 1 - 2 * chance * (1 - chance), 5 * math.sqrt(0.58 * 0.42 / 65536)
    pairs = [(own, x) for x in (kept[1, 0], kept[0, 1], kept[1, 1], other[0, 0], far[0, 0], own.T)]
    # All entries of one counter, and their neighbours.
    pairs += [
        (own[: 256 - di, : 256 - dj], own[di:, dj:]) for di in (0, 1, 8, 16) for dj in (0, 1, 8, 9, 16) if di or dj
    ]
    for a, b in pairs:
        assert abs(float((a == b).float().mean()) - expected) < allowed * math.sqrt(own.numel() / a.numel())
    assert not any(torch.equal(a, b) for a, b in pairwise(own))


@on_every_backend
def test_an_int_and_a_tensor_are_the_same_seed(backend):
    shape = (1, 2, 33, 40)
    found = shown_by_probs(backend, shape, seed=-5)
    for seed in (torch.tensor([-5]), torch.tensor(-5), torch.tensor([[9], [-5]])[1:]):
        assert torch.equal(shown_by_probs(backend, shape, seed=seed.to(DEVICE[backend])), found)
    assert not torch.equal(shown_by_probs(backend, shape, seed=-6), found)
    assert not torch.equal(shown_by_probs(backend, shape, seed=-5 + 2**32), found)


@on_every_backend
def test_rates_at_the_ends(backend):
    """Below 2^-17 nothing is dropped; the highest rate keeps one of 65536 entries."""
    assert shown_by_probs(backend, (1, 2, 64, 64), chance=2.0**-18).all()
    kept = shown_by_probs(backend, (1, 4, 128, 128), chance=1 - 2.0**-30)
    assert torch.equal(kept, oracle.kept(1 - 2.0**-30, SEED, (1, 4, 128, 128), torch.device("cpu")))
    assert kept.sum() < 20


# ------------------------------------------------------------------------------------------------- where a seed comes from


def inputs(backend: str, gradient: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, 2, 40, 16, device=DEVICE[backend]).requires_grad_(gradient) for _ in range(3)]


@on_every_backend
def test_without_a_seed_pytorchs_generator_decides(backend):
    q, k, v = inputs(backend)
    torch.manual_seed(3)
    first, second = (hw.attention(q, k, v, dropout=0.5, backend=backend) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(hw.attention(q, k, v, dropout=0.5, backend=backend), first)
    torch.manual_seed(3)
    seed = torch.randint(0, 2**63 - 1, (1,), device=q.device)
    assert torch.equal(hw.attention(q, k, v, dropout=0.5, dropout_seed=seed, backend=backend), first)


def test_no_number_is_drawn_where_none_is_needed():
    q, k, v = inputs("cpu")
    before = torch.get_rng_state()
    hw.attention(q, k, v)
    hw.attention(q, k, v, dropout=0.0, dropout_seed=4)
    hw.attention(q, k, v, dropout=0.5, dropout_seed=4)
    with pytest.raises(ValueError, match="dropout"):
        hw.attention(q, k, v, dropout=1.5)
    assert torch.equal(torch.get_rng_state(), before)


@on_every_backend
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_drops_the_same(backend, reentrant):
    q, k, v = inputs(backend, gradient=True)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, dropout=0.4, causal=True, backend=backend).square()

    torch.manual_seed(9)
    plain = torch.autograd.grad(forward(q, k, v).sum(), (q, k, v))
    torch.manual_seed(9)
    out = checkpoint(forward, q, k, v, use_reentrant=reentrant)
    out.sum().backward()
    for x, expected in zip((q, k, v), plain, strict=True):
        assert torch.equal(x.grad, expected)


def test_a_seed_that_was_changed_before_backward_is_noticed():
    q, k, v = inputs("cpu", gradient=True)
    seed = torch.tensor([5])
    out = hw.attention(q, k, v, dropout=0.4, dropout_seed=seed)
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@on_every_backend
@pytest.mark.parametrize("gradient", [False, True])
def test_a_new_seed_is_no_new_kind_of_call(backend, gradient):
    q, k, v = inputs(backend, gradient)

    def call(seed: int | Tensor | None) -> None:
        out = hw.attention(q, k, v, dropout=0.4, dropout_seed=seed, backend=backend)
        if gradient:
            out.sum().backward()

    call(1)
    known = dict(dense._forward._entries), dict(dense._backward._entries)
    for seed in (2, 3, -7, torch.tensor([11], device=q.device), None, None):
        call(seed)
    assert known == (dict(dense._forward._entries), dict(dense._backward._entries))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, by its own compiler
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dropout_seed", [None, 17])
def test_compiled(dropout_seed, compiler):
    """The forward and the backward of one compiled call use one seed, whichever the compiler's own generator gives."""
    q, k = (zeros("cpu", 1, 2, 40, 16, gradient=True) for _ in range(2))
    eye = torch.eye(40).expand(1, 2, 40, 40).contiguous().requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, dropout=0.4, dropout_seed=dropout_seed)

    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    out = compiled(q, k, eye)
    (dv,) = torch.autograd.grad(out, eye, torch.eye(40).expand_as(out))
    assert torch.equal(out != 0, dv.transpose(-1, -2) != 0)
    again = compiled(q, k, eye)
    assert torch.equal(again, out) == (dropout_seed is not None)
    if dropout_seed is not None:
        assert torch.equal(out, call(q, k, eye))


def test_transforms():
    q, k, v = inputs("cpu")
    flags = {"dropout": 0.4, "dropout_seed": 3}
    grad = torch.func.grad(lambda q: hw.attention(q, k, v, **flags).square().sum())(q)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(hw.attention(leaf, k, v, **flags).square().sum(), leaf)
    torch.testing.assert_close(grad, expected)
    many = torch.stack([q, 2 * q])
    mapped = torch.func.vmap(lambda q: hw.attention(q, k, v, **flags))(many)
    torch.testing.assert_close(mapped, torch.stack([hw.attention(x, k, v, **flags) for x in many]))
    drawn = torch.func.vmap(lambda q: hw.attention(q, k, v, dropout=0.4), randomness="different")(torch.stack([q, q]))
    assert not torch.equal(drawn[0], drawn[1])


def test_an_explicit_backward_needs_the_seed():
    q, k, v = inputs("cpu")
    out, lse = hw.attention(q, k, v, dropout=0.4, dropout_seed=3, return_lse=True)
    with pytest.raises(ValueError, match="dropout_seed is None; it needs the seed of the forward"):
        hw.attention_backward(out, q, k, v, out, lse, dropout=0.4)
    with pytest.raises(ValueError, match="dropout_seed is None"):
        hw.attention_probs_backward(out, out, q, k, dropout=0.4)


def test_webgpu_arrays_take_a_seed_from_the_cpu():
    from headwise.webgpu import array

    q, k, v = inputs("cpu")
    on_gpu = [array(x).requires_grad_() for x in (q, k, v)]
    for seed in (5, torch.tensor([5]), array(torch.tensor([5]))):
        out = hw.attention(*on_gpu, dropout=0.4, dropout_seed=seed)
        torch.testing.assert_close(
            out.torch(), hw.attention(q, k, v, dropout=0.4, dropout_seed=5), rtol=1e-4, atol=1e-5
        )


def test_webgpu_arrays_draw_a_seed_from_their_own_generator():
    """As CUDA tensors do: on the GPU, so that a captured step draws again."""
    from headwise.webgpu import array

    q, k, v = (array(x) for x in inputs("cpu"))
    torch.manual_seed(4)
    first, second = (hw.attention(q, k, v, dropout=0.4).torch() for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(hw.attention(q, k, v, dropout=0.4).torch(), first)
    assert not torch.equal(first, second)


def test_explain_says_why_the_hopper_kernels_are_not_used():
    q, k, v = (torch.empty(2, 16, 4096, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    from headwise.backends.triton import hopper
    from headwise.ops.attention._arguments import Attention

    flags = dense._check("attention", q, k, v, *[None] * 7, True, None, None, None, True, 0.0).flags
    args = Attention(q, k, v, *[None] * 7, flags)
    assert hopper.covers_forward(args) is None
    assert hopper.covers_backward(args) is None
    dropping = args._replace(flags=flags._replace(dropout=0.1), dropout_seed=torch.empty(1, device="meta"))
    assert "drops no probabilities" in str(hopper.covers_forward(dropping))
    assert "drops no probabilities" in str(hopper.covers_backward(dropping))


def test_rows_of_a_part_are_those_of_the_whole():
    """On the CPU, `attention_probs` asks for rows anywhere, attention for rows in a row."""
    from headwise.backends.cpu.dropout import Dropout, kept, kept_of_rows

    whole = kept(Dropout(11, 20000, 1.5, batch=3), 6, (0, 60), (0, 70))
    part = Dropout(11, 20000, 1.5, batch=3, head=2, row=21, key=5)
    rows = torch.tensor([0, 9, 30, 7])
    assert torch.equal(kept_of_rows(part, 3, rows, 50), whole[2:5, rows + 21, 5:55])

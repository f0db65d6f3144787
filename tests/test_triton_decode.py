"""Decoding in Triton's interpreter: who computes which splits, who merges, and the counters by which it knows.

Without the interpreter there is nothing to run here; tests/gpu has the same on a GPU.
"""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise.config import settings

if not settings.triton_interpret:
    pytest.skip("for Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from headwise.backends.triton import decode
from headwise.backends.triton.gpu import Interpreter


@pytest.fixture
def kept(monkeypatch):
    """One array of counters for all calls, as on a GPU."""
    counters = torch.zeros(64, dtype=torch.int32)
    asked = []

    def zeros(self, count):
        asked.append(count)
        assert count <= counters.numel()
        return counters

    monkeypatch.setattr(Interpreter, "counters", zeros)
    monkeypatch.setattr(decode, "splits_of_a_program", lambda splits, tiles, processors: 1)
    return counters, asked


def call(batch=2, heads=6, key_heads=2, queries=1, capacity=300, dim=16, splits=4, **others):
    generator = torch.Generator().manual_seed(batch + 10 * heads + splits)
    q = torch.randn(batch, heads, queries, dim, generator=generator)
    k, v = (torch.randn(batch, key_heads, capacity, dim, generator=generator) for _ in range(2))
    lengths = torch.tensor([capacity, 37, 0, 5][:batch], dtype=torch.int32)
    arguments = (q, k, v, lengths)
    both = [
        hw.attention_decode(*arguments, num_splits=splits, return_lse=True, backend=backend, **others)
        for backend in ("triton", "cpu")
    ]
    return both


def test_counters_are_zero_after_every_call(kept):
    counters, asked = kept
    for shape in ({}, {"batch": 4, "splits": 7}, {"heads": 2}, {"queries": 3}, {"batch": 1, "splits": 3}, {}):
        (out, lse), (expected, expected_lse) = call(**shape)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
        assert not counters.any()
    assert len(asked) == 6


def test_a_counter_that_is_not_zero_would_be_noticed(kept):
    counters, _ = kept
    counters += 1
    (out, _), (expected, _) = call()
    assert not torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("sink", [False, True])
def test_both_ways_to_merge_give_the_same_bits(kept, monkeypatch, sink):
    _, asked = kept
    others = {"sink": torch.randn(6)} if sink else {}
    for shape in ({}, {"splits": 19, "capacity": 1300}, {"queries": 4, "window": (30, 0)}):
        (out, lse), _ = call(**shape, **others)
        assert len(asked) == 1
        with monkeypatch.context() as patch:
            patch.setattr(decode, "merges_itself", lambda *_: False)
            (again, again_lse), _ = call(**shape, **others)
        assert len(asked) == 1
        assert torch.equal(out, again)
        assert torch.equal(lse, again_lse)
        asked.clear()


@pytest.mark.parametrize("sink", [False, True])
def test_however_many_splits_a_program_has_the_bits_are_the_same(kept, monkeypatch, sink):
    others = {"sink": torch.randn(6)} if sink else {}
    shapes = (
        {"splits": 11, "capacity": 700},
        # Seven bundles: whoever made bundles of bundles would add up in another order from the sixth on.
        {"batch": 3, "splits": 26, "capacity": 26 * 64},
        {"queries": 4, "window": (30, 0)},
    )
    for shape in shapes:
        results = []
        for each in (1, decode.BUNDLE, shape.get("splits", 4)):
            for itself in (True, False):
                monkeypatch.setattr(decode, "splits_of_a_program", lambda splits, tiles, processors, n=each: n)
                monkeypatch.setattr(decode, "merges_itself", lambda *_, itself=itself: itself)
                result, expected = call(**shape, **others)
                results.append(result)
                torch.testing.assert_close(result[0], expected[0], atol=1e-5, rtol=1e-5)
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])


def latent(heads=6, capacity=300, splits=4, batch=2, **others):
    """Decoding whose values are the first 16 numbers of the keys, in the same memory; and where they are a copy."""
    generator = torch.Generator().manual_seed(heads)
    q, k = (torch.randn(*shape, 24, generator=generator).bfloat16() for shape in ((2, heads), (2, 1, capacity)))
    lengths = torch.tensor([capacity, 37], dtype=torch.int32)
    q, k, lengths = q[:batch], k[:batch], lengths[:batch]
    values = k[..., :16]
    return [
        hw.attention_decode(q, k, v, lengths, num_splits=splits, return_lse=True, backend=backend, **others)
        for v, backend in ((values, "triton"), (values.clone(), "triton"), (values, "cpu"))
    ]


@pytest.mark.parametrize("heads", [6, 40])
def test_values_in_the_keys_are_read_with_them(kept, heads, monkeypatch):
    """40 rows have a tile of 32 or 64, whose program has one split and no bundles."""
    seen = []
    launch = Interpreter.launch

    def watched(self, kernel, grid, tensors, numbers=(), constants=(), **options):
        if kernel is decode.decode_kernel:
            seen.append((constants[0].BLOCK_REST, constants[0].SINGLE))
        return launch(self, kernel, grid, tensors, numbers, constants, **options)

    monkeypatch.setattr(Interpreter, "launch", watched)
    (out, lse), (copied, copied_lse), (expected, expected_lse) = latent(heads)
    assert seen == [(16, heads > 16), (0, False)]
    for found, found_lse in ((out, lse), (copied, copied_lse)):
        torch.testing.assert_close(found.float(), expected.float(), atol=2**-7, rtol=2**-7)
        torch.testing.assert_close(found_lse, expected_lse, atol=1e-5, rtol=1e-5)
    (alone, alone_lse), *_ = latent(heads, batch=1)
    assert torch.equal(alone, out[:1])
    assert torch.equal(alone_lse, lse[:1])


def test_programs_have_as_many_splits_as_leave_enough_programs():
    assert [decode.splits_of_a_program(16, tiles, 132) for tiles in (8, 49, 50, 197, 198, 512)] == [1, 1, 4, 4, 16, 16]
    assert decode.splits_of_a_program(1, 8, 132) == 1


def test_many_partials_are_merged_by_a_kernel_of_their_own(kept):
    _, asked = kept
    (out, _), (expected, _) = call(batch=1, heads=8, key_heads=1, capacity=2100, dim=128, splits=32)
    assert not asked
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)

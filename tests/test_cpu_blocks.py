"""The CPU backend: seams between blocks, rows that do not exist, and what a record keeps.

Attention is cut into blocks of hundreds of rows and keys; with blocks of a few, small cases cross every seam.
"""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import weakref

import pytest
import torch

import headwise as hw
from headwise import testing
from headwise.backends.cpu import attention_flash, attention_mask, attention_tiled, decode
from headwise.backends.cpu.recorder import record
from headwise.backends.cpu.threads import in_threads
from headwise.cases import SUITES
from headwise.ops.softmax import Softmax

CASES = [
    (SUITES[op], case)
    for op in ("attention", "attention_varlen", "attention_decode")
    for case in SUITES[op].cases
    if "quick" in case.tags
]


@pytest.mark.parametrize("gradient_of_lse", [True, False], ids=["tiles", "flash"])
@pytest.mark.parametrize(("suite", "case"), CASES, ids=[f"{s.op}-{c.name}" for s, c in CASES])
def test_seams_between_blocks(suite, case, gradient_of_lse, monkeypatch):
    monkeypatch.setattr(attention_tiled, "_TILE_ROWS", 16)
    monkeypatch.setattr(attention_tiled, "_TILE_KEYS", 24)
    monkeypatch.setattr(attention_tiled, "_SCORES_PER_THREAD", 1)
    monkeypatch.setattr(attention_flash, "_BAND_ROWS", 13)
    for name, value in {
        "_TILE": 8,
        "_SUMMED_KEYS": 8,
        "_SMALLEST_OPEN": 16,
        "_BAND_ROWS": 13,
        "_MASK_ELEMENTS": 400,
    }.items():
        monkeypatch.setattr(attention_mask, name, value)
    monkeypatch.setattr(attention_flash, "_SMALLEST_FULL", 5)
    monkeypatch.setattr(decode, "_KEYS_AT_ONCE", 7)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        results = testing.measure(
            suite, case, dtype=torch.float32, backend="cpu", without_gradient=() if gradient_of_lse else ("lse",)
        )
    finally:
        torch.set_num_threads(before)
    failures = [str(r) for r in results if not r.ok]
    assert not failures, "\n".join(failures)


LENGTHS = [40, 0, 23]
FLAGS = [{}, {"softcap": 3.0}, {"bias": torch.randn(40, 40)}, {"mask": torch.rand(40, 40) < 0.2}, {"return_lse": False}]


def _padded_inputs():
    """q, k, v, sink, and the gradients of out and lse."""
    maker = testing.Maker(torch.float32, torch.device("cpu"), seed=3)
    inputs = [*(maker.normal(3, heads, 40, 16) for heads in (4, 2, 2)), maker.normal(4)]
    return inputs, [maker.normal(3, 4, 40, 16), maker.normal(3, 4, 40)]


def _with_gradients(call, inputs, grads):
    leaves = [x.requires_grad_() for x in inputs]
    outputs = call(*leaves)
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads[: len(outputs)], allow_unused=True)]


def _padded(inputs, grads, return_lse=True, **flags):
    def call(q, k, v, sink):
        n = torch.tensor(LENGTHS)
        found = hw.attention(q, k, v, sink=sink, q_lengths=n, kv_lengths=n, causal=True, return_lse=return_lse, **flags)
        return found if return_lse else (found,)

    return _with_gradients(call, inputs, grads)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "".join(flags))
def test_what_does_not_exist_changes_nothing(flags):
    clean, (inputs, grads) = _padded(*_padded_inputs(), **flags), _padded_inputs()
    for b, n in enumerate(LENGTHS):
        for x in (*inputs[:3], *grads):
            x[b, :, n:] = math.nan
    for ours, poisoned in zip(clean, _padded(inputs, grads, **flags), strict=True):
        assert torch.equal(ours, poisoned)
        assert not ours.isnan().any()


def test_a_right_padded_batch_has_the_bits_of_the_packed_call():
    def packed(x):
        return x if x.dim() == 1 else torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(LENGTHS)])

    def call(q, k, v, sink):
        n = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
        return hw.attention_varlen(q, k, v, n, n, 40, 40, sink=sink, causal=True, return_lse=True)

    inputs, (out_grad, lse_grad) = _padded_inputs()
    out, lse, *found = _with_gradients(call, list(map(packed, inputs)), [packed(out_grad), packed(lse_grad).t()])
    for ours, padded in zip((out, lse.t(), *found), _padded(*_padded_inputs()), strict=True):
        assert torch.equal(ours, packed(padded))


@pytest.mark.parametrize("bad", [-1, 41, 2**31 - 1])
@pytest.mark.parametrize("name", ["q_lengths", "kv_starts", "kv_lengths"])
def test_a_length_that_makes_no_sense_is_nan_for_its_entry_alone(name, bad):
    def call(value):
        return _with_gradients(
            lambda q, k, v, sink: hw.attention(q, k, v, **{name: torch.tensor([40, value, 11])}, return_lse=True),
            *_padded_inputs(),
        )

    for good, found in zip(call(40)[:5], call(bad)[:5], strict=True):
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], good[[0, 2]])


def test_a_record_keeps_no_tensor_alive():
    x = torch.randn(3, 4)
    run, seen = record(lambda args: args.x * 2, Softmax(x)), weakref.ref(x)
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    del x
    gc.collect()
    assert seen() is None


SHORT = [3, 5, 3, 0, 5, 5, 3, 3, 1, 300, 5]  # some of one length side by side, some apart, one too long to be gathered
SHORT_KEYS = [4, 5, 4, 2, 5, 5, 4, 4, 0, 300, 7]


@pytest.mark.parametrize("flags", [{}, {"softcap": 3.0}, {"dropout": 0.3, "dropout_seed": 5}], ids=["", "cap", "drop"])
def test_short_sequences_have_the_bits_of_calls_of_their_own(flags):
    maker = testing.Maker(torch.float32, torch.device("cpu"), seed=4)
    rows, keys = ([0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in (SHORT, SHORT_KEYS))
    inputs = [maker.normal(n, heads, 16) for n, heads in ((rows[-1] + 2, 4), (keys[-1], 2), (keys[-1], 2))]
    inputs.append(maker.normal(4))
    grads = [maker.normal(rows[-1] + 2, 4, 16), maker.normal(4, rows[-1] + 2)]

    def call(q, k, v, sink, of_q=rows, of_k=keys):
        of_q, of_k = (torch.tensor(bounds, dtype=torch.int32) for bounds in (of_q, of_k))
        return hw.attention_varlen(
            q, k, v, of_q, of_k, 300, 300, sink=sink, causal=True, return_lse=True, **flags
        )  # fmt: skip

    out, lse, dq, dk, dv, dsink = _with_gradients(call, inputs, grads)
    assert (out[rows[-1] :] == 0).all()
    assert (lse[:, rows[-1] :] == -math.inf).all()
    dsinks = torch.zeros_like(dsink)
    for i in range(len(SHORT)):
        of_q, of_k = slice(*rows[i : i + 2]), slice(*keys[i : i + 2])

        # The sequences before it without tokens: dropout counts sequences.
        def alone(q, k, v, sink, i=i):
            return call(q, k, v, sink, [0] * (i + 1) + [SHORT[i]], [0] * (i + 1) + [SHORT_KEYS[i]])

        part = [x.detach()[s] for x, s in zip(inputs[:3], (of_q, of_k, of_k), strict=True)] + [inputs[3].detach()]
        found = _with_gradients(alone, part, [grads[0][of_q], grads[1][:, of_q]])
        for ours, theirs in zip((out[of_q], lse[:, of_q], dq[of_q], dk[of_k], dv[of_k]), found, strict=False):
            assert torch.equal(ours, theirs), i
        dsinks += found[5]
    torch.testing.assert_close(dsink, dsinks)


_FORKS = """
import os, time, torch
from headwise.backends.cpu.threads import in_threads
torch.set_num_threads(3)
def shares():
    seen = []
    def work(thread, threads):
        time.sleep(0.1)  # so that no thread has the share of another
        seen.append((thread, threads))
    in_threads(work, most=5)
    return sorted(seen) == [(0, 3), (1, 3), (2, 3)]
assert shares()
time.sleep(0.2)  # until the threads wait for work
child = os.fork()
if child == 0:
    os._exit(0 if shares() else 1)
assert os.waitpid(child, 0)[1] == 0
assert shares()
"""


def test_threads_are_there_again_after_a_fork():
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKS], timeout=30, check=True)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_a_thread_reaches_the_caller(failing):
    def work(thread, threads):
        if thread == failing:
            raise ArithmeticError(f"{thread} of {threads}")
        done.append(thread)

    done, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ArithmeticError, match=f"{failing} of 2"):
            in_threads(work, most=2)
        assert done == [1 - failing]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("length", [3, 20000])
def test_softmax_of_rows_that_see_nothing_beside_rows_of_nan(length):
    x = torch.randn(4, length)
    x[1], x[2, 0], x[3, -1] = -math.inf, math.nan, math.inf
    probs = hw.softmax(x, backend="cpu")
    assert (probs[1] == 0).all()
    assert probs[2].isnan().all()
    assert probs[3].isnan().any()
    torch.testing.assert_close(probs[0].double(), x[0].double().softmax(-1), rtol=1e-6, atol=0)


def _dense_and_masked(mask, hidden_value):
    maker = testing.Maker(torch.float32, torch.device("cpu"), seed=8)
    q, k, v = (maker.normal(2, 4, 600, 16) for _ in range(3))
    hidden = ~mask.expand(2, 4, 600, 600).any(2)
    for x in (k, v):
        x.masked_fill_(hidden[..., None], hidden_value)
    grads = [maker.normal(2, 4, 600, 16)]
    return _with_gradients(lambda *x: (hw.attention(*x, mask=mask, backend="cpu"),), [q, k, v], grads)


@pytest.mark.parametrize("shape", [(2, 1, 600, 600), (1, 4, 600, 600), (600, 600), (2, 1, 1, 600)])
def test_hidden_tiles_are_skipped_and_hidden_keys_count_for_nothing(shape, monkeypatch):
    """Two documents, the last keys hidden from all; one row that sees nothing; each batch entry and head its own."""
    document = torch.arange(600) // 300
    mask = (document[:, None] == document) & (torch.arange(600) < 570)
    mask = mask[:1] if shape[-2] == 1 else mask
    mask = mask.expand(shape).clone()
    if len(shape) == 4:
        mask[-1, -1, ..., :150] = False  # the last entry or head sees less
    if shape[-2] > 1:
        mask[..., 17, :] = False
    scores = []
    kernel = attention_flash._kernel

    def counted(q, k, v, *args, **options):
        scores.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return kernel(q, k, v, *args, **options)

    monkeypatch.setattr(attention_flash, "_kernel", counted)
    clean = _dense_and_masked(mask, 0.0)
    assert sum(scores) < (0.8 if shape[-2] > 1 else 1.0) * 8 * 600 * 600
    for ours, poisoned in zip(clean, _dense_and_masked(mask, math.nan), strict=True):
        assert torch.equal(ours, poisoned)
        assert not ours.isnan().any()
    if shape[-2] > 1:
        assert (clean[0][..., 17, :] == 0).all()

"""Bad input is refused before any kernel runs, by an error that names the argument, what it got and what it needs.

The calls themselves are a table, in `bad_calls` and `bad_dropout_calls`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from backends_under_test import DEVICE, RUNNABLE
from bad_calls import BAD_VALUES as VALUES
from bad_calls import F32, I32, I64, Inputs, good_calls, paged, pages, word
from bad_calls import TABLE as CALLS
from bad_dropout_calls import DROPOUT
from bad_linear_loss_calls import LINEAR, LINEAR_VALUES
from bad_pointwise_calls import POINTWISE, POINTWISE_VALUES
from torch import Tensor

import headwise as hw
from headwise.backends import registry
from headwise.config import settings

TABLE = [*CALLS, *DROPOUT, *LINEAR, *POINTWISE]
BAD_VALUES = [*VALUES, *LINEAR_VALUES, *POINTWISE_VALUES]


@pytest.fixture
def no_launch(monkeypatch):
    def recorder(backend: str, name: str):
        return lambda args: lambda *tensors: pytest.fail(f"{name} was launched on {backend}")

    monkeypatch.setattr(registry, "recorder", recorder)


def call(op: str, m: Inputs, backend: str | None, change: dict[str, Any]) -> Any:
    return getattr(hw, op)(**{**good_calls(m)[op], "backend": backend, **change})


def test_the_table_is_long_and_names_each_call_once():
    names = [(row.op, row.name) for row in TABLE]
    assert len(names) >= 80
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("op", list(good_calls(Inputs("cpu"))))
@pytest.mark.parametrize("backend", RUNNABLE)
def test_the_good_call_behind_each_bad_one_runs(backend, op):
    m = Inputs(DEVICE[backend])
    call(op, m, backend, {})
    if op == "attention_decode":
        call(op, m, backend, paged(m))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.op}: {row.name}")
@pytest.mark.parametrize("backend", RUNNABLE)
def test_bad_call_is_refused(backend, row, no_launch):
    m = Inputs(DEVICE[backend])
    change = row.change(m)
    with pytest.raises(row.error) as caught:
        call(row.op, m, backend, change)
    message = str(caught.value)
    missing = [part for part in row.says if not re.search(word(part) if part.isidentifier() else part, message)]
    assert not missing, f"{missing} not in {message!r}"
    if "backend" not in change:
        assert message.startswith(f"{row.op}: "), message
        assert re.search("need|must", message), f"it does not say what it needs: {message!r}"


# A backend that is not there, or cannot.

BACKEND_OPS = list(good_calls(Inputs("cpu")))


@pytest.mark.parametrize("op", BACKEND_OPS)
def test_unknown_backend_names_the_known_ones(op, no_launch):
    with pytest.raises(ValueError, match=r"'quantum'.*triton.*webgpu.*cpu"):
        call(op, Inputs("cpu"), "quantum", {})


@pytest.mark.parametrize("op", BACKEND_OPS)
@pytest.mark.parametrize("name", [b.name for b in registry.BACKENDS if b.name not in RUNNABLE])
def test_backend_that_is_not_there_says_why(name, op, no_launch):
    reason = registry.availability(name)
    with pytest.raises(ValueError, match=re.escape(f"{op}: backend={name!r}")) as caught:
        call(op, Inputs("cpu"), name, {})
    assert reason in str(caught.value)
    assert "cpu" in str(caught.value).split("Backends that can", 1)[1]


def test_backend_from_use_backend_and_from_the_environment(monkeypatch, no_launch):
    with pytest.raises(ValueError, match="'quantum'"), hw.use_backend("quantum"):
        pass
    monkeypatch.setattr(settings, "backend", "quantum")
    with pytest.raises(ValueError, match="'quantum'"):
        call("attention", Inputs("cpu"), None, {})


@pytest.mark.parametrize("op", BACKEND_OPS)
def test_no_backend_takes_tensors_of_that_device(op, monkeypatch, no_launch):
    rows = tuple(row._replace(automatic_for=(), devices=("abacus",)) for row in registry.BACKENDS)
    monkeypatch.setattr(registry, "BACKENDS", rows)
    with pytest.raises(ValueError, match=rf"{op}: no backend .* on device 'cpu'.* it takes tensors on 'abacus'"):
        call(op, Inputs("cpu"), None, {})


@pytest.mark.parametrize("op", ["attention", "attention_varlen", "attention_decode", "attention_backward"])
def test_head_dim_beyond_a_backend_names_one_that_can(op, monkeypatch, no_launch):
    """A backend says in `supports` what it cannot; the sizes it judges by are the contract's letters."""

    def supports(judged: registry.Call) -> str | None:
        return f"D is {judged.sizes['D']} and it takes D up to 7" if judged.sizes["D"] > 7 else None

    launchers = dict.fromkeys(("attention_forward", "attention_backward", "attention_decode"), "attention")
    narrow = type("narrow", (), {"LAUNCHERS": launchers, "DTYPES": (F32,)})
    narrow.unavailable, narrow.supports = staticmethod(lambda: None), staticmethod(supports)
    row = registry.Backend("narrow", (), ("cpu",), narrow)
    monkeypatch.setattr(registry, "BACKENDS", (row, *registry.BACKENDS))
    monkeypatch.setattr(registry, "_missing", dict(registry._missing))
    monkeypatch.setattr(registry, "_modules", dict(registry._modules))
    with pytest.raises(ValueError, match=rf"{op}: backend='narrow'.*D is 8 .* up to 7.*Backends that can: .*cpu"):
        call(op, Inputs("cpu"), "narrow", {})


# Values on the device: loud without being read back, and read back in validate mode.


@pytest.mark.parametrize("row", BAD_VALUES, ids=lambda row: f"{row.op}: {row.name}")
@pytest.mark.parametrize("backend", RUNNABLE)
def test_validate_mode_names_the_first_bad_value(backend, row, monkeypatch, no_launch):
    monkeypatch.setattr(settings, "validate", True)
    m = Inputs(DEVICE[backend])
    with pytest.raises(row.error) as caught:
        call(row.op, m, backend, row.change(m))
    message = str(caught.value)
    missing = [part for part in row.says if not re.search(word(part) if part.isidentifier() else part, message)]
    assert not missing, f"{missing} not in {message!r}"


@pytest.mark.parametrize("op", list(good_calls(Inputs("cpu"))))
@pytest.mark.parametrize("backend", RUNNABLE)
def test_validate_mode_lets_good_values_pass(backend, op, monkeypatch):
    monkeypatch.setattr(settings, "validate", True)
    m = Inputs(DEVICE[backend])
    call(op, m, backend, {})
    if op == "attention":
        call(op, m, backend, {"kv_lengths": m.i(0, 7), "q_lengths": m.i(5, 0), "kv_starts": m.i(7, 0)})
    if op == "attention_decode":
        call(op, m, backend, {"lengths": m.i(0, 7), "kv_starts": m.i(7, 0)})
        # Nobody needs a page behind the length, or before the start.
        call(op, m, backend, pages((8, -1), (99, 3))(m) | {"lengths": m.i(4, 8), "kv_starts": m.i(0, 4)})
    if op == "attention_varlen":
        call(op, m, backend, {"cu_seqlens_q": m.i(0, 0, 4), "cu_seqlens_k": m.i(0, 5, 5)})


def nan_rows(x: Tensor, dim: int = 0) -> list[bool]:
    """For each index of ``dim``: True where everything is NaN, False where nothing is; anything else fails."""
    bad = x.isnan().movedim(dim, 0).flatten(1)
    assert torch.equal(bad.all(1), bad.any(1)), "NaN in a part of a row"
    return bad.all(1).tolist()


@pytest.mark.parametrize("lengths", [(7, 8), (7, -1), (7, 2**31 - 1), (7, -(2**31))], ids=str)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_length_out_of_range_gives_nan_for_its_batch_entry_alone(backend, lengths):
    m = Inputs(DEVICE[backend])
    for op, name in (
        ("attention", "kv_lengths"),
        ("attention", "q_lengths"),
        ("attention", "kv_starts"),
        ("attention_decode", "lengths"),
        ("attention_decode", "kv_starts"),
        ("attention_probs", "kv_lengths"),
        ("attention_probs", "q_lengths"),
        ("attention_probs", "kv_starts"),
    ):
        good = 5 if name == "q_lengths" else lengths[0]
        change = {name: m.i(good, lengths[1])} | ({} if op == "attention_probs" else {"return_lse": True})
        results = call(op, m, backend, change)
        for x in results if isinstance(results, tuple) else (results,):
            assert nan_rows(x) == [False, True], (op, name)


@pytest.mark.parametrize("page", [9, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_page_out_of_range_gives_nan_for_its_batch_entry_alone(backend, page):
    m = Inputs(DEVICE[backend])
    for x in call("attention_decode", m, backend, pages((0, 1), (page, 2))(m) | {"return_lse": True}):
        assert nan_rows(x) == [False, True]


@pytest.mark.parametrize(
    "bounds",
    [(1, 4, 10), (0, 4, 3), (0, 4, 11), (0, 7, 10), (-1, 4, 10), (0, 2**31 - 1, 10), (0, -(2**31), 10), (0, -5, 10)],
    ids=str,
)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_malformed_cu_seqlens_give_nan_everywhere(backend, bounds):
    m = Inputs(DEVICE[backend])
    out, lse = call("attention_varlen", m, backend, {"cu_seqlens_q": m.i(*bounds), "return_lse": True})
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("dtype", [I32, I64], ids=str)
@pytest.mark.parametrize("value", [5, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_id_or_target_out_of_range_gives_nan_for_its_row(backend, value, dtype):
    m = Inputs(DEVICE[backend])
    rows = call("embedding", m, backend, {"ids": m.i(0, value, 4, dtype=dtype)})
    assert nan_rows(rows) == [False, True, False]
    losses = call("cross_entropy", m, backend, {"targets": m.i(0, value, 4, dtype=dtype), "reduction": "none"})
    assert losses.isnan().tolist() == [False, True, False]
    _, grad = call("cross_entropy_forward_backward", m, backend, {"targets": m.i(0, value, 4, dtype=dtype)})
    assert nan_rows(grad) == [False, True, False]

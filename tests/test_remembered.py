"""Of a call like an earlier one only what differs is done again; one that differs in what counts is no such call."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.backends import registry
from headwise.backends.triton import tile_sizes
from headwise.config import settings
from headwise.ops import _remembered
from headwise.ops.attention import dense


@pytest.fixture
def checked(monkeypatch):
    """How often the arguments of `attention` were checked."""
    calls = []
    original = dense._prepare
    monkeypatch.setattr(dense, "_prepare", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    monkeypatch.setattr(_remembered, "_known", {})
    return calls


def qkv(length=5, dim=8, dtype=torch.float32):
    return [torch.randn(1, 2, length, dim, dtype=dtype) for _ in range(3)]


def test_the_same_kind_of_call_is_checked_once(checked):
    for _ in range(3):
        hw.attention(*qkv(), causal=True, window=(2, 0))
    assert len(checked) == 1


@pytest.mark.parametrize(
    "flags",
    [
        {"causal": True},
        {"window": (1, 0)},
        {"scale": 0.5},
        {"softcap": 3.0},
        {"backend": "cpu"},
        {"deterministic": True},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_other_flags_are_another_kind(checked, flags):
    inputs = qkv()
    plain = hw.attention(*inputs)
    other = hw.attention(*inputs, **flags)
    assert len(checked) == 2
    if next(iter(flags)) in ("causal", "window", "scale", "softcap"):
        assert not torch.equal(plain, other)


# Each differs from the call (q, k, v, causal=True) in one fact about one tensor.
OTHERS = {
    "shape of q, same strides": lambda q, k, v: (q[:, :, 1:], k, v),
    "shape of k and v": lambda q, k, v: (q, k[:, :, 1:], v[:, :, 1:]),
    "heads": lambda q, k, v: (q, k[:, :1], v[:, :1]),
    "strides of k": lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
    "dtype": lambda q, k, v: (q.double(), k.double(), v.double()),
    "device": lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta")),
    "type": lambda q, k, v: (torch.nn.Parameter(q, requires_grad=False), k, v),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_fact_is_another_kind(checked, name):
    q, k, v = qkv()
    hw.attention(q, k, v, causal=True)
    try:
        hw.attention(*OTHERS[name](q, k, v), causal=True)
    except registry.Unsupported:
        assert name == "device"
    assert len(checked) == 2


def test_what_is_wrong_is_found_after_what_is_right(checked):
    q, k, v = qkv()
    hw.attention(q, k, v, causal=True, window=(2, 0))
    for wrong, error, message in (
        ((q, k, v, 1, (2, 0)), TypeError, "causal is 1"),
        ((q, k, v, True, (2.0, 0)), TypeError, "left=2.0"),
        ((q, k, v, True, (True, 0)), TypeError, "left=True"),
        ((q, k, v.half(), True, (2, 0)), TypeError, "v has dtype float16"),
        ((q, k, torch.randn(1, 2, 5, 16)[..., ::2], True, (2, 0)), ValueError, "stride 2 in its last dim"),
        ((q, k[..., :4], v, True, (2, 0)), ValueError, "they need to be equal"),
        ((q, k, v[:, :, :4], True, (2, 0)), ValueError, "v has shape"),
    ):
        for _ in range(2):  # nor is what raised remembered as right
            with pytest.raises(error, match=message):
                hw.attention(*wrong[:3], causal=wrong[3], window=wrong[4])


def test_other_ops_look_at_the_shapes_of_all_their_tensors(checked):
    q, cache, lengths = torch.randn(2, 4, 8), torch.randn(2, 2, 9, 8), torch.tensor([9, 3])
    hw.attention_decode(q, cache, cache, lengths)
    with pytest.raises(ValueError, match="lengths has shape"):
        hw.attention_decode(q, cache, cache, lengths[:1])
    with pytest.raises(ValueError, match="v_cache has shape"):
        hw.attention_decode(q, cache, cache[:, :, :8], lengths)
    x, cu = torch.randn(6, 2, 8), torch.tensor([0, 6])
    hw.attention_varlen(x, x, x, cu, cu, 6, 6)
    with pytest.raises(ValueError, match="v has shape"):
        hw.attention_varlen(x, x, x[:5], cu, cu, 6, 6)
    with pytest.raises(TypeError, match="max_seqlen_q is True"):
        hw.attention_varlen(x, x, x, cu, cu, True, 6)
    hw.rms_norm(x, torch.ones(8))
    with pytest.raises(ValueError, match="weight has shape"):
        hw.rms_norm(x, torch.ones(7))


@contextmanager
def the_other_deterministic_switch():
    is_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on)


@contextmanager
def another_setting():
    before, settings.validate = settings.validate, not settings.validate
    try:
        yield
    finally:
        settings.validate = before


@contextmanager
def tables_read_again():
    tile_sizes.forget()
    yield


# What a call depends on beside its arguments; and whether after it things are as they were before it.
SURROUNDINGS = {
    "the deterministic switch": (the_other_deterministic_switch, True),
    "gradients": (torch.no_grad, True),
    "autocast": (lambda: torch.autocast("cpu"), True),
    "a backend": (lambda: registry.use_backend("cpu"), True),
    "a setting": (another_setting, False),  # who knows what else changed with it
    "a tile": (lambda: tile_sizes.forced("attention_forward", tile_sizes.Tile(16, 16, 4, 1)), False),
    "the tile tables": (tables_read_again, False),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_surroundings_are_part_of_the_kind(name):
    inputs = tuple(qkv())

    def of():
        return _remembered.kind("attention", inputs, (True,))

    change, back_again = SURROUNDINGS[name]
    before = of()
    assert of() == before
    with change():
        assert of() != before
    assert (of() == before) == back_again


def test_what_was_kept_before_a_change_is_not_found_after_another_one_at_the_same_time():
    seen = settings.changes
    settings.changed()
    kept_under = settings.changes
    # Another thread, which had looked at the settings before, comes to write only now.
    object.__setattr__(settings, "changes", seen)
    settings.changed()
    assert settings.changes not in (seen, kept_under)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "watching", [Mode, torch.profiler.profile, lambda: torch.device("meta"), torch.autograd.forward_ad.dual_level]
)
def test_who_watches_sees_the_call_itself(watching):
    inputs = tuple(qkv())
    with watching():
        assert _remembered.kind("attention", inputs, (True,)) is None


def test_what_is_not_in_memory_as_it_seems_is_no_kind():
    q, k, v = qkv()
    negative = torch.randn(1, 2, 5, 8, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    for x in (
        negative,
        torch._efficientzerotensor((1, 2, 5, 8)),
        q.to_sparse(),
        q.as_subclass(type("Own", (torch.Tensor,), {})),
    ):
        assert _remembered.kind("attention", (x, k, v), (True,)) is None


@pytest.mark.parametrize("gradient", [False, True])
def test_what_is_kept_is_no_data(checked, gradient):
    first, second = qkv(), qkv()
    if gradient:
        first, second = ([x.requires_grad_() for x in of] for of in (first, second))
    out, again = hw.attention(*first, causal=True), hw.attention(*second, causal=True)
    assert len(checked) == 1
    assert out.data_ptr() != again.data_ptr()
    for inputs, result in ((first, out), (second, again)):
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.testing.assert_close(result, expected)
        if gradient:
            sums = [torch.autograd.grad(x.sum(), inputs) for x in (result, expected)]
            torch.testing.assert_close(*sums)


@pytest.mark.parametrize("gradient", [False, True])
def test_what_is_kept_holds_no_tensor(checked, gradient):
    inputs = [x.requires_grad_(gradient) for x in qkv()]
    held = [weakref.ref(x) for x in inputs]
    hw.attention(*inputs)
    assert _remembered._known
    inputs.clear()
    gc.collect()
    assert all(ref() is None for ref in held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_call_that_was_made_before_it(checked, dtype):
    inputs = qkv(dtype=dtype)
    plain = hw.attention(*inputs)
    with torch.autocast("cpu"):
        for _ in range(2):
            assert torch.equal(hw.attention(*inputs), plain)
    assert len(checked) == 2


@pytest.mark.filterwarnings("ignore")  # it is deprecated, and says so, and more
def test_traces_are_not_remembered(checked):
    torch.jit.trace(lambda q, k, v: hw.attention(q, k, v), tuple(qkv()), check_trace=False)
    assert not _remembered._known
    torch.compile(lambda q, k, v: hw.attention(q, k, v), backend="eager", fullgraph=True)(*qkv())
    assert not _remembered._known


def test_what_cannot_be_a_key_is_checked_every_time(checked):
    for _ in range(2):
        hw.attention(*qkv(), window=[2, 0])
    assert len(checked) == 2


def test_gradients_backends_and_their_absence_are_asked_for_again(checked):
    q, k, v = qkv()
    hw.attention(q, k, v)
    assert hw.attention(q.requires_grad_(), k, v).requires_grad
    with torch.no_grad():
        assert not hw.attention(q, k, v).requires_grad
    with registry.use_backend("cpu"):
        hw.attention(q, k, v)
    registry.ask_again("webgpu")
    hw.attention(q, k, v)
    assert len(checked) == 5


def test_a_process_of_ever_new_sizes_keeps_few(checked, monkeypatch):
    monkeypatch.setattr(_remembered, "_LIMIT", 4)
    for length in range(1, 12):
        hw.attention(*qkv(length))
    assert len(checked) == 11
    assert 0 < len(_remembered._known) <= 4


def test_masks_of_any_rank_are_taken_as_they_are(checked):
    q, k, v = qkv()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = hw.attention(q, k, v, causal=True)
    for shape in ((5, 5), (1, 5, 5), (1, 1, 5, 5), (1, 2, 5, 5)):
        for _ in range(2):
            torch.testing.assert_close(hw.attention(q, k, v, mask=mask.expand(shape)), expected)

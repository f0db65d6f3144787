"""A call that was checked once is not checked again; one that differs in anything that checks look at is."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise.backends import registry
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
    [{"causal": True}, {"window": (1, 0)}, {"scale": 0.5}, {"softcap": 3.0}, {"backend": "cpu"}, {"deterministic": True}],
    ids=lambda flags: next(iter(flags)),
)
def test_other_flags_are_another_kind(checked, flags):
    inputs = qkv()
    plain = hw.attention(*inputs)
    other = hw.attention(*inputs, **flags)
    assert len(checked) == 2
    if next(iter(flags)) in ("causal", "window", "scale", "softcap"):
        assert not torch.equal(plain, other)


def test_what_is_wrong_is_found_after_what_is_right(checked):
    q, k, v = qkv()
    hw.attention(q, k, v, causal=True)
    with pytest.raises(TypeError, match="causal is 1"):
        hw.attention(q, k, v, causal=1)
    with pytest.raises(TypeError, match="v has dtype float16"):
        hw.attention(q, k, v.half(), causal=True)
    with pytest.raises(ValueError, match="stride 2 in its last dim"):
        hw.attention(q, k, torch.randn(1, 2, 5, 16)[..., ::2], causal=True)
    for _ in range(2):  # nor is what raised remembered as right
        with pytest.raises(ValueError, match="they need to be equal"):
            hw.attention(q, k[..., :4], v)


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
    assert len(_remembered._known) <= 4


def test_masks_keep_their_own_shapes(checked):
    q, k, v = qkv()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = hw.attention(q, k, v, causal=True)
    for shape in ((5, 5), (1, 5, 5), (1, 1, 5, 5), (1, 2, 5, 5)):
        for _ in range(2):
            torch.testing.assert_close(hw.attention(q, k, v, mask=mask.expand(shape)), expected)

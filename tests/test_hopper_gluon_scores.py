"""The Hopper kernels' own source, run by `gluon_on_cpu`: masks, biases and soft caps, alone and beside each other.

What nobody sees is NaN, and so are queries that see nothing.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import direct_attention as direct
import pytest
import torch
from gluon_on_cpu import as_python
from gluon_values import Value
from test_hopper_gluon import Shape, check_backward, check_forward, dense, gradients, packed
from test_hopper_interpreted import MASKS, normal

from headwise.backends.triton.hopper import backward_math, coverage

BATCH, HEADS, KEY_HEADS, ROWS, KEYS = 2, 4, 2, 200, 232
WINDOWS = {"full": (None, None), "causal": (None, 0), "window": (60, 20)}
CAPS = {64: 4.0, 80: 30.0, 96: 4.0, 128: 30.0, 160: 4.0, 192: 30.0, 256: 4.0}
BIASES = {
    "dense": (1, HEADS, ROWS, KEYS),
    "of keys": (BATCH, 1, 1, KEYS),
}


def given_scores(
    dim, window, *, mask=None, bias=None, bias_dtype=torch.bfloat16, cap=0.0, sink=False, deterministic=True
):
    """A dense call with a mask of `MASKS` or a bias of `BIASES`, and what it gives in float64."""
    mask = None if mask is None else MASKS[mask](BATCH, HEADS, ROWS, KEYS)
    if bias is not None:
        bias = normal(*BIASES[bias], seed=11, dtype=bias_dtype)
        bias[..., ::9] = -math.inf
        if bias.shape[2] > 1:
            bias[..., 50:60, :] = -math.inf
    plain = dense(
        Shape(dim, dim), window, rows=ROWS, keys=KEYS, heads=HEADS, key_heads=KEY_HEADS, batch=BATCH, sink=sink,
        deterministic=deterministic, unseen=False,
    )  # fmt: skip
    x = plain.x | ({} if bias is None else {"bias": bias})
    truth = direct.results_of(
        lambda **t: direct.attention(**t, window=window, softcap=cap or None, mask=mask), x, plain.grads, torch.float64
    )
    seen = direct.visible_keys(ROWS, KEYS, window=window).expand(BATCH, HEADS, ROWS, KEYS)
    if mask is not None:
        seen = seen & mask
    used = seen.any(2).unflatten(1, (KEY_HEADS, -1)).any(2)
    x["k"][~used] = x["v"][~used] = math.nan
    blind = ~(seen if bias is None else seen & (bias > -math.inf)).any(3)
    x["q"][blind] = plain.grads[0][blind] = math.nan
    call = plain.call._replace(mask=mask, bias=bias, flags=plain.call.flags._replace(softcap=cap))
    return plain._replace(x=x, truth=truth, call=call)


CAPPED = pytest.mark.parametrize(
    "capped", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["capped", "plain"]
)  # fmt: skip
FORWARDS = [
    (64, "per head", "full"), (64, "queries", "causal"), (80, "per head", "window"), (128, "per head", "causal"),
    (128, "padding", "full"), (128, "documents", "window"), (160, "per head", "full"), (256, "per head", "causal"),
]  # fmt: skip


@CAPPED
@pytest.mark.parametrize(("dim", "mask", "window"), FORWARDS)
def test_forward_with_a_mask(dim, mask, window, capped):
    given = given_scores(dim, WINDOWS[window], mask=mask, cap=CAPS[dim] * capped, sink=window == "causal")
    check_forward(given, coverage.masked_tile(dim), seed=dim)


@CAPPED
@pytest.mark.parametrize(
    ("dim", "bias", "mask", "window", "dtype"),
    [
        (64, "dense", None, "full", torch.bfloat16),
        (64, "of keys", None, "causal", torch.float32),
        (80, "dense", None, "window", torch.bfloat16),
        (96, "dense", "per head", "causal", torch.float32),
        (128, "dense", None, "causal", torch.bfloat16),
        (128, "of keys", "documents", "window", torch.bfloat16),
    ],
)
def test_forward_with_a_bias(dim, bias, mask, window, dtype, capped):
    given = given_scores(
        dim, WINDOWS[window], bias=bias, bias_dtype=dtype, mask=mask, cap=CAPS[dim] * capped, sink=window == "causal"
    )
    check_forward(given, coverage.biased_tile(dim, dtype.itemsize), seed=dim)


@CAPPED
@pytest.mark.parametrize(
    ("dim", "mask", "window", "deterministic"),
    [
        (64, "per head", "causal", True),
        (64, "padding", "full", False),
        (80, "per head", "window", True),
        (128, "queries", "full", True),
        (128, "documents", "causal", False),
        (160, "per head", "causal", True),
        (192, "queries", "window", False),
        (256, "per head", "full", True),
    ],
)
def test_backward_with_a_mask(dim, mask, window, deterministic, capped):
    cap = CAPS[dim] * capped
    given = given_scores(dim, WINDOWS[window], mask=mask, cap=cap, sink=window == "causal", deterministic=deterministic)
    tile = coverage.backward_tile(dim, cap > 0, masked=True)
    check_backward(given, tile._replace(unordered_from=0, banded_unordered_from=0), seed=dim)


@pytest.mark.parametrize(
    ("dim", "bias", "mask", "window", "deterministic"),
    [
        (64, "dense", None, "causal", True),
        (80, "dense", None, "window", False),
        (96, "of keys", None, "full", True),
        (128, "dense", "documents", "full", False),
        (128, "of keys", "per head", "window", True),
    ],
)
def test_backward_with_a_bias(dim, bias, mask, window, deterministic):
    given = given_scores(
        dim, WINDOWS[window], bias=bias, mask=mask, sink=window == "causal", deterministic=deterministic
    )
    tile = coverage.backward_tile(dim, False, True, masked=mask is not None)
    check_backward(given, tile._replace(unordered_from=0, banded_unordered_from=0), seed=dim)


@pytest.mark.parametrize("window", [pytest.param("causal", marks=pytest.mark.slow), "window"])
@pytest.mark.parametrize("shape", [Shape(64, 64), Shape(80, 80), Shape(160, 160), Shape(192, 128)], ids=str)
def test_packed_batches_with_a_cap_and_a_sink(shape, window):
    given = packed(shape, WINDOWS[window], sink=True, cap=4.0)
    tile = coverage.forward_tile(
        shape.dim, 4096, True, True, 9999, 132, shape.value_dim, capped=True
    )  # fmt: skip
    check_forward(given, tile, seed=1)
    tile = coverage.backward_tile(shape.dim, True, value_dim=shape.value_dim)
    check_backward(given, tile._replace(unordered_from=0, banded_unordered_from=0), seed=1)


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_the_same_bits_in_every_order_with_a_mask(dim):
    given = given_scores(dim, (None, 0), mask="per head", cap=CAPS[dim])
    tile = coverage.backward_tile(dim, True, masked=True)
    first, again = (gradients(given, tile, seed) for seed in (1, 2))
    assert all(torch.equal(again[n], first[n]) for n in first)


def test_the_slope_of_a_cap_is_finite_where_a_weight_is_less_than_a_normal_number():
    """`exp2` gives zero there; whatever makes P, its logarithm must not be that of zero."""
    weights = Value(torch.tensor([0.0, 2.0**-140, 2.0**-127, 2.0**-126, 0.5, 1.0]))
    cap = 100 * math.log2(math.e)
    with as_python():
        slope = backward_math.slope_of(weights, Value(0.0), SimpleNamespace(softcap=cap), SimpleNamespace(has_cap=True))
    expected = 1 - (torch.tensor([-126.0, -1.0, 0.0]) / cap) ** 2
    assert torch.allclose(slope.x, torch.cat([torch.zeros(3), expected]), atol=1e-6)

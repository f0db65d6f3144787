"""``F.scaled_dot_product_attention`` served by Headwise against PyTorch's own, in float64, where both have to agree to the
last few bits: what differs is meaning."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from backends_under_test import DEVICE, RUNNABLE
from torch.nn.attention import _registry as torch_registry
from torch.nn.attention import bias as torch_bias

import headwise as hw
from headwise.integrations import _alignment, _sdpa_registry, sdpa

PYTORCHS = F.scaled_dot_product_attention
ours = sdpa.scaled_dot_product_attention

SHAPES = [(6, 6), (5, 9), (9, 5), (1, 7), (7, 1), (70, 131), (131, 70), (0, 4), (4, 0)]


def normal(*shape, dtype=torch.float64, grad=False, seed=0):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(hash(shape) % 1000 + seed), dtype=torch.float64)
    return made.to(dtype).requires_grad_(grad)


def qkv(length, keys, heads=4, key_heads=None, grad=True, value_dim=6):
    key_heads = key_heads or heads
    shapes = (2, heads, length, 8), (2, key_heads, keys, 8), (2, key_heads, keys, value_dim)
    return [normal(*shape, grad=grad, seed=i) for i, shape in enumerate(shapes)]


def visible(attn_mask, length, keys, is_causal):
    """One explicit mask that says it all."""
    corner = torch.ones(length, keys, dtype=torch.bool).tril() if is_causal else torch.ones(length, keys).bool()
    if attn_mask is None:
        return corner
    if attn_mask.dtype == torch.bool:
        return attn_mask & corner
    return attn_mask.masked_fill(~corner, -torch.inf)


def same(got, wanted, inputs=(), tolerance=1e-12):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    inputs = [x for x in inputs if x is not None and x.requires_grad]
    if inputs:
        grad = normal(*wanted.shape, seed=7).to(wanted.dtype)
        # PyTorch leaves a mask over nothing out of the graph: there, no gradient is a gradient of zeros.
        options = {"allow_unused": True, "materialize_grads": True}
        for mine, theirs in zip(*(torch.autograd.grad(y, inputs, grad, **options) for y in (got, wanted)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "keys"), SHAPES)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_it_means_what_pytorchs_means(length, keys, is_causal, kind):
    shapes = [
        (length, keys),
        (2, 1, length, keys),
        (1, 4, 1, keys),
        (2, 1, 1, keys),
        (4, length, 1),
        (2, 4, length, keys),
    ]
    for i, shape in enumerate(shapes if kind != "none" else [None]):
        q, k, v = qkv(length, keys)
        attn_mask = None if shape is None else normal(*shape, seed=i)
        if kind == "bool":
            attn_mask = attn_mask > -0.3
        elif kind == "float":
            attn_mask.requires_grad_()
        wanted = PYTORCHS(q, k, v, attn_mask=visible(attn_mask, length, keys, is_causal))
        same(ours(q, k, v, attn_mask=attn_mask, is_causal=is_causal), wanted, (q, k, v, attn_mask))


@pytest.mark.parametrize(("length", "keys"), [(5, 9), (9, 5), (6, 6)])
def test_causal_alone_is_pytorchs_own_flag(length, keys):
    q, k, v = qkv(length, keys)
    same(ours(q, k, v, None, 0.0, True), PYTORCHS(q, k, v, None, 0.0, True), (q, k, v))


def test_alignment_against_its_definition():
    for queries, keys, offset, left, right in itertools.product(
        (1, 3, 6), (0, 1, 4, 7), (0, 2), (-1, 0, 2), (-1, 0, 3)
    ):
        given, (ours_left, ours_right) = _alignment.aligned(queries, keys, offset, left, right)
        for i, j in itertools.product(range(queries), range(keys)):
            p = i + offset
            wanted = (left == -1 or p - left <= j) and (right == -1 or j <= p + right)
            mine = i + given - queries
            seen = (
                j < given
                and (ours_left == -1 or mine - ours_left <= j)
                and (ours_right == -1 or j <= mine + ours_right)
            )
            assert seen == wanted
        assert min(ours_left, ours_right) >= -1


def test_causal_of_unequal_lengths_makes_no_mask(monkeypatch):
    calls = []
    monkeypatch.setattr(
        sdpa, "attention", lambda *args, **kwargs: calls.append(kwargs) or hw.attention(*args, **kwargs)
    )
    for length, keys in SHAPES:
        ours(*qkv(length, keys), is_causal=True)
    assert len(calls) == len(SHAPES)
    assert all(call["mask"] is None and call["bias"] is None for call in calls)


def test_grouped_heads_and_scale():
    for key_heads in (1, 2):
        q, k, v = qkv(9, 5, key_heads=key_heads)
        same(ours(q, k, v, scale=0.3, enable_gqa=True), PYTORCHS(q, k, v, scale=0.3, enable_gqa=True), (q, k, v))
    q, k, v = qkv(9, 5, key_heads=1)  # one key head broadcasts without being told
    same(ours(q, k, v), PYTORCHS(q, k, v), (q, k, v))
    same(
        ours(k, q, v.expand(-1, 4, -1, -1)[:, :, :1].expand(-1, -1, 9, -1)),
        PYTORCHS(k, q, v[:, :, :1].expand(-1, 4, 9, -1)),
    )
    with pytest.raises(ValueError, match="enable_gqa"):
        ours(*qkv(9, 5, key_heads=2))
    q, k, v = qkv(9, 5, key_heads=2)
    same(ours(q, k, v[:, :1], enable_gqa=True), PYTORCHS(q, k, v[:, :1], enable_gqa=True), (q, k, v))
    with pytest.raises(NotImplementedError, match="key has 4 heads and value 2"):
        ours(q, k.repeat(1, 2, 1, 1), v, enable_gqa=True)


LEADS = [((), (), ()), ((3,), (3,), (3,)), ((2, 3), (1, 3), (2, 3)), ((), (3,), (3,)), ((2, 3), (3,), (3,)),
         ((2, 1, 3), (2, 5, 3), (1, 5, 3)), ((2, 2, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3))]  # fmt: skip


@pytest.mark.parametrize(("of_q", "of_k", "of_v"), LEADS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_leading_dims_that_broadcast(of_q, of_k, of_v, is_causal):
    q, k, v = (normal(*lead, *last, grad=True) for lead, last in ((of_q, (7, 8)), (of_k, (5, 8)), (of_v, (5, 6))))
    wanted = PYTORCHS(q, k, v, attn_mask=visible(None, 7, 5, is_causal))
    same(ours(q, k, v, is_causal=is_causal), wanted, (q, k, v))


@pytest.mark.parametrize(
    "lead", [(), (3,), (1, 1, 1), (2, 5, 3), (2, 1, 1), (1, 5, 3), (2, 5, 1), (5, 3), (2, 5, 3, 1)]
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_over_many_leading_dims(lead, kind):
    outer = (2, 5, 3) if len(lead) < 4 else (2, 5, 3, 4)
    q, k, v = (normal(*outer, *last, grad=True) for last in ((7, 8), (9, 8), (9, 6)))
    attn_mask = normal(*lead, 7, 9, grad=kind == "float")
    if kind == "bool":
        attn_mask = attn_mask > 0
    same(ours(q, k, v, attn_mask=attn_mask), PYTORCHS(q, k, v, attn_mask=attn_mask), (q, k, v, attn_mask))


def test_a_mask_that_skips_a_leading_dim_is_refused():
    q = normal(2, 5, 3, 7, 8)
    with pytest.raises(NotImplementedError, match="attn_mask"):
        ours(q, q, q, attn_mask=normal(2, 1, 3, 7, 7))


def test_views_are_read_in_place_and_the_result_lies_like_the_query(monkeypatch):
    seen = []
    monkeypatch.setattr(sdpa, "attention", lambda *args, **kwargs: seen.extend(args) or hw.attention(*args, **kwargs))
    stored = [normal(2, length, 4, 8) for length in (5, 9, 9)]
    out = ours(*(x.transpose(1, 2) for x in stored), is_causal=True)
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in stored]
    assert out.transpose(1, 2).is_contiguous()


def test_a_last_dim_with_gaps_is_copied():
    q, k, v = (normal(2, 4, 8, 5).transpose(-1, -2) for _ in range(3))
    same(ours(q, k, v), PYTORCHS(q, k, v))


def test_rows_that_see_nothing_are_zeros_in_both():
    q, k, v = qkv(5, 9)
    attn_mask = torch.ones(5, 9, dtype=torch.bool)
    attn_mask[2] = False
    out = ours(q, k, v, attn_mask=attn_mask)
    same(out, PYTORCHS(q, k, v, attn_mask=attn_mask), (q, k, v))
    assert (out[:, :, 2] == 0).all()
    lowest = torch.full((5, 9), torch.finfo(torch.float64).min, dtype=torch.float64)
    same(ours(q, k, v, attn_mask=lowest), PYTORCHS(q, k, v, attn_mask=lowest))  # finite: the mean of the values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_and_float32_masks(dtype):
    q, k, v = (normal(2, 4, 40, 16, dtype=dtype, seed=i) for i in range(3))
    attn_mask = normal(40, 40, dtype=torch.float32)
    wanted = PYTORCHS(*(x.double() for x in (q, k, v)), attn_mask=attn_mask.double())
    got = ours(q, k, v, attn_mask=attn_mask)
    assert got.dtype == dtype
    assert (got.double() - wanted).norm() <= 2 * (
        PYTORCHS(q, k, v, attn_mask=attn_mask).double() - wanted
    ).norm() + 1e-6


def test_autocast_casts_as_pytorchs_does():
    q, k, v = (normal(2, 4, 9, 8, dtype=torch.float32, seed=i) for i in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(q, k, v).dtype == PYTORCHS(q, k, v).dtype == torch.bfloat16
        assert ours(q, k, v, attn_mask=normal(9, 9, dtype=torch.float32)).dtype == torch.bfloat16
        assert ours(q.double(), k.double(), v.double()).dtype == torch.float64
    assert ours(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("size", [(5, 9), (6, 6)])
@pytest.mark.parametrize("make", [torch_bias.causal_upper_left, torch_bias.causal_lower_right])
def test_the_causal_biases_of_pytorch(size, make, monkeypatch):
    calls = []
    monkeypatch.setattr(
        sdpa, "attention", lambda *args, **kwargs: calls.append(kwargs) or hw.attention(*args, **kwargs)
    )
    q, k, v = qkv(*size)
    with sdpa.override():
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=make(*size))
    assert [call["mask"] for call in calls] == [None]
    same(got, PYTORCHS(q, k, v, attn_mask=make(*size)._materialize()), (q, k, v))


# ------------------------------------------------------------------------------------------------------ the switch


def test_override_serves_and_restores():
    assert F.scaled_dot_product_attention is PYTORCHS
    with sdpa.override():
        inside = F.scaled_dot_product_attention
        with sdpa.override(backend="cpu"):
            assert F.scaled_dot_product_attention not in (inside, PYTORCHS)
        assert F.scaled_dot_product_attention is inside is not PYTORCHS
    assert F.scaled_dot_product_attention is PYTORCHS
    with pytest.raises(RuntimeError, match="outside"), sdpa.override():
        raise RuntimeError("outside")
    assert F.scaled_dot_product_attention is PYTORCHS


def test_enable_twice_and_disable_once():
    sdpa.disable()  # nothing to undo
    try:
        sdpa.enable()
        sdpa.enable(fallback=True)
        assert F.scaled_dot_product_attention is not PYTORCHS
    finally:
        sdpa.disable()
    assert F.scaled_dot_product_attention is PYTORCHS


def test_a_module_of_pytorch_uses_it(monkeypatch):
    calls = []
    monkeypatch.setattr(sdpa, "attention", lambda *args, **kwargs: calls.append(1) or hw.attention(*args, **kwargs))
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    x = normal(2, 11, 32, grad=True)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 8:] = True
    with sdpa.override():
        got = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    assert calls
    same(got, layer(x, x, x, key_padding_mask=padding, need_weights=False)[0], (x,))


REFUSED = [
    ("scale is nan", lambda q: ((q, q, q), {"scale": float("nan")})),
    ("attn_mask", lambda q: ((normal(2, 5, 3, 7, 8),) * 3, {"attn_mask": normal(2, 1, 3, 7, 7)})),
]


@pytest.mark.parametrize(("named", "make"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_refused_goes_to_pytorch_only_on_request(named, make):
    args, kwargs = make(normal(2, 4, 7, 8))
    with sdpa.override(), pytest.raises((ValueError, NotImplementedError), match=named):
        F.scaled_dot_product_attention(*args, **kwargs)
    with sdpa.override(fallback=True):
        torch.testing.assert_close(F.scaled_dot_product_attention(*args, **kwargs), PYTORCHS(*args, **kwargs))


def test_a_refused_call_with_a_causal_bias_goes_to_pytorch_too():
    q, k, v = qkv(5, 9)
    with sdpa.override(backend="triton", fallback=True):  # which has no float64
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=torch_bias.causal_lower_right(5, 9), scale=-1.0)
    same(got, PYTORCHS(q, k, v, torch_bias.causal_lower_right(5, 9)._materialize(), scale=-1.0), (q, k, v))


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.7, 0, -2])
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_scales_that_are_not_positive(scale, kind):
    """0 is the mean of what is seen; below 0 the least similar keys count most."""
    q, k, v = qkv(6, 9)
    attn_mask = None if kind == "none" else normal(6, 9, seed=1)
    if kind == "bool":
        attn_mask = attn_mask > -0.3
    same(ours(q, k, v, attn_mask, scale=scale), PYTORCHS(q, k, v, attn_mask, scale=scale), (q, k, v))


def test_causal_with_a_scale_that_is_not_positive():
    """PyTorch's causal kernel multiplies its -inf by 0; written as a mask, the two agree."""
    q, k, v = qkv(7, 7)
    for scale in (0.0, -0.7):
        wanted = PYTORCHS(q, k, v, torch.ones(7, 7, dtype=torch.bool).tril(), scale=scale)
        same(ours(q, k, v, is_causal=True, scale=scale), wanted, (q, k, v))


def test_dropout_of_everything():
    q, k, v = qkv(6, 9)
    same(ours(q, k, v, dropout_p=1.0), PYTORCHS(q, k, v, dropout_p=1.0), (q, k, v))
    for wrong in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match="scaled_dot_product_attention: dropout_p is"):
            ours(q, k, v, dropout_p=wrong)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "cut",
    [(0, None, None), (None, 0, None), (None, None, 0), (None, 0, 0), (0, 0, 0)],
    ids=["H", "E", "Ev", "E Ev", "all"],
)
def test_no_heads_and_no_columns(cut, is_causal):
    heads, columns, of_values = cut
    q, k, v = (x.detach() for x in qkv(6, 9))
    q, k = (x[:, :heads, :, :columns].requires_grad_() for x in (q, k))
    v = v[:, :heads, :, :of_values].requires_grad_()
    # PyTorch's kernel divides by the root of 0 columns where it is causal.
    wanted = PYTORCHS(q, k, v, visible(None, 6, 9, is_causal), scale=1.0)
    same(ours(q, k, v, is_causal=is_causal), wanted, (q, k, v))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused_or_left_to_pytorch(layout):
    nested = torch.nested.nested_tensor([normal(5, 4, 8), normal(3, 4, 8)], layout=layout).transpose(1, 2)
    if layout == torch.strided:
        nested = nested.contiguous()
    with sdpa.override(), pytest.raises(NotImplementedError, match="attention_varlen"):
        F.scaled_dot_product_attention(nested, nested, nested)
    with sdpa.override(fallback=True):
        got = F.scaled_dot_product_attention(nested, nested, nested)
    for mine, theirs in zip(got.unbind(), PYTORCHS(nested, nested, nested).unbind(), strict=True):
        assert torch.equal(mine, theirs)


def test_under_a_mode_of_pytorch():
    q, k, v = qkv(5, 9)
    with torch.device("cpu"), sdpa.override():
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=torch_bias.causal_lower_right(5, 9))
    same(got, hw.attention(q, k, v, causal=True), (q, k, v))


def test_wrong_dtypes_are_named():
    with pytest.raises(TypeError, match="attn_mask has dtype int32"):
        ours(*qkv(5, 5), attn_mask=torch.ones(5, 5, dtype=torch.int32))
    with pytest.raises(TypeError, match="q has dtype int64"):
        ours(*(x.long() for x in qkv(5, 5)))
    with sdpa.override(backend="triton"), pytest.raises(ValueError, match="backend='triton'"):
        F.scaled_dot_product_attention(*qkv(5, 5))


# ---------------------------------------------------------------------------------------------------- torch.compile


def test_compiled_calls_follow_the_switch():
    graphs = []

    def record(module, _):
        graphs.append({str(node.target) for node in module.graph.nodes if node.op == "call_function"})
        return module

    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    compiled = torch.compile(function, fullgraph=True, backend=record)
    q, k, v = qkv(5, 9)
    for _ in range(2):
        same(compiled(q, k, v), function(q, k, v), (q, k, v))
        with sdpa.override():
            same(compiled(q, k, v), PYTORCHS(q, k, v, is_causal=True) * 2, (q, k, v))
    assert [any("headwise.attention" in name for name in graph) for graph in graphs] == [False, True]


@pytest.mark.parametrize("fallback", [False, True])
def test_compiled_for_any_length(fallback):
    def function(q, k, v, attn_mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with sdpa.override(fallback=fallback):
        for length, keys in ((5, 9), (6, 11), (9, 5), (12, 7)):
            q, k, v = qkv(length, keys)
            attn_mask = normal(length, keys, grad=True)
            wanted = PYTORCHS(q, k, v, attn_mask=visible(attn_mask, length, keys, True))
            same(compiled(q, k, v, attn_mask), wanted, (q, k, v, attn_mask))


# ------------------------------------------------------------------------------------------------- dropout, backends


def test_dropout_is_that_of_the_op():
    q, k, v = qkv(9, 9)
    torch.manual_seed(3)
    got = ours(q, k, v, dropout_p=0.4)
    torch.manual_seed(3)
    same(got, hw.attention(q, k, v, dropout=0.4), (q, k, v))
    assert not torch.equal(got, ours(q, k, v))


def test_on_webgpu():
    q, k, v = (normal(1, 2, length, 16, dtype=torch.float32, seed=length) for length in (5, 9, 9))
    attn_mask = normal(5, 9, dtype=torch.float32)
    with sdpa.override(backend="webgpu"):
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=True)
    wanted = PYTORCHS(q, k, v, attn_mask=visible(attn_mask, 5, 9, True))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------- as an implementation of PyTorch's own

FLASH = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture
def flash_on_the_cpu():
    """The operator has kernels on CUDA alone; those of Headwise run on the CPU just as well."""
    installed = _sdpa_registry.Installed("CPU")
    yield
    installed.remove()
    with pytest.raises(NotImplementedError, match="CPU"):
        FLASH(*qkv(5, 5))


@pytest.mark.usefixtures("flash_on_the_cpu")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.4, -0.4, 0.0])
def test_the_operator_of_pytorch(is_causal, inside, scale):
    q, k, v = (normal(2, 4, 9, 8, grad=True, seed=i) for i in range(3))
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)] if inside else (q, k, v)
    out, lse, *_, queries, keys, _, _, _ = FLASH(*given, 0.0, is_causal, scale=scale)
    assert (queries, keys) == (9, 9)
    assert out.stride() == torch.empty_like(given[0]).stride()
    _, wanted_lse = hw.attention(q * (scale / 0.4), k, v, causal=is_causal, scale=0.4, return_lse=True)
    same(lse, wanted_lse.detach())
    same(out, PYTORCHS(q, k, v, visible(None, 9, 9, is_causal), scale=scale), (q, k, v))


@pytest.mark.usefixtures("flash_on_the_cpu")
def test_the_operator_of_pytorch_compiled():
    def function(q, k, v):
        return FLASH(q, k, v, 0.0, True)[0] * 2

    q, k, v = (normal(2, 4, 9, 8, grad=True, seed=i) for i in range(3))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    same(compiled(q, k, v), PYTORCHS(q, k, v, is_causal=True) * 2, (q, k, v))


@pytest.mark.usefixtures("flash_on_the_cpu")
def test_the_operator_drops_the_same_in_both_directions():
    q, k, v = (normal(2, 4, 9, 8, grad=True, seed=i) for i in range(3))
    out, *_, seed, _, _ = FLASH(q, k, v, 0.4)
    assert seed.dtype == torch.uint64
    wanted = hw.attention(q, k, v, dropout=0.4, dropout_seed=seed.view(torch.int64)[:1])
    same(out, wanted, (q, k, v))
    assert not torch.equal(out, FLASH(q, k, v, 0.4)[0])
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        FLASH(q, k, v, 0.4, False, True)


def test_registering_with_pytorch_changes_nothing_yet(monkeypatch):
    monkeypatch.setattr(torch_registry, "_FLASH_ATTENTION_IMPLS", dict(torch_registry._FLASH_ATTENTION_IMPLS))
    sdpa.register_flash_attention_impl()
    assert "headwise" in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() is None
    torch.nn.attention.activate_flash_attention_impl("headwise")
    assert torch.nn.attention.current_flash_attention_impl() == "headwise"
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(NotImplementedError, match="register_flash_attention_impl"):
        sdpa.register_flash_attention_impl()


def test_switches_in_any_order_leave_pytorchs_function():
    before = F.scaled_dot_product_attention
    sdpa.enable()
    with sdpa.override():
        sdpa.disable()
        assert F.scaled_dot_product_attention is not before
    assert F.scaled_dot_product_attention is before
    with sdpa.override():
        sdpa.enable()
    assert F.scaled_dot_product_attention is not before
    sdpa.disable()
    assert F.scaled_dot_product_attention is before
    first, second = sdpa.override(), sdpa.override()  # as two threads enter and leave them
    first.__enter__()
    second.__enter__()
    ours = F.scaled_dot_product_attention
    first.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is ours
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is before


@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_causal_biases_whoever_calls(variant):
    """Through a name that is not in PyTorch's module, too: the bias itself holds nothing but uninitialised memory."""
    from torch.nn.attention import bias

    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    mask = getattr(bias, variant)(5, 7)
    expected = F.scaled_dot_product_attention(q, k, v, mask._materialize(q.device))
    found = sdpa.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"a CausalBias of \(3, 4\); it needs \(5, 7\)"):
        sdpa.scaled_dot_product_attention(q, k, v, attn_mask=getattr(bias, variant)(3, 4))


def test_a_backend_that_does_not_exist_is_refused_at_once():
    with pytest.raises(ValueError, match="nope"):
        sdpa.enable(backend="nope")
    assert F.scaled_dot_product_attention is sdpa.PYTORCHS


@pytest.mark.skipif("triton" not in RUNNABLE, reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_on_triton(kind, is_causal):
    """More than one tile of keys, grouped heads, both directions."""
    q, k, v = (x.detach().float().to(DEVICE["triton"]).requires_grad_() for x in qkv(45, 150, 4, 2, value_dim=8))
    attn_mask = None if kind == "none" else normal(2, 1, 45, 150, seed=3).float().to(q.device)
    if kind == "bool":
        attn_mask = attn_mask > -0.3
    with sdpa.override(backend="triton"):
        got = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, enable_gqa=True)
    corner = visible(None, 45, 150, is_causal).to(q.device)
    mask = corner if attn_mask is None else visible(attn_mask, 45, 150, False)
    mask = mask & corner if mask.dtype == torch.bool else mask.masked_fill(~corner, -torch.inf)
    same(got, PYTORCHS(q, k, v, mask, enable_gqa=True), (q, k, v), 2e-5)

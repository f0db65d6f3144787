"""The cache at the top of every op: what makes another entry, what an entry may not hold, and who goes past it."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.backends import registry
from headwise.backends.triton import tile_sizes
from headwise.config import settings
from headwise.ops import _cache, softmax
from headwise.ops._cache import Cache
from headwise.ops._op import Entry
from headwise.ops.attention import dense


@pytest.fixture
def checked(monkeypatch):
    """How often the arguments of `attention` were checked, beginning with an empty cache."""
    calls = []
    original = dense._forward.check
    monkeypatch.setattr(dense._forward, "check", lambda *args: calls.append(1) or original(*args))
    for op in (dense._forward, dense._backward):
        monkeypatch.setattr(op, "_entries", Cache())
    return calls


def qkv(length=5, dim=8, dtype=torch.float32):
    return [torch.randn(1, 2, length, dim, dtype=dtype) for _ in range(3)]


# ------------------------------------------------------------------------------------------------ what makes a new entry


def test_the_same_kind_of_call_is_checked_once(checked):
    for _ in range(3):
        hw.attention(*qkv(), causal=True, window=(2, 0))
    assert len(checked) == 1


FLAGS = [
    {"causal": True},
    {"window": (1, 0)},
    {"scale": 0.5},
    {"softcap": 3.0},
    {"mask": torch.ones(5, 5, dtype=torch.bool).tril()},
    {"bias": torch.ones(5, 5).tril()},
    {"sink": torch.zeros(2)},
    {"kv_lengths": torch.tensor([3])},
    {"q_lengths": torch.tensor([3])},
    {"kv_starts": torch.tensor([3])},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: next(iter(flags)))
def test_another_flag_makes_another_entry_and_another_result(checked, flags):
    inputs = qkv()
    plain = hw.attention(*inputs)
    other = hw.attention(*inputs, **flags)
    assert len(checked) == 2
    assert not torch.equal(plain, other)
    assert torch.equal(hw.attention(*inputs), plain)
    assert torch.equal(hw.attention(*inputs, **flags), other)
    assert len(checked) == 2


@pytest.mark.parametrize("flags", [{"backend": "cpu"}, {"deterministic": False}, {"return_lse": True}], ids=str)
def test_a_flag_that_changes_no_number_makes_another_entry_too(checked, flags):
    inputs = qkv()
    hw.attention(*inputs)
    hw.attention(*inputs, **flags)
    assert len(checked) == 2


def moved(x, by):
    """The same values, ``by`` elements further from an aligned address."""
    memory = torch.empty(x.numel() + 16)
    first = (-memory.data_ptr() // 4) % 16 + by
    return memory[first : first + x.numel()].view(x.shape).copy_(x)


# Each differs from the call (q, k, v, causal=True) in one fact about one tensor.
OTHERS = {
    "shape of q, same strides": lambda q, k, v: (q[:, :, 1:], k, v),
    "shape of k and v": lambda q, k, v: (q, k[:, :, 1:], v[:, :, 1:]),
    "heads": lambda q, k, v: (q, k[:, :1], v[:, :1]),
    "strides of k": lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
    "dtype": lambda q, k, v: (q.double(), k.double(), v.double()),
    "device": lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta")),
    "requires_grad of v": lambda q, k, v: (q, k, v.clone().requires_grad_()),
    "alignment of q": lambda q, k, v: (moved(q, 1), k, v),
    "alignment of v": lambda q, k, v: (q, k, moved(v, 2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_fact_about_a_tensor_makes_another_entry(checked, name):
    q, k, v = (moved(x, 0) for x in qkv())
    hw.attention(q, k, v, causal=True)
    assert len(checked) == 1
    others = OTHERS[name](q, k, v)
    for _ in range(2):
        out = hw.attention(*others, causal=True)
    assert len(checked) == 2
    if name in ("alignment of q", "alignment of v", "strides of k"):
        torch.testing.assert_close(out, hw.attention(q, k, v, causal=True))


def test_a_parameter_without_gradient_is_a_tensor(checked):
    q, k, v = qkv()
    hw.attention(q, k, v)
    hw.attention(torch.nn.Parameter(q, requires_grad=False), k, v)
    assert len(checked) == 1


def test_what_is_wrong_is_found_after_what_is_right(checked):
    q, k, v = qkv()
    hw.attention(q, k, v, causal=True, window=(2, 0))
    hw.attention(q, k, v, causal=True, window=(1, 0))
    for wrong, error, message in (
        ((q, k, v, 1, (2, 0)), TypeError, "causal is 1"),
        ((q, k, v, True, (2.0, 0)), TypeError, "left=2.0"),
        ((q, k, v, True, (True, 0)), TypeError, "left=True"),
        ((q, k, v, True, (1, False)), TypeError, "right=False"),
        ((q, k, v.half(), True, (2, 0)), TypeError, "v has dtype float16"),
        ((q, k, torch.randn(1, 2, 5, 16)[..., ::2], True, (2, 0)), ValueError, "stride 2 in its last dim"),
        ((q, k[..., :4], v, True, (2, 0)), ValueError, "they need to be equal"),
        ((q, k, v[:, :, :4], True, (2, 0)), ValueError, "v has shape"),
    ):
        for _ in range(2):  # nor is what raised kept as right
            with pytest.raises(error, match=message):
                hw.attention(*wrong[:3], causal=wrong[3], window=wrong[4])


def test_other_ops_look_at_the_shapes_of_all_their_tensors():
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
    hw.rms_norm(x, torch.ones(8), 1.0)
    with pytest.raises(TypeError, match="eps is True"):
        hw.rms_norm(x, torch.ones(8), True)


# --------------------------------------------------------------------------------------------------------- surroundings


@contextmanager
def the_other_deterministic_switch():
    is_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on)


@contextmanager
def products_in_tf32():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextmanager
def products_in_tf32_by_the_older_switch():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before


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
    "deterministic switch": (the_other_deterministic_switch, True),
    "tf32 switch": (products_in_tf32, True),
    "older tf32 switch": (products_in_tf32_by_the_older_switch, True),
    "grad mode": (torch.no_grad, True),
    "below autograd": (torch._C._AutoDispatchBelowAutograd, True),
    "autocast": (lambda: torch.autocast("cpu"), True),
    "use_backend": (lambda: registry.use_backend("cpu"), True),
    "use_backend(None)": (lambda: registry.use_backend(None), True),
    "setting": (another_setting, False),  # who knows what else changed with it
    "tile": (lambda: tile_sizes.forced("attention_forward", tile_sizes.AttentionTile(16, 16, 4, 1)), False),
    "tile tables": (tables_read_again, False),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_surroundings_are_part_of_the_key(name):
    inputs = tuple(qkv())

    def key():
        return Cache().find((True,), inputs)[1]

    change, back_again = SURROUNDINGS[name]
    before = key()
    assert before is not None
    assert key() == before
    with change():
        assert key() not in (None, before)
    assert (key() == before) == back_again


def test_gradients_backends_and_their_absence_are_asked_for_again(checked):
    q, k, v = qkv()
    hw.attention(q, k, v)
    assert hw.attention(q.requires_grad_(), k, v).requires_grad
    with torch.no_grad():
        assert not hw.attention(q, k, v).requires_grad
    with registry.use_backend("cpu"):
        hw.attention(q, k, v)
    registry.ask_again()
    hw.attention(q, k, v)
    assert len(checked) == 5


def test_a_change_of_settings_never_brings_back_an_old_key():
    seen = settings.changes
    settings.changed()
    kept_under = settings.changes
    # Another thread, which had looked at the settings before, comes to write only now.
    object.__setattr__(settings, "changes", seen)
    settings.changed()
    assert settings.changes not in (seen, kept_under)


def test_under_autocast_a_call_is_that_of_its_casts(checked):
    """The entry of the cast call serves without autocast too, and that of the call itself is not taken for it."""
    inputs = qkv()
    low = [x.to(torch.bfloat16) for x in inputs]
    plain, wide = hw.attention(*low), hw.attention(*inputs)
    with torch.autocast("cpu"):
        for _ in range(2):
            assert torch.equal(hw.attention(*inputs), plain)
            assert torch.equal(hw.attention(*low), plain)
    assert torch.equal(hw.attention(*inputs), wide)
    assert len(checked) == 2


# -------------------------------------------------------------------------------------------------- who goes past the cache


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "watching", [Mode, torch.profiler.profile, lambda: torch.device("meta"), torch.autograd.forward_ad.dual_level]
)
def test_where_somebody_watches_there_is_no_key(watching):
    inputs = tuple(qkv())
    with watching():
        assert Cache().find((True,), inputs) == (None, None)


def test_what_is_not_in_memory_as_it_seems_has_no_key():
    q, k, v = qkv()
    negative = torch.randn(1, 2, 5, 8, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    nested = torch.nested.as_nested_tensor([q[0], k[0]], layout=torch.jagged)
    for x in (
        negative,
        torch._efficientzerotensor((1, 2, 5, 8)),
        q.to_sparse(),
        nested,
        q.as_subclass(type("Own", (torch.Tensor,), {})),
        [1.0],
    ):
        assert Cache().find((True,), (x, k, v)) == (None, None)


@pytest.mark.filterwarnings("ignore")  # it is deprecated, and says so, and more
def test_tracing_fills_no_cache(checked):
    inputs = tuple(x.requires_grad_() for x in qkv())
    for _ in range(3):
        hw.attention(*inputs)  # known
    made = len(dense._forward._entries)
    traced = torch.jit.trace(lambda q, k, v: hw.attention(q, k, v), inputs, check_trace=False)
    assert "headwise::attention_forward" in str(traced.graph)
    torch.compile(lambda q, k, v: hw.attention(q, k, v), backend="eager", fullgraph=True)(*inputs)
    # Beside what the operator itself ran there is no entry more.
    entries = dense._forward._entries.values()
    assert sum(type(entry) is Entry for entry in entries) == made == 1


def test_what_cannot_be_a_key_is_checked_every_time(checked):
    for _ in range(2):
        hw.attention(*qkv(), window=[2, 0])
    assert len(checked) == 2


# ---------------------------------------------------------------------------------------------------- what an entry holds


@pytest.mark.parametrize("gradient", [False, True])
def test_an_entry_holds_no_data(checked, gradient):
    calls = [qkv() for _ in range(3)]
    for inputs in calls:
        for x in inputs:
            x.requires_grad_(gradient)
    results = [hw.attention(*inputs, causal=True) for inputs in calls]
    assert len(checked) == 1
    assert len({out.data_ptr() for out in results}) == 3
    for inputs, out in zip(calls, results, strict=True):
        expected = scaled_dot_product_attention(*inputs, is_causal=True)
        torch.testing.assert_close(out, expected)
        if gradient:
            torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected)))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("how", ["", "on meta", "validated", "under autocast"])
def test_an_entry_keeps_no_tensor_alive(checked, monkeypatch, gradient, how):
    inputs = [x.to("meta" if how == "on meta" else "cpu").requires_grad_(gradient) for x in qkv()]
    monkeypatch.setattr(settings, "validate", how == "validated")
    with torch.autocast("cpu", enabled=how == "under autocast"):
        out = hw.attention(*inputs)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, grad) if gradient else ()
    held = [weakref.ref(x) for x in (*inputs, out, grad, *grads)]
    assert dense._forward._entries
    inputs.clear()
    del out, grad, grads
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


FIRST_CALLS = {
    "one tensor three times": lambda x: (x, x, x),
    "three views of one tensor": lambda x: (x, x.view_as(x), x.detach()),
    "k is v": lambda x: (x, *[x.clone()] * 2),
}


@pytest.mark.parametrize("first", FIRST_CALLS)
@pytest.mark.parametrize("order", [1, -1])
def test_arguments_that_share_memory_in_one_call_need_not_in_another(checked, first, order):
    shared = list(FIRST_CALLS[first](qkv()[0]))
    calls = [shared, qkv(), qkv()][::order]
    for given in calls:
        leaves = {id(x): x.detach().clone().requires_grad_() for x in given}
        inputs = [leaves[id(x)] for x in given]
        for _ in range(2):  # the second backward replays the first
            out = hw.attention(*inputs, causal=True)
            found = torch.autograd.grad(out.square().sum(), list(leaves.values()))
            expected = scaled_dot_product_attention(*inputs, is_causal=True)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), list(leaves.values())))


def test_a_process_of_ever_new_sizes_keeps_few(checked, monkeypatch):
    monkeypatch.setattr(_cache, "LIMIT", 4)
    for length in range(1, 12):
        q, k, v = (x.requires_grad_() for x in qkv(length))
        hw.attention(q, k, v).sum().backward()
    assert len(checked) == 11
    assert 0 < len(dense._forward._entries) <= 4


# ------------------------------------------------------------------------------------------------------------ the backward


def leaves():
    return {"q": qkv()[0], "k": qkv()[1], "v": qkv()[2], "bias": torch.randn(1, 2, 5, 5), "sink": torch.randn(2)}


def formula(q, k, v, bias, sink):
    """(out, lse), in plain PyTorch."""
    scores = torch.cat([q @ k.mT / q.shape[-1] ** 0.5 + bias, sink[:, None, None].expand(1, 2, 5, 1)], -1)
    return torch.softmax(scores, -1)[..., :5] @ v, torch.logsumexp(scores, -1)


def test_the_backward_of_a_known_call_is_replayed(checked, monkeypatch):
    recorded = []
    recorder = registry.recorder
    monkeypatch.setattr(registry, "recorder", lambda *names: recorded.append(names[1]) or recorder(*names))
    ran = []
    differentiate = dense._forward.backward
    monkeypatch.setattr(dense._forward, "backward", lambda *args: ran.append(1) or differentiate(*args))
    for _ in range(4):
        q, k, v = (x.requires_grad_() for x in qkv())
        out = hw.attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert recorded == ["attention_forward", "attention_backward"]
    assert len(ran) == 1


# Which inputs a gradient is asked for, which results one arrives at, and how it lies in memory: each its own backward.
ASKED = [("q", "k", "v", "bias", "sink"), ("q",), ("v", "k"), ("bias",), ("sink",), ("q", "sink")]
ARRIVING = {
    "out": lambda out, lse: ((out,), (torch.randn_like(out),)),
    "lse": lambda out, lse: ((lse,), (torch.randn_like(lse),)),
    "both": lambda out, lse: ((out, lse), (torch.randn_like(out), torch.randn_like(lse))),
    "an expanded gradient": lambda out, lse: ((out,), (torch.randn(()).expand_as(out),)),
    "a transposed gradient": lambda out, lse: ((out,), (torch.randn(1, 2, 8, 5).mT,)),
    "the result as its own gradient": lambda out, lse: ((out,), (out.detach(),)),
}


@pytest.mark.parametrize("order", [1, -1])
def test_one_forward_has_many_backwards(checked, order):
    for _ in range(3):  # the second time each of them is known
        for asked in ASKED[::order]:
            for name, arriving in ARRIVING.items():
                x = {n: t.requires_grad_() for n, t in leaves().items()}
                ours = hw.attention(**x, return_lse=True)
                torch.manual_seed(0)
                outputs, grads = arriving(*ours)
                wanted = [x[n] for n in asked]
                found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
                plain = formula(**x)
                outputs = [plain[[id(y) for y in ours].index(id(out))] for out in outputs]
                expected = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
                for of, a, b in zip(asked, found, expected, strict=True):
                    a = torch.zeros_like(x[of]) if a is None else a
                    b = torch.zeros_like(x[of]) if b is None else b
                    torch.testing.assert_close(a, b, msg=lambda text, n=name, o=of, w=asked: f"{n}, {o} of {w}: {text}")
    assert len(checked) == 1


def test_a_result_that_is_its_own_gradient_tells_nothing_of_other_gradients(monkeypatch):
    """softmax saves its result. Where the gradient is that very tensor, the backward's arguments are one and the same."""
    monkeypatch.setattr(softmax._forward, "_entries", Cache())
    x = torch.randn(3, 10, requires_grad=True)
    for own in (True, False, True, False):
        y, expected = hw.softmax(x), torch.softmax(x, -1)
        grad = y if own else torch.randn(3, 10)
        (found,) = torch.autograd.grad(y, x, grad)
        torch.testing.assert_close(found, torch.autograd.grad(expected, x, grad.detach())[0])


@pytest.mark.parametrize("first", [False, True])
def test_autocast_around_the_backward_changes_no_gradient(checked, first):
    torch.manual_seed(0)
    inputs = [x.requires_grad_() for x in qkv(300)]
    found = []
    for on in (first, not first, first, not first):
        out = hw.attention(*inputs, softcap=5.0)
        with torch.autocast("cpu", enabled=on):
            found.append(torch.autograd.grad(out.sum(), inputs))
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


# ----------------------------------------------------------------------------------------------------------------- threads


def test_threads_share_the_cache(checked):
    """Eight threads meet the same few kinds of calls, new and known, each with tensors and surroundings of its own."""
    wrong, start = [], threading.Barrier(8)

    def work(number):
        try:
            generator = torch.Generator().manual_seed(number)
            start.wait()
            for turn in range(60):
                length, causal = 1 + (turn + number) % 7, bool((turn + number) % 2)
                inputs = [torch.randn(1, 2, length, 8, generator=generator).requires_grad_() for _ in range(3)]
                with registry.use_backend("cpu" if number % 2 else None):
                    out = hw.attention(*inputs, causal=causal)
                    found = torch.autograd.grad(out.square().sum(), inputs)
                expected = scaled_dot_product_attention(*inputs, is_causal=causal)
                torch.testing.assert_close(out, expected)
                torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), inputs))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert len(checked) < 8 * 60 // 2

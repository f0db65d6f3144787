"""Same inputs, same bits: run after run, and for a decoded sequence in any batch and at any place in it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import direct_attention as direct
import pytest
import torch
from attention_calls import ints, maker, on_every_backend
from backends_under_test import DEVICE
from torch import Tensor

import headwise as hw
from headwise.backends import registry
from headwise.config import settings

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
REPEATS = 5


@pytest.fixture(autouse=True)
def several_threads():
    """A sum that depends on which thread comes first shows only where there are several."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as bits: tells -0 from 0 and holds for NaN."""
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def assert_repeats(run: Callable[[], tuple[Tensor, ...]]) -> None:
    first = run()
    for repeat in range(REPEATS):
        # Other work between two runs moves memory about and fills it with other numbers.
        scratch = torch.full((1000 * (repeat + 1),), math.nan)
        assert all(map(same_bits, first, run())), f"repeat {repeat} differs"
        del scratch


# deterministic=True is the default, so that no other test of this file says it; PyTorch's switch overrules False.


@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize(
    ("asked", "given"), [({}, True), ({"deterministic": True}, True), ({"deterministic": False}, None)]
)
def test_order_of_sums_is_fixed_unless_told_otherwise(monkeypatch, switch, asked, given):
    seen = {}
    recorder = registry.recorder

    def noted(backend, name):
        def record(args):
            seen[name] = getattr(args, "forward", args).flags.deterministic
            return recorder(backend, name)(args)

        return record

    monkeypatch.setattr(registry, "recorder", noted)
    settings.changed()  # known calls are not recorded again
    torch.use_deterministic_algorithms(switch)
    m = maker("cpu")
    q, k, v = (m.normal(1, 2, 5, 8).requires_grad_() for _ in range(3))
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    bounds = ints("cpu", 0, 5)
    out, lse = hw.attention(q, k, v, return_lse=True, **asked)
    for run in (
        lambda: out.sum().backward(),
        lambda: hw.attention_varlen(*rows, bounds, bounds, 5, 5, **asked).sum().backward(),
        lambda: hw.attention_backward(out.detach(), q, k, v, out, lse, **asked),
        lambda: hw.attention_varlen_backward(
            rows[0], *rows, rows[0].contiguous(), lse[0], bounds, bounds, 5, 5, **asked
        ),
    ):
        seen.clear()
        run()
        assert set(seen.values()) == {switch if given is None else given}
    seen.clear()
    hw.attention_decode(q[:, :, 0].detach(), k.detach(), v.detach(), ints("cpu", 5))
    assert seen == {"attention_decode": True}


FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "softcap": {"softcap": 5.0},
    "kv_lengths": {"kv_lengths": (300, 170)},
    "mask": {"mask": (1, 1, 300, 300)},
}


@DTYPES
@pytest.mark.parametrize("feature", FEATURES)
@on_every_backend
def test_attention_and_its_gradients_repeat(backend, feature, dtype):
    m = maker(backend, dtype)
    x = [m.normal(2, 6, 300, 40), m.normal(2, 2, 300, 40), m.normal(2, 2, 300, 24), m.normal(1, 6, 1, 300), m.normal(6)]
    flags = dict(FEATURES[feature])
    if "kv_lengths" in flags:
        flags["kv_lengths"] = ints(backend, *flags["kv_lengths"])
    if "mask" in flags:
        flags["mask"] = m.coin(*flags["mask"])
    grads = [m.normal(2, 6, 300, 24), m.normal(2, 6, 300, dtype=torch.float32)]

    def run() -> tuple[Tensor, ...]:
        q, k, v, bias, sink = leaves = [t.detach().requires_grad_() for t in x]
        out, lse = hw.attention(q, k, v, bias=bias, sink=sink, return_lse=True, backend=backend, **flags)
        return (out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, grads))

    assert_repeats(run)


@DTYPES
@on_every_backend
def test_packed_attention_and_its_gradients_repeat(backend, dtype):
    m = maker(backend, dtype)
    x = [m.normal(400, 6, 40), m.normal(500, 2, 40), m.normal(500, 2, 24)]
    bounds = (ints(backend, 0, 7, 7, 300, 390), ints(backend, 0, 100, 130, 430, 499), 293, 300)
    grad = m.normal(400, 6, 24)

    def run() -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in x]
        out = hw.attention_varlen(*leaves, *bounds, causal=True, backend=backend)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    assert_repeats(run)


FIRST_CALL = """
import torch, headwise as hw
torch.set_num_threads(3)
torch.manual_seed(0)
q, k, v = (torch.randn(1, h, s, d).to("{device}").requires_grad_() for h, s, d in ((6, 90, 40), (2, 69, 40), (2, 69, 24)))
grad = torch.randn(1, 6, 90, 24).to("{device}")

def run():
    out = hw.attention(q, k, v, causal=True, softcap={softcap}, backend="{backend}")
    return out, *torch.autograd.grad(out, (q, k, v), grad)

first = run()
assert all(all(map(torch.equal, run(), first)) for _ in range(3)), "the first call differs from the later ones"
"""


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
@on_every_backend
def test_first_call_of_a_process_is_like_the_later_ones(backend, softcap):
    """Threads, compiled kernels and tuned choices come into being in the first call."""
    script = FIRST_CALL.format(device=DEVICE[backend], backend=backend, softcap=softcap)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@DTYPES
@on_every_backend
def test_decode_probs_and_merge_repeat(backend, dtype):
    m = maker(backend, dtype)
    q, k, v = m.normal(3, 6, 40), m.normal(3, 2, 700, 40), m.normal(3, 2, 700, 24)
    lengths = ints(backend, 700, 0, 123)
    assert_repeats(lambda: hw.attention_decode(q, k, v, lengths, return_lse=True, backend=backend))
    assert_repeats(lambda: (hw.attention_probs(q[:, :, None], k, kv_lengths=lengths, backend=backend),))
    outs = [m.normal(3, 6, 50, 24) for _ in range(5)]
    lses = [m.normal(3, 6, 50, dtype=torch.float32) for _ in range(5)]
    lses[2][:, :, :7] = -math.inf
    assert_repeats(lambda: hw.merge_attention(outs, lses, backend=backend))


@DTYPES
@on_every_backend
def test_training_ops_repeat(backend, dtype):
    m = maker(backend, dtype)
    x, weight, table = m.normal(130, 1000), m.normal(1000), m.normal(50, 96)
    targets, ids = m.integers(0, 1000, 130), m.integers(0, 50, 4000)
    grad_x, grad_rows = m.normal(130, 1000), m.normal(4000, 96)

    def normed() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        y = hw.rms_norm(*leaves, backend=backend)
        return (y.detach(), *torch.autograd.grad(y, leaves, grad_x))

    def looked_up() -> tuple[Tensor, ...]:
        leaf = table.detach().requires_grad_()
        return torch.autograd.grad(hw.embedding(ids, leaf, backend=backend), leaf, grad_rows)

    assert_repeats(normed)
    assert_repeats(looked_up)
    assert_repeats(lambda: hw.cross_entropy_forward_backward(x, targets, backend=backend))
    assert_repeats(lambda: (hw.softmax(x, backend=backend),))


# A decoded sequence: the same bits in any batch, at any place, in any pages.

LENGTHS = [700, 1, 333, 64, 0, 65, 512, 700]


def decode_inputs(backend: str, dtype: torch.dtype, tokens: int | None):
    m = maker(backend, dtype)
    B, C = len(LENGTHS), 704
    q = m.normal(B, 6, 40) if tokens is None else m.normal(B, 6, tokens, 40)
    return q, m.normal(B, 2, C, 40), m.normal(B, 2, C, 24), ints(backend, *LENGTHS)


@DTYPES
@pytest.mark.parametrize("tokens", [None, 3], ids=["one token", "three tokens"])
@pytest.mark.parametrize("flags", [{}, {"window": (99, 0)}, {"num_splits": 4}], ids=["full", "window", "num_splits"])
@on_every_backend
def test_decode_does_not_depend_on_the_batch(backend, flags, tokens, dtype):
    x = decode_inputs(backend, dtype, tokens)
    together = hw.attention_decode(*x, return_lse=True, backend=backend, **flags)
    for b in range(len(LENGTHS)):
        alone = hw.attention_decode(*(t[b : b + 1] for t in x), return_lse=True, backend=backend, **flags)
        assert all(same_bits(a[0], t[b]) for a, t in zip(alone, together, strict=True)), f"sequence {b} alone"
    order = torch.tensor([5, 0, 7, 3, 2, 6, 4, 1], device=x[0].device)
    moved = hw.attention_decode(*(t[order] for t in x), return_lse=True, backend=backend, **flags)
    assert all(same_bits(a, t[order]) for a, t in zip(moved, together, strict=True)), "in another order"
    crowd = torch.tensor([2] * 33, device=x[0].device)
    copies = hw.attention_decode(*(t[crowd] for t in x), return_lse=True, backend=backend, **flags)
    assert all(same_bits(a, t[crowd]) for a, t in zip(copies, together, strict=True)), "33 times over"


@DTYPES
@on_every_backend
def test_decode_does_not_depend_on_other_lengths(backend, dtype):
    q, k, v, lengths = decode_inputs(backend, dtype, None)
    first = hw.attention_decode(q, k, v, lengths, return_lse=True, backend=backend)
    others = lengths.clone()
    others[torch.arange(len(LENGTHS), device=q.device) != 2] = 1
    second = hw.attention_decode(q, k, v, others, return_lse=True, backend=backend)
    assert all(same_bits(a[2], b[2]) for a, b in zip(first, second, strict=True))


@DTYPES
@pytest.mark.parametrize("page_size", [16, 64])
@on_every_backend
def test_paged_decode_does_not_depend_on_the_pages(backend, page_size, dtype):
    q, k, v, lengths = decode_inputs(backend, dtype, None)
    count = k.shape[2] // page_size

    def run(seed: int, rows: list[int]) -> tuple[Tensor, ...]:
        total = len(LENGTHS) * count + 5
        table = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: len(LENGTHS) * count]
        table = table.view(len(LENGTHS), count).to(q.device)
        pools = []
        for cache in (k, v):
            pool = torch.full((total, 2, page_size, cache.shape[3]), math.nan, dtype=dtype, device=q.device)
            pool[table] = cache.unflatten(2, (count, page_size)).transpose(1, 2)
            pools.append(pool)
        return hw.attention_decode(
            q[rows], *pools, lengths[rows], block_table=table.int()[rows], return_lse=True, backend=backend
        )

    first = run(0, list(range(len(LENGTHS))))
    for seed, rows in ((1, list(range(len(LENGTHS)))), (2, [3]), (3, [6, 2, 0]), (4, [0] * 9)):
        assert all(same_bits(a, b[rows]) for a, b in zip(run(seed, rows), first, strict=True)), f"rows {rows}"


@on_every_backend
def test_decode_with_any_number_of_splits_is_the_same_result(backend):
    """Not the same bits, but each of them within the budget."""
    q, k, v, lengths = decode_inputs(backend, torch.float32, None)
    for splits in (1, 2, 3, 7, 64, 1000):
        direct.assert_within_budget(
            lambda q, n=splits: hw.attention_decode(q, k, v, lengths, num_splits=n, return_lse=True, backend=backend),
            lambda q: direct.decode(q, k.to(q.dtype), v.to(q.dtype), LENGTHS),
            {"q": q},
            backward=False,
        )

"""Heads, ids and rows that are larger than a kernel may bind: worked on in ranges, with the results of one piece.

The binding is made so small that tensors of a test are larger: the same code as for heads of gigabytes.
"""

from __future__ import annotations

import pytest
import torch
from webgpu_tint import compile_with_tint

import headwise as hw
import headwise.webgpu
from headwise.backends.webgpu import runtime, shaders
from headwise.backends.webgpu.storage import OutOfMemory
from headwise.config import settings

BINDING = 16384
CLOSE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # of the largest number


class Rendered(list):
    def __init__(self, device):
        kernel = device.kernel

        def noted(name, **variant):
            self.append((name, variant))
            return kernel(name, **variant)

        device.kernel = noted

    def ranged(self, name):
        return [variant for found, variant in self if found == name and variant.get("ranged")]


@pytest.fixture
def rendered(monkeypatch):
    """The device with a small binding; all kernels that calls ask it for."""
    monkeypatch.setattr(settings, "webgpu_binding_bytes", BINDING)
    runtime.forget()
    yield Rendered(runtime.device())
    monkeypatch.undo()
    runtime.forget()


def close(ours, expected):
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.isinf(), expected.isinf())
    finite = expected.isfinite()
    largest = expected[finite].abs().max().item()
    assert (ours.double() - expected)[finite].abs().max() <= CLOSE[ours.dtype] * largest


def inputs(dtype, heads, key_heads, queries, keys, d, dv, inside=False, batch=1):
    torch.manual_seed(queries + keys + d)
    sizes = [(heads, queries, d), (key_heads, keys, d), (key_heads, keys, dv), (heads, queries, dv)]
    if inside:
        return [torch.randn(batch, s, h, n).to(dtype).transpose(1, 2) for h, s, n in sizes]
    return [torch.randn(batch, h, s, n).to(dtype) for h, s, n in sizes]


def with_gradients(call, tensors, grad, **given):
    leaves = [x.detach().requires_grad_() for x in tensors]
    wanted = {name: x.detach().requires_grad_() for name, x in given.items() if name == "sink"}
    out, lse = call(*leaves, **given | wanted)
    loss = (out * grad).sum() + 0.5 * torch.where(lse.isfinite(), lse, 0.0).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, [*leaves, *wanted.values()])


def check(dtype, tensors, **flags):
    """Forward and backward against float64, and against themselves."""
    *tensors, grad = tensors

    def on(backend, dtype):
        def call(q, k, v, **given):
            return hw.attention(q, k, v, **flags | given, return_lse=True, backend=backend)

        given = {n: x.to(dtype) for n, x in flags.items() if torch.is_tensor(x) and x.is_floating_point()}
        return with_gradients(call, [x.to(dtype) for x in tensors], grad.to(dtype), **given)

    ours, again, expected = on("webgpu", dtype), on("webgpu", dtype), on("cpu", torch.float64)
    for one, same, truth in zip(ours, again, expected, strict=True):
        assert torch.equal(one, same) or one.isnan().any()
        close(one, truth)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@DTYPES
@pytest.mark.parametrize("inside", [False, True], ids=["heads outside", "heads inside"])
@pytest.mark.parametrize(
    ("queries", "keys"), [(17, 400), (400, 17), (300, 400)], ids=["many keys", "many queries", "many of both"]
)
def test_heads_larger_than_a_binding(rendered, queries, keys, inside, dtype):
    """Grouped heads, causal: keys come in ranges of the forward, and both sides in ranges of the backward."""
    check(dtype, inputs(dtype, 4, 2, queries, keys, 32, 36, inside), causal=True)
    assert bool(rendered.ranged("attention_forward")) == (keys > 100)
    sides = {variant["side"] for variant in rendered.ranged("attention_backward")}
    assert sides == {"queries", "keys"}


@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(torch.float32).min, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_huge_equal_logits_weigh_all_ranges_alike(rendered, dtype, lowest):
    """Beside such a number a float32 has no digits left for the logarithm of how many keys there were."""
    q, k, v, _ = inputs(dtype, 1, 1, 8, 400, 32, 32)
    bias = torch.zeros(1, 1, 8, 400)
    bias[:, :, 2] = lowest
    out = hw.attention(q, k, v, bias=bias, backend="webgpu")
    assert rendered.ranged("attention_forward")
    close(out[:, :, 2], v.double().mean(2))


@pytest.mark.parametrize("packed", [False, True])
def test_memory_of_ranges_grows_with_their_number_and_not_with_its_square(rendered, packed):
    """Heads lie inside, so that every range is copied; arrays keep all that a call has made until it ends."""
    peaks = []
    for length in (250, 1000):
        runtime.forget()
        device = runtime.device()
        x = [hw.webgpu.array(torch.randn(length, 2, 32)) for _ in range(4)]
        if packed:
            offsets = hw.webgpu.array(torch.tensor([0, length], dtype=torch.int32))
            given = (*x[:3], offsets, offsets, length, length)
            out, lse = hw.attention_varlen(*given, return_lse=True)
            hw.attention_varlen_backward(x[3], *x[:3], out, lse, offsets, offsets, length, length)
        else:
            q, k, v, grad = (y[None].transpose(1, 2) for y in x)
            out, lse = hw.attention(q, k, v, return_lse=True)
            hw.attention_backward(grad, q, k, v, out, lse)
        peaks.append(device.pool.allocated / (length * 2 * 32 * 4))
    assert peaks[1] < 1.3 * peaks[0]


@pytest.mark.parametrize(
    "flags",
    [
        {"window": (60, 25), "softcap": 15.0},
        {"sink": torch.tensor([1.0, -0.5]), "window": (50, 0)},
        {"kv_lengths": torch.tensor([331, 0]), "causal": True, "sink": torch.tensor([0.3, 2.0])},
        {"kv_lengths": torch.tensor([-1, 200])},
        {"kv_lengths": torch.tensor([331, 400]), "window": (250, 90), "dropout": 0.3, "dropout_seed": 11},
        {
            "kv_lengths": torch.tensor([331, 400]),
            "q_lengths": torch.tensor([90, 37]),
            "causal": True,
            "kv_starts": torch.tensor([120, 350]),
            "sink": torch.tensor([0.3, 2.0]),
        },
    ],
    ids=[
        "window and cap",
        "sink and window",
        "lengths and sink",
        "a length that is nonsense",
        "dropout",
        "all lengths",
    ],
)
def test_flags_with_ranges(rendered, flags):
    check(torch.float32, inputs(torch.float32, 2, 1, 90, 400, 36, 32, batch=2 if "kv_lengths" in flags else 1), **flags)
    assert rendered.ranged("attention_forward")
    assert rendered.ranged("attention_backward")


@DTYPES
def test_masks_and_biases_with_ranges(rendered, dtype):
    mask = torch.rand(1, 1, 70, 400, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[:, :, 3] = False
    mask[:, :, 5, :250] = False  # this row sees nothing of the first ranges
    bias = torch.randn(1, 2, 70, 400, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias[:, :, 7, 100:] = -torch.inf
    check(dtype, inputs(dtype, 2, 1, 70, 400, 32, 32), mask=mask, bias=bias)
    check(dtype, inputs(dtype, 2, 1, 70, 400, 32, 32), mask=mask, sink=torch.tensor([0.25, 3.0]))
    assert rendered.ranged("attention_backward")


@DTYPES
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_packed_heads_larger_than_a_binding(rendered, dropout, dtype):
    """Ranges begin and end inside of sequences."""
    torch.manual_seed(3)
    cu = torch.tensor([0, 190, 190, 260, 403], dtype=torch.int32)
    q, k, v, grad = (torch.randn(403, heads, 32).to(dtype) for heads in (2, 1, 1, 2))

    def on(backend, dtype):
        def call(q, k, v):
            flags = {"causal": True, "dropout": dropout, "dropout_seed": 5, "return_lse": True, "backend": backend}
            return hw.attention_varlen(q, k, v, cu, cu, 190, 190, **flags)

        return with_gradients(call, [x.to(dtype) for x in (q, k, v)], grad.to(dtype))

    for ours, expected in zip(on("webgpu", dtype), on("cpu", torch.float64), strict=True):
        close(ours, expected)
    assert rendered.ranged("attention_forward")
    assert rendered.ranged("attention_backward")


@DTYPES
def test_decoding_over_a_head_larger_than_a_binding(rendered, dtype):
    q, k, v, _ = inputs(dtype, 4, 2, 1, 600, 32, 32, batch=2)
    lengths = torch.tensor([600, 413])
    ours = hw.attention_decode(q, k, v, lengths, backend="webgpu")
    close(ours, hw.attention_decode(q.double(), k.double(), v.double(), lengths, backend="cpu"))
    assert k[0, 0].numel() * k.itemsize > BINDING


@DTYPES
@pytest.mark.parametrize("batch", [1, 2])
def test_splits_of_a_decoded_head_whose_partials_are_larger_than_a_binding(rendered, batch, dtype):
    """As many as can be bound, whatever is asked for; the batch changes no bits."""
    q, k, v, _ = inputs(dtype, 16, 1, 1, 500, 32, 32, batch=batch)
    lengths = torch.tensor([500, 231][:batch])
    ours, *fewer = (hw.attention_decode(q, k, v, lengths, num_splits=splits, backend="webgpu") for splits in (32, 8))
    close(ours, hw.attention_decode(q.double(), k.double(), v.double(), lengths, backend="cpu"))
    assert 32 * q[0].numel() * 4 > BINDING >= 8 * q[0].numel() * 4
    assert torch.equal(ours, fewer[0])
    alone = hw.attention_decode(q[:1], k[:1], v[:1], lengths[:1], num_splits=32, backend="webgpu")
    assert torch.equal(ours[:1], alone)


@DTYPES
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_narrow_rows_whose_statistics_are_larger_than_a_binding(rendered, width, dtype):
    """Twelve bytes of statistics for a row of two bytes, or eight of a target."""
    torch.manual_seed(width)
    x, grad = torch.randn(2, 2500, width).to(dtype)
    leaves = [x, torch.randn(width).to(dtype), torch.randn(width).to(dtype)]

    def normed(backend, dtype):
        given = [t.to(dtype, copy=True).requires_grad_() for t in leaves]
        y = hw.layer_norm(*given, eps=0.1, backend=backend)
        return y.detach(), *torch.autograd.grad(y, given, grad.to(dtype))

    targets = torch.randint(0, width, (2500,))

    def loss(backend, dtype):
        given = x.to(dtype, copy=True).requires_grad_()
        losses = hw.cross_entropy(given, targets, reduction="none", label_smoothing=0.1, backend=backend)
        return losses.detach(), *torch.autograd.grad(losses.sum(), given)

    for run in (normed, loss):
        for ours, expected in zip(run("webgpu", dtype), run("cpu", torch.float64), strict=True):
            if width > 1:
                close(ours, expected)
            else:
                assert torch.isfinite(ours).all()


@DTYPES
@pytest.mark.parametrize(("count", "width"), [(1, 4000), (3, 2500)])
def test_few_long_rows_whose_partials_are_larger_than_a_binding(rendered, count, width, dtype):
    grad, ids = torch.randn(count, width).to(dtype), torch.tensor([1, 0, 1][:count])
    ours = hw.embedding_backward(grad, ids, 2, backend="webgpu")
    close(ours, torch.zeros(2, width, dtype=torch.float64).index_add_(0, ids, grad.double()))


@DTYPES
@pytest.mark.parametrize("width", [1, 12])
def test_ids_larger_than_a_binding(rendered, width, dtype):
    """In as many parts as it takes; gradients are rounded once."""
    torch.manual_seed(4)
    ids = torch.randint(0, 7, (BINDING // 8 + 300,))
    ids[:2000] = 5  # one that every part has many of
    weight, grad = torch.randn(7, width).to(dtype), torch.randn(len(ids), width).to(dtype)
    assert torch.equal(hw.embedding(ids, weight, backend="webgpu"), weight[ids])
    ours = hw.embedding_backward(grad, ids, 7, backend="webgpu")
    expected = torch.zeros(7, width, dtype=torch.float64).index_add_(0, ids, grad.double())
    close(ours, expected)
    assert ("embedding_sum", "f32") in {(name, variant.get("to")) for name, variant in rendered}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("rows", [None, [3, -1, 77, 77]], ids=["all rows", "named rows"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_probabilities_of_a_head_larger_than_a_binding(rendered, dropout, rows, dtype):
    """A head of q and one of k can be bound, what is made of them ten times over cannot."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 201, 16).to(dtype), torch.randn(2, 1, 190, 16).to(dtype)
    grad = torch.randn(2, 2, 201 if rows is None else 4, 190).to(dtype)

    def run(backend, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k)]
        flags = {"causal": True, "rows": rows, "dropout": dropout, "dropout_seed": 5}
        probs = hw.attention_probs(*leaves, **flags, backend=backend)
        return probs.detach(), *torch.autograd.grad(probs, leaves, grad.to(dtype))

    for ours, expected in zip(run("webgpu", dtype), run("cpu", torch.float64), strict=True):
        close(ours, expected)


@pytest.mark.parametrize("broadcast", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_of_a_bias_whose_head_is_larger_than_a_binding(rendered, dropout, broadcast):
    q, k, v, grad = inputs(torch.float32, 2, 1, 130, 140, 16, 16, batch=2)
    bias = torch.randn(*(1 if dim in broadcast else size for dim, size in enumerate((2, 2))), 130, 140)

    def run(backend, dtype):
        leaf = bias.to(dtype, copy=True).requires_grad_()
        flags = {"bias": leaf, "dropout": dropout, "dropout_seed": 5}
        out = hw.attention(*(x.to(dtype) for x in (q, k, v)), **flags, backend=backend)
        return torch.autograd.grad(out, leaf, grad.to(dtype))[0]

    close(run("webgpu", torch.float32), run("cpu", torch.float64))


def test_what_is_refused_says_what_to_do(rendered):
    with pytest.raises(
        OutOfMemory, match=r"probs would have to see \d+ bytes of k .* binds at most 16384\. Split the call"
    ):
        hw.attention_probs(torch.randn(1, 1, 4, 64), torch.randn(1, 1, 400, 64), backend="webgpu")


@pytest.mark.parametrize("tier", ["A", "C"])
def test_ranges_compile_under_tint(monkeypatch, tier, rendered):
    device = runtime.device()
    if tier == "A":
        limits = {"tier": "A", "subgroup_size": 0, "workgroup_memory": 16384, "workgroup_threads": 256}
        monkeypatch.setattr(device, "capabilities", device.capabilities._replace(**limits))
    for dtype in (torch.float32, torch.bfloat16):
        tensors = inputs(dtype, 2, 1, 70, 400, 36, 32)
        mask = torch.ones(1, 1, 70, 400, dtype=torch.bool)
        for flags in ({"causal": True}, {"mask": mask, "bias": torch.zeros(1, 1, 70, 400, dtype=dtype)}):
            check(dtype, tensors, **flags)
    seen = set()
    for name, variant in rendered:
        if variant.get("ranged") or name == "round_rows":
            seen.add((name, variant.get("subgroups")))
            compile_with_tint(shaders.render(name, dialect=shaders.TINT, **variant).text, floor=tier == "A")
    assert {name for name, _ in seen} == {"attention_forward", "attention_backward", "round_rows"}
    assert {subgroups for name, subgroups in seen if name != "round_rows"} == {tier == "C"}


@pytest.mark.parametrize("shape", [(40, 256), (40, 250), (25000,)], ids=str)
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_units_larger_than_a_binding(rendered, shape, halves, dtype):
    if len(shape) == 1 and halves:
        shape = (100, 125)  # one row, which has to be bound at once, is at most a binding
    gate, up, grad = (torch.randn(shape).to(dtype) for _ in range(3))
    given = (torch.cat([gate, up], -1),) if halves else (gate, up)
    leaves = [x.double().requires_grad_() for x in given]
    expected = hw.reference.glu(*leaves)
    close(hw.glu(*given, backend="webgpu"), expected)
    found = hw.glu_backward(grad, *given, backend="webgpu")
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    for ours, exact in zip([found] if halves else found, wanted, strict=True):
        close(ours, exact)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("given", [True, False], ids=["positions", "no positions"])
@pytest.mark.parametrize(("d", "pairs"), [(64, 32), (64, 12), (37, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotated_heads_larger_than_a_binding(rendered, inside, given, d, pairs, dtype):
    q, k, _, _ = inputs(dtype, 3, 1, 150, 150, d, d, inside, batch=2)
    angles = torch.outer(torch.arange(150.0), 100.0 ** -torch.linspace(0, 1, pairs))
    positions = torch.randint(0, 150, (2, 150)) if given else None
    tables = angles.cos(), angles.sin()
    for run, sign in ((hw.rope, 1), (hw.rope_backward, -1)):
        found = run((q, k), *tables, positions, backend="webgpu")
        for ours, x in zip(found, (q, k), strict=True):
            exact = hw.reference.rope(x.double(), tables[0].double(), sign * tables[1].double(), positions)
            close(ours, exact)

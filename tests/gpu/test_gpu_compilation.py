"""Nothing compiles because of a length; and a model goes through torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from gpu_machine import DEVICE, assert_close, gpu, ints, normal
from torch import Tensor, nn

import headwise as hw

__all__ = ["gpu"]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The kernels that Triton makes anew inside the block (also those that it finds on disk)."""
    triton = pytest.importorskip("triton")
    found: list[str] = []

    def made(**about: object) -> None:
        found.append(str(about.get("repr") or about.get("key")))

    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = made
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


def gradients(out: Tensor, *leaves: Tensor) -> None:
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def dense(size: int) -> None:
    batch, queries, keys = 1 + size % 3, size, size + size % 5
    q = normal(batch, 4, queries, 64).requires_grad_()
    k, v = (normal(batch, 2, keys, 64).requires_grad_() for _ in range(2))
    gradients(hw.attention(q, k, v, causal=True), q, k, v)
    lengths = torch.full((batch,), keys - 1, dtype=torch.int32, device=DEVICE)
    hw.attention(q.detach(), k.detach(), v.detach(), kv_lengths=lengths, window=(size % 100, 0))


def heads_inside(size: int) -> None:
    """As models have it: transposed views of (B, S, H, D)."""
    q, k, v = (normal(2, size, 4, 128).transpose(1, 2).requires_grad_() for _ in range(3))
    gradients(hw.attention(q, k, v), q, k, v)


def packed(size: int) -> None:
    sequences = 1 + size % 9
    cu = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE) * size
    q, k, v = (normal(sequences * size, 4, 64).requires_grad_() for _ in range(3))
    gradients(hw.attention_varlen(q, k, v, cu, cu, size, size, causal=True), q, k, v)


def decode(size: int) -> None:
    batch = 1 + size % 4
    k, v = (normal(batch, 2, size, 128) for _ in range(2))
    lengths = torch.full((batch,), size, dtype=torch.int32, device=DEVICE)
    hw.attention_decode(normal(batch, 8, 128), k, v, lengths)


def paged(size: int) -> None:
    pages = -(-size // 64)
    k, v = (normal(2 * pages, 2, 64, 128) for _ in range(2))
    table = torch.arange(2 * pages, dtype=torch.int32, device=DEVICE).reshape(2, pages)
    hw.attention_decode(normal(2, 8, 128), k, v, ints(size, size // 2), block_table=table)


def rows(size: int) -> None:
    x, weight = normal(size, 512).requires_grad_(), normal(512).requires_grad_()
    gradients(hw.rms_norm(x, weight), x, weight)
    gradients(hw.softmax(x), x)
    targets = torch.arange(size, device=DEVICE) % 512
    gradients(hw.cross_entropy(x, targets), x)
    hw.cross_entropy_forward_backward(x.detach(), targets)
    gradients(hw.embedding(targets, x), x)
    hw.transpose(x.detach())


# Lengths that Triton would like to tell apart: 1, odd, even, a multiple of 16, beyond a tile, beyond many.
SIZES = (17, 100, 1, 64, 333, 1024, 1000, 2049, 3000)
# Two lengths that meet both ways, short and long, that a kernel may have for good reasons.
FIRST = (16, 4096)


@pytest.mark.parametrize("calls", [dense, heads_inside, packed, decode, paged, rows], ids=lambda f: f.__name__)
def test_no_length_compiles_anything(calls):
    for size in FIRST:
        calls(size)
    with compilations() as made:
        for size in SIZES:
            calls(size)
    assert made == []


def test_compilations_are_seen():
    with compilations() as made:
        hw.softmax(normal(3, 7777, dtype=torch.float16))  # of a width that nothing else here has
    assert made


class Model(nn.Module):
    """Two layers of a transformer, from ids to the loss, with every op of a training step."""

    def __init__(self, vocabulary: int = 512, width: int = 128, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = heads, key_heads, width // heads
        self.table = nn.Parameter(torch.randn(vocabulary, width) * 0.3)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(3)])
        self.to_qkv = nn.ModuleList(
            [nn.Linear(width, (heads + 2 * key_heads) * self.head_dim, bias=False) for _ in range(2)]
        )
        self.to_out = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2)])
        self.sink = nn.Parameter(torch.zeros(heads))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = hw.embedding(ids, self.table)
        batch, length, width = x.shape
        for norm, to_qkv, to_out in zip(self.norms, self.to_qkv, self.to_out, strict=False):
            qkv = to_qkv(hw.rms_norm(x, norm)).view(batch, length, -1, self.head_dim).transpose(1, 2)
            q, k, v = qkv.split([self.heads, self.key_heads, self.key_heads], 1)
            out = hw.attention(q, k, v, causal=True, sink=self.sink)
            x = x + to_out(out.transpose(1, 2).reshape(batch, length, width))
        logits = hw.rms_norm(x, self.norms[2]) @ self.table.mT
        return hw.cross_entropy(logits, targets, z_loss=1e-4, softcap=30.0)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_trains_the_same_compiled(dynamic):
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for length in (100, 129, 64):
        generator = torch.Generator().manual_seed(length)
        ids, targets = (torch.randint(0, 512, (3, length), generator=generator).to(DEVICE) for _ in range(2))
        targets[0, :5] = -100
        eager_loss, loss = model(ids, targets), compiled(ids, targets)
        eager = torch.autograd.grad(eager_loss, list(model.parameters()))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert_close(loss.detach(), eager_loss.detach(), 1e-5)
        for ours, truth in zip(grads, eager, strict=True):
            assert_close(ours, truth, 1e-4)

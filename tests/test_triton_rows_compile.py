"""The kernels of the row ops, rope, glu, embedding, transpose and merge compile for every kind of GPU, here, without one."""

from __future__ import annotations

import re

import pytest
import torch
from ahead_of_time import TARGETS, TUNED, Recorded, registers, stack
from triton import JITFunction

from headwise.backends.triton import (
    add_rms_norm,
    cross_entropy,
    embedding,
    glu,
    layer_norm,
    merge,
    norm_backward,
    norm_forward,
    rms_norm,
    rope,
    softmax,
    transpose,
)
from headwise.backends.triton.gpu import KNOWN
from headwise.backends.triton.recording import Recording
from headwise.backends.triton.row_tiling import LONGEST_ONE_PASS, REDUCTION_BYTES, Rows, prefetches
from headwise.ops.add_rms_norm import AddRmsNorm, AddRmsNormBackward
from headwise.ops.attention.merge import Merge, MergeBackward
from headwise.ops.cross_entropy import CrossEntropy, CrossEntropyBackward
from headwise.ops.embedding import Embedding, EmbeddingBackward
from headwise.ops.glu import Glu, GluBackward
from headwise.ops.layer_norm import LayerNorm, LayerNormBackward
from headwise.ops.rms_norm import RmsNorm, RmsNormBackward
from headwise.ops.rope import Rope
from headwise.ops.softmax import Softmax, SoftmaxBackward
from headwise.ops.transpose import Transpose

BF16, F32 = torch.bfloat16, torch.float32
PLAIN, ALL_FLAGS = ("mean", 0.0, 0.1, None), ("mean", 0.1, 0.1, 9.0)


def meta(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype, device="meta")


def _cross_entropy(x, options):
    return CrossEntropy(x, meta(*x.shape[:-1], dtype=torch.int64), -100, *options)


def _cross_entropy_backward(x, options=ALL_FLAGS):
    return CrossEntropyBackward(meta(), meta(2, len(x)), _cross_entropy(x, options))


def _merge(x, count=8):
    return [x.view(-1, 2, *x.shape[-1:]).clone() for _ in range(count)], [meta(len(x) // 2, 2) for _ in range(count)]


def _both(x):
    """A tensor of twice the width."""
    return meta(len(x), 2 * x.shape[1], dtype=x.dtype)


def _rope(x, pairs, positions=False, interleaved=False):
    """Of packed q with 32 heads and k with 8, as wide as x."""
    tables = [meta(len(x), pairs) for _ in range(2)]
    q, k = (meta(len(x), heads, x.shape[1], dtype=x.dtype) for heads in (32, 8))
    return Rope([q, k], *tables, meta(len(x), dtype=torch.int64) if positions else None, interleaved)


# The launcher and its arguments, for rows x. Triton reads integers as int64: no bits are lost in a transpose.
CALLS = {
    "softmax_forward": lambda x: (softmax.softmax_forward, Softmax(x)),
    "softmax_backward": lambda x: (softmax.softmax_backward, SoftmaxBackward(x, x.clone())),
    "rms_norm_forward": lambda x: (rms_norm.rms_norm_forward, RmsNorm(x, x[0].clone(), 1e-6, 0.0, True)),
    "rms_norm_backward": lambda x: (
        rms_norm.rms_norm_backward,
        RmsNormBackward(x.clone(), x, x[0].clone(), meta(len(x)), 1e-6, 0.0),
    ),
    "rms_norm_backward, no weight": lambda x: (
        rms_norm.rms_norm_backward,
        RmsNormBackward(x.clone(), x, None, None, 1e-6, 0.0),
    ),
    "layer_norm_forward": lambda x: (
        layer_norm.layer_norm_forward,
        LayerNorm(x, x[0].clone(), x[0].clone(), 1e-5, True),
    ),
    "layer_norm_backward": lambda x: (
        layer_norm.layer_norm_backward,
        LayerNormBackward(x.clone(), x, x[0].clone(), x[0].clone(), meta(len(x), 3), 1e-5),
    ),
    "add_rms_norm_forward": lambda x: (
        add_rms_norm.add_rms_norm_forward,
        AddRmsNorm(x, x.clone(), x[0].clone(), 1e-6, 0.0, True),
    ),
    "add_rms_norm_backward": lambda x: (
        add_rms_norm.add_rms_norm_backward,
        AddRmsNormBackward(x.clone(), x.clone(), x, x[0].clone(), meta(len(x)), 1e-6, 0.0),
    ),
    "cross_entropy_forward": lambda x: (cross_entropy.cross_entropy_forward, _cross_entropy(x, PLAIN)),
    "cross_entropy_backward": lambda x: (cross_entropy.cross_entropy_backward, _cross_entropy_backward(x)),
    "cross_entropy_both": lambda x: (cross_entropy.cross_entropy_forward_backward, _cross_entropy(x, PLAIN)),
    "cross_entropy_both, all flags": lambda x: (
        cross_entropy.cross_entropy_forward_backward,
        _cross_entropy(x, ALL_FLAGS),
    ),
    "embedding_forward": lambda x: (
        embedding.embedding_forward,
        Embedding(meta(len(x), dtype=torch.int64), x, -1, len(x)),
    ),
    "embedding_backward": lambda x: (
        embedding.embedding_backward,
        EmbeddingBackward(x, meta(len(x), dtype=torch.int64), len(x), -1),
    ),
    "glu_forward": lambda x: (glu.glu_forward, Glu(x, x.clone(), "silu")),
    "glu_forward, halves, gelu": lambda x: (glu.glu_forward, Glu(_both(x), None, "gelu")),
    "glu_backward": lambda x: (glu.glu_backward, GluBackward(x.clone(), x, x.clone(), "gelu")),
    "glu_backward, halves": lambda x: (glu.glu_backward, GluBackward(x, _both(x), None, "silu")),
    "rope_forward": lambda x: (rope.rope_forward, _rope(x, x.shape[1] // 2)),
    "rope_forward, interleaved": lambda x: (rope.rope_forward, _rope(x, x.shape[1] // 2, True, True)),
    "rope_backward, part of a head": lambda x: (rope.rope_backward, _rope(x, x.shape[1] // 8, True)),
    "transpose": lambda x: (transpose.transpose_forward, Transpose(x.view(torch.int16))),
    "merge": lambda x: (merge.merge_attention, Merge(*_merge(x))),
    "merge_backward": lambda x: (
        merge.merge_attention_backward,
        MergeBackward(*[y[0] for y in _merge(x)], *_merge(x), *[y[0] for y in _merge(x)]),
    ),
}


def recorded(op, rows, width, dtype=BF16, arch="sm_90"):
    return Recorded(*CALLS[op](meta(rows, width, dtype=dtype)), arch)


SIZES = {
    "softmax_forward": [(4096, 4096), (4, 131072), (4096, 131072), (4096, 32768)],
    "softmax_backward": [(4096, 16384), (4, 131072), (4096, 131072)],
    "rms_norm_forward": [(4096, 4096), (4, 131072), (4096, 131072)],
    "rms_norm_backward": [(4096, 4096), (4096, 16384), (4096, 131072)],
    "rms_norm_backward, no weight": [(4096, 4096)],
    "layer_norm_forward": [(4096, 4096), (4, 131072), (4096, 131072)],
    "layer_norm_backward": [(4096, 512), (4096, 16384), (4096, 131072)],
    "add_rms_norm_forward": [(4096, 4096), (4, 131072), (4096, 131072)],
    "add_rms_norm_backward": [(4096, 128), (4096, 512), (4096, 16384), (4096, 131072)],
    "cross_entropy_forward": [(4096, 50257)],
    "cross_entropy_backward": [(4096, 50257)],
    "cross_entropy_both, all flags": [(4096, 50257), (4096, 131072)],
    "embedding_forward": [(4096, 4096)],
    "embedding_backward": [(4096, 4096), (1024, 4096)],
    "glu_forward": [(4096, 4096), (4096, 1)],
    "glu_forward, halves, gelu": [(4096, 4096)],
    "glu_backward": [(4096, 4096)],
    "glu_backward, halves": [(4096, 4096), (4096, 777)],
    "rope_forward": [(4096, 128), (4096, 80)],
    "rope_forward, interleaved": [(4096, 128)],
    "rope_backward, part of a head": [(4096, 128), (4096, 80)],
    "transpose": [(4096, 4096)],
    "merge": [(4096, 80)],
    "merge_backward": [(4096, 80)],
}


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(("op", "rows", "width"), [(op, *size) for op, sizes in SIZES.items() for size in sizes])
def test_what_is_launched_compiles_and_fits(op, rows, width, arch):
    made = recorded(op, rows, width, arch=arch)
    assert made.launches
    for launch in made.launches:
        assert made.compiled(launch).metadata.shared <= KNOWN[arch].shared_memory


@pytest.mark.parametrize(
    "module", [softmax, norm_forward, norm_backward, cross_entropy, embedding, glu, rope, transpose, merge]
)
def test_every_kernel_is_compiled(module):
    """Every kernel but those that others call."""
    jitted = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    kernels = {n for n in jitted if not any(re.search(rf"\b{n}\(", k.src.split(":", 1)[1]) for k in jitted.values())}
    kernels -= {name for name in jitted if jitted[name].__module__ != module.__name__}
    launched = {
        launch.kernel.fn.__name__
        for op, sizes in SIZES.items()
        for rows, width in sizes
        for launch in recorded(op, rows, width).launches
        if launch.kernel.__module__ == module.__name__
    }
    assert launched == kernels


@pytest.mark.parametrize("arch", [arch for arch in TARGETS if KNOWN[arch].shared_memory > 2 * LONGEST_ONE_PASS])
def test_softmax_prefetches_two_rows(arch):
    made = recorded("softmax_forward", 4096, 32768, arch=arch)
    (launch,) = made.launches
    compiled = made.compiled(launch)
    assert launch.kernel is softmax._forward_prefetch
    assert "cp.async" in compiled.asm["ptx"]
    assert 2 * LONGEST_ONE_PASS <= compiled.metadata.shared <= 2 * LONGEST_ONE_PASS + REDUCTION_BYTES


def test_softmax_does_not_prefetch_rows_that_triton_would_read_one_by_one():
    gpu = Recording(KNOWN["sm_90"]._replace(multiprocessors=3))

    def ahead(rows, width, dtype=BF16, stride=None):
        return prefetches(gpu, rows, width, Rows(meta(rows, width, dtype=dtype), stride or width))

    assert ahead(24, 20000)
    assert not ahead(23, 20000)
    assert not ahead(24, 20008)
    assert not ahead(24, 20000, stride=20008)
    assert not ahead(24, 16384)
    assert not ahead(24, 32784)
    assert not ahead(24, 20000, dtype=F32)


def test_rms_norm_rows_that_are_read_one_by_one_have_small_blocks():
    """Larger ones need so many registers for addresses that a multiprocessor has room for one program in place of four."""
    x = Rows(meta(8, 50257, dtype=BF16), 50257)
    assert norm_forward.two_pass_block(Recording(KNOWN["sm_90"]), 50257, x).lines == 2048


# Where a program holds the most: the widest rows of each way, and rows that no 16-byte load is aligned with.
WIDE = {
    "softmax_forward": [(BF16, 32768), (BF16, 131072), (BF16, 50257), (F32, 131072)],
    "softmax_backward": [(BF16, 16384), (BF16, 131072), (F32, 131072)],
    "rms_norm_forward": [(BF16, 32768), (BF16, 131072), (BF16, 50257), (F32, 131072)],
    "rms_norm_backward": [(BF16, 128), (BF16, 16384), (BF16, 131072), (F32, 8192)],
    "layer_norm_forward": [(BF16, 32768), (BF16, 131072), (BF16, 50257), (F32, 16384), (F32, 131072)],
    "layer_norm_backward": [(BF16, n) for n in (128, 512, 1000, 2048, 4096, 16384, 131072)] + [(F32, 8192)],
    "add_rms_norm_forward": [(BF16, 32768), (BF16, 131072), (BF16, 50257), (F32, 131072)],
    "add_rms_norm_backward": [(BF16, n) for n in (128, 512, 1000, 2048, 4096, 16384, 131072)] + [(F32, 8192)],
    "cross_entropy_forward": [(BF16, 131072)],
    "cross_entropy_backward": [(BF16, 131072)],
    "cross_entropy_both": [(BF16, 50257), (F32, 131072)],
    "cross_entropy_both, all flags": [(BF16, 131072)],
    "glu_forward, halves, gelu": [(BF16, 14336), (F32, 14336)],
    "glu_backward": [(BF16, 14336), (F32, 777)],
    "glu_backward, halves": [(BF16, 14336), (F32, 14336)],
    "rope_forward": [(BF16, 128), (F32, 256)],
    "rope_forward, interleaved": [(BF16, 128), (F32, 256)],
    "rope_backward, part of a head": [(BF16, 128), (BF16, 80)],
    "merge": [(BF16, 80), (F32, 80)],
    "merge_backward": [(BF16, 80), (F32, 80)],
}


@pytest.mark.skipif(not TUNED, reason="the blocks were chosen with another release of Triton")
@pytest.mark.parametrize(
    ("op", "dtype", "width"),
    [pytest.param(op, *case, id=f"{op}-{case[0]}-{case[1]}") for op, cases in WIDE.items() for case in cases],
)
def test_kernels_keep_to_the_registers(op, dtype, width, tmp_path):
    """What is launched for many rows of this width spills nothing on sm_90."""
    made = recorded(op, 4096, width, dtype)
    for launch in made.launches:
        assert stack(made.compiled(launch), tmp_path) == 0, launch


@pytest.mark.parametrize("op", [op for op in CALLS if not op.startswith("merge")])
def test_no_number_of_rows_asks_for_another_kernel(op):
    """Triton compiles a kernel anew for other constants, and for numbers that become 1 or a multiple of 16."""

    def kernels(rows):
        for launch in recorded(op, rows, 512).launches:
            parameters = launch.kernel.params[len(launch.tensors) :]
            tail = [
                value if parameter.is_constexpr or value is None
                else None if parameter.do_not_specialize or isinstance(value, float)
                else (value == 1, value % 16 == 0)
                for parameter, value in zip(parameters, launch.tail, strict=True)
            ]  # fmt: skip
            yield launch.kernel.fn.__name__, [t is None for t in launch.tensors], tail, launch.options

    few, many = list(kernels(16)), list(kernels(3000))
    assert few
    assert (few == many) == (op != "embedding_backward")  # which does not sort a few ids
    for rows in (1, 2, 17, 100, 333, 1024, 1025, 4096):
        assert list(kernels(rows)) == (few if rows <= 1024 else many), rows


IN_PLACE = ["glu_forward", "glu_backward", "glu_backward, halves", "rope_forward", "rope_forward, interleaved"]
ROWS = ["softmax_forward", "softmax_backward", "rms_norm_backward", "layer_norm_forward", "layer_norm_backward"]
SUMS = ["add_rms_norm_forward", "add_rms_norm_backward"]


@pytest.mark.parametrize("op", [*ROWS, *SUMS, "transpose", *IN_PLACE])
def test_kernels_load_and_store_16_bytes_at_once(op):
    made = recorded(op, 4096, 512)
    ptx = made.compiled(made.launches[0]).asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32|cp\.async\S* .*, 0x10\b|cp\.async\S* .*, 16\b", ptx)
    assert re.search(r"st\.global\S*\.v4\.b32", ptx)


@pytest.mark.parametrize(("reduction", "launches"), [("mean", (2, 2, 3)), ("sum", (2, 1, 2)), ("none", (1, 1, 1))])
def test_cross_entropy_has_few_launches(reduction, launches):
    x, options = meta(64, 512, dtype=BF16), (reduction, 0.0, 0.0, None)
    grad = meta(64) if reduction == "none" else meta()
    backward = _cross_entropy_backward(x, options)._replace(grad=grad)
    assert launches == tuple(
        len(Recorded(launcher, args).launches)
        for launcher, args in (
            (cross_entropy.cross_entropy_forward, _cross_entropy(x, options)),
            (cross_entropy.cross_entropy_backward, backward),
            (cross_entropy.cross_entropy_forward_backward, _cross_entropy(x, options)),
        )
    )


@pytest.mark.parametrize("op", IN_PLACE)
def test_pointwise_ops_are_one_launch_of_few_registers(op, tmp_path):
    """q and k together, halves of one tensor as they lie. With 64 registers a multiprocessor holds 1024 threads."""
    made = recorded(op, 4096, 128)
    (launch,) = made.launches
    compiled = made.compiled(launch)
    assert compiled.metadata.shared == 0
    if TUNED:
        assert registers(compiled, tmp_path) <= 64


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("op", ["rms_norm_backward", "layer_norm_backward", "add_rms_norm_backward"])
def test_norm_pipelines_fit_the_shared_memory(op, arch):
    """Rows of 8192 float32 and a third tensor fetch more ahead than small GPUs have room for."""
    made = recorded(op, 4096, 8192, F32, arch)
    for launch in made.launches:
        assert made.compiled(launch).metadata.shared <= KNOWN[arch].shared_memory


@pytest.mark.parametrize(("op", "launches"), [("add_rms_norm_forward", 1), ("add_rms_norm_backward", 2)])
def test_the_sum_of_add_rms_norm_is_no_kernel_of_its_own(op, launches):
    """Backward: the gradient of h is added where dx is made; the second kernel adds up dweight."""
    assert len(recorded(op, 4096, 4096).launches) == launches

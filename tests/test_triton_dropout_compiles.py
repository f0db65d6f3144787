"""Dropout in compiled Triton kernels: what one Philox call costs, registers, and which calls share a kernel."""

from __future__ import annotations

import re

import pytest
import torch
from ahead_of_time import TUNED, Recorded, stack
from test_triton_compiles import BF16, CAUSAL, F32, FULL, I32, TARGETS, assert_fits, meta, plain, slow

from headwise.backends.triton.attention_backward import attention_backward
from headwise.backends.triton.attention_forward import attention_forward
from headwise.backends.triton.probs import attention_probs, attention_probs_backward
from headwise.ops.attention._arguments import Attention, AttentionBackward, Packing, Probs, ProbsBackward

__all__ = ["plain"]  # a fixture

SPILLED = 64  # bytes of stack that a thread may have, as without dropout


def launches(arch, dim, flags, *, dtype=BF16, packed=False, bias=False, key_heads=8, seed_numbers=1):
    """Everything that attention with dropout launches, both directions."""
    seed = meta(seed_numbers, dtype=torch.int64) if flags.dropout else None
    shape, keys = ((2048, 8, dim), (2048, key_heads, dim)) if packed else ((2, 8, 1024, dim), (2, key_heads, 1024, dim))
    q, k, v = (meta(*x, dtype=dtype) for x in (shape, keys, keys))
    packing = Packing(meta(5, dtype=I32), meta(5, dtype=I32), 600, 600) if packed else None
    biases = meta(8, 1024, 1024) if bias else None
    args = Attention(q, k, v, None, biases, None, None, None, None, packing, flags, True, seed)
    lse = meta(*((8, 2048) if packed else shape[:3]), dtype=F32)
    backward = AttentionBackward(meta(*shape, dtype=dtype), None, meta(*shape, dtype=dtype), lse, args, bias, False)
    made = [Recorded(attention_forward, args, arch), Recorded(attention_backward, backward, arch)]
    return [(recorded, launch) for recorded in made for launch in recorded.launches]


DROPPING = FULL._replace(dropout=0.1)


@pytest.mark.skipif(not TUNED, reason="other compilers may fold less")
@pytest.mark.parametrize("seed_numbers", [1, slow(3), 6])
@pytest.mark.parametrize("dim", [64, slow(128)])
def test_one_call_of_philox_serves_eight_entries_of_a_thread(dim, seed_numbers):
    """Two products for each of eight rounds, in two loops; the first two rounds multiply rows and keys by themselves.

    Four entries where the tile is transposed. Without the sharing there would be sixteen products for every entry. Three
    numbers of a seed: a call of some heads of a larger one; six: of queries and keys from multiples of 16 on.
    """
    entries_of_a_call = {"_forward": 8, "backward_queries": 8, "backward_keys": 4}
    for recorded, launch in launches("sm_90", dim, DROPPING, seed_numbers=seed_numbers):
        name, V = launch.kernel.__name__, launch.tail[-1]
        entries = V.QUERIES * V.KEYS // (32 * launch.options["num_warps"])
        products = len(re.findall(r"mul\.wide\.u32", recorded.compiled(launch).asm["ptx"]))
        assert products <= 2 * 16 * entries / entries_of_a_call.pop(name) + 16, name
    assert not entries_of_a_call


@pytest.mark.parametrize("dim", [64, slow(128), slow(256)])
@pytest.mark.parametrize("flags", [DROPPING, slow(CAUSAL._replace(dropout=0.1))], ids=["full", "causal"])
def test_dropout_keeps_to_the_registers(dim, flags, tmp_path):
    for recorded, launch in launches("sm_90", dim, flags):
        assert stack(recorded.compiled(launch), tmp_path) <= SPILLED, launch


@pytest.mark.parametrize("arch", ["sm_90", *(slow(arch) for arch in TARGETS if arch != "sm_90")])
@pytest.mark.parametrize("form", ["dense", slow("packed"), slow("bias"), slow("float32"), slow("anywhere")])
def test_dropout_fits_the_shared_memory(arch, form):
    given = {
        "packed": form == "packed",
        "bias": form == "bias",
        "dtype": F32 if form == "float32" else BF16,
        "key_heads": 2,
        "seed_numbers": 5 if form == "anywhere" else 1,
    }
    names = assert_fits(launches(arch, 64, DROPPING, **given), arch)
    assert {"_forward", "backward_queries", "backward_keys"} <= names


@pytest.mark.parametrize("arch", ["sm_90", *(slow(arch) for arch in TARGETS if arch != "sm_90")])
def test_dropout_of_probabilities_fits(arch):
    q, k, grad = meta(1, 4, 512, 64), meta(1, 2, 512, 64), meta(1, 4, 512, 512)
    args = Probs(q, k, *[None] * 7, DROPPING, meta(1, dtype=torch.int64))
    backward = ProbsBackward(grad, grad, args, False, False)
    made = [Recorded(attention_probs, args, arch), Recorded(attention_probs_backward, backward, arch)]
    assert assert_fits([(recorded, x) for recorded in made for x in recorded.launches], arch) == {"_probs"}


def test_no_rate_asks_for_another_kernel():
    """Triton compiles a kernel anew for numbers that become 1, a multiple of 16, or longer than 32 bits."""
    for rate in (2.0**-20, 2.0**-16, 0.1, 0.25, 0.5, 0.75, 0.999999):
        numbers = {launch.tail[-2][0] for _, launch in launches("sm_90", 64, FULL._replace(dropout=rate))[:1]}
        for below in numbers:
            assert type(below) is int
            assert below % 16 == 0
            assert -(2**31) <= below < 2**31


def test_without_dropout_kernels_are_what_they_were():
    """Neither a seed nor numbers of dropout reach a kernel: Triton leaves out what is None."""
    for _, launch in launches("sm_90", 64, CAUSAL):
        by_name = dict(zip((p.name for p in launch.kernel.params), [*launch.tensors, *launch.tail], strict=True))
        assert by_name["seed"] is None
        assert by_name["dropping"] is None

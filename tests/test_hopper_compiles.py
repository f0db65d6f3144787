"""The Hopper forward compiles for sm_90, here, without a GPU: no spills but those noted, no serialised WGMMA."""

from __future__ import annotations

import functools

import hopper_variants
import pytest
import sass
import torch
from ahead_of_time import TUNED, Recorded
from hopper_variants import CAUSAL, FULL, attention, forward_tiles, meta, noted, recorded

import headwise as hw
from headwise.backends.triton import hopper
from headwise.backends.triton.gpu import KNOWN, Gpu
from headwise.backends.triton.hopper.attention_forward import forward
from headwise.backends.triton.hopper.coverage import covers_forward, forward_tile

SHARED_MEMORY = KNOWN["sm_90"].shared_memory

# Every tile and every flag at least once, the common calls of each.
CALLS = [
    "64 (192x128) dense full", "64 (192x128) dense causal", "64 (192x128) packed causal", "64 (192x128) lengths full",
    "64 (128x128) dense full", "64 (128x128) packed full", "64 (128x64) dense causal", "80 (128x128) dense causal",
    "64 (256x64) dense full", "64 (256x64) dense causal", "64 (256x64) packed causal", "96 (128x128) dense causal",
    "128 (128x128) dense full", "128 (128x128) dense causal", "128 (128x128) packed full", "128 (128x128) packed causal",
    "128 (128x128) dense window cap sink", "128 (128x128) packed window cap sink", "128 (128x128 keys first) dense full",
    "128 (128x64) dense causal", "192 (128x64) dense causal", "192/128 dense causal", "256 (128x64) dense causal",
    "256 (128x64) lengths left", "64 mask causal", "128 mask full",
    "128 mask of queries window", "64 bias full", "128 bias of keys and mask window", "64 mask causal cap",
    "128 mask full cap", "128 bias full cap",
]  # fmt: skip


# What else `coverage` says yes to, with the most constants of each kind: masks and biases in every tile that takes them,
# caps beside both, values narrower than keys beside everything.
SLOW_CALLS = [
    "96 mask window", "96 mask of queries full", "192 mask full", "192 mask window cap", "192 mask of queries causal",
    "256 mask window cap", "64 mask of queries window cap", "128 mask window cap",
    *(f"{dim} {kind}" for dim in (64, 96, 128) for kind in (
        "bias window cap", "float32 bias full", "float32 bias of keys window cap", "bias and mask window cap",
    )),
    "192/128 dense window cap sink", "192/128 lengths window cap sink", "192/128 packed window cap sink",
    "192/128 lengths full",
]  # fmt: skip


@pytest.mark.parametrize("name", [*CALLS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CALLS)])
def test_forward_compiles_and_keeps_to_its_figures(name, tmp_path):
    kernel = hopper_variants.compiled(f"forward {name}")
    assert kernel.metadata.shared <= SHARED_MEMORY
    if TUNED:
        hopper_variants.assert_sound(kernel, noted()[f"forward {name}"], tmp_path)


def test_forward_compiles_for_float16(tmp_path):
    name = "64 (192x128)"
    tile = forward_tiles()[name][1]
    made = Recorded(functools.partial(forward, tile=tile), attention(64, lengths=True, dtype=torch.float16))
    kernel = made.compiled(made.launches[0])
    if TUNED:
        hopper_variants.assert_sound(kernel, noted()[f"forward {name} lengths full"], tmp_path)


def launched(args, multiprocessors=132):
    """Results of a forward, and its numbers and its variant by name."""
    (out, lse), (launch,), _ = recorded(forward, args, multiprocessors=multiprocessors)
    names = [p.name for p in launch.kernel.params[len(launch.described) + len(launch.tensors) :]]
    return out, lse, dict(zip(names, launch.tail, strict=True))


def test_what_a_forward_returns():
    out, lse, _ = launched(attention(128, CAUSAL, length=1000))
    assert (out.shape, out.stride()) == ((2, 16, 1000, 128), (2048000, 128000, 128, 1))
    assert (lse.shape, lse.dtype) == ((2, 16, 1000), torch.float32)
    args = attention(128, CAUSAL)
    inside = args._replace(q=meta(2, 4096, 16, 128).transpose(1, 2))
    assert launched(inside)[0].stride() == (4096 * 2048, 128, 2048, 1)
    out, lse, _ = launched(attention(128, CAUSAL, packed=7))
    assert (out.shape, lse.shape) == ((4096, 16, 128), (16, 4096))
    assert out.is_contiguous()


def test_a_call_that_tma_cannot_read_is_left_to_the_plain_kernel():
    args = attention(128, CAUSAL, sink=True)
    assert recorded(forward, args, unaligned="sink")[0] is not None
    for name in "qkv":
        assert recorded(forward, args, unaligned=name) == (None, [], [])
    assert recorded(forward, args._replace(bias=meta(4096, 4096)), unaligned="bias") == (None, [], [])


@pytest.mark.parametrize(
    ("call", "consumers", "keys"),
    [
        ({"length": 512}, 4, 64),
        ({"length": 512, "banded": True}, 4, 64),
        ({"length": 2048, "banded": True}, 4, 64),
        ({"length": 2048}, 3, 128),
        ({"length": 4096, "banded": True}, 3, 128),
        ({"length": 384}, 2, 128),  # half of the second tile would be empty
        ({"length": 384, "banded": True}, 2, 64),
        ({"length": 128}, 2, 128),
        ({"length": 512, "packed": True}, 2, 128),
        ({"length": 512, "packed": True, "banded": True}, 2, 64),
        ({"length": 1365, "packed": True, "banded": True}, 4, 64),
        ({"length": 4000, "packed": True, "banded": True}, 3, 128),
        ({"length": 512, "tiles": 512}, 2, 128),  # with a few large tiles, half of the GPU would wait for the last ones
        ({"length": 2048, "tiles": 512, "banded": True}, 2, 128),
    ],
)
def test_tiles_of_head_dim_64(call, consumers, keys):
    tile = forward_tile(64, **{"packed": False, "banded": False, "tiles": 4096, "processors": 132, **call})
    assert (tile.consumers, tile.keys) == (consumers, keys)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "banded", "keys"), [(1024, True, 64), (1025, True, 128), (512, False, 128)])
def test_tiles_of_head_dim_128(length, banded, keys, packed):
    assert forward_tile(128, length, packed, banded, 4096, 132).keys == keys


def test_a_cache_that_grows_compiles_nothing():
    window = CAUSAL._replace(left=1023)
    variants = {
        launched(attention(128, window, length=2048, keys=keys))[2]["VARIANT"]
        for keys in (2049, 3000, 3072, 4096, 20000)
    }
    assert len(variants) == 1


def test_a_packed_batch_has_the_tile_of_its_average_sequence():
    def chosen(sequences, longest):
        args = attention(128, CAUSAL, length=32768, packed=sequences)
        args = args._replace(packing=args.packing._replace(max_q=longest, max_k=longest))
        return launched(args)[2]["VARIANT"].tile

    assert chosen(64, 32768).keys == 64
    assert chosen(8, 32768).keys == 128
    assert chosen(8, 700).keys == 64
    assert chosen(0, 32768).keys == 128


@pytest.mark.parametrize(
    ("length", "head_dim", "group", "at_once"),
    [
        (512, 128, 1, 128),
        (2048, 128, 1, 32),
        (8192, 128, 4, 32),
        (8192, 256, 1, 8),
        (16384, 256, 1, 8),
        (16384, 256, 8, 64),
    ],
)
def test_heads_whose_tiles_are_drawn_together(length, head_dim, group, at_once):
    """What fits two thirds of the L2 cache, but at least eight heads of keys."""
    args = attention(head_dim, CAUSAL, length=length, batch=4, heads=64 * group, group=group)
    assert launched(args)[2]["heads_at_once"] == at_once


def test_an_arrival_that_comes_too_early_is_found():
    arrival, load = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];", "ld.shared.b32 %r2, [%r3];"
    barrier, bytes_to_come = "bar.sync 2, 128;", "@%p1 mbarrier.arrive.expect_tx.b64 _, 4;"

    def found(*lines):
        return sass.hasty_arrivals("\n".join(lines))

    assert found(barrier, load, arrival)
    assert found(barrier, "red.global.add.f32 [%rd1], %f1;", arrival)
    assert not found(load, barrier, arrival)
    assert not found(barrier, load, bytes_to_come, barrier, arrival)
    # Work that stands behind the arrival, and comes before it.
    assert found(barrier, "bra.uni $L__BB0_2;", "$L__BB0_1:", arrival, "ret;", "$L__BB0_2:", load, "bra.uni $L__BB0_1;")
    assert not found(
        load, "bra.uni $L__BB0_2;", "$L__BB0_1:", arrival, "ret;", "$L__BB0_2:", barrier, "bra.uni $L__BB0_1;"
    )


def test_a_register_that_is_not_always_set_is_found():
    skipped = """
        /*0000*/                   @!P0 BRA `(.L_x_1) ;
        /*0010*/                   UIADD3 UR16, UP0, UR24, 0x2, URZ ;
    .L_x_1:
        /*0020*/                   UIADD3 UR36, UP0, UR16, 0x2, URZ ;
        /*0030*/                   EXIT ;
    """
    assert "UIADD3 UR36, UP0, UR16, 0x2, URZ" in sass.unset_reads(skipped)
    always = skipped.replace("@!P0 BRA `(.L_x_1)", "UMOV UR24, 0x1")
    assert not sass.unset_reads(always)
    copied = always.replace("UIADD3 UR16, UP0, UR24, 0x2, URZ", "UMOV UR16, UR13")  # a copy is no use of it …
    assert sass.unset_reads(copied) == ["UIADD3 UR36, UP0, UR16, 0x2, URZ"]  # … but the copy is not set either


def test_calls_that_are_not_covered_say_why():
    def reason(flags=FULL, **changes):
        of_call = {n: changes.pop(n) for n in list(changes) if n in ("mask", "bias", "q_lengths", "kv_starts", "v")}
        args = attention(flags=flags, **{"dim": 128, "length": 1000, "heads": 8, **changes})
        return covers_forward(args._replace(**of_call))

    assert reason() is None
    assert "bfloat16 and float16" in reason(dtype=torch.float32)
    mask = meta(1000, 1000, dtype=torch.bool)
    assert reason(mask=mask) is None
    assert reason(CAUSAL, keys=900, mask=meta(1000, 900, dtype=torch.bool)) is None
    assert "beside kv_lengths" in reason(mask=mask, lengths=True)
    assert reason(bias=meta(1000, 1000)) is None
    assert reason(bias=meta(8, 1, 1000, dtype=torch.float32)) is None
    assert reason(CAUSAL, keys=904, bias=meta(1000, 904), mask=mask[:, :904]) is None
    assert "broadcast over the keys" in reason(bias=meta(1000, 1))
    assert "strides of the bias" in reason(bias=meta(1000, 1001)[:, :1000])
    assert "keys are neighbours" in reason(bias=meta(1000, 1000).T)
    assert "beside kv_lengths" in reason(bias=meta(1000, 1000), lengths=True)
    assert "head dims up to 128" in reason(dim=192, bias=meta(1000, 1000))
    assert "no q_lengths yet" in reason(q_lengths=meta(2, dtype=torch.int32))
    assert "no kv_starts yet" in reason(kv_starts=meta(2, dtype=torch.int32))
    assert reason(lengths=True) is None
    assert "one head dim" in reason(v=meta(2, 8, 1000, 64))
    assert reason(dim=192, v=meta(2, 8, 1000, 128)) is reason(dim=144, v=meta(2, 8, 1000, 80)) is None
    assert "no mask beside v" in reason(dim=192, v=meta(2, 8, 1000, 128), mask=mask)
    assert "multiples of 8" in reason(dim=100)
    assert "up to 256" in reason(dim=264)
    assert "fewer than 128 tiles" in reason(length=500)
    assert "fewer than 128 queries" in reason(length=100, heads=999)
    packed = attention(128, length=32768, packed=400)
    assert "fewer than 128 queries" in covers_forward(packed._replace(packing=packed.packing._replace(max_q=100)))
    assert "32 bits" in reason(length=2**30, heads=1, packed=3)
    assert "no keys" in reason(keys=0)
    assert "strides of v" in reason(v=meta(2, 8, 1000, 132)[..., :128])
    assert "caps up to 256" in reason(FULL._replace(softcap=1e4))
    assert reason(FULL._replace(softcap=30.0)) is None
    assert "rows that see nothing" in reason(CAUSAL, keys=900)
    assert reason(CAUSAL._replace(right=100), keys=900) is None
    assert reason(keys=900) is None


def test_gpus_that_have_none_of_it_say_why():
    def missing(arch):
        return hopper.missing(Gpu(KNOWN[arch], tf32=False))

    assert missing("sm_90") is None
    assert "this GPU is sm_80" in missing("sm_80")
    assert "NVIDIA" in missing("gfx942")


def test_explain_says_which_kernel_runs():
    q, k, v = (meta(2, 8, 1024, 128) for _ in range(3))

    def note(arch="sm_90", **given):
        return hw.explain("attention", q, k, v, causal=True, arch=arch, **given).note

    assert note() == "forward: the Hopper kernel"
    assert note("sm_80") == "forward: the plain kernel (the Hopper kernels are for sm_90, and this GPU is sm_80)"
    assert note(mask=meta(1024, 1024, dtype=torch.bool)) == "forward: the Hopper kernel"
    assert note(bias=meta(1024, 1024)) == "forward: the Hopper kernel"
    assert "the plain kernel (it reads no bias that is broadcast over the keys)" in note(bias=meta(1024, 1))
    q.requires_grad_()
    assert note() == "forward: the Hopper kernel; backward: the Hopper kernel"
    lengths = meta(2, dtype=torch.int32)
    assert note(kv_lengths=lengths) == "forward: the Hopper kernel; backward: the plain kernel (it reads no kv_lengths)"
    assert note(q_lengths=lengths).count("it reads no q_lengths yet") == 2
    of_entries = meta(2, 1, 1024, 1024, dtype=torch.bool)
    both = {"q_lengths": lengths, "kv_lengths": lengths}
    assert note(mask=of_entries, **both) == "forward: the Hopper kernel; backward: the Hopper kernel"
    assert note(mask=of_entries[:1], **both).count("the plain kernel") == 2

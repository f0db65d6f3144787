"""The Hopper backward compiles for sm_90, here, without a GPU: no spills but those noted, no serialised WGMMA."""

from __future__ import annotations

import functools
import re

import hopper_variants
import pytest
import torch
from ahead_of_time import TUNED, Recorded
from hopper_variants import CAUSAL, FULL, WINDOW, attention, gradients_of, meta, noted, recorded

from headwise.backends.triton.gpu import KNOWN
from headwise.backends.triton.hopper import padded, padding
from headwise.backends.triton.hopper.attention_backward import _heads_together, backward
from headwise.backends.triton.hopper.coverage import BACKWARD, backward_tile, covers_backward
from headwise.backends.triton.hopper.lengths import ELEMENTS, _fill_bad

SHARED_MEMORY = KNOWN["sm_90"].shared_memory

CALLS = [
    "64 dense causal", "64 dense window", "64 dense window cap", "128 dense full", "128 dense full any order",
    "128 dense causal", "128 dense causal grouped", "128 packed causal", "192 packed causal grouped", "256 dense full",
    "256 dense window cap", "80 dense causal", "192/128 dense causal", "64 mask full", "128 mask full", "256 mask causal",
    "128 bias full", "128 bias of keys and mask window", "64 mask causal cap",
]  # fmt: skip


# What else `coverage` says yes to, with the most constants of each kind.
SLOW_CALLS = [
    "64 mask window", "64 mask full cap", "128 mask full cap", "128 mask window grouped any order cap", "192 mask full",
    "192 mask window", "192 mask window cap", "256 mask window cap", "256 mask window grouped any order cap",
    *(f"{dim} {kind}" for dim in (64, 128) for kind in (
        "bias window", "bias and mask window", "float32 bias window", "float32 bias and mask window",
        "float32 bias of keys full grouped any order",
    )),
    "192/128 dense window cap", "192/128 packed window cap", "192/128 packed window grouped any order cap",
]  # fmt: skip


@pytest.mark.parametrize("name", [*CALLS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CALLS)])
def test_backward_compiles_and_keeps_to_its_figures(name, tmp_path):
    kernel = hopper_variants.compiled(f"backward {name}")
    assert kernel.metadata.shared <= SHARED_MEMORY
    if not TUNED:
        return
    fenced = hopper_variants.is_fenced(f"backward {name}")
    code = hopper_variants.assert_sound(kernel, noted()[f"backward {name}"], tmp_path, fenced)
    # dQ is added four numbers at a time, by an instruction that asks for no answer.
    assert "ADD.F32x4" in code
    assert "ATOMG.E.ADD.F32" not in code


def test_backward_compiles_for_float16(tmp_path):
    made = Recorded(backward, gradients_of(attention(64, WINDOW, batch=1, dtype=torch.float16)))
    kernel = made.compiled(next(launch for launch in made.launches if launch.described))
    if TUNED:
        hopper_variants.assert_sound(kernel, noted()["backward 64 dense window"], tmp_path)


@pytest.mark.parametrize("name", ["256 dense window cap", "128 dense causal cap"])
def test_weights_are_zero_where_they_are_less_than_a_normal_number(name):
    """The slope of a cap is made from the logarithm of P, of which the GPU knows none for such numbers."""
    ptx = hopper_variants.compiled(f"backward {name}").asm["ptx"]
    assert set(re.findall(r"\b(?:ex2|lg2)[.\w]*", ptx)) == {"ex2.approx.ftz.f32", "lg2.approx.ftz.f32"}


@pytest.mark.parametrize("packed", [None, 5], ids=["dense", "packed"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_kernels_around_it_compile(packed, deterministic):
    args = attention(192, WINDOW._replace(deterministic=deterministic), packed=packed, sink=True)
    made = Recorded(backward, gradients_of(args, grad_lse=True))
    around = [launch for launch in made.launches if not launch.described]
    assert len(around) == 3 + (packed is not None)
    for launch in around:
        made.compiled(launch)


def padded_call(**lengths):
    """Dense, heads inside, with lengths."""
    q, k, v = (meta(2, 4096, heads, 128).transpose(1, 2) for heads in (16, 4, 4))
    return attention(128, CAUSAL, group=4)._replace(q=q, k=k, v=v, **lengths)


@pytest.mark.parametrize("names", [("q_lengths", "kv_lengths"), ("kv_starts",)], ids="-".join)
def test_a_padded_batch_is_run_as_a_packed_one(names):
    call = padded_call(**{name: meta(2, dtype=torch.int64) for name in names})
    args = gradients_of(call, grad_lse=True)
    made, of_forward = Recorded(padded.backward, args), Recorded(padded.forward, call)
    for one, launches in ((made, 10), (of_forward, 4)):
        assert len(one.launches) == launches
        for launch in one.launches:
            if not launch.described:
                one.compiled(launch)
        (described,) = (launch for launch in one.launches if launch.described)
        assert described.tail[-1].packed
    (out, lse), _, _ = recorded(padded.forward, call)
    assert (out.shape, out.stride()) == (call.q.shape, call.q.stride())
    assert lse.is_contiguous()
    assert lse.shape == (2, 16, 4096)
    (dq, dk, dv, _, _), _, _ = recorded(padded.backward, args)
    for x, grad in ((call.q, dq), (call.k, dk), (call.v, dv)):
        assert (grad.shape, grad.stride()) == (x.shape, x.stride())


@pytest.mark.parametrize("names", [("q_lengths", "kv_lengths"), ("kv_starts",)], ids="-".join)
def test_a_mask_beside_lengths_takes_the_kernels_of_a_mask_alone(names):
    mask = meta(2, 1, 4096, 4096, dtype=torch.bool)
    call = padded_call(mask=mask, **{name: meta(2, dtype=torch.int64) for name in names})
    assert padding.covers_forward(call) is padding.covers_backward(call) is None
    alone = attention(128, FULL, group=4)._replace(mask=mask)
    for launcher, args, others in (
        (padded.forward, call, alone),
        (padded.backward, gradients_of(call), gradients_of(alone)),
    ):
        made = Recorded(launcher, args)
        for launch in made.launches:
            if not launch.described:
                made.compiled(launch)
        variants = [
            next(launch.tail[-1] for launch in x.launches if launch.described)
            for x in (made, Recorded(launcher, others))
        ]
        assert variants[0] == variants[1]


def test_a_batch_entry_of_nearly_two_billion_elements_is_filled_by_steps_of_64_bits():
    """2³¹ - 2048 of them: a step of 32 bits past the last one would come round, and go on before the first."""
    size, heads, dim = 2**20 - 1, 16, 128
    q, k, v = (meta(2, size, heads, dim).transpose(1, 2) for _ in range(3))
    lengths = meta(2, dtype=torch.int64)
    made = Recorded(padded.forward, attention(dim)._replace(q=q, k=k, v=v, q_lengths=lengths))
    (fill,) = (launch for launch in made.launches if launch.kernel is _fill_bad)
    assert 2**31 - 8 * ELEMENTS < fill.tail[2] < 2**31
    assert re.search(r"scf.for .* : i64", made.compiled(fill).asm["ttir"])


def test_what_a_backward_returns():
    call = attention(128, CAUSAL, group=4, sink=True)
    (dq, dk, dv, dbias, dsink), launches, _ = recorded(backward, gradients_of(call))
    assert (dq.shape, dq.stride()) == ((2, 16, 4096, 128), (4096 * 2048, 128, 2048, 1))
    assert dk.stride() == dv.stride() == (4096 * 512, 128, 512, 1)
    assert dbias is None
    assert dsink.shape == (16,)
    assert len(launches) == 4
    (dq, dk, _, _, dsink), launches, _ = recorded(backward, gradients_of(attention(128, CAUSAL, packed=3)))
    assert dq.is_contiguous()
    assert (dq.shape, dk.shape, dsink) == ((4096, 16, 128), (4096, 16, 128), None)
    assert len(launches) == 4


@pytest.mark.parametrize(
    ("grad", "copied"),
    [
        (meta(2, 16, 1024, 64), 0),
        (meta(2, 1024, 16, 64).transpose(1, 2), 0),
        (meta(2, 16, 64, 1024).transpose(2, 3), 1),
        (meta(1).expand(2, 16, 1024, 64), 1),
        (meta(2, 16, 1024, 65)[..., :64], 1),
    ],
    ids=["heads outside", "heads inside", "last stride", "expanded", "odd rows"],
)
def test_a_gradient_that_tma_cannot_read_is_copied(grad, copied):
    args = gradients_of(attention(64, CAUSAL, length=1024))._replace(grad_out=grad)
    assert len(recorded(backward, args)[2]) == copied
    assert len(recorded(backward, args, unaligned="grad_out")[2]) == 1


def test_a_call_that_tma_cannot_read_is_left_to_the_plain_kernels():
    args = gradients_of(attention(64, CAUSAL))
    for name in "qkv":
        assert recorded(backward, args, unaligned=name) == (None, [], [])
    biased = gradients_of(attention(64, CAUSAL)._replace(bias=meta(4096, 4096)))
    assert recorded(backward, biased, unaligned="bias") == (None, [], [])


def test_an_expanded_mask_is_packed_once():
    """Whatever it is broadcast over, also by steps of 0: no more than an eighth of what it holds, and lists."""
    small, large = (
        gradients_of(attention(64, CAUSAL)._replace(mask=mask))
        for mask in (
            meta(1, 1, 4096, 4096, dtype=torch.bool),
            meta(4096, 4096, dtype=torch.bool).expand(2, 16, 4096, 4096),
        )
    )
    bits = [
        max(place.like.numel() for launch in recorded(backward, args)[1] if launch.kernel.fn.__name__ == "pack_mask"
            for place in launch.tensors[1:] if place is not None)
        for args in (small, large)
    ]  # fmt: skip
    assert bits == [4096 * 4096 // 32] * 2


@pytest.mark.parametrize("flags", [FULL, CAUSAL, WINDOW], ids=["full", "causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_where_keys_end_is_no_constant(head_dim, flags):
    def variant(keys):
        launcher = functools.partial(backward, tile=backward_tile(head_dim, False))
        _, launches, _ = recorded(launcher, gradients_of(attention(head_dim, flags, keys=keys)))
        return next(launch for launch in launches if launch.described).tail[-1]

    assert len({variant(keys) for keys in (1, 333, 4000, 4096, 20000)}) == 1


def covered(dim=128, flags=FULL, **changes):
    others = {name: changes.pop(name) for name in list(changes) if name in ("k", "v", "mask", "q_lengths", "kv_starts")}
    return covers_backward(attention(dim, flags, **changes)._replace(**others))


def test_what_the_backward_takes_and_why_it_takes_no_more():
    assert covered() is None
    assert covered(flags=CAUSAL) is None
    assert covered(64, CAUSAL, length=4097, keys=5000, heads=32, group=4, batch=1) is None
    assert covered(80) is None
    assert "v has" in covered(80, v=meta(2, 16, 4096, 96))
    assert covered(192, CAUSAL, v=meta(2, 16, 4096, 128)) is None
    assert "caps" in covered(flags=FULL._replace(softcap=1e4))
    assert "caps" in covered(flags=FULL._replace(softcap=1e-4))
    assert "bfloat16" in covered(dtype=torch.float32)
    assert covered(mask=meta(4096, 4096, dtype=torch.bool)) is None
    assert "16 bits" in covered(length=2**22, heads=1, batch=1, mask=meta(1, 2**22, dtype=torch.bool))
    assert "no kv_lengths" in covered(lengths=True)
    assert "no q_lengths" in covered(q_lengths=meta(2, dtype=torch.int32))
    assert "no kv_starts" in covered(kv_starts=meta(2, dtype=torch.int32))
    assert "head dims" in covered(111)
    assert "head dims" in covered(264)
    assert covered(192) is None
    assert "tiles" in covered(256, heads=1, batch=1)
    assert "no queries" in covered(64, batch=0)
    assert "strides of k" in covered(k=meta(2, 16, 4096, 132)[..., :128])
    assert "tiles" in covered(64, length=128, heads=1, batch=1)
    assert covered(flags=WINDOW._replace(softcap=9.0), sink=True) is None
    # A sink of rows that see nothing else, too.
    assert covered(64, CAUSAL, packed=3, sink=True) is None
    assert covered(64, CAUSAL, keys=1024, sink=True) is None


def test_every_width_has_a_tile():
    assert [backward_tile(d, False).width for d in (8, 64, 72, 128, 136, 256)] == [64, 64, 128, 128, 192, 256]
    assert [backward_tile(d, False).d1 for d in (64, 72, 80, 88, 96, 104)] == [0, 16, 16, 32, 32, 0]
    assert all(backward_tile(tile.d0 + tile.d1, True).rows == 64 for tile in BACKWARD)


def test_heads_go_side_by_side_in_groups_of_one_size():
    # As many as fill the GPU; more where tiles of one head would wait for each other; never a small group at the end.
    assert _heads_together(False, -1, 0, 64, 128, 32, 132) == 2
    assert _heads_together(True, -1, 0, 64, 128, 32, 132) == 4
    assert _heads_together(True, -1, -1, 128, 128, 32, 132) == 2
    assert _heads_together(True, 1023, 0, 64, 128, 32, 132) == 2
    assert _heads_together(False, -1, 0, 32, 64, 9, 132) == 5
    assert _heads_together(True, -1, 0, 1, 1, 3, 132) == 3

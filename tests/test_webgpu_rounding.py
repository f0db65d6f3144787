"""Sixteen bits on WebGPU: how they are read and written, and whether the driver may do it."""

from __future__ import annotations

import jinja2
import pytest
import torch

from headwise.backends.webgpu import runtime, shaders
from headwise.webgpu import array

# y = x in another dtype, element by element; the words of a float32 are carried as they are.
CAST = """
{{ input("x", of, 4) }}
{{ output("y", to, 4) }}
{{ params("vectors: u32") }}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = (group.x + group.y * groups.x) * 256u + thread;
    if (i < params.vectors) { store_y(i, load_x(i)); }
}
"""


@pytest.fixture
def cast(monkeypatch):
    environment = shaders._environment()
    loader = jinja2.ChoiceLoader([environment.loader, jinja2.DictLoader({"cast.wgsl": CAST})])
    monkeypatch.setattr(environment, "loader", loader)

    def cast(x, dtype, native_half=False):
        device = runtime.device()
        monkeypatch.setattr(device, "capabilities", device.capabilities._replace(native_half=native_half))
        monkeypatch.setattr(device, "_kernels", {})
        y = device.empty(tuple(x.shape), dtype)
        kernel = device.kernel("cast", of=shaders.DTYPES[x.dtype], to=shaders.DTYPES[dtype])
        assert ("return pack2x16float" in kernel.text) == (native_half and dtype == torch.float16)
        vectors = x.numel() // 4
        device.run(kernel, -(-vectors // 256), (vectors,), x=device.upload(x), y=y)
        return device.read(y)

    return cast


def bits(x):
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def same_bits(ours, expected):
    """Where one is a NaN the other is, and everything else is the same bit by bit."""
    assert torch.equal(ours.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(bits(ours)[numbers], bits(expected)[numbers])


@pytest.mark.parametrize(
    ("dtype", "native_half"), [(torch.float16, False), (torch.float16, True), (torch.bfloat16, False)]
)
def test_every_16_bit_pattern_is_read_and_written_back(cast, dtype, native_half):
    found = runtime.device().capabilities
    if native_half and not found.native_half:
        assert "llvmpipe" not in found.name, "the software that tests run on rounds to nearest even"
        pytest.skip("the driver rounds float16 in another way")
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    same_bits(cast(every, torch.float32, native_half), every.float())
    same_bits(cast(every, dtype, native_half), every)


def awkward_floats():
    """Random bit patterns of all sizes, and the neighbourhoods where rounding to 16 bits changes its mind."""
    draw = torch.Generator().manual_seed(0)
    anything = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=draw).to(torch.int32)
    near_half = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).float().view(torch.int32)
    near_brain = torch.arange(-(1 << 15), 1 << 15).to(torch.int32) << 16
    # The middle between two neighbours and the floats beside it.
    steps = (-1, 0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001)
    around = [x + step for x in (near_half, near_brain) for step in steps]
    subnormal = torch.randint(0, 1 << 23, (1 << 12,), generator=draw).to(torch.int32)
    return torch.cat([anything, *around, subnormal, subnormal | -(1 << 31)]).view(torch.float32)


def is_right(x, ours):
    """Rounded as PyTorch does; but GPUs may read a subnormal float32 as zero."""
    subnormal = (x.abs() < torch.finfo(torch.float32).tiny) & (x != 0)
    flushed = subnormal & (ours == 0)
    same_bits(torch.where(flushed, 0.0, ours), torch.where(flushed, 0.0, x.to(ours.dtype)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_to_nearest_even(cast, dtype):
    x = awkward_floats()
    is_right(x, cast(x, dtype))


def test_a_sum_is_rounded_once():
    a, b = (torch.randn(4096).to(torch.bfloat16) for _ in range(2))
    assert torch.equal((array(a) + array(b)).torch(), a + b)


# ------------------------------------------------------------------------------- float16 as the driver of the GPU packs it


def test_the_driver_is_used_where_it_rounds_as_pytorch_does(cast):
    """And only there: what the device found out about itself when it was opened is so."""
    runtime.forget()
    found = runtime.device().capabilities.native_half
    x = awkward_floats()
    ours = cast(x, torch.float16, native_half=True)
    if found:
        is_right(x, ours)
    else:
        with pytest.raises(AssertionError):
            is_right(x, ours)


# Ways to pack that drivers have or might have, each wrong in one thing.
WRONG = {
    "digits cut off": "let kept = x & vec2<u32>(0xffffe000u); return pack_f16(bitcast<vec2<f32>>(kept));",
    "the middle goes up": "let up = select(x, x | vec2<u32>(1u), (x & vec2<u32>(0x1fffu)) == vec2<u32>(0x1000u)); "
    "return pack_f16(bitcast<vec2<f32>>(up));",
    "no infinity": "return pack_f16(clamp(value, vec2<f32>(-65504.0), vec2<f32>(65504.0)));",
    "infinity from 65504": "let far = (x & vec2<u32>(0x7fffffffu)) > vec2<u32>(0x477fe000u); "
    "return pack_f16(bitcast<vec2<f32>>(select(x, x | vec2<u32>(0x7f800000u), far) & "
    "select(vec2<u32>(0xffffffffu), vec2<u32>(0xff800000u), far)));",
    "subnormals are zero": "let small = (x & vec2<u32>(0x7fffffffu)) < vec2<u32>(0x38800000u); "
    "return pack_f16(bitcast<vec2<f32>>(select(x, x & vec2<u32>(0x80000000u), small)));",
    "no negative zero": "return pack_f16(bitcast<vec2<f32>>(select(x, vec2<u32>(0u), x == vec2<u32>(0x80000000u))));",
    "NaN is infinite": "let lost = (x & vec2<u32>(0x7fffffffu)) > vec2<u32>(0x7f800000u); "
    "return pack_f16(bitcast<vec2<f32>>(select(x, vec2<u32>(0x7f800000u), lost)));",
    "halves in turn": "return pack_f16(value.yx);",
    "digits cut off below zero in the low half, above it in the high one": "let cut = (x >> vec2<u32>(31u)) == "
    "vec2<u32>(1u, 0u); return pack_f16(bitcast<vec2<f32>>(select(x, x & vec2<u32>(0xffffe000u), cut)));",
    "digits cut off beside a number of another size": "let sizes = x & vec2<u32>(0x7fffffffu); "
    "let cut = vec2<bool>(sizes.x != sizes.y); "
    "return pack_f16(bitcast<vec2<f32>>(select(x, x & vec2<u32>(0xffffe000u), cut)));",
    "digits cut off beside the same number": "let cut = vec2<bool>(x.x == x.y); "
    "return pack_f16(bitcast<vec2<f32>>(select(x, x & vec2<u32>(0xffffe000u), cut)));",
    "digits of a number cut off beside NaN": "let nan = (x & vec2<u32>(0x7fffffffu)) > vec2<u32>(0x7f800000u); "
    "return pack_f16(bitcast<vec2<f32>>(select(x, x & vec2<u32>(0xffffe000u), nan.yx & !nan)));",
}


@pytest.fixture
def probed(monkeypatch):
    """``probed(body)``: what the probe finds of a GPU whose packing is ``body``, in which pack_f16 is right."""
    plain = (shaders.FOLDER / "half_probe.wgsl").read_text()
    environment = shaders._environment()
    device = runtime.device()  # opened while all templates are in their place

    def probed(body):
        packing = f"fn packing(value: vec2<f32>) -> u32 {{ let x = bitcast<vec2<u32>>(value); {body} }}\n"
        text = plain.replace("return pack2x16float(", "return packing(")
        assert text != plain
        loader = jinja2.DictLoader({"half_probe.wgsl": text + packing + shaders._HELPERS["pack_f16"]})
        with monkeypatch.context() as patch:
            patch.setattr(environment, "loader", loader)
            patch.setattr(environment, "cache", None)
            patch.setattr(device, "_kernels", {})
            return device._rounds_halves()

    return probed


def test_packing_that_is_right_passes_the_probe(probed):
    assert probed("return pack_f16(value);")


@pytest.mark.parametrize("how", WRONG)
def test_the_probe_finds_packing_that_is_wrong_in(how, probed):
    assert not probed(WRONG[how])


def test_kernels_are_compiled_with_what_was_found(monkeypatch):
    runtime.forget()
    device = runtime.device()
    for native in (True, False):
        monkeypatch.setattr(device, "capabilities", device.capabilities._replace(native_half=native))
        monkeypatch.setattr(device, "_kernels", {})
        text = device.kernel("add", dtype="f16").text
        assert ("return pack2x16float" in text) == native
        assert ("half_bits" in text) != native
    runtime.forget()

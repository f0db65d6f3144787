"""Arrays of other libraries in and out, through DLPack."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends_under_test import RUNNABLE

import headwise as hw
from headwise.integrations import arrays


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("backend", [name for name in RUNNABLE if name in ("cpu", "webgpu")])
def test_numpy_in_and_out(backend):
    q, k, v = draw(2, 4, 33, 16), draw(2, 2, 40, 16, seed=1), draw(2, 2, 40, 16, seed=2)
    lengths = np.array([40, 17], dtype=np.int32)
    out, lse = arrays.attention(q, k, v, causal=True, kv_lengths=lengths, return_lse=True, backend=backend)
    tensors = [torch.from_numpy(x) for x in (q, k, v, lengths)]
    wanted = hw.attention(*tensors[:3], causal=True, kv_lengths=tensors[3], return_lse=True, backend=backend)
    assert type(out) is type(lse) is np.ndarray
    for got, expected in zip((out, lse), wanted, strict=True):
        np.testing.assert_array_equal(got, expected.numpy())
    x, weight = draw(5, 24, dtype=np.float16), draw(24, dtype=np.float16, seed=1)
    got = arrays.rms_norm(x, weight, backend=backend)
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, hw.rms_norm(*map(torch.from_numpy, (x, weight)), backend=backend).numpy())
    dx, dweight = arrays.rms_norm_backward(got, x, weight, backend=backend)
    assert (dx.shape, dweight.shape) == (x.shape, weight.shape)


def test_every_public_function_is_there():
    assert set(arrays.__all__) == set(hw.__all__) - {"Unsupported", "explain", "use_backend"}
    for name in arrays.__all__:
        assert getattr(arrays, name).__wrapped__ is getattr(hw, name)
        assert name in dir(arrays)
    with pytest.raises(AttributeError, match="no attribute 'explain'"):
        _ = arrays.explain


def test_nothing_is_copied(monkeypatch):
    seen = []
    monkeypatch.setattr(hw, "softmax", lambda x: seen.append(x) or x)
    arrays._on_arrays.cache_clear()
    x = draw(7, 9)
    result = arrays.softmax(x)
    assert seen[0].data_ptr() == x.__array_interface__["data"][0] == result.__array_interface__["data"][0]
    arrays._on_arrays.cache_clear()


def test_tensors_beside_arrays_and_no_gradients():
    x, weight = draw(5, 24), torch.ones(24, requires_grad=True)
    assert type(arrays.rms_norm(x, weight)) is np.ndarray
    alone = arrays.rms_norm(torch.from_numpy(x), weight)
    assert type(alone) is torch.Tensor
    assert not alone.requires_grad


def test_arrays_that_may_only_be_read_and_strided_ones():
    x = draw(6, 8, 10)
    fixed = x.copy()
    fixed.setflags(write=False)
    wanted = arrays.softmax(x)
    np.testing.assert_array_equal(arrays.softmax(fixed), wanted)
    np.testing.assert_allclose(arrays.softmax(x[::2]), wanted[::2], rtol=1e-6)


@pytest.mark.parametrize("backend", [name for name in RUNNABLE if name in ("cpu", "webgpu")])
def test_arrays_that_lie_otherwise_in_memory(backend):
    """Backwards, which PyTorch has no tensors for, and in the order of Fortran."""
    q, k, v = draw(2, 4, 33, 16), draw(2, 2, 40, 16, seed=1), draw(2, 2, 40, 16, seed=2)
    wanted = arrays.attention(q, k, v, causal=True, backend=backend)
    columns = [np.asfortranarray(x) for x in (q, k, v)]
    np.testing.assert_array_equal(arrays.attention(*columns, causal=True, backend=backend), wanted)
    backwards = [x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1] for x in (q, k, v)]
    assert all(stride < 0 for x in backwards for stride in x.strides)
    np.testing.assert_array_equal(arrays.attention(*backwards, causal=True, backend=backend), wanted)
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(arrays.softmax(x[::-1], backend="cpu"), arrays.softmax(x, backend="cpu")[::-1])


def test_numbers_of_numpy():
    q, k, v = draw(1, 2, 9, 8), draw(1, 2, 9, 8, seed=1), draw(1, 2, 9, 8, seed=2)
    got = arrays.attention(q, k, v, causal=np.bool_(True), window=(np.int64(2), 0), scale=np.float32(0.25))
    np.testing.assert_array_equal(got, arrays.attention(q, k, v, causal=True, window=(2, 0), scale=0.25))
    assert (got != arrays.attention(q, k, v)).any()


def test_masked_arrays_are_refused():
    x = draw(4, 6)
    with pytest.raises(TypeError, match=r"numpy\.ma\.MaskedArray is not supported.*filled"):
        arrays.softmax(np.ma.masked_array(x, mask=x > 0))


class Exported:
    """An array of a library that speaks DLPack, and no more."""

    def __init__(self, values, library=None):
        self.values = values
        if library is not None:
            self.__array_namespace__ = lambda: library

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class Library:
    @staticmethod
    def from_dlpack(x):
        return Exported(torch.from_dlpack(x), Library)


def test_results_go_to_the_library_of_the_first_array():
    values = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    result = arrays.softmax(Exported(values, Library))
    assert type(result) is Exported
    assert torch.equal(result.values, hw.softmax(values))
    with pytest.raises(TypeError, match="no __array_namespace__"):
        arrays.softmax(Exported(values))
    # NumPy has no bfloat16: it says so, and nothing is converted in silence.
    with pytest.raises(TypeError, match=r"bfloat16 cannot become an array of numpy\.ndarray"):
        arrays.embedding(np.array([0, 1]), values.bfloat16())


def test_what_cannot_be_read_is_named():
    with pytest.raises(TypeError, match=r"numpy\.ndarray cannot be read through DLPack"):
        arrays.softmax(np.array(["a", "b"]))


def test_an_array_on_the_gpu_is_no_memory_of_the_cpu():
    """NumPy gets a copy; DLPack, which hands over memory, is refused."""
    x = draw(4, 6)
    there = hw.webgpu.array(x)
    np.testing.assert_array_equal(np.asarray(there), x)
    np.testing.assert_allclose(np.asarray(hw.softmax(there)), arrays.softmax(x), rtol=1e-5)
    with pytest.raises(BufferError, match=r"\.numpy\(\)"):
        np.from_dlpack(there)
    with pytest.raises(BufferError, match=r"\.torch\(\)"):
        torch.from_dlpack(there)

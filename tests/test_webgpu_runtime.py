"""The WebGPU device: what crosses the bus, resident arrays, memory, threads, loss, errors.

Nothing here skips: a machine that runs the tests needs an adapter, and software Vulkan is one.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import wgpu

import headwise as hw
import headwise.webgpu
from headwise.backends import webgpu as rules
from headwise.backends.registry import availability
from headwise.backends.webgpu import adapter, copies, runtime, storage
from headwise.backends.webgpu.storage import Region
from headwise.config import settings
from headwise.webgpu import Array, array, counts

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def reopened(monkeypatch):
    """``reopened(webgpu_tier="A")``: the device, opened anew with other settings; everybody else's comes back after."""

    def reopen(**fields):
        for name, value in fields.items():
            monkeypatch.setattr(settings, name, value)
        runtime.forget()
        return runtime.device()

    yield reopen
    monkeypatch.undo()
    runtime.forget()


def test_this_machine_has_an_adapter():
    """Without one no kernel runs, every test of the kernels vanishes, and the suite would be green."""
    assert availability("webgpu") is None


# ------------------------------------------------------------------------------------------------ what crosses the bus


def crossed(since):
    now = counts()
    return (now.uploads - since.uploads, now.readbacks - since.readbacks)


def test_uploads_and_readbacks_are_counted():
    before = counts()
    x = array(torch.ones(10, 3))
    assert crossed(before) == (1, 0)
    assert counts().uploaded_bytes - before.uploaded_bytes == 120
    x.torch()
    assert crossed(before) == (1, 1)
    assert counts().read_bytes - before.read_bytes >= 120


def test_a_chain_of_ops_on_arrays_stays_on_the_device():
    x, weight = array(torch.randn(7, 33)), array(torch.randn(33))
    before = counts()
    y = x
    for _ in range(5):
        y = hw.softmax(hw.rms_norm(y, weight)) + x
    assert crossed(before) == (0, 0)
    assert counts().dispatches - before.dispatches >= 15
    assert isinstance(y, Array)
    assert y.torch().isfinite().all()
    assert crossed(before) == (0, 1)


def test_cpu_tensors_are_uploaded_and_the_result_read_back_once_each():
    probs, grad = torch.softmax(torch.randn(4, 9), -1), torch.randn(4, 9)
    before = counts()
    y = hw.softmax_backward(probs, grad, backend="webgpu")
    assert crossed(before) == (2, 1)
    assert type(y) is torch.Tensor
    torch.testing.assert_close(y, hw.softmax_backward(probs, grad, backend="cpu"))


def test_kernels_are_compiled_once():
    x = array(torch.randn(5, 20))
    hw.softmax(x)
    before = counts()
    for rows in (1, 3, 5):
        hw.softmax(x[:rows])
    assert counts().pipelines == before.pipelines


# ------------------------------------------------------------------------------------------------------- views, copies

VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(2, 0, 1),
    "sliced": lambda x: x[1:, :, 1:6],
    "stepped": lambda x: x[:, ::2],
    "selected": lambda x: x[1, :, 3],
    "flat": lambda x: x.view(-1),
    "reshaped": lambda x: x.reshape(3, 2, 7, 10),
    "unsqueezed": lambda x: x[:, None, 2:],
    "expanded": lambda x: x[:1].expand(4, 5, 14),
    "split": lambda x: x.split(5, dim=2)[1],
    "chunk": lambda x: x.chunk(3, dim=0)[2],
    "unbound": lambda x: x.unbind(1)[4],
    "mT": lambda x: x.mT,
}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_those_of_pytorch_and_move_nothing(view, dtype):
    x = torch.randint(0, 2, (6, 5, 14)).bool() if dtype == torch.bool else torch.arange(420).view(6, 5, 14).to(dtype)
    on_gpu, before = array(x), counts()
    seen = VIEWS[view](on_gpu)
    assert crossed(before) == (0, 0)
    assert counts().dispatches == before.dispatches
    expected = VIEWS[view](x)
    assert seen.shape == expected.shape
    assert seen.stride() == expected.stride()
    assert torch.equal(seen.torch(), expected)
    copy = seen.contiguous()
    assert copy.is_contiguous()
    assert torch.equal(copy.torch(), expected)
    assert torch.equal(seen.clone().torch(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_views(dtype):
    """Halves of words, odd offsets and strides included."""
    a, b = (torch.randn(6, 5, 7).to(dtype) for _ in range(2))
    for view in (lambda x: x[1:, 1:, 1:], lambda x: x[0, 0, 3:4], lambda x: x.mT, lambda x: x[:, :, 1]):
        assert torch.equal((view(array(a)) + view(array(b))).torch(), view(a) + view(b))


@pytest.mark.parametrize("tensor", [torch.empty(0, 3), torch.tensor(2.5), torch.randn(1, 1, 3), torch.empty(2, 0)])
def test_odd_shapes_go_there_and_back(tensor):
    assert torch.equal(array(tensor).torch(), tensor)
    assert torch.equal((array(tensor) + array(tensor)).torch(), tensor + tensor)
    assert torch.equal(torch.zeros_like(array(tensor)).torch(), torch.zeros_like(tensor))


def test_uploads_keep_dense_layouts_and_store_expanded_dims_once():
    heads_inside = torch.randn(2, 9, 3, 4).transpose(1, 2)
    assert array(heads_inside).stride() == heads_inside.stride()
    one_row, before = torch.randn(1, 8).expand(1000, 8), counts()
    x = array(one_row)
    assert counts().uploaded_bytes - before.uploaded_bytes == 32
    assert torch.equal(x.torch(), one_row)
    gaps = torch.randn(8, 8)[:, ::2]
    assert torch.equal(array(gaps).torch(), gaps)


@pytest.mark.parametrize("binding", [None, 4096])
def test_copies_of_any_layout(reopened, binding):
    """Pads, cuts and permutes, in boxes where a tensor is larger than a kernel may see."""
    device, draw = reopened(webgpu_binding_bytes=binding), random.Random(0)
    for _ in range(60):
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.bool, torch.int64])
        shape = [draw.choice([1, 2, 3, 5, 8, 17]) for _ in range(draw.randint(1, 5))]
        while (x := torch.ones(shape)).numel() > 5000:
            shape[draw.randrange(len(shape))] = 2
        x = torch.randint(0, 2 if dtype == torch.bool else 100, x.shape).to(dtype)
        order = draw.sample(range(x.dim()), x.dim())
        region = device.upload(x)
        region = Region(
            region.storage, dtype, [region.shape[d] for d in order], [region.strides[d] for d in order], region.offset
        )
        x = x.permute(order)
        dim = draw.randrange(x.dim())
        start = draw.randrange(x.shape[dim])
        length = draw.randint(1, x.shape[dim] - start)
        region, x = region.narrow(dim, start, length), x.narrow(dim, start, length)
        columns = draw.choice([None, x.shape[-1] + 3, max(1, x.shape[-1] - 1)])
        expected = x if columns is None else torch.nn.functional.pad(x, (0, columns - x.shape[-1]))
        assert torch.equal(device.read(copies.copied(device, region, columns)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_filling(dtype):
    device = runtime.device()
    for value in (0.0, -1.5):
        assert torch.equal(
            device.read(copies.full(device, (3, 5), value, dtype)), torch.full((3, 5), value, dtype=dtype)
        )


def test_writing_in_place_is_seen_through_every_view():
    x = torch.arange(12.0).view(3, 4)
    y = array(x)
    row = y[2]
    row += array(torch.full((4,), 100.0))
    y.mT.copy_(y.mT + y.mT)
    expected = x.clone()
    expected[2] += 100
    assert torch.equal(y.torch(), 2 * expected)
    assert torch.equal(row.torch(), 2 * expected[2])


def test_an_operator_that_arrays_do_not_know_says_so():
    x = array(torch.ones(3, 3))
    with pytest.raises(NotImplementedError, match=r"aten.linalg_qr.*is not there on WebGPU.*x\.cpu\(\)"):
        torch.linalg.qr(x)
    with pytest.raises(RuntimeError, match="broadcast"):
        x + array(torch.ones(2))
    with pytest.raises(RuntimeError, match="beside one on webgpu"):
        x + torch.ones(3)


def test_what_an_array_says_of_itself():
    x = array([[1.0, 2.0], [3.0, 4.0]])
    assert repr(x) == "tensor([[1., 2.],\n        [3., 4.]], device='webgpu:0')"
    assert x.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert x[1, 0].item() == 3.0
    assert x.numpy().sum() == 10.0
    assert array(x) is x
    assert type(x.cpu()) is torch.Tensor


# ------------------------------------------------------------------------------------------------------------ gradients


def test_gradients_of_a_tensor_that_is_used_twice_add_up():
    x, y = (array(torch.randn(3, 4)).requires_grad_() for _ in range(2))
    grad = torch.randn(3, 4)
    before = counts()
    ((x + y) + x).backward(array(grad))
    assert crossed(before)[1] == 0
    assert isinstance(x.grad, Array)
    assert torch.equal(x.grad.torch(), grad + grad)
    assert torch.equal(y.grad.torch(), grad)


def test_gradients_add_up_over_backward_calls():
    x = array(torch.randn(3, 4)).requires_grad_()
    grad = torch.randn(3, 4)
    for _ in range(3):
        (x + x).backward(array(grad))
    assert torch.equal(x.grad.torch(), (grad + grad) + (grad + grad) + (grad + grad))


def gradients(place, logits, weight, targets):
    x, w, t = place(logits).requires_grad_(), place(weight).requires_grad_(), place(targets)
    hidden = hw.rms_norm(x, w)
    # The same tensor through a view, and twice.
    loss = hw.cross_entropy(hw.softmax(hidden) + hidden.view(-1, hidden.shape[-1]), t)
    loss.backward()
    return [loss.detach(), x.grad, w.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_goes_backward_on_the_device(dtype):
    logits, weight = torch.randn(12, 50).to(dtype), torch.randn(50).to(dtype)
    targets = torch.randint(0, 50, (12,))
    placed = [array(x) for x in (logits, weight, targets)]
    before = counts()
    ours = gradients(lambda x: x.detach(), *placed)
    assert crossed(before) == (0, 0)
    assert all(isinstance(x, Array) for x in ours)
    expected = gradients(lambda x: x.clone(), logits, weight, targets)
    close = {} if dtype == torch.float32 else {"rtol": 4e-2, "atol": 4e-3}
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x.torch(), y, **close)


# -------------------------------------------------------------------------------------------------- waiting and threads


def test_reading_back_can_be_awaited():
    tensors = [torch.randn(n, 3) for n in (1, 40, 900)]
    ticks = 0

    async def ticking():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def read():
        other = asyncio.create_task(ticking())
        found = await asyncio.gather(*((array(t) + array(t)).torch_async() for t in tensors))
        other.cancel()
        return found

    found = asyncio.run(read())
    assert ticks > 0
    for x, t in zip(found, tensors, strict=True):
        assert torch.equal(x, t + t)


def test_threads_may_call_at_once():
    failures: list[BaseException] = []

    def work(seed):
        try:
            draw = torch.Generator().manual_seed(seed)
            for _ in range(25):
                x = torch.randn(3 + seed, 17, generator=draw)
                y = array(x)
                assert torch.equal((y + y).torch(), x + x)
                torch.testing.assert_close(hw.softmax(y).torch(), torch.softmax(x, -1))
                torch.testing.assert_close(hw.rms_norm(x, None, backend="webgpu"), hw.rms_norm(x, None, backend="cpu"))
        except BaseException as error:  # a thread that dies is silent
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


# --------------------------------------------------------------------------------------------------------------- memory


def held():
    device = runtime.device()
    gc.collect()
    return device, device.pool.allocated


def test_ten_thousand_calls_leak_nothing():
    x = array(torch.randn(4, 64))
    y = x
    for _ in range(50):
        y = x + y
    y.torch()
    device, before = held()
    commands = len(device.commands)
    for i in range(10_000):
        y = x + y
        if i % 2500 == 0:
            y.torch()
    y.torch()
    assert held()[1] <= before + 64 * 1024
    assert len(device.commands) <= commands + 16
    assert sum(map(len, device._staging.values())) <= 16


def test_changing_shapes_leak_nothing():
    draw = random.Random(1)
    device, before = held()
    for i in range(5_000):
        x = torch.ones(draw.randint(1, 60), draw.randint(1, 60))
        y = array(x) + array(x)
        if i % 100 == 0:
            assert torch.equal(y.torch(), x + x)
    # 14 KB a tensor at most, in a handful of size classes, times the tensors of one command buffer.
    assert held()[1] <= before + 64 * 3 * 5 * 16 * 1024
    assert len(device.commands) <= runtime._MOST_COMMANDS
    assert len(device.uniforms) <= runtime._MOST_COMMANDS
    assert sum(map(len, device._staging.values())) <= 32


def test_a_buffer_that_is_still_being_read_is_not_overwritten():
    """Chains of sums, uploads into memory that was let go, readbacks in between: bitwise what PyTorch gets."""
    for seed in range(15):
        draw = random.Random(seed)
        shapes = [(draw.randint(1, 40), draw.randint(1, 40)) for _ in range(3)]
        dtype = draw.choice(DTYPES)
        there: list[tuple[Array, torch.Tensor]] = []
        for _ in range(150):
            act = draw.random()
            if act < 0.35 or not there:
                x = torch.randn(draw.choice(shapes)).to(dtype)
                there.append((array(x), x))
            elif act < 0.75:
                a, x = draw.choice(there)
                b, y = draw.choice([(b, y) for b, y in there if y.shape == x.shape])
                there.append((a + b, x + y))
            elif act < 0.95:
                there.pop(draw.randrange(len(there)))
            else:
                a, x = draw.choice(there)
                assert torch.equal(a.torch(), x)
        for a, x in there:
            assert torch.equal(a.torch(), x)


def test_an_upload_into_memory_that_a_recorded_kernel_reads():
    """The plain form of the hazard: the very buffer comes back from the pool while its reader is not submitted yet."""
    device = runtime.device()
    device.synchronize()
    gc.collect()
    x = array(torch.full((1000,), 1.0))
    buffer = x._region.storage.buffer
    y = x + x
    del x
    gc.collect()
    again = array(torch.full((1000,), 7.0))
    assert again._region.storage.buffer is buffer, "the pool no longer reuses memory at once: this test tests nothing"
    assert torch.equal(y.torch(), torch.full((1000,), 2.0))
    assert torch.equal(again.torch(), torch.full((1000,), 7.0))


def test_memory_that_dies_in_a_cycle_of_references_is_used_again():
    """The collector ends everything in a cycle at once, the buffer beside the storage that brings it back."""
    device = runtime.device()
    gc.collect()
    cycle = [array(torch.ones(777))]
    buffer = id(cycle[0]._region.storage.buffer)
    cycle.append(cycle)
    del cycle
    gc.collect()
    again = [array(torch.full((777,), float(i))) for i in range(8)]
    assert buffer in [id(x._region.storage.buffer) for x in again], (
        "the pool did not get it back: this test tests nothing"
    )
    for i, x in enumerate(again):
        assert torch.equal((x + x).torch(), torch.full((777,), 2.0 * i))
    assert device is runtime.device()


@pytest.mark.parametrize("nbytes", [1, 256, 257, 1000, 4096, 5000, 1 << 20, (1 << 20) + 1, 10**9])
def test_size_classes(nbytes):
    size = storage._size_class(nbytes)
    assert nbytes <= size <= max(256, nbytes * 1.25 + 256)
    assert size % 256 == 0
    assert storage._size_class(size) == size


def test_trimming_gives_free_memory_back():
    x = array(torch.ones(1 << 20))
    device, before = held()
    del x
    gc.collect()
    device.pool.trim()
    assert device.pool.allocated <= before - (4 << 20)
    assert torch.equal((array(torch.ones(1 << 20))).torch(), torch.ones(1 << 20))


# ---------------------------------------------------------------------------------------------------------- device loss


def test_after_a_lost_device_the_next_call_works(reopened):
    reopened()
    x = array(torch.ones(3))
    runtime.device().gpu.destroy()
    with pytest.raises(headwise.webgpu.DeviceLost, match="The next call opens it again"):
        (x + x).torch()
    with pytest.raises(headwise.webgpu.DeviceLost, match=r"make it anew with headwise\.webgpu\.array"):
        x.torch()
    with pytest.raises(headwise.webgpu.DeviceLost, match="make it anew"):
        hw.softmax(x)
    y = torch.randn(4, 5)
    torch.testing.assert_close(hw.softmax(y, backend="webgpu"), torch.softmax(y, -1))
    assert torch.equal((array(y) + array(y)).torch(), y + y)


# ---------------------------------------------------------------------------------------------------------------- errors


def test_no_adapter_says_what_to_install(reopened, monkeypatch):
    monkeypatch.setattr(wgpu.gpu, "enumerate_adapters_sync", lambda: [])
    with pytest.raises(headwise.webgpu.NoAdapter, match="mesa-vulkan-drivers and libvulkan1"):
        reopened()
    assert "found no adapter" in rules.unavailable()


def test_an_unknown_adapter_lists_those_that_are_there(reopened):
    name = headwise.webgpu.capabilities().name
    with pytest.raises(headwise.webgpu.NoAdapter, match=r"HEADWISE_WEBGPU_ADAPTER='quantum' names no adapter") as told:
        reopened(webgpu_adapter="quantum")
    assert name in str(told.value)
    assert reopened(webgpu_adapter=name[:5].upper()).capabilities.name == name


def test_a_tier_that_does_not_exist(reopened):
    with pytest.raises(ValueError, match=r"HEADWISE_WEBGPU_TIER='D' is no tier; there are: A, B, C"):
        reopened(webgpu_tier="D")


def test_a_tier_that_the_adapter_does_not_have(monkeypatch):
    real = adapter.choose()
    poor = SimpleNamespace(features=set(), limits=real.limits, info=real.info, summary="a poor adapter")
    monkeypatch.setattr(settings, "webgpu_tier", None)
    assert adapter.capabilities(poor).tier == "A"
    monkeypatch.setattr(settings, "webgpu_tier", "C")
    with pytest.raises(
        ValueError, match=r"HEADWISE_WEBGPU_TIER='C' is more than this adapter has \(A\): a poor adapter"
    ):
        adapter.capabilities(poor)


def test_tier_a_has_what_every_device_has(reopened):
    can = reopened(webgpu_tier="A").capabilities
    assert (can.tier, can.subgroup_size) == ("A", 0)
    assert (can.workgroup_memory, can.workgroup_threads, can.storage_buffers) == (16384, 256, 8)


def test_an_allocation_over_the_limit_names_it():
    most = headwise.webgpu.capabilities().buffer_bytes
    x = array(torch.ones(3))
    with pytest.raises(
        headwise.webgpu.OutOfMemory, match=f"a tensor of {4 << 40} bytes is larger than .*: {most} bytes"
    ):
        x.new_empty((1 << 40,))
    assert torch.equal((x + x).torch(), torch.full((3,), 2.0))


def test_tensors_on_the_wrong_device():
    x, weight = torch.randn(3, 5), torch.randn(5)
    with pytest.raises(ValueError, match="weight is on cpu and x on webgpu; they need to be on one device"):
        hw.rms_norm(array(x), weight)
    with pytest.raises(ValueError, match="weight is on webgpu and x on cpu"):
        hw.rms_norm(x, array(weight))
    with pytest.raises(ValueError, match="on meta; it needs to be on cpu to go to WebGPU"):
        array(x.to("meta"))
    with pytest.raises(ValueError, match="weight is on meta and x on webgpu"):
        hw.rms_norm(array(x), weight.to("meta"))
    with pytest.raises(ValueError, match="backend='cpu' cannot run this call: the tensors are on 'webgpu'"):
        hw.rms_norm(array(x), None, backend="cpu")


def test_a_kernel_is_called_with_what_it_declares():
    device = runtime.device()
    y = device.empty((8,), torch.int32)
    with pytest.raises(RuntimeError, match=r"fill binds \['y'\], and was given \['y', 'z'\]"):
        device.run(device.kernel("fill"), 1, (8, 0), y=y, z=y)
    with pytest.raises(RuntimeError, match="fill: parameters"):
        device.run(device.kernel("fill"), 1, (8,), y=y)
    x, z = device.empty((9,), torch.float32).narrow(0, 1, 8), device.empty((8,), torch.float32)
    with pytest.raises(RuntimeError, match="a begins at element 1; the kernel needs a multiple of 4"):
        device.run(device.kernel("add", dtype="f32"), 1, (2,), a=x, b=x, y=z)


# --------------------------------------------------------------------------------------------------------------- the host


def test_what_a_small_op_costs_the_host(capsys):
    """Printed (pytest -s); the bound only catches a compilation or a readback in every call."""
    x = array(torch.randn(4, 64))
    costs = {}
    ops = {"add": lambda: x + x, "softmax": lambda: hw.softmax(x), "rms_norm": lambda: hw.rms_norm(x, None)}
    for name, op in ops.items():
        for _ in range(20):
            op()
        runtime.device().synchronize()
        start = time.perf_counter()
        for _ in range(50):
            op()
        costs[name] = (time.perf_counter() - start) / 50
        runtime.device().synchronize()
    with capsys.disabled():
        print("\nhost cost of a small resident op: " + ", ".join(f"{n} {c * 1e6:.0f} µs" for n, c in costs.items()))
    assert max(costs.values()) < 5e-3


def test_timestamps_measure_the_device():
    device = runtime.device()
    if not device.capabilities.timestamps:
        with pytest.raises(RuntimeError, match="no timestamp queries"), device.timed():
            pass
        return
    x = array(torch.ones(1 << 16))
    with device.timed() as few:
        x + x
    with device.timed() as many:
        y = x
        for _ in range(100):
            y = y + x
    assert 0 < few.seconds < many.seconds < 60

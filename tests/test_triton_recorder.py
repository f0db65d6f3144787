"""Records of Triton launchers, without a GPU: what is written down, and what is done with it at every call after that."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fake_gpu import STREAM, Box, FakeGpu, Kernel, at
from torch import Tensor

from headwise import arguments
from headwise.backends.triton import private, replay
from headwise.backends.triton.gpu import KNOWN
from headwise.backends.triton.recording import Call, Counters, Launch, Recording, Take

F32, I32 = torch.float32, torch.int32


class Two(NamedTuple):
    x: Tensor
    other: Tensor | None
    times: float = 1.0


arguments.learn(Two)
N = 12


def meta(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def recorded(function: Any, args: Two | None = None, offsets: tuple[int, int] = (0, 0), **facts: Any) -> Recording:
    recording = Recording(KNOWN["sm_90"]._replace(**facts))
    recording.run(function, args or Two(meta(N), meta(N)), offsets)
    return recording


def launches(recording: Recording) -> list[Launch]:
    return [step for step in recording.steps if isinstance(step, Launch)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


# ---------------------------------------------------------------------------------------------------- what is written down


def test_steps_are_those_of_the_launcher_in_order():
    def launcher(gpu, args):
        y, stats = gpu.empty((2, 3), torch.bfloat16), gpu.zeros((5,), F32)
        counters = gpu.counters(7)
        gpu.launch("first", (4,), (args.x, None, y, stats), (N, 0.5), (True, 64), warps=8, stages=2, registers=128)
        order, index = gpu.call(torch.sort, args.other)
        gpu.launch("second", (1, 2, 3), (order, index, counters))
        return y

    steps = recorded(launcher).steps
    assert [type(step) for step in steps] == [Take, Take, Counters, Launch, Call, Launch]
    y, stats, counters, first, sort, second = steps
    assert y == Take(2, (2, 3), (3, 1), torch.bfloat16, None)
    assert stats == Take(3, (5,), (1,), F32, 0)
    assert counters == Counters(4, 7)
    assert (first.kernel, first.grid, first.tail) == ("first", (4, 1, 1), (N, 0.5, True, 64))
    assert first.options == private.options(8, 2, 128)
    assert [p if p is None else (p.memory, p.offset) for p in first.tensors] == [(0, 0), None, (2, 0), (3, 0)]
    assert (sort.function, [p.memory for p in sort.inputs], sort.memory) == (torch.sort, [1], (5, 6))
    assert second.grid == (1, 2, 3)
    assert [p.memory for p in second.tensors] == [5, 6, 4]


# What a launcher makes of a (4, 6, 8) argument, and the byte of that argument where it begins.
VIEWS = {
    "as it is": (lambda x: x, 0),
    "rows from the third": (lambda x: x[2:], 2 * 48 * 4),
    "one element further": (lambda x: x[..., 1:], 4),
    "one entry": (lambda x: x[3, 2], (3 * 48 + 2 * 8) * 4),
    "transposed": (lambda x: x.transpose(0, 2), 0),
    "expanded": (lambda x: x[1:2].expand(9, 6, 8), 48 * 4),
    "unflattened": (lambda x: x[1:].view(3, 6, 2, 4), 48 * 4),
    "as_strided": (lambda x: x.as_strided((2, 2), (7, 3), 5), 5 * 4),
    "as bytes": (lambda x: x.view(torch.uint8)[:, :, 3:], 3),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("of", ["an argument", "own memory", "the result of a call"])
def test_views_are_places_in_the_memory_they_view(name, of):
    view, offset = VIEWS[name]

    def launcher(gpu, args):
        x = {
            "an argument": lambda: args.other,
            "own memory": lambda: gpu.empty((4, 6, 8), F32),
            "the result of a call": lambda: gpu.call(torch.clone, args.other),
        }[of]()
        gpu.launch("kernel", (1,), (view(x),))
        return gpu.empty((1,), F32)

    recording = recorded(launcher, Two(meta(N), meta(4, 6, 8)))
    (place,) = launches(recording)[0].tensors
    assert (place.memory, place.offset) == (1 if of == "an argument" else 2, offset)
    expected = view(meta(4, 6, 8))
    assert place.like.shape == expected.shape
    assert (place.like.stride(), place.like.dtype) == (expected.stride(), expected.dtype)


# Memory that is not an argument and did not come from the gpu: no later call would have it.
UNKNOWN = {
    "torch.empty": lambda gpu, args: torch.empty(3, device="meta"),
    "new_empty": lambda gpu, args: args.x.new_empty(3),
    "an operator": lambda gpu, args: args.x * 2,
    "a copy": lambda gpu, args: args.x.view(3, 4).mT.contiguous(),
    "a CPU tensor": lambda gpu, args: torch.zeros(3),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("used", ["launched", "described", "called", "returned"])
def test_memory_that_is_not_known_is_refused(gpu, name, used):
    def launcher(device, args):
        strange = UNKNOWN[name](device, args)
        if used == "launched":
            device.launch("kernel", (1,), (args.x, strange))
        if used == "described":
            device.launch("kernel", (1,), (args.x,), descriptors=((strange, Box(name="box")),))
        if used == "called":
            device.call(torch.sort, strange)
        return strange if used == "returned" else device.empty((1,), F32)

    with pytest.raises(RuntimeError, match="neither an argument nor taken from its gpu"):
        gpu.record(launcher, Two(torch.zeros(N), None))


def test_only_what_is_not_contiguous_is_copied():
    def launcher(gpu, args):
        assert gpu.contiguous(args.x) is args.x
        return gpu.contiguous(args.other)

    recording = recorded(launcher, Two(meta(N), meta(3, 4).T))
    (copy,) = recording.steps
    assert [p.memory for p in copy.inputs] == [1]


@pytest.mark.parametrize("offset", [0, 4, 8, 12, 2])
def test_alignment_is_that_of_the_address(offset):
    seen = []

    def launcher(gpu, args):
        own = gpu.empty((N,), F32)
        views = (args.x, args.x[1:], args.x[4:], args.other, own, own[4:], own[3:])
        seen.extend(gpu.aligned(x) for x in views)
        gpu.launch("kernel", (1,), views)
        return own

    recording = recorded(launcher, offsets=(offset, 0))
    offsets = [offset, offset + 4, offset + 16, 0, 0, 16, 12]
    assert seen == [byte % 16 == 0 for byte in offsets]
    # Triton compiles for addresses like these.
    assert [x.data_ptr() % 16 for x in recording.sample(launches(recording)[0])] == [byte % 16 for byte in offsets]


def test_what_a_kernel_is_compiled_for(gpu):
    @Kernel
    def kernel(*given):
        pass

    def launcher(device, args):
        device.launch(
            kernel, (5, 2), (args.x, args.other), (N, args.times), (64, None), warps=2, stages=1,
            descriptors=((args.x, Box(name="box")), None),
        )  # fmt: skip
        return device.empty((1,), F32)

    gpu.record(launcher, Two(torch.zeros(N, dtype=torch.float16), None, 0.25))
    ((grid, given, options),) = kernel.compiled_for
    assert grid == (5, 2, 1)
    assert options == private.options(2, 1, 0)
    described, no_box, x, other, *numbers = given
    assert (described.box, described.shape, no_box, other) == ("box", [N], None, None)
    assert (x.dtype, x.ptr_range()) == (torch.float16, 2 * N)
    assert numbers == [N, 0.25, 64, None]


def test_arguments_that_are_one_tensor_are_two_places():
    x = meta(N)
    recording = recorded(lambda gpu, args: gpu.launch("kernel", (1,), (args.x, args.other)), Two(x, x))
    assert [p.memory for p in launches(recording)[0].tensors] == [0, 1]


# ------------------------------------------------------------------------------------------------------------ what is done


@Kernel
def add(x, y, n, value):
    at(y, n).copy_(at(x, n) + value)


@Kernel
def multiply(x, other, y, n):
    at(y, n).copy_(at(x, n) * (1.0 if other is None else at(other, n)))


@Kernel
def count(counters, y, n):
    assert at(counters, n, I32).tolist() == [0] * n
    at(y, n).copy_(torch.arange(n))


@pytest.fixture(autouse=True)
def fresh_kernels():
    for kernel in (add, multiply, count):
        kernel.compiled_for.clear()
        kernel.through_triton.clear()


def add_one(gpu, args):
    y = gpu.empty((N,), F32)
    gpu.launch(add, (1,), (args.x, y), (N, 1.0))
    return y


def test_a_record_runs_on_the_tensors_of_its_call(gpu):
    run = gpu.record(add_one, Two(torch.randn(N), None))
    assert not gpu.launches
    results = []
    for _ in range(3):
        x = torch.randn(N)
        results.append(run(x, None))
        assert torch.equal(results[-1], x + 1)
    assert len({y.data_ptr() for y in results}) == 3
    assert len(gpu.launches) == 3
    assert gpu.launches[-1] == ("add", (1, 1, 1), (x.data_ptr(), results[-1].data_ptr(), N, 1.0))
    assert len(add.compiled_for) == 1
    assert not add.through_triton


@Kernel
def nothing(*given):
    pass


def test_scratch_is_one_allocation_of_aligned_pieces(gpu):
    sizes = []

    def launcher(device, args):
        first, second, third = device.empty((N,), F32), device.empty((70,), F32), device.empty((N,), F32)
        empty = device.empty((0, 5), F32)
        y = device.empty((N,), F32)
        device.launch(add, (1,), (args.x, first), (N, 2.0))
        device.launch(multiply, (1,), (first, args.other, third), (N,))
        device.launch(add, (1,), (third, y), (N, 3.0))
        device.launch(nothing, (1,), (second, empty))
        return y

    run = gpu.record(launcher, Two(torch.randn(N), torch.randn(N)))
    names = run.__globals__
    maker = next(name for name in names if name.startswith("make_") and names[name].__self__.dtype == torch.uint8)
    new_bytes = names[maker]
    names[maker] = lambda size, stride: sizes.append(size) or new_bytes(size, stride)
    for _ in range(2):
        x, other = torch.randn(N), torch.randn(N)
        torch.testing.assert_close(run(x, other), (x + 2) * other + 3)
    assert sizes == [(4 * 256,)] * 2
    first, third, second = gpu.launches[-4][2][1], gpu.launches[-3][2][2], gpu.launches[-1][2][0]
    assert (second - first, third - first) == (256, 768)


def test_arguments_may_be_missing_and_results_too(gpu):
    def launcher(device, args):
        y = device.empty((N,), F32)
        device.launch(multiply, (1,), (args.x, args.other, y), (N,))
        return y, None, device.zeros((2,), I32)

    run = gpu.record(launcher, Two(torch.randn(N), None))
    x = torch.randn(N)
    y, nothing, zeros = run(x, None)
    assert torch.equal(y, x)
    assert nothing is None
    assert zeros.tolist() == [0, 0]
    assert zeros.dtype == I32


@pytest.mark.parametrize("first", ["one tensor", "two tensors"])
def test_arguments_may_be_one_tensor_in_one_call_and_two_in_another(gpu, first):
    def launcher(device, args):
        y = device.empty((N,), F32)
        device.launch(multiply, (1,), (args.x, args.other, y), (N,))
        return y

    x, other = torch.randn(N), torch.randn(N)
    run = gpu.record(launcher, Two(x, x if first == "one tensor" else other))
    for a, b in ((x, other), (x, x), (other, x), (other, other)):
        assert torch.equal(run(a, b), a * b)


def test_views_keep_their_place_and_arguments_may_be_views(gpu):
    def launcher(device, args):
        y = device.empty((2, N), F32)
        device.launch(add, (1,), (args.x[2:], y[1]), (N - 2, 1.0))
        device.launch(add, (1,), (args.other[1:], y[0]), (N - 1, 5.0))
        return y

    run = gpu.record(launcher, Two(torch.randn(N), torch.randn(N)))
    memory = torch.randn(3 * N)
    x, other = memory[4 : 4 + N], memory[N + 8 : 2 * N + 8]
    y = run(x, other)
    assert torch.equal(y[1, : N - 2], x[2:] + 1)
    assert torch.equal(y[0, : N - 1], other[1:] + 5)


def test_a_result_may_be_a_view_of_what_was_taken(gpu):
    def launcher(device, args):
        y = device.empty((3, N), F32)
        for row in range(3):
            device.launch(add, (1,), (args.x, y[row]), (N, float(row)))
        return y[1:].transpose(0, 1), y

    run = gpu.record(launcher, Two(torch.randn(N), None))
    for _ in range(2):
        x = torch.randn(N)
        part, whole = run(x, None)
        assert torch.equal(part, torch.stack([x + 1, x + 2], 1))
        assert part.stride() == (1, N)
        assert torch.equal(whole[0], x)


def test_pytorch_functions_run_between_the_launches(gpu):
    """On arguments, on scratch and on each other's results; their results go into launches, or are results."""

    def launcher(device, args):
        raised = device.empty((N + 2,), F32)
        device.launch(add, (1,), (args.x, raised[2:]), (N, 10.0))
        order, index = device.call(torch.sort, raised[2:])
        y = device.empty((N,), F32)
        device.launch(multiply, (1,), (order, args.other, y), (N,))
        return y, index, device.call(torch.neg, y)

    run = gpu.record(launcher, Two(torch.randn(N), torch.randn(N)))
    for _ in range(2):
        x, other = torch.randn(N), torch.randn(N)
        y, index, negative = run(x, other)
        expected = torch.sort(x + 10)
        torch.testing.assert_close(y, expected.values * other)
        assert torch.equal(index, expected.indices)
        assert torch.equal(negative, -y)


def test_a_launcher_may_launch_nothing(gpu):
    run = gpu.record(lambda device, args: device.filled((2, 2), -1.0, F32), Two(torch.randn(0), None))
    first, second = run(torch.randn(0), None), run(torch.randn(0), None)
    assert first.tolist() == [[-1.0, -1.0]] * 2
    first.zero_()
    assert second.tolist() == [[-1.0, -1.0]] * 2


# ----------------------------------------------------------------------------------------------------------------- counters


def counted(number):
    def launcher(device, args):
        y = device.empty((number,), F32)
        device.launch(count, (1,), (device.counters(number), y), (number,))
        return y

    return launcher


def test_counters_are_kept_for_a_stream(gpu):
    few, many = (gpu.record(counted(n), Two(torch.randn(1), None)) for n in (3, 5000))
    x = torch.randn(1)
    for _ in range(2):
        few(x, None)
    few_at = {given[0] for _, _, given in gpu.launches}
    assert len(few_at) == 1
    many(x, None)
    few(x, None)
    large = {given[0] for _, _, given in gpu.launches[2:]}
    assert len(large) == 1, "what is large enough for many does for few"
    gpu.stream = STREAM + 1
    few(x, None)
    assert gpu.launches[-1][2][0] not in large


@pytest.mark.parametrize("why", ["a graph is captured", "one stream for each thread"])
def test_counters_are_not_shared_where_launches_may_overlap(gpu, why):
    gpu.capturing = why == "a graph is captured"
    gpu.stream = STREAM if gpu.capturing else 2
    run = gpu.record(counted(3), Two(torch.randn(1), None))
    run(torch.randn(1), None)
    assert not replay._counters_kept


def test_counters_are_not_kept_while_inductor_makes_graphs(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace())
    run = gpu.record(counted(3), Two(torch.randn(1), None))
    run(torch.randn(1), None)
    assert not replay._counters_kept


# ---------------------------------------------------------------------------------------------- descriptors and profilers


@Kernel
def described(*given):
    pass


def with_descriptors(device, args):
    y = device.empty((N,), F32)
    boxes = (
        (args.x, Box(name="x")),
        None if args.other is None else (args.other, Box(name="other")),
        (y, Box(name="y")),
    )
    device.launch(described, (1,), (y,), (N,), descriptors=boxes)
    return y


@pytest.fixture
def encoded(monkeypatch):
    made = []

    def encode(descriptor, meta):
        made.append((descriptor.box, descriptor.base.data_ptr(), descriptor.shape))
        return ["128 bytes", descriptor.box, meta]

    monkeypatch.setattr(private, "encoded", encode)
    return made


def test_descriptors_are_encoded_once_for_an_address(gpu, encoded, monkeypatch):
    x, other = torch.randn(N), torch.randn(N)
    y = torch.randn(N)
    # As an allocator hands out the same addresses again and again.
    monkeypatch.setattr(replay, "_empty", lambda *of: SimpleNamespace(new_empty_strided=lambda *sizes: y))
    run = gpu.record(with_descriptors, Two(x, None))
    for _ in range(2):
        run(x, None)
        assert encoded == [("x", x.data_ptr(), [N]), ("y", y.data_ptr(), [N])]
        assert gpu.launches[-1][2] == ("128 bytes", "x", 1, None, "128 bytes", "y", 2, y.data_ptr(), N)
    run(other, None)
    assert encoded[2:] == [("x", other.data_ptr(), [N]), ("y", y.data_ptr(), [N])]


def test_few_descriptors_are_kept(gpu, encoded, monkeypatch):
    monkeypatch.setattr(replay, "_DESCRIPTORS_KEPT", 4)
    run = gpu.record(with_descriptors, Two(torch.randn(N), None))
    held = [torch.randn(N) for _ in range(30)]
    for x in held:
        run(x, None)
    (kept,) = [value for name, value in run.__globals__.items() if name.startswith("known_")]
    assert 0 < len(kept) <= 4


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("in_a_chain", [False, True])
def test_profilers_hear_of_every_launch(gpu, monkeypatch, hook, in_a_chain):
    x = torch.randn(N)
    run = gpu.record(add_one, Two(x, None))
    with monkeypatch.context() as patch:
        if in_a_chain:
            patch.setattr(getattr(private.HOOKS, hook), "calls", [print])
        else:
            patch.setattr(private.HOOKS, hook, print)
        assert private.hooked()
        assert torch.equal(run(x, None), x + 1)
    assert len(add.through_triton) == 1
    grid, (given, y, *numbers), options = add.through_triton[0]
    assert (grid, numbers, options) == ((1, 1, 1), [N, 1.0], private.options(4, 3, 0))
    assert (given.data_ptr(), given.dtype) == (x.data_ptr(), F32)
    assert y.dtype == F32
    assert not private.hooked()
    assert torch.equal(run(x, None), x + 1)
    assert len(add.through_triton) == 1


def test_profilers_hear_of_descriptors_and_of_launches_between_calls(gpu, monkeypatch):
    def launcher(device, args):
        y = device.empty((N,), F32)
        device.launch(add, (1,), (device.call(torch.neg, args.x), y), (N, 1.0))
        device.launch(described, (1,), (y,), descriptors=((y, Box(name="y")), None))
        return y

    run = gpu.record(launcher, Two(torch.randn(N), None))
    monkeypatch.setattr(private.HOOKS, "launch_enter_hook", print)
    x = torch.randn(N)
    described.through_triton.clear()
    y = run(x, None)
    assert torch.equal(y, 1 - x)
    ((_, (box, nothing, pointer), _),) = described.through_triton
    assert (box.box, box.base.data_ptr(), nothing) == ("y", y.data_ptr(), None)
    assert pointer.data_ptr() == y.data_ptr()
    assert not gpu.launches


def test_a_release_that_is_not_known_launches_in_its_own_way(gpu, monkeypatch):
    monkeypatch.setattr(private, "direct", lambda compiled: None)
    x = torch.randn(N)
    run = gpu.record(add_one, Two(x, None))
    for _ in range(2):
        assert torch.equal(run(x, None), x + 1)
    assert len(add.through_triton) == 2
    assert not gpu.launches


def test_a_release_that_takes_its_arguments_as_one_tuple(gpu, monkeypatch):
    def direct(kernel):
        def launch(x, y, z, stream, before, values):
            assert (x, y, z, stream, before) == (1, 1, 1, STREAM, "before")
            kernel.function(*values)

        return private.Direct(launch, ("before",), True, None)

    monkeypatch.setattr(private, "direct", direct)
    x = torch.randn(N)
    assert torch.equal(gpu.record(add_one, Two(x, None))(x, None), x + 1)
    run = gpu.record(lambda device, args: device.call(torch.neg, add_one(device, args)), Two(x, None))
    assert torch.equal(run(x, None), -x - 1)

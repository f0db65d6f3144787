"""The cached launch of Triton kernels, with kernels and launchers that only take notes: no GPU is needed."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from headwise.backends.triton import launch as launching
from headwise.config import settings

STREAM = 77


class OldLauncher:
    """As Triton 3.6 has it."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.calls.append((gridX, gridY, gridZ, stream, function, *args))


class NewLauncher(OldLauncher):
    """As Triton 3.7 to 3.9 have it."""

    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
        launch_exit_hook, *args
    ):  # fmt: skip
        super().__call__(
            gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
            launch_exit_hook, *args,
        )  # fmt: skip


class OtherLauncher(OldLauncher):
    """As no Triton has it yet."""

    def __call__(self, grid, function, arguments):
        raise AssertionError("nobody knows how to call this")


class Kernel:
    """Stands for a JIT function: notes the calls that go the long way, and returns a compiled kernel."""

    def __init__(self, launcher: OldLauncher) -> None:
        self.launcher = launcher
        self.calls = []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.calls.append((grid, args, options))
            return SimpleNamespace(run=self.launcher, function="function", packed_metadata="metadata")

        return run


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(settings, "triton_interpret", False)
    monkeypatch.setattr(launching, "_ready", {})
    # The device of a tensor that is on none is -1.
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)


@pytest.fixture
def kernel():
    return Kernel(OldLauncher())


X = torch.zeros(64)
NUMBERS = (5, 0.5)
CONSTANTS = (True, 128)


def launch(kernel, grid=(3,), tensors=(X, None), numbers=NUMBERS, constants=CONSTANTS, **options):
    launching.launch(kernel, grid, tensors, numbers, constants, **options)


@pytest.mark.parametrize("launcher", [OldLauncher, NewLauncher])
def test_second_launch_goes_straight_to_the_compiled_kernel(launcher):
    kernel = Kernel(launcher())
    launch(kernel, num_warps=8, num_stages=2)
    options = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
    assert kernel.calls == [((3,), (X, None, *NUMBERS, *CONSTANTS), options)]
    launch(kernel, grid=(4, 5), num_warps=8, num_stages=2)
    assert len(kernel.calls) == 1
    no_hooks = (None, None, None)
    assert kernel.launcher.calls == [
        (4, 5, 1, STREAM, "function", "metadata", *no_hooks, X.data_ptr(), None, *NUMBERS, *CONSTANTS)
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"tensors": (X[1:], None)},  # not aligned
        {"tensors": (X.int(), None)},
        {"tensors": (X, X)},
        {"tensors": (None, X)},
        {"numbers": (6, 0.5)},
        {"numbers": (5, 0.25)},
        {"numbers": (2**40, 0.5)},
        {"constants": (False, 128)},
        {"constants": (True, 64)},
        {"num_warps": 8},
        {"num_stages": 1},
        {"registers": 64},
    ],
    ids=str,
)
def test_what_a_compiled_kernel_may_depend_on_makes_another_one(kernel, other):
    launch(kernel)
    launch(kernel, **other)
    launch(kernel)
    launch(kernel, **other)
    assert len(kernel.calls) == 2
    assert len(kernel.launcher.calls) == 2


def test_what_it_does_not_depend_on_makes_none(kernel):
    launch(kernel)
    launch(kernel, tensors=(torch.ones(200, 100), None), grid=(1, 2, 3))
    assert len(kernel.calls) == 1


def test_kernels_are_told_apart():
    kernels = [Kernel(OldLauncher()) for _ in range(2)]
    for kernel in kernels:
        launch(kernel)
        assert len(kernel.calls) == 1


def test_one_and_one_point_zero_are_not_taken_for_each_other(kernel):
    launch(kernel, numbers=(2, 0.5))
    launch(kernel, numbers=(2.0, 0.5))
    assert len(kernel.calls) == 2


def test_unknown_launcher_goes_the_long_way():
    kernel = Kernel(OtherLauncher())
    for _ in range(3):
        launch(kernel)
    assert len(kernel.calls) == 3


def test_interpreter_goes_the_long_way(kernel, monkeypatch):
    monkeypatch.setattr(settings, "triton_interpret", True)
    for _ in range(3):
        launch(kernel)
    assert len(kernel.calls) == 3


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("in_a_chain", [False, True])
def test_profilers_hear_of_every_launch(kernel, monkeypatch, hook, in_a_chain):
    launch(kernel)
    with monkeypatch.context() as patch:
        if in_a_chain:
            patch.setattr(getattr(launching._HOOKS, hook), "calls", [print])
        else:
            patch.setattr(launching._HOOKS, hook, print)
        launch(kernel)
        launch(kernel, num_warps=1)
    assert len(kernel.calls) == 3
    launch(kernel)
    assert len(kernel.calls) == 3
    launch(kernel, num_warps=1)  # what was compiled for the profiler is not kept
    assert len(kernel.calls) == 4


def test_another_device_is_made_the_current_one(kernel, monkeypatch):
    current = [0]

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *error):
            current.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", Device)
    for _ in range(2):
        launch(kernel)
    assert current == [0]
    assert len(kernel.calls) == 1
    assert len(kernel.launcher.calls) == 1


def test_ever_new_sizes_do_not_pile_up(kernel, monkeypatch):
    monkeypatch.setattr(launching, "_LIMIT", 10)
    for n in range(100):
        launch(kernel, numbers=(n, 0.5))
    assert len(launching._ready) <= 10


def test_threads_share_the_compiled_kernels(kernel):
    threads = [
        threading.Thread(target=lambda: [launch(kernel, numbers=(n % 7, 0.5)) for n in range(200)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernel.calls) + len(kernel.launcher.calls) == 8 * 200
    assert len(kernel.calls) <= 7 * 8


def _plan(kernel, **changes):
    parts = {"grid": (3, 1, 1), "numbers": NUMBERS, "constants": CONSTANTS, "warps": 4, "stages": 3, **changes}
    return launching.Plan(kernel, **parts)


def test_a_plan_goes_straight_to_the_compiled_kernel(kernel):
    plan = _plan(kernel)
    for _ in range(4):  # the long way, then the launcher: found once, kept after that
        plan.launch(X, None)
    assert len(kernel.calls) == 1
    no_hooks = (None, None, None)
    straight = (3, 1, 1, STREAM, "function", "metadata", *no_hooks, X.data_ptr(), None, *NUMBERS, *CONSTANTS)
    assert kernel.launcher.calls == [straight] * 3


@pytest.mark.parametrize("others", [(X[1:], None), (X.int(), None), (X, X)], ids=["misaligned", "dtype", "not None"])
def test_a_plan_tells_its_tensors_apart(kernel, others):
    plan = _plan(kernel)
    for _ in range(3):
        plan.launch(X, None)
        plan.launch(*others)
    assert len(kernel.calls) == 2
    assert len(kernel.launcher.calls) == 4


def test_a_plan_on_another_device_goes_there(kernel, monkeypatch):
    entered = []

    class Device:
        def __init__(self, index):
            entered.append(index)

        def __enter__(self):
            monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)

        def __exit__(self, *error):
            monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)

    plan = _plan(kernel)
    for _ in range(3):
        plan.launch(X, None)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    plan.launch(X, None)
    assert entered == [-1]


def test_a_plan_tells_profilers(kernel, monkeypatch):
    plan = _plan(kernel)
    for _ in range(3):
        plan.launch(X, None)
    monkeypatch.setattr(launching._HOOKS, "launch_enter_hook", lambda *args: None)
    plan.launch(X, None)
    assert len(kernel.calls) == 2


class Compiled(OldLauncher):
    """What was compiled for tensors that are aligned in this way, and must be given no others."""

    def __init__(self, aligned: list[bool]) -> None:
        super().__init__()
        self.aligned = aligned

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        super().__call__(gridX, gridY, gridZ, stream, function, *args)
        addresses = args[4 : 4 + len(self.aligned)]  # after the metadata and three hooks
        assert [address % 16 == 0 for address in addresses] == self.aligned


class CompilingKernel(Kernel):
    """Compiles a kernel at every call that goes the long way."""

    def __init__(self) -> None:
        super().__init__(OldLauncher())
        self.compiled = []

    def __getitem__(self, grid):
        def run(*args, **options):
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            self.compiled.append(Compiled([t.data_ptr() % 16 == 0 for t in tensors]))
            return SimpleNamespace(run=self.compiled[-1], function="function", packed_metadata="metadata")

        return run


@pytest.mark.parametrize("first", ["aligned", "misaligned"])
def test_a_plan_gives_no_tensors_to_what_was_compiled_for_others(first):
    assert X.data_ptr() % 16 == 0
    kinds = [(X, X), (X[1:], X), (X, X[1:]), (X[1:], X[1:])]
    if first == "misaligned":
        kinds.reverse()
    kernel = CompilingKernel()
    plan = _plan(kernel)
    for tensors in kinds:
        for _ in range(4):  # in a row, so that it is kept if it ever is
            plan.launch(*tensors)
    for _ in range(2):
        for tensors in kinds:
            plan.launch(*tensors)
    assert len(kernel.compiled) == len(kinds)
    assert [len(of_kind.calls) for of_kind in kernel.compiled] == [5] * len(kinds)

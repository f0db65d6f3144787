"""Which backend runs a call: by device, by name, by context, by setting; never another one in silence."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

import headwise as hw
from headwise import config
from headwise.backends import registry
from headwise.backends.cpu import recorder
from headwise.cases import SUITES
from headwise.ops import _explain
from headwise.ops.softmax import Softmax


class Spy(ModuleType):
    """A backend that takes float32 softmax on the CPU, up to rows of 100, and counts what it ran."""

    DTYPES = (torch.float32,)
    LAUNCHERS = {"softmax_forward": "softmax", "softmax_backward": None}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__("spy_backend")
        self.calls = 0
        self.missing: str | None = None

    def unavailable(self) -> str | None:
        return self.missing

    def supports(self, call: registry.Call) -> str | None:
        return "it takes rows of at most 100" if call.sizes["V"] > 100 else None

    def softmax_forward(self, args: Softmax) -> torch.Tensor:
        self.calls += 1
        return torch.softmax(args.x, -1)


@pytest.fixture
def spy(monkeypatch):
    """The spy as a row of the table: after the others, so that it runs only when asked for."""
    backend = Spy()
    kernels = ModuleType("spy_backend.softmax")
    kernels.softmax_forward = backend.softmax_forward
    monkeypatch.setitem(sys.modules, "spy_backend", backend)
    monkeypatch.setitem(sys.modules, "spy_backend.softmax", kernels)
    monkeypatch.setitem(sys.modules, "spy_backend.recorder", recorder)
    monkeypatch.setattr(registry, "BACKENDS", (*registry.BACKENDS, registry.Backend("spy", (), ("cpu",), backend)))
    registry.ask_again()  # another spy than that of the test before
    yield backend
    registry.ask_again()


X = torch.randn(3, 10)


def chosen(**kwargs) -> str | None:
    return hw.explain("softmax", X, **kwargs).chosen


def test_the_device_chooses(spy):
    hw.softmax(X)
    assert chosen() == "cpu"
    assert spy.calls == 0


def test_by_name(spy):
    torch.testing.assert_close(hw.softmax(X, backend="spy"), hw.softmax(X, backend="cpu"))
    assert spy.calls == 1


def test_by_context(spy):
    with hw.use_backend("spy"):
        hw.softmax(X)
        assert spy.calls == 1
        hw.softmax(X, backend="cpu")  # the call's own word counts more
        assert spy.calls == 1
        with hw.use_backend("cpu"):
            assert chosen() == "cpu"
        with hw.use_backend(None):
            assert chosen() == "cpu"
        assert chosen() == "spy"
    assert chosen() == "cpu"


def test_context_ends_with_an_exception(spy):
    with pytest.raises(KeyError), hw.use_backend("spy"):
        raise KeyError
    assert chosen() == "cpu"


def test_context_belongs_to_its_thread(spy):
    seen = []
    with hw.use_backend("spy"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
    assert seen == ["cpu"]


def test_by_setting(spy, monkeypatch):
    monkeypatch.setattr(config.settings, "backend", "spy")
    assert chosen() == "spy"
    assert chosen(backend="cpu") == "cpu"
    with hw.use_backend("cpu"):
        assert chosen() == "cpu"


@pytest.mark.parametrize(
    ("environment", "backend", "validate"),
    [
        ({}, None, False),
        ({"HEADWISE_BACKEND": "cpu"}, "cpu", False),
        ({"HEADWISE_BACKEND": ""}, None, False),
        *[({"HEADWISE_VALIDATE": on}, None, True) for on in ("1", "true", "Yes", "ON")],
        *[({"HEADWISE_VALIDATE": off}, None, False) for off in ("0", "false", "No", "OFF", "")],
    ],
)
def test_settings_come_from_the_environment(monkeypatch, environment, backend, validate):
    for name in ("HEADWISE_BACKEND", "HEADWISE_VALIDATE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    interpreted = config.settings.triton_interpret
    assert config.Settings.from_environment() == config.Settings(backend, validate, triton_interpret=interpreted)


def test_a_setting_that_is_neither_on_nor_off_raises(monkeypatch):
    monkeypatch.setenv("HEADWISE_VALIDATE", "maybe")
    with pytest.raises(ValueError, match="HEADWISE_VALIDATE='maybe'; it needs to be 1, true, yes or on, or 0, false"):
        config.Settings.from_environment()


def test_every_setting_is_documented(monkeypatch):
    """In the docstring and in docs/index.md, and nothing else is read."""
    monkeypatch.setattr(config, "os", asked := Asked())
    config.Settings.from_environment()
    page = (Path(__file__).parent.parent / "docs" / "index.md").read_text(encoding="utf-8")
    pattern = r"`+((?:HEADWISE|TRITON)_[A-Z_]+)`+"
    assert asked.names == set(re.findall(pattern, config.__doc__)) == set(re.findall(pattern, page))


class Asked:
    """In place of os: remembers which variables were asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.environ = self

    def get(self, name: str, default: str | None = None) -> str | None:
        self.names.add(name)
        return default


# A way to ask for a backend -> the call that asks with it.
WAYS = ("argument", "context", "setting")


def ask(way: str, backend: str, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    if way == "argument":
        return hw.softmax(x, backend=backend)
    if way == "context":
        with hw.use_backend(backend):
            return hw.softmax(x)
    monkeypatch.setattr(config.settings, "backend", backend)
    return hw.softmax(x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.randn(2, 101), "it takes rows of at most 100"),
        (torch.randn(2, 5).half(), "it computes in float32, not float16"),
        (torch.randn(2, 5, requires_grad=True), "it has no softmax_backward kernel yet"),
    ],
    ids=["size", "dtype", "gradient"],
)
def test_a_named_backend_runs_or_raises(spy, monkeypatch, way, x, reason):
    with pytest.raises(ValueError, match=f"softmax: backend='spy' cannot run this call: {reason}"):
        ask(way, "spy", x, monkeypatch)
    assert spy.calls == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_backend_that_is_not_there_raises_with_its_reason(spy, monkeypatch, way):
    spy.missing = "the package spyglass is not installed: pip install spyglass"
    with pytest.raises(
        ValueError, match=r"softmax: backend='spy' cannot run this call: .*pip install spyglass"
    ) as error:
        ask(way, "spy", X, monkeypatch)
    assert re.search(r"Backends that can: (webgpu, )?cpu\.", str(error.value))


@pytest.mark.parametrize("way", WAYS)
def test_an_unknown_name_raises_with_the_known_ones(monkeypatch, way):
    with pytest.raises(ValueError, match=r"backend='nonsense' is not known; there are: triton, webgpu, cpu"):
        ask(way, "nonsense", X, monkeypatch)


def test_a_device_nobody_runs_names_every_reason(spy):
    told = _explain.judge(_explain.describe("softmax", X), device="abacus")
    assert told.chosen is None
    assert "no backend runs this call on device 'abacus'" in told.error
    for row in registry.BACKENDS:
        assert f"{row.name}: " in told.error
    assert dict(told.verdicts)["spy"] == "the tensors are on 'abacus' and it takes tensors on 'cpu'"


def test_a_mac_is_told_the_way_out():
    told = _explain.judge(_explain.describe("softmax", X), device="mps")
    assert "x.cpu() runs on the CPU and headwise.webgpu.array(x.cpu()) on the GPU" in told.error


def test_a_padded_batch_without_q_lengths_gets_a_note():
    q = torch.randn(2, 2, 5, 8)
    lengths = torch.tensor([3, 5])
    assert "needs q_lengths as well" in hw.explain("attention", q, q, q, causal=True, kv_lengths=lengths).hint
    assert hw.explain("attention", q, q, q, kv_lengths=lengths).hint is None
    assert hw.explain("attention", q[:, :, :1], q, q, causal=True, kv_lengths=lengths).hint is None
    padded = {"causal": True, "kv_lengths": lengths, "q_lengths": lengths}
    assert hw.explain("attention", q, q, q, **padded).hint is None


def test_tensors_without_memory_are_nobodys(spy):
    with hw.use_backend("spy"):
        assert hw.softmax(X.to("meta")).device.type == "meta"
    assert spy.calls == 0


def test_automatic_choice_passes_over_what_is_not_supported(spy, monkeypatch):
    """A backend that comes first for a device and cannot run a call leaves it to the next one: that is no fallback of a
    named backend, and explain tells."""
    rows = (registry.Backend("spy", ("cpu",), ("cpu",), spy), *registry.BACKENDS[:-1])
    monkeypatch.setattr(registry, "BACKENDS", rows)
    assert chosen() == "spy"
    wide = hw.explain("softmax", torch.randn(2, 101))
    assert wide.chosen == "cpu"
    assert wide.verdicts[0] == ("spy", "it takes rows of at most 100")


def test_the_choice_is_a_constant_of_the_compiled_graph(spy):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: hw.softmax(x, backend="spy"), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), torch.softmax(X, -1))
    assert spy.calls == 1


def test_a_compiled_function_follows_the_context(spy):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: hw.softmax(x), fullgraph=True, backend="eager")
    compiled(X)
    assert spy.calls == 0
    with hw.use_backend("spy"):
        compiled(X)
    assert spy.calls == 1
    compiled(X)
    assert spy.calls == 1


# ------------------------------------------------------------------------------------------------------------- explain


def test_explain_tells_every_verdict_and_runs_nothing(spy):
    explanation = hw.explain("softmax", X, backend="spy")
    assert explanation.chosen == "spy"
    assert [v.backend for v in explanation.verdicts] == [row.name for row in registry.BACKENDS]
    assert dict(explanation.verdicts)["spy"] is None
    assert spy.calls == 0


def test_explain_prints_as_a_table(spy):
    text = str(hw.explain("softmax", torch.randn(2, 101)))
    assert "softmax  float32  on cpu  V=101" in text
    assert "→ cpu" in text
    assert "no: it takes rows of at most 100" in text


def test_explain_of_a_call_that_would_raise(spy):
    explanation = hw.explain("softmax", torch.randn(2, 101), backend="spy")
    assert explanation.chosen is None
    assert "cannot run this call" in explanation.error
    assert "raises ValueError" in str(explanation)


def test_explain_raises_what_the_op_raises():
    with pytest.raises(TypeError, match="softmax: x is a list"):
        hw.explain("softmax", [1.0])
    with pytest.raises(TypeError, match="dim"):
        hw.explain("softmax", X, dim=1)
    with pytest.raises(ValueError, match=r"explain: op is 'nonsense'; it needs to be one of add_rms_norm, .*attention"):
        hw.explain("nonsense", X)


def test_an_unknown_backend_is_an_error_of_the_call(monkeypatch):
    with pytest.raises(ValueError, match="backend='nonsense' is not known"):
        hw.explain("softmax", X, backend="nonsense")


# An attention call that the Hopper kernels take.
Q = torch.randn(4, 16, 1024, 64, dtype=torch.bfloat16)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, two bytes further on."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize(
    ("arch", "kernel"),
    [
        ("sm_90", "the Hopper kernel"),
        ("sm_80", "the plain kernel (the Hopper kernels are for sm_90, and this GPU is sm_80)"),
        ("sm_86", "the plain kernel (the Hopper kernels are for sm_90, and this GPU is sm_86)"),
        ("sm_100", "the plain kernel (the Hopper kernels are for sm_90, and this GPU is sm_100)"),
        ("gfx942", "the plain kernel (the Hopper kernels are for NVIDIA GPUs)"),
    ],
)
def test_explain_answers_for_a_gpu_that_is_not_here(arch, kernel):
    told = hw.explain("attention", Q, Q, Q, causal=True, arch=arch)
    assert (told.chosen, told.call.device, told.call.arch) == ("triton", "cuda", arch)
    assert told.note == f"forward: {kernel}"
    q = Q.clone().requires_grad_()
    assert hw.explain("attention", q, Q, Q, arch=arch).note == f"forward: {kernel}; backward: {kernel}"
    assert f"on cuda ({arch})" in str(told)


def test_explain_knows_what_a_gpu_lacks():
    wide = torch.empty(1, 1, 64, 512, requires_grad=True)
    assert hw.explain("attention", wide, wide, wide, arch="sm_86").chosen is None
    assert hw.explain("attention", *[wide.detach()] * 3, arch="sm_86").chosen == "triton"
    with pytest.raises(ValueError, match="arch is 'sm_75'; it needs to be one of sm_80, sm_86, sm_90, sm_100, gfx942"):
        hw.explain("attention", Q, Q, Q, arch="sm_75")


def test_explain_sees_an_unaligned_address():
    odd, reason = shifted(Q), "the plain kernel (k does not begin at a multiple of 16 bytes)"
    told = hw.explain("attention", Q, odd, Q, arch="sm_90").note
    assert told.startswith(f"forward: {reason}; ")
    assert told.endswith("loads are not vectorised: k")
    assert (
        hw.explain("attention", Q.to("meta"), *[odd.to("meta")] * 2, arch="sm_90").note == "forward: the Hopper kernel"
    )
    assert hw.explain("rms_norm", odd, arch="sm_80").note == (
        "not at a multiple of 16 bytes, so loads are not vectorised: x"
    )
    assert hw.explain("rms_norm", Q, arch="sm_80").note is None


def test_explain_hints_at_heads_that_look_like_a_sequence():
    inside = torch.empty(2, 1024, 16, 64, device="meta")
    hint = "q has 1024 heads of 16 tokens; a (B, S, H, D) tensor needs .transpose(1, 2)"
    told = hw.explain("attention", inside, inside, inside)
    assert told.hint == hint
    assert f"note: {hint}" in str(told)
    outside = inside.transpose(1, 2)
    assert hw.explain("attention", outside, outside, outside).hint is None
    one = torch.empty(2, 128, 1, 64, device="meta")  # a decoded token of many heads
    cache = torch.empty(2, 8, 4096, 64, device="meta")
    assert hw.explain("attention", one, cache, cache).hint is None


# ------------------------------------------------------------------------------------------------ what comes with import


@pytest.mark.parametrize("name", ["nn", "reference", "testing", "webgpu"])
def test_modules_are_there_after_import_headwise(name):
    program = f"""
import sys, headwise as hw
assert "headwise.{name}" not in sys.modules
assert "{name}" in dir(hw)
assert hw.{name} is sys.modules["headwise.{name}"]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_there_is_no_other_attribute():
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'nonsense'"):
        _ = hw.nonsense


@pytest.mark.parametrize("op", [name for name in hw.__all__ if name in SUITES])
def test_the_oracle_of_every_op_is_a_function(op):
    """As the error of a second-order gradient says."""
    assert callable(getattr(hw.reference, op))


def test_a_second_order_gradient_can_be_had_from_the_oracle():
    x = X.double().requires_grad_()
    assert torch.autograd.gradgradcheck(hw.reference.softmax, (x,))

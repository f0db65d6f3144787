"""Which backend runs a call: by device, by name, by context, by setting; never another one in silence."""

from __future__ import annotations

import re
import sys
import threading
from types import ModuleType

import pytest
import torch

import headwise as hw
from headwise import config
from headwise.backends import registry


class Spy(ModuleType):
    """A backend that takes float32 softmax on the CPU, up to rows of 100, and counts what it ran."""

    DTYPES = (torch.float32,)
    LAUNCHERS = {"softmax_forward": "softmax"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__("spy_backend")
        self.calls = 0
        self.missing: str | None = None

    def unavailable(self) -> str | None:
        return self.missing

    def supports(self, call: registry.Call) -> str | None:
        return "it takes rows of at most 100" if call.sizes["V"] > 100 else None

    def softmax_forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.softmax(x, -1)


@pytest.fixture
def spy(monkeypatch):
    """The spy as a row of the table: after the others, so that it runs only when asked for."""
    backend = Spy()
    kernels = ModuleType("spy_backend.softmax")
    kernels.softmax_forward = backend.softmax_forward
    monkeypatch.setitem(sys.modules, "spy_backend", backend)
    monkeypatch.setitem(sys.modules, "spy_backend.softmax", kernels)
    monkeypatch.setattr(registry, "BACKENDS", (*registry.BACKENDS, registry.Backend("spy", (), ("cpu",), backend)))
    monkeypatch.setattr(registry, "_availability", {})
    monkeypatch.setattr(registry, "_launchers", {})
    return backend


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
        ({"HEADWISE_VALIDATE": "1"}, None, True),
        ({"HEADWISE_VALIDATE": "0"}, None, False),
    ],
)
def test_settings_come_from_the_environment(monkeypatch, environment, backend, validate):
    for name in ("HEADWISE_BACKEND", "HEADWISE_VALIDATE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert config.Settings.from_environment() == config.Settings(backend, validate)


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
        (torch.empty(2, 5, device="meta"), "the tensors are on 'meta' and it takes tensors on 'cpu'"),
    ],
    ids=["size", "dtype", "gradient", "device"],
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
    with pytest.raises(ValueError, match="no backend runs this call on device 'meta'") as error:
        hw.softmax(X.to("meta"))
    for row in registry.BACKENDS:
        assert f"{row.name}: " in str(error.value)


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
    with pytest.raises(ValueError, match="explain: op is 'nonsense'; it needs to be one of attention"):
        hw.explain("nonsense", X)

"""op × backend × direction × dtype, pinned: a kernel or a dtype that vanishes makes this fail, not a test fewer run."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from bad_calls import Inputs, good_calls
from torch import Tensor

from headwise import testing
from headwise.backends import registry
from headwise.cases import SUITES
from headwise.ops import _explain
from headwise.ops._op import OPS

# s single, h half, b bfloat16, d double; a capital letter: with gradients too. transpose moves any dtype of these. An op
# that is not in the table is expected to run everywhere.
TABLE = """
op                              cpu   triton  webgpu
add_rms_norm                    SHBD  SHB     SHB
add_rms_norm_backward           shbd  shb     shb
attention                       SHBD  SHB     SHB
attention_backward              shbd  shb     shb
attention_decode                SHBD  SHB     SHB
attention_probs                 SHBD  SHB     SHB
attention_probs_backward        shbd  shb     shb
attention_varlen                SHBD  SHB     SHB
attention_varlen_backward       shbd  shb     shb
cross_entropy                   SHBD  SHB     SHB
cross_entropy_forward_backward  shbd  shb     shb
embedding                       SHBD  SHB     SHB
embedding_backward              shbd  shb     shb
glu                             SHBD  SHB     SHB
glu_backward                    shbd  shb     shb
layer_norm                      SHBD  SHB     SHB
layer_norm_backward             shbd  shb     shb
linear_cross_entropy            SHBD  SHB     SHB
linear_cross_entropy_forward_backward  shbd  shb  shb
merge_attention                 SHBD  SHB     SHB
merge_attention_backward        shbd  shb     shb
rms_norm                        SHBD  SHB     SHB
rms_norm_backward               shbd  shb     shb
rope                            SHBD  SHB     SHB
rope_backward                   shbd  shb     shb
softmax                         SHBD  SHB     SHB
softmax_backward                shbd  shb     shb
transpose                       SHBD  SHBD    SHBD
"""

LETTERS = {"s": torch.float32, "h": torch.float16, "b": torch.bfloat16, "d": torch.float64}
HEADER, *ROWS = (line.split() for line in TABLE.split("\n") if line)
EXPECTED = {op: dict(zip(HEADER[1:], cells, strict=True)) for op, *cells in ROWS}
EVERYWHERE = {"cpu": "SHBD", "triton": "SHB", "webgpu": "SHB"}
STATISTICS = ("lse", "lses", "grad_lse", "cos", "sin")  # float32, or float64 with float64
TABLES = ("cos", "sin")  # that have no gradient


def described(op: str, dtype: torch.dtype, gradient: bool) -> registry.Call:
    """The call as backends judge it."""

    def cast(name: str, x: object) -> object:
        if isinstance(x, list):
            return [cast(name, part) for part in x]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        statistic = name in STATISTICS and dtype != torch.float64
        return x.to(torch.float32 if statistic else dtype).requires_grad_(gradient and name not in TABLES)

    known = good_calls(Inputs("cpu"))
    given = known[op] if op in known else of_first_case(SUITES[op])
    return _explain.describe(op, **{name: cast(name, x) for name, x in given.items()}).call


def of_first_case(suite: testing.Suite) -> testing.Arguments:
    return suite.make(testing.maker_of(suite, suite.cases[0], torch.float32), **suite.cases[0].params)


def runs(backend: registry.Backend, call: registry.Call) -> bool:
    """On a machine that has what the backend needs."""
    if registry.verdict(backend, call._replace(device=backend.devices[0])) is not None:
        return False
    return all(defined(backend, launcher) for launcher in call.launchers)


def defined(backend: registry.Backend, launcher: str) -> bool:
    """Does the module of the launcher define it? Read, not imported: triton may not be here."""
    found = importlib.util.find_spec(str(registry.module_of(backend.name, launcher)))
    assert found is not None
    assert found.origin is not None
    names: set[str] = set()
    for node in ast.parse(Path(found.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return launcher in names


@pytest.fixture(autouse=True)
def every_backend_is_available(monkeypatch):
    monkeypatch.setattr(registry, "_missing", {row.name: None for row in registry.BACKENDS})


@pytest.mark.parametrize("op", [op for op in OPS if op in EXPECTED or op in SUITES])
def test_op_runs_on_every_backend_that_the_table_names(op):
    found = {}
    for backend in registry.BACKENDS:
        letters = ""
        for letter, dtype in LETTERS.items():
            if runs(backend, described(op, dtype, gradient=False)):
                with_gradients = OPS[op].backward is not None and runs(backend, described(op, dtype, gradient=True))
                letters += letter.upper() if with_gradients else letter
        found[backend.name] = letters
    assert found == EXPECTED.get(op, EVERYWHERE)


def test_the_table_names_ops_that_exist_and_every_backend():
    assert set(EXPECTED) <= set(OPS)
    assert set(HEADER[1:]) == {row.name for row in registry.BACKENDS}


@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].backward is not None and op in SUITES])
def test_cases_compare_gradients_wherever_the_op_has_them(op):
    assert SUITES[op].differentiable
    assert set(SUITES[op].dtypes) >= {torch.float32, torch.float16, torch.bfloat16}


def test_a_launcher_that_vanished_is_seen(monkeypatch):
    cpu = next(row for row in registry.BACKENDS if row.name == "cpu")
    call = described("softmax", torch.float32, gradient=True)
    assert runs(cpu, call)
    assert not runs(cpu, call._replace(launchers=("softmax_forward", "softmax_sideways")))
    monkeypatch.setattr(cpu.rules, "LAUNCHERS", {"softmax_backward": None}, raising=False)
    monkeypatch.setattr(registry, "_modules", {})
    assert not runs(cpu, call)

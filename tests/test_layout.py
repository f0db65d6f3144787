"""The rules of the house, kept by reading the code. Each rule is a function from source text to its violations, and is
itself tested on a snippet that breaks it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import headwise
from headwise.backends.registry import BACKENDS
from headwise.cases import SUITES
from headwise.ops._op import OPS as STATED

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwise"

# Public, but not ops.
NOT_OPS = {"Unsupported", "explain", "use_backend", "warm"}

# What a backend may import of headwise besides its own folder: modules that know neither ops nor other backends.
NEUTRAL = (
    "headwise.arguments", "headwise.backends.norm", "headwise.backends.registry", "headwise.config", "headwise.layout",
)  # fmt: skip

# Who may look at the oracle.
READS_THE_ORACLE = ("headwise.reference", "headwise.cases", "headwise.testing", "headwise.cli", "headwise.benchmark")

# Optional package -> modules that may import it when they are imported themselves; packages (`__init__`) never may.
OPTIONAL = {
    "triton": ("headwise.backends.triton",),
    "wgpu": ("headwise.backends.webgpu",),
    "jinja2": ("headwise.backends.webgpu",),
    "numpy": ("headwise.backends.webgpu", "headwise.benchmark", "headwise.integrations.onnx"),
    "onnx": ("headwise.integrations.onnx",),
    "rich": ("headwise.cli", "headwise.benchmark"),
    "matplotlib": (),
    "safetensors": (),
    "transformers": ("headwise.integrations",),
}

DRAWERS = {"utils", "util", "helpers", "misc", "common"}
LONGEST_FILE = 600


class Import(NamedTuple):
    line: int
    name: str  # "torch.nn"; `from headwise import ops` is "headwise.ops"
    on_import: bool  # runs when the module is imported: not inside a function


class Module(NamedTuple):
    name: str  # "headwise.ops.softmax"; a package is its own name
    is_package: bool
    source: str

    def imports(self) -> Iterator[Import]:
        return _imports(ast.parse(self.source), self, on_import=True)


def _imports(node: ast.AST, module: Module, on_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(child.lineno, alias.name, on_import)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, module)
            for alias in child.names:
                yield Import(child.lineno, f"{base}.{alias.name}", on_import)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            # Types cost nothing and bind nothing; the else branch does.
            for statement in child.orelse:
                yield from _imports(ast.Module([statement], []), module, on_import)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, module, on_import and not function)


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


# ---------------------------------------------------------------------------------------------------------- the rules


def ops_know_no_kernels(module: Module) -> Iterator[str]:
    if not within(module.name, "headwise.ops"):
        return
    for imported in module.imports():
        foreign = imported.name.split(".")[0] in ("triton", "wgpu", "jinja2")
        backend = within(imported.name, "headwise.backends") and not (
            within(imported.name, "headwise.backends.registry") or imported.name == "headwise.backends"
        )
        if foreign or backend:
            yield f"line {imported.line}: an op imports {imported.name}"


def backends_stand_alone(module: Module) -> Iterator[str]:
    if not within(module.name, "headwise.backends") or module.name in (
        "headwise.backends",
        "headwise.backends.registry",
    ):
        return
    own = ".".join(module.name.split(".")[:3])
    for imported in module.imports():
        if not within(imported.name, "headwise") or within(imported.name, own):
            continue
        if not any(within(imported.name, neutral) for neutral in NEUTRAL):
            yield f"line {imported.line}: backend {own} imports {imported.name}"


def only_judges_read_the_oracle(module: Module) -> Iterator[str]:
    if any(within(module.name, reader) for reader in READS_THE_ORACLE):
        return
    for imported in module.imports():
        if within(imported.name, "headwise.reference"):
            yield f"line {imported.line}: {module.name} imports the oracle"


def config_alone_reads_the_environment(module: Module) -> Iterator[str]:
    if module.name == "headwise.config":
        return
    for node in ast.walk(ast.parse(module.source)):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names]
        for name in names:
            if name in ("environ", "environb", "getenv", "putenv"):
                yield f"line {node.lineno}: os.{name}"


def optional_packages_come_late(module: Module) -> Iterator[str]:
    for imported in module.imports():
        package = imported.name.split(".")[0]
        if not imported.on_import or package not in OPTIONAL:
            continue
        allowed = any(within(module.name, place) for place in OPTIONAL[package])
        if not allowed or module.is_package:
            yield f"line {imported.line}: {imported.name} is imported on import of {module.name}"


def files_are_short(module: Module) -> Iterator[str]:
    lines = module.source.count("\n")
    if lines > LONGEST_FILE:
        yield f"{lines} lines; {LONGEST_FILE} is the limit"


def no_drawers(module: Module) -> Iterator[str]:
    last = module.name.split(".")[-1].strip("_")
    if last in DRAWERS:
        yield f"{last} is a drawer: name the file after what it does"


Rule = Callable[[Module], Iterator[str]]

# rule -> a module that breaks it
BROKEN: dict[Rule, list[Module]] = {
    ops_know_no_kernels: [
        Module("headwise.ops.bad", False, "import triton.language as tl"),
        Module("headwise.ops.bad", False, "def f():\n    from headwise.backends.cpu import softmax"),
        Module("headwise.ops.bad", False, "from headwise.backends import cpu"),
        Module("headwise.ops.attention", True, "from ...backends.cpu import softmax"),
    ],
    backends_stand_alone: [
        Module("headwise.backends.cpu.bad", False, "from headwise.backends.triton import softmax"),
        Module("headwise.backends.cpu.bad", False, "from headwise.reference.softmax import softmax"),
        Module("headwise.backends.cpu.bad", False, "from headwise import ops"),
        Module("headwise.backends.cpu.bad", False, "from ..webgpu import runtime"),
        Module("headwise.backends.cpu", True, "from headwise.ops.softmax import softmax"),
    ],
    only_judges_read_the_oracle: [
        Module("headwise.nn", False, "from headwise.reference import softmax"),
        Module("headwise.ops.bad", False, "def f():\n    import headwise.reference.softmax"),
        Module("headwise", True, "from . import reference"),
    ],
    config_alone_reads_the_environment: [
        Module("headwise.nn", False, "import os\nDEBUG = os.environ.get('DEBUG')"),
        Module("headwise.nn", False, "import os\ndef f():\n    return os.getenv('DEBUG')"),
        Module("headwise.nn", False, "from os import environ"),
    ],
    optional_packages_come_late: [
        Module("headwise.backends.triton", True, "import triton"),
        Module("headwise.backends.cpu.bad", False, "try:\n    import triton\nexcept ImportError:\n    triton = None"),
        Module("headwise.testing", False, "from rich.table import Table"),
        Module("headwise.benchmark.plot", False, "import matplotlib.pyplot as plt"),
        Module("headwise.nn", False, "class Norm:\n    import numpy"),
    ],
    files_are_short: [Module("headwise.long", False, "x = 1\n" * (LONGEST_FILE + 1))],
    no_drawers: [Module("headwise.ops.utils", False, ""), Module("headwise.ops._helpers", False, "")],
}

GOOD = [
    Module("headwise.ops.good", False, "from headwise.backends import registry\nfrom headwise.ops import _checks"),
    Module("headwise.backends.triton.good", False, "import triton\nfrom headwise.backends.registry import Call"),
    Module(
        "headwise.backends.cpu.good",
        False,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headwise.ops.attention._arguments import Flags",
    ),
    Module("headwise.benchmark.plot", False, "def plot():\n    import matplotlib.pyplot as plt"),
    Module("headwise.cli.good", False, "import os\nfrom rich.table import Table\nCORES = os.cpu_count()"),
    Module("headwise.cases.good", False, "from headwise.reference.softmax import softmax"),
]


def _read(path: Path, root: Path) -> Module:
    parts = list(path.relative_to(root).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    return Module(".".join(parts[:-1] if is_package else parts), is_package, path.read_text())


MODULES = [_read(path, PACKAGE.parent) for path in sorted(PACKAGE.rglob("*.py"))]
SHADERS = [_read(path, PACKAGE.parent) for path in sorted(PACKAGE.rglob("*.wgsl"))]
TESTS = [_read(path, ROOT) for path in sorted((ROOT / "tests").rglob("*.py"))]


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_rule_is_kept(rule):
    violations = [f"{module.name}: {problem}" for module in MODULES for problem in rule(module)]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("rule", [files_are_short, no_drawers], ids=lambda rule: rule.__name__)
def test_rule_is_kept_in_the_tests_and_the_shaders(rule):
    assert SHADERS
    violations = [f"{module.name}: {problem}" for module in TESTS + SHADERS for problem in rule(module)]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("rule", "module"), [(rule, module) for rule, modules in BROKEN.items() for module in modules],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_rule_sees_what_breaks_it(rule, module):
    assert list(rule(module))


@pytest.mark.parametrize("module", GOOD, ids=lambda module: module.name)
def test_rules_let_good_code_pass(module):
    assert [problem for rule in BROKEN for problem in rule(module)] == []


# ----------------------------------------------------------------------------------------------------- the public ops

OPS = sorted(set(headwise.__all__) - NOT_OPS)


def op_problems(name: str, op: Callable[..., object], suites: dict[str, object]) -> Iterator[str]:
    """What a public op lacks: a docstring, `backend=None` as a keyword, cases."""
    if not inspect.getdoc(op):
        yield f"{name} has no docstring"
    backend = inspect.signature(op).parameters.get("backend")
    if backend is None or backend.kind is not inspect.Parameter.KEYWORD_ONLY or backend.default is not None:
        yield f"{name} does not take backend=None as a keyword"
    base = name.removesuffix("_backward").removesuffix("_forward")
    if base not in suites:
        yield f"{name} has no case suite"
    elif base != name and getattr(suites[base], "explicit", None) is None:
        yield f"the suite of {base} does not run {name} (Suite.explicit)"


@pytest.mark.parametrize("name", OPS)
def test_public_op_is_complete(name):
    assert list(op_problems(name, getattr(headwise, name), SUITES)) == []


def test_an_incomplete_op_is_seen():
    def thing(x, backend=None):
        return x

    assert len(list(op_problems("thing", thing, {}))) == 3
    assert any("Suite.explicit" in p for p in op_problems("thing_backward", thing, {"thing": object()}))


def test_everything_public_exists_and_is_sorted():
    assert list(headwise.__all__) == sorted(headwise.__all__)
    assert all(hasattr(headwise, name) for name in headwise.__all__)


def test_public_ops_are_those_that_are_stated():
    """So that each of them can be explained, and each has an entry in the table of `test_op_table`."""
    assert sorted(STATED) == OPS


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda row: row.name)
def test_backend_folder_has_the_name_of_its_row(backend):
    assert backend.rules.__name__ == f"headwise.backends.{backend.name}"

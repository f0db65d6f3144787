"""Draw the house from its imports: the rooms of src/headwise and who imports whom, between two marks in the page about it.

    python scripts/draw_architecture.py            write it
    python scripts/draw_architecture.py --check    exit with 1 if the page shows something else

An arrow is an import that runs when the module is imported; a dotted one an import that runs when it is first needed. Types
alone (TYPE_CHECKING) are not drawn.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawing: made by scripts/draw_architecture.py -->", "<!-- /drawing -->"

# Room -> what the drawing says of it. A module belongs to the longest name that it begins with.
ROOMS = {
    "headwise": "headwise: the public functions",
    "headwise.nn": "nn: torch.nn modules",
    "headwise.distributed": "distributed: one sequence on many devices",
    "headwise.integrations": "integrations: other people's conventions",
    "headwise.ops": "ops: what each op means",
    "headwise.webgpu": "webgpu: arrays",
    "headwise.backends.registry": "backends/registry: who runs a call",
    "headwise.backends.cpu": "backends/cpu",
    "headwise.backends.triton": "backends/triton",
    "headwise.backends.triton.hopper": "backends/triton/hopper",
    "headwise.backends.webgpu": "backends/webgpu",
    "headwise.arguments": "arguments, layout, config: plain facts that all of them share",
    "headwise.cases": "cases, testing: the case tables, the error budget",
    "headwise.reference": "reference: the oracle",
    "headwise.cli": "cli, benchmark, demo, web: the tools",
}
SAME_ROOM = {
    "headwise.layout": "headwise.arguments",
    "headwise.config": "headwise.arguments",
    "headwise.backends.norm": "headwise.arguments",
    "headwise.backends": "headwise.backends.registry",
    "headwise.testing": "headwise.cases",
    "headwise.__main__": "headwise.cli",
    "headwise.benchmark": "headwise.cli",
    "headwise.demo": "headwise.cli",
    "headwise.web": "headwise.cli",
}
# The tools may import everything, and everything the shared facts: those arrows would hide the others.
NOT_DRAWN_FROM, NOT_DRAWN_TO = "headwise.cli", "headwise.arguments"


def room(module: str) -> str:
    name = module
    while name not in ROOMS and name not in SAME_ROOM:
        name = name.rpartition(".")[0]
    return SAME_ROOM.get(name, name)


def imports(node: ast.AST, late: bool = False) -> Iterator[tuple[str, bool]]:
    """``(module, whether only when a function runs)`` of every import of headwise."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, late) for alias in child.names if alias.name.split(".")[0] == "headwise")
        elif isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "headwise":
            yield from ((_module(f"{child.module}.{alias.name}"), late) for alias in child.names)
        else:
            yield from imports(child, late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def _module(name: str) -> str:
    """``from headwise import ops`` imports a module, ``from headwise.ops import x`` perhaps a name in one."""
    path = SOURCE.joinpath(*name.split("."))
    return name if path.is_dir() or path.with_suffix(".py").exists() else name.rpartition(".")[0]


def edges() -> dict[tuple[str, str], bool]:
    """``(from, to)`` -> is it imported only when a function runs?"""
    found: dict[tuple[str, str], bool] = {}
    for path in sorted((SOURCE / "headwise").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for imported, late in imports(ast.parse(path.read_text(encoding="utf-8"))):
            pair = room(module), room(imported)
            if pair[0] != pair[1]:
                found[pair] = found.get(pair, True) and late
        if module == "headwise":
            found |= {("headwise", room(f"headwise.{name}")): True for name in _imported_by_name(path)}
    return found


def _imported_by_name(path: Path) -> list[str]:
    """The modules in ``_LATE``, which `headwise.__getattr__` imports."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_LATE":
            return list(ast.literal_eval(node.value))
    return []


def drawing() -> str:
    names = {name: name.removeprefix("headwise").strip(".").replace(".", "_") or "public" for name in ROOMS}
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {names[name]}["{label}"]' for name, label in ROOMS.items()]
    for (source, target), late in sorted(edges().items()):
        if source != NOT_DRAWN_FROM and target != NOT_DRAWN_TO:
            lines.append(f"    {names[source]} {'-.->' if late else '-->'} {names[target]}")
    return "\n".join([*lines, "```"])


def page(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{drawing()}\n{END}{after}"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{PAGE} has no marks to draw between")
    drawn = page(text)
    if "--check" in sys.argv[1:]:
        return int(drawn != text)
    PAGE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

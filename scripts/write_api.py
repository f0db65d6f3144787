"""Write down every public name and signature: tests/data/public_api.txt.

    python scripts/write_api.py            write it
    python scripts/write_api.py --check    exit with 1 if the interface is another, and say where

Optional packages do not change it: signatures are read from the sources, not from what is imported.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PAGE = ROOT / "tests" / "data" / "public_api.txt"

MODULES = (
    "headwise", "headwise.nn", "headwise.distributed", "headwise.webgpu", "headwise.integrations.flash_attn",
    "headwise.integrations.onnx", "headwise.integrations.sdpa", "headwise.integrations.transformers",
)  # fmt: skip


def lines() -> Iterator[str]:
    for module in MODULES:
        yield f"# {module}"
        for name in exported(module):
            yield from (f"{module}.{line}" for line in described(name, *found(module, name)))
        yield ""


def tree_of(module: str) -> ast.Module:
    path = SOURCE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def exported(module: str) -> list[str]:
    """Its `__all__`, which may take in that of another module, or all public definitions."""
    tree, names = tree_of(module), set[str]()
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names |= {name for name in ast.literal_eval(node.value) if not name.startswith("_")}
        elif isinstance(node, ast.AugAssign) and getattr(node.target, "id", "") == "__all__":
            names |= set(exported(_imported(tree, ast.unparse(node.value).removesuffix(".__all__"))))
    if names:
        return sorted(names)
    kinds = (ast.FunctionDef, ast.ClassDef)
    return sorted({node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")})


def _imported(tree: ast.Module, name: str) -> str:
    """The module that is imported under a name."""
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    return next(f"{node.module}.{name}" for node in imports if any(alias.name == name for alias in node.names))


def found(module: str, name: str) -> tuple[str, list[ast.stmt]]:
    """The module that defines the name, and its definitions there: several for overloads."""
    tree = tree_of(module)
    here = [node for node in tree.body if getattr(node, "name", None) == name]
    if here:
        return module, here
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return found(node.module, alias.name)
                if alias.name == "*" and name in exported(node.module):
                    return found(node.module, name)
    return module, []


def described(name: str, module: str, definitions: list[ast.stmt]) -> Iterator[str]:
    if not definitions:
        yield name
    for node in definitions:
        if isinstance(node, ast.FunctionDef):
            yield signature(name, node)
        elif isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            yield f"{name}({bases})" if bases else name
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and (
                    not member.name.startswith("_") or member.name == "__init__"
                ):
                    yield f"{name}." + signature(member.name, member)
                elif isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
                    yield f"{name}.{ast.unparse(member)}"


def signature(name: str, node: ast.FunctionDef) -> str:
    marks = "".join(f"@{ast.unparse(mark)} " for mark in node.decorator_list)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}{marks and f' {marks.strip()} '}({ast.unparse(node.args)}){returns}"


def main() -> int:
    text = "\n".join(lines())
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    difference = list(
        difflib.unified_diff(before.splitlines(), text.splitlines(), "written down", "now", lineterm="", n=0)
    )
    print("\n".join(difference))
    return int(bool(difference))


if __name__ == "__main__":
    sys.exit(main())

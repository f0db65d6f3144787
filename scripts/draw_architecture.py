"""Draw the house from its imports: the rooms of src/headwise and who imports whom, as docs/images/architecture.svg.

    python scripts/draw_architecture.py            write it
    python scripts/draw_architecture.py --check    exit with 1 if the picture shows something else

An arrow is an import that runs when the module is imported; a dotted one an import that runs when it is first needed. Types
alone (TYPE_CHECKING) are not drawn.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"


class Room(NamedTuple):
    name: str
    what: str
    column: float
    row: int
    width: float = 1.0  # in columns


# Module -> its room. A module belongs to the longest name that it begins with.
ROOMS = {
    "headwise.cli": Room("cli, benchmark, demo, web", "the tools: import what they like", 2, 0, 5),
    "headwise.integrations": Room("integrations", "other people's conventions", 1, 1),
    "headwise.distributed": Room("distributed", "one sequence, many devices", 0, 2),
    "headwise": Room("headwise", "the public functions", 2, 2),
    "headwise.cases": Room("cases, testing", "case tables, error budget", 4, 2),
    "headwise.nn": Room("nn", "torch.nn modules", 0, 3),
    "headwise.reference": Room("reference", "the oracle", 4, 3),
    "headwise.ops": Room("ops", "what each op means", 1, 4),
    "headwise.webgpu": Room("webgpu", "arrays, and a device", 3, 1),
    "headwise.backends.registry": Room("backends/registry", "who runs a call", 1, 5),
    "headwise.backends.cpu": Room("backends/cpu", "PyTorch's CPU kernels", 0, 6),
    "headwise.backends.triton": Room("backends/triton", "NVIDIA and AMD GPUs", 1, 6),
    "headwise.backends.webgpu": Room("backends/webgpu", "every other GPU", 3, 6),
    "headwise.backends.triton.hopper": Room("backends/triton/hopper", "Gluon kernels for sm_90", 1, 7),
    "headwise.arguments": Room("arguments, layout, config", "plain facts: imported by all of them", 2, 8, 5),
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


_COLUMN, _ROW, _BOX, _HIGH, _EDGE = 212, 92, 184, 46, 14  # pixels
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; }
.name { font-weight: 600; font-size: 13px; }
.what { fill: #57606a; }
rect { fill: #f2f8f8; stroke: #0b7285; }
.shared { fill: #f6f8fa; stroke: #8c959f; }
path { fill: none; stroke: #57606a; stroke-width: 1.3; }
.late { stroke-dasharray: 4 4; }
"""


def drawing() -> str:
    arrows = [
        (source, target, late)
        for (source, target), late in sorted(edges().items())
        if source != NOT_DRAWN_FROM and target != NOT_DRAWN_TO
    ]
    ends = _ends([(source, target) for source, target, _ in arrows])
    width, height = 5 * _COLUMN, (max(room.row for room in ROOMS.values()) + 1) * _ROW - 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<title>Who imports whom in src/headwise</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<polygon points="0,0.8 8,4 0,7.2" fill="#57606a"/></marker></defs>',
    ]
    for source, target, late in arrows:
        (x, y), (to_x, to_y) = ends[source, target]
        way = _way(ROOMS[source], ROOMS[target], x, y, to_x, to_y)
        mark = ' class="late"' if late else ""
        lines.append(f'<path{mark} d="{way}" marker-end="url(#tip)"><title>{source} imports {target}</title></path>')
    lines += [_box(name, room) for name, room in ROOMS.items()]
    return "\n".join([*lines, "</svg>", ""])


def _box(module: str, room: Room) -> str:
    x, y = _middle(room)
    width = _BOX + (room.width - 1) * _COLUMN
    mark = ' class="shared"' if module in (NOT_DRAWN_FROM, NOT_DRAWN_TO) else ""
    return (
        f'<rect{mark} x="{x - width / 2:g}" y="{y - _HIGH / 2:g}" width="{width:g}" height="{_HIGH}" rx="6"/>'
        f'<text class="name" x="{x:g}" y="{y - 3:g}">{room.name}</text>'
        f'<text class="what" x="{x:g}" y="{y + 14:g}">{room.what}</text>'
    )


def _middle(room: Room) -> tuple[float, float]:
    return (room.column + 0.5) * _COLUMN, room.row * _ROW + _HIGH / 2 + 10


def _sides(source: Room, target: Room) -> tuple[str, str]:
    """The side of each box that an arrow touches."""
    if source.row == target.row:
        return ("right", "left") if source.column < target.column else ("left", "right")
    down = ("bottom", "top") if source.row < target.row else ("top", "bottom")
    start, end = down
    if _stands_between(source.column, source, target) and source.column != target.column:
        start = "right" if source.column < target.column else "left"
    if _stands_between(target.column, source, target):
        end = "left" if source.column <= target.column else "right"
        start = end if source.column == target.column else start
    return start, end


def _stands_between(column: float, source: Room, target: Room) -> bool:
    top, bottom = sorted((source.row, target.row))
    return any(room.column == column and top < room.row < bottom for room in ROOMS.values())


def _ends(arrows: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[tuple[float, float], tuple[float, float]]]:
    """Where every arrow begins and ends: those on one side of a box stand side by side, in the order of their other ends."""
    on_side: dict[tuple[str, str], list[tuple[tuple[float, float], tuple[str, str], int]]] = {}
    for source, target in arrows:
        one, other = ROOMS[source], ROOMS[target]
        for end, (name, far, side) in enumerate(zip((source, target), (other, one), _sides(one, other), strict=True)):
            along = (far.column, far.row) if side in ("top", "bottom") else (far.row, far.column)
            on_side.setdefault((name, side), []).append((along, (source, target), end))
    found: dict[tuple[str, str], list[tuple[float, float]]] = {arrow: [(0, 0), (0, 0)] for arrow in arrows}
    for (name, side), of_side in on_side.items():
        for at, (_, arrow, end) in enumerate(sorted(of_side)):
            shift = (at - (len(of_side) - 1) / 2) * _EDGE * (1.6 if side in ("top", "bottom") else 0.8)
            x, y = _middle(ROOMS[name])
            half = {"top": (0, -_HIGH / 2), "bottom": (0, _HIGH / 2), "left": (-_BOX / 2, 0), "right": (_BOX / 2, 0)}[
                side
            ]
            along_x = side in ("top", "bottom")
            found[arrow][end] = (x + half[0] + shift * along_x, y + half[1] + shift * (not along_x))
    return {arrow: (ends[0], ends[1]) for arrow, ends in found.items()}


def _way(source: Room, target: Room, x: float, y: float, to_x: float, to_y: float) -> str:
    """A curve that leaves a box, and meets the other, at a right angle."""
    reach = {"top": (0, -1), "bottom": (0, 1), "left": (-1, 0), "right": (1, 0)}
    (ax, ay), (bx, by) = (reach[side] for side in _sides(source, target))
    far = max(24.0, 0.42 * abs(to_y - y)) if source.row != target.row else 24.0
    one, other = far if ay else 30.0, far if by else 30.0  # sideways no further than the gap between columns
    return (
        f"M{x:g},{y:g} C{x + ax * one:g},{y + ay * one:g} {to_x + bx * other:g},{to_y + by * other:g} {to_x:g},{to_y:g}"
    )


def main() -> int:
    drawn = drawing()
    if "--check" in sys.argv[1:]:
        return int(not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != drawn)
    PICTURE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

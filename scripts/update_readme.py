"""Write the tables of README.md anew, from a run of the conformance cases and from the benchmark results.

    python scripts/update_readme.py            (or: make readme)

Nothing in these tables is written by hand: a cell is filled because its cases passed here, a ratio stands there because it
was measured, with the device it was measured on.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def ops_table(report: dict) -> str:
    backends = [b["name"] for b in report["environment"]["backends"]]
    by_op: dict[str, dict[str, dict]] = {}
    for result in report["results"]:
        by_op.setdefault(result["op"], {})[result["backend"]] = result
    lines = ["| Op | " + " | ".join(backends) + " |", "| --- " * (len(backends) + 1) + "|"]
    for op, results in by_op.items():
        cells = [_cell(results.get(backend)) for backend in backends]
        lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    cpu = report["environment"]["hardware"]["cpu"]
    versions = report["environment"]["versions"]
    lines.append("")
    lines.append(
        f"A tick is a run of all cases of `headwise check`, forward and backward, in float32, float16 and bfloat16, within "
        f"budget (here: {cpu}, PyTorch {versions['torch']})."
    )
    return "\n".join(lines)


def _cell(result: dict | None) -> str:
    if result is None or not result["runs"]:
        return ""
    return f"✓ {result['cases']} cases" if result["ok"] else "✗"


def speed_tables() -> str:
    parts = []
    for path in sorted((ROOT / "bench" / "results").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["role"] in ("peer", "yardstick") and row["ratio"]]
        if rows:
            parts.append(_speed_table(path, rows))
    return "\n\n".join(parts)


def _speed_table(path: Path, rows: list[dict[str, str]]) -> str:
    first = rows[0]
    device = first["device_name"] or first["cpu"]
    dates = sorted({row["date"][:10] for row in rows})
    lines = [
        f"**{device}**, {first['threads']} threads, PyTorch {first['torch']}, {dates[-1]}: how many times faster than the "
        f"peer, lowest and highest over the cases of a group ([all rows]({path.relative_to(ROOT).as_posix()})).",
        "",
        "| Group | Direction | Against | Ratio |",
        "| --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["group"], row["direction"], row["contender"]), []).append(float(row["ratio"]))
    for (group, direction, peer), ratios in groups.items():
        span = f"{min(ratios):.2f}×" if len(ratios) == 1 else f"{min(ratios):.2f} – {max(ratios):.2f}×"
        lines.append(f"| {group} | {direction} | {peer} | {span} |")
    return "\n".join(lines)


def replace_section(text: str, name: str, body: str) -> str:
    pattern = re.compile(rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
    assert pattern.search(text), f"README.md has no section {name}"
    return pattern.sub(lambda m: f"{m[1]}{body}\n{m[2]}", text)


def main() -> int:
    check = subprocess.run(
        [sys.executable, "-m", "headwise.cli", "check", "--json"], check=False, capture_output=True, text=True
    )
    report = json.loads(check.stdout)
    text = README.read_text(encoding="utf-8")
    text = replace_section(text, "ops", ops_table(report))
    text = replace_section(text, "speed", speed_tables())
    README.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

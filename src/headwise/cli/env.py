"""``headwise env``: this machine. Versions come from package metadata; nothing is imported for them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

import headwise
from headwise.backends.registry import BACKENDS, availability, module_of
from headwise.cli import _terminal
from headwise.config import settings
from headwise.ops._op import OPS

PACKAGES = ("torch", "triton", "wgpu", "jinja2", "numpy", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    facts = describe()
    if args.json:
        _terminal.print_json(facts)
    else:
        _print(facts)
    return 0


def describe() -> dict[str, Any]:
    """What the results of a check or a benchmark depend on: hardware, versions, backends, settings."""
    return {
        "headwise": headwise.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {
            "model": _cpu_model(),
            "cores": _usable_cores(),
            "threads": torch.get_num_threads(),
            "vector": torch.backends.cpu.get_cpu_capability(),
        },
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
        "webgpu": _webgpu(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "kernels": _compiled_kernels(),
        "backends": backends(),
        "settings": {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings) if f.init},
    }


def _compiled_kernels() -> dict[str, Any] | None:
    """Where Triton keeps what it compiled, and how much; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from headwise.backends.triton.private import cache_folder

    folder = Path(cache_folder())
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    count = sum(path.suffix in (".cubin", ".hsaco") for path in files)
    return {"folder": str(folder), "count": count, "bytes": sum(path.stat().st_size for path in files)}


def _webgpu() -> dict[str, Any]:
    """The adapters of this machine, and what the one in use can do; nothing where WebGPU does not run."""
    if availability("webgpu") is not None:
        return {"in_use": None, "adapters": []}
    from headwise.backends.webgpu import adapter
    from headwise.webgpu import capabilities

    return {"in_use": capabilities()._asdict(), "adapters": adapter.summaries()}


def backends() -> list[dict[str, Any]]:
    rows = []
    launchers = sorted({name for op in OPS.values() for name in (op.launcher, *op.backward_launchers)})
    for row in BACKENDS:
        reason = availability(row.name)
        rows.append(
            {
                "name": row.name,
                "runs": reason is None,
                "reason": reason,
                "devices": list(row.devices),
                "automatic_for": list(row.automatic_for),
                "kernels": [name for name in launchers if module_of(row.name, name) is not None],
            }
        )
    return rows


def _print(facts: dict[str, Any]) -> None:
    console = _terminal.console()
    cpu = facts["cpu"]
    memory = f"{facts['memory_gib']:.0f} GiB" if facts["memory_gib"] is not None else "unknown"
    about = Table.grid(padding=(0, 3))
    about.add_row("system", facts["system"])
    threads = f"{cpu['threads']} thread{'s' if cpu['threads'] != 1 else ''}"
    about.add_row("cpu", f"{cpu['model']} · {cpu['cores']} cores · {cpu['vector']} · {threads} in PyTorch")
    about.add_row("memory", memory)
    for gpu in facts["gpus"]:
        about.add_row("gpu", f"{gpu['name']} · {gpu['memory_gib']:.0f} GiB · {gpu['architecture']}")
    if not facts["gpus"]:
        about.add_row("gpu", Text("none that PyTorch sees", "dim"))
    for line in _webgpu_lines(facts["webgpu"]):
        about.add_row("webgpu", line)
    for name, version in facts["versions"].items():
        about.add_row(name, version or Text("not installed", "dim"))
    kept = facts["kernels"]
    if kept is not None:
        about.add_row("compiled kernels", f"{kept['count']} · {_size(kept['bytes'])} · {kept['folder']}")
    for name, value in facts["settings"].items():
        if value:
            about.add_row("setting", f"{name} = {value}")

    console.print(f"[bold]headwise {facts['headwise']}[/bold]\n")
    console.print(about)
    table = _terminal.table("backend", "tensors on", "kernels", "on this machine")
    for row in facts["backends"]:
        table.add_row(
            Text(row["name"], "bold" if row["runs"] else "dim"),
            ", ".join(row["devices"]),
            str(len(row["kernels"])),
            _terminal.verdict(row["reason"]),
        )
    console.print()
    console.print(table)


def _webgpu_lines(webgpu: dict[str, Any]) -> list[str | Text]:
    used = webgpu["in_use"]
    if used is None:
        return [Text("does not run here: see below", "dim")]
    lanes = f", subgroups of {used['subgroup_size']}" if used["subgroup_size"] else ", no subgroups"
    lines: list[str | Text] = [
        f"{used['name']} · {used['driver']} · {used['kind']} · tier {used['tier']}{lanes}",
        f"workgroups: {used['workgroup_memory'] // 1024} KiB, {used['workgroup_threads']} threads · a binding: "
        f"{_size(used['binding_bytes'])} · a buffer: {_size(used['buffer_bytes'])} · "
        f"timestamps: {'yes' if used['timestamps'] else 'no'}",
    ]
    others = [Text(f"also here: {summary}", "dim") for summary in webgpu["adapters"] if used["name"] not in summary]
    return [*lines, *others]


def _size(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0:
            return asked.stdout.strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    """The cores this process may run on: in a container often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        # ROCm gives the architecture by name, CUDA as a compute capability.
        rocm = getattr(properties, "gcnArchName", None) if torch.version.hip else None
        found.append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "architecture": rocm or f"sm_{properties.major}{properties.minor}",
            }
        )
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""The page as a folder of static files.

``index.html``, ``*.js``, ``*.css``   the page
``site.json``                         version, tiers, how many programs
``programs/<tier>.json``              checks, measures and maps: buffers, dispatches, places of the outputs
``data/<op>.bin``                     the content of the buffers, and golden results
``shaders.json.gz``                   every WGSL text once, exactly as the backend renders it

The same version of Headwise writes the same bytes, on every machine with the same PyTorch.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import headwise
from headwise.backends.webgpu import runtime
from headwise.backends.webgpu.array import Array
from headwise.demo import colours, report
from headwise.demo.record import AttentionSample
from headwise.ops._checks import short
from headwise.web import checks, maps, measures
from headwise.web.checks import Golden
from headwise.web.recording import Output, Program, Shader, recording
from headwise.web.tiers import TIERS

PAGE = Path(__file__).parent / "page"
# Files of the demo's report that this page uses too.
SHARED = (
    *report.STYLES,
    "attention.js",
    "colours.js",
    "elements.js",
    "glyphs.js",
    "map.js",
    "strip.js",
    "theme.js",
    "weights.js",
)


class Site:
    """Collects the content of the files."""

    def __init__(self) -> None:
        self.programs: dict[str, dict[str, list[Any]]] = {
            tier.name: {"checks": [], "measures": [], "maps": []} for tier in TIERS
        }
        self.data: dict[str, _Data] = {}
        self.shaders: dict[str, Shader] = {}
        self.probe = self._program(_probe(), _Data())
        self.tokens: list[int] | None = None

    def add_checks(self) -> None:
        for made in checks.checks(TIERS):
            data = self._data(made[0].op)
            for tier, check in zip(TIERS, made, strict=True):
                self.programs[tier.name]["checks"].append(
                    {
                        "op": check.op, "case": check.case, "dtype": short(check.dtype), "call": check.call,
                        "data": check.op, **self._program(check.program, data, check.golden),
                    }
                )  # fmt: skip

    def add_measures(self) -> None:
        for tier in TIERS:
            for measure in measures.measures(tier):
                self.programs[tier.name]["measures"].append(
                    {
                        "name": measure.name, "size": measure.size, "unit": measure.unit, "work": measure.work,
                        "data": "measures", **self._program(measure.program, self._data("measures")),
                    }
                )  # fmt: skip

    def add_maps(self, sample: AttentionSample) -> None:
        self.tokens = list(sample.tokens)
        for layer in sample.layers:
            for tier, made in zip(TIERS, maps.maps(layer, TIERS), strict=True):
                program = self._program(made.program, self._data("maps"), {"probs": made.golden})
                self.programs[tier.name]["maps"].append(
                    {
                        "name": layer.name, "window": layer.window, "heads": layer.q.shape[0], "data": "maps",
                        "scaled": [one._asdict() for one in made.scaled], **program,
                    }
                )  # fmt: skip

    def write(self, folder: Path) -> None:
        """Into a new folder, or over an older site."""
        for name in ("programs", "data"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for path in [*sorted(PAGE.iterdir()), *(report.PAGE / name for name in SHARED)]:
            shutil.copyfile(path, folder / path.name)
        index = report.with_attention((PAGE / "index.html").read_text(encoding="utf-8"))
        (folder / "index.html").write_text(index, encoding="utf-8")
        for tier, programs in self.programs.items():
            _write_json(folder / "programs" / f"{tier}.json", programs)
        for name, data in self.data.items():
            (folder / "data" / f"{name}.bin").write_bytes(bytes(data.content))
        texts = {key: {"text": s.text, "writes": s.writes} for key, s in sorted(self.shaders.items())}
        (folder / "shaders.json.gz").write_bytes(gzip.compress(_json(texts), mtime=0))
        _write_json(
            folder / "site.json",
            {
                "version": headwise.__version__,
                "tiers": [tier._asdict() for tier in TIERS],
                "probe": self.probe,
                "tokens": self.tokens,
                "colours": {"light": colours.LIGHT, "dark": colours.DARK, "not_a_weight": colours.NOT_A_WEIGHT},
            },
        )

    def _data(self, name: str) -> _Data:
        return self.data.setdefault(name, _Data())

    def _program(self, program: Program, data: _Data, golden: dict[str, Golden] | None = None) -> dict[str, Any]:
        places = {buffer: i for i, buffer in enumerate(program.buffers)}
        buffers = []
        for buffer in program.buffers:
            said: dict[str, Any] = {"size": buffer.size}
            if buffer.random is not None:
                said["random"] = short(buffer.random)
            elif buffer.content is not None:
                said["data"] = data.add(buffer.content)
            buffers.append(said)
        dispatches = [
            {
                "shader": self._shader(dispatch.shader),
                "groups": dispatch.groups,
                "parameters": base64.b64encode(dispatch.parameters).decode(),
                "bound": [
                    places[b.buffer] if b.size == b.buffer.size else [places[b.buffer], b.first, b.size]
                    for b in dispatch.bound
                ],
            }
            for dispatch in program.dispatches
        ]
        outputs = []
        for name, output in program.outputs.items():
            said = {"name": name, **_place(output, places)}
            if golden is not None:
                expected = golden[name]
                said |= {
                    "golden": data.add(expected.elements.numpy().tobytes()),
                    "rms": expected.rms, "largest": expected.largest,
                }  # fmt: skip
            outputs.append(said)
        return {"buffers": buffers, "dispatches": dispatches, "prepared": program.prepared, "outputs": outputs}

    def _shader(self, shader: Shader) -> str:
        key = f"{shader.name}-{hashlib.sha256(shader.text.encode()).hexdigest()[:12]}"
        self.shaders[key] = shader
        return key


@dataclass
class _Data:
    """Blocks of bytes one after the other, each aligned to four bytes; equal ones are stored once."""

    content: bytearray = field(default_factory=bytearray)
    known: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def add(self, block: bytes) -> tuple[int, int]:
        """The offset and size of the block."""
        if block not in self.known:
            self.known[block] = len(self.content), len(block)
            self.content += block + b"\0" * (-len(block) % 4)
        return self.known[block]


def write_site(
    folder: Path, sample: AttentionSample | None = None, say: Callable[[str], None] = lambda text: None
) -> None:
    """Record everything and write it; ``sample``: the attention of a demo, for its maps."""
    site = Site()
    say("checks of every op")
    site.add_checks()
    say("programs to measure")
    site.add_measures()
    if sample is not None:
        say("attention maps of the demo")
        site.add_maps(sample)
    say("files")
    site.write(folder)


def _probe() -> Program:
    """Finds the width of a subgroup and whether its lanes are in order, as the backend does when it opens a GPU."""
    some = next(tier for tier in TIERS if tier.subgroup)
    with recording(some.capabilities) as tape:
        device = runtime.device()
        result = device.empty((2,), torch.int32)
        device.run(device.kernel("subgroup_probe"), 1, (), result=result)
        return tape.program({"result": Array(result, device)})


def _place(output: Output, places: dict[Any, int]) -> dict[str, Any]:
    return {
        "buffer": places[output.buffer], "first": output.first, "dtype": short(output.dtype), "shape": output.shape,
    }  # fmt: skip


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _write_json(path: Path, value: Any) -> None:
    path.write_bytes(_json(value))

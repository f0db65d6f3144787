"""The page as a folder of static files.

``index.html``, ``*.js``, ``*.css``   the page
``site.json``                         version, tiers, how many programs
``programs/<tier>.json``              checks, measures and maps: buffers, dispatches, places of the outputs
``data/<op>.bin``                     the content of the buffers, and golden results
``shaders.json.gz``                   every WGSL text once, exactly as the backend renders it

The same version of Headwise writes the same bytes, on every machine with the same PyTorch.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headwise
from headwise.backends.webgpu import runtime
from headwise.backends.webgpu.array import Array
from headwise.demo import colours, report
from headwise.demo.record import AttentionSample
from headwise.ops._checks import short
from headwise.web import checks, maps, measures, programs
from headwise.web.checks import Golden
from headwise.web.programs import Data, as_json
from headwise.web.recording import Program, Shader, recording
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
        self.data: dict[str, Data] = {}
        self.shaders: dict[str, Shader] = {}
        self.probe = self._program(_probe(), Data())
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
        for tier, of_tier in self.programs.items():
            _write_json(folder / "programs" / f"{tier}.json", of_tier)
        for name, data in self.data.items():
            (folder / "data" / f"{name}.bin").write_bytes(bytes(data.content))
        texts = programs.texts(self.shaders)
        (folder / "shaders.json.gz").write_bytes(gzip.compress(as_json(texts), mtime=0))
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

    def _data(self, name: str) -> Data:
        return self.data.setdefault(name, Data())

    def _program(self, program: Program, data: Data, golden: dict[str, Golden] | None = None) -> dict[str, Any]:
        described = programs.describe(program, data, self.shaders)
        if golden is None:
            return described
        for said in described["outputs"]:
            expected = golden[said["name"]]
            said |= {
                "golden": data.add(expected.elements.numpy().tobytes()),
                "rms": expected.rms, "largest": expected.largest,
            }  # fmt: skip
        return described


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


def _write_json(path: Path, value: Any) -> None:
    path.write_bytes(as_json(value))

"""The browser page: what is recorded for it, and the page itself in a real Chromium with a GPU in software."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from browser import open_page
from webgpu_tint import compile_with_tint

import headwise as hw
from headwise import testing
from headwise.backends import registry
from headwise.backends.webgpu import adapter, runtime, shaders
from headwise.cases import SUITES
from headwise.cli import main
from headwise.demo.record import AttentionSample, LayerAttention, save_attention
from headwise.web import checks, maps
from headwise.web.recording import recording
from headwise.web.server import address, server
from headwise.web.site import Site, write_site
from headwise.web.tiers import TIERS
from headwise.webgpu import array

# Browsers fill workgroup memory with zeros, and SwiftShader takes four fifths of its time to compile that. No kernel may
# count on them (wgpu gives none), so most tests go without; one runs as a visitor does.
NO_ZEROS = ("--enable-dawn-features=disable_workgroup_init",)

TEXT = b"the cat sat\n\ton \xc3\xa9 mat, the cat"
WINDOW, HEADS, KEY_HEADS, DIM = 9, 4, 2, 8
PLAIN = TIERS[-1]


def probs_of(layer: LayerAttention, temperature: float = 1.0) -> torch.Tensor:
    window = None if layer.window is None else (layer.window - 1, 0)
    scale = layer.scale / temperature
    return hw.attention_probs(layer.q[None], layer.k[None], causal=True, window=window, scale=scale, backend="cpu")[0]


@pytest.fixture(scope="module")
def sample() -> AttentionSample:
    generator = torch.Generator().manual_seed(0)
    layers = []
    for name, window in (("layer 1, window 9", WINDOW), ("layer 2, global", None)):
        q, k = (2 * torch.randn(heads, len(TEXT), DIM, generator=generator) for heads in (HEADS, KEY_HEADS))
        layer = LayerAttention(name, window, 1 / math.sqrt(DIM), None, q, k, torch.empty(0))
        layers.append(replace(layer, probs=probs_of(layer)))
    return AttentionSample(list(TEXT), layers)


@pytest.fixture(scope="module")
def site(sample, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    write_site(folder, sample)
    return folder


@contextlib.contextmanager
def served(folder: Path):
    with server(folder, 0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield address(serving)
        finally:
            serving.shutdown()
            thread.join()


@contextlib.contextmanager
def opened(folder: Path, query: str = "", **options):
    """The page, when it has come to an end of some kind."""
    with served(folder) as url, open_page(url + query, **{"webgpu": True, "flags": NO_ZEROS, **options}) as page:
        ended = "['done', 'lost', 'trouble'].includes(document.documentElement.dataset.state)"
        page.wait_for_function(ended, timeout=600_000, polling=200)
        yield page


def state_of(page) -> str:
    return page.evaluate("document.documentElement.dataset.state")


def results_of(page) -> dict:
    text = page.evaluate("JSON.stringify(window.headwise.results, (_, x) => (x === Infinity ? 1e300 : x))")
    return json.loads(text)


def failures(results: dict) -> list[str]:
    return [
        f"{c['op']}, {c['case']}, {c['dtype']}: {c['error'] or c['outputs']}"
        for c in results["checks"]
        if not c["passed"]
    ]


def programs(folder: Path, tier: str) -> dict:
    return json.loads((folder / "programs" / f"{tier}.json").read_text())


def texts(folder: Path) -> dict:
    return json.loads(gzip.decompress((folder / "shaders.json.gz").read_bytes()))


# ------------------------------------------------------------------------------------------------------ what is recorded


def test_recording_needs_no_adapter(monkeypatch):
    def none():
        raise adapter.NoAdapter("there is none")

    monkeypatch.setattr(adapter, "choose", none)
    monkeypatch.setattr(runtime.process, "device", None)
    registry.ask_again()
    assert registry.availability("webgpu") == "there is none"
    with recording(PLAIN.capabilities) as tape:
        probs = hw.softmax(array(torch.zeros(3, 5)))
        program = tape.program({"probs": probs})
    assert [dispatch.shader.name for dispatch in program.dispatches] == ["softmax"]
    assert registry.availability("webgpu") == "there is none"
    registry.ask_again()


def test_a_readback_cannot_be_recorded():
    with recording(PLAIN.capabilities), pytest.raises(RuntimeError, match="readback"):
        hw.softmax(array(torch.zeros(3, 5))).torch()


def test_an_output_that_no_kernel_writes_is_refused():
    with recording(PLAIN.capabilities) as tape, pytest.raises(RuntimeError, match="no kernel writes x"):
        tape.program({"x": array(torch.zeros(3))})


def test_no_buffer_is_used_for_two_things():
    with recording(PLAIN.capabilities) as tape:
        x = array(torch.zeros(4, 64))
        for _ in range(3):
            x = hw.softmax(x)
        program = tape.program({"probs": x})
    assert len(program.buffers) == 4
    written = [d.bound[i].buffer for d in program.dispatches for i, writes in enumerate(d.shader.writes) if writes]
    assert len(set(written)) == len(written) == 3


def test_the_site_is_small(site):
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 13e6


def test_every_op_has_checks_in_every_tier(site):
    for tier in TIERS:
        made = programs(site, tier.name)
        assert {check["op"] for check in made["checks"]} == {*SUITES, "arrays"}
        ids = [(check["op"], check["case"], check["dtype"]) for check in made["checks"]]
        assert len(set(ids)) == len(ids)
        with_gradients = {c["op"] for c in made["checks"] if any(o["name"].startswith("grad of") for o in c["outputs"])}
        assert with_gradients == set(SUITES)


def test_every_kernel_family_is_checked(site):
    families = {
        path.stem
        for path in shaders.FOLDER.glob("*.wgsl")
        if "@compute" in path.read_text() or "entry()" in path.read_text()
    }
    macros = {"rows"}  # it defines `entry`
    for tier in TIERS:
        checked = {d["shader"].rsplit("-", 1)[0] for c in programs(site, tier.name)["checks"] for d in c["dispatches"]}
        # The page asks a GPU for its subgroups when it opens it, and rounds to float16 by bits whatever the driver does.
        # Numbers that come with a call (a seed, a start, a learning rate) are in no recording of a check.
        assert families - macros - checked == {"subgroup_probe", "half_probe", "random", "arange", "optimizer"}
        assert "pack2x16float" not in {
            word for text in texts(site).values() for word in re.findall(r"\w+", text["text"])
        }


def test_shaders_are_what_the_backend_renders(site, monkeypatch):
    """Rendered anew for a device of wgpu, every text is the same but for the lines that browsers want on top."""
    known = {shader["text"] for shader in texts(site).values()}
    head = "enable subgroups;\ndiagnostic(off, subgroup_uniformity);\n"
    rendered: dict[str, str] = {}
    render = shaders.render

    def noted(name, dialect, **variant):
        made = render(name, dialect, **variant)
        rendered[made.text] = render(name, shaders.NAGA, **variant).text
        return made

    monkeypatch.setattr(shaders, "render", noted)
    used = set()
    for op in ("softmax", "attention_decode"):
        row = checks.CASES[op][0]
        for made in checks.check(SUITES[op], testing.Case(row.name, row.parameters), row.dtypes[0], TIERS):
            used.update(dispatch.shader.text for dispatch in made.program.dispatches)
    assert len(used) > 8
    assert used <= known
    assert [text for text in used if text.removeprefix(head) != rendered[text]] == []


def test_subgroups_are_asked_for_where_they_are_used(site):
    """A browser without them refuses a shader that so much as enables them."""
    known = texts(site)
    for tier in TIERS:
        made = programs(site, tier.name)
        used = {d["shader"] for part in ("checks", "measures", "maps") for p in made[part] for d in p["dispatches"]}
        with_subgroups = {key for key in used if known[key]["text"].startswith("enable subgroups;")}
        assert bool(with_subgroups) == bool(tier.subgroup)


def test_every_shader_compiles_within_the_floor(site):
    """By Tint, for the tiers too that no GPU in software can run."""
    refused = []
    for key, shader in texts(site).items():
        try:
            compile_with_tint(shader["text"])
        except Exception as error:
            refused.append(f"{key}: {error}")
    assert not refused, f"{len(refused)}: " + "\n".join(refused[:3])


def test_tiers_ask_for_no_more_than_the_next_better_one():
    assert [tier.subgroup for tier in TIERS] == sorted((tier.subgroup for tier in TIERS), reverse=True)
    assert TIERS[-1].subgroup == 0
    for tier in TIERS:
        assert tier.capabilities.workgroup_memory == 16384
        assert tier.capabilities.workgroup_threads == 256


def test_the_scale_is_found_among_the_parameters(sample):
    (made,) = maps.maps(sample.layers[0], (PLAIN,))
    assert made.scaled
    assert all(one.value == pytest.approx(sample.layers[0].scale) for one in made.scaled)


def test_golden_elements_lie_as_the_output_does():
    row = next(r for r in checks.CASES["attention"] if "heads inside" in r.name)
    (made,) = checks.check(SUITES["attention"], testing.Case(row.name, row.parameters), torch.float32, (PLAIN,))
    output = made.program.outputs["out"]
    assert output.strides[1] < output.strides[2], "this case is there for heads that lie inside"
    x = torch.randn(output.shape)
    assert torch.equal(checks.in_memory_order(x, output), x.transpose(1, 2).flatten())


# ------------------------------------------------------------------------------------------------------------- the page


def test_all_checks_pass_without_subgroups(site, sample):
    """And the maps agree, the slider moves them, and a phone is wide enough."""
    with opened(site, "?tier=plain") as page:
        results = results_of(page)
        assert failures(results) == []
        assert state_of(page) == "done"
        assert results["tier"]["name"] == "plain"
        assert len(results["checks"]) == len(programs(site, "plain")["checks"])
        assert all(c["outputs"] and all(o["usage"] <= 1 for o in c["outputs"]) for c in results["checks"])
        assert page.inner_text("#checks-title") == "Right"
        assert page.locator(".op summary.good").count() == len(SUITES) + 1

        assert [m["passed"] for m in results["maps"]] == [True, True]
        assert "The same maps" in page.inner_text("#agreement")
        assert page.locator("#heads canvas").count() == 2 * (HEADS + 1)
        pixels = "new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)"
        canvases = "[...document.querySelectorAll('#heads canvas, #map canvas')]"
        assert page.evaluate(f"Math.min(...{canvases}.map(c => new Set({pixels}).size))") > 20, "colours of a map"

        page.locator("#temperature").fill("1")  # 2 ** 1
        page.wait_for_function("document.documentElement.dataset.temperature === '2'")
        for i, layer in enumerate(sample.layers):
            heads = page.evaluate(f"window.headwise.sample.layers[{i}].heads.map(head => [...head])")
            found = torch.tensor(heads[:-1]).view(HEADS, len(TEXT), len(TEXT))
            torch.testing.assert_close(found, probs_of(layer, temperature=2.0), atol=1e-5, rtol=0)
            assert (found - layer.probs).abs().max() > 0.05

        page.evaluate("document.querySelectorAll('details').forEach(d => (d.open = true))")
        page.set_viewport_size({"width": 375, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        page.click(".wgsl button >> nth=0")
        assert "@compute" in page.inner_text("#source-text")
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        assert page.problems == []


def test_checks_pass_with_subgroups_and_all_is_measured(site):
    """SwiftShader has subgroups of four: the best tier that fits is taken by itself. Its kernels, where they are its own."""
    plain, own = (
        {
            (c["op"], c["case"], c["dtype"]): {d["shader"] for d in c["dispatches"]}
            for c in programs(site, tier)["checks"]
        }
        for tier in ("plain", "subgroups-4")
    )
    different = {key for key in own if own[key] - plain[key]}
    only = urllib.parse.quote(";".join(sorted({f"{op}:{case}" for op, case, _ in different})))
    assert len(different) > 30
    with opened(site, f"?measure=1&maps=no&only={only}") as page:
        results = results_of(page)
        assert failures(results) == []
        assert results["tier"]["name"] == "subgroups-4"
        assert "4 lanes" in results["tier"]["why"]
        assert {(c["op"], c["case"], c["dtype"]) for c in results["checks"]} >= different
        kinds = {m["name"] for m in programs(site, "subgroups-4")["measures"]}
        assert {m["name"] for m in results["measures"]} == kinds
        assert [m for m in results["measures"] if m.get("error") or not m["rate"] > 0] == []
        assert page.locator("#measures tr").count() == len(kinds)
        assert page.problems == []
        # A GPU that goes away is told of, whatever is going on.
        page.evaluate("window.headwise.gpu.device.destroy()")
        page.wait_for_function("document.documentElement.dataset.state === 'lost'")
        assert "GPU was lost" in page.inner_text("#trouble")


def test_checks_pass_as_a_visitor_has_them(site):
    some = "attention:causal;attention_decode:paged;softmax:strided;rms_norm:no weight;transpose"
    with opened(site, f"?only={some}&maps=no", flags=()) as page:
        results = results_of(page)
        assert failures(results) == []
        assert {c["op"] for c in results["checks"]} == {part.split(":")[0] for part in some.split(";")}
        assert page.problems == []


@pytest.mark.parametrize(
    ("kind", "words", "before"),
    [
        ("missing", "has no WebGPU", "delete Navigator.prototype.gpu"),
        ("no adapter", "found no GPU", ""),
        ("insecure", "not secure", "Object.defineProperty(window, 'isSecureContext', { value: false })"),
    ],
    ids=("no such thing", "no adapter", "insecure"),
)
def test_the_page_says_what_is_missing(site, kind, words, before):
    with opened(site, webgpu=False, before=before, width=375) as page:
        assert state_of(page) == "trouble"
        assert page.evaluate("document.documentElement.dataset.trouble") == kind
        assert words in page.inner_text("#trouble")
        assert page.locator("#trouble p").count() >= 2, "and what to do"
        assert page.is_hidden("#checking")
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        assert page.problems == []


def damage(folder: Path) -> dict[str, str]:
    """Four ways to be wrong, in four ops: what each should lead to."""
    made, known = programs(folder, "plain"), texts(folder)
    first = {
        op: next(c for c in made["checks"] if c["op"] == op) for op in ("arrays", "rms_norm", "softmax", "transpose")
    }

    # One element of a golden result, by a two-thousandth.
    start, size = first["arrays"]["outputs"][0]["golden"]
    data = bytearray((folder / "data" / "arrays.bin").read_bytes())
    golden = torch.frombuffer(data, dtype=torch.float32)[start // 4 : (start + size) // 4]
    golden[golden.argmax()] *= 1.0005
    (folder / "data" / "arrays.bin").write_bytes(data)

    # A shader that does not compile, and one that does, and takes another base for its powers.
    for op, old, new in (
        ("rms_norm", "fn main(", "fn main(nonsense: nothing, "),
        ("softmax", "const LOG2E = 1.44269504;", "const LOG2E = 1.4427;"),
    ):
        shader = known[first[op]["dispatches"][0]["shader"]]
        assert old in shader["text"]
        shader["text"] = shader["text"].replace(old, new)
    (folder / "shaders.json.gz").write_bytes(gzip.compress(json.dumps(known).encode()))

    # A kernel that does not run: nobody writes its result.
    first["transpose"]["dispatches"].pop()
    (folder / "programs" / "plain.json").write_text(json.dumps(made))
    return {
        "arrays": '"name": "sum"', "rms_norm": "does not compile: line", "softmax": '"name": "probs"',
        "transpose": "NaN or infinity out of place",
    }  # fmt: skip


def test_a_check_can_fail(site, tmp_path):
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    expected = damage(folder)
    some = "softmax:rows of 111;rms_norm:width 111;transpose:odd sizes;arrays"
    with opened(folder, f"?tier=plain&only={some}&maps=no") as page:
        results = results_of(page)
        failed = [c for c in results["checks"] if not c["passed"]]
        assert [(c["op"], c["dtype"]) for c in failed] == [(c["op"], "float32") for c in failed]
        assert {c["op"]: expected[c["op"]] in json.dumps(c) for c in failed} == dict.fromkeys(expected, True)
        assert len(failed) == 4
        assert len(results["checks"]) == 11
        assert page.inner_text("#checks-title") == "Not right"
        assert page.locator(".op[open] tr.failed .status:text('FAILED')").count() == 4
        assert page.problems == []


def test_maps_that_are_not_those_of_q_and_k_are_noticed(sample, tmp_path):
    wrong = sample.layers[1].probs.clone()
    wrong[2, 20, 3] += 1e-4
    made = AttentionSample(sample.tokens, [sample.layers[0], replace(sample.layers[1], probs=wrong)])
    looked_at = Site()
    looked_at.add_maps(made)
    looked_at.write(tmp_path)
    with opened(tmp_path) as page:
        results = results_of(page)
        assert [m["passed"] for m in results["maps"]] == [True, False]
        assert results["maps"][1]["largest"] == pytest.approx(1e-4, rel=0.05)
        assert "Not the same maps" in page.inner_text("#agreement")


# ------------------------------------------------------------------------------------------------------ the command line


def test_web_is_written_to_a_folder(sample, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("headwise.web.site.Site.add_checks", lambda self: None)
    monkeypatch.setattr("headwise.web.site.Site.add_measures", lambda self: None)
    run = tmp_path / "headwise-demo"
    run.mkdir()
    save_attention(sample, run)
    monkeypatch.chdir(tmp_path)
    assert main(["web", "--out", "site"]) == 0
    assert "static files" in capsys.readouterr().out
    assert json.loads((tmp_path / "site" / "site.json").read_text())["tokens"] == list(TEXT)
    assert len(programs(tmp_path / "site", "plain")["maps"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "not a folder"),
        (["empty"], "no attention to look at"),
        (["broken"], "does not hold the attention of a run"),
        (["--port", "70000"], "--port 70000 cannot be used"),
        (["--out", "a_file/site"], "cannot be written"),
    ],
)
def test_bad_use_is_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headwise.web.site.Site.add_checks", lambda self: None)
    monkeypatch.setattr("headwise.web.site.Site.add_measures", lambda self: None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "attention.safetensors").write_bytes(b"nothing of the kind")
    (tmp_path / "a_file").write_text("")
    assert main(["web", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert words in said[-1]
    assert said[-1].startswith("headwise web: ")


def test_web_serves_the_same_site_until_it_is_stopped(site, sample, tmp_path):
    """Another process with other settings, the same bytes: what is recorded depends on nothing else."""
    save_attention(sample, tmp_path)
    environment = os.environ | {"HEADWISE_BACKEND": "cpu", "HEADWISE_VALIDATE": "1", "HEADWISE_WEBGPU_TIER": "A"}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # the float32 sums of the budgets are in their order
    command = [sys.executable, "-m", "headwise", "web", str(tmp_path), "--no-open", "--port", "0"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        url = serving.stdout.readline().split()[0]
        types = {".html": "text/html", ".js": "text/javascript", ".json": "application/json", ".css": "text/css"}
        for path in sorted(path for path in site.rglob("*") if path.is_file()):
            with urllib.request.urlopen(url + path.relative_to(site).as_posix()) as response:
                assert response.headers["Content-Type"].split(";")[0] == types.get(
                    path.suffix, "application/octet-stream"
                )
                assert response.read() == path.read_bytes(), path.name
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url + "../pyproject.toml")
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=20) == 0
    finally:
        serving.kill()
        serving.wait()
        serving.stdout.close()

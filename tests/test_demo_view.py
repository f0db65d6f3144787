"""The files that a report is made of, its pictures, and ``headwise view``; the page itself is in test_demo_report."""

from __future__ import annotations

import argparse
import base64
import json
import math
import re
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_runs import HEADS, SAMPLE, SIZE, TEXT, colour_of, made_run, write

from headwise import cli
from headwise.cli import demo
from headwise.demo import colours, report
from headwise.demo.record import (
    ATTENTION,
    DEFAULT_FOLDER,
    REPORT,
    RUN,
    AttentionSample,
    Curve,
    LayerAttention,
    save_attention,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("run"), made_run())


# ------------------------------------------------------------------------------------------------- what is in the file


def embedded(path: Path) -> Any:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S)[1])


def test_the_file_holds_the_numbers_of_the_run(path):
    data = embedded(path)
    assert data["run"] == asdict(made_run()) | {"decode": {**asdict(made_run().decode), "passed": True}}
    assert data["sample"]["tokens"] == list(TEXT)
    for packed, layer in zip(data["sample"]["layers"], SAMPLE.layers, strict=True):
        codes = base64.b64decode(packed["weights"])
        weights = torch.tensor(struct.unpack(f"<{len(codes) // 2}H", codes)) / data["sample"]["whole"]
        assert (weights.view(HEADS, SIZE, SIZE) - layer.probs).abs().max() <= 0.51 / 65534
        assert (packed["name"], packed["window"], packed["heads"]) == (layer.name, layer.window, HEADS)


def test_what_is_no_weight_is_packed_as_such():
    packed = base64.b64decode(report.pack(torch.tensor([0.0, 1.0, 1.0000002, -1e-7, math.nan, math.inf, 1.5, -0.5])))
    assert struct.unpack("<8H", packed) == (0, 65534, 65534, 0, 65535, 65535, 65535, 65535)


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "]]>", "\u2028\x00\ud800é", '"\\', "&lt;"])
def test_json_in_a_script_stays_json(text):
    written = report.json_for_html({text: [text]})
    assert not set(written) & set("<>&")
    assert written.isascii()
    assert json.loads(written) == {text: [text]}


def test_text_cannot_leave_its_place(path):
    markup = path.read_text()
    assert markup.count("<script") == 2
    assert markup.count("</script") == 2
    assert "http://" not in markup.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in markup


def test_every_file_of_the_page_is_in_it(path):
    names = {file.name for file in report.PAGE.iterdir()}
    assert names == {"report.html", "attention.html", *report.STYLES, *report.MODULES}
    assert not re.search(r"^\s*(import|export)\b", report.bundle(), re.M)


def test_a_report_of_usual_size_is_small(tmp_path):
    layers = [
        LayerAttention(
            "layer", None, 1.0, None, torch.zeros(4, 96, 2), torch.zeros(4, 96, 2), torch.rand(4, 96, 96).tril()
        )
        for _ in range(4)
    ]
    path = write(tmp_path, made_run(), AttentionSample([65] * 96, layers))
    assert path.stat().st_size < 600_000


# -------------------------------------------------------------------------------------------------------------- pictures


def test_pictures(tmp_path):
    from matplotlib.image import imread

    write(tmp_path, made_run())
    paths = report.write_pictures(tmp_path)
    assert [path.name for path in paths] == ["loss.png", "attention.png"]
    assert not list(tmp_path.glob("*.part"))
    loss, attention = ((255 * imread(path)[..., :3]).round().astype(int) for path in paths)
    for picture, wanted in ((loss, colours.OURS), (attention, colours.LIGHT[0]), (attention, "#eeeeee")):
        rgb = [int(wanted[at : at + 2], 16) for at in (1, 3, 5)]
        assert ((picture == rgb).all(-1)).sum() > 200, wanted
    strongest = max(layer.probs.max().item() for layer in SAMPLE.layers)
    assert (abs(attention - list(colour_of(strongest))).max(-1) <= 2).sum() > 4


def test_pictures_of_what_there_is(tmp_path):
    run = made_run()
    write(tmp_path, replace(run, curve=replace(run.curve, losses=run.curve.losses[:1]), plain=None), None)
    assert [path.name for path in report.write_pictures(tmp_path)] == ["loss.png"]


# --------------------------------------------------------------------------------------------------------- headwise view


def view(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["view", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    addresses: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: addresses.append(address) or True)
    return addresses


def test_view_opens_the_report(capsys, tmp_path, opened):
    path = write(tmp_path / "a run", made_run())
    assert view(capsys, tmp_path / "a run") == (0, path.as_uri() + "\n", "")
    assert opened == [path.as_uri()]


def test_view_looks_where_the_demo_writes(capsys, tmp_path, opened, monkeypatch):
    path = write(tmp_path / DEFAULT_FOLDER, made_run())
    monkeypatch.chdir(tmp_path)
    assert view(capsys)[0] == 0
    assert opened == [path.as_uri()]
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    assert parser.parse_args([]).out == Path(DEFAULT_FOLDER)


def test_view_writes_a_missing_report_and_rewrites_on_demand(capsys, tmp_path, opened):
    path = write(tmp_path, made_run())
    written = path.read_bytes()
    path.unlink()
    code, out, _ = view(capsys, tmp_path, "--no-open", "--json")
    assert (code, opened) == (0, [])
    assert json.loads(out) == {"report": str(path), "address": path.as_uri(), "written": True, "opened": False}
    assert path.read_bytes() == written
    path.write_text("old")
    view(capsys, tmp_path, "--no-open")
    assert path.read_text() == "old"
    view(capsys, tmp_path, "--no-open", "--rebuild")
    assert path.read_bytes() == written


def test_view_without_a_browser(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    path = write(tmp_path, made_run())
    code, out, err = view(capsys, tmp_path)
    assert code == 1
    assert out == path.as_uri() + "\n"
    assert "no browser" in err


def shape_of_another_text(folder: Path) -> None:
    save_attention(AttentionSample([1, 2, 3], SAMPLE.layers), folder)


def wrong_run(folder: Path, **fields: Any) -> None:
    (folder / RUN).write_text(json.dumps(asdict(made_run()) | fields))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / RUN).unlink(), "no run.json"),
        (lambda folder: (folder / RUN).write_text('{"backend": '), "run.json"),
        (lambda folder: (folder / RUN).write_text("[]"), "run.json"),
        (lambda folder: (folder / RUN).write_bytes(b"\xff\xfe"), "run.json"),
        (lambda folder: wrong_run(folder, curve={"losses": [1.0]}), "run.json"),
        (lambda folder: wrong_run(folder, curve=None), "curve is None"),
        (lambda folder: wrong_run(folder, parameters="many"), "parameters is 'many'"),
        (lambda folder: wrong_run(folder, plain=asdict(Curve("x", ["a"], 1.0))), "not a number"),
        (lambda folder: wrong_run(folder, unheard_of=1), "unheard_of"),
        (lambda folder: (folder / ATTENTION).write_bytes(b"nonsense"), ATTENTION),
        (lambda folder: (folder / ATTENTION).write_bytes((folder / ATTENTION).read_bytes()[:-100]), ATTENTION),
        (shape_of_another_text, "there are 3 tokens"),
    ],
)
def test_view_says_in_one_line_what_is_wrong(capsys, tmp_path, opened, spoil, said):
    path = write(tmp_path, made_run())
    spoil(tmp_path)
    path.unlink()
    code, out, err = view(capsys, tmp_path)
    assert (code, out, opened) == (2, "", [])
    assert said in err
    assert str(tmp_path) in err
    assert err.count("\n") == 1
    assert not (tmp_path / REPORT).exists()


def test_view_of_no_folder(capsys, tmp_path):
    code, _, err = view(capsys, tmp_path / "nowhere")
    assert code == 2
    assert "not there" in err
    (tmp_path / "file").touch()
    code, _, err = view(capsys, tmp_path / "file")
    assert code == 2
    assert "not a folder" in err

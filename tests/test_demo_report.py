"""The demo's report, driven in Chromium: what it shows is what the run measured, whatever the text and the screen."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import open_page
from demo_runs import HEADS, HOSTILE, SAMPLE, SIZE, TEXT, colour_of, made_run, made_sample, write

from headwise.demo import colours
from headwise.demo.record import DecodeCheck, LayerAttention


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("run"), made_run())


@pytest.fixture(scope="module")
def browser_page(path) -> Iterator[Any]:
    with open_page(path) as page:
        yield page


@pytest.fixture
def page(browser_page, path) -> Iterator[Any]:
    """The report as a visitor first sees it: light, on a desk. A test that leaves an error in the console fails."""
    browser_page.set_viewport_size({"width": 1280, "height": 900})
    browser_page.emulate_media(color_scheme="light", reduced_motion="reduce")
    browser_page.mouse.move(0, 0)
    browser_page.goto(path.as_uri())
    yield browser_page
    browser_page.evaluate("localStorage.clear()")
    problems = list(browser_page.problems)
    browser_page.problems.clear()
    assert problems == []


def visit(page: Any, path: Path) -> Any:
    page.goto(path.as_uri())
    return page


def close(shown: Any, expected: Any) -> bool:
    """Colours are whole numbers, and weights were rounded to 16 bits: one step in each channel."""
    return len(shown) == len(expected) and all(abs(a - b) <= 1 for a, b in zip(shown, expected, strict=True))


def seen(layer: LayerAttention, query: int, key: int) -> bool:
    return 0 <= query - key < (layer.window or SIZE)


def weights_of(layer: int, head: int) -> torch.Tensor:
    probs = SAMPLE.layers[layer].probs
    return probs.mean(0) if head == HEADS else probs[head]


def pixels(page: Any, selector: str, nth: int = 0) -> list[list[int]]:
    """RGBA of every pixel of a canvas."""
    flat = (
        page.locator(selector)
        .nth(nth)
        .evaluate("canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]")
    )
    return [flat[i : i + 4] for i in range(0, len(flat), 4)]


def choose(page: Any, layer: int, head: int, token: int | None = None) -> None:
    page.locator("#heads [role=radio]").nth(layer * (HEADS + 1) + head).click()
    if token is not None:
        page.locator(f"#token-{token}").click()


def hover_pair(page: Any, query: int, key: int) -> str:
    page.locator("#map").scroll_into_view_if_needed()
    box = page.locator("#map canvas").bounding_box()
    page.mouse.move(box["x"] + (key + 0.5) * box["width"] / SIZE, box["y"] + (query + 0.5) * box["height"] / SIZE)
    return page.locator("#tip").inner_text()


def percent_in(text: str) -> float:
    return float(re.search(r"([\d.]+)\s%", text)[1])


# ------------------------------------------------------------------------------------------------------ in the browser


def test_it_asks_for_nothing_but_itself(page, path):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.wait_for_timeout(200)
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]


def test_it_says_what_was_trained(page):
    assert page.locator("#made").inner_text() == "seed 17 · headwise 1.2.3 · torch 9.8.7"
    page.get_by_text("How it was run").click()
    told = page.locator("main").inner_text()
    for fact in (
        "123,456",
        "three <i>files</i>",
        "a <b>CPU</b> (2 threads)",
        "60 steps",
        "12.5 s",
        "17",
        "9.8.7",
        "4,000 tokens/s",
    ):
        assert fact in told, fact
    assert page.locator("#interrupted").is_hidden()
    last = sum(made_run().curve.losses[-20:]) / 20
    figures = page.locator("#figures").inner_text()
    assert f"{last:.3f}" in figures
    assert "2.718" in figures


def test_generated_text_is_text(page):
    assert page.title() == "Headwise demo"
    assert page.locator("#generated mark").inner_text() == "</mark>def"
    shown = page.locator("#generated").text_content()
    assert shown == "</mark>def" + HOSTILE.replace("\x07", "07").replace("\n", "↵\n").replace("\t", "⇥\t")
    assert page.locator("#generated .byte").all_text_contents() == ["07"]
    assert page.locator("#generated img").count() == 0


def test_every_map_has_the_colours_of_its_weights(page):
    for number in range(2 * (HEADS + 1)):
        layer, head = divmod(number, HEADS + 1)
        weights = weights_of(layer, head)
        painted = pixels(page, "#heads canvas", number)
        assert len(painted) == SIZE * SIZE
        for index, rgba in enumerate(painted):
            query, key = divmod(index, SIZE)
            if seen(SAMPLE.layers[layer], query, key):
                assert close(rgba, (*colour_of(weights[query, key].item()), 255)), (layer, head, query, key)
            else:
                assert rgba[3] == 0, (layer, head, query, key)


@pytest.mark.parametrize(("layer", "head"), [(0, 1), (1, HEADS)])
def test_choosing_a_head_enlarges_it(page, layer, head):
    choose(page, layer, head)
    name = "mean of heads" if head == HEADS else f"head {head + 1}"
    assert page.locator("#map-title").text_content() == f"{SAMPLE.layers[layer].name}, {name}"
    assert pixels(page, "#map canvas") == pixels(page, "#heads canvas", layer * (HEADS + 1) + head)
    assert (
        page.locator("#heads [aria-checked=true]").get_attribute("aria-label") == f"{SAMPLE.layers[layer].name}, {name}"
    )
    assert page.locator("#layer").input_value() == str(layer)
    assert page.locator("#head").input_value() == str(head)
    # The edge of the window is marked where there is one.
    assert page.locator("#map .window").count() == (1 if SAMPLE.layers[layer].window else 0)
    assert ("window of 9 bytes" in page.locator("#map-key").inner_text()) == (layer == 0)


def test_hovering_tells_the_pair_and_its_weight(page):
    choose(page, 0, 2)
    for query, key in ((SIZE - 1, SIZE - 1), (20, 14), (11, 4)):
        told = hover_pair(page, query, key)
        assert abs(percent_in(told) - 100 * weights_of(0, 2)[query, key].item()) < 0.011
        assert f"at {query} →" in told
        assert f"at {key}" in told
    assert told.startswith("newline at 11 → space at 4")
    assert "later" in hover_pair(page, 3, 30)
    assert "window" in hover_pair(page, 30, 3)
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()


def strip_colours(page: Any) -> list[tuple[list[int], bool]]:
    """Of every byte: the background as RGB, and whether it is shown as not seen."""
    found = page.locator("#strip .token").evaluate_all(
        "all => all.map(t => [getComputedStyle(t).backgroundColor, t.classList.contains('unseen')])"
    )
    return [([int(number) for number in re.findall(r"\d+", colour)[:3]], unseen) for colour, unseen in found]


@pytest.mark.parametrize(("layer", "head", "token"), [(0, 0, 30), (1, 2, 44), (1, HEADS, 13)])
def test_choosing_a_token_colours_what_it_looks_at(page, layer, head, token):
    choose(page, layer, head, token)
    row = weights_of(layer, head)[token]
    for key, (colour, unseen) in enumerate(strip_colours(page)):
        assert unseen != seen(SAMPLE.layers[layer], token, key)
        if not unseen:
            assert close(colour, colour_of(row[key].item())), key
    assert page.locator("#strip [aria-selected=true]").get_attribute("id") == f"token-{token}"
    assert page.locator("#map .row").get_attribute("y") == str(token)
    told = [percent_in(text) for text in page.locator("#most .value").all_inner_texts()]
    assert told == pytest.approx(sorted((100 * row).tolist())[::-1][:5], abs=0.011)


def test_bytes_that_cannot_be_seen_have_placeholders(page):
    shown = page.locator("#strip .token").all_text_contents()
    kinds = page.locator("#strip .token").evaluate_all("all => all.map(t => t.className.split(' ')[1])")
    signs = {
        10: ("↵", "newline"),
        32: ("·", "space"),
        9: ("⇥", "tab"),
        0: ("00", "byte"),
        0xC3: ("C3", "byte"),
        0xA9: ("A9", "byte"),
    }
    assert list(zip(shown, kinds, strict=True)) == [signs.get(byte, (chr(byte), "letter")) for byte in TEXT]


def test_the_loss_curve_reads_its_values(page):
    run = made_run()
    chart = page.locator("#loss-whole .chart")
    chart.scroll_into_view_if_needed()
    points = [
        [float(n) for n in pair.split(",")] for pair in chart.locator(".line.ours").get_attribute("points").split()
    ]
    assert len(points) == 60
    box = chart.bounding_box()
    for step in (0, 7, 33, 59):
        page.mouse.move(box["x"] + points[step][0], box["y"] + 100)
        told = page.locator("#tip").inner_text()
        assert f"step {step}\n" in told
        assert f"{run.curve.losses[step]:.4f}" in told
        assert ("plain PyTorch" in told) == (step < 12)
    # Plain PyTorch lies on it, and broader.
    plain = chart.locator(".line.plain")
    theirs = [[float(n) for n in pair.split(",")] for pair in plain.get_attribute("points").split()]
    assert all(math.dist(a, b) < 0.05 for a, b in zip(points, theirs, strict=False))
    width = "line => parseFloat(getComputedStyle(line).strokeWidth)"
    assert plain.evaluate(width) > 3 * chart.locator(".line.ours").evaluate(width)
    # Down is less: pixels and losses are in one linear relation.
    a, b = points[0], points[-1]
    per_nat = (b[1] - a[1]) / (run.curve.losses[0] - run.curve.losses[-1])
    assert per_nat > 20
    for (_, y), loss in zip(points, run.curve.losses, strict=True):
        assert y == pytest.approx(a[1] + per_nat * (run.curve.losses[0] - loss), abs=0.02)


def test_the_two_trainings_are_compared(page):
    rows = page.locator("#difference tr").all_inner_texts()
    assert rows[0].endswith("12")
    assert "3.0\u00a0×\u00a010⁻⁵ nats" in rows[1]
    assert "7," in rows[2]
    ours, plain = (bar.bounding_box()["width"] for bar in page.locator("#speed .bar").all())
    assert ours == pytest.approx(4 * plain, rel=0.01)
    assert "4.00 ×" in page.locator("#speed").inner_text()


@pytest.mark.parametrize(("largest", "verdict"), [(3e-6, "passed"), (3e-3, "failed")])
def test_the_check_of_decoding_is_told(page, tmp_path, largest, verdict):
    told = visit(page, write(tmp_path, replace(made_run(), decode=DecodeCheck(48, largest, 2e-4)))).locator("#decode")
    assert f"Decoding {verdict} its check" in told.inner_text()
    assert "48 positions" in told.inner_text()
    assert f"{largest:.1e}"[:3] in told.inner_text()
    assert "2.0\u00a0×\u00a010⁻⁴" in told.inner_text()


# ------------------------------------------------------------------------------------------------- keys, colours, sizes


def active(page: Any) -> str:
    return page.evaluate(
        "document.activeElement.id || document.activeElement.getAttribute('aria-label') || document.activeElement.className"
    )


def test_everything_is_reached_by_tab(page):
    reached = []
    while "map" not in reached and len(reached) < 30:
        page.keyboard.press("Tab")
        reached.append(active(page))
    wanted = ["theme", "layer", "head", "before", "after", "strip", "map"]
    assert [name for name in reached if name in wanted] == wanted
    assert sum("Loss from step" in name for name in reached) == 2
    assert sum("head" in name and name.startswith("layer ") for name in reached) == 1  # one stop for all heads


def test_keys_choose_a_token(page):
    choose(page, 1, 0, 20)
    page.locator("#strip").focus()
    for key, expected in (("ArrowRight", 21), ("ArrowLeft", 20), ("Home", 0), ("ArrowLeft", 0), ("End", SIZE - 1)):
        page.keyboard.press(key)
        assert page.locator("#strip").get_attribute("aria-activedescendant") == f"token-{expected}"
        assert page.locator("#strip [aria-selected=true]").get_attribute("id") == f"token-{expected}"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert page.locator("#strip [aria-selected=true]").get_attribute("id") == f"token-{TEXT.index(10) + 1}"
    page.keyboard.press("ArrowUp")
    assert page.locator("#strip [aria-selected=true]").get_attribute("id") == "token-0"
    page.locator("#after").press("Enter")
    assert "“f” at 1" in page.locator("#chosen").inner_text()


def test_keys_choose_a_head(page):
    choose(page, 0, 0)
    for key, expected in (
        ("ArrowRight", "layer 1, window 9, head 2"), ("ArrowDown", "layer 2, global, head 2"),
        ("ArrowLeft", "layer 2, global, head 1"), ("ArrowLeft", "layer 2, global, mean of heads"),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert page.locator("#map-title").text_content() == expected
        assert active(page) == expected
    page.locator("#layer").select_option("0")
    page.locator("#head").select_option("2")
    assert page.locator("#map-title").text_content() == "layer 1, window 9, head 3"


def test_keys_read_the_map_and_the_curve(page):
    choose(page, 1, 1, 12)
    page.locator("#map").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    told = page.locator("#tip").inner_text()
    assert "at 14 →" in told
    assert "at 10\n" in told
    assert abs(percent_in(told) - 100 * weights_of(1, 1)[14, 10].item()) < 0.011
    page.keyboard.press("Enter")
    assert page.locator("#strip [aria-selected=true]").get_attribute("id") == "token-14"
    page.locator("#loss-whole .chart").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert "step 1\n" in page.locator("#tip").inner_text()


def test_light_and_dark(page):
    def look() -> tuple[Any, ...]:
        small, large = (pixels(page, canvas)[SIZE] for canvas in ("#heads canvas", "#map canvas"))
        assert small == large
        return page.evaluate("getComputedStyle(document.body).backgroundColor"), large

    choose(page, 0, 0)
    weight = weights_of(0, 0)[1, 0].item()
    light = look()
    assert close(light[1], (*colour_of(weight, colours.LIGHT), 255))
    page.emulate_media(color_scheme="dark")
    page.locator("#theme[aria-pressed=true]").wait_for()
    dark = look()
    assert close(dark[1], (*colour_of(weight, colours.DARK), 255))
    assert dark[0] != light[0]
    page.locator("#theme").click()
    assert look() == light
    page.reload()  # the choice is remembered, against the system's
    choose(page, 0, 0)
    assert look() == light
    page.locator("#theme").click()
    assert look() == dark


CONTRASTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    const colour = parse(getComputedStyle(element).backgroundColor);
    return colour.length === 4 && colour[3] === 0 ? behind(element.parentElement) : colour;
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *:not(script):not(style):not(noscript)")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!text || !element.checkVisibility() || element.matches(".sign.newline")) continue;
    const svg = element instanceof SVGElement;
    const colour = parse(getComputedStyle(element)[svg ? "fill" : "color"]);
    const [a, b] = [luminance(colour), luminance(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${element.outerHTML.slice(0, 80)} ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.locator(f"#theme[aria-pressed={str(scheme == 'dark').lower()}]").wait_for()
    choose(page, 1, 2, 44)
    assert page.evaluate(CONTRASTS) == []


@pytest.mark.parametrize("width", [320, 375, 768])
def test_a_phone_does_not_scroll_sideways(page, width):
    page.set_viewport_size({"width": width, "height": 700})
    page.get_by_text("How it was run").click()
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # curves are redrawn
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Nothing is cut off at the side either.
    beyond = "all => all.filter(e => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 0.5).length"
    assert page.locator("main *").evaluate_all(beyond) == 0
    choose(page, 0, 1, 13)
    hover_pair(page, 13, 13)
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_fingers(page, path):
    context = page.context.browser.new_context(viewport={"width": 375, "height": 700}, has_touch=True, is_mobile=True)
    try:
        phone = context.new_page()
        phone.goto(path.as_uri())
        phone.locator("#token-30").tap()
        assert "at 30" in phone.locator("#chosen").inner_text()
        phone.locator("#heads [role=radio]").nth(1).tap()
        assert phone.locator("#map-title").text_content() == "layer 1, window 9, head 2"
        cell = phone.locator("#map").bounding_box()["width"] / SIZE
        phone.locator("#map").tap(position={"x": 36.5 * cell, "y": 40.5 * cell})
        told = phone.locator("#tip").inner_text()  # it stays when the finger is gone
        assert "at 40 →" in told
        assert abs(percent_in(told) - 100 * weights_of(0, 1)[40, 36].item()) < 0.011
        assert "at 40" in phone.locator("#chosen").inner_text()
        phone.locator("#map-title").tap()
        assert phone.locator("#tip").is_hidden()
        assert phone.locator("#map .cell").get_attribute("visibility") == "hidden"
        phone.locator("#loss-whole .chart").tap()
        assert "step" in phone.locator("#tip").inner_text()
        phone.mouse.wheel(0, 200)
        phone.locator("#tip").wait_for(state="hidden")
    finally:
        context.close()


# --------------------------------------------------------------------------------------------------- runs that lack things


def test_an_interrupted_run_says_so(page, tmp_path):
    run = made_run()
    short = replace(
        run,
        interrupted=True,
        curve=replace(run.curve, losses=run.curve.losses[:20]),
        plain=None,
        decode=None,
        held_out_loss=None,
    )
    visit(page, write(tmp_path, short))
    assert "after 20 of 60 steps" in page.locator("#interrupted").inner_text()
    assert "not trained in this run" in page.locator("#loss-about").inner_text()
    assert "not compared" in page.locator("#difference").inner_text()
    assert page.locator("#speed .bar").count() == 1
    assert "not checked" in page.locator("#decode").inner_text()
    assert page.locator("#loss-first").is_hidden()
    assert "other text" not in page.locator("#figures").inner_text()
    assert page.locator("#heads canvas").count() == 2 * (HEADS + 1)


def test_a_single_step_is_a_dot(page, tmp_path):
    run = made_run()
    one = [replace(curve, losses=curve.losses[:1]) for curve in (run.curve, run.plain)]
    visit(page, write(tmp_path, replace(run, curve=one[0], plain=one[1])))
    assert "only one step" in page.locator("#loss-about").inner_text()
    assert page.locator("#loss-whole .dot").count() == 2
    page.locator("#loss-whole .chart").hover()
    assert "step 0\n" in page.locator("#tip").inner_text()


def test_no_step_and_no_attention(page, tmp_path):
    run = made_run()
    none = replace(
        run, interrupted=True, curve=replace(run.curve, losses=[]), plain=None, decode=None, generated="", prompt=""
    )
    visit(page, write(tmp_path, none, None))
    assert "No step was finished" in page.locator("#loss-about").inner_text()
    assert "ended before" in page.locator("#attention-about").inner_text()
    assert page.locator("#attention").is_hidden()
    assert "no text" in page.locator("#text-about").inner_text()


def test_a_resumed_run_keeps_its_place(page, tmp_path):
    run = made_run()
    visit(page, write(tmp_path, replace(run, curve=replace(run.curve, losses=run.curve.losses[10:], first_step=10))))
    assert page.locator("#difference tr").first.inner_text().endswith("2")
    page.locator("#loss-whole .chart").focus()
    page.keyboard.press("Home")
    told = page.locator("#tip").inner_text()
    assert "step 10\n" in told
    assert f"{run.curve.losses[10]:.4f}" in told


def test_weights_that_are_none_stand_out(page, tmp_path):
    sample = made_sample()
    sample.layers[0].probs[0, 20, 15] = math.nan
    sample.layers[0].probs[0, 20, 30] = 0.25  # on a key that comes later
    visit(page, write(tmp_path, made_run(), sample))
    choose(page, 0, 0, 20)
    alarm = [int(colours.NOT_A_WEIGHT[at : at + 2], 16) for at in (1, 3, 5)]
    painted = pixels(page, "#map canvas")
    for key in (15, 30):
        assert painted[20 * SIZE + key] == [*alarm, 255]
        assert strip_colours(page)[key] == (alarm, False)
    assert "not a weight" in hover_pair(page, 20, 15)
    assert "25.00\u00a0%, though it comes later" in hover_pair(page, 20, 30)

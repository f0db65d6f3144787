"""A real Chromium, driven by Playwright: Debian's own, headless, with a GPU in software where WebGPU is asked for.

>>> with open_page(folder / "report.html", dark=True) as page:
...     page.click("text=Attention")
...     assert page.problems == []

Chromium must be there: a machine without one fails the tests, it does not skip them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

QUIET = (
    "--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
# A GPU in software compiles for seconds: the watchdog would take that for a hang and kill it.
SOFTWARE_GPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--disable-gpu-watchdog")


@contextmanager
def open_page(
    path_or_url: Path | str,
    *,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    webgpu: bool = False,
    before: str = "",
    flags: tuple[str, ...] = (),
) -> Iterator[Any]:
    """A page of Playwright, opened at a file or an address; ``page.problems`` fills with errors of its console and scripts.

    before: JavaScript that runs before the page's own. flags: more of them, for Chromium.
    """
    chromium = shutil.which("chromium")
    assert chromium, "the tests need Chromium (Debian: apt-get install chromium; `make test` does it as root)"
    given = [*QUIET, *(SOFTWARE_GPU if webgpu else ()), *flags]
    address = str(path_or_url) if "://" in str(path_or_url) else Path(path_or_url).resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=given)
        try:
            page: Any = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
            )
            problems: list[str] = []
            page.problems = problems
            page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: problems.append(str(error)))
            if before:
                page.add_init_script(before)
            page.goto(address)
            yield page
        finally:
            browser.close()

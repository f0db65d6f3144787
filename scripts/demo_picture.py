"""Take the picture of a demo's report that README.md shows, its attention: of the run in headwise-demo/, with Chromium.

headwise demo && python scripts/demo_picture.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import open_page  # noqa: E402  (the browser of the tests)

REPORT = ROOT / "headwise-demo" / "report.html"
PICTURE = ROOT / "docs" / "demo-report.png"


def main() -> int:
    if not REPORT.is_file():
        print(f"there is no {REPORT.relative_to(ROOT)}: run headwise demo first", file=sys.stderr)
        return 1
    with open_page(REPORT, width=1120, height=1000) as page:
        page.wait_for_timeout(500)
        assert page.problems == [], page.problems
        page.locator("section[aria-labelledby=attention-title]").screenshot(path=PICTURE)
    print(PICTURE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())

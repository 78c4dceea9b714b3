"""The README as a browser shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.server.page.browsing import PATIENCE_MS

pytestmark = pytest.mark.needs("clients", "rich")

WIDTH, HEIGHT = 1000, 1400
"""Two screens, about as wide as a repository's page."""

STYLE = """
body { font: 16px/1.5 sans-serif; margin: 24px auto; max-width: 880px; color: #1f2328 }
h1, h2 { border-bottom: 1px solid #d1d9e0; padding-bottom: .3em }
a { color: #0969da; text-decoration: none }
code { background: #eff1f3; padding: .2em .4em; border-radius: 6px; font-size: 85% }
pre { background: #f6f8fa; padding: 16px } pre code { background: none; padding: 0 }
table { border-collapse: collapse }
td, th { border: 1px solid #d1d9e0; padding: 6px 13px }
img { max-width: 100% }
"""


def test_the_first_screens(browser, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The README says what the project is; the recording and the figure are there, and every picture can be shown.

    With --pictures, the picture of the documentation is written.
    """
    from markdown_it import MarkdownIt

    text = MarkdownIt("commonmark", {"html": True}).enable("table").render((ROOT / "README.md").read_text("utf-8"))
    shown = tmp_path / "readme.html"
    shown.write_text(f"<base href='{ROOT.as_uri()}/'><meta charset='utf-8'><style>{STYLE}</style>{text}", "utf-8")
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_default_timeout(PATIENCE_MS)
    page.goto(shown.as_uri())
    page.wait_for_function("[...document.images].every((image) => image.complete)")
    assert page.evaluate("[...document.images].map((image) => image.naturalWidth > 0)") == [True, True]
    for found in ("h1", "img >> nth=0", "img >> nth=1"):
        box = page.locator(found).bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= WIDTH, found
        assert box["y"] + box["height"] < HEIGHT, found
    page.wait_for_timeout(6000 if request.config.getoption("--pictures") else 0)  # the recording plays
    folder = ROOT / "docs" / "images" if request.config.getoption("--pictures") else tmp_path
    page.screenshot(path=folder / "readme.png")
    page.close()

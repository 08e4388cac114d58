"""The pictures of docs/report.md, from the logs that the tests read: ``python -m`` this file.

Each shows the page down to where a step goes, then some of its sections, with a pointer on the last
step of the last one. Grey lines are where parts of the page are left out.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image

from loft_hvd.report.page import render_page
from loft_hvd.runlog import read_run_log
from tests.support.browser import Browser

_ROOT = Path(__file__).parents[2]
_LOGS = _ROOT / "tests/unit/logs"
_SECTIONS = {
    "slow_cpu": ["Plans", "Waits for other ranks"],
    "slow_link": ["Plans", "Waits for other ranks"],
    "faulty_worker": ["Waits for other ranks", "Workers"],
}
_WIDTH, _CUT = 880, 6  # pixels: of the window, and of a line between parts
# Where each section begins, in pixels from the page's top, and where the page ends.
_STARTS = """
[...document.querySelectorAll('h2')].map(head =>
  [head.innerText, head.getBoundingClientRect().top + scrollY - 12])
"""
# Of a section: the middle of the last band of its picture, from the page's upper left.
_LAST_BAND = """
(() => {
  const head = [...document.querySelectorAll('h2')].find(each => each.innerText == '%s');
  let at = head.nextElementSibling;
  while (at.tagName != 'svg') at = at.nextElementSibling;
  const box = [...at.querySelectorAll('.band')].pop().getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2 + scrollY];
})()
"""


def screenshot(browser: Browser, page: Path, sections: list[str]) -> Image.Image:
    """Return the picture of a page: its head, and the sections of these names."""
    browser.open(page)
    starts: list[tuple[str, float]] = browser.value(_STARTS)
    names = [name for name, _ in starts]
    edges = [start for _, start in starts] + [
        float(browser.value("document.documentElement.scrollHeight"))
    ]
    x, y = browser.value(_LAST_BAND % sections[-1])
    browser.value(f"scrollTo(0, {y - 400})")
    browser.point(x, y - browser.value("scrollY"))
    spans = [(0.0, edges[names.index("Where a step goes") + 1])]
    spans += [(edges[names.index(each)], edges[names.index(each) + 1]) for each in sections]
    parts = [
        Image.open(io.BytesIO(browser.picture(0, top, _WIDTH, end - top))) for top, end in spans
    ]
    height = sum(part.height for part in parts) + _CUT * (len(parts) - 1)
    whole = Image.new("RGB", (_WIDTH, height), "#dddddd")
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height + _CUT
    return whole


def main() -> None:
    """Write the three pictures, with 64 colours each: a quarter of the bytes."""
    for name, sections in _SECTIONS.items():
        with tempfile.TemporaryDirectory() as folder, Browser(Path(folder), width=_WIDTH) as opened:
            page = Path(folder) / "page.html"
            page.write_text(render_page(read_run_log(_LOGS / f"{name}.jsonl"), title=name))
            picture = screenshot(opened, page, sections)
        small = picture.quantize(64, dither=Image.Dither.NONE)
        small.save(_ROOT / f"docs/images/report_{name}.png", optimize=True)


if __name__ == "__main__":
    main()

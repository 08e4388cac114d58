"""The pages of the prepared runs in a real browser, with a real pointer. Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loft_hvd.report.page import render_page
from loft_hvd.runlog import read_run_log
from tests.support.browser import BROWSER, Browser
from tests.unit.test_verdict import LOGS, PREPARED

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(180),
    pytest.mark.skipif(BROWSER is None, reason="no chromium here (apt-get install chromium)"),
]
MOST_HIDDEN = 0.2  # of a line by another: lines may cross at a small angle
# What is on the page, by its pictures: words on the axes, and whether any two of them overlap.
_TEXTS = """
[...document.querySelectorAll('svg')].map(svg => {
  const texts = [...svg.querySelectorAll(':scope > text')];
  const boxes = texts.map(text => text.getBoundingClientRect());
  const outer = svg.getBoundingClientRect();
  const meet = (a, b) =>
    a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
  return {
    told: svg.getAttribute('aria-label'),
    across: texts.filter(text => text.getAttribute('text-anchor') == 'middle').length,
    upwards: texts.filter(text => text.getAttribute('text-anchor') == 'end'
      && /^[-\\d.e+]+$/.test(text.textContent)).length,
    overlaps: texts.filter((text, i) => boxes.some((box, j) => j != i && meet(boxes[i], box)))
      .map(text => text.textContent),
    outside: texts.filter((text, i) => boxes[i].left < outer.left - 1
      || boxes[i].right > outer.right + 1 || boxes[i].bottom > outer.bottom + 1)
      .map(text => text.textContent),
  };
})
"""
# For each line of each picture: the largest share of it that one other line covers, half or more.
_HIDDEN = """
[...document.querySelectorAll('svg')].flatMap(svg => {
  const lines = [...svg.querySelectorAll('.line')].map(line => {
    const length = line.getTotalLength();
    return [...Array(1001).keys()].map(i => line.getPointAtLength(length * i / 1000));
  });
  const cell = (x, y) => 10000 * Math.floor(x) + Math.floor(y);
  const places = lines.map(line => {  // points by the square of one unit that they lie in
    const found = new Map();
    line.forEach(point => {
      const key = cell(point.x, point.y);
      found.set(key, [...(found.get(key) || []), point]);
    });
    return found;
  });
  const near = (a, b) => Math.hypot(a.x - b.x, a.y - b.y) < 1;
  const covers = (place, point) => [-1, 0, 1].some(i => [-1, 0, 1].some(j =>
    (place.get(cell(point.x + i, point.y + j)) || []).some(other => near(point, other))));
  const share = (line, place) =>
    line.filter(point => covers(place, point)).length / line.length;
  return lines.map((line, at) =>
    Math.max(0, ...places.filter((_, other) => other != at).map(place => share(line, place))));
})
"""
_BANDS = """
[...document.querySelectorAll('.band')].map(band => {
  const box = band.getBoundingClientRect();
  return [box.left + box.width / 2 + scrollX, box.top + box.height / 2 + scrollY];
})
"""
# The tips that are seen, with their words, and whether they lie inside their picture.
_TIPS = """
[...document.querySelectorAll('.tip')].filter(tip => getComputedStyle(tip).visibility == 'visible')
  .map(tip => {
    const box = tip.getBoundingClientRect();
    const outer = tip.closest('svg').getBoundingClientRect();
    return {
      number: [...document.querySelectorAll('.tip')].indexOf(tip),
      words: [...tip.querySelectorAll('text')].map(text => text.textContent),
      dots: tip.querySelectorAll('circle').length,
      is_inside: box.left >= outer.left - 1 && box.right <= outer.right + 1
        && box.top >= outer.top - 1 && box.bottom <= outer.bottom + 1,
    };
  })
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as opened:
        yield opened


@pytest.fixture(params=PREPARED)
def name(request: pytest.FixtureRequest, browser: Browser, tmp_path: Path) -> str:
    """The name of a prepared run whose page the browser shows."""
    name = str(request.param)
    page = tmp_path / "page.html"
    page.write_text(render_page(read_run_log(LOGS / f"{name}.jsonl"), title=name))
    browser.open(page)
    return name


def test_page_opens_without_a_word_on_the_console(name: str, browser: Browser) -> None:
    assert browser.console() == []
    assert browser.value("document.body.firstElementChild.tagName") == "H1"
    assert browser.value("document.body.firstElementChild.innerText").startswith(PREPARED[name])


def test_console_would_be_heard(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<script>console.error('trouble'); nothing.at.all</script><img src=none.png>")
    browser.open(page)
    said = browser.console()
    assert len(said) == 3
    assert any("trouble" in each for each in said)
    assert any("nothing is not defined" in each for each in said)
    assert any("none.png" in each for each in said)


def test_axes_have_numbers_that_can_be_read(name: str, browser: Browser) -> None:
    pictures = browser.value(_TEXTS)
    assert len(pictures) >= 7
    bars, *others = pictures
    assert bars["across"] >= 3
    assert all(each["across"] >= 2 and each["upwards"] >= 3 for each in others), others
    assert [each for each in pictures if each["overlaps"] or each["outside"]] == []
    assert all(each["told"] for each in pictures)


def test_lines_do_not_hide_each_other(name: str, browser: Browser) -> None:
    hidden = browser.value(_HIDDEN)
    assert len(hidden) >= 12
    assert max(hidden) <= MOST_HIDDEN, hidden


def test_pointing_at_any_step_shows_its_values_and_no_others(name: str, browser: Browser) -> None:
    assert browser.value(_TIPS) == []
    bands = browser.value(_BANDS)
    assert len(bands) >= 20
    for number, (x, y) in enumerate(bands):
        browser.value(f"scrollTo(0, {y} - 300)")
        browser.point(x, y - browser.value("scrollY"))
        (tip,) = browser.value(_TIPS)
        first, *values = tip["words"]
        assert first.startswith("step ")
        assert (tip["number"], len(values), tip["is_inside"]) == (number, tip["dots"], True), tip
        assert values
    browser.point(2, 2)
    assert browser.value(_TIPS) == []

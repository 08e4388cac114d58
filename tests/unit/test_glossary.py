"""Each word that a report prints as a column, a cause or a part is in docs/glossary.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from loft_hvd.balance.explain import CAUSES, describe
from loft_hvd.balance.interval import RankTimes
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.report.screen import PARTS
from loft_hvd.report.text import LINK_COLUMNS
from tests.support.pages import read_page

_PAGE = Path(__file__).parents[2] / "loft_hvd" / "report" / "page.py"
_UNITS = re.compile(r" (?:ms|MB)\*?(?= |$)")


def _explained() -> set[str]:
    return {word.lower() for word in re.findall(r"\*\*(.+?)\*\*", read_page("glossary.md"))}


def _columns_of_times() -> list[str]:
    numbers = dict.fromkeys(("fetch_s", "stall_s", "queued_s", "wait_s", "other_s", "remote"), 0.0)
    ranks = [
        RankTimes(rank, 20, 8, local=8, compute_s=1.0, forward_s=seconds, wall_s=1.0, **numbers)
        for rank, seconds in enumerate((0.0, 0.4))
    ]
    heads = [
        line
        for times in (ranks[:1], ranks)  # one without forward passes of its own, one with
        for line in describe(times).splitlines()
        if line.startswith("rank  ")
    ]
    return [word for head in heads for word in re.split(r" ms\b|\s{2,}", head)]


def _heads_of_the_page() -> Iterator[str]:
    """Yield what stands above the columns of the page's tables."""
    for node in ast.walk(ast.parse(_PAGE.read_text(encoding="utf-8"))):
        given: ast.expr | None = None
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "head":
            given = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_table":
            given = node.args[0]
        if isinstance(given, ast.Tuple):
            yield from (str(each.value) for each in given.elts if isinstance(each, ast.Constant))


_WORDS = {
    "a step's parts": [*PARTS, *CAUSES],
    "times": _columns_of_times(),
    "links": LINK_COLUMNS,
    "workers": re.split(r"\s+(?!out\b)", str(SuspicionReport(0, ())).splitlines()[1].strip()),
    "the page's tables": [*_heads_of_the_page()],
}


@pytest.mark.parametrize("printed", _WORDS)
def test_the_glossary_has_what_a_report_prints(printed: str) -> None:
    bare = {_UNITS.sub("", word).strip().lower() for word in _WORDS[printed]} - {""}
    assert len(bare) >= 5
    alike = {"ranks": "rank", "plans": "plan"}
    assert {alike.get(word, word) for word in bare} <= _explained()

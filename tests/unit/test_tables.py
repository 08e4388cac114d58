"""The tables of measurements on the pages are those of the files in benchmarks/results/."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks.tables import PAGES, RESULTS, TABLES, filled, main

MARK = re.compile(r"<!-- table: ([\w-]+) -->")
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_of_its_files(page: Path) -> None:
    assert filled(TEXTS[page]) == TEXTS[page], "run: python -m benchmarks.tables"


def test_check_agrees() -> None:
    assert main(["--check"]) == 0


def test_a_changed_figure_is_found() -> None:
    page = TEXTS[RESULTS.parents[1] / "docs/benchmarks.md"]
    changed = page.replace("| median, avx512 | 0.88 |", "| median, avx512 | 0.87 |")
    assert changed != page
    assert filled(changed) == page


def test_each_table_is_on_one_page() -> None:
    assert sorted(MARK.findall("".join(TEXTS.values()))) == sorted(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_where_its_figures_are_from(name: str) -> None:
    origin, header, rows = TABLES[name]()
    assert all(len(row) == len(header) for row in rows)
    if name != "in-short":  # that one is of the other tables' files
        assert re.search(
            r"cores of an .+ \(commit .+, 20\d\d-\d\d-\d\d.*, `[\w-]+\.json`\)", origin
        )


def test_benchmarks_are_results_and_no_history() -> None:
    assert len(TEXTS[RESULTS.parents[1] / "docs/benchmarks.md"].splitlines()) <= 250


def test_every_file_of_results_is_named_on_a_page() -> None:
    names = re.findall(r"`(?:benchmarks/results/)?([\w*-]+\.jsonl?)`", "".join(TEXTS.values()))
    lost = [
        path.name
        for path in RESULTS.iterdir()
        if not any(fnmatch(path.name, name) for name in names)
    ]
    assert lost == []

"""The page in a real browser: nothing on its console, the verdict on top. Skipped without one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from loft_hvd.report.page import render_page
from loft_hvd.runlog import read_run_log
from tests.unit.test_verdict import LOGS, PREPARED

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --enable-logging=stderr --v=0"
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(100),
    pytest.mark.skipif(BROWSER is None, reason="no chromium here (apt-get install chromium)"),
]


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page, and return what the browser made of it and said."""
    assert BROWSER is not None
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [BROWSER, *OPTIONS.split(), profile, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)


def console(said: str) -> list[str]:
    """Return the lines that a page has written to the console, its errors among them."""
    return [line for line in said.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("name", PREPARED)
def test_page_opens_without_a_word_on_the_console(name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_page(read_run_log(LOGS / f"{name}.jsonl"), title=name))
    done = browse(page, "--dump-dom")
    assert console(done.stderr) == []
    heading = re.search(r"<body>\s*<h1>([^<]*)</h1>", done.stdout)
    assert heading is not None
    assert heading[1].startswith(PREPARED[name])


def test_console_would_be_heard(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<script>console.error('trouble'); nothing.at.all</script>")
    said = console(browse(page, "--dump-dom").stderr)
    assert len(said) == 2
    assert "trouble" in said[0]

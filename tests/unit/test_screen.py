"""``loft-hvd top``: the verdict, the state and a row a rank, in words and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loft_hvd import cli
from loft_hvd.errors import DataError
from loft_hvd.report.entries import read_lines
from loft_hvd.report.follow import LogFollower
from loft_hvd.report.screen import PARTS, make_screen
from loft_hvd.report.verdict import judge
from loft_hvd.runlog import RunLog, read_run_log
from tests.unit.test_verdict import LOGS, PREPARED, suspicion, times


@pytest.mark.parametrize("name", PREPARED)
def test_a_screen_begins_with_the_verdict_and_has_a_row_a_rank(name: str) -> None:
    lines = read_lines(read_run_log(LOGS / f"{name}.jsonl"))
    screen = make_screen(lines, now_s=lines[-1].time_s + 7)
    assert screen.verdict[0].startswith(PREPARED[name])
    assert [row.rank for row in screen.rows] == list(range(5 if name == "faulty_worker" else 3))
    assert screen.state.startswith(f"step {lines[-1].step}, ")
    assert re.search(
        r"\d ms a step, [\d.]+ samples/s, plan \d, loss [\d.]+, 7 s ago$", screen.state
    )
    assert "report_mode.py" in screen.facts


def test_of_many_ranks_those_that_work_longest_are_shown() -> None:
    many = [{"compute_s": 0.1 + 0.001 * rank} for rank in range(100)]
    screen = make_screen(read_lines([times(20, *many)]), now_s=0.0)
    assert [row.rank for row in screen.rows] == list(range(76, 100))
    assert screen.note == "an average batch up to step 20, 24 of 100 ranks"


def test_of_many_ranks_one_that_is_off_is_shown_although_it_is_fast() -> None:
    many = [{"compute_s": 0.1 + 0.001 * rank} for rank in range(100)]
    screen = make_screen(read_lines([times(20, *many), suspicion(20, 3)]), now_s=0.0, most_rows=4)
    assert [row.rank for row in screen.rows] == [3, 97, 98, 99]
    assert screen.note.endswith(", 4 of 100 ranks")


@pytest.mark.parametrize("columns", [120, 75, 50])
@pytest.mark.parametrize("height", [8, 12, 24, 30, 60])
def test_top_fits_the_terminal_and_says_what_it_leaves_out(
    height: int, columns: int, tmp_path: Path
) -> None:
    many = [{"compute_s": 0.1 + 0.001 * rank, "queued_s": 0.05} for rank in range(32)]
    many[30]["compute_s"] = many[31]["compute_s"] = 0.9
    path = tmp_path / "loft-1.jsonl"
    run = {"kind": "run", "step": 0, "world_size": 32, "script": "train.py"}
    entries = [run, times(20, *many), suspicion(20, 3)]
    path.write_text("".join(json.dumps(each) + "\n" for each in entries))
    follower = LogFollower(path)
    follower.look()
    console = Console(width=columns, height=height)
    drawn = cli._screen(follower, str(tmp_path), console, height=height)
    text = ["".join(part.text for part in line) for line in console.render_lines(drawn)]
    assert len(text) <= height
    words = " ".join(" ".join(text).split())
    told = re.findall(r"(\d+) of 32 ranks", words)
    shown = int(told[0]) if told else 32
    assert bool(told) == ((height, columns) != (60, 120))
    assert not told or len(text) > height - 4  # what room there is, is used
    rows = [line.split() for line in text if re.match(r" *(rank \d+:|\d+ +8 )", line)]
    ranks = [int(row[row[0] == "rank"].rstrip(":")) for row in rows]
    assert len(ranks) == shown
    assert {3, 30, 31}.issuperset(ranks) if shown < 3 else {3, 30, 31}.issubset(ranks)
    first, *others = judge(follower.lines)
    assert words.startswith(first)
    assert len(others) == 3
    assert re.search(r"\([13] more: loft-hvd report\)", words)


def test_rows_have_the_suspicion_of_their_worker() -> None:
    screen = make_screen(read_lines([times(20, {}, {}, {}, {}), suspicion(20, 3)]), now_s=0.0)
    assert [row.suspicion for row in screen.rows] == [0, 0, 0, 0.9]


def test_a_screen_says_when_times_will_come() -> None:
    run = {"kind": "run", "step": 0, "world_size": 4, "policy": "loft", "times_at": 25}
    screen = make_screen(read_lines([run]), now_s=0.0)
    assert (screen.rows, screen.note) == ((), "not measured yet, first at step 25")


@pytest.mark.parametrize("columns", [200, 80, 60])
@pytest.mark.parametrize("name", PREPARED)
def test_top_prints_a_run_as_it_is_on_any_terminal(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    log = LOGS / f"{name}.jsonl"
    result = CliRunner().invoke(cli.build_app(), ["top", str(log), "--once"])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= columns
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.output  # nothing is cut off
    text = " ".join(result.output.split())
    assert text.startswith(PREPARED[name])
    table = text.partition("parts in ms:")[2]
    for row in make_screen(read_lines(read_run_log(log)), now_s=0.0).rows:
        numbers = [f"{1e3 * each:.1f}" for each in row.seconds]
        cells = " ".join([str(row.rank), f"{row.samples:.4g}", *numbers])
        parts = ", ".join(f"{part} {each}" for part, each in zip(PARTS, numbers, strict=True))
        words = f"rank {row.rank}: {row.samples:.4g} samples, {parts}"
        assert cells in table or words in table


@pytest.mark.parametrize("words", [["top", "--once"], ["top"]])  # no terminal: once
@pytest.mark.parametrize("name", ["", "typo.jsonl"])
def test_top_without_a_log_says_so(words: list[str], name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.build_app(), [*words, str(tmp_path / name)])
    assert result.exit_code == 1
    assert isinstance(result.exception, DataError)
    assert str(tmp_path / name) in str(result.exception)


@contextmanager
def top_on_a_terminal(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run ``loft-hvd top`` on a folder without a log, once it says so; give it and its terminal."""
    main, other = pty.openpty()
    # A shell has what it starts in the background ignore Ctrl-C, and tests with it.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "loft_hvd.cli"]
    command += ["top", str(folder), "--every", "0.1"]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env=env, start_new_session=True
    ) as process:
        os.close(other)
        try:
            read_until(main, b"no run log")
            yield process, main
        finally:
            process.kill()
            os.close(main)


@pytest.mark.long
@pytest.mark.timeout(60)
def test_top_goes_on_with_the_log_until_ctrl_c(tmp_path: Path) -> None:
    with top_on_a_terminal(tmp_path) as (process, terminal):
        shutil.copy(LOGS / "slow_cpu.jsonl", tmp_path / "loft-1.jsonl")
        read_until(terminal, b"Rank 2 costs 33%")
        log = RunLog(tmp_path)  # another run begins
        log.write("run", world_size=9)
        assert log.path is not None
        read_until(terminal, b"9 ranks")
        process.send_signal(signal.SIGINT)
        read_until(terminal, LEAVES)
        read_until(terminal, b"9 ranks")  # what was last shown stays
        assert process.wait(timeout=20) == 0


@pytest.mark.long
@pytest.mark.timeout(60)
def test_top_that_is_told_to_end_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    with top_on_a_terminal(tmp_path) as (process, terminal):
        process.send_signal(signal.SIGTERM)
        read_until(terminal, LEAVES)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM


@pytest.mark.parametrize("every", ["nan", "inf", "1e10", "0"])
@pytest.mark.parametrize("words", [["top"], ["export", "--prometheus", "x", "--follow"]])
def test_no_wait_between_looks_is_beyond_a_day(
    words: list[str], every: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(cli.build_app(), [*words, str(tmp_path), "--every", every])
    assert result.exit_code == 2
    assert "86400" in result.output


LEAVES = b"\x1b[?1049l"  # the terminal's own screen comes back


def read_until(terminal: int, wanted: bytes) -> None:
    """Read what a terminal is sent up to something, and no further."""
    seen, ends = b"", time.monotonic() + 30
    while not seen.endswith(wanted):
        ready, _, _ = select.select([terminal], [], [], max(ends - time.monotonic(), 0))
        assert ready, seen[-2000:]
        seen += os.read(terminal, 1)

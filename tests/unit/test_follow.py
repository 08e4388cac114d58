"""Whoever follows a log has all of it, once, however it is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loft_hvd.errors import DataError
from loft_hvd.report.entries import read_lines
from loft_hvd.report.follow import LogFollower
from loft_hvd.runlog import RunLog, read_run_log
from tests.unit.test_verdict import LOGS


def steps(follower: LogFollower) -> list[int]:
    return [line.step for line in follower.new]


def test_each_look_brings_what_is_new(tmp_path: Path) -> None:
    log, follower = RunLog(tmp_path), LogFollower(tmp_path)
    for log.step in (1, 2):
        log.write("explain", text="")
    assert follower.look()
    assert steps(follower) == [1, 2]
    assert not follower.look()
    assert steps(follower) == []
    log.step = 3
    log.write("explain", text="")
    assert follower.look()
    assert steps(follower) == [3]
    assert [line.step for line in follower.lines] == [1, 2, 3]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "loft-1.jsonl"
    whole = (LOGS / "slow_cpu.jsonl").read_bytes()
    follower = LogFollower(path)
    for end in range(0, len(whole) + 997, 997):
        path.write_bytes(whole[:end])
        follower.look()
    assert follower.lines == read_lines(read_run_log(LOGS / "slow_cpu.jsonl"))


def test_a_thinned_log_is_read_anew(tmp_path: Path) -> None:
    log, follower = RunLog(tmp_path, max_bytes=20_000), LogFollower(tmp_path)
    for log.step in range(1000):
        log.write("explain", text="x" * 50)
        follower.look()
    assert log.path is not None
    expected = [entry["step"] for entry in read_run_log(log.path)]
    assert len(expected) < 300
    assert [line.step for line in follower.lines] == expected


def test_a_folders_newest_log_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path)
    assert not follower.look()  # none yet
    for number, world_size in enumerate((4, 5)):
        log = RunLog(tmp_path)
        log.write("run", world_size=world_size)
        assert log.path is not None
        os.utime(log.path, (number, number))  # one after the other, whatever the clock does
        assert follower.look()
        assert follower.is_anew
        assert follower.path == log.path
        assert [getattr(line, "world_size", None) for line in follower.lines] == [world_size]


def started(folder: Path, stamp: str, world_size: int) -> Path:
    path = folder / f"loft-{stamp}.jsonl"
    path.write_text(json.dumps({"kind": "run", "step": 0, "world_size": world_size}) + "\n")
    return path


def test_of_two_live_logs_the_later_run_stays(tmp_path: Path) -> None:
    logs = [started(tmp_path, "20261123-090000-9", 9), started(tmp_path, "20261123-090000-10", 10)]
    follower, seen = LogFollower(tmp_path), []
    for now in range(6):  # they write in turn
        os.utime(logs[now % 2], (now + 2**31, now + 2**31))
        follower.look()
        seen.append((follower.path, len(follower.new)))
    assert seen == [(logs[0], 1), (logs[1], 1)] + 4 * [(logs[1], 0)]


def test_one_who_stays_keeps_to_the_first_log(tmp_path: Path) -> None:
    first, follower = started(tmp_path, "20261123-090000-0", 4), LogFollower(tmp_path, stays=True)
    follower.look()
    later = started(tmp_path, "20261123-100000-0", 5)
    os.utime(later, (2**31, 2**31))
    assert not follower.look()
    assert follower.path == first


@pytest.mark.parametrize("name", ["typo.jsonl", "none/loft-1.jsonl", "folder", "empty.jsonl"])
def test_a_log_that_is_needed_and_not_there_is_our_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").touch()
    follower = LogFollower(tmp_path / name)
    assert not follower.look()  # it may come
    with pytest.raises(DataError, match=name):
        follower.look(is_needed=True)


def test_what_a_full_disk_took_in_part_is_read_anew(tmp_path: Path) -> None:
    path = started(tmp_path, "20261123-090000-0", 4)
    head = path.read_bytes()
    lost = b'{"kind": "scalars", "step": 1, "values": {}}\n'
    path.write_bytes(head + lost)
    follower = LogFollower(path)
    follower.look()
    with path.open("r+b") as file:  # the same file, as RunLog writes over what was not taken whole
        file.write(head + lost.replace(b"{}", b'{"loss": 0.5}') + lost)
    assert follower.look()
    assert follower.is_anew
    # As text: a number that is not known is NaN, which equals nothing.
    assert repr(follower.lines) == repr(read_lines(read_run_log(path)))


def test_a_log_that_goes_away_changes_nothing(tmp_path: Path) -> None:
    log, follower = RunLog(tmp_path), LogFollower(tmp_path)
    log.write("run", world_size=4)
    follower.look()
    assert log.path is not None
    log.path.unlink()
    assert not follower.look()
    assert len(follower.lines) == 1


@pytest.mark.parametrize(
    "text", ["1\n", "x\n", '{"kind": "plan", "step": 1}\n', "[" * 100_000 + "\n"]
)
def test_what_is_no_log_is_our_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "loft-1.jsonl"
    path.write_text(text)
    with pytest.raises(DataError):
        LogFollower(path).look()


@pytest.mark.parametrize("bad", ["1", "x", '{"kind": "plan", "step": 1}'])
def test_an_error_names_the_line_of_the_file(bad: str, tmp_path: Path) -> None:
    path = started(tmp_path, "20261123-090000-0", 4)
    follower = LogFollower(path)
    follower.look()
    with path.open("a") as file:  # an empty line is none of the log's, but one of the file's
        file.write('\n{"kind": "scalars", "step": 1, "values": {}}\n' + bad + "\n")
    with pytest.raises(DataError, match="line 4"):
        follower.look()

"""A log's numbers reach other tools: every one of them, once, under names that hold."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import loft_hvd as loft
from loft_hvd import cli
from loft_hvd.errors import ArgumentTypeError, DataError
from loft_hvd.report.entries import read_lines
from loft_hvd.report.export import prometheus_text, scalars_of
from loft_hvd.runlog import RunLog, newest_log, read_run_log
from tests.unit.test_verdict import LOGS, PREPARED, suspicion, times

# A line of Prometheus' text format: a name, labels if any, a number.
SAMPLE = re.compile(
    r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (-?[\d.]+(?:e[-+]?\d+)?)'
)


class Board:
    """What a TensorBoard writer is asked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.seen.append((tag, scalar_value, global_step))


class Bench:
    """What a run of Weights and Biases is asked for; steps must not go back there."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        assert not self.seen or step >= self.seen[-1][1]
        self.seen.append((data, step))


def test_a_feed_hands_over_each_number_once(tmp_path: Path) -> None:
    board, log = Board(), RunLog(tmp_path)
    feed = loft.ScalarFeed(tmp_path, board)
    assert feed.update() == 0
    log.step = 3
    log.write_scalars({"loss": 0.5, "lost": math.nan})
    assert feed.update() == 1
    assert feed.update() == 0
    log.step = 20
    log.write_scalars({"loss": 0.25})
    assert feed.update() == 1
    assert board.seen == [("loss", 0.5, 3), ("loss", 0.25, 20)]


@pytest.mark.parametrize("names", [["loss"], ["loss", "accuracy"]])
def test_a_feed_hands_over_each_number_once_when_a_log_is_thinned(
    names: list[str], tmp_path: Path
) -> None:
    board, log = Board(), RunLog(tmp_path, max_bytes=20_000)
    feed = loft.ScalarFeed(tmp_path, board)
    for log.step in range(1000 // len(names)):
        for name in names:  # lines of one step: it is the newest when the log is thinned
            log.write_scalars({name: float(log.step)})
            feed.update()
    expected = [(name, step) for step in range(1000 // len(names)) for name in names]
    assert [(name, step) for name, _, step in board.seen] == expected


def test_a_feed_keeps_to_its_log_where_two_jobs_share_a_folder(tmp_path: Path) -> None:
    board, logs = Board(), [RunLog(tmp_path), RunLog(tmp_path)]
    paths = [log.path for log in logs if log.path is not None]
    feed = loft.ScalarFeed(tmp_path, board)
    for step in range(6):  # they write in turn, and both were the newest at some update
        logs[step % 2].step = step
        logs[step % 2].write_scalars({"loss": float(step)})
        os.utime(paths[step % 2], (step + 2**31, step + 2**31))
        feed.update()
    assert [step for _, _, step in board.seen] == [0, 2, 4]


def test_a_log_that_cannot_be_read_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board, path = Board(), tmp_path / "loft-1.jsonl"
    feed = loft.ScalarFeed(path, board)
    path.write_text("half of a li\n")
    assert feed.update() == 0
    assert "loft-1.jsonl" in caplog.text
    path.write_text('{"kind": "scalars", "step": 1, "values": {"loss": 0.5}}\n')
    assert feed.update() == 1


def test_a_writer_of_dicts_gets_a_line_at_a_time() -> None:
    bench = Bench()
    loft.ScalarFeed(LOGS / "faulty_worker.jsonl", bench).update()
    whole = {name: value for values, _ in bench.seen for name, value in values.items()}
    assert {"loss", "loft/step_s", "loft/rank 4/wait_s", "loft/suspicion/2"} <= whole.keys()
    assert whole["loft/suspicion/2"] > 0.8


def test_a_writer_that_takes_no_numbers_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="add_scalar"):
        loft.ScalarFeed("runs", object())


def test_names_and_units_of_scalars() -> None:
    (line,) = read_lines([times(20, {"stall_s": 0.2}, {}, step_s=0.4)])
    found = scalars_of(line)
    assert found["loft/step_s"] == 0.4
    assert found["loft/samples_per_s"] == 16 / 0.4
    assert found["loft/rank 0/stall_s"] == 0.2


@pytest.mark.parametrize("name", PREPARED)
def test_text_for_prometheus_is_of_its_format(name: str) -> None:
    text = prometheus_text(read_lines(read_run_log(LOGS / f"{name}.jsonl")))
    known: set[str] = set()
    seen: set[tuple[str, str]] = set()
    for line in text.splitlines():
        if line.startswith("#"):
            kind, metric, rest = line[2:].split(" ", 2)
            assert kind in ("HELP", "TYPE")
            assert kind == "HELP" or (rest == "gauge" and metric not in known)
            known.add(metric if kind == "TYPE" else "")
            continue
        found = SAMPLE.fullmatch(line)
        assert found is not None, line
        assert found[1] in known
        assert (found[1], found[2]) not in seen
        seen.add((found[1], found[2]))
    assert text.endswith("\n")
    assert 'loft_rank_seconds{rank="2",part="compute"}' in text


def test_what_prometheus_would_misread_is_escaped() -> None:
    scalars = {"kind": "scalars", "step": 1, "values": {'a "b" \\ \n c': 1.0, "lost": None}}
    (line,) = (
        each for each in prometheus_text(read_lines([scalars])).splitlines() if "scalar{" in each
    )
    assert line == 'loft_scalar{name="a \\"b\\" \\\\ \\n c"} 1.0'


def test_workers_are_there_with_their_suspicion() -> None:
    text = prometheus_text(read_lines([suspicion(20, 3)]))
    assert 'loft_worker_suspicion{ranks="3"} 0.9' in text
    assert 'loft_worker_stands_out{ranks="3"} 1.0' in text
    assert 'loft_worker_stands_out{ranks="0"} 0.0' in text


def test_export_writes_the_file_whole(tmp_path: Path) -> None:
    out = tmp_path / "loft.prom"
    words = ["export", str(LOGS / "slow_cpu.jsonl"), "--prometheus", str(out)]
    result = CliRunner().invoke(cli.build_app(), words)
    assert result.exit_code == 0, result.output
    assert "loft_step 46.0" in out.read_text()
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("name", ["", "typo.jsonl", "empty.jsonl"])
def test_export_of_nothing_leaves_what_was_written(name: str, tmp_path: Path) -> None:
    out, log = tmp_path / "loft.prom", tmp_path / name
    out.write_text("loft_step 46.0\n")
    (tmp_path / "empty.jsonl").touch()
    result = CliRunner().invoke(cli.build_app(), ["export", str(log), "--prometheus", str(out)])
    assert result.exit_code == 1
    assert isinstance(result.exception, DataError)
    assert out.read_text() == "loft_step 46.0\n"


def test_export_and_report_never_write_over_the_log(tmp_path: Path) -> None:
    log = tmp_path / "loft-1.jsonl"
    before = (LOGS / "slow_cpu.jsonl").read_bytes()
    log.write_bytes(before)
    for words in (["export", str(tmp_path), "--prometheus"], ["report", str(tmp_path), "--html"]):
        result = CliRunner().invoke(cli.build_app(), [*words, str(log)])
        assert isinstance(result.exception, DataError)
    assert log.read_bytes() == before


def test_what_utf8_cannot_hold_is_our_error(tmp_path: Path) -> None:
    log, out = tmp_path / "loft-1.jsonl", tmp_path / "loft.prom"
    log.write_text('{"kind": "scalars", "step": 1, "values": {"\\ud800": 1.0}}\n')
    result = CliRunner().invoke(cli.build_app(), ["export", str(log), "--prometheus", str(out)])
    assert isinstance(result.exception, DataError)
    assert [*tmp_path.iterdir()] == [log]


def test_export_closes_what_it_gave_numbers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closing(Board):
        calls: tuple[str, ...] = ()

        def flush(self) -> None:
            self.calls += ("flush",)

        def close(self) -> None:
            self.calls += ("close",)

    board = Closing()
    monkeypatch.setattr(cli, "_summary_writer", lambda folder: board)
    words = ["export", str(LOGS / "slow_cpu.jsonl"), "--tensorboard", "here"]
    result = CliRunner().invoke(cli.build_app(), words)
    assert result.exit_code == 0, result.output
    assert board.seen
    assert board.calls == ("flush", "close")


def test_export_without_a_target_is_a_usage_error() -> None:
    assert (
        CliRunner().invoke(cli.build_app(), ["export", str(LOGS / "slow_cpu.jsonl")]).exit_code == 2
    )


def test_export_reaches_the_real_tensorboard(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard here"
    )
    words = ["export", str(LOGS / "slow_cpu.jsonl"), "--tensorboard", str(tmp_path)]
    result = CliRunner().invoke(cli.build_app(), words)
    assert result.exit_code == 0, result.output
    board = reader.EventAccumulator(str(tmp_path))
    board.Reload()
    assert {"loss", "loft/step_s", "loft/rank_2/compute_s"} <= set(board.Tags()["scalars"])
    assert [each.step for each in board.Scalars("loft/step_s")] == [15, 30, 45]


def test_a_path_that_cannot_be_looked_at_is_our_error() -> None:
    with pytest.raises(DataError):
        read_run_log(newest_log("x" * 300))
    assert loft.ScalarFeed("x" * 300, SimpleNamespace(add_scalar=print)).update() == 0

from __future__ import annotations

from pathlib import Path

import pytest

import loft_hvd as loft
from loft_hvd.balance import loop
from loft_hvd.config import Config
from loft_hvd.errors import DataError
from loft_hvd.report.text import render_text
from loft_hvd.runlog import RunLog, read_run_log
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.unit.test_balancer import Clock, train


def test_rank_0_logs_what_the_report_then_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "config", lambda: Config(log_dir=str(tmp_path)))

    def work(transport: LocalTransport) -> None:
        clock = Clock()
        balancer = loft.Balancer(64, "report", interval=5, transport=transport, clock=clock)
        fetch_s = 4.0 if transport.rank == 1 else 1.0
        train(balancer, clock, fetch_s=fetch_s, compute_s=1.0, num_steps=10)

    run_ranks(4, work)
    (path,) = tmp_path.iterdir()
    text = render_text(read_run_log(path))
    assert "4 ranks, global_batch_size=64, policy report" in text
    assert "rank 1 is slow: fetch" in text


def test_a_log_stops_at_its_limit_and_says_so(tmp_path: Path) -> None:
    log = RunLog(tmp_path, max_bytes=300, clock=lambda: 0.0)
    for step in range(20):
        log.write("explain", step=step, text="x" * 40)
    assert log.path.stat().st_size < 400
    assert read_run_log(log.path)[-1]["kind"] == "full"
    assert RunLog(tmp_path, clock=lambda: 0.0).path != log.path


def test_a_cut_off_last_line_is_left_out_and_another_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "full", "step": 3}\n{"kind": "ti')
    assert len(read_run_log(path)) == 1
    path.write_text('{"kind": "ti\n{"kind": "full", "step": 3}\n')
    with pytest.raises(DataError, match="line 1"):
        read_run_log(path)


def test_a_file_that_cannot_be_written_warns_once_and_lets_the_run_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(tmp_path)
    log.path.unlink()
    log.path.mkdir()  # as a disk that takes nothing
    log.write("times", step=1)
    log.write("times", step=2)
    assert caplog.text.count("ends here") == 1

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.balance.plan import Plan
from loft_hvd.errors import ArgumentError, DataError, MismatchError, TransportError
from loft_hvd.pipeline.suspicion.report import WorkerReport
from loft_hvd.report.text import render_text
from loft_hvd.runlog import RunLog, read_run_log
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.worlds import environment
from tests.unit.test_balancer import Clock, train


def train_some(transport: LocalTransport, **options: Any) -> loft.Balancer:
    """Train ten steps in which rank 1 fetches four times as long."""
    clock = Clock()
    balancer = loft.Balancer(64, "report", interval=5, transport=transport, clock=clock, **options)
    fetch_s = 4.0 if transport.rank == 1 else 1.0
    train(balancer, clock, fetch_s=fetch_s, compute_s=1.0, num_steps=10)
    return balancer


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def kinds(path: Path) -> list[str]:
    return [entry["kind"] for entry in read_run_log(path)]


@pytest.mark.parametrize("by_argument", [True, False])
def test_rank_0_logs_what_the_report_then_says(tmp_path: Path, by_argument: bool) -> None:
    if by_argument:
        run_ranks(4, lambda transport: train_some(transport, log_dir=tmp_path))
    else:
        with environment(LOFT_HVD_LOG_DIR=str(tmp_path)):
            run_ranks(4, train_some)
    entries = read_run_log(only_file(tmp_path))
    assert [entry["step"] for entry in entries if entry["kind"] == "times"] == [5, 10]
    assert len(entries[-2]["ranks"]) == 4  # the fit
    text = render_text(entries)
    assert "4 ranks, global_batch_size=64, policy report" in text
    assert "rank 1 is slow: fetch" in text


def test_no_log_is_written_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_some(LocalWorld(1).transport(0)).log.path is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="log_dir="):
        RunLog(tmp_path / "file")


@pytest.mark.parametrize("who", ["balancer", "optimizer", "optimizer with a balancer"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_ends_with_the_reason_why_rank_0_cannot_write_its_log(
    world_size: int, who: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file"

    def work(transport: LocalTransport) -> str:
        def make() -> None:
            if who == "balancer":
                loft.Balancer(6, transport=transport, log_dir=folder)
            sgd = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
            has_one = who == "optimizer with a balancer"
            balancer = loft.Balancer(6, transport=transport) if has_one else None
            loft.DistributedOptimizer(sgd, transport=transport, log_dir=folder, balancer=balancer)

        with pytest.raises(ArgumentError) as caught:
            make()
        return str(caught.value)

    for rank, text in enumerate(run_ranks(world_size, work)):
        assert text.startswith("on rank 0: log_dir=" if rank else "log_dir=")
        assert str(folder) in text
        assert "name a folder that rank 0 may write to" in text


def test_an_optimizer_logs_with_its_balancer_or_alone(tmp_path: Path) -> None:
    transport = LocalWorld(1).transport(0)
    sgd = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    balancer = loft.Balancer(4, transport=transport)
    for name, options in {"both": {"balancer": balancer}, "alone": {}}.items():
        folder = tmp_path / name
        loft.DistributedOptimizer(sgd, transport=transport, log_dir=folder, **options)  # type: ignore[arg-type]
        assert "1 ranks" in render_text(read_run_log(only_file(folder)))
    assert balancer.log.path == only_file(tmp_path / "both")
    assert kinds(only_file(tmp_path / "both")) == ["run", "plan"]


def test_a_fault_is_on_disk_before_the_error_goes_on_and_only_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.step = 7
    error = TransportError("rank 2 was killed")

    def fail() -> None:
        with log.faults(), log.faults():
            raise error

    with pytest.raises(TransportError):
        fail()
    (entry,) = read_run_log(only_file(tmp_path))
    assert (entry["kind"], entry["error"], entry["step"]) == ("fault", "TransportError", 7)
    assert "TransportError at step 7: rank 2 was killed" in render_text([entry])


def test_ranks_that_part_ways_leave_a_fault_in_the_log(tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> str:
        balancer = loft.Balancer(8, interval=5, transport=transport, log_dir=tmp_path)
        balancer.step_ended(waited_s=0.0)
        if transport.rank == 1:
            balancer.history.append(Plan(9, 0, (4, 4)))  # a plan that only this rank has
        for _ in range(3):
            balancer.step_ended(waited_s=0.0)
        with pytest.raises(loft.LoftError, match="with plan 9"):
            balancer.step_ended(waited_s=0.0)
        return "done"

    assert run_ranks(2, work) == ["done", "done"]
    assert "MismatchError at step" in render_text(read_run_log(only_file(tmp_path)))


def test_suspicion_and_spread_are_reported(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    honest = WorkerReport((0,), 0.03, 0.5, 1.0, 0, 20, is_named=False)
    workers = [asdict(honest), asdict(replace(honest, ranks=(1,), suspicion=0.97, is_named=True))]
    log.write("suspicion", num_steps=20, workers=workers)
    log.write("spread", ratios=[1.1, float("nan")], usual=1.1)
    text = render_text(read_run_log(only_file(tmp_path)))
    assert re.search(r"^ +0 +0.03 [^A-Z]*$", text, re.MULTILINE)
    assert re.search(r"^ +1 +0.97 .*STANDS OUT$", text, re.MULTILINE)
    assert "1.10, unknown" in text


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("fit", ranks=[{"hits": float("inf"), "knee": (1.0, float("nan"))}])
    line = json.loads(only_file(tmp_path).read_text(), parse_constant=pytest.fail)
    assert line["ranks"] == [{"hits": None, "knee": [1.0, None]}]


def test_a_log_stops_at_its_limit_and_says_so(tmp_path: Path) -> None:
    log = RunLog(tmp_path, max_bytes=300, clock=lambda: 0.0)
    for step in range(20):
        log.step = step
        log.write("explain", text="x" * 40)
    assert log.path is not None
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
    assert log.path is not None
    log.path.unlink()
    log.path.mkdir()  # as a disk that takes nothing
    log.write("times", step=1)
    log.write("times", step=2)
    assert caplog.text.count("ends here") == 1


def test_training_leaves_the_root_logger_and_the_screen_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = (list(root.handlers), list(root.filters), root.level, root.disabled)
    run_ranks(2, lambda transport: train_some(transport, log_dir=tmp_path))
    assert (list(root.handlers), list(root.filters), root.level, root.disabled) == before
    assert capfd.readouterr() == ("", "")


def _touches_root(call: ast.Call) -> bool:
    """Say whether a call configures the root logger, or logs to it."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        return False
    if function.value.id != "logging":
        return False
    if function.attr == "getLogger":
        return not call.args
    levels = ("debug", "info", "warning", "error", "exception", "critical", "log")
    return function.attr in (*levels, "basicConfig", "disable", "captureWarnings")


@pytest.mark.parametrize(
    "path", sorted(Path(loft.__file__).parent.rglob("*.py")), ids=lambda path: path.name
)
def test_no_code_touches_the_root_logger(path: Path) -> None:
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    assert [call.lineno for call in calls if _touches_root(call)] == []


def test_a_worker_that_stands_out_is_logged_while_training(tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> None:
        random = torch.Generator().manual_seed(transport.rank)
        layer = torch.nn.Linear(64, 1, bias=False)
        torch.nn.init.constant_(layer.weight, 0.1)  # the same on every rank, in any order of tests
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.0),
            layer.named_parameters(),
            rule=loft.TrimmedMean(f=1),
            transport=transport,
            log_dir=tmp_path,
        )
        loft.attacks.attach(optimizer, loft.attacks.SignFlip(scale=10), ranks=[3])
        for _ in range(81):
            optimizer.zero_grad()
            (1 + layer(torch.randn(1, 64, generator=random))).square().sum().backward()
            optimizer.step()

    run_ranks(4, work)
    text = render_text(read_run_log(only_file(tmp_path)))
    assert re.search(r"^ +3 +\d\.\d\d .*STANDS OUT$", text, re.MULTILINE), text
    assert text.count("STANDS OUT") == 1


def make_balancer(transport: LocalTransport, log_dir: Path) -> None:
    loft.Balancer(8 + 2 * transport.rank, transport=transport, log_dir=log_dir)


def make_optimizer(transport: LocalTransport, log_dir: Path) -> None:
    sgd = torch.optim.SGD(torch.nn.Linear(2 + transport.rank, 1).parameters(), lr=0.1)
    loft.DistributedOptimizer(sgd, transport=transport, log_dir=log_dir)


@pytest.mark.parametrize("make", [make_balancer, make_optimizer])
def test_ranks_that_were_given_different_things_leave_a_fault_in_the_log(
    make: Callable[[LocalTransport, Path], None], tmp_path: Path
) -> None:
    def work(transport: LocalTransport) -> None:
        with pytest.raises(MismatchError):
            make(transport, tmp_path)

    run_ranks(2, work)
    assert "MismatchError at step 0: " in render_text(read_run_log(only_file(tmp_path)))


def test_a_log_folder_that_works_is_taken_after_one_that_did_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = RunLog(None)
    log.try_open(tmp_path / "file" / "below")
    assert "no run log can be made there" in log.refusal
    log.try_open(tmp_path / "good")
    assert log.refusal == ""
    assert log.path is not None

from __future__ import annotations

import ast
import itertools
import json
import logging
import os
import re
import resource
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.balance.explain import ranks_to_log
from loft_hvd.balance.interval import RankTimes
from loft_hvd.balance.memory import logged_caps
from loft_hvd.balance.plan import Plan
from loft_hvd.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataError,
    MismatchError,
    TransportError,
)
from loft_hvd.optimizer.options import batches_of
from loft_hvd.pipeline.suspicion.report import WorkerReport
from loft_hvd.report.page import render_page
from loft_hvd.report.text import render_text
from loft_hvd.runlog import RunLog, commit_near, newest_log, read_run_log
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.clock import Clock
from tests.support.live import Run
from tests.support.worlds import environment
from tests.unit.test_balancer import train


def train_some(transport: LocalTransport, **options: Any) -> loft.Balancer:
    """Train ten steps in which rank 1 fetches four times as long."""
    clock = Clock()
    balancer = loft.Balancer(64, "report", interval=5, transport=transport, clock=clock, **options)
    fetch_s = 4.0 if transport.rank == 1 else 1.0
    train(balancer, clock, fetch_s=fetch_s, compute_s=1.0, num_steps=10)
    balancer.explain()  # once rank 0 is ready with the last interval: it also writes the log
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
    assert kinds(only_file(tmp_path / "both")) == ["run", "plan", "rules"]


def test_a_log_says_how_many_batches_a_step_has(tmp_path: Path) -> None:
    transport = LocalWorld(1).transport(0)
    balancer = loft.Balancer(4, transport=transport, log_dir=tmp_path)
    sgd = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    loft.DistributedOptimizer(
        sgd, transport=transport, balancer=balancer, backward_passes_per_step=4
    )
    run, schedule = (
        each for each in read_run_log(only_file(tmp_path)) if each["kind"] in ("run", "schedule")
    )
    assert (run["num_passes"], schedule["num_passes"]) == (1, 4)


def test_a_log_says_from_which_batch_on_steps_have_more_passes(tmp_path: Path) -> None:
    transport = LocalWorld(1).transport(0)
    balancer = loft.Balancer(4, "report", transport=transport, log_dir=tmp_path)
    layer = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer = loft.DistributedOptimizer(sgd, transport=transport, balancer=balancer)
    batches = iter(loft.DataLoader(TensorDataset(torch.ones(64, 1)), balancer))
    for num_passes in (1, 1, 1, 4, 4):
        if num_passes != optimizer.backward_passes_per_step:
            optimizer.set_backward_passes_per_step(num_passes)
        for _ in range(num_passes):
            layer(next(batches)[0]).sum().backward()
        optimizer.step()
    balancer.load_state_dict(balancer.state_dict())
    told = [
        (each["step"], each["next_batch"], each["num_passes"])
        for each in read_run_log(only_file(tmp_path))
        if each["kind"] in ("run", "schedule")
    ]
    assert told == [(0, 0, 1), (3, 3, 4), (5, 11, 4)]


def test_a_log_says_why_plans_were_made_and_what_models_expect(tmp_path: Path) -> None:
    run_ranks(2, lambda transport: train_run(transport, tmp_path))
    entries = read_run_log(only_file(tmp_path))
    run, made, plans, fits = (
        [entry for entry in entries if entry["kind"] == kind]
        for kind in ("run", "decision", "plan", "fit")
    )
    assert run[0]["times_at"] == 20
    assert run[0]["host"]
    assert [each["plan_id"] for each in made] == [each["plan_id"] for each in plans[1:]] != []
    assert made[0]["sizes"] == plans[1]["sizes"]
    assert made[0]["measured_s"] > made[0]["predicted_s"] > 0
    # A sample takes 10 ms on rank 0 and 30 ms on rank 1.
    sizes = plans[fits[-1]["plan_id"]]["sizes"]
    expected = [0.01 * sizes[0], 0.03 * sizes[1]]
    assert [each["predicted_s"] for each in fits[-1]["ranks"]] == pytest.approx(expected, rel=0.02)
    assert fits[-1]["predicted_s"] == pytest.approx(max(expected), rel=0.02)


def test_a_log_says_that_no_model_expects_anything(tmp_path: Path) -> None:
    run_ranks(2, lambda transport: train_some(transport, log_dir=tmp_path))  # clocks of their own
    (*_, fit) = (each for each in read_run_log(only_file(tmp_path)) if each["kind"] == "fit")
    assert fit["ranks"][1]["is_poor"]
    assert fit["ranks"][1]["predicted_s"] is fit["predicted_s"] is None


def train_run(transport: LocalTransport, folder: Path) -> None:
    """Train until there is another plan, with rank 1 three times as slow."""
    run = Run(transport, log_dir=folder)
    for _ in range(60):
        run.step()
    run.balancer.explain()


def test_what_ranks_read_of_a_store_is_in_the_log_of_rank_0(tmp_path: Path) -> None:
    balancer = loft.Balancer(4, transport=LocalWorld(1).transport(0), log_dir=tmp_path)
    balancer.note_reads([], epoch=0)
    reads = {"own": 3, "peer": 1, "source": 0, "own_bytes": 9, "peer_bytes": 2, "source_bytes": 0}
    balancer.note_reads([reads] * 40, epoch=1)
    (entry,) = (each for each in read_run_log(only_file(tmp_path)) if each["kind"] == "store")
    assert entry["epoch"] == 1
    assert entry["ranks"][0] == {"rank": 0, **reads}
    assert len(entry["ranks"]) == 32


def test_scalars_of_a_script_are_in_rank_0s_log(tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> None:
        model = torch.nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = loft.DistributedOptimizer(sgd, transport=transport, log_dir=tmp_path)
        loss = model(torch.ones(1, 2)).sum()
        optimizer.log_scalars(loss=loss, rank=transport.rank, lost=float("nan"))

    run_ranks(2, work)
    (entry,) = (each for each in read_run_log(only_file(tmp_path)) if each["kind"] == "scalars")
    assert entry["values"]["rank"] == 0
    assert isinstance(entry["values"]["loss"], float)
    assert entry["values"]["lost"] is None


@pytest.mark.parametrize(
    "value", ["0.3", None, 1j, torch.ones(2), torch.ones(1) * 1j, [1.0], 10**400, np.ones(2)]
)
def test_a_scalar_that_is_no_number_is_an_error_on_every_rank(value: Any, tmp_path: Path) -> None:
    for folder in (tmp_path, None):  # as rank 0, and as the others
        with pytest.raises(ArgumentTypeError, match="log_scalars: loss="):
            RunLog(folder).write_scalars({"loss": value})
    assert only_file(tmp_path).read_text() == ""


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.ones(1), torch.ones(1, 1)])
def test_a_scalar_may_be_any_real_number(value: Any, tmp_path: Path) -> None:
    RunLog(tmp_path).write_scalars({"loss": value})
    (entry,) = read_run_log(only_file(tmp_path))
    assert entry["values"] == {"loss": 1.0}


def test_a_log_of_a_loaded_state_says_when_the_first_times_come(tmp_path: Path) -> None:
    transport = LocalWorld(1).transport(0)
    balancer = loft.Balancer(4, transport=transport, interval=20, log_dir=tmp_path)
    state = balancer.state_dict() | {"num_steps": 1000, "next_step": 1000}
    balancer.load_state_dict(state)
    sgd = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    loft.DistributedOptimizer(sgd, transport=transport, balancer=balancer)
    entries = read_run_log(only_file(tmp_path))
    assert "not measured yet, first at step 1020" in render_text(entries)


def test_times_say_when_their_interval_began(tmp_path: Path) -> None:
    run_ranks(2, lambda transport: train_some(transport, log_dir=tmp_path))
    entries = read_run_log(only_file(tmp_path))
    times = [each for each in entries if each["kind"] == "times"]
    assert [(each["since"], each["step"]) for each in times] == [(0, 5), (5, 10)]


def test_commit_of_a_script_is_unknown_in_a_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert commit_near(Path()) is None


@pytest.mark.parametrize("how", ["branch", "packed", "detached", "worktree"])
def test_commit_of_a_script_is_found_without_git(how: str, tmp_path: Path) -> None:
    commit, home, folder = "0123456789abcdef" * 2 + "01234567", tmp_path / ".git", tmp_path / "a/b"
    folder.mkdir(parents=True)
    (home / "refs/heads").mkdir(parents=True)
    (home / "HEAD").write_text(f"{commit}\n" if how == "detached" else "ref: refs/heads/main\n")
    if how == "branch":
        (home / "refs/heads/main").write_text(f"{commit}\n")
    elif how != "detached":
        (home / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    if how == "worktree":
        (home / "worktrees/b").mkdir(parents=True)
        (home / "worktrees/b/HEAD").write_text("ref: refs/heads/main\n")
        (home / "worktrees/b/commondir").write_text("../..\n")
        (folder / ".git").write_text(f"gitdir: {home / 'worktrees/b'}\n")
    assert commit_near(folder) == commit[:12]


def test_commit_of_a_script_may_be_unknown(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert commit_near(tmp_path) is None


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
        balancer.step_ended()
        if transport.rank == 1:
            balancer.history.append(Plan(9, 0, (4, 4)))  # a plan that only this rank has
        for _ in range(3):
            balancer.step_ended()
        with pytest.raises(loft.LoftError, match="with plan 9"):
            balancer.step_ended()
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


def test_caps_faults_and_plans_find_room_in_a_log_that_was_full_long_ago(tmp_path: Path) -> None:
    log = RunLog(tmp_path, max_bytes=40_000, clock=lambda: 0.0)
    wanted = []
    for step in range(2000):
        log.step = step
        log.write("times", num_ranks=1, ranks=["x" * 100])
        log.write("explain", text="y" * 200)
        if step % 250 == 0:
            log.write("plan", plan_id=step, first_step=step, sizes=[4])
            log.write("fault", error="E", text=str(step))
            wanted += [("plan", step), ("fault", step)]
    log.write("cap", rank=0, device="a/0", cap=16, size=24, source="out of memory")
    entries = read_run_log(only_file(tmp_path))
    lasting = [
        (each["kind"], each["step"]) for each in entries if each["kind"] in ("plan", "fault")
    ]
    assert lasting == wanted
    assert logged_caps(tmp_path) == {"a/0": 16}
    assert only_file(tmp_path).stat().st_size <= 40_000
    # The past thins out, and what was left out is counted.
    steps = [each["step"] for each in entries if each["kind"] == "times"]
    assert steps[-1] == 1999
    assert steps[0] < 400
    gaps = [after - before for before, after in pairwise(steps)]
    ages = [2000 - step for step in steps]
    assert gaps[-1] == 1
    assert all(gap <= 1 + 0.5 * age for gap, age in zip(gaps, ages, strict=False))
    (told,) = [each["num_lines"] for each in entries if each["kind"] == "thinned"]
    assert told == 4000 - sum(each["kind"] in ("times", "explain") for each in entries)
    assert f"{told} older lines" in render_text([each for each in entries if "ranks" not in each])


def test_a_log_filled_by_what_must_stay_goes_on(tmp_path: Path) -> None:
    log = RunLog(tmp_path, max_bytes=2_000)
    for plan_id in range(100):
        log.write("plan", plan_id=plan_id, first_step=plan_id, sizes=[4] * 50)
    plans = [each["plan_id"] for each in read_run_log(only_file(tmp_path))]
    assert plans == list(range(100))


@contextmanager
def full_disk(path: Path, *, num_free: int) -> Iterator[None]:
    """Let no file of this process grow beyond the size of one, and so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + num_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_free", [0, 10, 150])
def test_after_a_full_disk_the_log_goes_on_with_what_must_stay(
    num_free: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(tmp_path)
    path = only_file(tmp_path)
    log.write("run", world_size=1, text="x" * 20_000)  # so that pytest's own files are smaller
    with full_disk(path, num_free=num_free):  # a line may be taken in part
        log.write("times", ranks=["x" * 200])
        log.write("cap", rank=0, device="a/0", cap=16, text="x" * 200)
        log.write("fault", error="E", text="x" * 200)
    assert caplog.text.count("cannot be written") == 1
    log.write("times", ranks=[])
    kinds_now = ["run", "thinned", "cap", "fault", "times"]
    assert kinds(path) == kinds_now
    assert logged_caps(tmp_path) == {"a/0": 16}
    with full_disk(path, num_free=num_free):
        log.write("plan", plan_id=0, text="x" * 200)
    assert caplog.text.count("cannot be written") == 2
    log.write("explain", text="")
    assert kinds(path) == [*kinds_now, "plan", "explain"]


def test_a_log_that_cannot_be_thinned_on_a_full_disk_is_thinned_later(tmp_path: Path) -> None:
    log = RunLog(tmp_path, max_bytes=40_000)
    path = only_file(tmp_path)
    for log.step in range(19):
        log.write("times", ranks=["x" * 2_000])
    log.step = 19
    with full_disk(path, num_free=-30_000):  # no room for the thinner file beside this one
        log.write("times", ranks=["x" * 2_000])
        log.write("cap", rank=0, device="a/0", cap=16)
    assert only_file(tmp_path) == path  # nothing else is left there
    assert kinds(path) == ["times"] * 19
    log.write("times", ranks=["x" * 2_000])
    assert kinds(path) == ["times"] * 8 + ["thinned", "cap", "times"]
    assert logged_caps(tmp_path) == {"a/0": 16}


@pytest.mark.parametrize("world_size", [4, 1000])
def test_a_line_of_times_stays_short_in_a_large_world(world_size: int) -> None:
    def times(rank: int) -> RankTimes:
        return RankTimes(rank, 20, 8.0 * (rank != 3), 8.0, 0, 0, 0, 1.0 + rank % 97, 0, 0, 0, 0)

    all_ranks = [times(rank) for rank in range(world_size)]
    shown = ranks_to_log(all_ranks, most=32)
    assert len(shown) == len(set(shown)) == min(world_size, 32)
    assert list(shown) == sorted(shown)
    if world_size > 32:  # the slowest and the fastest are there, and what is usual
        work = sorted(all_ranks[rank].busy_s for rank in shown)
        every = sorted(each.busy_s for each in all_ranks if each.samples)
        assert (work[0], work[-1]) == (every[0], every[-1])
        assert statistics.median(work) == pytest.approx(statistics.median(every), rel=0.05)


def test_a_cut_off_last_line_is_left_out_and_another_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "thinned", "step": 3}\n{"kind": "ti')
    assert len(read_run_log(path)) == 1
    path.write_text('{"kind": "ti\n{"kind": "thinned", "step": 3}\n')
    with pytest.raises(DataError, match="line 1"):
        read_run_log(path)
    path.write_text('{"kind": "thinned", "step": 3}\n\n1\n')  # an empty line counts, as in editors
    with pytest.raises(DataError, match="line 3"):
        read_run_log(path)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"kind": "plan", "step": 1}\n\xff\n{}',
        b"1\n2\n",
        b"x" * (5 * 2**20),
        b'{"kind": "times", "step": 1, "ranks": [{}]}\n{"kind": "full", "step": 2}\n',
        b'{"kind": ["run"], "step": "1"}\n',
    ],
)
def test_a_file_that_is_no_log_is_our_error(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "loft-x.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match="report"):
        render_text(read_run_log(path))


def test_what_a_log_says_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "loft-x.jsonl"
    path.write_text(json.dumps({"kind": "fault", "step": 1, "error": "E", "text": "\x1b[2J\ud800"}))
    text, page = render_text(read_run_log(path)), render_page(read_run_log(path), title="\udc80")
    assert "E at step 1: \\x1b[2J\\ud800" in text
    page.encode()
    assert "\x1b" not in text + page


def test_old_logs_cannot_end_a_run_at_its_start(tmp_path: Path) -> None:
    good = {"kind": "cap", "device": "a/0", "cap": 16}
    wrong: list[Any] = [{"cap": True}, {"cap": 0}, {"cap": -8}, {"device": 3}, {"cap": 10**400}]
    lines = [json.dumps(good), *(json.dumps(good | each) for each in wrong)]
    lines += ['{"kind": "cap", ' + "[" * 100_000, '{"kind": "cap"', "\\xff"]
    (tmp_path / "loft-1.jsonl").write_text("\n".join(lines))
    (tmp_path / "loft-2.jsonl").mkdir()
    os.mkfifo(tmp_path / "loft-3.jsonl")  # opening it would wait for a writer
    assert logged_caps(tmp_path) == {"a/0": 16}


def test_a_file_that_cannot_be_written_warns_once_and_lets_the_run_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(tmp_path)
    assert log.path is not None
    log.path.unlink()
    log.path.mkdir()  # as a disk that takes nothing
    log.write("times", step=1)
    log.write("times", step=2)
    assert caplog.text.count("cannot be written") == 1


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


def test_a_world_without_a_balancer_begins_with_a_run_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write_run(world_size=4)
    batches_of(None, log, None, rank=0, world_size=3)
    assert log.path is not None
    runs = [entry for entry in read_run_log(log.path) if entry["kind"] == "run"]
    assert [entry["world_size"] for entry in runs] == [4, 3]


def test_a_folder_that_may_not_be_entered_has_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loft-1.jsonl").touch()

    def refuse(path: Path) -> bool:
        raise PermissionError(str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(DataError, match="no run log"):
        newest_log(tmp_path)


def test_a_log_of_lines_that_must_stay_is_written_anew_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, real, sizes = RunLog(tmp_path, max_bytes=2000), RunLog._thin, list[int]()

    def thin(log: RunLog, path: Path) -> None:
        sizes.append(path.stat().st_size)
        real(log, path)

    monkeypatch.setattr(RunLog, "_thin", thin)
    for step in range(400):
        log.write("plan", plan_id=step, first_step=step, sizes=[1, 2, 3])
    assert kinds(only_file(tmp_path)) == ["plan"] * 400
    assert sizes[0] > 1800
    assert all(after > 1.9 * before for before, after in itertools.pairwise(sizes))

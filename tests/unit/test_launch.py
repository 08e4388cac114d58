"""How jobs over several ranks are started and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from loft_hvd.doctor import launch as launching
from loft_hvd.doctor.inspect import HorovodBuild
from loft_hvd.doctor.launch import launch_command, run_limited
from loft_hvd.errors import MissingDependencyError

_LAUNCHERS = {"horovodrun": "/bin/horovodrun", "mpirun": "/bin/mpirun"}
_SCRIPT = ("train.py",)


@pytest.mark.parametrize(
    ("built", "programs", "wanted", "starts"),
    [
        (("MPI", "Gloo"), ("horovodrun", "mpirun"), None, "/bin/horovodrun -np 3 --gloo"),
        (("MPI",), ("horovodrun", "mpirun"), None, "/bin/mpirun --allow-run-as-root"),
        (("MPI", "Gloo"), ("mpirun",), None, "/bin/mpirun --allow-run-as-root"),
        (("MPI", "Gloo"), ("horovodrun", "mpirun"), "mpi", "/bin/mpirun --allow-run-as-root"),
        (("MPI", "Gloo"), ("horovodrun", "mpirun"), "gloo", "/bin/horovodrun -np 3 --gloo"),
    ],
)
def test_launcher_is_one_that_horovod_was_built_for(
    monkeypatch: pytest.MonkeyPatch,
    built: tuple[str, ...],
    programs: Sequence[str],
    wanted: str | None,
    starts: str,
) -> None:
    monkeypatch.setattr(launching, "launcher", lambda n: _LAUNCHERS[n] if n in programs else "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    build = HorovodBuild("0.28.1", ("PyTorch",), built)
    command = launch_command(build, _SCRIPT, num_ranks=3, controller=wanted)
    assert " ".join(command).startswith(starts)
    assert command[-1] == "train.py"
    assert command[command.index("-np") + 1] == "3"


def test_torchrun_needs_no_horovod() -> None:
    build = HorovodBuild("", (), (), trouble="there is none")
    command = launch_command(build, ("-m", "train"), num_ranks=3, controller="torchrun")
    assert command[:3] == (sys.executable, "-m", "torch.distributed.run")
    assert command[-4:] == ("--nproc-per-node", "3", "-m", "train")


def test_only_root_is_allowed_to_run_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "launcher", _LAUNCHERS.__getitem__)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    command = launch_command(HorovodBuild("", (), ("MPI",)), _SCRIPT, num_ranks=2)
    assert "--allow-run-as-root" not in command


@pytest.mark.parametrize("built", [(), ("Gloo",), ("MPI",)])
@pytest.mark.parametrize("wanted", [None, "gloo", "mpi"])
def test_without_a_launcher_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, built: tuple[str, ...], wanted: str | None
) -> None:
    monkeypatch.setattr(launching, "launcher", lambda name: "")
    with pytest.raises(MissingDependencyError, match="make setup"):
        launch_command(HorovodBuild("", (), built), _SCRIPT, num_ranks=2, controller=wanted)


@pytest.mark.parametrize(("status", "is_over"), [(0, True), (3, False)])
def test_job_is_over_only_with_status_0(status: int, is_over: bool) -> None:
    done = run_limited(("sh", "-c", f"echo said; exit {status}"), timeout_s=20)
    assert done.is_over is is_over
    assert done.output == "said\n"


def test_job_over_its_limit_is_ended_with_all_it_started() -> None:
    done = run_limited(("sh", "-c", "sleep 60 & sleep 60"), timeout_s=0.2)
    assert not done.is_over
    assert "not done within 0.2 s" in done.output
    assert done.seconds < 30


def test_what_has_left_the_group_does_not_hold_up_the_end() -> None:
    done = run_limited(("sh", "-c", "echo said; setsid sleep 25 & sleep 25"), timeout_s=0.5)
    assert done.output.startswith("said\n")
    assert done.seconds < 20  # the pipe stays open for 25 s


def test_each_line_is_told_while_the_job_goes_on(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    wait = "while [ ! -e $0 ]; do sleep 0.05; done"  # for ever, unless the line is told before
    told: list[str] = []

    def on_line(line: str) -> None:
        told.append(line)
        heard.touch()

    script = f"echo first; {wait}; printf 'two\\r\\nhalf'"
    done = run_limited(("sh", "-c", script, str(heard)), timeout_s=30, on_line=on_line)
    assert done.is_over
    assert told == ["first", "two"]
    assert done.output == "first\ntwo\nhalf"


_JOB = """
import sys
from loft_hvd.doctor.launch import run_limited
run_limited(("sh", "-c", "echo $$ > " + sys.argv[1] + "; exec sleep 50"), timeout_s=50)
"""


def test_a_job_ends_with_the_command_that_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    command = subprocess.Popen((sys.executable, "-c", _JOB, str(file)))
    ends = time.monotonic() + 40
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < ends
        time.sleep(0.05)
    command.send_signal(signal.SIGTERM)
    assert command.wait(timeout=20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)

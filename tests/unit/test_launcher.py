"""The launcher of a job that has lost a host is found by its program, and ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loft_hvd.transport.heartbeat.launcher import find_launcher

# A rank of a launcher that does not end: the copy of a shell that runs it waits for its input.
RANK = """
import sys
from loft_hvd.transport.heartbeat.launcher import LauncherGuard
from loft_hvd.transport.heartbeat.process import own_process
guard = LauncherGuard(own_process(), limit_s=20.0, grace_s=0.2)
guard.start()
print(guard.finds_launcher, guard.process is not None, flush=True)
"""


def make_process(proc: Path, pid: int, *, parent: int, program: str) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "stat").write_text(f"{pid} (a (b) mpirun) S {parent} 0 0")
    (proc / str(pid) / "exe").symlink_to(program)


@pytest.mark.parametrize(
    ("programs", "found"),
    [
        (["/usr/bin/orterun", "/bin/bash", "/usr/bin/python3"], 10),
        (["/usr/bin/mpirun", "/bin/bash", "/opt/bin/prterun"], 12),  # the nearest
        (["/usr/bin/orted", "/bin/bash", "/home/me/mpirun.py"], None),
        (["/usr/bin/mpirun (deleted)"], None),  # what it is now nobody knows
    ],
)
def test_the_nearest_launcher_above_a_process_is_found_by_its_program(
    programs: list[str], found: int | None, tmp_path: Path
) -> None:
    for number, program in enumerate(programs):
        make_process(tmp_path, 10 + number, parent=9 + number if number else 1, program=program)
    last = 10 + len(programs)
    make_process(tmp_path, last, parent=last - 1, program="/usr/bin/python3")
    assert find_launcher(last, proc=tmp_path) == found


def test_of_a_circle_of_processes_there_is_no_launcher(tmp_path: Path) -> None:
    make_process(tmp_path, 10, parent=11, program="/bin/bash")
    make_process(tmp_path, 11, parent=10, program="/bin/bash")
    assert find_launcher(11, proc=tmp_path) is None


def test_a_launcher_of_another_user_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_process(tmp_path, 10, parent=1, program="/usr/bin/mpirun")
    make_process(tmp_path, 11, parent=10, program="/usr/bin/python3")
    assert find_launcher(11, proc=tmp_path) == 10
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert find_launcher(11, proc=tmp_path) is None


@pytest.mark.parametrize(
    ("program", "trap", "ends_by"),
    [
        ("orterun", "", signal.SIGTERM),
        ("prterun", "trap '' TERM;", signal.SIGKILL),  # the rank's guard loses patience
        ("bash", "", None),
    ],
)
def test_a_launcher_that_outlives_its_rank_is_ended_and_nothing_else(
    program: str, trap: str, ends_by: signal.Signals | None, tmp_path: Path
) -> None:
    shell = shutil.copy(os.path.realpath("/bin/sh"), tmp_path / program)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with subprocess.Popen(
        [shell, "-c", f"{trap} '{sys.executable}' '{script}'; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline().split() == [str(ends_by is not None)] * 2
        if ends_by is None:
            with pytest.raises(subprocess.TimeoutExpired):
                launcher.wait(timeout=0.5)
            launcher.communicate("go on\n", timeout=20)
        assert launcher.wait(timeout=20) == (0 if ends_by is None else -ends_by)

"""The launcher of a job that has lost a host is found by its program, and ended."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loft_hvd.failures.guards import _LAUNCHER_SCRIPT, find_launcher

# A rank of a launcher that does not end: the copy of a shell that runs it waits for its input.
RANK = """
import os, resource, sys
from loft_hvd.failures.guards import LauncherGuard
from loft_hvd.failures.process import own_process
num_open = int(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(num_open)]
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


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("program", "trap", "ends_by", "num_open"),
    [
        ("orterun", "", signal.SIGTERM, 0),
        ("orterun", "", signal.SIGTERM, 1100),  # rank 0 of 1,000 holds a link to each
        ("prterun", "trap '' TERM;", signal.SIGKILL, 0),  # the rank's guard loses patience
        ("bash", "", None, 0),
    ],
)
def test_a_launcher_that_outlives_its_rank_is_ended_and_nothing_else(
    program: str, trap: str, ends_by: signal.Signals | None, num_open: int, tmp_path: Path
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit != resource.RLIM_INFINITY and limit < num_open + 100:
        pytest.skip(f"the limit of open files here is {limit}")
    shell = shutil.copy(os.path.realpath("/bin/sh"), tmp_path / program)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with subprocess.Popen(
        [shell, "-c", f"{trap} '{sys.executable}' '{script}' {num_open}; read line"],
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


def test_who_ends_by_itself_meanwhile_keeps_no_signal_from_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []

    def send(handle: int, number: int) -> None:
        sent.append((handle, number))
        raise ProcessLookupError

    with (
        subprocess.Popen(["/bin/true"]) as rank,
        subprocess.Popen(
            ["/bin/sh", "-c", "sleep 5 & echo started; wait"], stdout=subprocess.PIPE, text=True
        ) as launcher,
    ):
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "started\n"
        handles = [os.pidfd_open(each.pid) for each in (launcher, rank)]
        asked = [launcher.pid, *handles, 20.0, 0.01]
        monkeypatch.setattr(sys, "argv", ["guard", *map(str, asked)])
        with monkeypatch.context() as patch:
            patch.setattr(signal, "pidfd_send_signal", send)
            exec(_LAUNCHER_SCRIPT, {})
        children = {handle for handle, _ in sent} - set(handles)
        for handle in (*children, handles[0]):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    for handle in (*children, *handles):
        os.close(handle)
    (child,) = children
    both = [handles[0], child]
    assert sent == [(each, n) for n in (signal.SIGTERM, signal.SIGKILL) for each in both]

"""The guard kills a process that stays stopped, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loft_hvd.failures.guards import ProcessGuard
from loft_hvd.failures.process import RankProcess

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc"),
]


@pytest.fixture
def guarded() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that would run for a minute."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def guard_of(process: subprocess.Popen[bytes], limit_s: float) -> ProcessGuard:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return ProcessGuard(7, RankProcess(0, process.pid, int(fields[19]), "here"), limit_s=limit_s)


def test_a_process_that_stays_stopped_is_killed(
    guarded: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    guard = guard_of(guarded, limit_s=1.0)
    os.kill(guarded.pid, signal.SIGSTOP)
    assert guarded.wait(timeout=20) == -signal.SIGKILL
    assert guard.process.wait(timeout=20) == 0  # and the guard ends with it
    guard.close()
    assert f"rank 7 (process {guarded.pid} on here) is frozen" in capfd.readouterr().err


@pytest.mark.long
def test_a_process_that_runs_or_goes_on_is_left_alone(guarded: subprocess.Popen[bytes]) -> None:
    guard = guard_of(guarded, limit_s=3.0)
    os.kill(guarded.pid, signal.SIGSTOP)
    time.sleep(1.5)  # less than the limit: this is about what does not happen
    os.kill(guarded.pid, signal.SIGCONT)
    time.sleep(4.0)
    assert guarded.poll() is None
    assert guard.process.poll() is None
    guarded.kill()
    assert guard.process.wait(timeout=20) == 0
    guard.close()

"""A launcher that tests fork ends, speaks and is bounded as one that was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.forked import Forked


def start(main: Callable[[], object], folder: Path) -> Forked:
    return Forked(main, ["told", "--so"], env={"WORD": "here"}, cwd=folder)


def told() -> None:
    words = (sys.argv, os.environ.get("WORD"), os.environ.get("PATH"), os.getcwd())
    sys.stdout.write(f"{words}\n")
    subprocess.run(["/bin/echo", "a child"], check=True)
    assert os.getsid(0) == os.getpid()


def fails() -> None:
    raise RuntimeError("for a reason")


@pytest.mark.parametrize(
    ("main", "status", "says"),
    [
        (told, 0, "(['told', '--so'], 'here', None, '"),
        (told, 0, "a child\n"),
        (sys.exit, 0, ""),
        (lambda: sys.exit(3), 3, ""),
        (lambda: sys.exit("in words"), 1, "in words\n"),
        (fails, 1, "RuntimeError: for a reason\n"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), -15, ""),
    ],
)
def test_it_ends_as_a_program_does(
    main: Callable[[], object], status: int, says: str, tmp_path: Path
) -> None:
    process = start(main, tmp_path)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == status, output
    assert says in output
    assert main is not told or str(tmp_path) in output


def stays() -> None:
    os.write(1, b"begun\n")
    time.sleep(60)


def test_a_wait_for_it_has_a_limit_and_can_go_on(tmp_path: Path) -> None:
    process = start(stays, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.3)
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (-9, "begun\n")

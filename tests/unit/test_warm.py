"""A launcher that is forked with its imports ends, speaks and is bounded as one that is started."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.warm import WarmProcess

SAYS = """
import os, sys
words = (sys.argv, os.environ["WORD"], "HOME" in os.environ, os.getcwd(), os.environ["RANK"])
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: two ranks write
"""


def torchrun(folder: Path, *words: str) -> WarmProcess:
    env = {"WORD": "here", "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    return WarmProcess(["torchrun", *words], env=env, cwd=folder)


def test_a_script_gets_what_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    process = torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", "says.py", "word")
    assert os.getsid(process.pid) == process.pid
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    told = f"['says.py', 'word'] here False {tmp_path}"
    assert sorted(output.splitlines())[-2:] == [f"{told} 0", f"{told} 1"]


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--help"], 0, "usage: torchrun"),
        (["--no-such-option"], 2, "error: the following arguments are required"),
        (["--standalone", "fails.py"], 1, "RuntimeError: for a reason"),
        (["--nnodes", "none", "fails.py"], 1, "ValueError"),
    ],
)
def test_it_ends_as_a_program_does(
    words: list[str], status: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "fails.py").write_text('raise RuntimeError("for a reason")')
    process = torchrun(tmp_path, *words)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, says in output) == (status, True), output
    assert "Logging error" not in output


def test_a_wait_for_it_has_a_limit_and_can_go_on(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text('import time\nprint("begun", flush=True)\ntime.sleep(60)')
    process = torchrun(tmp_path, "--standalone", "stays.py")
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=1.5)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 1, output
    assert "SignalException" in output

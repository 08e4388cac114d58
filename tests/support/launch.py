"""Start a command on several ranks, with a limit, and never leave a process behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.warm import MAINS, WarmProcess

__all__ = ["LAUNCHERS", "Finished", "launch", "launcher_here"]

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("gloo", "mpi")


@dataclass(frozen=True)
class Finished:
    """How a job ended.

    Attributes:
        returncode: the launcher's exit status; None when the limit was reached.
        output: stdout and stderr of all ranks.
        ended_at: when, in seconds since 1970.
    """

    returncode: int | None
    output: str
    ended_at: float

    def succeeded(self, num_finished: int | None = None) -> str:
        """Return what it said; it must have ended well, "has finished" said so many times."""
        assert self.returncode == 0, self.output[-9000:]
        if num_finished is not None:
            assert self.output.count("has finished") == num_finished, self.output[-9000:]
        return self.output

    def failed(self, says: str, *, within_s: float | None = None) -> None:
        """Fail unless it ended with an error that ``says`` finds, and no rank "has finished".

        ``within_s``: at most so long after the "fault at" that it told.
        """
        assert self.returncode not in (0, None), self.output[-9000:]
        assert "has finished" not in self.output
        assert re.search(says, self.output), self.output[-9000:]
        if within_s is not None:
            fault = re.search(r"fault at ([\d.]+)", self.output)
            assert fault is not None, self.output[-9000:]
            assert self.ended_at - float(fault[1]) <= within_s, self.output[-9000:]


def _mpirun() -> str | None:
    """Return the path of mpirun: the one beside this Python, which Horovod was built with."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(
        "mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    )


def launcher_here(launcher: str) -> bool:
    """Say whether this machine has the launcher."""
    return launcher != "mpi" or _mpirun() is not None


def launch(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    launcher: str = "gloo",
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    during: Callable[[], None] | None = None,
) -> Finished:
    """Run ``python ARGUMENTS`` on every rank; skip the test where the launcher is not here.

    Args:
        num_ranks: ranks on this machine.
        arguments: what python is given.
        launcher: "gloo" (horovodrun), "mpi" (mpirun), "elastic" (horovodrun with discovery),
            "torchrun" or "none" (python alone, one rank).
        timeout_s: after so many seconds the whole job is ended.
        env: variables on top of this process's.
        options: more options of the launcher.
        during: called once the job has been started.
    """
    if not launcher_here(launcher):
        pytest.skip("there is no mpirun (make setup; Debian: openmpi-bin libopenmpi-dev)")
    python = [sys.executable, *arguments]
    if launcher == "none":
        command = python
    elif launcher == "torchrun":
        options = ["--standalone", *options, "--nproc-per-node", str(num_ranks)]
        command = ["torchrun", *options, *arguments]
    elif launcher in ("gloo", "elastic"):
        command = ["horovodrun", "--gloo", "-np", str(num_ranks), *options, *python]
    else:
        # Unbound, as Horovod advises: a rank bound to one core shares it with its loader processes.
        share = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = [_mpirun() or "mpirun", *root, *share, *options, "-np", str(num_ranks), *python]
    # A rank of a job that is itself started by a test must not see that test's own job.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_", "PMIX_"))}
    paths = [str(ROOT), kept.get("PYTHONPATH", "")]
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    kept |= env or {}
    process: WarmProcess | subprocess.Popen[str]
    if command[0] in MAINS:
        process = WarmProcess(command, env=kept, cwd=ROOT)
    else:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            env=kept,
            start_new_session=True,
        )
    try:
        if during is not None:
            during()
        output, _ = process.communicate(timeout=timeout_s)
        return Finished(process.returncode, output, time.time())
    except subprocess.TimeoutExpired:
        return Finished(None, _end(process), time.time())
    except BaseException:  # such as a test's own limit
        _end(process)
        raise


def _end(process: WarmProcess | subprocess.Popen[str]) -> str:
    """End a launcher and its ranks; returns what they have said."""
    os.killpg(process.pid, signal.SIGTERM)  # the launcher ends its ranks
    try:
        output, _ = process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output

"""Start a module of this library on several ranks, wait no longer than a limit, leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from loft_hvd.doctor.inspect import HorovodBuild, launcher
from loft_hvd.errors import MissingDependencyError

__all__ = ["CONTROLLERS", "Finished", "launch_command", "run_limited"]

_REST_S = 5.0  # longest wait for the last words of a job that was ended

CONTROLLERS = ("gloo", "mpi")


@dataclass(frozen=True)
class Finished:
    """How a job ended."""

    is_over: bool  # whether it ended by itself, with status 0
    seconds: float  # how long it took
    output: str  # what all ranks printed


def launch_command(
    build: HorovodBuild,
    script: Sequence[str],
    *,
    num_ranks: int,
    controller: str | None = None,
) -> tuple[str, ...]:
    """Return the command that runs ``python SCRIPT`` on every rank of this machine.

    ``controller`` is "gloo" (horovodrun) or "mpi" (mpirun); None takes the first that is there.
    """
    horovodrun, mpirun = launcher("horovodrun"), launcher("mpirun")
    python = (sys.executable, *script)
    if controller != "mpi" and "Gloo" in build.controllers and horovodrun:
        return (horovodrun, "-np", str(num_ranks), "--gloo", *python)
    if controller != "gloo" and "MPI" in build.controllers and mpirun:
        root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()  # as in a container
        # Unbound, and yielding: ranks share cores with each other and with their loader processes.
        kept = ("--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1")
        return (mpirun, *root, *kept, "-np", str(num_ranks), *python)
    wanted = {"gloo": "horovodrun with Gloo", "mpi": "mpirun with MPI"}
    needs = " or ".join(wanted.values()) if controller is None else wanted[controller]
    if build.trouble:
        raise MissingDependencyError(f"this needs {needs}: {build.trouble}; {build.advice}")
    raise MissingDependencyError(
        f"this needs {needs}; Horovod here has {', '.join(build.controllers) or 'neither'}: run "
        "`make setup`"
    )


def run_limited(command: Sequence[str], *, timeout_s: float) -> Finished:
    """Run a command; at the limit end everything that it started."""
    start_s = time.monotonic()
    with _sigterm_raises():  # before there is something that must not outlive this command
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a group of its own, so that all of it can be ended
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            output = f"{_end(process)}\nnot done within {timeout_s:g} s; ended"
        except BaseException:  # Ctrl-C and SIGTERM, too: ranks must not outlive the command
            _end(process)
            raise
    return Finished(process.returncode == 0, time.monotonic() - start_s, output)


def _end(process: subprocess.Popen[str]) -> str:
    """End a job's whole group; return what it had printed."""
    # Not to be ignored, as SIGTERM is: a launcher waits for ranks that hang.
    os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_REST_S)[0]
    except subprocess.TimeoutExpired as late:  # what has left the group holds the pipe open
        said = late.output or ""
        if process.stdout is not None:
            process.stdout.close()
        process.wait()  # it is killed; no pipe holds this up
        return said if isinstance(said, str) else said.decode(errors="replace")


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM leave this process by an exception, as Ctrl-C does."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # elsewhere it may not be set; or the program has its own way
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

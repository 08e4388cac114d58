"""Start a module of this library on several ranks, wait no longer than a limit, leave nothing."""

from __future__ import annotations

import codecs
import io
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from loft_hvd.doctor.inspect import HorovodBuild, launcher
from loft_hvd.errors import MissingDependencyError

__all__ = ["CONTROLLERS", "Finished", "launch_command", "run_limited"]

_REST_S = 5.0  # longest wait for the last words of a job that was ended

CONTROLLERS = ("gloo", "mpi", "torchrun")


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

    ``controller`` is "gloo" (horovodrun), "mpi" (mpirun) or "torchrun" (without Horovod); None
    takes the first of Horovod's that is there.
    """
    if controller == "torchrun":
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        return (*torchrun, "--nproc-per-node", str(num_ranks), *script)
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


class _Output:
    """What a job prints, kept as it comes.

    Args:
        on_line: told each whole line at once, without its end.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
        self._told: list[str] = []  # whole lines
        self._rest = ""  # of a line that goes on

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join([*self._told, self._rest])

    def read(self, process: subprocess.Popen[bytes], *, until_s: float) -> bool:
        """Read until nobody holds the pipe any more; False where somebody does at ``until_s``."""
        pipe = process.stdout
        assert pipe is not None
        if pipe.closed:
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while selector.select(max(until_s - time.monotonic(), 0.0)):
                chunk = os.read(pipe.fileno(), 1 << 16)
                self._take(self._decoder.decode(chunk, final=not chunk))
                if not chunk:
                    pipe.close()
                    return True
        return False

    def _take(self, text: str) -> None:
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            self._told.append(f"{line}\n")
            self._on_line(line)


def run_limited(
    command: Sequence[str], *, timeout_s: float, on_line: Callable[[str], None] = lambda line: None
) -> Finished:
    """Run a command; at the limit end everything that it started.

    ``on_line`` is told each line as soon as it is printed, and must not take long.
    """
    start_s = time.monotonic()
    output, too_late = _Output(on_line), ""
    with _sigterm_raises():  # before there is something that must not outlive this command
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that all of it can be ended
        )
        try:  # nothing before it: a signal that came there would leave the job behind
            _wait(process, output, until_s=start_s + timeout_s)
        except subprocess.TimeoutExpired:
            _end(process, output)
            too_late = f"\nnot done within {timeout_s:g} s; ended"
        except BaseException:  # Ctrl-C and SIGTERM, too: ranks must not outlive the command
            _end(process, output)
            raise
    is_over = process.returncode == 0
    return Finished(is_over, time.monotonic() - start_s, output.text + too_late)


def _wait(process: subprocess.Popen[bytes], output: _Output, *, until_s: float) -> None:
    """Read until a job has ended, and nobody holds its pipe; TimeoutExpired at ``until_s``."""
    if not output.read(process, until_s=until_s):
        raise subprocess.TimeoutExpired(process.args, until_s)
    process.wait(max(until_s - time.monotonic(), 0.0))


def _end(process: subprocess.Popen[bytes], output: _Output) -> None:
    """End a job's whole group, and read what it has printed."""
    # Not to be ignored, as SIGTERM is: a launcher waits for ranks that hang.
    os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    with process.stdout:
        try:
            output.read(process, until_s=time.monotonic() + _REST_S)
        finally:  # what has left the group may still hold the pipe
            process.wait()  # it is killed; no pipe holds this up


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

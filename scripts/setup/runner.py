"""What the set-up says, and the long commands it runs.

A command's output goes to a log in full; the screen gets a sign of life; nothing is left running.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["Runner", "Running", "SetupError", "clean_environ", "output_of", "say", "step"]

_TAIL_LINES = 20  # shown when a command fails: a compiler's last message fits
_GRACE_S = 5.0  # between asking a command to end and killing it
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only
_ERROR = re.compile(r"CMake Error|\berror:|ERROR:|Error:")
_SHOWN_ERRORS = 6
_PROGRESS = re.compile(r"\[ *\d+(%|/\d+)\] .*")  # make prints [ 12%], ninja [3/26]
# A parent `make` hands its flags and job server down; a user's pip settings may point elsewhere.
_UNWANTED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
_UNWANTED_PYTHON = ("PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__")


class SetupError(Exception):
    """The set-up cannot go on; the message says what is missing and the way out."""


def say(text: str) -> None:
    """Print one line at once, also when the output is a pipe."""
    print(text, flush=True)


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a step and say how long it took."""
    say(f"setup: {title}")
    start_s = time.monotonic()
    yield
    say(f"setup:   done in {time.monotonic() - start_s:.1f} s")


def clean_environ(environ: Mapping[str, str], *, bin_dir: Path | None = None) -> dict[str, str]:
    """Return a copy of ``environ`` without what would disturb a build; ``bin_dir`` comes first."""
    result = {k: v for k, v in environ.items() if k not in _UNWANTED + _UNWANTED_PYTHON}
    result.update(PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    if bin_dir is not None:
        result["PATH"] = f"{bin_dir}{os.pathsep}{environ.get('PATH', os.defpath)}"
    return result


def output_of(command: Sequence[str], *, timeout_s: float = 60.0, with_errors: bool = False) -> str:
    """Return what a short command prints, or "" when it fails.

    Warnings on standard error are no part of an answer; ``with_errors`` takes them, too.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if with_errors else subprocess.DEVNULL,
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace").strip()


class _Output:
    """Copies a command's output to the log and remembers its end; owns the thread that does so."""

    def __init__(self, stream: IO[bytes], log: IO[bytes]) -> None:
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.errors: list[str] = []  # the first ones: what follows is often only noise
        self.progress = ""
        self._stream = stream
        self._log = log
        self._thread = threading.Thread(target=self._copy, name="setup-log", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        with self._stream:
            # By lines and flushed, so that the log can be read while a build hangs.
            for raw in self._stream:
                self._log.write(raw)
                self._log.flush()
                self._remember(raw.decode(errors="replace").rstrip())

    def _remember(self, line: str) -> None:
        if line:
            self.tail.append(line)
            if _ERROR.search(line) and len(self.errors) < _SHOWN_ERRORS:
                self.errors.append(line)
            progress = _PROGRESS.search(line)
            if progress:
                self.progress = progress.group(0)

    def close(self) -> None:
        self._thread.join(timeout=_GRACE_S)

    def latest(self) -> str:
        # A build's "[ 12%] Building x" says more than the warning that it printed last.
        text = self.progress or (self.tail[-1] if self.tail else "started")
        return text.strip()[:90]


class Running:
    """A command under way; as a context manager it ends the command when the block fails.

    Args:
        process: the command, in a process group of its own, its output in a pipe.
        log: the open file that takes the output; closed with the command.
        runner: the limits that it runs under.
        what: the command in words, for messages.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], log: IO[bytes], runner: Runner, what: str
    ) -> None:
        assert process.stdout is not None
        self._process, self._log, self._runner, self._what = process, log, runner, what
        self._start_s = time.monotonic()
        self._output = _Output(process.stdout, log)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        # Also after Ctrl-C: the command is in a group of its own, so the terminal did not end it.
        if self._process.poll() is None:
            _end_group(self._process)
        self._close()

    def check(self) -> None:
        """Raise as ``wait`` does when the command has failed already; do not wait for it."""
        if self._process.poll() is not None:
            self._judge(self._process.returncode)

    def wait(self) -> None:
        """Wait for the end, with a sign of life now and then.

        Raises:
            SetupError: it failed or took longer than the limit; the message ends with the last
                lines that it printed.
        """
        while True:
            try:
                self._judge(self._process.wait(timeout=self._runner.alive_s))
                return
            except subprocess.TimeoutExpired:
                spent_s = time.monotonic() - self._start_s
                if spent_s > self._runner.timeout_s:
                    raise SetupError(
                        f"{self._what}: not done after {spent_s:.0f} s (limit "
                        f"{self._runner.timeout_s:.0f} s); see {self._runner.log}, then run the "
                        "same command again"
                    ) from None
                say(f"setup:   {spent_s:4.0f} s  {self._output.latest()}")

    def _judge(self, code: int) -> None:
        if code != 0:
            self._output.close()  # its last lines may still be on their way
            raise SetupError(
                f"{self._what} failed (exit {code}). The first errors in {self._runner.log}:\n"
                f"{_indented(self._output.errors)}\nits end:\n{_indented(self._output.tail)}"
            )

    def _close(self) -> None:
        self._output.close()
        self._log.close()


@dataclass(frozen=True)
class Runner:
    """Starts commands.

    Attributes:
        log: file that keeps everything the commands print.
        alive_s: seconds between two signs of life.
        timeout_s: longest run of one command in seconds.
        held: descriptors that the commands inherit, such as a lock's.
    """

    log: Path
    alive_s: float = 30.0
    timeout_s: float = 5400.0
    held: tuple[int, ...] = ()

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, what: str
    ) -> Running:
        """Start ``command`` and return without waiting for it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = open(self.log, "ab")  # noqa: SIM115  # Running closes it
        log.write(("\n$ " + " ".join(command) + "\n").encode())
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            pass_fds=self.held,
            preexec_fn=_end_with_parent,
            start_new_session=True,  # a group of its own, so that all of it can be ended
        )
        return Running(process, log, self, what)

    def run(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, what: str) -> None:
        """Run ``command`` to its end; raises as ``Running.wait`` does."""
        with self.start(command, env=env, cwd=cwd, what=what) as running:
            running.wait()


def _indented(lines: Iterable[str]) -> str:
    return "\n".join("    " + line[:300] for line in lines)


def _end_with_parent() -> None:
    """In a new command: ask Linux to end it when the set-up is killed and cannot do so itself."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a command and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=_GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue

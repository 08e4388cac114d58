"""Run long commands: a full log in a file, a sign of life on the screen, nothing left behind."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scripts.setup.console import SetupError, say

__all__ = ["Runner", "clean_environ", "output_of"]

_TAIL_LINES = 20
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only
_ERROR = re.compile(r"CMake Error|\berror:|ERROR:|Error:")
_SHOWN_ERRORS = 6
_PERCENT = re.compile(r"\[ *\d+%\] .*")
# A parent `make` hands its flags and job server down; a user's pip settings may point elsewhere.
_UNWANTED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
_UNWANTED_PYTHON = ("PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__")


def clean_environ(environ: Mapping[str, str], *, bin_dir: Path | None = None) -> dict[str, str]:
    """Return a copy of ``environ`` without what would disturb a build; ``bin_dir`` comes first."""
    result = {k: v for k, v in environ.items() if k not in _UNWANTED + _UNWANTED_PYTHON}
    result.update(PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    if bin_dir is not None:
        result["PATH"] = f"{bin_dir}{os.pathsep}{environ.get('PATH', os.defpath)}"
    return result


def output_of(command: Sequence[str], *, timeout_s: float = 60.0) -> str:
    """Return what a short command prints, standard error included, or "" when it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
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
            for raw in self._stream:
                self._log.write(raw)
                self._log.flush()
                self._remember(raw.decode(errors="replace").rstrip())

    def _remember(self, line: str) -> None:
        if line:
            self.tail.append(line)
            if _ERROR.search(line) and len(self.errors) < _SHOWN_ERRORS:
                self.errors.append(line)
            percent = _PERCENT.search(line)
            if percent:
                self.progress = percent.group(0)

    def close(self) -> None:
        self._thread.join(timeout=_GRACE_S)

    def latest(self) -> str:
        text = self.progress or (self.tail[-1] if self.tail else "started")
        return text.strip()[:90]


@dataclass(frozen=True)
class Runner:
    """Runs commands one after another.

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

    def run(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, what: str) -> None:
        """Run ``command`` to its end.

        Raises:
            SetupError: it failed or took longer than ``timeout_s``; the message ends with the last
                lines that it printed.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
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
            assert process.stdout is not None
            output = _Output(process.stdout, log)
            try:
                code = self._wait(process, output, what)
            except BaseException:
                _end_group(process)
                raise
            finally:
                output.close()
        if code != 0:
            raise SetupError(
                f"{what} failed (exit {code}). The first errors in {self.log}:\n"
                f"{_indented(output.errors)}\nits end:\n{_indented(output.tail)}"
            )

    def _wait(self, process: subprocess.Popen[bytes], output: _Output, what: str) -> int:
        start_s = time.monotonic()
        while True:
            try:
                return process.wait(timeout=self.alive_s)
            except subprocess.TimeoutExpired:
                spent_s = time.monotonic() - start_s
                if spent_s > self.timeout_s:
                    raise SetupError(
                        f"{what}: not done after {spent_s:.0f} s (limit {self.timeout_s:.0f} s); "
                        f"see {self.log}, then run the same command again"
                    ) from None
                say(f"setup:   {spent_s:4.0f} s  {output.latest()}")


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

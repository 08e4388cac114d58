"""A console script's ``main``, run by a process that this one forks: its imports are there.

``horovodrun`` imports torch to see whether Horovod is built, torchrun to begin with: some 1.8 s of
CPU each, as much as a rank. What they do then is theirs; their ranks start as ever.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["Forked"]


def _call(main: Callable[[], object]) -> int:
    """Return the exit status of a process that calls ``main``, as Python would end it."""
    try:
        main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class Forked:
    """A process in a session of its own, with what ``subprocess.Popen`` has of one.

    Args:
        main: called in it.
        command: what it takes for its command line.
        env: its whole environment.
        cwd: its folder.
    """

    def __init__(
        self,
        main: Callable[[], object],
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
    ) -> None:
        self.returncode: int | None = None
        self._command = command
        self._said: list[bytes] = []
        self._output, theirs = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the child would say it again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which it leaves alone
            self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                status = self._become(main, theirs, env, cwd)
            finally:
                os._exit(status)
        os.close(theirs)

    def _become(
        self, main: Callable[[], object], output: int, env: Mapping[str, str], cwd: Path
    ) -> int:
        os.setsid()
        for number in (1, 2):
            os.dup2(output, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.argv = list(self._command)
        sys.modules["__main__"] = types.ModuleType("__main__")  # the tests' is no business of its
        status = _call(main)
        sys.stdout.flush()
        sys.stderr.flush()
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return what it and its children have said, once all have ended; else TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._output], [], [], left_s)[0]:
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
            if not (said := os.read(self._output, 1 << 16)):
                break
            self._said.append(said)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        os.close(self._output)
        said_text = b"".join(self._said).decode(errors="replace")
        return said_text.replace("\r\n", "\n").replace("\r", "\n"), None

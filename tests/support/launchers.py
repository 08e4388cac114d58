"""Launchers of Python, forked from a process that has imported them: to start one takes 0.2 s.

``horovodrun`` imports torch to see whether Horovod is built, torchrun to begin with: some 1.8 s of
CPU each, as much as a rank. What they do then is theirs; ranks start as ever.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

__all__ = ["MAINS", "ForkedLauncher"]

MAINS = {
    "torchrun": ("torch.distributed.run", "main"),
    "horovodrun": ("horovod.runner.launch", "run_commandline"),
}
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([*(module for module, _ in MAINS.values()), "horovod.torch"])


def _run(command: Sequence[str], env: Mapping[str, str], folder: str, output: Any) -> None:
    os.setsid()
    pipe = output.detach()
    for number in (1, 2):
        os.dup2(pipe, number)
    os.close(pipe)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = list(command)
    module, main = MAINS[command[0]]
    getattr(import_module(module), main)()


class ForkedLauncher:
    """A launcher in a session of its own, with what ``subprocess.Popen`` has of a process.

    Args:
        command: "torchrun" or "horovodrun", and what it is given.
        env: its whole environment.
        cwd: its folder.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> None:
        self._command = command
        self._output, theirs = os.pipe()
        self._said: list[bytes] = []
        try:
            arguments = (command, dict(env), str(cwd), DupFd(theirs))
            self._process = _CONTEXT.Process(target=_run, args=arguments)
            self._process.start()
        finally:
            os.close(theirs)

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return what it and its ranks have said, once all have ended; else ``TimeoutExpired``."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._output], [], [], left_s)[0]:
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
            if not (said := os.read(self._output, 1 << 16)):
                break
            self._said.append(said)
        self._process.join(10)
        os.close(self._output)
        return b"".join(self._said).decode(errors="replace"), None

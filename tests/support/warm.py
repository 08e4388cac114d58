"""Launchers of Python, forked from a process that has imported them: to start one takes 0.3 s.

``horovodrun`` imports torch to see whether Horovod is built, torchrun to begin with: 2.2 and 1.7 s
of CPU, as much as a rank. What they do then is theirs, and their ranks start as ever. What their
modules have read from the environment as they were imported is that of the process that tests; so
is what ``/proc`` shows of it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

__all__ = ["MAINS", "WarmProcess"]

ROOT = Path(__file__).resolve().parents[2]
MAINS = {
    "torchrun": ("torch.distributed.run", "main"),
    "horovodrun": ("horovod.runner.launch", "run_commandline"),
}
_Main = Callable[[], str | int | None]  # returns what ``sys.exit`` takes
_MOST_BYTES = 1 << 20  # of a request


def _main_of(program: str) -> _Main:
    module, name = MAINS[program]
    main: _Main = getattr(import_module(module), name)
    return main


def _become(request: bytes, output: int, answer: socket.socket) -> _Main:
    """Have this process be a program that has just been started; returns its main function."""
    os.setsid()
    answer.send(str(os.getpid()).encode())
    answer.close()
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    asked = json.loads(request)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.argv = asked["command"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # processes it spawns import none
    return _main_of(sys.argv[0])


def _serve(requests: socket.socket) -> _Main | None:
    """Fork a process for each request until there are no more.

    Returns what to call: in each of those processes its main function, and None in this one.
    """
    _main_of("torchrun")
    if find_spec("horovod"):
        _main_of("horovodrun")
        import_module("horovod.torch")  # which it imports to see whether Horovod is built
    gc.freeze()  # pages stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who waits for a program is waited for by none
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 2)
        if not request:
            return None
        output = descriptors[0]
        with socket.socket(fileno=descriptors[1]) as answer:
            if os.fork() == 0:  # waits for the program, and tells how it has ended
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                if (pid := os.fork()) == 0:
                    return _become(request, output, answer)
                os.close(output)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                answer.send(str(status).encode())
                os._exit(0)
        os.close(output)


@functools.cache
def _server() -> socket.socket:
    """Return where to ask for processes, for as long as this one lives."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", str(number)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        server.kill()  # a process that was forked meanwhile may hold the other end open
        server.wait()

    atexit.register(end)
    return ours


class WarmProcess:
    """A launcher in a session of its own, with what ``subprocess.Popen`` has of a process.

    Args:
        command: the name of a program of ``MAINS``, and what it is given.
        env: its whole environment.
        cwd: its folder.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> None:
        self.returncode: int | None = None
        self._command = command
        self._said: list[bytes] = []
        request = json.dumps({"command": list(command), "env": dict(env), "cwd": str(cwd)})
        self._output, output = os.pipe()
        self._answer, answer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with answer:
            socket.send_fds(_server(), [request.encode()], [output, answer.fileno()])
        os.close(output)
        self.pid = int(self._answer.recv(64))

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return what it and its children have said, once all have ended; else TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            if left_s == 0.0 or not select.select([self._output], [], [], left_s)[0]:
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
            if not (said := os.read(self._output, 1 << 16)):
                break
            self._said.append(said)
        with self._answer:
            self.returncode = int(self._answer.recv(64))
        os.close(self._output)
        text = b"".join(self._said).decode(errors="replace")
        return text.replace("\r\n", "\n").replace("\r", "\n"), None


if __name__ == "__main__":
    main = _serve(socket.socket(fileno=int(sys.argv[1])))
    if main is not None:
        sys.exit(main())

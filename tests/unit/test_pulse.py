"""The extension's pulse: bytes that come whoever holds the interpreter, as long as it runs."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from loft_hvd._native import extension

pytestmark = pytest.mark.skipif(
    not hasattr(extension(), "Pulse"), reason="the extension is not built, or is an older one"
)


@pytest.fixture
def pulse() -> Iterator[Any]:
    """Return a quick pulse, stopped in the end."""
    module = extension()
    assert module is not None
    made = module.Pulse(0.005, b"!")
    yield made
    made.stop()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return two connected ends."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    with closing(ours), closing(theirs):
        yield ours, theirs


def test_it_beats_while_the_interpreter_is_held(
    pulse: Any, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    pulse.add(ours.fileno())
    assert theirs.recv(1) == b"!"
    theirs.setblocking(False)
    ctypes.PyDLL(None).usleep(100_000)  # unlike CDLL, PyDLL keeps the interpreter's lock
    assert len(theirs.recv(4096)) >= 5


def test_what_was_removed_gets_nothing_though_its_number_is_used_again(
    pulse: Any, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    first, second = socket.socketpair()
    number = first.fileno()
    pulse.add(number)
    first.close()
    os.dup2(ours.fileno(), number)
    assert second.recv(1) == b"!"  # to whom it was added
    pulse.remove(number)
    pulse.remove(number)
    theirs.setblocking(False)
    time.sleep(0)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    second.close()
    os.close(number)


def test_nobody_reading_ends_nothing(pulse: Any) -> None:
    ends = [socket.socketpair() for _ in range(3)]
    for ours, theirs in ends[:2]:
        pulse.add(ours.fileno())
        theirs.close()
    ours, theirs = ends[2]
    pulse.add(ours.fileno())
    assert theirs.recv(1) == b"!"
    for each in ends:
        each[0].close()
    theirs.close()
    pulse.add(10_000)  # no such descriptor: nothing is written
    pulse.stop()
    pulse.stop()


def test_a_process_that_ends_or_forks_with_a_pulse_ends_well() -> None:
    script = (
        "import os, socket; from loft_hvd import _loft as m\n"
        "a, b = socket.socketpair(); p = m.Pulse(0.001, b'!'); p.add(a.fileno()); b.recv(1)\n"
        "child = os.fork()\n"
        "p.stop() if child == 0 else None\n"
        "print(0 if child == 0 else os.waitpid(child, 0)[1], flush=True)\n"
    )
    done = subprocess.run(
        # From 3.12 on Python warns of every fork beside a thread, which the pulse is.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n0\n", "")

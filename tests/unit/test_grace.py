"""SIGTERM: a rank ends a moment later, and has said by then which other rank ended first."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from loft_hvd._native import extension
from loft_hvd.failures.process import stat_fields

pytestmark = pytest.mark.skipif(
    not hasattr(extension(), "add_grace"), reason="the extension is not built"
)
NEVER_BACK = """
import ctypes
print("ready", flush=True)
while True:
    ctypes.CDLL(None).pause()  # the main thread is never in Python for long
"""
# Rank 1 of two: its end of the link, rank 0's process, and how long it lives after SIGTERM.
RANK = (
    """
import os, signal, socket, sys
from loft_hvd.failures import process
from loft_hvd.failures.diagnosis import Diagnosis
from loft_hvd.failures.actions import HeartbeatSettings, ProcessControl
from loft_hvd.failures.heartbeat import Heartbeat
from loft_hvd.failures.links import Link
link, pid, start = map(int, sys.argv[1:4])
process._TERM_S = float(sys.argv[4])
other = process.RankProcess(process.own_process().host_key, pid, start, "here")
heartbeat = Heartbeat(
    {0: Link(socket.socket(fileno=link))},
    Diagnosis(1, {0: other}),
    settings=HeartbeatSettings(),
    control=ProcessControl(exit=process.ProcessExit(leave_s=5.0)),
)
"""
    + NEVER_BACK
)


class Ranks:
    """A rank 1 that has a heartbeat, a process that stands for rank 0, and its end of the link."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.link, self._end = (stack.enter_context(each) for each in socket.socketpair())
        self.link.settimeout(60)
        self.zero = self._start(NEVER_BACK)

    def start(self, script: str = RANK, *, term_s: float) -> subprocess.Popen[str]:
        """Start rank 1, which ends so long after SIGTERM."""
        end, pid, start = self._end.fileno(), self.zero.pid, stat_fields(self.zero.pid)[19]
        started = self._start(script, *map(str, (end, pid, start, term_s)), pass_fds=[end])
        self._end.close()
        return started

    def hear(self, word: bytes) -> None:
        """Wait until rank 1 has said a word."""
        heard = b""
        while word not in heard:
            heard += self.link.recv(4096)

    def _start(self, *command: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[str]:
        started = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", *command],
                pass_fds=pass_fds,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        self._stack.callback(started.kill)
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        return started


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(stack)


def test_a_rank_that_is_told_to_end_says_which_rank_ended_first(ranks: Ranks) -> None:
    """Rank 0's link is held for long, as what a rank has forked does, or its last memory."""
    one = ranks.start(term_s=50.0)
    ranks.hear(b"\nbeat 1 ")  # it has seen rank 0 alive
    ranks.zero.kill()
    one.terminate()
    began = time.monotonic()
    _, said = one.communicate(timeout=60)
    assert f"rank 0 (process {ranks.zero.pid} on here) has ended without a word" in said
    assert one.returncode == -signal.SIGTERM
    assert time.monotonic() - began < 40  # once it has said that


def test_a_rank_that_is_told_to_end_says_so_and_ends_in_a_moment(ranks: Ranks) -> None:
    one = ranks.start(term_s=0.5)
    began = time.monotonic()
    one.terminate()
    ranks.hear(b"\nterm 1 ")
    _, said = one.communicate(timeout=60)
    assert (one.returncode, said) == (-signal.SIGTERM, "")
    assert time.monotonic() - began >= 0.5


def test_ranks_that_are_all_told_to_end_name_nobody(ranks: Ranks) -> None:
    one = ranks.start(term_s=1.5)
    one.terminate()
    ranks.hear(b"\nterm 1 ")
    ranks.link.send(b"\nterm 0 0.000 \n")
    ranks.zero.kill()
    ranks.link.close()
    _, said = one.communicate(timeout=60)
    assert (one.returncode, said) == (-signal.SIGTERM, "")


def test_who_is_told_to_end_blames_nothing_that_ends_with_it(ranks: Ranks) -> None:
    """Open MPI sends SIGTERM to the loader's processes, too, whose end is an error at once."""
    script = RANK.replace(
        NEVER_BACK,
        'print("ready", flush=True)\n'
        "while not heartbeat._actions.control.exit.is_told: pass\n"
        'heartbeat.report(RuntimeError("a loader process has ended"))\n'
        "os.kill(os.getpid(), signal.SIGTERM)\n",
    )
    one = ranks.start(script, term_s=50.0)
    ranks.hear(b"\nbeat 1 ")
    one.terminate()
    one.communicate(timeout=60)
    said = b""
    while data := ranks.link.recv(4096):
        said += data
    assert one.returncode == -signal.SIGTERM
    assert b"failed" not in said


def run(body: str) -> subprocess.CompletedProcess[str]:
    """Run a script whose SIGTERM gives it half a minute, and tells ``theirs``."""
    start = (
        "import os, signal, socket, subprocess, sys, time\n"
        "from loft_hvd import _loft\n"
        "ours, theirs = socket.socketpair()\n"
        "def ends_by(send, process):\n"
        "    began = time.monotonic()\n"
        "    send()\n"
        "    _, status = os.waitpid(process, 0)\n"
        "    assert time.monotonic() - began < 20\n"
        "    return os.WTERMSIG(status)\n"
    )
    command = [sys.executable, "-c", start + body]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


ADDED = "assert _loft.add_grace(ours.fileno(), 30.0)\n"
TOLD = "os.kill(os.getpid(), signal.SIGTERM)\nassert theirs.recv(9) == b'T'\nprint('told')\n"


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param(TOLD + "sys.stdout.flush()\n" + TOLD, "told\n", id="a second one"),
        pytest.param(
            "_loft.remove_grace(ours.fileno())\n" + TOLD, "", id="after the last is removed"
        ),
        pytest.param(
            "_loft.add_grace(theirs.fileno(), 30.0)\n_loft.remove_grace(theirs.fileno())\n"
            + TOLD
            + "sys.stdout.flush()\nsignal.raise_signal(signal.SIGTERM)\n",
            "told\n",
            id="one of two is removed",
        ),
        pytest.param(
            "import faulthandler\n"
            "faulthandler.register(signal.SIGTERM, chain=True)\n"  # it sets ours again, and again
            + TOLD
            + "sys.stdout.flush()\nassert not _loft.add_grace(ours.fileno(), 30.0)\n"
            + TOLD,
            "told\n",
            id="a second one where another handler is chained",
        ),
    ],
)
def test_sigterm_ends_a_process_at_once(body: str, said: str) -> None:
    began = time.monotonic()
    done = run(ADDED + body)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, said), done.stderr
    assert time.monotonic() - began < 25


def test_processes_of_a_process_end_at_once() -> None:
    done = run(
        ADDED + "child = os.fork()\n"
        "if not child:\n"
        "    ours.close(), theirs.close()\n"
        "    while True: signal.pause()\n"
        "print(ends_by(lambda: os.kill(child, signal.SIGTERM), child))\n"
        "child = subprocess.Popen(['sleep', '40'])\n"
        "print(ends_by(child.terminate, child.pid))\n"
        "child.returncode = 0\n"
    )
    assert (done.returncode, done.stdout) == (0, "15\n15\n"), done.stderr


def test_a_script_that_handles_sigterm_keeps_its_handler() -> None:
    done = run(
        "signal.signal(signal.SIGTERM, lambda *_: print('saved'))\n"
        "print(_loft.add_grace(ours.fileno(), 30.0))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(_loft.since_sigterm_s())\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n" + ADDED + "print('added')\n"
        # One that is set later takes its place.
        "signal.signal(signal.SIGTERM, lambda *_: print('saved'))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "_loft.remove_grace(ours.fileno())\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    expected = "False\nsaved\n-1.0\nadded\nsaved\nsaved\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr

"""Processes as ranks of their host see them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from loft_hvd._native import extension
from loft_hvd.failures import process
from loft_hvd.failures.process import ENDED, own_process, process_state


def test_process_states() -> None:
    own = own_process()
    assert process_state(own.pid, own.start) in "RS"
    assert process_state(own.pid, own.start + 1) == "X"  # another process had that id


@pytest.mark.parametrize(
    ("error", "state"),
    [(FileNotFoundError, "X"), (ProcessLookupError, "X"), (PermissionError, "?"), (OSError, "?")],
)
def test_a_process_that_cannot_be_read_has_not_ended_by_that(
    error: type[OSError], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> list[str]:
        raise error(24, "too many open files")

    monkeypatch.setattr(process, "stat_fields", fail)
    assert process_state(1, 0) == state


def test_a_process_that_is_being_killed_counts_as_ended_from_the_first_moment() -> None:
    # 200 MB, so that it takes some time to end: its connections do last.
    script = "held = b'x' * (200 << 20); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert process_state(child.pid, 0) in "RS"
        child.kill()
        assert process_state(child.pid, 0) in ENDED
        child.wait(timeout=60)


def seen(*, letter: str = "R", flags: int = 0, pending: int = 0, exit_code: int = 0) -> list[str]:
    fields = ["0"] * 50
    fields[0], fields[6], fields[28], fields[49] = letter, str(flags), str(pending), str(exit_code)
    return fields


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        (seen(), "R"),
        (seen(letter="T", exit_code=19), "T"),
        (seen(letter="R", exit_code=19), "R"),  # the last of its threads is about to stop
        (seen(letter="t", exit_code=5), "t"),  # of a debugger
        (seen(letter="R", exit_code=10), "R"),  # which lets it go on with a signal
        (seen(pending=1 << 8, exit_code=9), "X"),
        (seen(exit_code=9), "X"),  # between the two signs: once in 1,000 kills
        (seen(flags=4, exit_code=9), "X"),
        (seen(flags=4), "X"),  # it has left by itself
        (seen(pending=1 << 8), "X"),  # an older kernel
    ],
)
def test_what_the_kernel_shows_of_a_process(
    fields: list[str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "stat_fields", lambda _: fields)
    assert process_state(1, 0) == state


def test_a_process_name_that_is_cut_inside_a_character_is_read() -> None:
    name = ("x" * 14 + "ü").encode()
    script = f"""
import ctypes
ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)  # PR_SET_NAME
from loft_hvd.failures.process import own_process
print(own_process().pid > 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "True\n", done.stderr


# How a script hangs after its error: with the interpreter's lock in hand, or when that is gone.
HANGS = {
    "holding the interpreter": (
        "lock = ctypes.create_string_buffer(64)\n"
        "libc = ctypes.PyDLL(None)  # unlike CDLL, it keeps the interpreter's lock\n"
        "libc.pthread_mutex_lock(lock)\n"
        "libc.pthread_mutex_lock(lock)\n"
    ),
    "after the interpreter": "libc = ctypes.CDLL(None)\nlibc.on_exit(libc.pause, None)\n",
}


@pytest.mark.skipif(not hasattr(extension(), "leave_in"), reason="the extension is not built")
@pytest.mark.parametrize("how", HANGS)
def test_a_process_that_python_cannot_leave_is_left(how: str) -> None:
    script = (
        "import ctypes\n"
        "from loft_hvd.failures.process import ProcessExit\n"
        "ProcessExit(leave_s=0.1).arm('an error has ended the script')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script + HANGS[how]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "loft_hvd: an error has ended the script, and the process does not end: leaving it\n"
    )


def test_a_wait_without_an_end_before_leaving_is_one() -> None:
    code = (
        "import time; from loft_hvd import _loft\n"
        "_loft.leave_in(float('inf'), 'x'); time.sleep(0.5); print('saved', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr

"""Processes as ranks of their host see them."""

from __future__ import annotations

import subprocess
import sys

from loft_hvd.transport.heartbeat.process import own_process, process_state


def test_process_states() -> None:
    own = own_process()
    assert process_state(own.pid, own.start) in "RS"
    assert process_state(own.pid, own.start + 1) == "X"  # another process had that id


def test_a_process_name_that_is_cut_inside_a_character_is_read() -> None:
    name = ("x" * 14 + "ü").encode()
    script = f"""
import ctypes
ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)  # PR_SET_NAME
from loft_hvd.transport.heartbeat.process import own_process
print(own_process().pid > 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "True\n", done.stderr

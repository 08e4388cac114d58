"""Processes as ranks of their host see them."""

from __future__ import annotations

from loft_hvd.transport.heartbeat.process import own_process, process_state


def test_process_states() -> None:
    own = own_process()
    assert process_state(own.pid, own.start) in "RS"
    assert process_state(own.pid, own.start + 1) == "X"  # another process had that id

"""Ends a frozen rank that has no other rank on its host to do so: a small process beside it.

Horovod's elastic launcher waits for a frozen process for ever. Ranks of one host end each other
(``heartbeat.py``); a rank that is alone gets this guard, which looks at it in ``/proc`` once a
second. It imports nothing of ours, takes about 8 MB, and ends with its rank.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

from loft_hvd.transport.heartbeat.diagnosis import Place

__all__ = ["Guard"]

_SCRIPT = """
import os, signal, sys, time
pid, start, limit_s, who = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
stopped_s = 0.0
while True:
    time.sleep(1.0)
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        break
    if fields[19] != start or fields[0] in "ZX":
        break
    stopped_s = stopped_s + 1.0 if fields[0] == "T" else 0.0
    if stopped_s >= limit_s:
        print(f"{who} is frozen (SIGSTOP): killing it, an elastic job can do without it",
              file=sys.stderr, flush=True)
        os.kill(pid, signal.SIGKILL)
        break
"""


class Guard:
    """The guard of one process; owned by its heartbeat.

    Args:
        rank: the process's rank, for the message.
        place: where the process runs.
        limit_s: how long it may be stopped, in seconds.
    """

    def __init__(self, rank: int, place: Place, *, limit_s: float) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                *("-I", "-S", "-c", _SCRIPT),
                *(str(place.pid), str(place.start), str(limit_s), f"rank {rank} ({place})"),
            ],
            stdin=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """End the guard; can be called again."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)

"""Small processes beside a rank, that end what would keep its job waiting.

``ProcessGuard`` ends the rank itself where it is frozen. ``LauncherGuard`` ends the ``mpirun`` of a
job that has lost a host: it waits for its daemon there for as long as TCP tries to reach it, which
is minutes, and the ranks have ended by then. Each is a Python of its own, with nothing imported.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from loft_hvd.failures.process import RankProcess, stat_fields

__all__ = ["LauncherGuard", "ProcessGuard", "find_launcher"]

_logger = logging.getLogger(__name__)
_LAUNCHERS = ("mpirun", "orterun", "prterun")  # Open MPI's, by their programs' files
_MOST_ANCESTORS = 64  # bound: process trees are less deep
_GRACE_S = 2.0  # a choice: mpirun ends ranks in 1 s, and by itself right after

# 8 MB (measured by its RSS).
_PROCESS_SCRIPT = """
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


class ProcessGuard:
    """Ends a frozen rank that has no other rank on its host to do so: a small process beside it.

    Horovod's elastic launcher waits for a frozen process for ever. Ranks of one host end each
    other; a rank that is alone gets this guard, which looks at it in ``/proc`` once a second and
    ends with it. It lets the process be stopped for ``limit_s``. Owned by the rank's heartbeat.
    """

    def __init__(self, rank: int, guarded: RankProcess, *, limit_s: float) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                *("-I", "-S", "-c", _PROCESS_SCRIPT),  # no site, no user's folders: quick and small
                *(str(guarded.pid), str(guarded.start), str(limit_s), f"rank {rank} ({guarded})"),
            ],
            stdin=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """End the guard; can be called again."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5.0)


# Run by a Python of its own, with nothing of the rank's but two handles: a handle is of that very
# process, whatever its number is given to later. mpirun's ssh to the lost host would outlive it.
_LAUNCHER_SCRIPT = """
import os, select, signal, sys
pid, launcher, rank, limit_s, grace_s = *map(int, sys.argv[1:4]), *map(float, sys.argv[4:])
def ends_within(process, seconds):
    waiter = select.poll()  # select.select refuses handles from 1024 on, as of rank 0 of 1,000
    waiter.register(process, select.POLLIN)
    return bool(waiter.poll(1000.0 * seconds))
def is_child(each):
    with open(f"/proc/{each}/stat", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[1]) == pid and int(each) != os.getpid()
def children():
    for each in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if is_child(each):
                handle = os.pidfd_open(int(each))
                if is_child(each):
                    yield handle
        except OSError:
            continue
ends_within(rank, limit_s)
if not ends_within(launcher, grace_s):
    ended = [launcher, *children()]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in ended:
            try:
                if not ends_within(each, 0.0):
                    signal.pidfd_send_signal(each, number)
            except ProcessLookupError:  # it has ended right now; the rest have not
                continue
        ends_within(launcher, grace_s / 4)
"""


def find_launcher(pid: int, *, proc: Path = Path("/proc")) -> int | None:
    """Return the process id of the nearest launcher above a process, or None.

    It runs the program file of such a launcher, as this user; its name in lists of processes
    counts for nothing.
    """
    for _ in range(_MOST_ANCESTORS):
        try:
            pid = int(stat_fields(pid, proc=proc)[1])  # its parent
            program = (proc / str(pid) / "exe").readlink().name if pid > 1 else ""
            is_ours = pid > 1 and (proc / str(pid)).stat().st_uid == os.geteuid()
        except OSError:  # gone, or of another user, who may not be asked
            return None
        if not is_ours:
            return None
        if program in _LAUNCHERS:
            return pid
    return None


class LauncherGuard:
    """Ends this process' launcher and its ssh, if it outlives this process by ``grace_s``.

    Args:
        own: this process.
        limit_s: how long it waits for this process to end.
        grace_s: how long it then waits for the launcher, and a quarter of that between
            SIGTERM and SIGKILL.
    """

    def __init__(self, own: RankProcess, *, limit_s: float, grace_s: float = _GRACE_S) -> None:
        self._own = own
        self._limit_s, self._grace_s = limit_s, grace_s
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def finds_launcher(self) -> bool:
        """Whether there is a launcher to be ended."""
        return hasattr(os, "pidfd_open") and find_launcher(self._own.pid) is not None

    def start(self) -> None:
        """Watch from now on; can be called again."""
        if self.process is not None or not hasattr(os, "pidfd_open"):  # Linux 5.3
            return
        launcher = find_launcher(self._own.pid)
        if launcher is None:
            return
        handles: list[int] = []
        try:
            handles = [os.pidfd_open(launcher), os.pidfd_open(self._own.pid)]
            if find_launcher(self._own.pid) != launcher:  # it has ended before it was held
                return
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *("-I", "-S", "-c", _LAUNCHER_SCRIPT),  # no site, no user's folders
                    *map(str, (launcher, *handles, self._limit_s, self._grace_s)),
                ],
                pass_fds=handles,
                start_new_session=True,  # the launcher ends the process groups of its ranks
                # None of the rank's pipes: the launcher would wait for the end of its output.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            _logger.warning("cannot watch the launcher, process %d: %s", launcher, error)
        else:
            _logger.error(
                "a host is lost, for which mpirun (process %d) would wait for minutes: it is ended "
                "%g s after this rank, unless it ends by itself",
                launcher,
                self._grace_s,
            )
        finally:
            for handle in handles:
                with suppress(OSError):
                    os.close(handle)

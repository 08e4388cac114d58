"""How much of the machine's CPU a host gets: one group of the kernel's cpu controller a host.

Version 1 (``cpu.cfs_quota_us``) and version 2 (``cpu.max``) of control groups are both written.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.testbed.tool.state import NAME, Process, TestbedError

__all__ = ["enter", "host_pids", "limit_cpu", "make", "pids", "remove"]

_PERIOD_US = 10_000
_LEAST_QUOTA_US = 1000  # bound from the kernel


def _base() -> tuple[int, Path]:
    """Return version and folder of the cpu controller; version 0 where there is none."""
    unified = None
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, options = line.split()[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return 1, Path(folder)
        if kind == "cgroup2":
            unified = Path(folder)
    if unified is not None and "cpu" in (unified / "cgroup.controllers").read_text().split():
        return 2, unified
    return 0, Path("/nonexistent")


def _group(host: str = "") -> Path:
    return _base()[1] / f"testbed-{NAME}" / host


def make(host: str) -> None:
    """Make a host's group."""
    version, base = _base()
    if not version:
        raise TestbedError("no cgroup cpu controller on this machine")
    control = "cgroup.subtree_control"
    if version == 2 and "cpu" not in (base / control).read_text().split():
        raise TestbedError(f"the cpu controller is not enabled in {base / control}")
    _group(host).mkdir(parents=True, exist_ok=True)
    if version == 2:
        (_group() / control).write_text("+cpu")
    # Against the rest of the machine each host weighs as much as one plain process.
    num_hosts = sum(each.is_dir() for each in _group().iterdir())
    name, one = ("cpu.shares", 1024) if version == 1 else ("cpu.weight", 100)
    (_group() / name).write_text(str(num_hosts * one))


def limit_cpu(host: str, cores: float | None) -> None:
    """Limit a host to so many cores' worth of CPU time; None for no limit."""
    quota_us = int(cores * _PERIOD_US) if cores else 0
    if quota_us and quota_us < _LEAST_QUOTA_US:
        raise TestbedError(f"cpu {cores} is too little: at least {_LEAST_QUOTA_US / _PERIOD_US}")
    if _base()[0] == 1:
        (_group(host) / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (_group(host) / "cpu.cfs_quota_us").write_text(str(quota_us or -1))
    else:
        (_group(host) / "cpu.max").write_text(f"{quota_us or 'max'} {_PERIOD_US}")


def pids(host: str) -> list[int]:
    """Return the processes of a host's group, as the machine numbers them."""
    try:
        return [int(word) for word in (_group(host) / "cgroup.procs").read_text().split()]
    except FileNotFoundError:
        return []


def host_pids(host: str, init: Process | None) -> list[int]:
    """Return the processes that see themselves on a host, but for its process 1."""
    own = _pid_space(init.pid) if init is not None else ""
    return [
        pid for pid in pids(host) if init and own and pid != init.pid and _pid_space(pid) == own
    ]


def _pid_space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def enter(host: str) -> None:
    """Put this process into a host's group."""
    (_group(host) / "cgroup.procs").write_text(str(os.getpid()))


def remove() -> None:
    """Remove all groups of this testbed, once their processes have ended."""
    top = _group()
    if not top.is_dir():
        return
    for folder in [*(each for each in top.iterdir() if each.is_dir()), top]:
        for left in range(200, -1, -1):
            try:
                folder.rmdir()
                break
            except OSError:
                if not left:
                    raise
                time.sleep(0.05)  # its last processes are still going

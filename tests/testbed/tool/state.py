"""What is known of a testbed between two commands: its names, its settings, its processes.

All of it is one JSON file in a folder of ``/run``. A process is kept with the time it started, so
that another one with the same number is never taken for it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "NAME",
    "NET",
    "ROOT",
    "SBIN",
    "SSH_PORT",
    "STATE",
    "SWITCH",
    "TESTBED",
    "Conf",
    "Host",
    "Process",
    "TestbedError",
    "address",
    "alive",
    "host_folder",
    "kill_and_wait",
    "load",
    "missing_packages",
    "need",
    "netns",
    "process",
    "save",
    "sh",
]

NAME = os.environ.get("TESTBED_NAME", "tb")
ROOT = Path("/run/testbed")
STATE = ROOT / NAME
SWITCH = f"{NAME}-switch"  # the namespace of the bridge
NET = "10.77.0."
SSH_PORT = 2222
TESTBED = Path(__file__).resolve().parents[1] / "testbed"  # the executable
SBIN = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "g++": "g++",
}
_CONF = STATE / "conf.json"


class TestbedError(Exception):
    """A command cannot be done; its text is all that a user sees."""

    __test__ = False  # pytest: this is no test class


def missing_packages() -> list[str]:
    """Return Debian's packages of the tools that are needed and not there."""
    return sorted({_PACKAGES[tool] for tool in _PACKAGES if not shutil.which(tool, path=SBIN)})


def sh(*argv: str, check: bool = True) -> str:
    """Run a command and return what it printed; an error where it fails, unless not checked."""
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if check and done.returncode:
        said = done.stdout.strip() or f"exit {done.returncode}"
        raise TestbedError(f"{shlex.join(argv)}: {said}")
    return done.stdout


def netns(host: str) -> str:
    """Return the name of a host's network namespace."""
    return f"{NAME}-{host}"


def address(number: int) -> str:
    """Return the address of host ``number``."""
    return f"{NET}{10 + number}"


def host_folder(host: str) -> Path:
    """Return the folder of what belongs to one host."""
    return STATE / "hosts" / host


# Processes.


class Process(NamedTuple):
    """A process that was started, by its number and the clock ticks since boot when it was."""

    pid: int
    start: int | None


def process(pid: int) -> Process:
    """Return the process that has a number now."""
    return Process(pid, _start_of(pid))


def _start_of(pid: int) -> int | None:
    """Return when a process was started; None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def alive(proc: Process | None) -> bool:
    """Say whether a process runs."""
    return proc is not None and _start_of(proc.pid) == proc.start


def kill_and_wait(
    proc: Process | None, sig: signal.Signals = signal.SIGKILL, *, timeout_s: float = 10.0
) -> None:
    """End a process, if it runs, and wait until it has ended."""
    if proc is None or not alive(proc):
        return
    os.kill(proc.pid, sig)
    until = time.monotonic() + timeout_s
    while alive(proc):
        if time.monotonic() > until:
            raise TestbedError(f"pid {proc.pid} does not end")
        time.sleep(0.01)


# Settings.


@dataclass
class Host:
    """One host: what was asked of it, and what runs it."""

    address: str
    cpu: float | None  # cores' worth of time; None: no limit
    rate: int | None  # bits a second each way; None: no limit
    delay_ms: float  # one way, each way
    jitter_ms: float
    loss: float  # chance of a packet, each way
    gap_ms: float = 0.0  # for so long the link is gone
    every_ms: float = 0.0  # in each such time
    is_cut: bool = False
    init: Process | None = None  # its process 1
    relay: Process | None = None

    @property
    def is_far(self) -> bool:
        """Whether its packets take a relay."""
        return bool(self.delay_ms or self.jitter_ms or self.loss or self.gap_ms)


@dataclass
class Conf:
    """One testbed."""

    hosts: dict[str, Host]  # by name
    mtu: int
    tcp: str  # congestion control between hosts; "-" for the machine's own
    ssh_alive_s: int  # 0: ssh never gives a host up
    path: str  # PATH of every session on a host

    def asked(self) -> Conf:
        """Return what was asked for, without what runs it."""
        hosts = {
            name: dataclasses.replace(host, init=None, relay=None)
            for name, host in self.hosts.items()
        }
        return dataclasses.replace(self, hosts=hosts)


def load() -> Conf | None:
    """Return the testbed that is up, or None."""
    try:
        kept = json.loads(_CONF.read_text())
    except FileNotFoundError:
        return None
    hosts = {}
    for name, each in kept.pop("hosts").items():
        ran = {key: each[key] and Process(*each[key]) for key in ("init", "relay")}
        hosts[name] = Host(**each | ran)
    return Conf(hosts, **kept)


def save(conf: Conf) -> None:
    """Keep a testbed for the next command."""
    fresh = _CONF.with_suffix(".new")
    fresh.write_text(json.dumps(dataclasses.asdict(conf), indent=1))
    os.replace(fresh, _CONF)


def need(host: str | None = None) -> Conf:
    """Return the testbed that is up, a TestbedError where there is none or it lacks a host."""
    conf = load()
    if conf is None:
        raise TestbedError("no testbed is up (testbed up N)")
    if host is not None and host not in conf.hosts:
        raise TestbedError(f"no host {host!r}; there are: {' '.join(conf.hosts)}")
    return conf

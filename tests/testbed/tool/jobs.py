"""Commands and jobs of ranks on the hosts, and signals to them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from tests.testbed.tool import cgroups
from tests.testbed.tool.state import STATE, Conf, TestbedError, alive, need

__all__ = ["JobOptions", "Rank", "execute", "ranks_on", "run", "send_signal", "set_members"]

_RANK = (b"HOROVOD_RANK=", b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=", b"RANK=")
_PASSED = ("HOROVOD_", "LOFT_", "PYTHON", "OMP_", "GLOO_", "NCCL_")  # beginnings of variables
_PASSED_NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_MPIRUN = """\
mpirun --allow-run-as-root --bind-to none --map-by slot --mca btl_tcp_if_include eth0
--mca oob_tcp_if_include eth0 --mca pml ob1 --mca btl ^openib --mca mpi_yield_when_idle 1
--tag-output"""  # yield: the hosts share the cores


@dataclass(frozen=True)
class JobOptions:
    """How a job is started."""

    launcher: str = "gloo"  # or "mpi", both of horovodrun; or "mpirun"
    num_ranks: int | None = None  # None: one a host and slot
    slots: int = 1  # of a host
    hosts: str = ""  # such as "host0,host2"; "" for all that are alive
    min_ranks: int | None = None  # elastic: run on while so many are left
    max_ranks: int | None = None
    discovery: str = ""  # an elastic job's own script
    words: tuple[str, ...] = ()  # more for the launcher


def _inside(conf: Conf, host: str, command: Sequence[str], env: Sequence[str] = ()) -> list[str]:
    """Return what runs a command on a host, in this working folder."""
    init = conf.hosts[host].init
    if init is None or not alive(init):
        raise TestbedError(f"{host} is dead (testbed boot {host})")
    tied = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
    own = [f"TESTBED_HOST={host}", f"TESTBED_LOCAL={STATE}/local"]
    change = 'cd "$1" 2>/dev/null || cd /; shift; exec "$@"'
    return [
        *["nsenter", "-t", str(init.pid), "-m", "-u", "-i", "-n", "-p", "--", *tied],
        *["env", *own, *env, "sh", "-c", change, "sh", os.getcwd(), *command],
    ]


def execute(host: str, command: Sequence[str]) -> NoReturn:
    """Become a command on a host."""
    _become(host, _inside(need(host), host, command))


def _become(host: str, argv: list[str]) -> NoReturn:
    cgroups.enter(host)
    os.execvp(argv[0], argv)


def run(command: Sequence[str], options: JobOptions) -> NoReturn:
    """Become the launcher of a job, on the first of its hosts."""
    conf = need()
    living = [name for name, host in conf.hosts.items() if alive(host.init)]
    hosts = options.hosts.split(",") if options.hosts else living
    if not hosts:
        raise TestbedError("every host is dead (testbed boot HOST)")
    for host in hosts:
        need(host)
    num_ranks = options.num_ranks or len(hosts) * options.slots
    slots = [f"{host}:{options.slots}" for host in hosts]
    make = _mpirun if options.launcher == "mpirun" else _horovodrun
    launcher = make(options, num_ranks, slots)
    threads = f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '1')}"
    _become(hosts[0], _inside(conf, hosts[0], [*launcher, *options.words, *command], [threads]))


def _mpirun(options: JobOptions, num_ranks: int, slots: Sequence[str]) -> list[str]:
    # The environment is passed on as horovodrun does, less what belongs to one host.
    names = {name for name in os.environ if name.startswith(_PASSED) or name in _PASSED_NAMES}
    passed = [word for name in sorted(names | {"OMP_NUM_THREADS"}) for word in ("-x", name)]
    return [*_MPIRUN.split(), "-np", str(num_ranks), "-H", ",".join(slots), *passed]


def _horovodrun(options: JobOptions, num_ranks: int, slots: Sequence[str]) -> list[str]:
    tool = shutil.which("horovodrun")
    if not tool:
        raise TestbedError("horovodrun not on PATH")
    command = [tool, f"--{options.launcher}", "-np", str(num_ranks)]
    if options.min_ranks:
        most = str(options.max_ranks or num_ranks)
        command += ["--min-np", str(options.min_ranks), "--max-np", most]
        command += ["--host-discovery-script", options.discovery or str(STATE / "discover")]
        if not options.discovery:
            _write_members(slots)
    else:
        command += ["-H", ",".join(slots)]
    return command + (["--network-interfaces", "eth0"] if options.launcher == "gloo" else [])


def set_members(members: Sequence[str]) -> None:
    """Set what the elastic discovery script prints, such as ["host0", "host1:2"]."""
    for member in members:
        need(member.split(":")[0])
    _write_members([member if ":" in member else f"{member}:1" for member in members])


def _write_members(slots: Sequence[str]) -> None:
    fresh = STATE / "members.new"
    fresh.write_text("".join(f"{slot}\n" for slot in slots))
    os.replace(fresh, STATE / "members")
    script = STATE / "discover"
    script.write_text(f"#!/bin/sh\ncat {STATE}/members\n")
    script.chmod(0o755)


# Ranks.


class Rank(NamedTuple):
    """A process that a launcher has started as a rank."""

    pid: int
    rank: str
    command: str


def ranks_on(host: str) -> list[Rank]:
    """Return the ranks on a host, without processes that these have started."""
    found = []
    for pid in cgroups.pids(host):
        rank = _rank_of(pid)
        if rank is None:
            continue
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if _rank_of(int(stat.rpartition(")")[2].split()[1])) is None:
            found.append(Rank(pid, rank, b" ".join(words).decode(errors="replace").strip()))
    return found


def _rank_of(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(_RANK):
                return entry.split(b"=", 1)[1].decode()
    return None


def send_signal(host: str, name: str, *, to_all: bool) -> str:
    """Send a signal to the ranks on a host, or all its processes; returns to whom."""
    conf = need(host)
    try:
        sig = signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise TestbedError(f"no signal {name!r}") from None
    init = conf.hosts[host].init
    pids = cgroups.host_pids(host, init) if to_all else [each.pid for each in ranks_on(host)]
    if not pids:
        raise TestbedError(f"no process to signal on {host}")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)
    return f"{sig.name} to {len(pids)} on {host}: {' '.join(map(str, pids))}"

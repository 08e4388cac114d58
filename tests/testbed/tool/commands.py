"""The commands of ``testbed``: what a user types, and what each does to the hosts."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tests.testbed.tool import boot, cables, cgroups, jobs
from tests.testbed.tool.state import (
    NAME,
    ROOT,
    SBIN,
    STATE,
    SWITCH,
    Conf,
    Host,
    TestbedError,
    address,
    alive,
    kill_and_wait,
    load,
    missing_packages,
    need,
    netns,
    save,
    sh,
)

__all__ = ["main"]

_T = TypeVar("_T")
_MOST_HOSTS = 64
_CHANGE_S = 120.0  # longest wait for another command that changes the testbed
_PRINTS = ("status", "ranks")  # and does no more
_READS = ("exec", "run", "status", "ranks", "signal")  # need not be the only command


def _each(text: str | None, count: int, parse: Callable[[str], _T], what: str) -> list[_T | None]:
    """Read "1,1,0.5", or one value for all: ``count`` values, None for no limit."""
    if text is None:
        return [None] * count
    words = [word.strip() for word in text.split(",")]
    if len(words) == 1:
        words *= count
    if len(words) != count:
        raise TestbedError(f"--{what}: {len(words)} values for {count} hosts")
    return [None if word in ("", "-", "0", "max") else parse(word) for word in words]


# Up and down.


def _up(args: argparse.Namespace) -> int:
    _check_tools()
    asked = _asked(args)
    old = load()
    if old and old.asked() == asked and all(alive(host.init) for host in old.hosts.values()):
        print("already up")
        return 0
    _tear_down()
    (STATE / "local").mkdir(mode=0o700, parents=True)
    try:
        _build(asked, args.ssh_alive)
    except BaseException:
        if not args.keep_failed:
            _tear_down()
        raise
    return _status(args)


def _check_tools() -> None:
    if os.geteuid():
        raise TestbedError("run as root")
    if missing := missing_packages():
        raise TestbedError(f"tools are missing (Debian: apt-get install {' '.join(missing)})")


def _asked(args: argparse.Namespace) -> Conf:
    count: int = args.n
    if not 1 <= count <= _MOST_HOSTS:
        raise TestbedError(f"1 to {_MOST_HOSTS} hosts")
    limits = zip(
        _fitting(_each(args.cpu, count, float, "cpu"), should_fit=args.fit),
        _each(args.rate, count, cables.parse_rate, "rate"),
        _each(args.delay, count, cables.parse_time_ms, "delay"),
        _each(args.jitter, count, cables.parse_time_ms, "jitter"),
        _each(args.loss, count, cables.parse_loss, "loss"),
        _each(args.gaps, count, cables.parse_gaps, "gaps"),
        strict=True,
    )
    hosts = {
        f"host{number}": Host(
            address(number), cpu, rate, delay or 0.0, jitter or 0.0, loss or 0.0, *(gaps or ())
        )
        for number, (cpu, rate, delay, jitter, loss, gaps) in enumerate(limits)
    }
    return Conf(hosts, args.mtu, args.tcp, args.ssh_alive, os.environ["PATH"])


def _fitting(cpus: list[float | None], *, should_fit: bool) -> list[float | None]:
    """Return what hosts get of the CPU, scaled down to what this machine has where asked to."""
    cores = os.cpu_count() or 1
    total = sum(each or 0.0 for each in cpus)
    if total <= cores:
        return cpus
    if not should_fit:
        print(
            f"warning: the hosts' cpu adds up to {total:g} but this machine has {cores} cores; "
            "when all are busy the ratios will not hold (--fit scales them)",
            file=sys.stderr,
        )
        return cpus
    scaled = [each and each * cores / total for each in cpus]
    shown = ",".join(f"{each:.3g}" if each else "-" for each in scaled)
    print(f"cpu scaled to fit {cores} cores: {shown}")
    return scaled


def _build(conf: Conf, ssh_alive_s: int) -> None:
    save(conf)
    boot.make_keys(conf.hosts, ssh_alive_s)
    cables.make_switch(conf.mtu)
    for name in conf.hosts:
        cables.lay(conf, name)
        cgroups.make(name)
        cgroups.limit_cpu(name, None)  # full speed while it starts
        cables.renew(conf, name)
        boot.boot(conf, name)
    boot.wait_for_ssh(conf, conf.hosts)
    for name, host in conf.hosts.items():
        cgroups.limit_cpu(name, host.cpu)


def _down(_: argparse.Namespace) -> int:
    _tear_down()
    return 0


def _tear_down() -> None:
    conf = load()
    left = []
    for host in conf.hosts.values() if conf else ():
        for proc in (host.init, host.relay):
            try:
                kill_and_wait(proc)
            except (TestbedError, OSError) as error:
                left.append(str(error))
    # What a lost or half-written state folder would hide.
    spaces = [line.split()[0] for line in sh("ip", "netns", "list").splitlines() if line.split()]
    hosts = netns("host")  # and a number
    for space in spaces:
        if space == SWITCH or (space.startswith(hosts) and space[len(hosts) :].isdigit()):
            _remove_space(space)
    cgroups.remove()
    if STATE.is_dir():
        shutil.rmtree(STATE)
    with contextlib.suppress(OSError):  # another testbed is there
        ROOT.rmdir()
    if left:
        raise TestbedError("; ".join(left))


def _remove_space(space: str) -> None:
    """Remove a network namespace and end what runs in it."""
    for pid in sh("ip", "netns", "pids", space).split():
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)
    for _ in range(100):
        if not sh("ip", "netns", "pids", space).strip():
            break
        time.sleep(0.05)
    sh("ip", "netns", "del", space)


def _status(_: argparse.Namespace) -> int:
    conf = load()
    if conf is None:
        print("down")
        return 1
    is_whole = True
    for name, host in conf.hosts.items():
        is_up = alive(host.init)
        is_whole &= is_up and (not host.is_far or alive(host.relay))
        print(
            f"{name:8} {host.address:12} {'up' if is_up else 'DEAD':5} "
            f"cpu {round(host.cpu, 3) if host.cpu else 'max'} "
            f"rate {f'{host.rate / 1e6:g}mbit' if host.rate else 'max'}{_distance(host)}"
            f"{' CUT' if host.is_cut else ''} "
            f"processes {len(cgroups.host_pids(name, host.init))}"
        )
    return 0 if is_whole else 1


def _distance(host: Host) -> str:
    if not host.is_far:
        return ""
    text = f" delay {host.delay_ms:g}ms jitter {host.jitter_ms:g}ms loss {host.loss * 100:g}%"
    if host.gap_ms:
        text += f" gone {host.gap_ms:g}ms of {host.every_ms:g}ms"
    return text if alive(host.relay) else f"{text} (relay dead)"


# Changes.


def _cpu(args: argparse.Namespace) -> int:
    conf = need(args.host)
    (cores,) = _each(args.cores, 1, float, "cpu")
    cgroups.limit_cpu(args.host, cores)
    conf.hosts[args.host].cpu = cores
    save(conf)
    return 0


def _link(args: argparse.Namespace) -> int:
    conf = need(args.host)
    host = conf.hosts[args.host]
    if args.rate is not None:
        (host.rate,) = _each(args.rate, 1, cables.parse_rate, "rate")
    if args.delay is not None:
        host.delay_ms = _each(args.delay, 1, cables.parse_time_ms, "delay")[0] or 0.0
    if args.jitter is not None:
        host.jitter_ms = _each(args.jitter, 1, cables.parse_time_ms, "jitter")[0] or 0.0
    if args.loss is not None:
        host.loss = _each(args.loss, 1, cables.parse_loss, "loss")[0] or 0.0
    if args.gaps is not None:
        gaps = _each(args.gaps, 1, cables.parse_gaps, "gaps")[0]
        host.gap_ms, host.every_ms = gaps or (0.0, 0.0)
    cables.renew(conf, args.host)
    return 0


def _cut(args: argparse.Namespace) -> int:
    conf = need(args.host)
    is_cut = args.verb == "cut"
    (cables.pull if is_cut else cables.plug)(args.host)
    conf.hosts[args.host].is_cut = is_cut
    save(conf)
    return 0


def _crash(args: argparse.Namespace) -> int:
    """Take the power away: nothing more comes from the host, not even a FIN or RST."""
    conf = need(args.host)
    cables.pull(args.host)
    kill_and_wait(conf.hosts[args.host].init)
    conf.hosts[args.host].is_cut = True
    save(conf)
    return 0


def _boot(args: argparse.Namespace) -> int:
    conf = need(args.host)
    host = conf.hosts[args.host]
    if not alive(host.init):
        cgroups.limit_cpu(args.host, None)
        boot.boot(conf, args.host)
    cables.plug(args.host)
    host.is_cut = False
    save(conf)
    boot.wait_for_ssh(conf, [args.host])
    cgroups.limit_cpu(args.host, host.cpu)
    return 0


# Jobs.


def _exec(args: argparse.Namespace) -> int:
    jobs.execute(args.host, _command(args) or ["bash"])


def _run(args: argparse.Namespace) -> int:
    command = _command(args)
    if not command:
        raise TestbedError("run: no command")
    options = jobs.JobOptions(
        launcher=args.launcher,
        num_ranks=args.np,
        slots=args.slots,
        hosts=args.hosts,
        min_ranks=args.min_np,
        max_ranks=args.max_np,
        discovery=args.discovery,
        words=tuple(args.option),
    )
    jobs.run(command, options)


def _command(args: argparse.Namespace) -> list[str]:
    words: list[str] = args.command
    return words[1:] if words[:1] == ["--"] else words


def _members(args: argparse.Namespace) -> int:
    need()
    jobs.set_members(args.members)
    return 0


def _ranks(args: argparse.Namespace) -> int:
    conf = need(args.host)
    for host in [args.host] if args.host else conf.hosts:
        for each in jobs.ranks_on(host):
            print(host, each.pid, each.rank, each.command[:150])
    return 0


def _signal(args: argparse.Namespace) -> int:
    print(jobs.send_signal(args.host, args.signal, to_all=args.all))
    return 0


# The command line.


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let one command change this testbed at a time."""
    with socket.socket(socket.AF_UNIX) as lock:
        until = time.monotonic() + _CHANGE_S
        while True:
            try:
                lock.bind(f"\0testbed-{NAME}")  # an abstract one leaves no lock file behind
                break
            except OSError:
                if time.monotonic() > until:
                    raise TestbedError(
                        "another testbed command has been changing this testbed for "
                        f"{_CHANGE_S:g} s"
                    ) from None
                time.sleep(0.05)
        yield


class _Verbs:
    """The command line's parser, built verb by verb."""

    def __init__(self) -> None:
        self.parser = argparse.ArgumentParser(
            prog="testbed", description="A few real hosts on one machine (see README.md)."
        )
        self._verbs = self.parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(
        self,
        name: str,
        do: Callable[[argparse.Namespace], int],
        text: str,
        *,
        has_host: bool = False,
    ) -> argparse.ArgumentParser:
        """Add a verb; its host, if it has one, comes first."""
        parser: argparse.ArgumentParser = self._verbs.add_parser(name, help=text, description=text)
        parser.set_defaults(do=do)
        if has_host:
            parser.add_argument("host")
        return parser


def _parser() -> argparse.ArgumentParser:
    verbs = _Verbs()
    _add_up(verbs)
    verbs.add("down", _down, "remove all that up made")
    verbs.add("status", _status, "what is up; exit 1 if not all of it")
    execute = verbs.add("exec", _exec, "run a command on a host (default: a shell)", has_host=True)
    execute.add_argument("command", nargs=argparse.REMAINDER)
    _add_run(verbs)
    text = "set what the elastic discovery script prints, e.g. host0 host1:2"
    verbs.add("members", _members, text).add_argument("members", nargs="+")
    cpu = verbs.add("cpu", _cpu, "change a host's CPU limit now", has_host=True)
    cpu.add_argument("cores")
    text = "change a host's link now (0 takes a limit away)"
    link = verbs.add("link", _link, text, has_host=True)
    for option in ("rate", "delay", "jitter", "loss", "gaps"):
        link.add_argument(f"--{option}")
    verbs.add("cut", _cut, "pull the host's cable", has_host=True)
    verbs.add("heal", _cut, "plug it in again", has_host=True)
    text = "cut the host's power: all its processes end, no packet leaves"
    verbs.add("crash", _crash, text, has_host=True)
    verbs.add("boot", _boot, "start a crashed host again", has_host=True)
    ranks = verbs.add("ranks", _ranks, "the job's processes: host, pid, rank, command")
    ranks.add_argument("host", nargs="?")
    text = "send a signal (KILL, STOP, CONT, ...) to the job's processes on a host"
    signals = verbs.add("signal", _signal, text, has_host=True)
    signals.add_argument("signal")
    text = "to every process of the host but its first (STOP: the host hangs)"
    signals.add_argument("--all", action="store_true", help=text)
    return verbs.parser


def _add_up(verbs: _Verbs) -> None:
    text = "make N hosts: host0, host1, ... (values: one for all, or one per host; 0 for none)"
    up = verbs.add("up", _up, text)
    up.add_argument("n", type=int, metavar="N")
    up.add_argument("--cpu", help="cores' worth of CPU time per host, e.g. 1,1,0.5,0.25")
    text = "scale --cpu down so that it adds up to this machine's cores"
    up.add_argument("--fit", action="store_true", help=text)
    up.add_argument("--rate", help="link rate each way, e.g. 100mbit or 1gbit,1gbit,100mbit,10mbit")
    up.add_argument("--delay", help="one-way delay each way, e.g. 5ms (through a relay)")
    up.add_argument("--jitter", help="random +- on the delay, e.g. 1ms")
    up.add_argument("--loss", help="chance that a packet is lost, each way, e.g. 1%%")
    up.add_argument("--gaps", help="the link is gone for so long in each such time, e.g. 300ms/3s")
    up.add_argument("--mtu", type=int, default=1500)
    text = "TCP congestion control between the hosts (default cubic; -: the machine's own)"
    up.add_argument("--tcp", default="cubic", help=text)
    text = "ssh gives a silent host up after 2 x this (default 0: never, as ssh does by default)"
    up.add_argument("--ssh-alive", type=int, default=0, metavar="SECONDS", help=text)
    up.add_argument("--keep-failed", action="store_true", help=argparse.SUPPRESS)


def _add_run(verbs: _Verbs) -> None:
    run = verbs.add("run", _run, "start a job over the hosts, launched from the first of them")
    text = "horovodrun --gloo (default), horovodrun --mpi, or plain mpirun"
    run.add_argument("--launcher", choices=("gloo", "mpi", "mpirun"), default="gloo", help=text)
    run.add_argument("--np", type=int, help="processes (default: one per host and slot)")
    run.add_argument("--slots", type=int, default=1, help="processes per host")
    run.add_argument("--hosts", default="", help="e.g. host0,host2 (default: all that are alive)")
    run.add_argument("--min-np", type=int, help="elastic: run on while this many are left")
    run.add_argument("--max-np", type=int)
    text = "elastic: your own discovery script (default: the list that `members` sets)"
    run.add_argument("--discovery", default="", help=text)
    text = "one more word for horovodrun or mpirun, e.g. --option=--verbose"
    run.add_argument("--option", action="append", default=[], help=text)
    run.add_argument("command", nargs=argparse.REMAINDER)


def _serve(words: Sequence[str]) -> bool:
    """Do what the tool asks of itself, in a process inside a host or the switch."""
    match list(words):
        case ["_init", host]:
            boot.be_first_process(host)
        case ["_spawn", host]:
            boot.spawn(host)
        case ["_offload", device, is_on]:
            cables.set_offloads(device, is_on == "1")
        case _:
            return False
    return True


def main(words: Sequence[str]) -> int | str:
    """Do a command; returns the exit status, or what was wrong."""
    os.environ["PATH"] = SBIN
    try:
        if _serve(words):
            return 0
        args = _parser().parse_args(words)
        if args.verb in _PRINTS:  # whoever reads, as ``head``, may have enough
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        do: Callable[[argparse.Namespace], int] = args.do
        with contextlib.nullcontext() if args.verb in _READS else _alone():
            return do(args)
    except TestbedError as error:
        return f"testbed: {error}"
    except KeyboardInterrupt:
        return 130

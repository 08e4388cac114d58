"""A host comes up: its keys, its process 1 with mounts and an sshd of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.testbed.tool import cgroups
from tests.testbed.tool.state import (
    NAME,
    NET,
    SBIN,
    SSH_PORT,
    STATE,
    TESTBED,
    Conf,
    Host,
    TestbedError,
    alive,
    host_folder,
    load,
    netns,
    process,
    save,
    sh,
)

__all__ = ["be_first_process", "boot", "make_keys", "spawn", "wait_for_ssh"]

_SSH = STATE / "ssh"
_SPAWN_S, _ANSWER_S = 10.0, 60.0

_SSH_CONFIG = """\
Host host* {net}*
  User root
  Port {port}
  IdentityFile {keys}/id
  IdentitiesOnly yes
  UserKnownHostsFile {keys}/known_hosts
  StrictHostKeyChecking yes
  PasswordAuthentication no
  LogLevel ERROR
  ConnectTimeout 10
"""
_SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {keys}/key-{host}
AuthorizedKeysFile {keys}/authorized_keys
PidFile {own}/sshd.pid
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
AuthenticationMethods publickey
X11Forwarding no
PrintMotd no
UseDNS no
MaxStartups 100
MaxSessions 100
ClientAliveInterval 0
SetEnv "PATH={path}" TESTBED_HOST={host} TESTBED_LOCAL={state}/local
"""


def make_keys(hosts: Mapping[str, Host], ssh_alive_s: int) -> None:
    """Make the keys of all hosts, and the ssh settings and names that they share."""
    _SSH.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_key("testbed", _SSH / "id")
    shutil.copy(_SSH / "id.pub", _SSH / "authorized_keys")
    known = ""
    for name, host in hosts.items():
        _make_key(name, _SSH / f"key-{name}")
        key = " ".join((_SSH / f"key-{name}.pub").read_text().split()[:2])
        known += "".join(f"[{each}]:{SSH_PORT} {key}\n" for each in (name, host.address))
    (_SSH / "known_hosts").write_text(known)
    config = _SSH_CONFIG.format(net=NET, port=SSH_PORT, keys=_SSH)
    if ssh_alive_s:
        config += f"  ServerAliveInterval {ssh_alive_s}\n  ServerAliveCountMax 2\n"
    (_SSH / "config").write_text(config)
    names = "".join(f"{host.address} {name}\n" for name, host in hosts.items())
    (STATE / "etc-hosts").write_text("127.0.0.1 localhost\n" + names)


def _make_key(comment: str, path: Path) -> None:
    sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


# From outside.


def boot(conf: Conf, host: str) -> None:
    """Start a host's process 1."""
    own = host_folder(host)
    for each in ("run", "local"):
        (own / each).mkdir(parents=True, exist_ok=True)
    save(conf)
    pid_file = own / "init.pid"
    pid_file.unlink(missing_ok=True)
    with (own / "init.log").open("ab") as log:
        started = subprocess.run(
            [sys.executable, str(TESTBED), "_spawn", host],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    if started.returncode:
        raise TestbedError(f"{host} does not start: {_tail(own / 'init.log')}")
    conf.hosts[host].init = process(int(pid_file.read_text()))
    save(conf)


def spawn(host: str) -> None:
    """Start a host's process 1 in its namespaces and group; leave its number, as seen here."""
    cgroups.enter(host)
    spaces = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
    command = [sys.executable, str(TESTBED), "_init", host]
    started = subprocess.Popen(["ip", "netns", "exec", netns(host), "unshare", *spaces, *command])
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    until = time.monotonic() + _SPAWN_S
    pids: list[str] = []
    while time.monotonic() < until and started.poll() is None and not pids:
        time.sleep(0.02)
        pids = children.read_text().split()
    if not pids:
        raise TestbedError("no process 1")
    (host_folder(host) / "init.pid").write_text(pids[0])


def wait_for_ssh(conf: Conf, hosts: Iterable[str]) -> None:
    """Wait until each host answers on its ssh port, asked from inside its own namespaces."""
    until = time.monotonic() + _ANSWER_S
    for name in hosts:
        host = conf.hosts[name]
        place = f"('{host.address}', {SSH_PORT})"
        code = f"import socket; print(socket.create_connection({place}, 5).recv(4).decode())"
        while True:
            if host.init is None or not alive(host.init):
                raise TestbedError(f"{name} ended at once: {_tail(host_folder(name) / 'init.log')}")
            inside = ["nsenter", "-t", str(host.init.pid), "-n"]
            if "SSH-" in sh(*inside, sys.executable, "-c", code, check=False):
                break
            if time.monotonic() > until:
                log = host_folder(name) / "sshd.log"
                raise TestbedError(f"sshd on {name} does not answer: {_tail(log)}")
            time.sleep(0.1)


def _tail(path: Path) -> str:
    try:
        return " | ".join(path.read_text(errors="replace").split("\n")[-4:]).strip(" |")
    except OSError:
        return ""


# Inside.


def be_first_process(host: str) -> None:
    """Be process 1 of a host: make its mounts, run its sshd, reap orphans; does not return."""
    own = host_folder(host)
    _mount_all(host, own)
    conf = load()
    assert conf is not None
    config = own / "sshd_config"
    config.write_text(
        _SSHD_CONFIG.format(
            port=SSH_PORT,
            address=conf.hosts[host].address,
            keys=_SSH,
            host=host,
            own=own,
            path=conf.path,
            state=STATE,
        )
    )
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    sshd = str(shutil.which("sshd", path=SBIN))
    subprocess.Popen(
        [sshd, "-D", "-f", str(config), "-E", str(own / "sshd.log")], stdin=subprocess.DEVNULL
    )
    while True:  # also reaps whatever its parent left behind
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(1)


def _mount_all(host: str, own: Path) -> None:
    def mount(*argv: object) -> None:
        sh("mount", *map(str, argv))

    mount("--make-rprivate", "/")
    socket.sethostname(host)
    mount("-t", "proc", "proc", "/proc")  # /sys: `ip netns exec` has mounted its own already
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    mount("--bind", STATE / "etc-hosts", "/etc/hosts")
    mount("--bind", _SSH / "config", "/etc/ssh/ssh_config")
    mount("--bind", own / "local", STATE / "local")
    # A /run of its own, with only this testbed's state folder in it.
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", own / "run")
    (own / "run" / "sshd").mkdir(mode=0o755)
    (own / "run" / "testbed" / NAME).mkdir(parents=True)
    mount("--rbind", STATE, own / "run" / "testbed" / NAME)
    mount("--rbind", own / "run", "/run")

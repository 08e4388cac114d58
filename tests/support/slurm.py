"""A Slurm of one host, for as long as a test runs: its own daemons, ports and files.

It takes root and Debian's packages (`apt-get install slurmctld slurmd slurm-client`), and leaves a
Slurm alone that the machine may be part of.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["missing_for_slurm", "private_slurm"]

_DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
_CLIENTS = ("sbatch", "srun", "scontrol", "sinfo")
_START_TIMEOUT_S = 20.0


def _program(name: str) -> str | None:
    """Return the path of one of Slurm's programs; the names of Debian's daemons end in -wlm."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return shutil.which(name, path=path) or shutil.which(f"{name}-wlm", path=path)


def missing_for_slurm() -> str:
    """Say why no Slurm can be started here; empty where it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons start jobs as root"
    missing = [name for name in (*_DAEMONS, *_CLIENTS) if _program(name) is None]
    advice = "apt-get install slurmctld slurmd slurm-client"
    return f"no {', '.join(missing)} here: {advice}" if missing else ""


@contextlib.contextmanager
def private_slurm(folder: Path, *, cpus: int) -> Iterator[Mapping[str, str]]:
    """Run a Slurm whose one host has ``cpus`` CPUs, however many there are; yield its variables."""
    found = {name: _program(name) for name in (*_DAEMONS, *_CLIENTS)}
    programs = {name: path for name, path in found.items() if path is not None}
    # The packages' libraries, where they were unpacked elsewhere than in the system's folders.
    plugins = Path(programs["slurmctld"]).parents[1] / "lib/x86_64-linux-gnu/slurm-wlm"
    config = folder / "slurm.conf"
    config.write_text(
        f"""
ClusterName=test
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={_free_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
{f"PluginDir={plugins}" if plugins.is_dir() else ""}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
NodeName={socket.gethostname()} NodeAddr=127.0.0.1 Port={_free_port()} CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
    )
    clients = os.path.dirname(programs["sbatch"])
    environ = {
        **os.environ,
        "SLURM_CONF": str(config),
        # Jobs find the launchers that are beside this Python, as in an active environment.
        "PATH": os.pathsep.join(
            [os.path.dirname(sys.executable), os.environ.get("PATH", ""), clients]
        ),
    }
    commands = (
        [programs["slurmctld"], "-D"],
        [programs["slurmd"], "-D", "-d", programs["slurmstepd"]],
    )
    with contextlib.ExitStack() as ends:
        for number, command in enumerate(commands):
            log = ends.enter_context((folder / f"daemon{number}.out").open("w"))
            daemon = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
            ends.callback(_end, daemon)
        _wait_until_idle(programs["sinfo"], environ, folder)
        yield environ


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(timeout=10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _wait_until_idle(sinfo: str, environ: Mapping[str, str], folder: Path) -> None:
    until = time.monotonic() + _START_TIMEOUT_S
    told = ""
    while time.monotonic() < until:
        asked = subprocess.run(
            [sinfo, "--noheader", "--format=%T"],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=False,
        )
        told = (asked.stdout + asked.stderr).strip()
        if told == "idle":
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("daemon*.out")))
    raise AssertionError(f"Slurm is not ready after {_START_TIMEOUT_S:g} s: {told}\n{logs}")


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])

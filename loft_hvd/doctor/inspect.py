"""What is installed, built and allowed here: inspection only, safe on a login node.

Nothing here starts Horovod, opens a socket or makes a CUDA context. ``horovodrun --check-build``
and ``--version`` commands run with a time limit. ``loft_hvd.doctor.run`` is the one that does work.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from loft_hvd._native import datagram_extension, explain_missing, extension
from loft_hvd.aggregation.compute import num_threads
from loft_hvd.config import (
    KEEPALIVE_OPTIONS,
    SSH_OPTIONS,
    VARIABLES,
    Config,
    config,
    unknown_variables,
)
from loft_hvd.errors import ArgumentError
from loft_hvd.topology import cpu_flags, vector_levels
from loft_hvd.transport.congestion import has_bbr

__all__ = [
    "EXTRAS",
    "DoctorFinding",
    "HorovodBuild",
    "Section",
    "cuda_kernels",
    "horovod_build",
    "inspect_all",
    "installed",
    "launcher",
    "parse_check_build",
    "verdict",
]

_PROBE_TIMEOUT_S = 60.0  # a choice: horovodrun imports torch, which a cold disk makes slow
_LOST_HOST_S = 30.0  # a choice: three times what the heartbeat takes to name a lost host
_BUILD_ADVICE = "`make setup` builds it; VENV=active does so in an environment of your own"
_MPI_ADVICE = "sudo apt-get install openmpi-bin libopenmpi-dev, then `make setup`"
_BUSY_ADVICE = "the machine may be busy: look again when it is not"
_LEAST_BUFFER = 4 * 2**20  # bytes; a choice: 0.3 s of 100 Mb/s, while a rank's CPUs are busy
_MOST_BUFFER = Path("/proc/sys/net/core/rmem_max")
_OPTIONAL = "optional:"  # how advice begins that nobody has to follow
# Package -> the extra of pyproject.toml that installs it.
EXTRAS = {
    "horovod": "horovod",
    "matplotlib": "plots",
    "pyarrow": "store",
    "scipy": "plan",
    "typer": "cli",
    "rich": "cli",
    "xxhash": "store",
}


@dataclass(frozen=True)
class DoctorFinding:
    """One thing that was looked at."""

    name: str  # what
    value: str  # what was found, as text for a person
    advice: str = ""  # what to do when something is missing; empty when nothing is


@dataclass(frozen=True)
class Section:
    """Findings that belong together."""

    title: str
    findings: tuple[DoctorFinding, ...]


@dataclass(frozen=True)
class HorovodBuild:
    """What an installed Horovod was built with, by its own account."""

    version: str = ""  # of Horovod, or "" when it is not installed
    frameworks: tuple[str, ...] = ()  # such as "PyTorch"
    controllers: tuple[str, ...] = ()  # "MPI", "Gloo"
    operations: tuple[str, ...] = ()  # such as "NCCL", "MPI", "Gloo"
    trouble: str = ""  # why this could not be found out, or ""
    advice: str = _BUILD_ADVICE  # what to do about it


def inspect_all(
    build: HorovodBuild | None = None, *, probe: Callable[[Sequence[str]], str] | None = None
) -> tuple[Section, ...]:
    """Look at everything; ``build`` is what Horovod says of itself, if it was asked already.

    ``probe`` runs a short command and returns what it prints, or raises OSError or
    ``subprocess.SubprocessError``. By default it is a subprocess with a limit.
    """
    ask = probe or _probe
    return (
        Section("Versions", _versions()),
        Section("Kernels", _kernels()),
        Section("CUDA", _cuda()),
        Section("Horovod", _horovod(build or horovod_build(probe=ask))),
        Section("Launchers", _launchers(ask)),
        Section("CPU", _cpu()),
        Section("Links", _links()),
        Section("Settings", _settings()),
    )


def verdict(sections: Sequence[Section], *, failed: str = "") -> str:
    """Return one line: whether anything found is to be mended, and what comes first.

    ``failed`` names what was tried beside looking, and went wrong; "" where nothing did.
    """
    found = [finding for section in sections for finding in section.findings if finding.advice]
    needed = [finding for finding in found if not finding.advice.startswith(_OPTIONAL)]
    optional = f"; optional and not here: {len(found) - len(needed)}" * (found != needed)
    not_ready = f"NOT ready, {failed}" if failed else ""
    if not needed:
        return f"Verdict: {not_ready or 'ready'}{optional}."
    first = needed[0]
    more = f" (and {len(needed) - 1} more, marked ->)" * (len(needed) > 1)
    mend = f"mend {first.name} first: {first.advice}{more}{optional}."
    return f"Verdict: {not_ready}; {mend}" if failed else f"Verdict: {mend}"


def launcher(name: str) -> str:
    """Return the path of a program beside this Python, else on PATH, else ""."""
    # Beside first: another environment's horovodrun on PATH would start another Python.
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else shutil.which(name) or ""


def _probe(command: Sequence[str]) -> str:
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, so that all of it can be ended
    ) as process:
        try:
            output, errors = process.communicate(timeout=_PROBE_TIMEOUT_S)
        except BaseException:  # nothing that it has started may outlive it
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return output


def installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions() -> tuple[DoctorFinding, ...]:
    findings = [
        DoctorFinding("Python", f"{platform.python_version()} ({sys.executable})"),
        DoctorFinding("platform", f"{platform.platform()}, {' '.join(platform.libc_ver())}"),
    ]
    for name in ("loft-hvd", "torch", "numpy", *EXTRAS):
        version = installed(name)
        advice = ""
        if not version:
            advice = f"pip install {name}"
            if name == "horovod":
                advice = _BUILD_ADVICE
            elif name in EXTRAS:
                extra = EXTRAS[name]
                advice = (
                    f"{_OPTIONAL} pip install 'loft-hvd[{extra}]', or '.[{extra}]' in a checkout"
                )
        findings.append(DoctorFinding(name, version or "not installed", advice))
    return tuple(findings)


def _kernels() -> tuple[DoctorFinding, ...]:
    module = extension()
    if module is None:
        return (DoctorFinding("extension", "not built; torch does its work", explain_missing()),)
    levels = [str(level) for level in module.isa_levels()]  # the best last
    asked, runs = _usable_config().isa, vector_levels(cpu_flags())
    advice = ""
    if asked is None and runs[-1] not in levels:
        advice = (
            f"{_OPTIONAL} kernels for {runs[-1]}, which runs here, are faster: `make setup`, or "
            "install again with LOFT_HVD_LEVELS=native"
        )
    elif asked is not None and asked not in levels:
        advice = f"LOFT_HVD_ISA={asked} does not run here; use one of {', '.join(levels)}"
        if asked in runs:
            advice = (
                f"LOFT_HVD_ISA={asked} runs here but was not built; build again with "
                f"LOFT_HVD_LEVELS=all, or use one of {', '.join(levels)}"
            )
    return (
        DoctorFinding("extension", str(module.__file__)),
        DoctorFinding("instruction sets", ", ".join(levels)),
        DoctorFinding("instruction set used", asked or levels[-1], advice),
        DoctorFinding("CUDA kernels", *cuda_kernels(bool(module.has_cuda), devices=_num_devices())),
    )


def _usable_config() -> Config:
    """Return the settings, or the defaults where they are wrong, which ``_settings`` reports."""
    try:
        return config()
    except ArgumentError:
        return Config()


def _num_devices() -> int:
    """Return how many NVIDIA GPUs are here."""
    # By their device files: asking CUDA would make a context, which takes memory of a GPU in use.
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def cuda_kernels(is_built: bool, *, devices: int) -> tuple[str, str]:
    """Say whether the CUDA half is in the extension, and what to do when a GPU waits for it."""
    if is_built or not devices:
        return "built" if is_built else "not built: no GPU here; LOFT_HVD_CUDA=1 builds them", ""
    return (
        "not built; gradients on a GPU are aggregated in plain torch",
        "put nvcc (12.1 or newer) on PATH, or set CUDACXX, then LOFT_HVD_CUDA=1 make setup",
    )


def _cuda() -> tuple[DoctorFinding, ...]:
    built = torch.version.cuda
    devices = _num_devices()
    found = [
        DoctorFinding("torch built for", f"CUDA {built}" if built else "CPU only"),
        DoctorFinding("device files", f"{devices} NVIDIA" if devices else "none"),
    ]
    if devices and not built:
        found.append(DoctorFinding("available", "no", "install a torch that is built for CUDA"))
    elif built:
        usable = torch.cuda.is_available()
        advice = "" if usable or not devices else "the driver is too old for this torch, or hidden"
        found.append(DoctorFinding("available", "yes" if usable else "no", advice))
    return tuple(found)


def parse_check_build(text: str) -> HorovodBuild:
    """Read what ``horovodrun --check-build`` prints."""
    version = re.search(r"Horovod v(\S+?):?\s", text)
    marked: dict[str, list[str]] = {}
    heading = ""
    # Available Controllers:      a heading, then one line for each part,
    #     [ ] MPI                 not built,
    #     [X] Gloo                built.
    for line in text.splitlines():
        if line.startswith("Available "):
            heading = line.removeprefix("Available ").rstrip(": ").lower()
        found = re.match(r"\s*\[X\]\s*(.+?)\s*$", line)
        if found:
            marked.setdefault(heading, []).append(found.group(1))
    return HorovodBuild(
        version=version.group(1) if version else "",
        frameworks=tuple(marked.get("frameworks", ())),
        controllers=tuple(marked.get("controllers", ())),
        operations=tuple(marked.get("tensor operations", ())),
        trouble="" if version else "horovodrun --check-build prints nothing that is known",
    )


def horovod_build(*, probe: Callable[[Sequence[str]], str] | None = None) -> HorovodBuild:
    """Ask the installed Horovod, in a process of its own, what it was built with."""
    # A process of its own: importing Horovod here would load its library, which may need a GPU.
    version, program = installed("horovod"), launcher("horovodrun")
    if not version or not program:
        return HorovodBuild(version=version, trouble="Horovod is not installed beside this Python")
    try:
        text = _check_build(program) if probe is None else probe([program, "--check-build"])
    except subprocess.TimeoutExpired as error:
        trouble = f"horovodrun --check-build took longer than its limit of {error.timeout:g} s"
        # Who starts ranks goes on: Gloo is what a build has unless it was told otherwise.
        return HorovodBuild(
            version=version, controllers=("Gloo",), trouble=trouble, advice=_BUSY_ADVICE
        )
    except (OSError, subprocess.SubprocessError) as error:
        return HorovodBuild(version=version, trouble=f"horovodrun --check-build: {error}")
    return parse_check_build(text)


@functools.cache
def _check_build(program: str) -> str:
    """Return what a horovodrun says it was built with; asked once, as it takes seconds of CPU."""
    return _probe([program, "--check-build"])


def _horovod(build: HorovodBuild) -> tuple[DoctorFinding, ...]:
    if build.trouble:
        return (DoctorFinding("Horovod", build.trouble, build.advice),)
    torch_advice = "" if "PyTorch" in build.frameworks else f"built without torch: {_BUILD_ADVICE}"
    gloo_advice = "" if build.controllers else f"neither Gloo nor MPI: {_BUILD_ADVICE}"
    # mpicc was there when setup ran, or came later; in both cases building again brings MPI.
    if "MPI" not in build.controllers and shutil.which("mpicc"):
        gloo_advice = f"MPI is here but Horovod was built without it: {_BUILD_ADVICE}"
    return (
        DoctorFinding("frameworks", ", ".join(build.frameworks) or "none", torch_advice),
        DoctorFinding("controllers", ", ".join(build.controllers) or "none", gloo_advice),
        DoctorFinding("operations", ", ".join(build.operations) or "none"),
    )


def _launchers(ask: Callable[[Sequence[str]], str]) -> tuple[DoctorFinding, ...]:
    findings = []
    for name, advice in (
        ("horovodrun", _BUILD_ADVICE),
        (
            "mpirun",
            f"{_OPTIONAL} {_MPI_ADVICE}",
        ),
    ):
        path = launcher(name)
        value = path or "not found"
        if path and name == "mpirun":
            try:
                value = f"{ask([path, '--version']).strip().splitlines()[0]} ({path})"
            except subprocess.TimeoutExpired as error:
                value = f"{path} has not answered within {error.timeout:g} s"
                path, advice = "", _BUSY_ADVICE
            except (OSError, subprocess.SubprocessError, IndexError) as error:
                value, advice = f"{path} does not start", f"mend or remove it: {error}"
                path = ""
        findings.append(DoctorFinding(name, value, "" if path else advice))
        if path and name == "mpirun" and "Open MPI" in value:
            findings.append(_lost_hosts(ask))
        if path and name == "horovodrun":
            findings.append(_lost_ssh(ask))
    return tuple(findings)


def _lost_ssh(ask: Callable[[Sequence[str]], str]) -> DoctorFinding:
    """Say after how long horovodrun's ssh notices that a host is gone, as it is set here."""
    name = "ssh, lost hosts"
    try:  # -G: the settings for a host, which is not asked
        text = ask([launcher("ssh"), "-G", "loft-hvd.invalid"]) if launcher("ssh") else ""
        told = dict(re.findall(r"(?m)^serveralive(interval|countmax) (\d+)$", text))
        every_s, times = int(told["interval"]), int(told["countmax"])
    except (OSError, subprocess.SubprocessError, KeyError):
        return DoctorFinding(name, "not known")
    notices_s = every_s * times
    value = f"noticed after {notices_s} s" if notices_s else "not noticed"
    advice = f"{_OPTIONAL} elastic jobs on several hosts, in ~/.ssh/config: {SSH_OPTIONS}"
    return DoctorFinding(name, value, "" if 0 < notices_s <= _LOST_HOST_S else advice)


def _lost_hosts(ask: Callable[[Sequence[str]], str]) -> DoctorFinding:
    """Say after how long mpirun notices that a host is gone, as it is set here."""
    name = "mpirun, lost hosts"
    command = [launcher("ompi_info"), *("--param", "oob", "tcp", "--level", "9", "--parsable")]
    try:
        told = dict(re.findall(r"oob_tcp_keepalive_(\w+):value:(\d+)", ask(command)))
        idle_s, every_s, times = (int(told[key]) for key in ("time", "intvl", "probes"))
    except (OSError, subprocess.SubprocessError, KeyError):
        return DoctorFinding(name, "not known")  # as of Open MPI 5, which has other daemons
    notices_s = idle_s + every_s * times
    value = f"noticed after {notices_s} s, unless a rank runs beside mpirun and ends it"
    advice = f"{_OPTIONAL} jobs launched from a host without ranks: mpirun {KEEPALIVE_OPTIONS}"
    return DoctorFinding(name, value, advice if notices_s > _LOST_HOST_S else "")


def _cpu() -> tuple[DoctorFinding, ...]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = _usable_config().local_ranks
    hint = '; with several nodes, over="nodes" sends fewer bytes between them (docs/levels.md)'
    return (
        DoctorFinding("cores", f"{allowed} allowed of {os.cpu_count()}"),
        DoctorFinding("ranks here, says the launcher", f"{ranks}{hint if ranks > 1 else ''}"),
        DoctorFinding("vector instructions", ", ".join(vector_levels(cpu_flags()))),
        DoctorFinding("threads of torch", str(torch.get_num_threads())),
    )


def _links() -> tuple[DoctorFinding, ...]:
    value, advice = "here", ""
    if not has_bbr():
        value = "not in this kernel by now"
        advice = (
            f"{_OPTIONAL} `sudo modprobe tcp_bbr`, where hosts are far from each other or lose "
            "packets"
        )
    return (DoctorFinding("BBR, for long and lossy links", value, advice), *_datagrams())


def _datagrams() -> tuple[DoctorFinding, ...]:
    """Look at what gather=LossTolerant() needs."""
    name = "datagrams, for gather=LossTolerant()"
    module, reason = datagram_extension()
    if module is None:
        return (DoctorFinding(name, "not built", f"{_OPTIONAL} {reason}"),)
    found = DoctorFinding(name, str(module.__file__))
    try:
        most = int(_MOST_BUFFER.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no Linux
        return (found,)
    advice = ""
    if most < _LEAST_BUFFER:
        advice = (
            f"{_OPTIONAL} `sudo sysctl -w net.core.rmem_max={_LEAST_BUFFER}` on hosts that use "
            "them: what finds a full buffer is lost"
        )
    return (found, DoctorFinding("buffers of UDP, at most", f"{most} bytes", advice))


def _settings() -> tuple[DoctorFinding, ...]:
    findings = []
    # A misspelt variable is the one mistake that nothing else can tell.
    for name, nearest in unknown_variables().items():
        advice = f"is {nearest} meant?" if nearest else "nothing reads it; unset it"
        findings.append(DoctorFinding(name, "no setting of this name", advice))
    try:
        settings = config()
    except ArgumentError as error:
        return (*findings, DoctorFinding("LOFT_HVD_*", "not usable", str(error)))
    for name, variable in VARIABLES.items():
        value = getattr(settings, name)
        text = "not set" if value is None else str(value)
        findings.append(
            DoctorFinding(variable, text + " (default)" * (value == getattr(Config, name)))
        )
    return (*findings, DoctorFinding("threads of an aggregation", str(num_threads())))

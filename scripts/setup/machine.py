"""What this machine must have before anything can be installed, and the way to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.setup.runner import SetupError, output_of

__all__ = [
    "NEWEST",
    "OLDEST",
    "Compiler",
    "Python",
    "build_jobs",
    "check_disk",
    "choose_python",
    "compiler_problems",
    "find_compiler",
    "has_room_for_two_builds",
]

OLDEST, NEWEST = (3, 10), (3, 13)  # what torch 2.13, the pins and Horovod 0.28.1 all work with
_NAMES = ("python3.13", "python3.12", "python3.11", "python3.10")
# Asked of an interpreter: its version, whether it can be embedded against, whether it makes venvs.
_PROBE = """
import importlib.util, os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
print(sys.version_info[0], sys.version_info[1], int(os.path.isfile(header)), int(venv))
"""
# Needs the C++20 library as well as the language: torch's headers use both.
_CXX20 = """
#include <concepts>
#include <span>
template <std::integral T> T twice(T x) { return 2 * x; }
"""
# Debian's and Ubuntu's names; on other systems the package's name still says what to look for.
_APT = "sudo apt-get install -y"
# Memory of one compiler at its peak, measured by getrusage with g++ 12, with room: Horovod's files
# that include all of torch took 1.6 GiB, the extension's kernels less than 1 GiB.
_HOROVOD_JOB_BYTES = 2 * 2**30
_KERNEL_JOB_BYTES = 2**30


@dataclass(frozen=True)
class Python:
    """An interpreter and what it lacks."""

    path: str
    version: tuple[int, int]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler; ``identity`` is its version and target."""

    path: str
    identity: str


def _probe_python(path: str, *, needs_venv: bool) -> Python | None:
    """Ask one interpreter what it can do; None when it does not start."""
    # pyenv's names on the PATH end in an error for versions that are not active: no four words.
    words = output_of([path, "-c", _PROBE]).split()
    if len(words) != 4:
        return None
    major, minor, has_header, has_venv = (int(word) for word in words)
    version, problems = (major, minor), []
    packages = f"python{major}.{minor}"
    if not OLDEST <= version <= NEWEST:
        problems.append(
            f"{path} is Python {major}.{minor}; Python 3.10 to 3.13 is needed: install one "
            "and name it, for example `make setup PYTHON=python3.12`"
        )
    if not has_header:
        problems.append(f"Python.h of {path} is missing: {_APT} {packages}-dev")
    if needs_venv and not has_venv:
        problems.append(f"{path} cannot make virtual environments: {_APT} {packages}-venv")
    return Python(path, version, tuple(problems))


def choose_python(asked: str, *, default: str, needs_venv: bool) -> Python:
    """Return the interpreter that was asked for, or else the first one here that has everything.

    Raises:
        SetupError: none has; the message says what the best one lacks.
    """
    names: Sequence[str] = [asked] if asked else [default, *_NAMES]
    found = []
    for name in names:
        path = shutil.which(name)
        python = _probe_python(path, needs_venv=needs_venv) if path else None
        if python is not None:
            if not python.problems:
                return python
            found.append(python)
    if not found:
        raise SetupError(
            f"no Python under the name {', '.join(names)}: {_APT} python3 python3-dev python3-venv"
        )
    # Of several incomplete ones tell about the one with a version that will do, else the first.
    best = min(found, key=lambda python: not OLDEST <= python.version <= NEWEST)
    raise SetupError("\n".join(best.problems))


def find_compiler(environ: Mapping[str, str]) -> Compiler | None:
    """Return ``$CXX`` or g++ with its version and target, or None when there is none."""
    path = shutil.which(environ.get("CXX", "").strip() or "g++")
    if path is None:
        return None
    version = output_of([path, "--version"]).split("\n")[0]
    return Compiler(path, f"{version}; {output_of([path, '-dumpmachine'])}")


def compiler_problems(compiler: Compiler | None) -> list[str]:
    """Say what the compiler and make lack for C++20, the standard of torch's headers."""
    problems = []
    if compiler is None:
        problems.append(f"no C++ compiler: {_APT} g++ (or set CXX)")
    elif not _compiles_cxx20(compiler.path):
        problems.append(
            f"{compiler.path} ({compiler.identity}) does not compile C++20, which torch's headers "
            f"need; g++ 10 or newer does: {_APT} g++-12, then set CXX=g++-12 CC=gcc-12"
        )
    if shutil.which("make") is None:
        problems.append(f"make is missing: {_APT} make")
    return problems


def _compiles_cxx20(path: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="loft_hvd-") as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_CXX20, encoding="utf-8")
        command = [path, "-std=c++20", "-fsyntax-only", str(source)]
        try:
            return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
        except (OSError, subprocess.SubprocessError):
            return False


def check_disk(folder: Path, *, needed_bytes: int, what: str) -> None:
    """Refuse to start what would fill the disk.

    Raises:
        SetupError: ``folder`` has less than ``needed_bytes`` free, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise SetupError(f"{folder} cannot be used ({error}); free it or name another") from error
    if not os.access(folder, os.W_OK):
        raise SetupError(f"{folder} is not writable; mend its permissions or name another folder")
    if free < needed_bytes:
        raise SetupError(
            f"{what} needs {needed_bytes / 2**30:.0f} GiB in {folder}, which has "
            f"{free / 2**30:.1f} GiB free; free some, or name another folder"
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def build_jobs() -> int:
    """Return how many compilers Horovod's build may run at once: by cores, and by memory."""
    return max(1, min(len(os.sched_getaffinity(0)), _memory_bytes() // _HOROVOD_JOB_BYTES))


def has_room_for_two_builds() -> bool:
    """Return whether the extension may be compiled while Horovod is: by memory."""
    cores = len(os.sched_getaffinity(0))
    return _memory_bytes() >= cores * (_HOROVOD_JOB_BYTES + _KERNEL_JOB_BYTES)

"""Builds of the extension and of its checks with CMake and Ninja, as tests make them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

__all__ = ["ROOT", "build", "configure", "run", "side_by_side", "tool"]

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> str:
    """Return a build tool's path: beside this Python or on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; make setup brings it")
    return found


def run(
    *command: str | Path, limit_s: float = 2400.0, environ: Mapping[str, str] | None = None
) -> str:
    """Run a command to its end and return what it prints; fail with that when it fails."""
    sanitizers = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        env={**os.environ, **sanitizers, **(environ or {})},
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}"
    return done.stdout


def configure(folder: Path, *options: str, source: Path = ROOT) -> None:
    """Configure a build of ``source`` with Ninja in ``folder``."""
    chosen = [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    run(tool("cmake"), "-S", source, "-B", folder, "-G", "Ninja", *chosen, *options)


def build(folder: Path, *targets: str, environ: Mapping[str, str] | None = None) -> str:
    jobs = str(len(os.sched_getaffinity(0)))
    return run(tool("ninja"), "-C", folder, "-j", jobs, *targets, environ=environ)


def side_by_side(folder: Path, *commands: list[str]) -> list[str]:
    """Run programs of a build, one a core; return what each says."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda words: run(folder / words[0], *words[1:]), commands))

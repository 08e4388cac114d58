"""What a benchmark's file says of the machine, the command and the code."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from loft_hvd.errors import DataError
from loft_hvd.files import write_whole
from loft_hvd.topology import allowed_cpus

__all__ = ["check_writable", "current_commit", "describe_machine", "write_record"]


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, load, operating system, Python and torch."""
    return {
        "processor": _processor(),
        "allowed_cpus": allowed_cpus(),
        "load_1_min": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def check_writable(*files: str | os.PathLike[str] | None) -> None:
    """Refuse files that cannot be written, before something is measured for them.

    Raises:
        DataError: a folder or a file cannot be made or opened there.
    """
    for path in (Path(file).resolve() for file in files if file is not None):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            was_there = path.exists()
            with path.open("ab"):
                pass
            if not was_there:
                path.unlink()
        except OSError as error:
            raise DataError(f"bench: {str(path)!r} cannot be written ({error})") from error


def write_record(
    path: str | os.PathLike[str], results: Mapping[str, Any], *, command: Sequence[str]
) -> None:
    """Write results with machine, command, commit and date, as JSON.

    Raises:
        DataError: the file cannot be written, as on a disk that is full by now.
    """
    record = {
        "command": " ".join(command),
        "commit": current_commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine(),
        **results,
    }
    write_whole(path, json.dumps(record, indent=1) + "\n", what="bench:", makes_folder=True)


def _processor() -> str:
    # platform.processor() is empty on most Linux systems; the kernel knows.
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def current_commit() -> str:
    """Return the commit of the source tree, "unknown" outside one; marked when it has changes."""
    # --exclude "*" leaves tags out: a hash names one commit, a tag and a count need the tag.
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"

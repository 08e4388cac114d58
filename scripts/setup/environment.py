"""The Python environment: make it, ask what is in it, install the pins."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.setup.console import SetupError, say, step
from scripts.setup.machine import Python, check_disk
from scripts.setup.pins import Pin, missing_pins, read_pins
from scripts.setup.runner import Runner, clean_environ, output_of
from scripts.setup.stamps import digest, read_stamp, write_stamp

__all__ = ["Environment", "Facts", "ask", "install_missing", "install_pins", "prepare_venv"]

_GIB = 2**30
PIN_FILES = ("build.txt", "run.txt", "horovod.txt", "dev.txt")
# A package is whole when pip has written INSTALLER and RECORD, the last files of an installation.
_ASK = """
import importlib.metadata as md, json, os, platform, re, sys, sysconfig
dists, broken = {}, []
for dist in md.distributions():
    name = dist.metadata["Name"]
    if not name:
        continue
    name = re.sub(r"[-_.]+", "-", name).lower()
    folder = str(getattr(dist, "_path", ""))
    dists.setdefault(name, dist.version)
    if folder.endswith(".dist-info") and folder.startswith(sys.prefix + os.sep):
        if not all(os.path.exists(os.path.join(folder, f)) for f in ("INSTALLER", "RECORD")):
            broken.append(folder)
print(json.dumps({
    "version": list(sys.version_info[:2]), "prefix": sys.prefix, "dists": dists, "broken": broken,
    "abi": str(sysconfig.get_config_var("SOABI")), "site": sysconfig.get_path("platlib"),
    "platform": sysconfig.get_platform() + "-" + "".join(platform.libc_ver()),
}))
"""


@dataclass(frozen=True)
class Facts:
    """What an environment says of itself.

    Attributes:
        version: of its Python.
        dists: version of each installed package, by canonical name.
        broken: folders of packages whose installation was interrupted.
        abi: the suffix of extension modules, such as "cpython-311-x86_64-linux-gnu".
        platform: machine and C library.
        site: folder of the packages.
    """

    version: tuple[int, int]
    dists: Mapping[str, str]
    broken: tuple[str, ...]
    abi: str
    platform: str
    site: Path


@dataclass(frozen=True)
class Environment:
    """Where things are installed.

    Attributes:
        python: its interpreter.
        is_ours: made by this set-up in ``.venv``; else the user's own, where nothing that is there
            already is replaced.
        stamps: folder that remembers what was done.
    """

    python: Path
    is_ours: bool
    stamps: Path

    def pip(self, *words: str) -> list[str]:
        return [str(self.python), "-m", "pip", *words]

    def environ(self) -> dict[str, str]:
        return clean_environ(os.environ, bin_dir=self.python.parent)


def ask(environment: Environment) -> Facts:
    """Ask an environment what it is and what it holds.

    Raises:
        SetupError: its interpreter does not start.
    """
    text = output_of([str(environment.python), "-I", "-c", _ASK])
    try:
        found = json.loads(text)
    except ValueError:
        raise SetupError(
            f"{environment.python} does not start or is not a Python 3: it says {text[-300:]!r}"
        ) from None
    return Facts(
        version=(found["version"][0], found["version"][1]),
        dists=found["dists"],
        broken=tuple(found["broken"]),
        abi=found["abi"],
        platform=found["platform"],
        site=Path(found["site"]),
    )


def _usable(folder: Path, *, version: tuple[int, int] | None) -> bool:
    """Whether ``folder`` is a working virtual environment with pip (and this Python version)."""
    python = folder / "bin" / "python"
    command = "import pip, sys; print(*sys.version_info[:2])"
    words = output_of([str(python), "-I", "-c", command]).split() if python.exists() else []
    if len(words) != 2:
        return False
    found = (int(words[0]), int(words[1]))
    return (3, 10) <= found <= (3, 12) if version is None else found == version


def prepare_venv(folder: Path, python: Python, *, is_asked: bool, runner: Runner) -> Environment:
    """Make ``.venv``, or keep the one that is there when it works."""
    environment = Environment(folder / "bin" / "python", True, folder / ".loft_hvd")
    if _usable(folder, version=python.version if is_asked else None):
        return environment
    with step(f"virtual environment {folder.name} with {python.path}"):
        if folder.exists():
            say("setup:   the one there is unfinished or has another Python; it is made anew")
        check_disk(folder.parent, needed_bytes=3 * _GIB, what="the virtual environment")
        command = [python.path, "-m", "venv", "--clear", str(folder)]
        runner.run(command, env=clean_environ(os.environ), cwd=folder.parent, what="python -m venv")
    return environment


def install_pins(environment: Environment, requirements: Path, *, runner: Runner) -> None:
    """Install what is pinned and not there; seconds when all of it is there."""
    facts = ask(environment)
    for folder in facts.broken:
        say(f"setup: {Path(folder).name} was interrupted while being installed; it is done again")
        shutil.rmtree(folder)
    if facts.broken:
        facts = ask(environment)
    pins = _all_pins(requirements, facts)
    missing = missing_pins(pins, facts.dists)
    stamp = environment.stamps / "pins"
    key = digest([], requirements.glob("*.txt"))
    if not missing and read_stamp(stamp) == key:
        say(f"setup: {len(pins)} pinned packages are there")
        return
    title = _names(missing) or "looking at what they need"
    with step(f"{len(missing)} of {len(pins)} pinned packages: {title}"):
        check_disk(environment.stamps.parent, needed_bytes=3 * _GIB, what="the packages")
        files = [word for name in PIN_FILES for word in ("-r", str(requirements / name))]
        command = environment.pip("install", "--progress-bar", "off", *files)
        command += ["-c", str(requirements / "transitive.txt")]
        runner.run(command, env=environment.environ(), cwd=requirements.parent, what="pip install")
        write_stamp(stamp, key)


def install_missing(environment: Environment, requirements: Path, *, runner: Runner) -> None:
    """Add to a user's own environment what is missing there, and change nothing that is there.

    Raises:
        SetupError: it has no torch, which only its owner can choose.
    """
    facts = ask(environment)
    if "torch" not in facts.dists:
        raise SetupError(
            f"VENV=active: {environment.python} has no torch; install the one that suits this "
            "machine (torch 2.4 or newer), or leave VENV out to have a .venv made"
        )
    pins = _all_pins(requirements, facts)
    missing = [pin for pin in pins if pin.name not in facts.dists]
    if not missing:
        say(f"setup: the active environment has all {len(pins)} packages")
        return
    kept = environment.stamps / "kept.txt"
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}=={version}\n" for name, version in sorted(facts.dists.items())]
    kept.write_text("".join(lines), encoding="utf-8")
    with step(f"{len(missing)} packages that the active environment lacks: {_names(missing)}"):
        wanted = [f"{pin.name}=={pin.version}" for pin in missing]
        command = environment.pip("install", "--progress-bar", "off", *wanted, "-c", str(kept))
        runner.run(command, env=environment.environ(), cwd=requirements.parent, what="pip install")


def _all_pins(requirements: Path, facts: Facts) -> list[Pin]:
    python = facts.version
    return [pin for name in PIN_FILES for pin in read_pins(requirements / name, python=python)]


def _names(pins: list[Pin]) -> str:
    names = [pin.name for pin in pins]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

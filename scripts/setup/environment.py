"""The Python environment: read the pins, make it, ask what is in it, install what is missing.

Pins are ``name==version`` lines in ``requirements/``, with at most one python_version marker.
"""

from __future__ import annotations

import json
import operator
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.setup.machine import NEWEST, OLDEST, Python, check_disk
from scripts.setup.runner import Runner, SetupError, clean_environ, output_of, say, step
from scripts.setup.state import digest, read_stamp, write_stamp

__all__ = [
    "BUILD_FILES",
    "DEMO_FILES",
    "PIN_FILES",
    "Environment",
    "Facts",
    "Pin",
    "ask",
    "install_missing",
    "install_pins",
    "missing_pins",
    "prepare_venv",
    "read_pins",
    "remove_interrupted",
]

_GIB = 2**30
_VENV_BYTES = 3 * _GIB  # what .venv takes with a torch for CPUs, with room; CUDA's takes 7 GiB
BUILD_FILES = ("build.txt",)  # all that compiling the extension needs
DEMO_FILES = (*BUILD_FILES, "run.txt", "horovod.txt", "demo.txt")
PIN_FILES = (*DEMO_FILES, "dev.txt")
# pip compiles every file that it installs, 20,000 of them here; Python compiles those that are
# imported, once. Left to Python it takes a third of pip's time.
_PIP_INSTALL = ("install", "--progress-bar", "off", "--no-compile")
# What the demo's ranks import of others' code: all of them at once would each compile it. In
# .venv alone: a user's own environment has been imported from before.
_FIRST_IMPORTS = "import torch._dynamo, sklearn.datasets, matplotlib.pyplot, rich.table"
_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)"
    r'(?:\s*;\s*python_version\s*(?P<sign><=|>=|==|<|>)\s*"(?P<python>\d+\.\d+)")?'
)
# Two numbers compare as versions do: (3, 9) < (3, 10), where the texts do not.
_SIGNS: Mapping[str, Callable[[tuple[int, int], tuple[int, int]], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}
# A package is whole when pip has written INSTALLER and RECORD, the last files of an installation.
_ASK = """
import importlib.metadata as md, json, os, platform, re, sys, sysconfig
dists, broken = {}, []
for dist in md.distributions():
    name = dist.metadata["Name"]
    if not name:
        continue
    name = re.sub(r"[-_.]+", "-", name).lower()
    # A user's own package may be in an .egg-info or a link; only pip's kind can be half there.
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
class Pin:
    """One package at one version."""

    name: str
    version: str


def _canonical(name: str) -> str:
    """Return a package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path, *, python: tuple[int, int]) -> list[Pin]:
    """Read the pins of one file that hold for a Python version.

    Raises:
        SetupError: a line is neither a comment nor a pin.
    """
    pins = []
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = raw.split(" #")[0].strip()  # pip takes " #" for a comment, "#" alone may be a URL's
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise SetupError(
                f"{path}:{number}: {line!r} is not 'name==version' or 'name==version ; "
                f'python_version < "3.11"\'; write it so'
            )
        if found["sign"]:
            major, minor = (int(part) for part in found["python"].split("."))
            if not _SIGNS[found["sign"]](python, (major, minor)):
                continue
        pins.append(Pin(_canonical(found["name"]), found["version"]))
    return pins


def missing_pins(pins: Iterable[Pin], installed: Mapping[str, str]) -> list[Pin]:
    """Return the pins that ``installed`` (canonical name to version) does not meet.

    A local label such as ``+cpu`` is a build of the same version, so it meets the pin.
    """
    return [pin for pin in pins if installed.get(pin.name, "").split("+")[0] != pin.version]


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
    # -I: neither this folder nor a PYTHONPATH may lend the environment a package.
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
    # A venv whose Python was upgraded or removed still has its folder, so it is asked.
    command = "import pip, sys; print(*sys.version_info[:2])"
    words = output_of([str(python), "-I", "-c", command]).split() if python.exists() else []
    if len(words) != 2:
        return False
    found = (int(words[0]), int(words[1]))
    return OLDEST <= found <= NEWEST if version is None else found == version


def prepare_venv(folder: Path, python: Python, *, is_asked: bool, runner: Runner) -> Environment:
    """Make ``.venv``, or keep the one that is there when it works."""
    environment = Environment(folder / "bin" / "python", True, folder / ".loft_hvd")
    if _usable(folder, version=python.version if is_asked else None):
        return environment
    with step(f"virtual environment {folder.name} with {python.path}"):
        if folder.exists():
            say("setup:   the one there is unfinished or has another Python; it is made anew")
        check_disk(folder.parent, needed_bytes=_VENV_BYTES, what="the virtual environment")
        command = [python.path, "-m", "venv", "--clear", str(folder)]
        runner.run(command, env=clean_environ(os.environ), cwd=folder.parent, what="python -m venv")
    return environment


def remove_interrupted(environment: Environment) -> Facts:
    """Remove what pip left half-installed in an environment of ours; return what there is then."""
    facts = ask(environment)
    if not (environment.is_ours and facts.broken):
        return facts
    # pip itself would take such a package for installed, and its missing files show much later.
    for folder in facts.broken:
        say(f"setup: {Path(folder).name} was interrupted while being installed; it is done again")
        shutil.rmtree(folder)
    return ask(environment)


def install_pins(
    environment: Environment,
    requirements: Path,
    *,
    facts: Facts,
    files: Sequence[str],
    runner: Runner,
) -> Facts:
    """Install what ``files`` pin and is not there; return what there is then."""
    pins = _pins_of(requirements, files, facts)
    missing = missing_pins(pins, facts.dists)
    # The stamp says that pip has seen these files whole, so what the pins need is there as well:
    # each tuple of files begins with all of those that have fewer.
    stamp = environment.stamps / f"pins-{len(files)}"
    key = digest([], requirements.glob("*.txt"))
    stamps = [environment.stamps / f"pins-{at}" for at in range(len(files), len(PIN_FILES) + 1)]
    if not missing and key in map(read_stamp, stamps):
        say(f"setup: {len(pins)} pinned packages are there")
        return facts
    title = _names(missing) or "looking at what they need"
    with step(f"{len(missing)} of {len(pins)} pinned packages: {title}"):
        check_disk(environment.stamps.parent, needed_bytes=_VENV_BYTES, what="the packages")
        words = [word for name in files for word in ("-r", str(requirements / name))]
        words += ["-c", str(requirements / "transitive.txt")]
        command = environment.pip(*_PIP_INSTALL, *words)
        runner.run(command, env=environment.environ(), cwd=requirements.parent, what="pip install")
        if {"torch", "scikit-learn"} & {pin.name for pin in missing}:
            # Whatever may be wrong with it, the demo says it better.
            output_of([str(environment.python), "-c", _FIRST_IMPORTS], timeout_s=300.0)
        write_stamp(stamp, key)
    return ask(environment)


def install_missing(
    environment: Environment,
    requirements: Path,
    *,
    facts: Facts,
    files: Sequence[str],
    runner: Runner,
) -> Facts:
    """Add to a user's own environment what is missing there, and change nothing that is there.

    Raises:
        SetupError: it has no torch, which only its owner can choose.
    """
    if "torch" not in facts.dists:
        raise SetupError(
            f"VENV=active: {environment.python} has no torch; install the one that suits this "
            "machine (torch 2.4 or newer), or leave VENV out to have a .venv made"
        )
    pins = _pins_of(requirements, files, facts)
    missing = [pin for pin in pins if pin.name not in facts.dists]
    if not missing:
        say(f"setup: the active environment has all {len(pins)} packages")
        return facts
    # Everything there is a constraint, so that no new package can move an old one.
    kept = environment.stamps / "kept.txt"
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}=={version}\n" for name, version in sorted(facts.dists.items())]
    kept.write_text("".join(lines), encoding="utf-8")
    with step(f"{len(missing)} packages that the active environment lacks: {_names(missing)}"):
        wanted = [f"{pin.name}=={pin.version}" for pin in missing]
        command = environment.pip(*_PIP_INSTALL, *wanted, "-c", str(kept))
        runner.run(command, env=environment.environ(), cwd=requirements.parent, what="pip install")
    return ask(environment)


def _pins_of(requirements: Path, files: Sequence[str], facts: Facts) -> list[Pin]:
    return [pin for name in files for pin in read_pins(requirements / name, python=facts.version)]


def _names(pins: list[Pin]) -> str:
    names = [pin.name for pin in pins]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

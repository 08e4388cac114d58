"""The extension's own build: CUDA, size, time, and what a change compiles again.

These need no Python inside: csrc/checks compares every kernel with a plain form of the rules.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loft_hvd._native import extension
from tests.support.builds import ROOT, build, configure, run, side_by_side, tool
from tests.support.marks import long_first

MOST_BYTES = 25_000_000
MOST_BUILD_CPU_S = 2 * 6 * 60.0  # six minutes on two cores


def stacks_in(said: str) -> dict[str, int]:
    """Return the bytes of local memory a thread, by mangled name, from what ptxas says."""
    pattern = r"Function properties for (\w+)\s+(\d+) bytes stack frame"
    stacks: dict[str, int] = {}
    for name, size in re.findall(pattern, said):
        stacks[name] = max(int(size), stacks.get(name, 0))  # of several architectures
    return stacks


def stripped_bytes(library: Path, folder: Path) -> int:
    """Return the size of a library without its symbols."""
    small = folder / "stripped.so"
    run(tool("strip"), library, "-o", small)
    return small.stat().st_size


def test_extension_is_small(tmp_path: Path) -> None:
    module = extension()
    if module is None or module.__file__ is None:
        pytest.skip("the C++ extension is not built")
    assert stripped_bytes(Path(module.__file__), tmp_path) < MOST_BYTES


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the extension built for all levels: the set-up's, or one of its own."""
    folder = ROOT / "build" / f"{sys.implementation.cache_tag}-release"  # as setup.py names it
    known = folder / "CMakeCache.txt"
    if not known.exists() or "LOFT_LEVELS:STRING=all\n" not in known.read_text():
        folder = tmp_path_factory.mktemp("release")
        configure(folder, "-DLOFT_CUDA=0")
    build(folder, "_loft")
    return folder


def logged_compile_s(folder: Path) -> float:
    """Return how long the C++ files of the extension took to compile, by Ninja's log.

    A compiler has one thread, so it took no more CPU time than that.
    """
    took_s: dict[str, float] = {}  # of a file that was compiled twice, the last time
    for line in (folder / ".ninja_log").read_text().splitlines()[1:]:
        began_ms, ended_ms, _, output, _ = line.split("\t")
        took_s[output] = (int(ended_ms) - int(began_ms)) / 1e3
    inputs = run(tool("ninja"), "-C", folder, "-t", "inputs", "_loft").splitlines()
    objects = [name for name in inputs if name.endswith(".cpp.o")]
    assert len(objects) > 20, inputs
    return sum(took_s[name] for name in objects)


def measured_compile_s(folder: Path) -> float:
    """Return the CPU time of a build of the CPU half from nothing."""
    configure(folder, "-DLOFT_CUDA=0")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    build(folder, "_loft")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.long
@pytest.mark.timeout(2700)
def test_cpu_half_builds_in_time_and_once(release: Path, tmp_path: Path) -> None:
    spent_s = logged_compile_s(release)
    if spent_s >= MOST_BUILD_CPU_S:  # others had a part of the cores, as Horovod's build has
        spent_s = measured_compile_s(tmp_path)
    assert spent_s < MOST_BUILD_CPU_S
    assert "no work to do" in build(release, "_loft")
    (library,) = release.glob("_loft.*so")
    assert stripped_bytes(library, tmp_path) < MOST_BYTES


@pytest.mark.long
@pytest.mark.timeout(2700)
def test_every_kernel_is_right(release: Path) -> None:
    build(release, "check_cpu", "check_device", "check_threads")
    # 1,000,000 random cases take a quarter of an hour: CONTRIBUTING.md.
    commands = [[name] for name in ("check_cpu", "check_device", "check_threads")]
    for said in side_by_side(release, *commands, ["check_cpu", "--random", "50000"]):
        assert " 0 differ" in said


# Not in test-all, which compiles two levels so for the sanitizers: the others take eight minutes.
@pytest.mark.whole
@pytest.mark.timeout(2700)
def test_every_level_compiles_without_a_warning(tmp_path: Path) -> None:
    configure(tmp_path, "-DLOFT_CUDA=0", "-DLOFT_WERROR=1")
    build(tmp_path, "_loft")


# A second architecture takes as long again: what is compiled for it is the same source.
@pytest.mark.long
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("archs", long_first(["90-real", "80-real;90"]))
def test_cuda_half_compiles_and_loads_without_a_gpu(archs: str, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here")
    options = "-DLOFT_LEVELS=lean", "-DLOFT_WERROR=1", f"-DLOFT_CUDA_ARCHS={archs}"
    configure(tmp_path, "-DLOFT_CUDA=1", *options)
    said = build(tmp_path, "_loft", environ={"NVCC_APPEND_FLAGS": "-Xptxas=-v"})
    # Networks are made for registers: a few bytes may spill, an index at run time takes hundreds.
    ranked = {name: size for name, size in stacks_in(said).items() if "register_kernel" in name}
    ranked |= {name: size for name, size in stacks_in(said).items() if "RankedRule" in name}
    assert len(ranked) > 200
    assert max(ranked.values()) <= 64
    (library,) = tmp_path.glob("_loft.*so")
    assert stripped_bytes(library, tmp_path) < MOST_BYTES
    code = (
        "import importlib.util as u, sys\n"
        "spec = u.spec_from_file_location('_loft', sys.argv[1])\n"
        "module = u.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "print(module.has_cuda)\n"
    )
    assert run(sys.executable, "-c", code, library).strip() == "True"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_change_compiles_again_what_depends_on_it_only(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "build"
    source.mkdir()
    for name in ("csrc", "cmake"):
        shutil.copytree(ROOT / name, source / name)
    shutil.copy(ROOT / "CMakeLists.txt", source)
    configure(folder, "-DLOFT_CUDA=0", source=source)
    targets = ("loft_core", "loft_baseline_table", "loft_baseline_rows", "loft_networks")
    build(folder, *targets)

    def compiled_after_touching(name: str) -> set[str]:
        (source / "csrc" / name).touch()
        said = build(folder, *targets)
        return {
            line.rsplit("/", 1)[-1].removesuffix(".o") for line in said.splitlines() if ".o" in line
        }

    assert "no work to do" in build(folder, *targets)
    core = {"unity_0_cxx.cxx"}  # the core is compiled as one file
    assert compiled_after_touching("aggregate.h") == core
    assert compiled_after_touching("wire/compact.h") == {*core, "compact.cpp"}  # one a level
    assert compiled_after_touching("cpu/pass.cpp") == {"pass.cpp"}
    assert compiled_after_touching("cpu/finish.h") == {"dispatch.cpp"}
    assert compiled_after_touching("networks/generate.py") == set()  # the same networks come out


@pytest.mark.long
def test_a_build_takes_the_compiler_and_the_architectures_that_it_is_asked_for(
    tmp_path: Path,
) -> None:
    for name in ("csrc", "cmake"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("setup.py", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    real = shutil.which("g++") or pytest.skip("no g++ here")
    compilers = []
    for name in ("first", "second"):  # they will do for CMake, and end the build at our files
        compilers.append(tmp_path / name)
        compilers[-1].write_text(
            f'#!/bin/sh\ncase "$*" in *csrc/*) exit 1;; esac\nexec {real} "$@"\n'
        )
        compilers[-1].chmod(0o755)

    def known_after(compiler: Path, archs: str) -> dict[str, str]:
        wanted = {"CXX": str(compiler), "LOFT_HVD_CUDA_ARCHS": archs, "LOFT_HVD_CUDA": "0"}
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        environ = {**os.environ, "LOFT_HVD_LEVELS": "lean", **wanted}
        subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, check=False)
        (cache,) = tmp_path.glob("build/*/CMakeCache.txt")
        pairs = (line.split("=", 1) for line in cache.read_text().splitlines() if "=" in line)
        return {name.split(":")[0]: value for name, value in pairs}

    known = known_after(compilers[0], "90")
    assert (known["CMAKE_CXX_COMPILER"], known["LOFT_CUDA_ARCHS"]) == (str(compilers[0]), "90")
    known = known_after(compilers[1], "")
    assert known["CMAKE_CXX_COMPILER"] == str(compilers[1])
    assert known["LOFT_CUDA_ARCHS"] == "80-real;90"


def test_guarded_pages_do_guard() -> None:
    """The guard pages of the other tests end a process that touches them."""
    code = (
        "from tests.support.guarded import Guarded; import ctypes\n"
        "ctypes.string_at(Guarded(8, at_end=True).address + 8, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
    assert done.returncode < 0  # ended by a signal

"""Build the C++ extension with CMake; everything else is in pyproject.toml.

Environment: ``LOFT_HVD_LEVELS``, the instruction sets that the CPU kernels are built for: "native"
(the best one of this machine, and the baseline that every machine needs), "all" (of the processor
family), or a list such as "avx2,avx512"; by default a build for this checkout (``pip install -e``,
``build_ext --inplace``) is native and a wheel has all. ``LOFT_HVD_CUDA`` 0, 1 or auto (build the
CUDA half where nvcc is found and the machine has an NVIDIA GPU), ``LOFT_HVD_CUDA_ARCHS`` (CMake's
CUDA_ARCHITECTURES, the last one also as PTX; default "80-real;90", so sm_80, sm_90 and what comes
after), ``LOFT_HVD_DATAGRAM`` 0 (no module of datagrams), ``LOFT_HVD_WERROR`` 1, ``LOFT_HVD_JOBS``
(compile jobs, else the allowed CPUs). Objects are kept under ``build/`` and only what changed is
compiled again.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup  # type: ignore[import-untyped]  # ships no types
from setuptools.command.build_ext import (  # type: ignore[import-untyped]  # ships no types
    build_ext,
)

ROOT = Path(__file__).resolve().parent


def _tool(name: str) -> str | None:
    """Return a build tool's path: the one beside this Python, of its package, or on PATH."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        for folder in (Path(spec.origin).parent / "data" / "bin", Path(spec.origin).parent):
            if (folder / name).is_file():
                return str(folder / name)
    return shutil.which(name)


class CMakeBuild(build_ext):  # type: ignore[misc]  # its base is untyped
    """Hand the extension to CMake and let the result land where setuptools wants it."""

    def build_extension(self, ext: Extension) -> None:
        """Configure and build in a folder that outlives this run."""
        cmake = _tool("cmake")
        if cmake is None:
            raise SystemExit("building loft_hvd needs cmake: pip install 'cmake>=3.22' ninja")
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        tag = f"{sys.implementation.cache_tag}-{'debug' if self.debug else 'release'}"
        folder = ROOT / "build" / tag
        folder.mkdir(parents=True, exist_ok=True)
        jobs = os.environ.get("LOFT_HVD_JOBS") or str(len(os.sched_getaffinity(0)))
        configure = [
            cmake,
            "-S",
            str(ROOT),
            "-B",
            str(folder),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DLOFT_LEVELS={self._levels()}",
            f"-DLOFT_CUDA={os.environ.get('LOFT_HVD_CUDA', 'auto') or 'auto'}",
            f"-DLOFT_DATAGRAM={int(self._wants_datagrams())}",
            f"-DLOFT_WERROR={os.environ.get('LOFT_HVD_WERROR', '0') or '0'}",
        ]
        archs = os.environ.get("LOFT_HVD_CUDA_ARCHS")
        configure.append(f"-DLOFT_CUDA_ARCHS={archs}" if archs else "-ULOFT_CUDA_ARCHS")
        ninja = _tool("ninja")
        if ninja is not None:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        tools = [os.environ.get(name, "") for name in ("CXX", "CXXFLAGS", "CUDACXX", "CUDAHOSTCXX")]
        asked = " ".join([sys.executable, *tools, str(shutil.which("nvcc")), str(ninja)])
        self._forget_another_environment(folder, asked)
        configure.append(f"-DLOFT_ASKED={asked}")
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(folder), "--parallel", jobs], check=True)
        # A second one is optional, and found beside the first.
        built = list(folder.glob(f"{ext.name.rpartition('.')[2]}.*so"))
        if ext.optional and not self._wants_datagrams():
            # Of an earlier build, maybe of other sources.
            in_place = [ROOT / "loft_hvd" / target.name] if self._is_local() else []
            for file in (*built, target, *in_place):
                file.unlink(missing_ok=True)
        elif built:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(built[0], target)
        elif not ext.optional:
            raise SystemExit(f"{folder} has no {ext.name}")

    def _levels(self) -> str:
        """Return the instruction sets to build: a checkout runs here, a wheel anywhere."""
        return os.environ.get("LOFT_HVD_LEVELS") or ("native" if self._is_local() else "all")

    def _is_local(self) -> bool:
        """Say whether it is for this checkout."""
        return bool(self.inplace or self.editable_mode)

    @staticmethod
    def _wants_datagrams() -> bool:
        """Say whether their module is to be built."""
        return os.environ.get("LOFT_HVD_DATAGRAM") != "0"

    @staticmethod
    def _forget_another_environment(folder: Path, asked: str) -> None:
        """Drop what CMake knows of another Python, compiler or tools; keep objects."""
        cache = folder / "CMakeCache.txt"
        if cache.exists() and f"LOFT_ASKED:STRING={asked}\n" not in cache.read_text():
            for compiler in (folder / "CMakeFiles").glob("[0-9]*"):  # by CMake's version
                shutil.rmtree(compiler)
            cache.unlink()  # last: an interrupted build begins here again


setup(
    ext_modules=[
        Extension("loft_hvd._loft", sources=[]),
        Extension("loft_hvd._loft_datagram", sources=[], optional=True),  # where OpenSSL is
    ],
    cmdclass={"build_ext": CMakeBuild},
)

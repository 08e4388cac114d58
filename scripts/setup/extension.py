"""loft_hvd itself, installed so that edits to its Python files take effect at once."""

from __future__ import annotations

import os
from pathlib import Path

from scripts.setup.console import say, step
from scripts.setup.environment import Environment, ask
from scripts.setup.machine import Compiler
from scripts.setup.runner import Runner, output_of
from scripts.setup.stamps import digest, read_stamp, write_stamp

__all__ = ["has_gpu", "install_extension", "source_files"]

_STAMP = "extension"
_OPTIONS = ("LOFT_HVD_CUDA", "LOFT_HVD_CUDA_ARCHS", "LOFT_HVD_WERROR")


def source_files(root: Path) -> list[Path]:
    """Return the files that the built extension depends on."""
    names = ("setup.py", "pyproject.toml", "CMakeLists.txt")
    files = [root / name for name in names if (root / name).is_file()]
    files += (root / "cmake").glob("*.cmake")
    for path in (root / "csrc").rglob("*"):
        if path.is_file() and not {"generated", "__pycache__"} & set(path.parts):
            files.append(path)
    return files


def install_extension(
    environment: Environment, root: Path, *, compiler: Compiler, runner: Runner
) -> None:
    """Build and install loft_hvd unless this very source is built and installed already."""
    facts = ask(environment)
    options = [f"{name}={os.environ.get(name, '')}" for name in _OPTIONS]
    parts = [compiler.identity, facts.abi, facts.platform, *options]
    if has_gpu():  # the CUDA half is then built by default
        parts.append("gpu")
    key = digest(parts, source_files(root))
    is_built = (
        any((root / "loft_hvd").glob(f"_loft*{facts.abi}*"))
        or not (root / "CMakeLists.txt").is_file()
    )
    stamp = environment.stamps / _STAMP
    if is_built and "loft-hvd" in facts.dists and read_stamp(stamp) == f"{root} {key}":
        say("setup: loft_hvd and its extension are built")
        return
    with step("loft_hvd and its extension"):
        stamp.unlink(missing_ok=True)
        words = ["install", "-v", "--no-build-isolation", "--no-deps", "-e", str(root)]
        env = {**environment.environ(), "CXX": compiler.path}
        runner.run(environment.pip(*words), env=env, cwd=root, what="building the extension")
        write_stamp(stamp, f"{root} {key}")
    say(_cuda_line(environment))


def has_gpu(device_folder: Path = Path("/dev")) -> bool:
    """Return whether this machine shows an NVIDIA GPU; cmake/cuda.cmake asks the same."""
    return any(device_folder.glob("nvidia[0-9]*")) or (device_folder / "dxg").exists()


def _cuda_line(environment: Environment) -> str:
    """Say whether the CUDA kernels were built, and how to get or leave them."""
    code = "import loft_hvd._loft as built; print(built.has_cuda)"
    if output_of([str(environment.python), "-c", code]).endswith("True"):
        return "setup: CUDA kernels are built in (LOFT_HVD_CUDA=0 leaves them out)"
    if has_gpu():
        return "setup: a GPU is here, but no CUDA kernels: nvcc 12.1 or newer is needed"
    return "setup: no GPU here, so no CUDA kernels (LOFT_HVD_CUDA=1 builds them with nvcc)"

"""loft_hvd itself, installed so that edits to its Python files take effect at once."""

from __future__ import annotations

import os
from pathlib import Path

from scripts.setup.console import say, step
from scripts.setup.environment import Environment, ask
from scripts.setup.machine import Compiler
from scripts.setup.runner import Runner
from scripts.setup.stamps import digest, read_stamp, write_stamp

__all__ = ["install_extension", "source_files"]

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
    key = digest(parts, source_files(root))
    is_built = any((root / "loft_hvd").rglob("*.so")) or not (root / "CMakeLists.txt").is_file()
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

"""loft_hvd itself, installed so that edits to its Python files take effect at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.setup.environment import Environment, Facts
from scripts.setup.machine import Compiler
from scripts.setup.runner import Runner, Running, output_of, say, step
from scripts.setup.state import digest, read_stamp, write_stamp

__all__ = ["ExtensionBuild", "extension_build", "has_gpu", "has_levels", "source_files"]

_OPTIONS = ("LOFT_HVD_CUDA", "LOFT_HVD_CUDA_ARCHS", "LOFT_HVD_WERROR")


def source_files(root: Path) -> list[Path]:
    """Return the files that the built extension depends on."""
    names = ("setup.py", "pyproject.toml", "CMakeLists.txt")
    files = [root / name for name in names if (root / name).is_file()]
    files += (root / "cmake").glob("*.cmake")  # not cmake/horovod: that is Horovod's wheel
    for path in (root / "csrc").rglob("*"):
        if path.is_file() and not {"generated", "__pycache__"} & set(path.parts):
            files.append(path)
    return files


def wanted_levels(environ: Mapping[str, str], *, default: str = "native") -> str:
    """Return the instruction sets asked for, as setup.py understands them."""
    names = environ.get("LOFT_HVD_LEVELS", "").replace(" ", "")
    return ",".join(sorted(set(filter(None, names.split(","))))) or default


def has_levels(built: str, wanted: str) -> bool:
    """Return whether an extension built with the levels ``built`` will do where ``wanted`` are.

    "all" holds every level, so `make setup` after `make test` compiles nothing. What "native" holds
    is known to the build alone, so it stands for itself and for "lean", which any build holds but
    the demo's: that has no datagrams, and serves the demo alone.
    """
    if built == "all" or (built and wanted == "demo"):
        return True
    if wanted == "lean" and built not in ("", "demo"):
        return True
    return set(wanted.split(",")) <= set(built.split(","))


@dataclass(frozen=True)
class ExtensionBuild:
    """The build of the extension, under way beside other steps.

    Attributes:
        stamp: file that says for which sources and levels the extension was built.
        content: what it will say.
        running: the build; None when there is nothing to do.
    """

    stamp: Path
    content: str
    running: Running | None

    def check(self) -> None:
        """Raise a SetupError when the build has failed already."""
        if self.running is not None:
            self.running.check()

    def finish(self, environment: Environment) -> None:
        """Wait for the build; say what it made.

        Raises:
            SetupError: it failed.
        """
        if self.running is None:
            return
        with step("loft_hvd and its extension: the rest of the build"):
            self.running.wait()
        write_stamp(self.stamp, self.content)
        say(_cuda_line(environment))


@contextlib.contextmanager
def extension_build(
    environment: Environment,
    root: Path,
    *,
    facts: Facts,
    compiler: Compiler,
    runner: Runner,
    levels: str = "native",
) -> Iterator[ExtensionBuild]:
    """Start building loft_hvd unless it is built and installed already; end it with the block.

    ``levels`` are the instruction sets that kernels are built for unless the user names others, or
    "demo": the general kernels, and no datagrams.

    It needs the tools of ``requirements/build.txt`` and nothing else, no torch: that lets it run
    while pip fetches the other packages and while Horovod is compiled.
    """
    options = [f"{name}={os.environ.get(name, '')}" for name in _OPTIONS]
    # Nothing and 1 ask for the same, but where the demo is built first.
    options.append(f"datagrams={os.environ.get('LOFT_HVD_DATAGRAM') != '0'}")
    parts = [compiler.identity, facts.abi, facts.platform, *options]
    if has_gpu():  # the CUDA half is then built by default
        parts.append("gpu")
    key = f"{root} {digest(parts, source_files(root))}"
    wanted = wanted_levels(os.environ, default=levels)
    if wanted == "demo" and os.environ.get("LOFT_HVD_DATAGRAM"):
        wanted = "lean"  # which has datagrams, or not, as they are asked for
    stamp = environment.stamps / "extension"
    before, _, built = read_stamp(stamp).rpartition(" ")
    # The file is looked for as well: `make clean` and `git clean` remove it and leave the stamp.
    has_file = any((root / "loft_hvd").glob(f"_loft.{facts.abi}*"))
    if has_file and "loft-hvd" in facts.dists and before == key and has_levels(built, wanted):
        say("setup: loft_hvd and its extension are built")
        yield ExtensionBuild(stamp, "", None)
        return
    stamp.unlink(missing_ok=True)  # an interrupted build must not be taken for a finished one
    words = ["install", "-v", "--no-build-isolation", "--no-deps", "-e", str(root)]
    env = {**environment.environ(), "CXX": compiler.path, "LOFT_HVD_LEVELS": wanted}
    if wanted == "demo":  # datagrams are a quarter of what is to compile
        env |= {"LOFT_HVD_LEVELS": "lean", "LOFT_HVD_DATAGRAM": "0"}
    # Nicer than Horovod's build: its last long compilations then have a core to themselves, and
    # the other core has these shorter ones to do.
    command = ["nice", "-n", "10", *environment.pip(*words)]
    say(f"setup: loft_hvd and its extension, levels {wanted}: the build begins")
    if wanted == "demo":
        say("setup:   the general kernels, no datagrams; `make setup` builds all for this machine")
    with runner.start(command, env=env, cwd=root, what="building the extension") as running:
        yield ExtensionBuild(stamp, f"{key} {wanted}", running)


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

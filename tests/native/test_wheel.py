"""``make wheel``: what it builds installs in seconds, without a network, and runs on other hosts.

torch is not installed anew (1 GB): the fresh environment sees this one's by a path file.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from loft_hvd.topology import cpu_flags, vector_levels
from scripts.setup.machine import find_compiler
from tests.support.slowness import slowness

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

_ROOT = Path(__file__).parents[2]
_INSTALL_LIMIT_S, _REPORT_LIMIT_S = 30.0, 60.0  # what the project promises
_RUN = """
import loft_hvd as loft, loft_hvd._loft as built, pathlib, sys, torch
home = pathlib.Path(loft.__file__).resolve()
assert home.is_relative_to(pathlib.Path(sys.prefix).resolve()), home
rows = torch.randn(7, 100003, generator=torch.Generator().manual_seed(1))
rows[2] = float("nan")
expected = rows.sort(dim=0).values[3]
assert torch.equal(loft.median(rows), expected)
print("levels", *built.isa_levels())
"""
_TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import loft_hvd as loft

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(256, 10))
loft.watch(model, log_dir="runs")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(64, 256)), torch.zeros(64).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


def _call(
    command: list[str | Path],
    options: Mapping[str, str] | None = None,
    *,
    cwd: Path,
    limit_s: float = 1500.0,
) -> str:
    """Run a command with these variables in its environment; return what it prints."""
    outer = ("LOFT_HVD_", "PYTHONPATH")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environ, **(options or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def _fresh_environment(folder: Path, wheels: Path) -> tuple[Path, float]:
    """Install from a folder of wheels, with no index; return the Python and the seconds it took."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    began = time.monotonic()
    words = ["install", "--no-index", "--no-deps", "--find-links", str(wheels), "loft-hvd"]
    _call([python, "-m", "pip", *words], cwd=folder)
    seconds = time.monotonic() - began
    # Afterwards: pip would take this environment's loft_hvd for installed.
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python, seconds


@dataclass(frozen=True)
class Made:
    """A wheel, and what ``make wheel`` said when it built it."""

    wheel: Path
    output: str


def _make_wheel(folder: Path, **options: str) -> Made:
    made = ["-m", "scripts.wheels", "--only", "wheel", "--folder", str(folder)]
    output = _call([sys.executable, *made], options, cwd=_ROOT)
    (wheel,) = folder.rglob("*.whl")
    assert f"wheel: {wheel}" in output
    return Made(wheel, output)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The wheel that ``make wheel`` builds."""
    return _make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with that wheel."""
    folder = tmp_path_factory.mktemp("environment")
    python, seconds = _fresh_environment(folder, made.wheel.parent)
    size = made.wheel.stat().st_size
    sys.stdout.write(f"\n{made.wheel.name}: {size} bytes, installed in {seconds:.1f} s\n")
    assert seconds < _INSTALL_LIMIT_S
    return python


def test_the_wheel_has_the_tag_of_the_oldest_system_that_it_runs_on(made: Made) -> None:
    if not (_ROOT / "build/wheel/tools/auditwheel").is_dir():
        pytest.skip("no package index here has what requirements/wheel.txt names")
    tags = re.findall(r"manylinux_2_(\d+)_", made.wheel.name)
    assert tags, made.output
    _, _, minor = platform.libc_ver()[1].partition(".")  # of "2.36", the C library's version
    assert min(map(int, tags)) <= int(minor)


def test_the_wheel_takes_over_what_the_set_up_has_compiled(made: Made) -> None:
    assert made.wheel.exists()
    compiler = find_compiler(os.environ) or pytest.skip("no g++ here")
    folder = _ROOT / "build" / f"{sys.implementation.cache_tag}-release"
    (used,) = re.findall(r"CMAKE_CXX_COMPILER:\w+=(.*)", (folder / "CMakeCache.txt").read_text())
    assert used == compiler.path


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_one_environment_runs_on_hosts_of_every_instruction_set(
    python: Path, level: str, tmp_path: Path
) -> None:
    if level not in vector_levels(cpu_flags()):
        pytest.skip(f"this machine has no {level}")
    output = _call([python, "-c", _RUN], {"LOFT_HVD_ISA": level}, cwd=tmp_path)
    assert output.split() == ["levels", *vector_levels(cpu_flags())]


def test_a_fresh_environment_reports_on_a_script_of_torchrun_in_a_minute(
    made: Made, tmp_path: Path
) -> None:
    slow = slowness(time.perf_counter)
    python, install_s = _fresh_environment(tmp_path / "environment", made.wheel.parent)
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    began = time.monotonic()
    command: list[str | Path] = [python, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", script]
    _call(command, {"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    said = _call([python.with_name("loft-hvd"), "report", "runs"], cwd=tmp_path)
    seconds = install_s + time.monotonic() - began
    sys.stdout.write(f"\ninstalled in {install_s:.1f} s, reported after {seconds:.1f} s\n")
    assert len(re.findall(r"(?m)^ +[0-3] +\d", said)) == 4, said
    assert seconds <= _REPORT_LIMIT_S * slow


def test_the_wheel_holds_the_package_and_nothing_else(python: Path) -> None:
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (record,) = site.glob("loft_hvd-*.dist-info/RECORD")
    files = {line.split(",")[0] for line in record.read_text().splitlines()}
    sources = {
        path.relative_to(_ROOT).as_posix()
        for pattern in ("*.py", "py.typed", "scenarios/*.toml", "curves/*.csv")
        for path in (_ROOT / "loft_hvd").rglob(pattern)
    }
    packaged = {
        name for name in files if name.startswith("loft_hvd/") and "__pycache__" not in name
    }
    assert sources - packaged == set()
    built = re.compile(r"/_loft(_datagram)?\..*\.so$")  # the second where OpenSSL's headers are
    assert [name for name in packaged - sources if not built.search(name)] == []
    tops = {name.split("/")[0] for name in files}
    assert {top for top in tops if not top.startswith("loft_hvd")} == {".."}  # bin/loft-hvd


def test_the_source_archive_builds(tmp_path: Path) -> None:
    made = ["-m", "scripts.wheels", "--only", "sdist", "--folder", str(tmp_path)]
    output = _call([sys.executable, *made], cwd=_ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert f"sdist: {archive}" in output
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    # The general kernel alone: what the archive lacks would show as well, in a tenth of the time.
    options = {"LOFT_HVD_LEVELS": "lean", "LOFT_HVD_CUDA": "0"}
    words = ["wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
    words += ["-w", str(tmp_path / "dist"), str(source)]
    _call([sys.executable, "-m", "pip", *words], options, cwd=tmp_path)
    python, _ = _fresh_environment(tmp_path / "env", tmp_path / "dist")
    assert _call([python, "-c", _RUN], cwd=tmp_path).split() == ["levels", "baseline"]


# Not in test-all, which compiles the CUDA half for another test.
@pytest.mark.whole
def test_the_cuda_wheel_installs_where_there_is_no_gpu(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here")
    # One architecture and the general kernel: three minutes of two cores in place of eight.
    options = {"LOFT_HVD_LEVELS": "lean", "LOFT_HVD_CUDA_ARCHS": "90-real"}
    made = _make_wheel(tmp_path / "dist", LOFT_HVD_CUDA="1", **options)
    assert made.wheel.parent == tmp_path / "dist" / "cuda"
    python, seconds = _fresh_environment(tmp_path / "env", made.wheel.parent)
    assert seconds < _INSTALL_LIMIT_S
    assert _call([python, "-c", _RUN], cwd=tmp_path).split() == ["levels", "baseline"]
    code = "import torch, loft_hvd._loft as built; print(built.has_cuda)"
    assert _call([python, "-c", code], {"CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path).strip() == "True"


def _horovods_wheel() -> Path | None:
    """Return the wheel of this Horovod that the set-up has kept, for this torch and Python."""
    cache = Path(os.environ.get("LOFT_HVD_CACHE") or Path.home() / ".cache/loft_hvd")
    python = f"py3{sys.version_info.minor}"
    found = cache.glob(f"horovod/*-torch{torch.__version__}-{python}-*/horovod-*.whl")
    return next(found, None)


@pytest.mark.whole
@pytest.mark.timeout(5400)
def test_a_folder_of_wheels_is_all_that_a_host_without_a_network_needs(tmp_path: Path) -> None:
    """What docs/recipes.md shows. It downloads torch twice, from the index that pip knows here."""
    kept = _horovods_wheel()
    if kept is None:
        pytest.skip("the set-up has kept no wheel of Horovod for this torch and Python")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    shutil.copy(kept, wheels)
    builder, host = tmp_path / "builder", tmp_path / "host"
    venv.create(builder, with_pip=True)
    venv.create(host, with_pip=True)
    options = {"PYTHON": str(builder / "bin/python"), "LOFT_HVD_LEVELS": "lean"}
    script = "examples/containers/build_wheels.sh"
    _call(["bash", script, wheels], options, cwd=_ROOT, limit_s=5000.0)
    words = ["install", "--no-index", "--find-links", str(wheels), "loft-hvd[cli,horovod]"]
    # Nor are other folders known there, as pip's own settings may name them.
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    _call([host / "bin/python", "-m", "pip", *words], nowhere, cwd=tmp_path)
    path = os.pathsep.join([str(host / "bin"), os.environ["PATH"]])
    command: list[str | Path] = [host / "bin/horovodrun", "-np", "2", "--gloo"]
    command += [host / "bin/loft-hvd", "doctor", "--ranks"]
    said = _call(command, {"PATH": path, "OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert "Verdict: the 2 ranks fit together" in said

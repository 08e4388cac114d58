"""``make wheel``: what it builds installs in seconds, without a network, and runs on other hosts.

torch is not installed anew (1 GB): the fresh environment sees this one's by a path file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from pathlib import Path

import pytest

from loft_hvd.topology import cpu_flags, vector_levels

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

_ROOT = Path(__file__).parents[2]
_INSTALL_LIMIT_S = 30.0  # what the project promises
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


def _call(command: list[str | Path], *, cwd: Path, **variables: str) -> str:
    outer = ("LOFT_HVD_", "PYTHONPATH")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
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


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the wheel that ``make wheel`` builds."""
    folder = tmp_path_factory.mktemp("wheel")
    made = ["-m", "scripts.wheels", "--only", "wheel", "--folder", str(folder / "dist")]
    output = _call([sys.executable, *made], cwd=_ROOT)
    (wheel,) = (folder / "dist").iterdir()
    assert f"wheel: {wheel}" in output
    assert "manylinux" in wheel.name or "wheel: no manylinux tag (" in output, output
    python, seconds = _fresh_environment(folder / "env", folder / "dist")
    sys.stdout.write(
        f"\n{wheel.name}: {wheel.stat().st_size} bytes, installed in {seconds:.1f} s\n"
    )
    assert seconds < _INSTALL_LIMIT_S
    return python


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_one_environment_runs_on_hosts_of_every_instruction_set(
    python: Path, level: str, tmp_path: Path
) -> None:
    if level not in vector_levels(cpu_flags()):
        pytest.skip(f"this machine has no {level}")
    output = _call([python, "-c", _RUN], cwd=tmp_path, LOFT_HVD_ISA=level)
    assert output.split() == ["levels", *vector_levels(cpu_flags())]


def test_the_wheel_holds_the_package_and_nothing_else(python: Path) -> None:
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (record,) = site.glob("loft_hvd-*.dist-info/RECORD")
    files = {line.split(",")[0] for line in record.read_text().splitlines()}
    sources = {
        path.relative_to(_ROOT).as_posix()
        for pattern in ("*.py", "py.typed", "scenarios/*.toml")
        for path in (_ROOT / "loft_hvd").rglob(pattern)
    }
    packaged = {
        name for name in files if name.startswith("loft_hvd/") and "__pycache__" not in name
    }
    assert sources - packaged == set()
    assert [name for name in packaged - sources if not re.search(r"/_loft\..*\.so$", name)] == []
    tops = {name.split("/")[0] for name in files}
    assert {top for top in tops if not top.startswith("loft_hvd")} == {".."}  # bin/loft-hvd


def test_the_source_archive_builds(tmp_path: Path) -> None:
    made = ["-m", "scripts.wheels", "--only", "sdist", "--folder", str(tmp_path)]
    output = _call([sys.executable, *made], cwd=_ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert f"sdist: {archive}" in output
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    # The general kernel alone: what the archive lacks would show as well, in a tenth of the time.
    words = [
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-cache-dir",
        "-w",
        str(tmp_path / "dist"),
    ]
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    options = {"LOFT_HVD_LEVELS": "lean", "LOFT_HVD_CUDA": "0"}
    _call([sys.executable, "-m", "pip", *words, source], cwd=tmp_path, **options)
    python, _ = _fresh_environment(tmp_path / "env", tmp_path / "dist")
    assert _call([python, "-c", _RUN], cwd=tmp_path).split() == ["levels", "baseline"]

"""The C++ checks under sanitizers, and datagrams on bad networks with and without them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from loft_hvd.topology import cpu_flags, vector_levels
from tests.support.builds import ROOT, build, configure, run, side_by_side, tool

pytestmark = [pytest.mark.long, pytest.mark.timeout(2700)]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checks and the extension, built with sanitizers for the levels."""
    folder = tmp_path_factory.mktemp("sanitized")
    # A lean baseline and, where it runs, AVX2: wider vectors take as long again to compile.
    built = "lean,avx2" if "avx2" in vector_levels(cpu_flags()) else "baseline"
    strict = "-DLOFT_SANITIZE=address,undefined", "-DLOFT_WERROR=1"
    configure(folder, "-DLOFT_CUDA=0", f"-DLOFT_LEVELS={built}", *strict)
    build(folder, "check_cpu", "check_device", "check_threads", "_loft")
    return folder


def test_sanitizers_find_nothing(sanitized: Path) -> None:
    levels = vector_levels(cpu_flags())[:2]
    # Kernels that are not optimised: two minutes a level.
    commands = [["check_cpu", level] for level in levels]
    commands += [[name, levels[-1]] for name in ("check_device", "check_threads")]
    said = side_by_side(sanitized, *commands)
    assert [line.split(":")[0] for line in said[: len(levels)]] == levels
    assert all(" 0 differ" in line for line in said)


def test_address_sanitizer_finds_nothing_in_the_bindings(sanitized: Path) -> None:
    (library,) = sanitized.glob("_loft.*so")
    # Python is not built with it: it must be there before Python, and objects that Python keeps
    # until its end are no leaks of ours.
    # So must what it wraps: it looks for the C++ library's throw at its own start.
    names = ("libasan.so", "libstdc++.so")
    runtimes = " ".join(run("g++", f"-print-file-name={name}").strip() for name in names)
    environ = {"LD_PRELOAD": runtimes, "ASAN_OPTIONS": "detect_leaks=0"}
    said = run(sys.executable, ROOT / "tests/native/bound.py", library, environ=environ)
    assert re.search(r"[1-9]\d+ calls, 0 wrong", said), said


def test_thread_sanitizer_finds_nothing(tmp_path: Path) -> None:
    configure(
        tmp_path,
        "-DLOFT_CUDA=0",
        "-DLOFT_LEVELS=lean",
        "-DLOFT_SANITIZE=thread",
    )
    build(tmp_path, "check_threads")
    # It wants its memory at fixed places, which randomised addresses of a new kernel may take.
    fixed = tool("setarch"), "--addr-no-randomize"
    environ = {"TSAN_OPTIONS": "halt_on_error=1"}
    assert " 0 differ" in run(*fixed, tmp_path / "check_threads", environ=environ)


def build_datagrams(folder: Path, sanitizers: str) -> None:
    """Build the checks of datagrams in ``folder``, or skip where OpenSSL's headers are missing."""
    options = "-DLOFT_CUDA=0", "-DLOFT_LEVELS=lean", "-DLOFT_WERROR=1"
    configure(folder, *options, f"-DLOFT_SANITIZE={sanitizers}")
    if "check_port" not in run(tool("ninja"), "-C", folder, "-t", "targets", "all"):
        pytest.skip("no OpenSSL 3 headers here (libssl-dev), so no datagrams")
    build(folder, "check_datagram", "check_port")


# With sanitizers a tenth of the random worlds.
@pytest.mark.parametrize(
    ("sanitizers", "num_packets"), [("", 1_000_000), ("address,undefined", 100_000)]
)
def test_datagrams_keep_their_laws_on_bad_networks(
    sanitizers: str, num_packets: int, tmp_path: Path
) -> None:
    build_datagrams(tmp_path, sanitizers)
    commands = [["check_datagram", "--packets", str(num_packets)], ["check_port"]]
    for said in side_by_side(tmp_path, *commands):
        assert " 0 differ" in said


def test_thread_sanitizer_finds_nothing_in_ports(tmp_path: Path) -> None:
    build_datagrams(tmp_path, "thread")
    fixed = tool("setarch"), "--addr-no-randomize"
    environ = {"TSAN_OPTIONS": "halt_on_error=1"}
    assert " 0 differ" in run(*fixed, tmp_path / "check_port", environ=environ)

"""What ``loft-hvd doctor`` finds, and what it advises; nothing is started."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from loft_hvd.aggregation.compute import num_threads
from loft_hvd.config import Config
from loft_hvd.doctor import inspect as doctor
from loft_hvd.doctor.inspect import (
    DoctorFinding,
    HorovodBuild,
    Section,
    horovod_build,
    inspect_all,
    parse_check_build,
    verdict,
)
from loft_hvd.doctor.launch import launch_command
from loft_hvd.errors import ArgumentError, MissingDependencyError

_CHECK_BUILD = """Horovod v0.28.1:

Available Frameworks:
    [ ] TensorFlow
    [X] PyTorch
    [ ] MXNet

Available Controllers:
    [X] MPI
    [X] Gloo

Available Tensor Operations:
    [ ] NCCL
    [ ] DDL
    [ ] CCL
    [X] MPI
    [X] Gloo    """
_BOTH = HorovodBuild("0.28.1", ("PyTorch",), ("MPI", "Gloo"), ("MPI", "Gloo"))


def test_check_build_is_read_by_its_headings() -> None:
    assert parse_check_build(_CHECK_BUILD) == _BOTH


@pytest.mark.parametrize("text", ["", "horovodrun: command not found", "[X] Gloo"])
def test_unknown_check_build_is_trouble_not_an_empty_build(text: str) -> None:
    assert parse_check_build(text).trouble


def _advice(sections: Sequence[Section]) -> dict[str, str]:
    return {one.name: one.advice for section in sections for one in section.findings}


def _inspect(
    monkeypatch: pytest.MonkeyPatch, *, text: str, programs: Sequence[str]
) -> dict[str, str]:
    versions = {name: "1.0" for name in ("horovod", "torch", "loft-hvd", "numpy")}
    monkeypatch.setattr(doctor, "installed", lambda name: versions.get(name, ""))
    monkeypatch.setattr(doctor, "launcher", lambda name: name if name in programs else "")
    return _advice(inspect_all(probe=lambda command: text))


def test_complete_horovod_needs_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = _inspect(monkeypatch, text=_CHECK_BUILD, programs=("horovodrun", "mpirun"))
    names = ("horovod", "torch", "frameworks", "controllers", "horovodrun", "mpirun")
    assert {name: advice[name] for name in names} == dict.fromkeys(names, "")


@pytest.mark.parametrize(
    ("missing", "name", "words"),
    [
        ("[X] PyTorch", "frameworks", "built without torch"),
        ("Available", "Horovod", "make setup"),
    ],
)
def test_each_missing_part_of_horovod_has_its_advice(
    monkeypatch: pytest.MonkeyPatch, missing: str, name: str, words: str
) -> None:
    text = _CHECK_BUILD.replace(missing, "[ ]") if "X" in missing else ""
    assert words in _inspect(monkeypatch, text=text, programs=("horovodrun",))[name]


def test_horovod_without_the_mpi_that_is_here_has_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    text = _CHECK_BUILD.replace("[X] MPI", "[ ] MPI")
    advice = _inspect(monkeypatch, text=text, programs=("horovodrun",))
    assert "MPI is here but Horovod was built without it" in advice["controllers"]
    assert "openmpi-bin" in advice["mpirun"]


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize(("most", "is_small"), [(212992, True), (4194304, False)])
def test_what_a_loss_tolerant_gather_needs_is_looked_at(
    is_built: bool, most: int, is_small: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = SimpleNamespace(__file__="/here/_loft_datagram.so") if is_built else None
    reason = "it is built where OpenSSL's headers are: apt-get install libssl-dev"
    monkeypatch.setattr(doctor, "datagram_extension", lambda: (module, reason))
    monkeypatch.setattr(doctor, "_MOST_BUFFER", tmp_path / "rmem_max")
    (tmp_path / "rmem_max").write_text(f"{most}\n")
    advice = _advice(inspect_all(_BOTH, probe=lambda _: ""))
    assert "BBR, for long and lossy links" in advice
    if not is_built:
        assert advice["datagrams, for gather=LossTolerant()"] == f"optional: {reason}"
        assert "buffers of UDP, at most" not in advice
        return
    assert advice["datagrams, for gather=LossTolerant()"] == ""
    assert ("sysctl -w net.core.rmem_max=4194304" in advice["buffers of UDP, at most"]) == is_small


@pytest.mark.parametrize(
    ("seconds", "found", "is_advised"),
    [((300, 20, 9), "noticed after 480 s", True), ((5, 2, 2), "noticed after 9 s", False)],
)
def test_how_long_mpirun_waits_for_a_lost_host_is_told(
    seconds: tuple[int, int, int], found: str, is_advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = zip(("time", "intvl", "probes"), seconds, strict=True)
    parsable = "\n".join(f"mca:oob:tcp:param:oob_tcp_keepalive_{k}:value:{v}" for k, v in told)

    def ask(command: Sequence[str]) -> str:
        is_info = command[0].endswith("ompi_info")
        return parsable if is_info else "mpirun (Open MPI) 4.1.4"

    monkeypatch.setattr(doctor, "launcher", lambda name: name)
    sections = inspect_all(HorovodBuild(version="1.0"), probe=ask)
    (finding,) = (
        one for section in sections for one in section.findings if one.name == "mpirun, lost hosts"
    )
    assert found in finding.value
    assert ("oob_tcp_keepalive_time 5" in finding.advice) == is_advised


@pytest.mark.parametrize(
    ("text", "found", "is_advised"),
    [
        ("serveralivecountmax 3\nserveraliveinterval 0\n", "not noticed", True),
        ("serveraliveinterval 3\nserveralivecountmax 2\n", "noticed after 6 s", False),
        ("serveraliveinterval 60\nserveralivecountmax 3\n", "noticed after 180 s", True),
        ("usage: ssh", "not known", False),
    ],
)
def test_how_long_horovodrun_waits_for_a_lost_host_is_told(
    text: str, found: str, is_advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "launcher", lambda name: name)
    sections = inspect_all(HorovodBuild(version="1.0"), probe=lambda command: text)
    (finding,) = (
        one for section in sections for one in section.findings if one.name == "ssh, lost hosts"
    )
    assert finding.value == found
    assert ("ServerAliveInterval 3" in finding.advice) == is_advised
    assert not finding.advice or finding.advice.startswith("optional:")  # nothing to mend first


def test_nothing_installed_is_advice_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: "")
    monkeypatch.setattr(doctor, "launcher", lambda name: "")
    advice = _advice(inspect_all(probe=lambda command: pytest.fail(f"started {command}")))
    assert all(advice[name] for name in ("torch", "horovod", "Horovod", "horovodrun", "mpirun"))


def test_program_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: Sequence[str]) -> str:
        raise OSError("no such interpreter")

    monkeypatch.setattr(doctor, "installed", lambda name: "1.0")
    monkeypatch.setattr(doctor, "launcher", lambda name: name)
    advice = _advice(inspect_all(probe=hang))
    assert "no such interpreter" in advice["mpirun"]
    assert advice["Horovod"]


def _horovodrun(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Let a script be every launcher."""
    program = folder / "horovodrun"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(doctor, "installed", lambda name: "1.0")
    monkeypatch.setattr(doctor, "launcher", lambda name: str(program))


def test_program_that_takes_longer_than_its_limit_is_told_so_and_not_rebuilt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As horovodrun, it leaves the work to processes of its own: none of them may stay.
    _horovodrun(monkeypatch, tmp_path, f"sleep 50 & echo $! >> {tmp_path}/started; wait")
    monkeypatch.setattr(doctor, "_PROBE_TIMEOUT_S", 0.2)
    found = {each.name: each for section in inspect_all() for each in section.findings}
    late = "horovodrun --check-build took longer than its limit of 0.2 s"
    assert found["Horovod"].value == late
    assert found["mpirun"].value.endswith("has not answered within 0.2 s")
    for name in ("Horovod", "mpirun"):
        assert found[name].advice == "the machine may be busy: look again when it is not"
    # Who starts ranks does so all the same: Gloo is what a build has unless it was told otherwise.
    assert "--gloo" in launch_command(horovod_build(), ("train.py",), num_ranks=2)
    with pytest.raises(MissingDependencyError, match=f"mpirun with MPI: {late}; the machine may"):
        launch_command(horovod_build(), ("train.py",), num_ranks=2, controller="mpi")
    started = (tmp_path / "started").read_text().split()
    assert started
    until = time.monotonic() + 10
    while any(_runs(pid) for pid in started) and time.monotonic() < until:
        time.sleep(0.01)
    assert not [pid for pid in started if _runs(pid)]


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone
        return False


def test_horovod_is_asked_once_what_it_was_built_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "said").write_text(_CHECK_BUILD)
    _horovodrun(monkeypatch, tmp_path, f"cat {tmp_path}/said; echo asked >> {tmp_path}/said")
    assert [horovod_build(), horovod_build()] == [_BOTH] * 2
    assert (tmp_path / "said").read_text().count("asked") == 1


def test_wrong_setting_is_a_finding_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        raise ArgumentError("LOFT_HVD_THREADS='many': it takes a whole number above 0")

    monkeypatch.setattr(doctor, "config", wrong)
    assert "LOFT_HVD_THREADS='many'" in _advice(inspect_all(probe=lambda _: ""))["LOFT_HVD_*"]


def test_misspelt_setting_is_a_finding_with_the_right_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOFT_HVD_THREAD", "LOFT_HVD_COLOUR", "LOFT_HVD_CUDA_ARCHS"):
        monkeypatch.setenv(name, "1")
    advice = _advice(inspect_all(probe=lambda _: ""))
    assert advice["LOFT_HVD_THREAD"] == "is LOFT_HVD_THREADS meant?"
    assert "unset" in advice["LOFT_HVD_COLOUR"]
    assert "LOFT_HVD_CUDA_ARCHS" not in advice


def test_settings_end_with_the_threads_that_come_of_them() -> None:
    (settings,) = (one for one in inspect_all(probe=lambda _: "") if one.title == "Settings")
    assert settings.findings[-1].value == str(num_threads())


class _Extension:
    __file__ = "/x/_loft.so"
    has_cuda = False

    @staticmethod
    def isa_levels() -> list[str]:
        return ["baseline", "avx2"]


@pytest.mark.parametrize(
    ("asked", "used", "has_advice"),
    [(None, "avx2", False), ("baseline", "baseline", False), ("avx512", "avx512", True)],
)
def test_kernels_show_the_instruction_set_in_use(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, used: str, has_advice: bool
) -> None:
    monkeypatch.setattr(doctor, "extension", _Extension)
    monkeypatch.setattr(doctor, "config", lambda: Config(isa=asked))
    monkeypatch.setattr(doctor, "vector_levels", lambda flags: ["baseline", "avx2"])
    sections = inspect_all(probe=lambda _: "")
    found = {one.name: one for section in sections for one in section.findings}
    assert found["instruction set used"].value == used
    assert bool(found["instruction set used"].advice) is has_advice
    assert found["CUDA kernels"].value.startswith("not built")


@pytest.mark.parametrize(("asked", "levels"), [("avx512", "all"), (None, "native")])
def test_a_level_that_runs_but_was_not_built_says_how_to_build_it(
    asked: str | None, levels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "extension", _Extension)
    monkeypatch.setattr(doctor, "config", lambda: Config(isa=asked))
    monkeypatch.setattr(doctor, "vector_levels", lambda flags: ["baseline", "avx2", "avx512"])
    sections = inspect_all(probe=lambda _: "")
    found = {one.name: one for section in sections for one in section.findings}
    assert f"LOFT_HVD_LEVELS={levels}" in found["instruction set used"].advice


@pytest.mark.parametrize(
    ("is_built", "devices", "value", "advice"),
    [(True, 0, "built", ""), (False, 0, "no GPU here", ""), (False, 2, "plain torch", "nvcc")],
)
def test_missing_cuda_kernels_are_a_fault_only_beside_a_gpu(
    is_built: bool, devices: int, value: str, advice: str
) -> None:
    said, way_out = doctor.cuda_kernels(is_built, devices=devices)
    assert value in said
    assert advice in way_out
    assert bool(advice) is bool(way_out)


def test_missing_extension_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "extension", lambda: None)
    monkeypatch.setattr(doctor, "explain_missing", lambda: "build it with 'pip install .'")
    assert "pip install ." in _advice(inspect_all(probe=lambda _: ""))["extension"]


def test_inspection_never_imports_horovod_into_this_process() -> None:
    script = (
        "import sys\n"
        "from loft_hvd.doctor.inspect import inspect_all\n"
        "inspect_all(probe=lambda command: '')\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'horovod']\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_the_verdict_counts_what_is_to_be_mended_and_not_what_is_optional() -> None:
    fine, extra = (
        DoctorFinding("torch", "2.13.0"),
        DoctorFinding("rich", "not installed", "optional: pip x"),
    )
    wrong = [
        DoctorFinding("Horovod", "none", "make setup"),
        DoctorFinding("LOFT", "no", "unset it"),
    ]
    assert verdict([Section("a", (fine,))]) == "Verdict: ready."
    assert verdict([Section("a", (fine, extra))]) == "Verdict: ready; optional and not here: 1."
    assert verdict([Section("a", (extra, wrong[0])), Section("b", (wrong[1],))]) == (
        "Verdict: mend Horovod first: make setup (and 1 more, marked ->); optional and not here: 1."
    )

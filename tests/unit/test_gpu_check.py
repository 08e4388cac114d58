"""The script that checks all on a GPU: its steps, what it skips, and its archive."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import gpu_check
from scripts.gpu_check import Machine, Step, check, main, steps_for

SANITIZER = "/cuda/bin/sanitizer"
WHOLE = Machine(
    "python",
    "NVIDIA H200",
    "90",
    "/cuda/bin/nvcc",
    SANITIZER,
    "13.0",
    num_gpus=2,
    nccl="/usr",
    horovodrun="horovodrun",
    is_venv=True,
)
HOST = replace(WHOLE, gpu="", arch="", sanitizer="", torch_cuda="", num_gpus=0, nccl="")
STEPS = ["machine", "build", "tests", "memory", "memcheck", "racecheck", "bench"]
STEPS += ["bench-ddp", "peers", "peers-memcheck", "peers-bound", "nccl", "nccl-horovod"]
STEPS += ["ddp", "ddp-nccl", "horovod", "nccl-build", "horovod-nccl"]


def passes(step: Step, log: Path) -> str:
    log.write_text(step.name)
    return ""


def results_in(folder: Path) -> dict[str, tuple[str, str]]:
    found = json.loads((folder / "summary.json").read_text())
    return {one["name"]: (one["result"], one["reason"]) for one in found}


def test_steps_come_in_order_and_each_has_a_limit() -> None:
    steps = steps_for(WHOLE, Path("/x"))
    names = [step.name for step in steps]
    assert names == STEPS
    assert all(0 < step.limit_s <= 1800 for step in steps)
    assert not any(step.missing or step.lacks for step in steps)


def test_ranks_on_nccl_have_a_gpu_each() -> None:
    commands = {step.name: list(step.command) for step in steps_for(WHOLE, Path("/x"))}
    assert commands["ddp-nccl"][-4:] == ["2", "-m", "tests.gpu.ranks", "ddp-nccl"]
    assert commands["horovod-nccl"][:3] == ["horovodrun", "--gloo", "-np"]
    assert commands["horovod-nccl"][3] == "2"
    assert commands["ddp"][-4] == "3"


def test_lanes_are_tried_by_ranks_that_share_a_gpu() -> None:
    steps = {step.name: step for step in steps_for(WHOLE, Path("/x"))}
    for name in ("peers-memcheck", "peers-bound", "nccl", "nccl-horovod"):
        assert steps[name].environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert "4" in steps["peers"].command
    assert list(steps["peers-memcheck"].command)[-1] == "--few"
    # Other processes can map torch's own memory only.
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in steps["peers-memcheck"].environ
    names = re.search(r"``--minutes 10`` and\n``--steps ([\w,-]+)``", gpu_check.__doc__ or "")
    assert names is not None
    assert set(names[1].split(",")) <= steps.keys()


def test_all_steps_share_the_time(tmp_path: Path) -> None:
    limits = []

    def takes(step: Step, log: Path) -> str:
        limits.append(step.limit_s)
        time.sleep(0.06)
        return ""

    steps = [Step(f"step {at}", ["true"], 60.0) for at in range(3)]
    found = check(steps, tmp_path, run=takes, limit_s=0.1)
    assert 0.06 < limits[0] <= 0.1
    assert 0 < limits[1] < 0.06
    assert [one.result for one in found] == ["passed", "passed", "skipped"]
    assert found[2].reason == "no time left"


def test_named_steps_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "x")
    main(["--folder", folder, "--steps", "ddp,bench"], look=lambda python: WHOLE, run=passes)
    assert list(results_in(tmp_path / "x")) == ["bench", "ddp"]
    with pytest.raises(SystemExit):
        main(["--folder", folder, "--steps", "dpp"], look=lambda python: WHOLE, run=passes)
    assert "no step dpp; of machine, build" in capsys.readouterr().err


def test_kernels_are_built_for_the_gpu_that_is_here() -> None:
    environ = steps_for(replace(WHOLE, arch="86"), Path("/x"))[1].environ
    assert environ["LOFT_HVD_CUDA"] == "1"
    assert environ["LOFT_HVD_CUDA_ARCHS"] == "86-real"


def test_what_cannot_run_on_a_host_says_why(tmp_path: Path) -> None:
    status = main(["--folder", str(tmp_path / "x")], look=lambda python: HOST, run=passes)
    assert status == 2
    found = results_in(tmp_path / "x")
    no_nccl = "no nccl.h, neither Debian's nor beside torch"
    no_device = "no GPU here: nvidia-smi names none; torch was built without CUDA"
    assert found == {
        "machine": ("passed", ""),
        "build": ("passed", ""),
        "tests": ("passed in part", no_device),
        "memory": ("skipped", no_device),
        "memcheck": ("skipped", f"{no_device}; no compute-sanitizer beside nvcc or on PATH"),
        "racecheck": ("skipped", f"{no_device}; no compute-sanitizer beside nvcc or on PATH"),
        "bench": ("skipped", no_device),
        "bench-ddp": ("skipped", no_device),
        "peers": ("skipped", no_device),
        "peers-memcheck": ("skipped", f"{no_device}; no compute-sanitizer beside nvcc or on PATH"),
        "peers-bound": ("skipped", no_device),
        "nccl": ("skipped", no_device),
        "nccl-horovod": ("skipped", no_device),
        "ddp": ("passed in part", no_device),
        "ddp-nccl": ("skipped", no_device),
        "horovod": ("passed in part", no_device),
        "nccl-build": ("skipped", f"{no_device}; {no_nccl}"),
        "horovod-nccl": ("skipped", f"{no_device}; {no_nccl}; nccl-build has not passed"),
    }
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        names = {member.name for member in archive}
    logs = {"0-machine.log", "1-build.log", "2-tests.log", "13-ddp.log", "15-horovod.log"}
    assert names == {"x", "x/summary.json"} | {f"x/{log}" for log in logs}


def test_a_lent_machine_without_horovod_skips_its_steps(tmp_path: Path) -> None:
    lent = replace(WHOLE, horovodrun="", is_venv=False)
    status = main(["--folder", str(tmp_path / "x")], look=lambda python: lent, run=passes)
    assert status == 2
    found = results_in(tmp_path / "x")
    assert found["ddp-nccl"] == ("passed", "")
    assert found["horovod"] == ("skipped", "no horovodrun beside python")
    # It would make a .venv without torch, which the next call would take.
    reason = "only in .venv is Horovod built anew: make setup first"
    assert found["nccl-build"] == ("skipped", reason)


def test_what_fills_the_memory_runs_alone() -> None:
    commands = {step.name: list(step.command) for step in steps_for(WHOLE, Path("/x"))}
    (alone,) = [word for word in commands["memory"] if word.startswith("tests/")]
    assert f"--ignore={alone}" in commands["tests"]
    assert (Path(__file__).parents[2] / alone).is_file()
    assert "-n" in commands["tests"]
    assert "-n" not in commands["memory"]


def test_tests_that_would_all_be_skipped_on_a_gpu_fail() -> None:
    environ = {step.name: step.environ for step in steps_for(WHOLE, Path("/x"))}
    assert environ["tests"]["EXPECT_CUDA"] == environ["memory"]["EXPECT_CUDA"] == "1"
    on_host = {step.name: step.environ for step in steps_for(HOST, Path("/x"))}
    assert "EXPECT_CUDA" not in on_host["tests"]


def test_all_passed_is_status_0(tmp_path: Path) -> None:
    assert main(["--folder", str(tmp_path / "x")], look=lambda python: WHOLE, run=passes) == 0
    # A second check takes the place of the first one.
    assert main(["--folder", str(tmp_path / "x")], look=lambda python: WHOLE, run=passes) == 0


def test_kernels_that_were_not_built_are_neither_sanitized_nor_timed(tmp_path: Path) -> None:
    def fails(step: Step, log: Path) -> str:
        return "exit status 1" if step.name == "build" else ""

    status = main(["--folder", str(tmp_path / "x")], look=lambda python: WHOLE, run=fails)
    assert status == 1
    found = results_in(tmp_path / "x")
    assert found["build"] == ("failed", "exit status 1")
    assert found["tests"] == ("passed", "")
    assert found["bench"] == ("skipped", "build has not passed")


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_an_interrupted_check_leaves_its_archive(tmp_path: Path, how: str) -> None:
    def interrupted(step: Step, log: Path) -> str:
        log.write_text("so far")
        if step.name == "tests" and how == "SIGTERM":
            signal.raise_signal(signal.SIGTERM)
        if step.name == "tests" and how == "Ctrl-C":
            raise KeyboardInterrupt  # as Python does, where the shell has not SIGINT ignored
        return ""

    with pytest.raises(KeyboardInterrupt):
        main(["--folder", str(tmp_path / "x")], look=lambda python: WHOLE, run=interrupted)
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        assert "x/2-tests.log" in archive.getnames()


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path)], look=lambda python: WHOLE, run=passes)
    assert (tmp_path / "mine").read_text() == "keep"


def test_a_step_is_run_with_its_variables_and_its_words_are_kept(tmp_path: Path) -> None:
    code = "import os; print(os.environ['WORD']); raise SystemExit(3)"
    step = Step("say", [sys.executable, "-c", code], 60.0, environ={"WORD": "hello"})
    (finding,) = check([step], tmp_path, run=gpu_check._run)
    assert (finding.result, finding.reason) == ("failed", "exit status 3")
    assert (tmp_path / "0-say.log").read_text() == "hello\n"


def test_the_last_words_of_a_step_that_failed_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "print('first'); print('\\n' * 50, 'last'); raise SystemExit(3)"
    check([Step("say", [sys.executable, "-c", code], 60.0)], tmp_path, run=gpu_check._run)
    said = capsys.readouterr()
    assert "last" in said.out + said.err
    assert "first" not in said.out + said.err


def test_a_step_that_cannot_start_does_not_end_the_others(tmp_path: Path) -> None:
    steps = [Step("lost", ["/no/such/command"], 60.0), Step("next", ["true"], 60.0)]
    lost, following = check(steps, tmp_path, run=gpu_check._run)
    assert lost.result == "failed"
    assert "it did not start" in lost.reason
    assert following.result == "passed"


def test_a_step_over_its_limit_is_ended_with_what_it_started(tmp_path: Path) -> None:
    step = Step("slow", ["sh", "-c", "sleep 600 & echo $!; sleep 600"], 1.0)
    (finding,) = check([step], tmp_path, run=gpu_check._run)
    assert (finding.result, finding.reason) == ("failed", "not done after 1 s")
    child = int((tmp_path / "0-slow.log").read_text())
    with contextlib.suppress(ProcessLookupError):  # it has ended and is reaped
        ended, _, _ = select.select([os.pidfd_open(child)], [], [], 10.0)
        assert ended

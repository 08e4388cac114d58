"""The batch scripts of ``examples/slurm``: on a Slurm of the test's own, and what needs none."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from loft_hvd.fleet.emit import emit
from loft_hvd.fleet.jobs import DeviceModel, Fleet, Host, Job
from loft_hvd.fleet.run import plan_job
from tests.support.launch import ROOT, launcher_here
from tests.support.slurm import missing_for_slurm, private_slurm

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

FOLDER = ROOT / "examples/slurm"
HOROVOD_SCRIPT = """
import horovod.torch as hvd
import torch
import loft_hvd as loft

hvd.init()
mean = loft.average(hvd.rank(), 1)
print(f"rank {hvd.rank()} of {hvd.size()} has finished, mean {mean}", flush=True)
"""
TORCH_SCRIPT = """
import torch.distributed as dist
import loft_hvd as loft

dist.init_process_group("gloo")
mean = loft.average(dist.get_rank(), 1)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has finished, mean {mean}", flush=True)
dist.destroy_process_group()
"""


def environ_of_a_job(more: Mapping[str, str]) -> dict[str, str]:
    outer = ("HOROVOD_", "OMPI_", "PMIX_", "SLURM_JOB")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | {"PYTHONPATH": str(ROOT)} | root | dict(more)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    if missing := missing_for_slurm():
        pytest.skip(missing)
    with private_slurm(tmp_path_factory.mktemp("slurm"), cpus=8) as environ:
        yield environ


def submit(
    environ: Mapping[str, str], folder: Path, path: Path, text: str, *options: str
) -> tuple[int, str]:
    """Run a batch script, by its path, to its end; return its status and what it printed."""
    script, output = folder / "train.py", folder / "job.out"
    script.write_text(text)
    variables = environ_of_a_job({key: environ[key] for key in ("SLURM_CONF", "PATH")})

    def call(*command: str) -> str:
        done = subprocess.run(
            command,
            env=variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    command = ["sbatch", "--parsable", "--nodes=1", "--time=00:02:00", f"--output={output}"]
    arguments = [str(path), str(Path(sys.executable).parents[1]), str(script)]
    job, until = call(*command, *options, *arguments).strip(), time.monotonic() + 150
    while True:  # sbatch --wait looks after 2, 12 and 42 seconds
        shown = call("scontrol", "show", "job", job)
        if not re.search(r"JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)", shown):
            break
        assert time.monotonic() < until, shown
        time.sleep(0.5)
    (status,) = re.findall(r" ExitCode=(\d+):", shown)
    return int(status), output.read_text() if output.exists() else ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("mpirun.sbatch", HOROVOD_SCRIPT, ["--ntasks-per-node=2", "--cpus-per-task=1"]),
        ("srun.sbatch", HOROVOD_SCRIPT, ["--ntasks-per-node=2", "--cpus-per-task=1"]),
        (
            "torchrun.sbatch",
            TORCH_SCRIPT,
            ["--export=ALL,RANKS_PER_HOST=2", "--cpus-per-task=2"],
        ),
    ],
)
def test_a_batch_script_trains_under_slurm(
    slurm: Mapping[str, str], name: str, text: str, options: list[str], tmp_path: Path
) -> None:
    if name != "torchrun.sbatch" and not launcher_here("mpi"):
        pytest.skip("no mpirun on this machine")
    status, output = submit(slurm, tmp_path, FOLDER / name, text, *options)
    assert status == 0, output
    assert output.count("Verdict: the 2 ranks fit together") == 1, output
    assert sorted(re.findall(r"rank \d of 2 has finished, mean 0\.5", output)) == [
        "rank 0 of 2 has finished, mean 0.5",
        "rank 1 of 2 has finished, mean 0.5",
    ]


@pytest.mark.long
@pytest.mark.parametrize("slots", [2, 3])
def test_the_script_of_a_plan_trains_under_slurm(
    slurm: Mapping[str, str], slots: int, tmp_path: Path
) -> None:
    """With two slots the host is taken whole, with three as a heterogeneous job of one part."""
    host = Host(socket.gethostname(), {"CPU": slots}, 1e9)
    job = Job(
        "job",
        [sys.executable, str(tmp_path / "train.py")],
        4.0,
        64,
        {"CPU": DeviceModel(1e-3)},
        steps=1,
        max_workers=2,
    )
    script = tmp_path / "plan.sbatch"
    script.write_text(emit(plan_job(Fleet([host]), job, simulates=False), "sbatch"))
    status, output = submit(slurm, tmp_path, script, HOROVOD_SCRIPT)
    assert status == 0, output
    assert sorted(re.findall(r"rank \d of 2 has finished, mean 0\.5", output)) == [
        "rank 0 of 2 has finished, mean 0.5",
        "rank 1 of 2 has finished, mean 0.5",
    ]


ALONE = """
import torch.distributed as dist
import loft_hvd as loft

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
loft.ddp_hook(loft.Median())
print("has finished, alone", flush=True)
"""
NO_ENGINE = """
import loft_hvd as loft

mean = loft.average(1.0, 1)
print("has finished, mean", mean, flush=True)
"""
REFUSED = "srun has started this process as one of 2 ranks"


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (
            HOROVOD_SCRIPT,
            "HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo srun --ntasks=2 python {}",
            REFUSED,
        ),
        (ALONE, "srun --ntasks=2 python {}", REFUSED),
        (NO_ENGINE, "srun --ntasks=2 python {}", "a launcher has started this process as one of 2"),
        (NO_ENGINE, "python {}", "has finished, mean 1.0"),
        (ALONE, "srun --ntasks=1 python {}", "has finished, alone"),
        (
            TORCH_SCRIPT,
            "srun --ntasks=1 torchrun --standalone --nproc-per-node=2 {}",
            "rank 1 of 2 has finished, mean 0.5",
        ),
        (
            HOROVOD_SCRIPT,
            "srun --ntasks=1 horovodrun -np 2 --gloo python {}",
            "rank 1 of 2 has finished, mean 0.5",
        ),
    ],
    ids=["srun-horovod", "srun-torch", "srun-none", "plain", "one", "torchrun", "horovodrun"],
)
def test_ranks_of_an_allocation_meet_or_are_told(
    slurm: Mapping[str, str], text: str, line: str, says: str, tmp_path: Path
) -> None:
    batch = tmp_path / "job.sbatch"
    batch.write_text(f'#!/bin/bash\n. "$1/bin/activate"\n{line.format(chr(34) + "$2" + chr(34))}\n')
    status, output = submit(slurm, tmp_path, batch, text, "--ntasks-per-node=2")
    assert says in output, output
    is_refused = "has started this process" in says
    assert (status != 0) == is_refused, output
    assert ("has finished" in output) != is_refused, output


def run_with_mpirun(environment: Path, script: Path) -> subprocess.CompletedProcess[str]:
    """Run the batch script for mpirun as Slurm would, in a job of two ranks."""
    return subprocess.run(
        ["bash", FOLDER / "mpirun.sbatch", environment, script],
        env=environ_of_a_job({"SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1"}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_the_script_for_mpirun_trains_with_what_slurm_tells_it(tmp_path: Path) -> None:
    if not launcher_here("mpi"):
        pytest.skip("no mpirun on this machine")
    script = tmp_path / "train.py"
    script.write_text(HOROVOD_SCRIPT)
    done = run_with_mpirun(Path(sys.executable).parents[1], script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Verdict: the 2 ranks fit together" in done.stdout
    assert done.stdout.count("of 2 has finished, mean 0.5") == 2


@pytest.mark.long
def test_a_job_ends_before_training_where_its_hosts_do_not_fit(tmp_path: Path) -> None:
    if not launcher_here("mpi"):
        pytest.skip("no mpirun on this machine")
    # An environment whose doctor finds a fault: the real one, with a setting of rank 1's own.
    real = Path(sys.executable).parents[1]
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "activate").write_text(f'PATH="{folder}:{real}/bin:$PATH"\n')
    (folder / "loft-hvd").write_text(
        '#!/bin/bash\n[ "$OMPI_COMM_WORLD_RANK" = 1 ] && export LOFT_HVD_MESH=off\n'
        f'exec {real}/bin/loft-hvd "$@"\n'
    )
    (folder / "loft-hvd").chmod(0o755)
    script = tmp_path / "train.py"
    script.write_text("print('has begun')")
    done = run_with_mpirun(tmp_path, script)
    assert done.returncode != 0
    assert "Verdict: mend LOFT_HVD_MESH first" in done.stdout, done.stdout + done.stderr
    assert "has begun" not in done.stdout

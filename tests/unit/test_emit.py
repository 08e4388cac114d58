"""What starts a plan puts ranks where the plan has them; nothing that a file names is a command."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from loft_hvd.errors import ArgumentError, PlanError
from loft_hvd.fleet.emit import emit, first_sizes
from loft_hvd.fleet.jobs import DeviceModel, Fleet, Host, Job, WorkerNeeds
from loft_hvd.fleet.place import Choice
from loft_hvd.fleet.rate import predict
from loft_hvd.fleet.run import JobPlan
from loft_hvd.fleet.timeline import PlannedStretch
from loft_hvd.fleet.traffic import HostRanks, Layout
from tests.support.schema import faults, read_schema

HOSTILE = "train.py; touch /tmp/owned $(id) `id` 'quoted' \"twice\" && \\ | #"
JOB = Job(
    "job",
    ["python", HOSTILE],
    4e6,
    32,
    {"T4": DeviceModel(1e-3), "CPU": DeviceModel(3e-3)},
    steps=36_000,
)


def plan_of(job: Job, *ranks: tuple[str, str, int, int]) -> JobPlan:
    """Return a plan of host, device, ranks taken, and slots."""
    parts = [
        HostRanks(Host(name, {device: slots}, 1e9), device, count)
        for name, device, count, slots in ranks
    ]
    fleet = Fleet([part.host for part in parts])
    best = predict(fleet, job, Layout.of(parts))
    return JobPlan(fleet, job, Choice(best, (), (), {}), None)


UNEQUAL = (("b", "CPU", 1, 1), ("a.lab", "T4", 3, 3))


def test_horovodrun_gets_hosts_in_the_order_of_ranks() -> None:
    words = shlex.split(emit(plan_of(JOB, *UNEQUAL), "horovodrun", sizes="/a b/sizes.json"))
    assert words == [
        *("env", "LOFT_HVD_FIRST_SIZES=/a b/sizes.json", "horovodrun", "-np", "4"),
        *("-H", "a.lab:3,b:1", "--gloo", "python", HOSTILE),
    ]
    job = replace(JOB, elastic=True, min_workers=2, rule="trimmed_mean:f=1")
    words = shlex.split(emit(plan_of(job, *UNEQUAL), "horovodrun"))
    assert words[5:9] == ["--min-np", "3", "--max-np", "4"]


def test_mpirun_hands_variables_on() -> None:
    words = shlex.split(emit(plan_of(JOB, *UNEQUAL), "mpirun", sizes="s.json"))
    assert words[:5] == ["mpirun", "-np", "4", "-H", "a.lab:3,b:1"]
    assert words[-6:] == ["-x", "PATH", "-x", "LOFT_HVD_FIRST_SIZES=s.json", "python", HOSTILE]
    with pytest.raises(PlanError, match="is elastic, which mpirun is not"):
        emit(plan_of(replace(JOB, elastic=True), *UNEQUAL), "mpirun")


def test_slurm_gets_whole_hosts_and_a_time_above_the_prediction() -> None:
    plan = plan_of(JOB, *UNEQUAL)
    script = emit(plan, "sbatch")
    assert "#SBATCH --nodes=2\n#SBATCH --nodelist=a.lab,b\n#SBATCH --exclusive\n" in script
    (time,) = [line for line in script.splitlines() if "--time" in line]
    hours, minutes, _ = map(int, time.removeprefix("#SBATCH --time=").split(":"))
    limit_s = 3600 * hours + 60 * minutes
    assert 1.25 * plan.total_s + 600 <= limit_s < 1.25 * plan.total_s + 700
    assert shlex.split(script.splitlines()[-1])[-1] == HOSTILE


def test_slots_left_free_make_a_heterogeneous_job() -> None:
    plan = plan_of(JOB, ("a", "T4", 2, 4), ("b", "T4", 2, 4), ("c", "T4", 1, 4))
    head = emit(plan, "sbatch").split("set -e")[0].splitlines()[4:]
    assert head == [
        *("#SBATCH --nodes=2", "#SBATCH --nodelist=a,b", "#SBATCH --ntasks-per-node=2"),
        *("#SBATCH --gres=gpu:2", "#SBATCH hetjob", "#SBATCH --nodes=1", "#SBATCH --nodelist=c"),
        *("#SBATCH --ntasks-per-node=1", "#SBATCH --gres=gpu:1"),
    ]


def test_a_script_runs_the_command_with_its_very_words(tmp_path: Path) -> None:
    """A stand-in for the launcher prints what it is given."""
    (tmp_path / "horovodrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "horovodrun").chmod(0o755)
    for kind in ("horovodrun", "sbatch"):
        (tmp_path / "script").write_text(emit(plan_of(JOB, *UNEQUAL), kind))
        done = subprocess.run(
            ["/bin/bash", tmp_path / "script"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.splitlines()[-1] == HOSTILE


def test_a_job_whose_hosts_change_tells_horovodrun_by_its_age(tmp_path: Path) -> None:
    job = replace(JOB, elastic=True)
    stretches = [
        PlannedStretch(100.0, 103.0, (("b", 1),)),
        PlannedStretch(103.0, 700.0, (("a.lab", 3), ("b", 1))),
    ]
    script = tmp_path / "start.sh"
    plan = plan_of(job, ("b", "CPU", 1, 1))
    script.write_text(emit(plan, "horovodrun", sizes="/a b/s", stretches=stretches))
    launcher = tmp_path / "horovodrun"  # it asks for hosts twice, as Horovod's does all the time
    launcher.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\nsh -c "$4"\nsleep 3.1\nsh -c "$4"\n')
    launcher.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.stderr == ""
    words = done.stdout.splitlines()
    assert words[:3] == ["-np", "1", "--host-discovery-script"]
    assert words[words.index("--min-np") :] == [
        *("--min-np", "1", "--max-np", "1", "--gloo", "python", HOSTILE),
        *("b:1", "a.lab:3", "b:1"),
    ]
    for kind in ("mpirun", "sbatch", "mpijob"):
        with pytest.raises(PlanError, match="has 2 sets of hosts one after another"):
            emit(plan, kind, image="x", stretches=stretches)
    with pytest.raises(ArgumentError, match="--emit 'srun' must be one of horovodrun"):
        emit(plan, "srun", stretches=stretches)


def test_who_ends_the_script_of_a_job_whose_hosts_change_ends_horovodrun(tmp_path: Path) -> None:
    stretches = [
        PlannedStretch(0.0, 50.0, (("b", 1),)),
        PlannedStretch(50.0, 700.0, (("a.lab", 3), ("b", 1))),
    ]
    plan = plan_of(replace(JOB, elastic=True), ("b", "CPU", 1, 1))
    script, launcher = tmp_path / "start.sh", tmp_path / "horovodrun"
    script.write_text(emit(plan, "horovodrun", sizes="s", stretches=stretches))
    launcher.write_text('#!/bin/bash\ntrap "echo ended; exit 7" TERM\necho up\nread -rt 20\n')
    launcher.chmod(0o755)
    with subprocess.Popen(
        ["bash", str(script)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        stdin=subprocess.PIPE,  # stays open, so that the launcher waits
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "up\n"
        started.terminate()
        assert started.stdout.readline() == "ended\n"
        assert started.wait(20) == 7


def test_an_mpijob_has_a_pod_a_rank_on_the_plans_hosts() -> None:
    manifest = json.loads(emit(plan_of(JOB, *UNEQUAL), "mpijob", image="lab/train:1"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert manifest["spec"]["slotsPerWorker"] == 1
    roles = manifest["spec"]["mpiReplicaSpecs"]
    worker = roles["Worker"]
    assert worker["replicas"] == 4
    affinity = worker["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["a.lab", "b"]
    command = roles["Launcher"]["template"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["python", HOSTILE]


MPIJOB = read_schema(Path(__file__).parent / "schemas/mpijob.json")


@pytest.mark.parametrize(
    "job", [JOB, replace(JOB, needs=WorkerNeeds(cpus=2, memory_bytes=1.5e9), name="a-b")]
)
def test_an_mpijob_is_of_its_published_schema(job: Job) -> None:
    manifest = json.loads(emit(plan_of(job, *UNEQUAL), "mpijob", image="lab/train:1"))
    assert list(faults(manifest, MPIJOB, MPIJOB)) == []
    manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["replicas"] = 2
    manifest["spec"]["runPolicy"]["cleanPodPolicy"] = "Some"
    manifest["spec"]["slots"] = 1
    assert len(list(faults(manifest, MPIJOB, MPIJOB))) == 3


@pytest.mark.parametrize("name", ["3d", "a" * 55])
def test_an_mpijob_s_pods_have_names_that_kubernetes_takes(name: str) -> None:
    with pytest.raises(PlanError, match=r"pods would be called up to '.*-worker-3'.*RFC 1035"):
        emit(plan_of(replace(JOB, name=name), *UNEQUAL), "mpijob", image="x")


def test_an_mpijob_that_cannot_place_ranks_is_refused() -> None:
    plan = plan_of(JOB, ("a", "T4", 2, 4), ("b", "T4", 4, 4))
    with pytest.raises(PlanError, match=r"cannot leave slots of \['a'\] free"):
        emit(plan, "mpijob", image="x")
    with pytest.raises(ArgumentError, match="needs --image"):
        emit(plan, "mpijob")
    with pytest.raises(ArgumentError, match="must be one of horovodrun, mpirun, sbatch, mpijob"):
        emit(plan, "ray")


def test_the_file_of_sizes_has_each_host_s() -> None:
    plan = plan_of(JOB, *UNEQUAL)
    assert json.loads(first_sizes(plan)) == {
        "global_batch_size": 32,
        "hosts": {"a.lab": list(plan.best.sizes[:3]), "b": [plan.best.sizes[3]]},
    }
    assert sum(plan.best.sizes) == 32

"""A plan as what starts it: a line for horovodrun or mpirun, a script for Slurm, an MPIJob.

Nothing is started here. Hosts come in the order of ranks, rack by rack, so that sizes belong to
them and rings leave each rack once; those of a discovery script Horovod orders as it likes. Names
of hosts follow RFC 1123 and commands are lists, so what a shell reads is quoted once, by ``shlex``.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from loft_hvd.errors import ArgumentError, PlanError
from loft_hvd.fleet.run import JobPlan, show_hosts
from loft_hvd.fleet.timeline import PlannedStretch

__all__ = ["KINDS", "emit", "first_sizes"]

KINDS = ("horovodrun", "mpirun", "sbatch", "mpijob")
_SIZES = "LOFT_HVD_FIRST_SIZES"  # as in config.py
# Over what it should take in 19 of 20 cases, as an overrun is killed: what a prediction may be
# short by, and minutes for imports and the first epoch's cold caches. Both are choices.
_MARGIN, _START_S = 1.25, 600.0
_POD = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def emit(
    plan: JobPlan,
    kind: str,
    *,
    sizes: str | None = None,
    image: str | None = None,
    stretches: Sequence[PlannedStretch] = (),
) -> str:
    """Return what starts a plan.

    Args:
        plan: the plan.
        kind: of ``KINDS``.
        sizes: file with ``first_sizes``, which rank 0 reads; None to start with equal sizes.
        image: container of an MPIJob.
        stretches: all hosts of an elastic job one after another, the plan's first; several are
            handed to ``horovodrun`` as time goes by.

    Raises:
        ArgumentError: there is no such kind, or a container is missing.
        PlanError: this launcher cannot place ranks so.
    """
    if kind not in KINDS:
        raise ArgumentError(f"--emit {kind!r} must be one of {', '.join(KINDS)}")
    if len(stretches) > 1:
        return _changing(plan, kind, sizes, stretches)
    if kind == "sbatch":
        return _sbatch(plan, sizes)
    if kind == "mpijob":
        return _mpijob(plan, image)
    return shlex.join(_launch(plan, kind, sizes)) + "\n"


def first_sizes(plan: JobPlan) -> str:
    """Return what ``Balancer(first_sizes=...)`` reads: each host's sizes, in the order of ranks."""
    hosts: dict[str, list[int]] = {}
    for part, size in zip(plan.best.devices, plan.best.sizes, strict=True):
        hosts.setdefault(part.host.name, []).append(size)
    total = plan.job.global_batch_size
    return json.dumps({"global_batch_size": total, "hosts": hosts}, indent=1) + "\n"


def _changing(
    plan: JobPlan, kind: str, sizes: str | None, stretches: Sequence[PlannedStretch]
) -> str:
    """Return a script that tells ``horovodrun`` other hosts as time goes by.

    The script becomes ``horovodrun``, so what ends the one ends the other, and no file is left:
    Horovod hands the words of a discovery script to a shell.
    """
    if kind != "horovodrun":
        raise PlanError(
            f"job {plan.job.name!r} is elastic and has {len(stretches)} sets of hosts one after "
            f"another, which {kind} cannot; emit horovodrun, or let elastic = false keep its hosts"
        )
    steps = ["age=$(($(date +%s) - begun))"]
    for at, each in enumerate(stretches, start=1):
        names = " ".join(shlex.quote(f"{name}:{count}") for name, count in each.hosts)
        age = round(each.end_s - stretches[0].start_s)
        test = f"[ $age -lt {age} ] && " if at < len(stretches) else ""
        steps.append(f'{test}printf "%s\\n" {names}' + (" && exit" if test else ""))
    words = _launch(plan, kind, sizes)
    at = words.index("-H")
    before, after = shlex.join(words[:at]), shlex.join(words[at + 2 :])
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Job {plan.job.name}, whose hosts change by seconds since its start.",
            f"hosts={shlex.quote(chr(10).join(steps))}",
            f'exec {before} --host-discovery-script "begun=$(date +%s); $hosts" {after}',
            "",
        ]
    )


def _launch(plan: JobPlan, launcher: str, sizes: str | None) -> list[str]:
    """Return the words of a launcher's line."""
    world_size, job = str(plan.best.layout.world_size), plan.job
    hosts = show_hosts(plan.best)
    told = [] if sizes is None else [f"{_SIZES}={sizes}"]
    if launcher == "mpirun":
        if job.elastic:
            raise PlanError(f"job {job.name!r} is elastic, which mpirun is not; emit horovodrun")
        words = ["mpirun", "-np", world_size, "-H", hosts, "--bind-to", "none", "--map-by", "slot"]
        exported = [word for name in ("PATH", *told) for word in ("-x", name)]
        return [*words, *exported, *job.command]
    engine = f"--{job.engine}"
    words = [*(["env", *told] if told else []), "horovodrun", "-np", world_size, "-H", hosts]
    if job.elastic:
        least = max(job.min_workers, job.parsed_rule.min_rows)
        most = min(job.max_workers, sum(sum(h.slots.values()) for h in plan.fleet.hosts))
        words += ["--min-np", str(least), "--max-np", str(most)]
    return [*words, engine, *job.command]


def _sbatch(plan: JobPlan, sizes: str | None) -> str:
    """Return a batch script: whole hosts, or where ranks leave slots free a heterogeneous job."""
    job, layout = plan.job, plan.best.layout
    minutes = math.ceil((_MARGIN * plan.p95_s + _START_S) / 60.0)
    head = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00",
        "#SBATCH --output=%x-%j.out",
    ]
    is_whole = all(sum(host.slots.values()) == count for host, count in layout.hosts)
    if is_whole:
        everyone = ",".join(host.name for host, _ in layout.hosts)
        head += [f"#SBATCH --nodes={len(layout.hosts)}", f"#SBATCH --nodelist={everyone}"]
        head += ["#SBATCH --exclusive"]
    else:
        components = []
        for count, group in groupby(layout.hosts, key=lambda each: each[1]):
            names = [host.name for host, _ in group]
            lines = [f"#SBATCH --nodes={len(names)}", f"#SBATCH --nodelist={','.join(names)}"]
            lines += [f"#SBATCH --ntasks-per-node={count}"]
            if not layout.is_cpu:
                lines += [f"#SBATCH --gres=gpu:{count}"]
            if job.needs.cpus:
                lines += [f"#SBATCH --cpus-per-task={job.needs.cpus}"]
            components.append(lines)
        for at, lines in enumerate(components):
            head += (["#SBATCH hetjob"] if at else []) + lines
    launcher = "mpirun" if job.engine == "mpi" and not job.elastic else "horovodrun"
    words = _launch(plan, launcher, sizes)
    if launcher == "mpirun":  # by ssh: by srun it sees the first component alone
        words[1:1] = ["--mca", "plm", "rsh"]
    return "\n".join([*head, "set -euo pipefail", "", shlex.join(words), ""])


def _mpijob(plan: JobPlan, image: str | None) -> str:
    """Return a manifest of kubeflow.org/v2beta1: a pod a rank, on the plan's hosts.

    It has one number of slots and one template for all workers. So ranks cannot be told how many
    each host takes: that follows where they fill it.
    """
    job, layout = plan.job, plan.best.layout
    if not image:
        raise ArgumentError("--emit mpijob needs --image, the container that has the script")
    last = f"{job.name}-worker-{layout.world_size - 1}"  # the longest of its pods' names
    if not _POD.fullmatch(last):
        raise PlanError(
            f"job {job.name!r}: an MPIJob's pods would be called up to {last!r}, but their names "
            "must begin with a letter and have 63 letters at most (RFC 1035); rename the job"
        )
    free = [host.name for host, count in layout.hosts if sum(host.slots.values()) != count]
    if free and len(layout.hosts) > 1:
        raise PlanError(
            f"an MPIJob has one template for all workers, and cannot leave slots of {free} free: "
            "let those hosts have as many slots as the plan takes, or emit horovodrun or sbatch"
        )
    names = [host.name for host, _ in layout.hosts]
    on_hosts = {"key": "kubernetes.io/hostname", "operator": "In", "values": names}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [on_hosts]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    needs: dict[str, Any] = {} if layout.is_cpu else {"nvidia.com/gpu": 1}
    if job.needs.cpus:
        needs["cpu"] = job.needs.cpus
    if job.needs.memory_bytes:
        needs["memory"] = math.ceil(job.needs.memory_bytes)
    world_size = layout.world_size
    start = ["mpirun", "-np", str(world_size), "--bind-to", "none", "--map-by", "slot"]
    worker = {"name": "worker", "image": image, "resources": {"limits": needs}}
    launcher = {"name": "launcher", "image": image, "command": [*start, "-x", "PATH", *job.command]}
    manifest = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": job.name},
        "spec": {
            "slotsPerWorker": 1,
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "activeDeadlineSeconds": math.ceil(_MARGIN * plan.p95_s + _START_S),
            },
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "template": {"spec": {"containers": [launcher]}}},
                "Worker": {
                    "replicas": world_size,
                    "template": {"spec": {"affinity": affinity, "containers": [worker]}},
                },
            },
        },
    }
    return json.dumps(manifest, indent=1) + "\n"

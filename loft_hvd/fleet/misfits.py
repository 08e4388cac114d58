"""Why a job fits nowhere, had it all machines for itself, and what least change makes it fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from loft_hvd.errors import LoftError
from loft_hvd.fleet.demands import RESOURCES, Machines, TotalSeconds, demand_of
from loft_hvd.fleet.jobs import Job
from loft_hvd.fleet.timeline import Refusal

__all__ = ["misfit"]


def misfit(machines: Machines, job: Job, *, speed: TotalSeconds) -> Refusal:
    """Say why a job fits nowhere; each change is tried before it is told."""
    resource, text = _binding(machines, job)
    fits = _fitting(machines, job, speed)
    changes = [
        f"{key} = {shown}"
        for key, shown, found in _changes(machines, job, fits)
        if found is not None
    ]
    if changes:
        text = f"{text}; {' or '.join(changes)} would make it fit"
    elif resource != "models":
        text = (
            f"{text}; no single change of its workers, batch, needs, over or rule makes it fit, "
            f"`--job {job.name}` says more"
        )
    return Refusal(resource, why=f"it fits nowhere: {text}")


def _binding(machines: Machines, job: Job) -> tuple[str, str]:
    """Return what there is too little of, and how much there is."""
    known = np.array([device in job.models for _, device in machines.places])
    if not known.any():
        there = sorted({device for _, device in machines.places})
        return "models", f"it has models of {sorted(job.models)}, and hosts have {there}; add one"
    needs = (1.0, float(job.needs.cpus), job.needs.memory_bytes)
    rooms = {  # workers that each resource has room for, in all
        name: int((machines.capacity[known, at] // need).sum())
        for at, (name, need) in enumerate(zip(RESOURCES, needs, strict=True))
        if need > 0
    }
    # Of equals the slots.
    resource = min(rooms, key=lambda name: rooms[name])
    least = max(job.min_workers, job.parsed_rule.min_rows)
    if rooms[resource] >= least:
        most = sum(
            machines.capacity[at, 0] * (job.models[device].max_batch or job.global_batch_size)
            for at, (_, device) in enumerate(machines.places)
            if device in job.models
        )
        return (
            "slots",
            f"hosts have room for {rooms[resource]} of its workers and {most:.0f} samples; it has "
            f"{job.min_workers} to {job.max_workers}, of {job.min_batch} samples at least, rule "
            f"{job.rule!r} over {job.over!r} and global_batch_size={job.global_batch_size}",
        )
    each = "" if resource == "slots" else f" at {resource} of {needs[RESOURCES.index(resource)]:g}"
    return (
        resource,
        f"{resource} of hosts with models {sorted(job.models)} have room for {rooms[resource]} "
        f"workers{each}, and it needs {least}"
        + (f" for rule {job.rule!r}" if job.parsed_rule.min_rows > job.min_workers else "")
        + _unsaid(machines, job, resource),
    )


def _unsaid(machines: Machines, job: Job, resource: str) -> str:
    """Return which hosts with the job's models do not say how much they have; "" where all do."""
    hosts = {host.name: host for host, device in machines.places if device in job.models}
    silent = [name for name, host in hosts.items() if getattr(host, resource) is None]
    if not silent:
        return ""
    which = "hosts" if len(silent) == len(hosts) else f"{len(silent)} of {len(hosts)} hosts"
    return f"; {which} give no {resource}: add it to the cluster's file"


_Fits = Callable[..., bool]  # takes fields of the job


def _fitting(machines: Machines, job: Job, speed: TotalSeconds) -> _Fits:
    def fits(**fields: object) -> bool:
        try:
            demand_of(machines, replace(job, **fields), speed=speed)  # type: ignore[arg-type]  # fields of a job
        except LoftError:
            return False
        return True

    return fits


def _changes(machines: Machines, job: Job, fits: _Fits) -> Iterator[tuple[str, str, object]]:
    """Yield keys, values as the file has them, and whether each makes the job fit: else None."""
    needs = job.needs
    cpus = _last(range(needs.cpus), lambda value: fits(needs=replace(needs, cpus=int(value))))
    yield "needs.cpus", str(cpus), cpus
    memory = np.unique(
        [
            np.floor(bytes_ / count)
            for bytes_ in np.unique(machines.capacity[:, 2])
            for count in range(1, 33)
            if bytes_ / count < needs.memory_bytes
        ]
    ).tolist()
    held = _last(memory, lambda value: fits(needs=replace(needs, memory_bytes=value)))
    yield "needs.memory_bytes", f"{held:.0f}" if held is not None else "", held
    workers = _last(range(1, job.min_workers), lambda value: fits(min_workers=value))
    yield "min_workers", str(workers), workers
    slots = sum(  # there are; of larger numbers of workers the smallest that fits
        int(machines.capacity[at, 0])
        for at, (_, device) in enumerate(machines.places)
        if device in job.models
    )
    more = _last(range(slots, job.max_workers, -1), lambda value: fits(max_workers=value))
    yield "max_workers", str(more), more
    batch = _last(range(1, job.min_batch), lambda value: fits(min_batch=value))
    yield "min_batch", str(batch), batch
    larger = job.min_batch * max(job.min_workers, job.parsed_rule.min_rows)
    smaller = _last(
        range(larger, job.global_batch_size), lambda value: fits(global_batch_size=value)
    )
    yield "global_batch_size", str(smaller), smaller
    if job.global_batch_size < larger:
        found = larger if fits(global_batch_size=larger) else None
        yield "global_batch_size", str(larger), found
    if job.over == "nodes":
        yield "over", '"ranks"', True if fits(over="ranks") else None
    for f in range(int((re.findall(r"\bf=(\d+)", job.rule) or ["0"])[0]) - 1, -1, -1):
        rule = re.sub(r"\bf=\d+", f"f={f}", job.rule)
        if fits(rule=rule):
            yield "rule", f'"{rule}"', f
            return


def _last(values: Sequence[float], fits: Callable[[float], bool]) -> float | None:
    """Return the last value that fits, where those before it fit no less; None where none does."""
    if not values or not fits(values[0]):
        return None
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(values[middle]) else (low, middle)
    return values[low]

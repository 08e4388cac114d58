"""Clusters on one machine: hosts with a part of a core and a link each, and jobs on them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.testbed.contest import GLOBAL_BATCH, Contest, Contestant
from benchmarks.testbed.shares import RECORD_BYTES
from tests.testbed.hosts import Testbed

__all__ = ["Cluster", "Job", "run_job", "unequal", "wait_for_epochs"]

# Two fast computers whose data lie on two slow ones. Together three quarters of two cores: what is
# left are the kernel's work on the links, and this machine's other processes.
_CPUS = (0.5, 0.5, 0.25, 0.25)
_SHARES = (0.02, 0.02, 0.48, 0.48)
FAST = 1e9  # bits a second
# So that glibc keeps the memory of a step for the next one. Where it gives pages back, clearing new
# ones takes up to a third of computing, for one batch size and not for another.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
}


@dataclass(frozen=True)
class Cluster:
    """Hosts and their links."""

    cpus: tuple[float, ...]  # cores' worth of time that each host gets
    bits_per_s: tuple[float, ...]  # of each host's link, either way
    shares: tuple[float, ...]  # of all samples that each host has

    def up(self, testbed: Testbed, *more: str) -> None:
        """Make the hosts, with ``more`` options of ``testbed up``."""
        cpus = ",".join(f"{each:g}" for each in self.cpus)
        rates = ",".join(f"{each:.0f}" for each in self.bits_per_s)
        testbed.up(len(self.cpus), "--cpu", cpus, "--fit", "--rate", rates, *more)


@dataclass(frozen=True)
class Job:
    """What is run on the hosts: ``python -m benchmarks.testbed.MODULE``."""

    contest: Contest
    module: str = "contest"
    options: Sequence[str] = ()  # of ``testbed run``
    env: Mapping[str, str] | None = None
    during: Callable[[Path], None] | None = None  # called with its folder once it has started
    timeout_s: float = 900.0


def run_job(testbed: Testbed, job: Job) -> Any:
    """Run a job on hosts that are up, and return its result; a RuntimeError where it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder, during = Path(name), job.during
        job.contest.save(folder)
        done = testbed.run(
            ["-m", f"benchmarks.testbed.{job.module}", name],
            timeout_s=job.timeout_s,
            env={**_KEEP_MEMORY, **(job.env or {})},
            options=job.options,
            during=None if during is None else lambda: during(folder),
        )
        if done.returncode != 0:
            ended = f"ended with {done.returncode}"
            if done.returncode is None:
                ended = f"has not ended within {job.timeout_s:g} s"
            raise RuntimeError(f"{job.module} {ended}:\n{done.output[-6000:]}")
        return json.loads((folder / "result.json").read_text())


def wait_for_epochs(folder: Path, num_epochs: int, *, timeout_s: float = 300.0) -> None:
    """Wait until a job has trained so many epochs."""
    told, until = folder / "epochs_done", time.monotonic() + timeout_s
    while not told.exists() or int(told.read_text()) < num_epochs:
        if time.monotonic() > until:
            raise TimeoutError(f"epoch {num_epochs} is not over within {timeout_s:g} s")
        time.sleep(0.1)


def unequal(testbed: Testbed, ratio: float) -> Cluster:
    """Make hosts whose worst fetch takes ``ratio`` times as long as their worst computing.

    That is at sizes in proportion to CPUs, as LB-BSP chooses them: then computing takes all hosts
    the same time, and the fast ones fetch most of their samples over slow links. How slow these
    have to be follows from an epoch at these sizes over fast links, which is trained first.
    """
    shares = np.array(_CPUS) / sum(_CPUS)
    sizes = (GLOBAL_BATCH * shares).astype(int).tolist()
    fast = Cluster(_CPUS, (FAST,) * 4, _SHARES)
    fast.up(testbed)
    contest = Contest([Contestant("at the sizes of LB-BSP", sizes)], list(_SHARES), epochs=2)
    last = run_job(testbed, Job(contest))["contestants"][0]["epochs"][-1]
    num_bits = 8 * RECORD_BYTES * (sizes[0] - last["local"][0])
    fetch_s = ratio * max(last["compute_s"]) - max(last["fetch_s"]) + num_bits / FAST
    if fetch_s <= num_bits / FAST:
        raise RuntimeError(
            f"fetching takes {max(last['fetch_s']) / max(last['compute_s']):.2g} times as long as "
            f"computing over the fastest links already; ask for a larger --ratio than {ratio:g}"
        )
    slow = num_bits / fetch_s
    cluster = Cluster(_CPUS, (slow, slow, FAST, FAST), _SHARES)
    cluster.up(testbed)
    return cluster

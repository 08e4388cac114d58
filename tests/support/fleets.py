"""Random clusters and jobs, as plans meet them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from loft_hvd.fleet.jobs import DataSet, DeviceModel, Fleet, Host, Job, Rack
from loft_hvd.fleet.traffic import HostRanks, Layout

DEVICES = ("A100", "T4", "CPU EPYC")


def random_models(rng: np.random.Generator, *, slowest: float) -> dict[str, DeviceModel]:
    """Return models of three devices, between 0.2 ms and ``slowest`` seconds a sample."""
    return {
        device: DeviceModel(
            float(np.exp(rng.uniform(np.log(2e-4), np.log(slowest)))),
            compute_fixed_s=float(rng.uniform(0, 5e-3)),
            knee=float(rng.choice([0, 8])),
            fetch_fixed_s=float(rng.uniform(0, 1e-3)),
            local_s=float(rng.uniform(0, 5e-4)),
            noise=float(rng.uniform(0.02, 0.1)),
            overlap=float(rng.integers(2)),
        )
        for device in DEVICES
    }


def random_data(
    rng: np.random.Generator, hosts: list[Host]
) -> tuple[list[DataSet], dict[str, Any]]:
    """Return data on none, half or all of some hosts' disks, and a job's key; at times none."""
    if rng.random() < 0.3:
        return [], {}
    data = DataSet("d", 100_000, float(10 ** rng.uniform(3.5, 5.0)))
    held = rng.dirichlet(np.ones(len(hosts))) * rng.choice([0.0, 0.5, 1.0]) * data.num_bytes
    homes = {host.name: float(each) for host, each in zip(hosts, held, strict=True) if each > 0}
    rate = None if rng.random() < 0.5 else 2.5e9
    return [replace(data, homes=homes, source_bytes_per_s=rate)], {"data": "d"}


def random_fleet(seed: int) -> tuple[Fleet, Job]:
    """Return 3 to 10 hosts in up to 3 racks, and a job that may take any of them."""
    rng = np.random.default_rng(seed)
    count, num_racks = int(rng.integers(3, 11)), int(rng.integers(1, 4))
    racks = [Rack(f"r{at}", float(rng.choice([125e6, 1.25e9, 5e9]))) for at in range(num_racks)]
    hosts = [
        Host(
            f"h{at}",
            {str(rng.choice(DEVICES)): int(rng.choice([1, 2, 4, 8]))},
            float(rng.choice([12.5e6, 62.5e6, 125e6, 312e6, 1.25e9])),
            rack=f"r{rng.integers(num_racks)}",
        )
        for at in range(count)
    ]
    data, more = random_data(rng, hosts)
    job = Job(
        "job",
        ["python", "train.py"],
        float(10 ** rng.uniform(5, 8.5)),
        int(rng.choice([256, 1024, 4096])),
        random_models(rng, slowest=2e-2),
        steps=100,
        rule=str(rng.choice(["mean", "trimmed_mean:f=1"])),
        over=str(rng.choice(["ranks", "auto"])),
        **more,
    )
    return Fleet(hosts, racks, data, latency_s=float(rng.choice([0.0, 1e-4]))), job


def random_layout(seed: int) -> tuple[Fleet, Job, Layout]:
    """Return a job on 4 to 128 ranks, with noise of 2 to 10 %."""
    rng = np.random.default_rng(seed)
    left = world_size = int(np.exp(rng.uniform(np.log(4), np.log(128.9))))
    parts: list[HostRanks] = []
    while left:
        count, device = int(min(left, rng.choice([1, 2, 4, 8]))), str(rng.choice(DEVICES))
        rate = float(rng.choice([125e6, 312e6, 1.25e9]))
        parts.append(HostRanks(Host(f"h{len(parts):03d}", {device: 8}, rate), device, count))
        left -= count
    hosts = [part.host for part in parts]
    data, more = random_data(rng, hosts)
    job = Job(
        "job",
        ["python", "train.py"],
        float(10 ** rng.uniform(5, 8)),
        int(world_size * rng.integers(8, 64)),
        random_models(rng, slowest=5e-3),
        steps=100,
        **more,
    )
    return Fleet(hosts, [], data), job, Layout.of(parts)


def many_hosts(seed: int) -> tuple[Fleet, Job]:
    """Return 100 hosts of eight ranks in five racks, no two alike, and a job."""
    rng = np.random.default_rng(seed)
    racks = [Rack(f"r{at}", float(rng.choice([1.25e9, 5e9, 12.5e9]))) for at in range(5)]
    hosts = [
        Host(
            f"h{at:03d}",
            {str(rng.choice(DEVICES)): 8},
            float(rng.choice([125e6, 312e6, 1.25e9, 3e9]) * rng.uniform(0.9, 1.1)),
            rack=f"r{rng.integers(5)}",
        )
        for at in range(100)
    ]
    data, more = random_data(rng, hosts)
    job = Job(
        "job",
        ["python", "train.py"],
        float(10 ** rng.uniform(5, 8.5)),
        int(rng.choice([4096, 16384])),
        random_models(rng, slowest=2e-2),
        steps=100,
        rule=str(rng.choice(["mean", "trimmed_mean:f=1"])),
        **more,
    )
    return Fleet(hosts, racks, data, latency_s=1e-5), job

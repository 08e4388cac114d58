"""The hosts chosen are the best, or nearly; what each is worth is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loft_hvd.errors import PlanError
from loft_hvd.fleet.jobs import DataSet, DeviceModel, Fleet, Host, Job, Rack, WorkerNeeds
from loft_hvd.fleet.place import choose_hosts
from loft_hvd.fleet.rate import predict, rough_s
from loft_hvd.fleet.traffic import HostRanks, Layout
from tests.support.fleets import random_fleet


def names(fleet: Fleet, job: Job) -> list[str]:
    return [host.name for host, _ in choose_hosts(fleet, job).best.layout.hosts]


def best_of_all(fleet: Fleet, job: Job) -> float:
    """Return the shortest time on any set of hosts, all of whose slots are taken."""
    overs = ["ranks"] if job.over == "ranks" or job.is_mean else ["ranks", "nodes"]
    found = []
    for pick in range(1, 2 ** len(fleet.hosts)):
        hosts = [host for at, host in enumerate(fleet.hosts) if pick >> at & 1]
        for over in overs:
            slots = [next(iter(host.slots.items())) for host in hosts]
            least = min(count for _, count in slots)
            layout = Layout.of(
                [
                    HostRanks(host, device, count if over == "ranks" else least)
                    for host, (device, count) in zip(hosts, slots, strict=True)
                ],
                over=over,
            )
            if layout.num_workers(job) >= job.parsed_rule.min_rows:
                found.append((rough_s(fleet, job, layout), layout))
    nearest = sorted((each for each in found if each[0] < np.inf), key=lambda each: each[0])[:10]
    return min(predict(fleet, job, layout).total_s for _, layout in nearest)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(each, marks=pytest.mark.whole) for each in range(10, 500, 10))]
)
def test_chosen_hosts_are_as_good_as_the_best_of_all_sets(first: int) -> None:
    ratios = []
    for seed in range(first, first + 10):
        fleet, job = random_fleet(seed)
        ratios.append(choose_hosts(fleet, job).best.total_s / best_of_all(fleet, job))
    assert max(ratios) <= 1.05, f"seeds from {first}: {ratios}"
    assert np.mean(np.array(ratios) <= 1.01) >= 0.9


# Two racks of two hosts: what wins depends on links and data.


def two_racks(uplink: float = 1.25e9, thin: float = 1.25e9, **homes: float) -> Fleet:
    def host(name: str, rate: float) -> Host:
        return Host(name, {"T4": 2}, rate, rack=name[0])

    return Fleet(
        [host("a1", 1.25e9), host("a2", 1.25e9), host("b1", 1.25e9), host("b2", thin)],
        [Rack("a", uplink), Rack("b", uplink)],
        [DataSet("photos", 100_000, 1e5, homes)],
    )


JOB = Job(
    "job", ["python"], 40e6, 512, {"T4": DeviceModel(2e-3, overlap=1.0)}, steps=100, data="photos"
)


def test_a_job_is_packed_into_a_rack_with_a_thin_uplink() -> None:
    everywhere = dict.fromkeys(("a1", "a2", "b1", "b2"), 10e9)
    assert len(names(two_racks(**everywhere), JOB)) == 4
    assert names(two_racks(uplink=10e6, **everywhere), JOB) == ["a1", "a2"]


def test_a_job_goes_where_its_data_is() -> None:
    assert names(two_racks(uplink=10e6, b1=5e9, b2=5e9), JOB) == ["b1", "b2"]
    assert names(two_racks(uplink=10e6, a1=5e9, a2=5e9), JOB) == ["a1", "a2"]


def test_a_thin_link_is_dropped_where_it_costs_more_than_its_host_gives() -> None:
    everywhere = dict.fromkeys(("a1", "a2", "b1", "b2"), 10e9)
    choice = choose_hosts(two_racks(thin=12.5e6, **everywhere), JOB)
    assert [host.name for host, _ in choice.best.layout.hosts] == ["a1", "a2", "b1"]
    (worth,) = [each for each in choice.worths if each.name == "b2"]
    assert not worth.is_taken
    assert worth.change > 1.0
    assert worth.why == "its 100 Mb/s link carries the gradients"
    (taken,) = [each for each in choice.worths if each.name == "b1"]
    assert taken.change > 0.2
    assert "33% of the samples" in taken.why
    # Slower devices: what the host computes outweighs its link.
    slow = replace(JOB, models={"T4": DeviceModel(1.0, overlap=1.0)})
    assert len(names(two_racks(thin=12.5e6, **everywhere), slow)) == 4


def test_twice_the_rate_is_worth_something_on_the_busiest_link_alone() -> None:
    everywhere = dict.fromkeys(("a1", "a2", "b1", "b2"), 10e9)
    job = replace(JOB, model_bytes=100e6, models={"T4": DeviceModel(20e-3, overlap=1.0)})
    choice = choose_hosts(two_racks(thin=0.4e9, **everywhere), job)
    doubled = {each.name: each.doubled for each in choice.worths}
    assert doubled["b2"] > 0.05
    assert doubled["a1"] == doubled["a2"] == doubled["b1"] == 0.0


def test_a_link_that_warm_steps_wait_for_is_worth_something_beside_a_slow_source() -> None:
    hosts = [
        Host("h0", {"T4": 1}, 50e6, store_bytes=10e9),
        Host("h1", {"T4": 4}, 100e6, store_bytes=3e9),
    ]
    fleet = Fleet(hosts, data=[DataSet("photos", 100_000, 1e5, source_bytes_per_s=10e6)])
    job = replace(JOB, model_bytes=4.0, store=True, steps=None, epochs=100, min_workers=5)
    doubled = {each.name: each.doubled for each in choose_hosts(fleet, job).worths}
    assert doubled["h1"] > 0.05


def test_the_best_arrangement_is_found() -> None:
    hosts = [Host(f"h{at}", {"CPU": 8}, 125e6) for at in range(4)]
    job = replace(JOB, data=None, rule="median", models={"CPU": DeviceModel(5e-3)}, over="auto")
    assert choose_hosts(Fleet(hosts), job).best.layout.over == "nodes"
    with pytest.raises(PlanError, match="fits nowhere"):
        choose_hosts(Fleet(hosts[:2]), replace(job, rule="trimmed_mean:f=1", over="nodes"))


def test_limits_of_workers_and_needs_hold() -> None:
    hosts = [Host(f"h{at}", {"T4": 8}, 1.25e9, cpus=8, memory_bytes=64e9) for at in range(4)]
    job = replace(JOB, data=None, max_workers=5, model_bytes=4.0)
    assert choose_hosts(Fleet(hosts), job).best.layout.world_size == 5
    job = replace(job, max_workers=32, needs=WorkerNeeds(cpus=2, memory_bytes=20e9))
    found = choose_hosts(Fleet(hosts), job).best.layout
    assert [count for _, count in found.hosts] == [3, 3, 3, 3]  # 64 GB hold three of 20


def test_a_job_that_fits_nowhere_says_why() -> None:
    hosts = [Host("a", {"T4": 2}, 1e9, cpus=4), Host("b", {"V100": 2}, 1e9)]
    job = replace(JOB, data=None, needs=WorkerNeeds(cpus=8))
    with pytest.raises(PlanError, match=r"fits nowhere.*a: cpus=4 of 8 a worker; b: no model of"):
        choose_hosts(Fleet(hosts), job)
    with pytest.raises(PlanError, match="hosts take 2 of its ranks and 20 samples"):
        choose_hosts(
            Fleet(hosts), replace(JOB, models={"T4": DeviceModel(1.0, max_batch=10)}, data=None)
        )


def test_the_same_question_has_the_same_answer() -> None:
    fleet, job = random_fleet(7)
    assert choose_hosts(fleet, job) == choose_hosts(fleet, job)


def test_the_order_of_hosts_changes_no_time() -> None:
    for seed in range(5):
        fleet, job = random_fleet(seed)
        turned = replace(fleet, hosts=fleet.hosts[::-1])
        before, after = (choose_hosts(each, job).best for each in (fleet, turned))
        assert after.total_s == pytest.approx(before.total_s, rel=0.01), f"seed {seed}"

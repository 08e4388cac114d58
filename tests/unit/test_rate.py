"""A predicted step is what its formulas say, and what the simulator takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from loft_hvd.balance.latency import typical_longest
from loft_hvd.errors import PlanError
from loft_hvd.fleet.jobs import DataSet, DeviceModel, Fleet, Host, Job, Rack
from loft_hvd.fleet.rate import predict, reads_of, rough_s
from loft_hvd.fleet.traffic import HostRanks, Layout, Traffic, exchange

FRAMES = 1514 / 1448
JOB = Job("job", ["python", "train.py"], 40e6, 64, {"CPU": DeviceModel(1e-3)}, steps=1000)
RULE = replace(JOB, rule="trimmed_mean:f=1")


def hosts(*ranks: int, rate: float = 1e9, device: str = "CPU", **traits: Any) -> list[HostRanks]:
    return [
        HostRanks(Host(f"h{at}", {device: count}, rate, **traits), device, count)
        for at, count in enumerate(ranks)
    ]


def sent(job: Job, parts: list[HostRanks], over: str = "ranks", **traits: Any) -> Traffic:
    fleet = Fleet([part.host for part in parts], **traits)
    return exchange(fleet, job, Layout.of(parts, over=over))


# Bytes out of a host, and seconds: 40 MB of values, links of 1 GB/s, worked out by hand; frames
# carry 1448 bytes of values in 1514.


def test_engines_ring_sends_twice_all_but_one_nth() -> None:
    found = sent(JOB, hosts(2, 2))
    assert found.host_bytes == pytest.approx([60e6 * FRAMES] * 2, rel=1e-9)  # 2 * 3/4 * 40 MB
    assert found.seconds == pytest.approx(0.060 * FRAMES, rel=1e-9)
    assert (found.way, found.link) == ("engine's ring", "h0")


def test_a_rule_on_the_mesh_sends_rows_and_results_to_each_rank() -> None:
    found = sent(RULE, hosts(3, 1))
    # Host 0: 3 senders, 1 receiver of a quarter: 30 MB of rows, and as much of results.
    assert found.host_bytes == pytest.approx([60e6 * FRAMES] * 2, rel=1e-9)
    found = sent(RULE, hosts(4, 4))
    assert found.host_bytes == pytest.approx([160e6 * FRAMES] * 2, rel=1e-9)  # 2 * 4 * 4/8 * 40 MB
    assert found.way == "shard owners, on the mesh"


@pytest.mark.parametrize("change", [{"engine": "mpi"}, {"elastic": True}])
def test_without_a_mesh_results_travel_on_the_engines_ring(change: dict[str, Any]) -> None:
    found = sent(replace(RULE, **change), hosts(4, 4))
    assert found.host_bytes == pytest.approx([(2.0 + 7 / 8) * 40e6 * FRAMES] * 2, rel=1e-9)


def test_a_gpus_values_take_no_mesh() -> None:
    found = sent(replace(RULE, models={"A100": DeviceModel(1e-3)}), hosts(4, 4, device="A100"))
    assert found.host_bytes == pytest.approx([(2.0 + 7 / 8) * 40e6 * FRAMES] * 2, rel=1e-9)


def test_two_levels_send_a_row_a_host() -> None:
    found = sent(RULE, hosts(4, 4, 4), over="nodes")
    assert found.host_bytes == pytest.approx([2 * 2 / 3 * 40e6 * FRAMES] * 3, rel=1e-9)
    assert found.way == "two levels, on the mesh"
    inside = sent(RULE, hosts(4, 4, 4, internal_bytes_per_s=2e9), over="nodes")
    # Inside a host first and last: 2 * 3/4 * 40 MB of each rank, at 2 GB/s.
    assert inside.seconds - found.seconds == pytest.approx(0.030, rel=1e-9)


def test_one_host_shares_memory() -> None:
    assert sent(RULE, hosts(4)).host_bytes == (0.0,)
    assert sent(RULE, hosts(4)).seconds == pytest.approx(0.0, abs=1e-12)
    found = sent(RULE, hosts(4, internal_bytes_per_s=1e9))
    assert found.seconds == pytest.approx(0.060, rel=1e-9)
    assert sent(RULE, hosts(1)).seconds == 0.0


@pytest.mark.parametrize(
    ("compression", "width", "shorter"), [("none", 4, 0.86), ("bf16", 2, 0.71), ("fp16", 2, 0.88)]
)
def test_floats_travel_compact_on_slow_links(compression: str, width: int, shorter: float) -> None:
    job = replace(RULE, compression=compression)
    fast = sent(job, hosts(1, 1, 1, 1, rate=150.001e6))
    slow = sent(job, hosts(1, 1, 1, 1, rate=149.999e6))
    plain = 2 * 3 / 4 * 10e6 * width * FRAMES
    assert fast.host_bytes == pytest.approx([plain] * 4, rel=1e-9)
    assert slow.host_bytes == pytest.approx([plain * shorter] * 4, rel=1e-9)
    assert (fast.is_compact, slow.is_compact) == (False, True)


def test_the_slowest_rank_decides_whether_floats_travel_compact() -> None:
    # Of 8 ranks on 2 hosts 4 send 4/7 of their bytes over one link: 16/7 of a rank's.
    assert sent(RULE, hosts(4, 4, rate=150e6 * 16 / 7 - 1)).is_compact
    assert not sent(RULE, hosts(4, 4, rate=150e6 * 16 / 7 + 1)).is_compact


def test_little_floats_and_sums_do_not_travel_compact() -> None:
    assert not sent(replace(RULE, model_bytes=1.2e6), hosts(1, 1, 1, 1, rate=1e6)).is_compact
    assert sent(replace(RULE, model_bytes=1.5e6), hosts(1, 1, 1, 1, rate=1e6)).is_compact
    assert not sent(JOB, hosts(1, 1, 1, 1, rate=1e6)).is_compact


def test_tables_of_the_whole_model_and_of_audits_come_on_top() -> None:
    job = replace(RULE, rule="robust:f=1")
    plain = sent(job, hosts(2, 2))
    model = sent(replace(job, scope="model", hidden_share=1.0), hosts(2, 2))
    assert model.host_bytes[0] - plain.host_bytes[0] == pytest.approx(4 * 4 * 5 * 2 * 2 * FRAMES)
    # Half of the bytes go after the last bucket, where nothing hides them.
    assert model.exposed_s == pytest.approx(0.5 * model.seconds, rel=1e-9)
    audited = sent(replace(job, audit=0.5), hosts(2, 2))
    rows = plain.host_bytes[0] * 0.5 / (32 * 4)
    tables = 0.5 * 64 * 4 * 5 * 2 * 2 * 2 * FRAMES  # of two buckets
    assert audited.host_bytes[0] - plain.host_bytes[0] == pytest.approx(rows + tables, rel=1e-9)


def test_a_rack_s_link_carries_what_leaves_all_its_hosts() -> None:
    parts = [
        HostRanks(Host(f"h{at}", {"CPU": 1}, 1e9, rack="left" if at < 2 else "right"), "CPU", 1)
        for at in range(4)
    ]
    racks = [Rack("left", 1e9), Rack("right", 0.5e9)]
    found = sent(RULE, parts, racks=racks)
    # 2 of 4 senders: 2 * 2 * 2/4 * 40 MB at 0.5 GB/s.
    assert found.seconds == pytest.approx(0.160 * FRAMES, rel=1e-9)
    assert found.link == "rack right"
    assert sent(JOB, parts, racks=racks).seconds == pytest.approx(0.120 * FRAMES, rel=1e-9)


def test_each_round_of_messages_adds_the_latency() -> None:
    for job, over, rounds in ((RULE, "ranks", 2), (JOB, "ranks", 2 * 3 * 2), (RULE, "nodes", 8)):
        parts = hosts(2, 2)
        added = sent(job, parts, over, latency_s=1e-3).seconds - sent(job, parts, over).seconds
        assert added == pytest.approx(rounds * 1e-3, rel=1e-9)


def test_what_backward_passes_hide_is_no_part_of_a_step() -> None:
    found = sent(replace(RULE, hidden_share=0.25), hosts(1, 1))
    assert found.exposed_s == pytest.approx(0.75 * found.seconds, rel=1e-9)


@pytest.mark.parametrize("job", [JOB, RULE, replace(RULE, engine="mpi")])
@pytest.mark.parametrize("over", ["ranks", "nodes"])
def test_no_step_is_longer_on_faster_links(job: Job, over: str) -> None:
    rates = [1e6 * 1.3**at for at in range(40)]
    times = [sent(job, hosts(2, 2, 2, rate=rate), over).seconds for rate in rates]
    # But where floats cease to travel compact, by as much as that had won.
    assert all(after <= before / 0.86 for before, after in pairwise(times))
    plain = [t for t, r in zip(times, rates, strict=True) if r > 400e6]
    assert plain == sorted(plain, reverse=True)


# The ranks' own work.


def fleet_of(parts: list[HostRanks], **traits: Any) -> Fleet:
    return Fleet([part.host for part in parts], **traits)


def test_sizes_even_out_times_and_the_exchange_follows() -> None:
    parts = [*hosts(1), HostRanks(Host("slow", {"T4": 1}, 1e9), "T4", 1)]
    job = replace(JOB, models={"CPU": DeviceModel(1e-3), "T4": DeviceModel(3e-3)})
    found = predict(fleet_of(parts), job, Layout.of(parts))
    assert found.sizes == (48, 16)
    assert found.step_s == pytest.approx(0.048 + 0.040 * FRAMES, rel=1e-9)
    assert found.total_s == pytest.approx(1000 * found.step_s)


def test_the_usual_longest_counts_not_the_longest_mean() -> None:
    parts = hosts(*[1] * 16)
    job = replace(JOB, global_batch_size=160, models={"CPU": DeviceModel(1e-3, noise=0.1)})
    found = predict(fleet_of(parts), job, Layout.of(parts))
    drawn = np.random.default_rng(0).normal(1.0, 0.1, (40_000, 16)).max(axis=1)
    assert found.longest_s == pytest.approx(0.010 * drawn.mean(), rel=0.01)
    assert typical_longest(np.ones(16), 0.1 * np.ones(16), 0.0)[0] > 1.1


def test_samples_elsewhere_come_over_the_hosts_link() -> None:
    # Ranks 0 and 1 share a host that holds half of the data, over a link of 10 MB/s.
    parts = hosts(2, 1, rate=10e6)
    data = DataSet("d", 640, 1e5, {"h0": 32e6})
    job = replace(JOB, data="d", rule="mean", models={"CPU": DeviceModel(0.0, local_s=1e-3)})
    found = predict(fleet_of(parts, data=[data]), job, Layout.of(parts))
    # h0: 16 samples a rank are at hand; of others each takes 1e5 B * 2 / 10e6 B/s = 20 ms.
    # h1: none is at hand, and each takes 10 ms. 64 samples: h1 has 22 and h0 21 and 21.
    sizes = np.array(found.sizes)
    assert sizes.sum() == 64
    times = [16e-3 + 20e-3 * (sizes[0] - 16), 16e-3 + 20e-3 * (sizes[1] - 16), 10e-3 * sizes[2]]
    assert found.fetch_s == pytest.approx(times, rel=1e-9)
    assert max(times) - min(times) < 25e-3


def test_a_server_s_queue_holds_all_ranks() -> None:
    parts = hosts(1, 1, 1, 1, rate=1e9)
    data = DataSet("d", 640, 1e5, source_bytes_per_s=10e6)
    found = predict(fleet_of(parts, data=[data]), replace(JOB, data="d"), Layout.of(parts))
    assert found.fetch_s == pytest.approx([64 * 1e5 / 10e6] * 4, rel=1e-9)
    rough = rough_s(fleet_of(parts, data=[data]), replace(JOB, data="d"), Layout.of(parts))
    assert rough == pytest.approx(found.step_s, rel=1e-6)


def test_who_holds_more_than_it_computes_serves_the_rest_over_its_link() -> None:
    """Two of three equal hosts read from the third, which has a whole copy and a thin link."""
    parts = hosts(1, 1, 1, rate=1e9)
    thin = replace(parts[0], host=replace(parts[0].host, link_bytes_per_s=1e7))
    data = DataSet("d", 640, 1e5, {"h0": 64e6})
    layout = Layout.of([thin, *parts[1:]])
    fleet, job = fleet_of([thin, *parts[1:]], data=[data]), replace(JOB, data="d")
    reads = reads_of(fleet, job, layout)
    assert (reads.server, reads.bytes_per_s, reads.is_at_server) == ("host h0", 1e7, True)
    # A host that is not taken serves all of it, a part that is there a third less.
    assert reads_of(fleet, job, Layout.of(parts[1:])).bytes_per_s == 1e7
    half = replace(data, homes={"h0": 32e6, "h1": 32e6})
    # h0 has a sixth more than its third, and so has h1, for h2: each serves half of what it lacks.
    assert reads_of(
        fleet_of([thin, *parts[1:]], data=[half]), job, layout
    ).bytes_per_s == pytest.approx(2e7)


def test_a_rack_s_link_carries_samples_to_hosts_beyond() -> None:
    parts = [
        HostRanks(Host(f"h{at}", {"CPU": 1}, 1e9, rack="left" if at < 2 else "right"), "CPU", 1)
        for at in range(4)
    ]
    racks, data = [Rack("left", 1e7), Rack("right", 1e9)], DataSet("d", 640, 1e5, {"h0": 64e6})
    fleet = Fleet([part.host for part in parts], racks, [data])
    reads = reads_of(fleet, replace(JOB, data="d"), Layout.of(parts))
    # Of three hosts that read two are beyond the rack: 2/3 of the samples cross its link.
    assert reads.server == "rack left"
    assert reads.bytes_per_s == pytest.approx(1.5e7)


def test_a_whole_copy_needs_no_link() -> None:
    parts = hosts(1, 1, rate=1e6)
    data = DataSet("d", 640, 1e5, {"h0": 64e6, "h1": 64e6})
    job = replace(JOB, data="d", model_bytes=4.0)
    found = predict(fleet_of(parts, data=[data]), job, Layout.of(parts))
    assert found.fetch_s == (0.0, 0.0)


def test_a_store_s_later_epochs_are_shorter() -> None:
    parts = hosts(1, 1, rate=10e6, store_bytes=64e6)
    data = DataSet("d", 640, 1e5)
    job = replace(JOB, data="d", store=True, steps=None, epochs=3, model_bytes=4.0)
    found = predict(fleet_of(parts, data=[data]), job, Layout.of(parts))
    assert found.first_epoch_step_s == pytest.approx(32 * (10e-3 + 1e-3) + 4 * FRAMES / 1e7)
    assert found.step_s == pytest.approx(32e-3 + 4 * FRAMES / 1e7)
    assert found.total_s == pytest.approx(10 * found.first_epoch_step_s + 20 * found.step_s)


def test_rough_times_are_near_exact_ones() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        parts = [
            HostRanks(
                Host(f"h{at}", {f"CPU {at}": 4}, float(rng.uniform(1e7, 1e9))),
                f"CPU {at}",
                int(rng.integers(1, 5)),
            )
            for at in range(int(rng.integers(1, 6)))
        ]
        models = {
            part.device: DeviceModel(float(rng.uniform(1e-3, 1e-2)), noise=0.05, local_s=1e-4)
            for part in parts
        }
        data = DataSet("d", 10_000, 1e4, {parts[0].host.name: 5e7})
        job = replace(JOB, models=models, data="d", global_batch_size=512)
        layout, fleet = Layout.of(parts), fleet_of(parts, data=[data])
        assert rough_s(fleet, job, layout) == pytest.approx(
            predict(fleet, job, layout).step_s, rel=0.05
        )


def test_too_few_workers_and_unequal_hosts_are_refused() -> None:
    parts = hosts(1, 1)
    with pytest.raises(PlanError, match="rule 'trimmed_mean:f=1' needs 3 workers, but there are 2"):
        predict(fleet_of(parts), RULE, Layout.of(parts))
    parts = hosts(2, 1, 1)
    with pytest.raises(PlanError, match=r"as many ranks on each host, not \[1, 2\]"):
        predict(fleet_of(parts), RULE, Layout.of(parts, over="nodes"))
    with pytest.raises(PlanError, match="has no model of a 'CPU'"):
        predict(fleet_of(parts), replace(RULE, models={}), Layout.of(parts))

"""Many jobs: never over capacity, gangs whole, coverage exact; refusals say what would do."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loft_hvd.errors import ArgumentError, DataError
from loft_hvd.fleet.bounds import fluid_bound, gang_optimum
from loft_hvd.fleet.demands import SPEEDS, Machines, demand_of, ours_s
from loft_hvd.fleet.elastic import admit_schedule
from loft_hvd.fleet.jobs import (
    DataSet,
    DeviceModel,
    Fleet,
    Host,
    Job,
    JobList,
    WorkerNeeds,
)
from loft_hvd.fleet.many import (
    ManyOptions,
    describe_many,
    many_table,
    many_to_dict,
    plan_many,
    read_prices,
)
from loft_hvd.fleet.now import NowState, RunningJob, read_now
from loft_hvd.fleet.policies import POLICIES, Options, plan_all
from loft_hvd.fleet.prices import Market, PriceRange, admit, price_range
from loft_hvd.fleet.refusals import changed
from loft_hvd.fleet.timeline import (
    Demand,
    Ints,
    PlannedJob,
    Stretch,
    Timeline,
    Value,
    Workload,
    in_order,
)
from loft_hvd.fleet.traffic import HostRanks, Layout
from tests.support.demands import (
    check_outcomes,
    confirmed_workload,
    elastic_workload,
    random_workload,
)
from tests.support.schema import faults, read_schema

SCHEMA = read_schema(Path(__file__).parents[2] / "docs/schemas/jobs.json")
_WHOLE = 100_000  # random workloads
_GANGS = ("price", "fifo", "oasis")


def _check_policy(policy: str, workload: Workload, seed: int) -> None:
    options = Options(explains=False)
    outcomes = plan_all(policy, workload, options)
    prices = price_range(workload) if policy in ("price", "oasis") else None
    check_outcomes(workload, outcomes, gangs=policy in _GANGS, prices=prices)
    again = plan_all(policy, workload, options)
    assert [each.end for each in outcomes] == [each.end for each in again], f"seed {seed}"


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(15))
def test_policies_keep_to_capacity_gangs_and_work(policy: str, seed: int) -> None:
    _check_policy(policy, random_workload(seed), seed)


def test_a_job_whose_servers_cost_more_than_was_thought_is_not_admitted_at_a_loss() -> None:
    _check_policy("oasis", random_workload(20_106), 20_106)


@pytest.mark.parametrize("policy", _GANGS)
@pytest.mark.parametrize("seed", range(15))
def test_jobs_that_take_longer_than_was_thought_keep_to_it_and_pay(policy: str, seed: int) -> None:
    _check_policy(policy, confirmed_workload(seed), seed)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(6))
def test_jobs_that_change_their_machines_keep_to_capacity_and_lose_their_restarts(
    policy: str, seed: int
) -> None:
    _check_policy(policy, elastic_workload(seed), seed)


def _check_refusals(workload: Workload, seed: int) -> int:
    """Try each refusal's change on the market as the job met it; return how many there were."""
    prices = price_range(workload)
    outcomes = plan_all("price", workload, Options(prices=prices))
    market, count = Market(workload.timeline(), prices), 0
    by_name = {each.demand.name: each for each in outcomes}
    for demand in sorted(workload.demands, key=lambda each: each.asked):
        outcome = by_name[demand.name]
        if outcome.end is not None:
            market.take(demand, outcome.stretches[0])
            continue
        refusal = outcome.refusal
        assert refusal is not None
        if refusal.why:
            continue
        change = refusal.change
        assert change is not None, f"seed {seed}, {demand.name}"
        more = 0 if change.num_slots is None else change.num_slots - workload.num_slots
        assert admit(market, demand) is None
        assert admit(market.longer(more), changed(demand, change)) is not None, f"seed {seed}"
        count += 1
    return count


@pytest.mark.parametrize(("make", "num_seeds"), [(random_workload, 40), (confirmed_workload, 10)])
def test_the_least_change_admits_each_job_that_was_not(
    make: Callable[[int], Workload], num_seeds: int
) -> None:
    assert sum(_check_refusals(make(seed), seed) for seed in range(num_seeds)) > num_seeds // 2


def _on_two(*, deadline: float, wished: float = 0.0, confirmed: tuple[float, float]) -> Workload:
    """Return two machines of other kinds, and a job of one worker that should take 3.05 slots."""

    def confirm(placement: Ints) -> float:
        return confirmed[int(np.flatnonzero(placement[0])[0])]

    demand = Demand(
        "a",
        0.0,
        Value(1.0, 20.0 if wished else 0.0, wished, deadline),
        np.array([[1.0]]),
        (1,),
        1,
        lambda placement: 3.05,
        (np.ones(2, dtype=bool),),
        np.array([0, 1]),
        (3.05,),
        confirm=confirm,
    )
    return Workload(np.array([[1.0], [1.0]]), ("slots",), 8, (demand,))


def test_a_job_that_misses_its_deadline_by_what_is_confirmed_is_not_admitted() -> None:
    (outcome,) = plan_all("price", _on_two(deadline=3.5, confirmed=(3.9, 3.9)), Options())
    assert outcome.end is None
    assert outcome.refusal is not None
    assert outcome.refusal.change is not None
    assert outcome.refusal.change.end == pytest.approx(3.9)


def test_a_job_that_is_worth_less_than_its_price_at_the_confirmed_end_is_not_admitted() -> None:
    # Of 4 slots at 0.1 each: half of its worth is gone at 3.5, and next to all at 3.9.
    prices = PriceRange(np.array([0.1]), np.array([1.0]))
    workload = _on_two(deadline=math.inf, wished=3.5, confirmed=(3.9, 3.9))
    (outcome,) = plan_all("price", workload, Options(prices=prices))
    assert outcome.end is None


@pytest.mark.parametrize("slow", [3.9, 12.0, math.inf])
@pytest.mark.parametrize("at", [0, 1])
def test_a_place_that_takes_longer_says_nothing_of_the_others(slow: float, at: int) -> None:
    confirmed = (slow, 3.1) if at == 0 else (3.1, slow)
    (outcome,) = plan_all("price", _on_two(deadline=3.5, confirmed=confirmed), Options())
    assert outcome.end == pytest.approx(3.1)
    assert outcome.stretches[0].placement.tolist() == [[int(at == 1), int(at == 0)]]


def test_a_job_whose_places_are_all_longer_is_refused_with_a_reason() -> None:
    workload = _on_two(deadline=math.inf, confirmed=(math.inf, math.inf))
    (outcome,) = plan_all("price", workload, Options())
    assert outcome.refusal is not None
    assert "where it can run" in outcome.refusal.why


def test_a_job_that_takes_a_slot_more_everywhere_is_admitted_for_as_long() -> None:
    (outcome,) = plan_all("price", _on_two(deadline=math.inf, confirmed=(4.1, 4.1)), Options())
    assert outcome.end == pytest.approx(4.1)
    assert outcome.stretches[0].last == 5


@pytest.mark.parametrize("policy", ["drf", "dorm", "las"])
def test_a_restart_costs_whoever_changes_a_job_s_machines(policy: str) -> None:
    ends = []
    for restart in (0.0, 0.5):
        outcomes = [
            outcome
            for seed in range(15)
            for outcome in plan_all(policy, elastic_workload(seed, restart=restart), Options())
        ]
        changed = {each.demand.name for each in outcomes if len(each.stretches) > 1}
        assert changed
        ends.append([100.0 if each.end is None else each.end for each in outcomes])
    assert sum(ends[1]) > sum(ends[0])


def _beside(restart: float) -> Workload:
    """Return a machine of 4 slots, 3 of them taken for 6 of 12, and a job that is worth haste."""

    def slots(placement: Ints) -> float:
        return 12.0 / float(placement[0].sum())

    everywhere = (np.ones(1, dtype=bool),)
    rest = (np.array([[1.0]]), (1, 2, 4), 1, slots, everywhere, np.array([0]), (12.0, 6.0, 3.0))
    other = Demand("other", 0.0, Value(1.0), *rest)
    late = Demand(
        "late", 0.0, Value(1.0, 2.0, 8.2), *rest, is_elastic=restart >= 0, restart=restart
    )
    there = Stretch(0, 6, np.array([[3]]))
    return Workload(np.array([[4.0]]), ("slots",), 12, (late,), ((other, there),))


def test_an_elastic_job_grows_when_another_ends_if_its_restart_is_worth_it() -> None:
    prices = PriceRange(np.array([0.01]), np.array([0.02]))
    ends, placements = [], []
    for restart in (-1.0, 0.5, 6.0):
        (found,) = plan_all("price", _beside(restart), Options(prices=prices))
        ends.append(found.end)
        placements.append([(s.first, s.last, s.placement.tolist()) for s in found.stretches])
    assert placements[0] == [(6, 9, [[4]])]  # it waits for all slots
    # One slot for 6 slots of time does half of it; 4 do the other half in 1.5, after a restart.
    assert placements[1] == [(0, 6, [[1]]), (6, 8, [[4]])]
    assert ends[1] == pytest.approx(8.0)
    assert placements[2] == placements[0]


def test_a_job_that_may_change_its_machines_gains_no_less_and_at_times_more() -> None:
    more = 0
    for seed in range(60):
        workload = elastic_workload(seed)
        market = Market(workload.timeline(), price_range(workload))
        for at in in_order(workload.demands):
            demand = workload.demands[at]
            kept, found = admit(market, demand), admit_schedule(market, demand)
            if kept is not None:
                assert found is not None, f"seed {seed}"
                assert found.score >= kept.score, f"seed {seed}"
                more += found.score > kept.score
            stretches = () if found is None else found.stretches
            for one, other in pairwise(stretches):
                assert np.any((one.placement[0] > 0) & (other.placement[0] > 0)), f"seed {seed}"
            for stretch in stretches:
                market.take(demand, stretch)
    assert more >= 5


@pytest.mark.parametrize("seed", range(6))
def test_no_policy_is_over_the_bounds(seed: int) -> None:
    pytest.importorskip("scipy", reason="bounds are linear programs")
    workload = random_workload(seed)
    bound, gangs = fluid_bound(workload), gang_optimum(workload, limit_s=10.0)
    assert gangs is not None
    for policy in sorted(POLICIES):
        worth = sum(each.worth for each in plan_all(policy, workload, Options(explains=False)))
        assert worth <= bound * (1.0 + 1e-6), policy
        assert policy not in _GANGS or worth <= gangs * (1.0 + 1e-6), policy


@pytest.mark.long
def test_500_random_workloads_keep_to_capacity_gangs_and_work() -> None:
    for seed in range(500):
        for policy in _GANGS:
            _check_policy(policy, random_workload(seed), seed)
            _check_policy(policy, confirmed_workload(seed), seed)
        _check_policy("price", elastic_workload(seed), seed)
        _check_refusals(random_workload(seed), seed)
        _check_refusals(confirmed_workload(seed), seed)


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.timeout(36_000)
def test_100_000_random_workloads_keep_to_capacity_gangs_and_work() -> None:
    for seed in range(_WHOLE):
        for policy in sorted(POLICIES):
            _check_policy(policy, random_workload(seed), seed)
            _check_policy(policy, elastic_workload(seed), seed)
        _check_refusals(random_workload(seed), seed)


@pytest.mark.parametrize("seed", range(10))
def test_prices_at_full_use_admit_nobody(seed: int) -> None:
    workload = random_workload(seed)
    prices = price_range(workload)
    timeline = workload.timeline()
    timeline.used[:] = timeline.capacity[:, :, None] * (1.0 - 1e-12)
    market = Market(timeline, prices)
    timeline.used[:] = 0.0  # room, at the prices of none
    assert all(admit(market, demand) is None for demand in workload.demands)


def test_a_timeline_refuses_what_it_has_not() -> None:
    demand = replace(random_workload(1, has_servers=False).demands[0], needs=np.array([[1.0, 0.0]]))
    timeline = Timeline(np.array([[2.0, 8.0]]), 3)
    timeline.take(demand, Stretch(0, 2, np.array([[2]])))
    assert timeline.room(np.array([1.0, 0.0])).tolist() == [[0.0, 0.0, 2.0]]
    with pytest.raises(AssertionError):
        timeline.take(demand, Stretch(1, 3, np.array([[1]])))


def test_prices_go_from_low_to_high_as_slots_are_promised() -> None:
    timeline = Timeline(np.array([[4.0]]), 1)
    prices = PriceRange(np.array([0.5]), np.array([8.0]))
    for used, price in ((0.0, 0.5), (2.0, 2.0), (4.0, 8.0)):
        timeline.used[:] = used
        assert prices.of(timeline)[0, 0, 0] == pytest.approx(price)


HOSTS = [Host(f"h{at}", {"T4": 2}, 1.25e9, cpus=8) for at in range(2)]
FLEET = Fleet(HOSTS)
JOB = Job("a", ["python"], 4e6, 64, {"T4": DeviceModel(1e-3)}, steps=10_000)


def test_a_job_after_another_starts_when_that_has_ended() -> None:
    jobs = {each.name: each for each in (JOB, replace(JOB, name="b", after=["a"]))}
    plan = plan_many(FLEET, jobs, ManyOptions(simulates=False))
    first, second = plan.planned
    assert first.end_s is not None
    assert second.start_s is not None
    assert second.start_s >= first.end_s
    assert sum(count for _, count in first.hosts) == 4


def test_the_order_of_hosts_in_the_file_changes_nothing() -> None:
    jobs = {name: replace(JOB, name=name, worth=worth) for name, worth in (("a", 1.0), ("b", 3.0))}
    plans = [
        many_to_dict(plan_many(Fleet(hosts), jobs, ManyOptions(simulates=False)))
        for hosts in (HOSTS, HOSTS[::-1])
    ]
    assert plans[0] == plans[1]


def test_a_job_that_misses_its_deadline_is_told_which_one_would_do() -> None:
    job = replace(JOB, deadline_s=100.0)
    plan = plan_many(FLEET, {"a": job}, ManyOptions(simulates=False, slot_s=4.0, horizon_s=800.0))
    (refused,) = plan.planned
    assert not refused.is_admitted
    needed = int(refused.reason.partition("deadline_s = ")[2].partition(" ")[0])
    later = replace(job, deadline_s=float(needed))
    options = ManyOptions(simulates=False, slot_s=4.0, horizon_s=800.0)
    assert plan_many(FLEET, {"a": later}, options).planned[0].is_admitted


def test_a_table_and_json_have_a_row_for_each_job() -> None:
    jobs = {"a": JOB, "b": replace(JOB, name="b", deadline_s=1.0)}
    plan = plan_many(FLEET, jobs, ManyOptions(slot_s=4.0))
    head, lines = describe_many(plan)
    assert head.startswith("1 of 2 jobs admitted, worth 1; policy price")
    assert [row[0] for row in many_table(plan)] == ["job", "a", "b"]
    assert lines[0].startswith("b is not admitted: it would end at")
    found = json.loads(json.dumps(many_to_dict(plan), allow_nan=False))
    assert list(faults(found, SCHEMA, SCHEMA)) == []
    a, b = found["jobs"]
    assert a["hosts"] == {"h0": 2, "h1": 2}
    assert a["simulated_step_s"] == pytest.approx(a["step_s"], rel=0.1)
    assert a["end_s"] == pytest.approx(a["start_s"] + 10_000 * a["simulated_step_s"])
    assert b["refusal"]["change"]["end"] > 0


def test_an_elastic_job_grows_when_another_ends_and_all_is_told() -> None:
    elastic = replace(JOB, name="b", elastic=True, restart_s=10.0, wished_s=600.0, urgency=3.0)
    now = NowState(running=[RunningJob("a", {"h0": 2, "h1": 1})])
    plan = plan_many(FLEET, {"a": replace(JOB, steps=20_000), "b": elastic}, ManyOptions(), now=now)
    place, planned = plan.place_of("b")
    assert [dict(each.hosts) for each in planned.stretches] == [{"h1": 1}, {"h0": 2, "h1": 2}]
    assert place.best.layout.world_size == 1
    first, second = planned.stretches
    assert first.end_s == second.start_s
    assert second.end_s == planned.end_s
    places = plan.plans_of(plan.outcomes[0])
    done = [(first.end_s - first.start_s) / places[0].total_s]
    done += [(second.end_s - second.start_s - 10.0) / places[1].total_s]
    assert sum(done) == pytest.approx(1.0)
    _, lines = describe_many(plan)
    assert lines[0].startswith("b changes its hosts: h1:1 first, h0:2,h1:2 from ")
    found = json.loads(json.dumps(many_to_dict(plan), allow_nan=False))
    assert list(faults(found, SCHEMA, SCHEMA)) == []
    assert [each["hosts"] for each in found["jobs"][1]["stretches"]] == [
        {"h1": 1},
        {"h0": 2, "h1": 2},
    ]
    (_, kept) = plan_many(
        FLEET,
        {"a": replace(JOB, steps=20_000), "b": replace(elastic, restart_s=1e4)},
        ManyOptions(simulates=False),
        now=now,
    ).planned
    assert not kept.changes


@pytest.mark.parametrize(
    ("most", "hosts"), [(1, [{"fast": 1}]), (2, [{"slow": 1}, {"fast": 1, "slow": 1}])]
)
def test_a_job_that_changes_its_hosts_keeps_one(most: int, hosts: list[dict[str, int]]) -> None:
    """All of ``slow`` and then all of ``fast`` would be sooner, but nobody hands the state on."""
    fleet = Fleet([Host("fast", {"V100": 1}, 1e9), Host("slow", {"T4": 1}, 1e9)])
    models = {"V100": DeviceModel(1e-3), "T4": DeviceModel(4e-3)}
    job = replace(JOB, models=models, steps=10_000, wished_s=600.0, urgency=3.0)
    job = replace(job, name="b", elastic=True, restart_s=5.0, max_workers=most)
    first = replace(JOB, models={"V100": DeviceModel(1e-3)}, steps=3000)
    plan = plan_many(
        fleet,
        {"a": first, "b": job},
        ManyOptions(simulates=False),
        now=NowState(running=[RunningJob("a", {"fast": 1})]),
    )
    assert [dict(each.hosts) for each in plan.planned[1].stretches] == hosts


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_hosts_without_a_model_are_left_out(policy: str) -> None:
    fleet = Fleet([Host("a", {"V100": 8}, 1.25e9), *HOSTS])
    plan = plan_many(fleet, {"a": JOB}, ManyOptions(policy, simulates=False))
    (planned,) = plan.planned
    assert planned.is_admitted
    assert "a" not in dict(planned.hosts)


NODES = replace(JOB, rule="trimmed_mean:f=1", over="nodes")


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(("most", "ranks"), [(5, {1}), (8, {1, 2})])
def test_a_rule_over_nodes_has_as_many_ranks_on_each_of_enough_hosts(
    policy: str, most: int, ranks: set[int]
) -> None:
    fleet = Fleet([Host(f"h{at}", {"T4": 2, "V100": 1}, 1.25e9) for at in range(4)])
    jobs = {"a": replace(NODES, max_workers=most), "b": replace(JOB, name="b")}
    plan = plan_many(fleet, jobs, ManyOptions(policy, simulates=False))
    spread, other = plan.planned
    assert spread.is_admitted
    assert other.is_admitted
    assert len(spread.hosts) >= 3
    assert {count for _, count in spread.hosts} <= ranks
    assert len({count for _, count in spread.hosts}) == 1


def test_even_ranks_find_room_beside_others_that_take_some_of_a_host() -> None:
    fleet = Fleet([Host(f"h{at}", {"T4": 2}, 1.25e9) for at in range(4)])
    jobs = {"a": NODES, "b": replace(JOB, name="b")}
    now = NowState(running=[RunningJob("b", {"h0": 1, "h1": 2}, done=0.0)])
    plan = plan_many(fleet, jobs, ManyOptions(simulates=False, horizon_s=2000.0), now=now)
    spread = plan.planned[1]
    assert spread.start_s == 0.0
    assert dict(spread.hosts) == {"h0": 1, "h2": 1, "h3": 1}


def test_sets_of_machines_hold_those_with_data_and_the_fastest_links() -> None:
    rates = (1e8, 2e8, 3e8, 4e8)
    hosts = [Host(f"h{at:02d}", {"T4": 2}, rates[at % 4], rack=f"r{at}") for at in range(20)]
    data = DataSet("d", 10_000, 1e3, homes={"h03": 1e7, "h06": 1e7})
    job = replace(JOB, data="d")
    found = demand_of(Machines.of(Fleet(hosts, data=[data])), job, speed=ours_s).tiers
    sets = {frozenset(np.flatnonzero(tier).tolist()) for tier in found}
    assert {frozenset({3, 6}), frozenset(range(20)), frozenset(range(3, 20, 4))} <= sets


def test_fifo_lets_a_small_job_go_ahead_where_it_delays_none() -> None:
    big = replace(JOB, min_workers=4, max_workers=4)
    small = replace(JOB, min_workers=2, max_workers=2, steps=1_000)
    jobs = {
        "half": replace(small, name="half", steps=10_000),
        "all": replace(big, name="all", arrival_s=1.0),
        "short": replace(small, name="short", arrival_s=2.0),
    }
    plan = plan_many(FLEET, jobs, ManyOptions("fifo", simulates=False))
    half, all_, short = plan.planned
    assert all_.start_s is not None
    assert half.end_s is not None
    assert short.end_s is not None
    assert all_.start_s >= half.end_s
    assert short.end_s <= all_.start_s


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"urgency": 2.0}, "belong together"),
        ({"wished_s": 60.0}, "belong together"),
        ({"wished_s": 0.0}, "belong together"),
        ({"arrival_s": 60.0, "deadline_s": 60.0}, "must be after"),
    ],
)
def test_times_of_a_job_that_cannot_be_are_refused(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        replace(JOB, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "words"), [({"a": ["b"], "b": ["a"]}, "wait for each other"), ({"a": ["c"]}, "none")]
)
def test_jobs_that_wait_for_each_other_or_for_none_are_refused(
    after: dict[str, list[str]], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        JobList([replace(JOB, name=name, after=after.get(name, [])) for name in ("a", "b")])


MISFITS = {
    "min_workers = 4": {"min_workers": 5},
    "needs.cpus = 8": {"needs": WorkerNeeds(cpus=9)},
    "needs.memory_bytes = 16000000000": {"needs": WorkerNeeds(memory_bytes=17e9)},
    "needs.memory_bytes = 8000000000": {"needs": WorkerNeeds(memory_bytes=9e9), "min_workers": 3},
    'rule = "trimmed_mean:f=1"': {"rule": "trimmed_mean:f=2"},
    "max_workers = 3": {"rule": "trimmed_mean:f=1", "max_workers": 2},
    "max_workers = 4": {"models": {"T4": DeviceModel(1e-3, max_batch=16)}, "max_workers": 2},
    "min_batch = 16": {"min_workers": 4, "min_batch": 17},
    'over = "ranks" or rule = "trimmed_mean:f=0"': {"rule": "trimmed_mean:f=1", "over": "nodes"},
    "global_batch_size = 6": {"rule": "trimmed_mean:f=1", "global_batch_size": 5},
    "global_batch_size = 40": {"models": {"T4": DeviceModel(1e-3, max_batch=10)}},
}


@pytest.mark.parametrize(("change", "wrong"), MISFITS.items())
def test_a_job_that_fits_nowhere_is_told_what_would_do_and_others_are_planned(
    change: str, wrong: dict[str, Any]
) -> None:
    fleet = Fleet([replace(host, memory_bytes=16e9) for host in HOSTS])
    jobs = {
        "big": replace(JOB, name="big", **wrong),
        "next": replace(JOB, name="next", after=["big"]),
        "last": replace(JOB, name="last", after=["next"]),
        "a": JOB,
    }
    plan = plan_many(fleet, jobs, ManyOptions(simulates=False))
    big, then, last, other = plan.planned
    assert other.is_admitted
    assert f"; {change} " in big.reason or f" or {change} " in big.reason, big.reason
    assert big.reason.startswith("it fits nowhere: ")
    assert "it is after big" in then.reason
    assert "it is after next" in last.reason
    told = json.loads(json.dumps(many_to_dict(plan), allow_nan=False))
    assert list(faults(told, SCHEMA, SCHEMA)) == []
    assert told["jobs"][0]["refusal"]["resource"] in ("slots", "cpus", "memory_bytes")


@pytest.mark.parametrize(
    ("wrong", "model", "change"),
    [
        ({"global_batch_size": 8, "min_batch": 2}, DeviceModel(1e-3, max_batch=1), "min_batch = 1"),
        ({"max_workers": 2}, DeviceModel(1e-3, max_batch=10), "max_workers = 7"),
    ],
)
def test_more_workers_of_smaller_batches_are_tried(
    wrong: dict[str, Any], model: DeviceModel, change: str
) -> None:
    fleet = Fleet([Host(f"h{at}", {"T4": 4}, 1e9) for at in range(3)])
    job = replace(JOB, models={"T4": model}, **wrong)
    (planned,) = plan_many(fleet, {"a": job}, ManyOptions(simulates=False)).planned
    assert change in planned.reason
    key, value = change.split(" = ")
    fields: dict[str, Any] = {key: int(value)}
    mended = replace(job, **fields)
    (planned,) = plan_many(fleet, {"a": mended}, ManyOptions(simulates=False)).planned
    assert planned.is_admitted


@pytest.mark.parametrize("key", ["cpus", "memory_bytes"])
@pytest.mark.parametrize(("given", "which"), [(None, "hosts"), (1, "2 of 3 hosts"), (8, "")])
def test_hosts_that_do_not_say_what_they_have_are_told(
    key: str, given: int | None, which: str
) -> None:
    has: dict[str, Any] = {key: given}
    hosts = [Host(f"h{at}", {"T4": 1}, 1e9, **(has if at == 0 else {})) for at in range(3)]
    job = replace(JOB, needs=replace(WorkerNeeds(), **{key: 4}))
    (planned,) = plan_many(Fleet(hosts), {"a": job}, ManyOptions(simulates=False)).planned
    assert planned.is_admitted == (not which)
    if which:
        assert f"; {which} give no {key}: add it to the cluster's file; " in planned.reason


def test_jobs_that_all_fit_nowhere_are_all_told() -> None:
    jobs = {
        "a": replace(JOB, models={"A100": DeviceModel(1e-3)}),
        "b": replace(JOB, name="b", min_workers=5, needs=WorkerNeeds(cpus=9)),
    }
    a, b = plan_many(FLEET, jobs, ManyOptions()).planned
    assert "models of ['A100'], and hosts have ['T4']" in a.reason
    assert "no single change of its workers, batch, needs, over or rule" in b.reason


def test_a_rule_over_either_gets_even_places_where_these_are_faster() -> None:
    # On 3 hosts with thin links a rule over nodes sends a third; 4, 4 and 4 ranks are even.
    fleet = Fleet([Host(f"h{at}", {"T4": room}, 5e8) for at, room in enumerate((7, 6, 4))])
    models = {"T4": DeviceModel(1e-2)}
    job = replace(JOB, models=models, rule="trimmed_mean:f=1", model_bytes=4e7)
    job = replace(job, global_batch_size=480)
    packed = demand_of(Machines.of(fleet), replace(job, over="ranks"), speed=ours_s)
    either = demand_of(Machines.of(fleet), job, speed=ours_s)
    nodes = demand_of(Machines.of(fleet), replace(job, over="nodes"), speed=ours_s)
    assert min(nodes.least_slots) < 0.9 * min(packed.least_slots)
    assert min(either.least_slots) <= min(*nodes.least_slots, *packed.least_slots)
    (planned,) = plan_many(fleet, {"a": job}, ManyOptions(simulates=False)).planned
    assert dict(planned.hosts) == {"h0": 4, "h1": 4, "h2": 4}


def test_a_rule_over_nodes_takes_the_slower_devices_of_hosts_that_have_two() -> None:
    hosts = [Host(f"h{at}", {"T4": 2, "V100": 1}, 1.25e9) for at in range(3)]
    models = {"T4": DeviceModel(1e-3), "V100": DeviceModel(0.9e-3)}
    job = replace(NODES, models=models, min_workers=6)
    now = NowState(running=[RunningJob("b", {f"h{at}": 1 for at in range(3)})])
    busy = replace(JOB, name="b", models={"V100": DeviceModel(1.0)}, steps=100_000)
    plan = plan_many(
        Fleet(hosts), {"a": job, "b": busy}, ManyOptions(simulates=False, horizon_s=2e4), now=now
    )
    assert plan.planned[1].start_s == 0.0
    assert dict(plan.planned[1].hosts) == {"h0": 2, "h1": 2, "h2": 2}


def test_prices_that_a_user_gives_count_and_others_follow_from_the_jobs() -> None:
    job = replace(JOB, needs=WorkerNeeds(cpus=1))
    plans = {
        low: plan_many(
            FLEET,
            {"a": job},
            ManyOptions(simulates=False, prices={"slots": (low, 1e6)}, slot_s=4.0),
        )
        for low in (1e-6, 1e3)
    }
    hourly = many_to_dict(plans[1e-6])["hourly_prices"]
    assert hourly["slots"] == pytest.approx([1e-6, 1e6])
    default = plan_many(FLEET, {"a": job}, ManyOptions(simulates=False, slot_s=4.0))
    assert hourly["cpus"] == many_to_dict(default)["hourly_prices"]["cpus"]
    assert plans[1e-6].planned[0].is_admitted
    assert "slots cost 1000 an hour" in plans[1e3].planned[0].reason
    assert read_prices("slots=0.1:4.7, cpus=1e-3:1") == {"slots": (0.1, 4.7), "cpus": (1e-3, 1.0)}


@pytest.mark.parametrize("text", ["", "slots", "slots=1", "slots=a:2", "slots:1=2"])
def test_prices_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="a low and a high price of a unit in an hour"):
        read_prices(text)


def test_a_resource_with_two_prices_is_refused() -> None:
    with pytest.raises(ArgumentError, match="has slots twice; give it once"):
        read_prices("slots=1:2, cpus=1:2,slots=3:4")


@pytest.mark.parametrize(
    ("name", "needs", "why"),
    [
        ("cpus", WorkerNeeds(), "no job needs cpus; give prices of slots"),
        (
            "memory_bytes",
            WorkerNeeds(cpus=1, memory_bytes=1e9),
            "no host has memory_bytes; give prices of slots, cpus",
        ),
    ],
)
def test_prices_that_would_count_for_nothing_are_refused(
    name: str, needs: WorkerNeeds, why: str
) -> None:
    options = ManyOptions(simulates=False, prices={"slots": (1.0, 2.0), name: (1.0, 2.0)})
    with pytest.raises(ArgumentError, match=f"--prices {name}: {why}$"):
        plan_many(FLEET, {"a": replace(JOB, needs=needs)}, options)


def test_what_a_solver_could_not_do_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="dorm asks HiGHS")

    def late(*args: object, **options: object) -> object:
        return optimize.OptimizeResult(status=1, x=None, fun=None)

    monkeypatch.setattr(optimize, "milp", late)
    jobs = {"a": JOB, "b": replace(JOB, name="b")}
    plan = plan_many(FLEET, jobs, ManyOptions("dorm", simulates=False))
    assert all(each.is_admitted for each in plan.planned)
    _, lines = describe_many(plan)
    (told,) = (line for line in lines if line.startswith("warning: "))
    assert "HiGHS proved no answer within 2 s" in told
    assert many_to_dict(plan)["warnings"] == [told.removeprefix("warning: ")]


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "luck"},
        {"model": "x"},
        {"slot_s": math.nan},
        {"prices": {"GPUs": (1.0, 2.0)}},
        {"prices": {"slots": (2.0, 1.0)}},
        {"prices": {"slots": (0.0, 1.0)}},
        {"prices": {"slots": (math.nan, 1.0)}},
        {"prices": {"slots": (1.0, 2.0)}, "policy": "fifo"},
    ],
)
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"must be|has none"):
        ManyOptions(**options)


def test_what_runs_is_not_moved_and_others_go_around_it() -> None:
    jobs = {name: replace(JOB, name=name) for name in ("a", "b", "c")}
    now = NowState(1000.0, ["a"], [RunningJob("b", {"h0": 2}, done=0.5)])
    plan = plan_many(FLEET, jobs, ManyOptions(simulates=False), now=now)
    running, planned = plan.planned
    alone = ours_s(FLEET, JOB, Layout.of([HostRanks(HOSTS[0], "T4", 2)]))
    assert running.hosts == (("h0", 2),)
    assert running.end_s == pytest.approx(1000.0 + 0.5 * alone)
    assert planned.name == "c"
    assert planned.start_s is not None
    assert planned.start_s >= 1000.0
    assert planned.hosts == (("h1", 2),) or planned.start_s >= running.end_s  # type: ignore[operator]
    assert many_table(plan)[1][2] == "runs"
    told = json.loads(json.dumps(many_to_dict(plan), allow_nan=False))
    assert [job["is_running"] for job in told["jobs"]] == [True, False]
    assert list(faults(told, SCHEMA, SCHEMA)) == []


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (NowState(finished=["x"]), "'x' is none of"),
        (NowState(finished=["a"], running=[RunningJob("a", {"h0": 1})]), "stands twice"),
        (NowState(running=[RunningJob("a", {"h9": 1})]), "0 slots in the cluster's file"),
        (NowState(running=[RunningJob("a", {"h0": 3})]), "has 2 slots"),
        (NowState(running=[RunningJob("a", {})]), "0 workers, and it has 1 to 3;"),
        (NowState(running=[RunningJob("a", {"h0": 2, "h1": 2})]), "4 workers, and it has 1 to 3;"),
        (
            NowState(running=[RunningJob("a", {"h0": 2}), RunningJob("b", {"h0": 1})]),
            "take more slots than the host has",
        ),
    ],
)
@pytest.mark.parametrize("model", ["ours", "ps", "ring"])
def test_what_cannot_run_now_is_refused(now: NowState, words: str, model: str) -> None:
    jobs = {name: replace(JOB, name=name, max_workers=3) for name in ("a", "b")}
    with pytest.raises(ArgumentError, match=words):
        plan_many(FLEET, jobs, ManyOptions(model=model, simulates=False), now=now)


def test_a_longer_horizon_counts_what_runs_beyond_the_first_one() -> None:
    jobs = {name: replace(JOB, name=name, min_workers=4) for name in ("a", "b")}
    now = NowState(running=[RunningJob("b", {"h0": 2, "h1": 2})])

    def planned(slot_s: float, horizon_s: float) -> PlannedJob:
        options = ManyOptions(simulates=False, slot_s=slot_s, horizon_s=horizon_s)
        return plan_many(FLEET, jobs, options, now=now).planned[1]

    reason = planned(10.0, 40.0).reason
    assert "no room for it in the 40 s ahead; --slot 10 --horizon " in reason
    (horizon_s,) = re.findall(r"--horizon (\d+)", reason)
    assert planned(10.0, float(horizon_s)).is_admitted


def test_the_file_of_what_runs_is_read_strictly(tmp_path: Path) -> None:
    file = tmp_path / "now.toml"
    file.write_text(
        'now_s = 60\nfinished = ["a"]\n[[running]]\njob = "b"\nhosts = { h0 = 2 }\ndone = 0.5\n'
    )
    assert read_now(file) == NowState(60.0, ["a"], [RunningJob("b", {"h0": 2}, 0.5)])
    file.write_text("when = 60\n")
    with pytest.raises(ArgumentError, match="when"):
        read_now(file)
    with pytest.raises(DataError, match="cannot be read"):
        read_now(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("model", "seconds"),
    [
        # 10,000 steps of 64 samples: 2 ranks at 1 ms a sample and 2 * 4 MB / (1.25 GB/s * 64).
        ("ps", 10_000 * 64 * (1e-3 + 2 * 4e6 / (1.25e9 * 64)) / 2),
        # Steps of 32 samples a rank, and half of 4 MB twice over the link.
        ("ring", 10_000 * (32e-3 + 2e6 * 2 / 1.25e9)),
    ],
)
def test_published_speeds_follow_a_job_s_models(model: str, seconds: float) -> None:
    layout = Layout.of([HostRanks(host, "T4", 1) for host in HOSTS])
    assert SPEEDS[model](FLEET, JOB, layout) == pytest.approx(seconds, rel=1e-9)

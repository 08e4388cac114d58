"""The balance measured against oracles over many clusters: what docs/balance.md promises."""

from __future__ import annotations

import functools
import itertools
import operator
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import loft_hvd as loft
import loft_hvd.simulate
from benchmarks import contest
from loft_hvd.balance.controller import Controller
from loft_hvd.balance.interval import Interval, typical
from loft_hvd.balance.latency import StepModel
from loft_hvd.balance.loft import Loft
from loft_hvd.balance.policy import Proposal
from loft_hvd.balance.search import SOLVERS, exact
from loft_hvd.simulate.compare import random_scenario
from loft_hvd.simulate.curves import Table, read_table
from loft_hvd.simulate.scenario import Event, RankTraits, Scenario, read_scenario
from loft_hvd.simulate.simulation import PolicyRun, simulate
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.clusters import OVERLAPS, drive, measure, observe, random_model
from tests.support.marks import long_first
from tests.support.scenarios import hiccup_scenario, rough_scenario, wide_scenario
from tests.support.slowness import slowness

SHIPPED = {
    path.stem: path
    for path in sorted((Path(loft_hvd.simulate.__file__).parent / "scenarios").glob("*.toml"))
}
modes = pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=OVERLAPS.keys())

# facts: LOFT against LB-BSP with the locality sampler, against LB-BSP with a blind one, sizing
# alone, the sampler alone; per cent less step time.
REGIMES = {
    "link-1000-serial": (21.6, 23.9, 11.0, 2.9),
    "link-1000-overlap": (0.0, 0.0, 0.0, 0.0),
    "link-600-serial": (31.3, 34.0, 21.3, 4.0),
    "link-600-overlap": (14.0, 19.2, 17.8, 6.0),
    "link-325-serial": (45.9, 48.8, 36.8, 5.4),
    "link-325-overlap": (39.2, 43.6, 41.6, 7.1),
    "link-200-serial": (58.1, 60.8, 50.1, 6.4),
    "link-100-overlap": (73.9, 76.1, 74.8, 8.5),
}


def savings(scenario: Scenario) -> tuple[float, float, float, float]:
    scenario = replace(scenario, policies=("lbbsp-cpu", "loft"), steps=400)
    home, blind = simulate(scenario), simulate(replace(scenario, sampler="blind"))
    loft, lbbsp = (home.run(name).settled_s for name in ("loft", "lbbsp-cpu"))
    loft_blind, lbbsp_blind = (blind.run(name).settled_s for name in ("loft", "lbbsp-cpu"))
    return (
        100 * (1 - loft / lbbsp),
        100 * (1 - loft / lbbsp_blind),
        100 * (1 - loft_blind / lbbsp_blind),
        100 * (1 - lbbsp / lbbsp_blind),
    )


def constant(model: StepModel, number: int) -> StepModel:
    del number
    return model


def changing(before: StepModel, after: StepModel, number: int) -> StepModel:
    return before if number < 20 else after


@pytest.mark.long
@pytest.mark.parametrize("name", REGIMES)
def test_the_table_of_regimes_comes_out(name: str) -> None:
    cells = savings(read_scenario(SHIPPED[name]))
    assert cells == pytest.approx(REGIMES[name], abs=1.5)
    assert name != "link-325-serial" or cells[0] >= 40


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "thousand-ranks"])
def test_loft_is_near_the_best_policy_in_every_shipped_scenario(name: str) -> None:
    results = simulate(read_scenario(SHIPPED[name]))
    best = min(run.mean_s for run in results.runs if run.name != "oracle")
    assert results.run("loft").mean_s <= 1.02 * best


@pytest.mark.long
@pytest.mark.parametrize("first", long_first(range(0, 200, 20), 2))
def test_loft_is_near_the_best_policy_in_random_scenarios(first: int) -> None:
    for seed in range(first, first + 20):
        results = simulate(random_scenario(seed))
        best = min(run.mean_s for run in results.runs if run.name != "oracle")
        above = results.run("loft").mean_s / best - 1
        assert above <= 0.02, f"seed {seed}: {above:.1%} above the best policy"


@pytest.mark.parametrize("seed", long_first(range(40), 2))
def test_loft_is_never_behind_a_one_line_rule_on_hosts_that_others_use(seed: int) -> None:
    results = simulate(rough_scenario(seed))
    best = min(run.mean_s for run in results.runs if run.name != "oracle")
    above = results.run("loft").mean_s / best - 1
    sys.stdout.write(f"seed {seed}: {above:+.2%} above the best policy\n")
    assert above <= 0.02


@pytest.mark.long
@pytest.mark.timeout(600)  # wall time, on cores that other tests share
@pytest.mark.parametrize("first", long_first(range(0, 1000, 100)))
def test_loft_is_near_the_best_policy_on_clusters_that_it_was_not_tuned_on(first: int) -> None:
    chosen = itertools.islice(contest.entries(), first, first + 100)
    found = [contest.run(scenario, seed) for scenario, seed in chosen]
    sys.stdout.write(f"{contest.summarise(found)}\n")
    far = [each for each in found if each.above > 0.01]
    assert len(far) <= 5, far  # 95 of 100 are near
    # Two of 1,000 are 3.4 % above: a cache warms; a rank is slow at once, and no rank says why.
    assert all(each.above <= 0.04 for each in far), far


def least_by_enumeration(tables: list[Table], total: int) -> float:
    """Return the shortest step of all sizes of at least one sample that add up to ``total``."""
    times = [table.at(np.arange(1.0, table.sizes[-1] + 1)) for table in tables]
    targets, low = np.unique(np.concatenate(times)), 0
    high = len(targets) - 1
    while low < high:
        middle = (low + high) // 2
        sums = 1  # bit s is set where s samples can be given out within the target
        for of_rank in times:
            fits = (np.flatnonzero(of_rank <= targets[middle]) + 1).tolist()
            sums = functools.reduce(operator.or_, (sums << size for size in fits), 0)
        low, high = (low, middle) if sums >> total & 1 else (middle + 1, high)
    return float(targets[low])


@pytest.mark.parametrize(
    ("model", "total"),
    long_first(
        [
            *(("imagenet", total) for total in (400, 200, 800)),
            *(("bert", total) for total in (24, 48, 72)),
            *(("yolov3", total) for total in (20, 32, 48)),
        ],
        1,
    ),
)
def test_on_measured_curves_loft_comes_near_the_best_of_all_sizes(model: str, total: int) -> None:
    names = [f"{model}-{gpu}" for gpu in ("a100", "2080ti", "rtx6000", "t4")]
    tables = [read_table(name) for name in names]
    scenario = Scenario(
        f"{model} {total}",
        4,
        total,
        steps=1200,
        noise=0.02,
        min_batch=1,
        max_batch=[int(table.sizes[-1]) for table in tables],
        policies=("loft",),
        ranks=RankTraits(curve=names, local_share=1.0, local_bytes_per_s=1e12),
    )
    settled_s = simulate(scenario).run("loft").settled_s
    assert settled_s <= 1.03 * least_by_enumeration(tables, total)


@pytest.mark.long
@pytest.mark.timeout(180)  # wall time, on cores that other tests share
@pytest.mark.parametrize(
    ("model", "total"), long_first([("imagenet", 400), ("bert", 48), ("yolov3", 32)])
)
def test_live_ranks_that_take_as_long_as_measured_come_near_the_best_of_all_sizes(
    model: str, total: int
) -> None:
    """Ranks sleep as long as their devices computed; after 8 intervals sizes are as good."""
    names = [f"{model}-{gpu}" for gpu in ("a100", "2080ti", "rtx6000", "t4")]
    tables = [read_table(name) for name in names]
    interval, most = 10, [int(table.sizes[-1]) for table in tables]

    def work(ends: LocalTransport) -> tuple[list[tuple[int, ...]], list[float]]:
        balancer = loft.Balancer(
            total, interval=interval, min_batch=1, max_batch=most, transport=ends
        )
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), balancer=balancer, transport=ends
        )
        loader = loft.DataLoader(TensorDataset(torch.ones(100 * total, 1)), balancer)
        sizes, ended = [], []
        for (x,) in itertools.islice(loader, 9 * interval):
            optimizer.zero_grad()
            time.sleep(float(tables[ends.rank].at(np.array([len(x)]))[0]))
            (weight * x).mean().backward()
            optimizer.step()
            sizes.append(loader.step_sizes.sizes)
            ended.append(time.monotonic())
        return sizes, np.diff(ended).tolist()

    sizes, step_s = run_ranks(4, work, timeout_s=170)[0]
    best_s = least_by_enumeration(tables, total)

    def longest_s(of_step: tuple[int, ...]) -> float:
        pairs = zip(tables, of_step, strict=True)
        return max(float(table.at(np.array([size]))[0]) for table, size in pairs)

    later = slice(8 * interval, None)
    slept = float(np.mean([longest_s(each) for each in sizes[later]])) / best_s
    taken = float(np.median(step_s[later])) / best_s
    plans = [each for at, each in enumerate(sizes) if not at or each != sizes[at - 1]]
    sys.stdout.write(f"{model} {total}: {slept:.3f} by sizes, {taken:.3f} taken; {plans}\n")
    assert slept <= 1.06, plans


def test_loft_is_near_the_best_policy_where_a_slow_rank_reads_little() -> None:
    # A rank slows down 2.8 times, and with what is left to it reads hardly anything from elsewhere.
    scenario = replace(random_scenario(19), policies=("lbbsp-cpu:busy", "loft"))
    results = simulate(scenario)
    assert results.run("loft").mean_s <= 1.02 * results.run("lbbsp-cpu:busy").mean_s


class Pins:
    """The ranks that are pinned after each interval."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks: list[list[int]] = []
        propose = Loft.propose

        def watched(policy: Loft, interval: Interval, *, first_step: int) -> Proposal | None:
            proposal = propose(policy, interval, first_step=first_step)
            self.ranks.append(list(np.flatnonzero(policy.state.held)))
            return proposal

        monkeypatch.setattr(Loft, "propose", watched)


def assert_hiccups_cost_little(scenario: Scenario, pins: Pins) -> None:
    """Run a cluster with hiccups; print how far LOFT settles above the best, and its plans."""
    pins.ranks.clear()
    results, name = simulate(scenario), scenario.name
    found = results.run("loft")
    best = min(run.settled_s for run in results.runs if run.name != "oracle")
    above, plans = found.settled_s / best - 1, len(found.decisions)
    sys.stdout.write(f"{name}: {above:+.2%} above the best policy, {plans} plans\n")
    assert len(pins.ranks) == scenario.steps // 20
    assert not any(pins.ranks[10:]), f"{name}: ranks pinned {pins.ranks}"
    assert above <= 0.02, name
    assert plans <= 12, name


def test_hiccups_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    rivals = ("uniform", "lbbsp-cpu:busy", "loft")
    scenario = replace(hiccup_scenario(2, steps=1500), policies=rivals)
    assert_hiccups_cost_little(scenario, Pins(monkeypatch))


@pytest.mark.long
def test_hiccups_cost_little_in_the_shipped_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = read_scenario(SHIPPED["hiccups"])
    assert scenario.steps == 4000
    assert_hiccups_cost_little(scenario, Pins(monkeypatch))


@pytest.mark.long
@pytest.mark.parametrize("first", long_first(range(0, 30, 3), 2))
def test_hiccups_cost_little_in_thirty_clusters(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = Pins(monkeypatch)
    for seed in range(first, first + 3):
        assert_hiccups_cost_little(hiccup_scenario(seed), pins)


def usual_s(run: PolicyRun) -> float:
    """Seconds that a step usually takes, averaged over the intervals of a run."""
    return float(typical(run.step_s.reshape(-1, 20).T)[0].mean())


@pytest.mark.long
def test_in_nine_of_ten_wide_clusters_predicted_gains_are_realised_within_a_factor() -> None:
    """The first plan's gain, against what its sizes save over 1,000 steps."""
    ratios = {}
    for seed in range(40):  # every fourth has heavy tails
        scenario = wide_scenario(seed, steps=200)
        made = simulate(replace(scenario, policies=("loft",))).run("loft").decisions
        predicted = made[1].predicted_gain
        assert predicted is not None, f"seed {seed}"
        fixed = (made[0].sizes, made[1].sizes)
        before, after, _ = simulate(replace(scenario, steps=1000, policies=fixed)).runs
        ratios[seed] = predicted / (1.0 - usual_s(after) / usual_s(before))
    is_near = {seed: 1 / 1.3 <= ratio <= 1.3 for seed, ratio in ratios.items()}
    far = {seed: round(ratios[seed], 2) for seed in ratios if not is_near[seed]}
    sys.stdout.write(f"far off: {far}\n")
    assert len(far) <= 4, far


@pytest.mark.long
@modes
@pytest.mark.parametrize("solver", long_first(SOLVERS))
def test_from_a_cold_start_with_noise_plans_reach_the_oracle(
    overlap: float | None, solver: str
) -> None:
    excess = []
    for seed in range(200):
        model = random_model(seed, 2 + seed % 7, overlap)
        num_ranks = model.world_size
        controller = Controller(48 * num_ranks, num_ranks, Loft(solver=solver))
        plans = drive(partial(constant, model), controller, intervals=11, seed=seed)
        task = controller.task
        best = exact(model, task.global_batch_size, task.bounds)
        excess.append(model.step_s(plans[-1]) / model.step_s(best) - 1)
    assert np.median(excess) <= 0.02
    assert np.percentile(excess, 95) <= 0.05


@pytest.mark.long
@pytest.mark.parametrize("overlap", long_first([0.0, None, 1.0], 2))  # serial, partial, full
def test_after_a_step_change_plans_reach_the_oracle_again(overlap: float | None) -> None:
    excess = []
    for seed in range(100):
        before = random_model(seed, 6, overlap)
        factor = np.where(np.arange(6) == seed % 6, 3.0, 1.0)
        after = replace(
            before,
            compute_fixed_s=before.compute_fixed_s * factor,
            compute_s=before.compute_s * factor,
            plateau_s=before.plateau_s * factor,
        )
        controller = Controller(48 * 6, 6)
        plans = drive(
            partial(changing, before, after),
            controller,
            intervals=25,
            seed=seed,
        )
        task = controller.task
        best = exact(after, task.global_batch_size, task.bounds)
        excess.append(after.step_s(plans[-1]) / after.step_s(best) - 1)
    assert np.median(excess) <= 0.10, np.percentile(excess, [50, 90, 95, 100])
    assert np.percentile(excess, 90) <= 0.10, np.percentile(excess, [50, 90, 95, 100])


@pytest.mark.parametrize("report", ["half", "double", "constant", "nan", "drift"])
@pytest.mark.parametrize("is_even", [True, False], ids=["equal ranks", "unequal ranks"])
def test_a_lying_rank_costs_at_most_an_interval_a_try(report: str, is_even: bool) -> None:
    rates = [1e-3] * 8 if is_even else [1e-3] * 4 + [2e-3] * 2 + [4e-3] * 2
    scenario = Scenario(
        "liar",
        8,
        512,
        steps=800,
        noise=0.05,
        aggregate_s=0.02,
        policies=("uniform", "loft"),
        ranks=RankTraits(compute_s=rates, compute_fixed_s=0.01),
        events=(Event("lie", (2,), report=report),),
    )
    results = simulate(scenario)
    loft, equal = results.run("loft"), results.run("uniform")
    ratio = loft.step_s.reshape(-1, 20).mean(axis=1) / equal.step_s.reshape(-1, 20).mean(axis=1)
    worse = ratio > 1.05  # the guard's margin is 2 %, the noise of an interval 1 to 2 %
    assert not (worse[1:] & worse[:-1]).any(), "a plan worse than equal sizes lasts one interval"
    assert ratio.max() <= 2.1, "at most twice its share"
    assert worse.sum() <= 4
    # A lie that goes on growing to the end is found out anew each time it has grown.
    assert report == "drift" or ratio[-10:].max() <= 1.05
    assert loft.mean_s <= 1.05 * equal.mean_s


@pytest.mark.long
@pytest.mark.timeout(600)  # wall time, on cores that other tests share
def test_a_thousand_ranks_for_2000_steps_take_under_20_seconds() -> None:
    scenario, slow = read_scenario(SHIPPED["thousand-ranks"]), slowness()
    began = time.process_time()  # not the clock: other work may share the machine
    results = simulate(scenario)
    taken_s = time.process_time() - began
    assert taken_s < 20 * (slow + slowness()) / 2
    # The strongest rival is not in the scenario, whose time is limited.
    busy = simulate(replace(scenario, policies=("lbbsp-cpu:busy",)))
    runs = [run for run in (*results.runs, *busy.runs) if run.name != "oracle"]
    assert results.run("loft").mean_s <= 1.02 * min(run.mean_s for run in runs)


LARGE = """
import resource, time
from loft_hvd.simulate.scenario import RankTraits, Scenario
from loft_hvd.simulate.simulation import simulate

ranks = RankTraits(compute_s={"loguniform": [1e-3, 4e-3]})
scenario = Scenario(
    "4,096 ranks", 4096, 32 * 4096, steps=2000, num_samples=50 * 32 * 4096, noise=0.05,
    policies=("uniform", "loft"), ranks=ranks,
)
began = time.process_time()
results = simulate(scenario)
assert results.run("loft").mean_s < 0.7 * results.run("uniform").mean_s
print(time.process_time() - began, 1024e-9 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.long
@pytest.mark.timeout(600)  # wall time, on cores that other tests share
def test_4096_ranks_for_2000_steps_take_under_two_minutes_and_two_gigabytes() -> None:
    # A process of its own, which has used no memory for anything else.
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, check=False, timeout=580
    )
    assert done.returncode == 0, done.stderr
    seconds, gigabytes = map(float, done.stdout.split())
    assert seconds < 120
    assert gigabytes < 2.0


def test_planning_takes_less_than_a_hundredth_of_the_steps_it_plans() -> None:
    model = random_model(0, 8, 0.0)
    controller = Controller(512, 8)
    taken, trained = 0.0, 0.0
    for number in range(30):
        rows, step_s = measure(model, controller.plan.sizes, seed=[number], noise=0.05, steps=20)
        began = time.thread_time()  # not the clock: other work may share the machine
        observe(controller, rows, step=20 * number + 19, step_s=step_s)
        controller.decide(20 * number + 20)
        taken += time.thread_time() - began
        trained += 20 * step_s
    assert taken < 0.01 * trained

"""What a run begins with: a saved state in another setting, and devices that come back."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import loft_hvd as loft
from loft_hvd.balance.controller import Controller
from loft_hvd.balance.interval import COLUMNS, COMPUTE, LOCAL, SIZE, Interval, screen
from loft_hvd.balance.limits import Device, RankLimits
from loft_hvd.balance.plan import StepSizes
from loft_hvd.balance.resume import Archive, SavedRun, first_plans, make_controller
from loft_hvd.codec import decode, encode
from loft_hvd.errors import ArgumentError, PlanError
from loft_hvd.transport import waits
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.plans import make_options

STATE: dict[str, Any] = {
    "num_steps": 500,
    "next_step": 500,
    "plans": [[0, 0, 32, 32], [1, 480, 48, 16]],
    "controller": None,
    "policy": "loft",
}


def load(transport: LocalTransport, total: int, policy: Any, **given: Any) -> loft.Balancer:
    balancer = loft.Balancer(total, policy, transport=transport, **given)
    balancer.load_state_dict(json.loads(json.dumps(STATE)))
    return balancer


@pytest.mark.parametrize(
    ("total", "policy", "given", "sizes", "change"),
    [
        (64, "loft", {}, (48, 16), None),
        (64, "uniform", {}, (32, 32), "policy was 'loft' and is 'uniform'"),
        (64, "report", {}, (32, 32), "policy was 'loft' and is 'report'"),
        (64, [16, 48], {}, (16, 48), "policy was 'loft' and is '[16, 48]'"),
        (32, "loft", {}, (16, 16), "global_batch_size was 64 and is 32"),
        (128, "loft", {}, (64, 64), "global_batch_size was 64 and is 128"),
        (64, "loft", {"max_batch": 40}, (32, 32), "rank 0 had 48 samples, but its cap is 40"),
        (64, "loft", {"max_batch": [56, 24]}, (40, 24), "rank 1 had 32 samples, but its cap is 24"),
    ],
)
def test_sizes_of_another_setting_start_afresh_with_one_warning(
    total: int,
    policy: Any,
    given: Any,
    sizes: tuple[int, ...],
    change: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(transport: LocalTransport) -> tuple[int, ...]:
        balancer = load(transport, total, policy, **given)
        own = balancer.plan_at(balancer.next_step).sizes
        assert balancer.local_batch_size == own[transport.rank]
        assert balancer.next_step == 500
        return own

    with caplog.at_level(logging.WARNING):
        assert run_ranks(2, work) == [sizes] * 2
    said = [record.getMessage() for record in caplog.records]
    assert said == ([] if change is None else [f"load_state_dict: sizes start afresh: {change}"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"plans": []}, "a run has a plan from step 0 on"),
        ({"plans": [[0]]}, "one has no sizes"),
        ({"plans": [[0, 7, 64]]}, "a run has a plan from step 0 on"),
        ({"plans": [[0, 0, 64], [2, 5, 64]]}, "plan 2 from step 5 .*cannot be number 1"),
        ({"plans": [[0, 0, 64], [1, 0, 64]]}, "plan 1 from step 0"),
        ({"plans": [[0, 0, 64], [1, 5, 32, 32]]}, "for 2 ranks cannot be number 1"),
        ({"plans": [[0, 0, 32]]}, "are not its controller's"),
        ({"num_steps": -1}, "Balancer.num_steps needs int"),
        ({"measured": {"a/0": [[1.0]]}}, "measured.*needs shape"),
    ],
)
def test_a_state_that_no_run_can_have_had_is_refused(change: dict[str, Any], match: str) -> None:
    balancer = loft.Balancer(64, "loft", transport=LocalWorld(1).transport(0))
    before = balancer.state_dict()
    with pytest.raises(ArgumentError, match=match):
        balancer.load_state_dict(before | change)
    assert balancer.state_dict() == before


def test_a_state_that_the_controller_refuses_changes_nothing() -> None:
    transport = LocalWorld(1).transport(0)
    saved, balancer = (loft.Balancer(64, "loft", transport=transport) for _ in range(2))
    state, before = saved.state_dict(), balancer.state_dict()
    rows = {"elsewhere/0": [[1.0] * len(COLUMNS)]}
    state |= {"num_steps": 500, "plans": [[0, 0, 64]], "controller": {}, "measured": rows}
    with pytest.raises(ArgumentError, match="controller needs keys"):
        balancer.load_state_dict(state)
    assert balancer.state_dict() == before


@pytest.mark.parametrize(
    ("total", "policy", "wrong"),
    [
        (32, "lbbsp-cpu:ema", "global_batch_size=64 instead of 32"),
        (64, "lbbsp-cpu", "policy='lbbsp-cpu:ema' instead of 'lbbsp-cpu'"),
        (64, "lbbsp-cpu:busy", "policy='lbbsp-cpu:ema' instead of 'lbbsp-cpu:busy'"),
    ],
)
def test_a_controller_refuses_the_state_of_another(total: int, policy: str, wrong: str) -> None:
    state = Controller(64, 2, "lbbsp-cpu:ema").state_dict()
    with pytest.raises(PlanError, match=wrong):
        Controller(total, 2, policy).load_state_dict(state)


@pytest.mark.parametrize(("policy", "sizes"), [("report", (10,) * 4), ("loft", (16, 8, 8, 8))])
def test_only_adaptive_policies_look_at_the_grain(policy: str, sizes: tuple[int, ...]) -> None:
    options = make_options(40, 4, policy=policy, grain=8)
    limits = RankLimits.of(options, (Device("node", 0, "Tesla T4", True),) * 4, {})
    (plan,) = first_plans(options, limits, make_controller(options, limits))
    assert plan.sizes == sizes


# What was measured of a device stays known when worlds change, and when it comes back.


def interval(seconds: list[float], *, valid: list[bool] | None = None) -> Interval:
    rows = np.zeros((len(seconds), len(COLUMNS)))
    rows[:, SIZE] = 8
    rows[:, COMPUTE] = seconds
    is_valid = np.array(valid or [True] * len(seconds))
    return Interval(3, np.full(len(seconds), 8), rows, is_valid, max(seconds))


def compute_s(archive: Archive, keys: list[str]) -> list[list[float | None]]:
    """Return what is recalled of each device's computing, oldest first."""
    return [
        [float(each.rows[rank, COMPUTE]) if each.valid[rank] else None for each in recalled]
        for recalled in [archive.recall(keys)]
        for rank in range(len(keys))
    ]


def test_rows_follow_their_device_to_another_rank_and_world() -> None:
    archive = Archive()
    archive.add(["a/0", "b/0"], interval([1.0, 2.0]))
    archive.add(["a/0", "b/0"], interval([1.1, 9.0], valid=[True, False]))
    archive.add(["b/0", "c/0"], interval([2.1, 3.0]))
    assert compute_s(archive, ["c/0", "b/0", "d/0", "a/0"]) == [
        [None, 3.0],
        [2.0, 2.1],
        [None, None],
        [1.0, 1.1],
    ]
    copy = Archive()
    copy.take(json.loads(json.dumps(archive.rows())))
    assert compute_s(copy, ["a/0"]) == [[1.0, 1.1]]


def test_what_is_kept_is_bounded() -> None:
    archive = Archive()
    for host in range(50):
        for _ in range(40):
            archive.add([f"{host}/0", "here/0"], interval([1.0, 2.0]))
    rows = archive.rows()
    assert len(rows) <= 9
    assert len(rows["here/0"]) == len(rows["49/0"]) == 16
    assert "0/0" not in rows


@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_that_of_a_list_for_each_device(seed: int) -> None:
    rng = np.random.default_rng(seed)
    archive, lists = Archive(), dict[str, list[list[float]]]()
    hosts = rng.permutation(12)[:3]
    for number in range(120):
        if rng.random() < 0.1:  # another world
            hosts = rng.permutation(12)[: rng.integers(1, 5)]
        keys = [f"{host}/0" for host in hosts]
        seen = interval((number + rng.random(len(keys))).tolist())
        seen = replace(seen, valid=rng.random(len(keys)) < 0.8)
        archive.add(keys, seen)
        for key, row, is_valid in zip(keys, seen.rows.tolist(), seen.valid, strict=True):
            if is_valid:
                lists[key] = [*lists.pop(key, []), row][-16:]  # to the end of the dict
        for key in list(lists)[: max(len(lists) - 4 * len(keys), 0)]:
            del lists[key]
        assert list(archive.rows().items()) == list(lists.items())
        for rank, key in enumerate(keys):
            recalled = [each for each in archive.recall(keys) if each.valid[rank]]
            assert [each.rows[rank].tolist() for each in recalled] == lists.get(key, [])
        if rng.random() < 0.1:
            archive = Archive()
            archive.take(json.loads(json.dumps(lists)))


@pytest.mark.parametrize("column", COLUMNS)
def test_no_report_makes_a_state_that_cannot_be_read(column: str) -> None:
    rows = np.zeros((2, len(COLUMNS)))
    rows[:, [SIZE, LOCAL]], rows[:, COMPUTE] = 8, 1.0
    rows[1, COLUMNS.index(column)] = 1e40
    archive = Archive()
    archive.add(["a/0", "b/0"], screen(rows, step=19, sizes=(8, 8), step_s=1.0))
    state = encode(SavedRun(20, [[0, 0, 8, 8]], None, measured=archive.rows()))
    read = decode(SavedRun, json.loads(json.dumps(state)), what="Balancer")
    assert read.measured == {"a/0": [rows[0].tolist()]}


def train(balancer: loft.Balancer, hosts: list[str], num_steps: int, now: list[float]) -> None:
    """Take steps in which a sample takes 4 ms on the host named "slow", and 1 ms elsewhere."""
    per_sample = [4e-3 if host == "slow" else 1e-3 for host in hosts]
    for step in range(num_steps):
        plan = balancer.plan_at(step)
        sizes = StepSizes(plan.plan_id, step, plan.sizes)
        own = plan.sizes[balancer.rank]
        balancer.begin_batch(sizes, fetch_s=0.0, stall_s=0.0, local=own, remote=0)
        balancer.take_step()
        spent = per_sample[balancer.rank] * own
        now[0] += spent
        balancer.gradient_arrived(blocked_s=0.0)
        balancer.computing_ended()
        slowest = max(a * b for a, b in zip(per_sample, plan.sizes, strict=True))
        now[0] += slowest - spent
        waits.add(slowest - spent)
        balancer.step_ended()


class Hosts:
    """Names the hosts of the threads that are ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        monkeypatch.setattr("loft_hvd.balance.limits.own_device", self._own_device)

    def _own_device(self) -> tuple[str, str, bool, int]:
        rank = int(threading.current_thread().name.rsplit("-", 1)[1])
        return self.names[rank], "CPU", False, 0

    def run(
        self, hosts: list[str], num_steps: int, state: dict[str, Any] | None, **options: Any
    ) -> list[loft.Balancer]:
        self.names = hosts

        def work(transport: LocalTransport) -> loft.Balancer:
            now = [0.0]
            balancer = loft.Balancer(
                options.get("total", 96),
                options.get("policy", "loft"),
                max_batch=options.get("max_batch"),
                interval=10,
                transport=transport,
                clock=lambda: now[0],
            )
            if state is not None:
                balancer.load_state_dict(json.loads(json.dumps(state)))
            train(balancer, hosts, num_steps, now)
            return balancer

        return run_ranks(len(hosts), work)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch)


@pytest.mark.parametrize("policy", ["loft", "lbbsp-cpu:last"])
@pytest.mark.parametrize("saved_by", [0, 2])
def test_a_device_that_returns_is_known_in_a_world_of_another_size(
    hosts: Hosts, policy: str, saved_by: int
) -> None:
    first = hosts.run(["one", "slow", "two"], 60, None, policy=policy)
    assert first[0].plan.sizes[1] < 20
    state = first[saved_by].state_dict()  # any rank's: rank 0 may have been lost
    later = hosts.run(["two", "one", "three", "slow"], 20, state, policy=policy)
    history = later[0].history
    assert history[0].sizes == (24, 24, 24, 24)
    assert len(history) > 1, "the first interval is enough"
    assert history[1].sizes[3] < 15
    assert all(balancer.history == history for balancer in later)


def test_in_the_same_world_a_run_goes_on_with_its_plan(hosts: Hosts) -> None:
    names = ["one", "slow", "two"]
    first = hosts.run(names, 60, None)
    again = hosts.run(names, 1, first[0].state_dict())
    assert again[0].history == first[0].history
    moved = hosts.run(["slow", "one", "two"], 1, first[0].state_dict())
    assert moved[0].plan.sizes == (32, 32, 32)  # sizes belong to devices, not to rank numbers


@pytest.mark.parametrize("num_steps", range(16, 26))
def test_a_state_saved_while_a_plan_is_on_its_way_goes_on(hosts: Hosts, num_steps: int) -> None:
    """With an interval of 10 steps, plans are decided at the end of steps 10 and 20."""
    names = ["one", "slow", "two"]
    first = hosts.run(names, num_steps, None, policy="lbbsp-cpu:last")
    again = hosts.run(names, 60, first[0].state_dict(), policy="lbbsp-cpu:last")
    assert all(balancer.history == again[0].history for balancer in again)
    assert again[0].plan.sizes[1] < 20


def test_a_plan_beyond_a_cap_found_since_does_not_come_back(hosts: Hosts) -> None:
    names = ["one", "slow", "two"]
    first = hosts.run(names, 60, None)
    most = max(first[0].plan.sizes)
    state = first[0].state_dict()
    again = hosts.run(names, 20, state, max_batch=most - 1)
    assert again[0].history[0].sizes == (32, 32, 32)
    assert max(max(plan.sizes) for plan in again[0].history) < most
    other = hosts.run(names, 1, state, total=48)
    assert other[0].plan.sizes == (16, 16, 16)


def test_a_plan_on_its_way_beyond_a_cap_found_since_is_dropped(hosts: Hosts) -> None:
    names = ["one", "slow", "two"]
    state = hosts.run(names, 20, None)[0].state_dict()
    made = state["controller"]["history"]
    assert len(made) == len(state["plans"]) + 1
    most = max(made[-1]["sizes"])
    again = hosts.run(names, 60, state, max_batch=most - 1)
    assert max(max(plan.sizes) for plan in again[0].history) < most
    others = hosts.run(names, 60, state)
    assert others[0].history[len(state["plans"])].sizes == tuple(made[-1]["sizes"])


def test_only_rank_0_explains_and_the_others_say_so(hosts: Hosts) -> None:
    balancers = hosts.run(["one", "slow", "two"], 40, None)
    assert "policy loft" in balancers[0].explain()
    assert "models and reasons are rank 0's" in balancers[1].explain()
    assert "rank 0's" not in balancers[0].explain()

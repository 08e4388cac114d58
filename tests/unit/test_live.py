"""The live plan: ranks that do not train the same run find out, and when they exchange times."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.balance.controller import SETTLE_STEPS, Controller, Decision
from loft_hvd.balance.interval import SUM, SUMS, Head, Interval
from loft_hvd.balance.live import IntervalWorker, Schedule, TimesExchange, check_same_run
from loft_hvd.balance.policy import Policy, Proposal
from loft_hvd.errors import MismatchError
from loft_hvd.runlog import RunLog, find_entries
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.live import Run

INTERVAL = 5


def make(transport: LocalTransport, *, seed: int = 0) -> tuple[loft.Balancer, loft.DataLoader]:
    balancer = loft.Balancer(12, "report", interval=INTERVAL, transport=transport)
    return balancer, loft.DataLoader(TensorDataset(torch.arange(240)), balancer, seed=seed)


def train(balancer: loft.Balancer, batches: Any, *, skip: int | None = None) -> None:
    """Train as an optimizer would; ``skip`` leaves one batch out."""
    for number, _ in enumerate(batches):
        if number != skip:
            balancer.take_step()
            balancer.step_ended()


def test_a_rank_with_other_samples_is_named_after_the_first_step() -> None:
    def work(transport: LocalTransport) -> None:
        balancer, loader = make(transport, seed=int(transport.rank == 2))
        train(balancer, loader)

    with pytest.raises(MismatchError, match=r"batch of the first step differs on ranks \[2\]"):
        run_ranks(3, work)


def test_a_rank_that_skips_a_batch_is_named_at_the_next_exchange() -> None:
    def work(transport: LocalTransport) -> None:
        balancer, loader = make(transport)
        train(balancer, loader, skip=2 if transport.rank == 1 else None)

    with pytest.raises(MismatchError, match=r"ranks \[1\] have trained on other batches .*step 4"):
        run_ranks(3, work)


def test_a_state_that_only_one_rank_has_loaded_is_found_at_the_first_step() -> None:
    def work(transport: LocalTransport) -> None:
        balancer, loader = make(transport)
        if transport.rank == 0:
            balancer.load_state_dict(balancer.state_dict() | {"num_steps": 7})
        train(balancer, loader)

    with pytest.raises(MismatchError, match=r"number of steps taken differs on ranks \[0\]"):
        run_ranks(3, work)


def test_ranks_that_train_the_same_run_agree_over_epochs_and_loaded_states() -> None:
    def work(transport: LocalTransport) -> int:
        balancer, loader = make(transport)
        train(balancer, loader)
        loader.set_epoch(1)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
            balancer.take_step()
            balancer.step_ended()
        states = loader.state_dict(), balancer.state_dict()
        balancer, loader = make(transport)
        loader.load_state_dict(states[0])
        balancer.load_state_dict(states[1])
        train(balancer, loader)
        return loader.step_sizes.step

    assert run_ranks(3, work) == [39, 39, 39]


@pytest.mark.parametrize("field", ["num_steps", "plan_id"])
def test_a_rank_at_another_step_or_plan_is_named(field: str) -> None:
    def work(transport: LocalTransport) -> None:
        exchange = TimesExchange(Channel(transport, "test"))
        is_odd = int(transport.rank == 1)
        steps, plan = (8 + is_odd, 3) if field == "num_steps" else (8, 3 + is_odd)
        exchange.send_times(np.zeros(len(SUMS)), head=Head(steps, plan, 5, 9, 5), uses=(0.0, 0.0))
        report = exchange.receive_times()
        assert report is not None
        check_same_run(report)

    with pytest.raises(MismatchError, match=r"rank 1 is at step [89] with plan [34], but rank 0"):
        run_ranks(3, work)


@pytest.mark.parametrize(
    ("before", "step_s", "interval"),
    [(20, 1e-3, 80), (80, 1e-3, 320), (20_000, 1e-3, 30_000), (20, 1.0, 30), (400, 1.0, 30)],
)
def test_an_interval_has_at_most_four_times_the_steps_of_the_one_before(
    before: int, step_s: float, interval: int
) -> None:
    schedule = Schedule(None)
    schedule.follow(0, before)
    sums = np.zeros(len(SUMS))
    sums[[SUM["steps"], SUM["wall_s"]]] = 17, 17 * step_s
    assert schedule.propose(sums, num_passes=1) == interval


def trained(transport: LocalTransport, num_steps: int) -> loft.Balancer:
    """Train so many steps with an interval of 8, whose times are summed at the sixth."""
    run = Run(transport, policy="report", interval=8)
    for _ in range(num_steps):
        run.step()
    return run.balancer


@pytest.mark.parametrize(("num_steps", "counted"), [(8, 6 - SETTLE_STEPS), (16, 8)])
def test_times_are_of_the_steps_up_to_two_before_the_end_of_an_interval(
    num_steps: int, counted: int
) -> None:
    def work(transport: LocalTransport) -> list[int]:
        return [times.steps for times in trained(transport, num_steps).times]

    assert run_ranks(2, work) == [[counted] * 2] * 2


@pytest.mark.parametrize(("num_steps", "counted"), [(5, 5), (6, 6), (7, 6)])
def test_an_epoch_that_ends_within_the_first_interval_tells_its_times_once(
    num_steps: int, counted: int
) -> None:
    """With 7 steps its times are under way; the step behind their sums is no interval."""

    def work(transport: LocalTransport) -> list[int]:
        balancer = trained(transport, num_steps)
        balancer.end_epoch()
        return [times.steps for times in balancer.times]

    assert run_ranks(2, work) == [[counted - SETTLE_STEPS] * 2] * 2


class Waiting(Policy):
    """Decides once it is told to; says whether it was."""

    name = "waiting"

    def __init__(self) -> None:
        self.told = threading.Event()
        self.was_told: list[bool] = []

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        self.was_told.append(self.told.wait(10))
        return Proposal((40, 24), "as told")


def test_training_goes_on_while_rank_0_decides() -> None:
    def work(transport: LocalTransport) -> tuple[list[bool], list[tuple[int, ...]]]:
        policy = Waiting()
        run = Run(transport, policy=policy, interval=INTERVAL)
        for _ in range(INTERVAL):
            run.step()
        policy.told.set()  # after the end of the step in which the times were read
        for _ in range(4 * INTERVAL):
            run.step()
        return policy.was_told, run.sizes

    (was_told, sizes), (_, others_sizes) = run_ranks(2, work)
    assert all(was_told)
    assert sizes == others_sizes
    assert sizes[-1] == (40, 24)


class Broken(Policy):
    """Has a mistake."""

    name = "broken"

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        raise ZeroDivisionError("a mistake in the policy")


def test_a_mistake_in_a_policy_ends_training_at_the_step_of_its_plan() -> None:
    num_steps = [0, 0]

    def work(transport: LocalTransport) -> None:
        run = Run(transport, policy=Broken(), interval=INTERVAL)
        for _ in range(3 * INTERVAL):
            run.step()
            num_steps[transport.rank] += 1

    with pytest.raises(ZeroDivisionError, match="a mistake in the policy"):
        run_ranks(2, work)
    assert num_steps[0] == INTERVAL


class Noting(loft.Loft):
    """LOFT, with a record of what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Interval, int]] = []

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        self.asked.append((interval, first_step))
        return super().propose(interval, first_step=first_step)


@pytest.mark.parametrize("interval", [5, 20])
def test_plans_are_those_of_a_controller_that_decides_at_once(interval: int) -> None:
    def work(transport: LocalTransport) -> tuple[list[tuple[Interval, int]], list[Decision]]:
        policy = Noting()
        run = Run(transport, policy=policy, interval=interval)
        for _ in range(12 * interval):
            run.step()
        controller = run.balancer._live._controller
        assert controller is not None
        return policy.asked, controller.history

    asked, history = run_ranks(2, work)[0]
    at_once = Controller(64, 2)
    at_once.warm_up([False, False])
    for each, first_step in asked:
        at_once.observe(each)
        at_once.decide(first_step)
    assert history == at_once.history
    assert len(history) > 1


class Talkative(Policy):
    """Says why it wanted other sizes only once it is told to."""

    name = "talkative"

    def __init__(self) -> None:
        self.told = threading.Event()
        self.was_told: list[bool] = []
        self.num_asked = 0

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        self.num_asked += 1
        return None if self.num_asked == 1 else Proposal((40, 24), "at once")

    def explain(self) -> list[str]:
        if self.num_asked == 2:
            self.was_told.append(self.told.wait(5))
        return ["policy talkative"]


def test_ranks_take_a_plan_before_its_reasons_are_logged(tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> tuple[tuple[int, ...], list[bool]]:
        policy = Talkative()
        run = Run(transport, policy=policy, interval=INTERVAL, log_dir=tmp_path)
        while run.balancer.plan.plan_id == 0 and len(run.sizes) < 3 * INTERVAL - 1:
            run.step()
        policy.told.set()  # a plan has come
        run.balancer._live.settle()
        return run.balancer.plan.sizes, policy.was_told

    (sizes, was_told), (others_sizes, _) = run_ranks(2, work)
    assert was_told == [True]
    assert sizes == others_sizes == (40, 24)
    lines = list(find_entries(tmp_path, "explain"))
    assert [line["step"] for line in lines] == [INTERVAL, 2 * INTERVAL]
    assert "(at once)\npolicy talkative" in lines[-1]["text"]


class BrokenOnce(Policy):
    """Has a mistake that shows the first time."""

    name = "broken-once"

    def __init__(self) -> None:
        self.num_asked = 0

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        self.num_asked += 1
        if self.num_asked == 1:
            raise ZeroDivisionError("a mistake in the policy")
        return None


def broken_run(transport: LocalTransport, log_dir: Path) -> tuple[Run, dict[str, Any]]:
    """Return a run whose policy has failed, beside training, and its state at the start."""
    run = Run(transport, policy=BrokenOnce(), interval=INTERVAL, log_dir=log_dir)
    saved = run.balancer.state_dict()
    for _ in range(INTERVAL):
        run.step()
    run.balancer.explain()  # waits for what is under way
    return run, saved


def test_the_next_exchange_is_told_in_the_steps_that_plans_count() -> None:
    transport = LocalWorld(1).transport(0)
    balancer = loft.Balancer(4, "report", transport=transport, interval=3)
    layer = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer = loft.DistributedOptimizer(
        sgd, transport=transport, balancer=balancer, backward_passes_per_step=4
    )
    batches = iter(loft.DataLoader(TensorDataset(torch.ones(112, 1)), balancer))
    told = []
    for at in range(28):
        told.append(balancer.explain().splitlines()[-1])
        layer(next(batches)[0]).sum().backward()
        if at % 4 == 3:
            optimizer.step()
    says = "(steps are batches here, 4 of them an optimizer step)"
    assert told[:12] == [f"no times yet: ranks exchange them at step 12 {says}"] * 12
    assert told[24:] == [f"ranks exchange times next at step 36 {says}"] * 4


def test_a_mistake_in_a_policy_is_logged_and_no_state_is_saved_over_it(tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> None:
        run, _ = broken_run(transport, tmp_path)
        if transport.rank == 0:
            [fault] = find_entries(tmp_path, "fault")
            assert (fault["error"], fault["step"]) == ("ZeroDivisionError", INTERVAL)
            for _ in range(2):  # a script that goes on all the same meets it again
                with pytest.raises(ZeroDivisionError, match="a mistake in the policy"):
                    run.balancer.state_dict()
        for _ in range(INTERVAL):
            run.step()

    with pytest.raises(ZeroDivisionError, match="a mistake in the policy"):
        run_ranks(2, work)
    assert len(list(find_entries(tmp_path, "fault"))) == 1


@pytest.mark.parametrize("how", ["load_state_dict", "begin_world"])
def test_a_mistake_from_before_a_state_or_world_is_forgotten(how: str, tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> int:
        run, saved = broken_run(transport, tmp_path)
        if how == "load_state_dict":
            run.balancer.load_state_dict(saved)
        else:
            run.balancer.begin_world()
        run.sizes.clear()
        for _ in range(3 * INTERVAL):
            run.step()
        run.balancer.state_dict()
        return len(run.sizes)

    assert run_ranks(2, work) == [3 * INTERVAL] * 2
    assert [fault["error"] for fault in find_entries(tmp_path, "fault")] == ["ZeroDivisionError"]


def test_a_new_world_ends_the_thread_of_the_old_one() -> None:
    def work(transport: LocalTransport) -> tuple[int, int]:
        run = Run(transport, interval=INTERVAL)
        for _ in range(INTERVAL):
            run.step()
        run.balancer._live.settle()
        barrier.wait(10)
        before = plan_threads()
        barrier.wait(10)
        run.balancer.begin_world()
        barrier.wait(10)
        return before, plan_threads()

    def plan_threads() -> int:
        return sum("plan" in each.name for each in threading.enumerate() if each not in others)

    others, barrier = set(threading.enumerate()), threading.Barrier(2)
    assert run_ranks(2, work) == [(2, 0)] * 2


def test_a_plan_that_is_dropped_at_work_keeps_nobody_waiting() -> None:
    """It may be dropped in any thread, by a garbage collection in the midst of anything."""

    def decide() -> tuple[None, Callable[[], None]]:
        threads.append(threading.current_thread())
        is_busy.set()
        may_end.wait(30.0)
        return None, lambda: None

    threads: list[threading.Thread] = []
    is_busy, may_end = threading.Event(), threading.Event()
    beside = IntervalWorker(RunLog(None))
    beside.begin(decide)
    assert is_busy.wait(10.0)
    began = time.monotonic()
    del beside
    took_s = time.monotonic() - began
    may_end.set()
    threads[0].join(10.0)
    assert not threads[0].is_alive()
    assert took_s < 5.0


ENDLESS = """
import threading
from loft_hvd.balance import live
from loft_hvd.balance.policy import Policy
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.live import Run

class Endless(Policy):
    name = "endless"
    def propose(self, interval, *, first_step):
        asked.set()
        threading.Event().wait()

def work(transport):
    run = Run(transport, policy=Endless(), interval=5)
    runs.append(run)
    for _ in range(5):
        run.step()

live._DRAIN_S = 0.2
asked, runs = threading.Event(), []
run_ranks(2, work)
assert asked.wait(10)
print("trained")
"""


def test_a_policy_that_never_ends_does_not_keep_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=40, check=True
    )
    assert ended.stdout == "trained\n"
    assert "loft-plan has not ended within 0.2 s" in ended.stderr


class Once(Policy):
    """Wants other sizes the second time it is asked, and never again."""

    name = "once"

    @dataclass
    class State:
        """What it has done."""

        num_asked: int = 0

    def __init__(self) -> None:
        self.state = self.State()

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        self.state.num_asked += 1
        return Proposal((40, 24), "at once") if self.state.num_asked == 2 else None


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_plan_that_was_on_its_way_when_a_state_was_saved_arrives(is_saved: bool) -> None:
    def work(transport: LocalTransport) -> list[tuple[int, ...]]:
        run = Run(transport, policy=Once(), interval=INTERVAL)
        for _ in range(2 * INTERVAL):
            run.step()
        sizes = run.sizes
        if is_saved:
            assert run.balancer.plan.plan_id == 0
            state = json.loads(json.dumps(run.balancer.state_dict()))
            run = Run(transport, state, policy=Once(), interval=INTERVAL)
        for _ in range(2 * INTERVAL):
            run.step()
        return sizes + run.sizes if is_saved else run.sizes

    ranks = run_ranks(2, work)
    assert ranks[0] == ranks[1]
    at = ranks[0].index((40, 24))
    assert ranks[0] == [(32, 32)] * at + [(40, 24)] * (4 * INTERVAL - at)
    assert at < (4 if is_saved else 3) * INTERVAL  # with the next interval


def test_saying_who_is_held_waits_for_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    balancer = loft.Balancer(64, "loft", transport=LocalWorld(1).transport(0))
    monkeypatch.setattr(balancer._live._beside, "wait", lambda: pytest.fail("a step waits"))
    balancer.hold(())


def test_two_balancers_of_equal_options_exchange_times_side_by_side() -> None:
    is_ahead = threading.Event()

    def work(transport: LocalTransport) -> None:
        pair = [loft.Balancer(8, "report", interval=3, transport=transport) for _ in range(2)]
        for step in range(5):
            if transport.rank == 1 and step == 1:
                assert is_ahead.wait(20)
            for each in pair:
                with each.step(4):
                    each.take_step()
                    each.gradient_arrived(blocked_s=0.0)
                    each.step_ended()
            if step == 1:
                is_ahead.set()  # rank 0 has sent both times

    run_ranks(2, work)


def test_a_report_ends_with_the_sizes_that_it_would_choose_and_what_they_would_save() -> None:
    def work(transport: LocalTransport) -> str:
        run = Run(transport, policy="report")
        for _ in range(45):
            run.step()
        return run.balancer.explain()

    text = run_ranks(2, work)[0]
    told = re.search(
        r'policy="loft" would choose \[(\d+), (\d+)\], for a step of ([\d.]+) ms in place of '
        r"([\d.]+) ms, ([\d.]+)% less",
        text,
    )
    assert told is not None, text
    # 32 samples of 10 and 30 ms: 960 ms; 48 and 16 take 480 on both.
    assert (int(told[1]), int(told[2])) == (48, 16)
    assert float(told[3]) == pytest.approx(480, rel=0.03)
    assert float(told[4]) == pytest.approx(960, rel=0.01)
    assert float(told[5]) == pytest.approx(50, abs=2)


def test_a_report_of_even_ranks_would_choose_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.live.SECONDS", (1e-2, 1e-2))

    def work(transport: LocalTransport) -> str:
        run = Run(transport, policy="report")
        for _ in range(45):
            run.step()
        return run.balancer.explain()

    assert "no others would surely make a step shorter" in run_ranks(2, work)[0]

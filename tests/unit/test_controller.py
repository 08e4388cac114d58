"""Laws of the controller: what it believes, when it acts, what it takes back, what it repeats."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from loft_hvd.balance.controller import Controller, write_decisions
from loft_hvd.balance.interval import (
    COMPUTE,
    COMPUTE_ERROR,
    FETCH,
    FETCH_ERROR,
    LOCAL,
    OTHER,
    REMOTE,
    SIZE,
    SKEW,
    STALL,
    STEPS,
    WAIT,
)
from loft_hvd.balance.latency import StepModel
from loft_hvd.balance.loft import Loft
from loft_hvd.balance.policies import Replay
from loft_hvd.errors import ArgumentError, PlanError
from tests.support.clusters import drive, measure, observe, random_model

UNEVEN = StepModel.build(4, compute_s=np.array([1, 1, 2, 4]) * 1e-3, aggregate_s=0.01)
EVEN = StepModel.build(4, compute_fixed_s=0.01, compute_s=1e-3)


def rows_of(
    model: StepModel, controller: Controller, noise: float = 0.0
) -> tuple[npt.NDArray[np.float64], float]:
    return measure(model, controller.plan.sizes, seed=[0], noise=noise, steps=20)


def test_it_starts_equal_and_acts_after_the_fit() -> None:
    controller = Controller(256, 4)
    assert controller.plan.sizes == (64, 64, 64, 64)
    assert controller.decide(20) is None, "nothing was observed"
    rows, step_s = rows_of(UNEVEN, controller)
    observe(controller, rows, step=19, step_s=step_s)
    plan = controller.decide(20)
    assert plan is not None
    assert plan.first_step == 20
    assert UNEVEN.step_s(plan.sizes) < 0.6 * UNEVEN.step_s([64] * 4)


def test_an_interval_is_used_once_and_an_old_plan_s_not_at_all() -> None:
    controller = Controller(256, 4)
    rows, step_s = rows_of(UNEVEN, controller)
    observe(controller, rows, step=19, step_s=step_s)
    assert controller.decide(40) is not None
    assert controller.decide(41) is None
    observe(controller, rows, step=39, step_s=step_s)  # measured before the plan came into force
    assert controller.decide(60) is None


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        (COMPUTE, np.nan, "not finite"),
        (STALL, np.inf, "not finite"),
        (COMPUTE, -1.0, "negative"),
        (COMPUTE, 1e9, "out of range"),
        (LOCAL, 1e6, "out of range"),
        (WAIT, 1e16, "out of range"),
        (FETCH_ERROR, 1e20, "out of range"),
        (COMPUTE_ERROR, 1e200, "out of range"),  # its square is no number
        (STEPS, 1e16, "out of range"),
    ],
)
def test_impossible_reports_are_discarded_and_counted(
    column: int, value: float, reason: str
) -> None:
    controller = Controller(256, 4)
    rows, step_s = rows_of(UNEVEN, controller)
    rows[1, column] = value
    observe(controller, rows, step=19, step_s=step_s)
    plan = controller.decide(20)
    assert controller.discarded == {(1, reason): 1}
    assert f"rank 1: 1 reports discarded ({reason})" in controller.explain()
    assert plan is not None
    assert plan.sizes[1] == 64, "a rank without usable times keeps its equal share"


def test_the_largest_numbers_that_are_believed_leave_a_state_that_can_be_read() -> None:
    largest = {WAIT: 1e15, OTHER: 1e15, STEPS: 1e15, SKEW: 1e15}
    largest |= {FETCH: 36_000, FETCH_ERROR: 36_000, COMPUTE_ERROR: 3_600}
    controller = Controller(256, 4)
    for number in range(6):
        rows, step_s = rows_of(UNEVEN, controller)
        rows[1, list(largest)] = list(largest.values())
        observe(controller, rows, step=20 * number + 19, step_s=step_s)
        controller.decide(20 * number + 20)
    assert not controller.discarded
    state = controller.state_dict()
    again = Controller(256, 4)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert again.state_dict() == state


def test_a_batch_of_another_size_is_not_believed() -> None:
    controller = Controller(256, 4)
    rows, step_s = rows_of(UNEVEN, controller)
    rows[2, [SIZE, LOCAL]] = 32
    rows[2, REMOTE] = 0
    observe(controller, rows, step=19, step_s=step_s)
    assert controller.discarded == {(2, "not the planned size"): 1}


def test_equal_ranks_keep_equal_sizes() -> None:
    for seed in range(10):
        plans = drive(lambda _: EVEN, Controller(256, 4), intervals=40, seed=seed)
        times = [EVEN.step_s(sizes) for sizes in plans]
        assert np.mean(times) <= 1.01 * EVEN.step_s([64] * 4), f"seed {seed}"


def test_a_batch_at_most_doubles_what_was_proven() -> None:
    model = StepModel.build(4, compute_s=np.array([1, 16, 16, 16]) * 1e-4)
    plans = drive(lambda _: model, Controller(256, 4, min_batch=1), intervals=12, seed=0)
    largest = 64
    for sizes in plans:
        assert max(sizes) <= 2 * largest
        largest = max(largest, *sizes)
    assert plans[-1][0] > 128, "in the end the fast rank has more than twice its share"


def test_a_plan_that_is_worse_than_equal_sizes_lasts_one_interval() -> None:
    controller = Controller(256, 4)
    sizes, undone = controller.plan.sizes, 0
    for number in range(20):
        rows, step_s = measure(EVEN, sizes, seed=[number], noise=0.0, steps=20)
        rows[2, [FETCH, STALL, COMPUTE]] *= 0.5  # it says that it is twice as fast as it is
        was_worse = sizes != (64,) * 4 and step_s > 1.02 * EVEN.step_s([64] * 4)
        observe(controller, rows, step=20 * number + 19, step_s=step_s)
        plan = controller.decide(20 * number + 20)
        if was_worse:
            assert plan is not None
            assert plan.sizes == (64,) * 4
            undone += 1
        sizes = sizes if plan is None else plan.sizes
    assert undone == 2
    assert sizes == (64,) * 4
    assert "rank 2 has at most 64 samples for" in controller.explain()


def test_first_steps_of_a_plan_do_not_count() -> None:
    controller = Controller(256, 4, settle_steps=3)
    drive(lambda _: UNEVEN, controller, intervals=1, seed=0)
    assert [controller.is_settled(step) for step in (0, 19, 20, 22, 23)] == [
        True,
        True,
        False,
        False,
        True,
    ]


def drifting_rates(number: int) -> StepModel:
    rates = np.random.default_rng(number // 6).uniform(1e-3, 4e-3, 4)
    return StepModel.build(4, compute_s=rates)


@pytest.mark.parametrize("max_sizes", [1, 3, 8])
def test_sizes_are_few_where_they_are_costly(max_sizes: int) -> None:
    controller = Controller(256, 4, max_sizes=max_sizes)
    plans = drive(drifting_rates, controller, intervals=60, seed=0)
    assert {sum(sizes) for sizes in plans} == {256}
    assert max(len(set(column)) for column in np.array(plans).T.tolist()) <= max_sizes


def test_a_rank_whose_sizes_are_used_up_goes_on_with_those_it_has_had() -> None:
    def come_and_go(number: int) -> StepModel:
        slow = 1.0 + number // 10 % 2
        return StepModel.build(4, compute_s=np.array([1, 1, 2, 2 * slow]) * 1e-3)

    plans = drive(come_and_go, Controller(256, 4, max_sizes=3), intervals=160, seed=0)
    assert [len(set(column)) for column in np.array(plans[:80]).T.tolist()] == [3] * 4
    assert len(set(plans[80:])) == 2, "one for each state of the cluster"
    later = range(80, 160)
    taken = np.mean([come_and_go(number).step_s(plans[number]) for number in later])
    free = drive(come_and_go, Controller(256, 4), intervals=160, seed=0)
    assert taken <= 1.02 * np.mean([come_and_go(number).step_s(free[number]) for number in later])


def test_a_state_is_json_and_goes_on_as_it_was() -> None:
    model = random_model(7, 4, None)
    first, second = Controller(256, 4), Controller(256, 4)
    drive(lambda _: model, first, intervals=3, seed=0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.history == first.history
    for controller in (first, second):
        for number in range(3, 12):
            rows, step_s = measure(
                model, controller.plan.sizes, seed=[number], noise=0.05, steps=20
            )
            observe(controller, rows, step=20 * number + 19, step_s=step_s)
            controller.decide(20 * number + 20)
    assert second.plan.sizes == first.plan.sizes


def resumed_under_a_lower_cap() -> tuple[StepModel, Controller]:
    """Return a controller with the state of another one, whose sizes for rank 3 it may not give."""
    model = StepModel.build(4, compute_s=np.array([1, 1, 1, 3]) * 1e-3)
    first = Controller(256, 4)
    drive(lambda _: model, first, intervals=10, seed=0)
    second = Controller(256, 4, max_batch=[None, None, None, 48])
    second.load_state_dict(first.state_dict())
    return model, second


def test_no_size_that_a_state_remembers_is_put_back_above_a_new_cap() -> None:
    model, second = resumed_under_a_lower_cap()
    rows, step_s = rows_of(model, second)
    observe(second, rows, step=219, step_s=10 * step_s)  # worse than equal sizes were
    plan = second.decide(220)
    assert plan is not None
    assert "undone" in second.history[-1].reason
    assert second.history[-1].reason.endswith("; no rank above its cap")
    assert (plan.sizes[3], sum(plan.sizes)) == (48, 256)
    rows, step_s = rows_of(model, second)
    observe(second, rows, step=239, step_s=20 * step_s)  # worse still, but none are nearer
    assert second.decide(240) is None
    assert second.state_dict()["learnt"]["num_undone"] == 1


def test_a_plan_that_is_worse_and_may_not_be_undone_is_not_proven() -> None:
    model, second = resumed_under_a_lower_cap()
    assert isinstance(second.policy, Loft)
    state = second.policy.state
    for step, factor in ((219, 10), (239, 5)):  # undone, then not as bad, but worse than equal ones
        state.proven = [64] * 4
        rows, step_s = rows_of(model, second)
        observe(second, rows, step=step, step_s=factor * step_s)
        second.decide(step + 1)
    assert second.plan.sizes[3] == 48, "the nearest to equal sizes"
    assert state.proven == [64] * 4
    observe(second, rows, step=259, step_s=step_s)
    second.decide(260)
    assert state.proven[:3] != [64] * 3, "it is no worse any more"


def test_a_state_of_another_world_is_refused() -> None:
    with pytest.raises(PlanError, match=r"world_size=4 instead of 8, policy='loft' instead"):
        Controller(256, 8, "uniform").load_state_dict(Controller(256, 4).state_dict())


@pytest.mark.parametrize("part", ["history", "learnt", "rows", "valid"])
def test_a_state_that_is_not_whole_is_named_and_changes_nothing(part: str) -> None:
    first, second = Controller(256, 4), Controller(256, 4)
    drive(lambda _: UNEVEN, first, intervals=3, seed=0)
    state, before = json.loads(json.dumps(first.state_dict())), second.state_dict()
    if part == "history":
        del state["history"][1]["sizes"]
    elif part == "learnt":
        state["learnt"]["past"]["fetch"]["num_rows"] = "soon"
    else:
        del state["learnt"]["past"][part]
    where = {
        "history": r"controller.history\[1\] needs keys",
        "learnt": r"loft.past.fetch.num_rows",
    }.get(part, r"loft.past needs keys \['fetch', .*, but got \['")
    with pytest.raises(ArgumentError, match=where):
        second.load_state_dict(state)
    assert second.state_dict() == before


@pytest.mark.parametrize("at", [1, 4, 11])
def test_a_loaded_state_is_the_one_saved_and_goes_on_alike(at: int) -> None:
    model = StepModel.build(2, compute_s=np.array([1e-2, 3e-2]))
    first = Controller(64, 2)
    drive(lambda _: model, first, intervals=at, seed=0)
    state = json.dumps(first.state_dict())
    second = Controller(64, 2)
    second.load_state_dict(json.loads(state))
    assert json.dumps(second.state_dict()) == state
    for number in range(5):
        rows, step_s = measure(model, first.plan.sizes, seed=[number], noise=0.05, steps=20)
        for controller in (first, second):
            step = 20 * (at + number) + 19
            observe(controller, rows, step=step, step_s=step_s)
            controller.decide(step + 1)
    assert second.state_dict() == first.state_dict()


def test_a_replay_repeats_every_plan(tmp_path: Path) -> None:
    first = Controller(256, 4)
    plans = drive(lambda _: UNEVEN, first, intervals=15, seed=0)
    assert len(set(plans)) > 1
    write_decisions(tmp_path / "plans.jsonl", first.history)
    second = Controller(256, 4, Replay(tmp_path / "plans.jsonl"))
    again = drive(lambda _: EVEN, second, intervals=15, seed=1)
    assert again == plans
    assert [made.plan for made in second.history] == [made.plan for made in first.history]


def test_a_broken_replay_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "plans.jsonl").write_text('{"first_step": 0}\n')
    with pytest.raises(PlanError, match=r"plans.jsonl.*first_step and sizes"):
        Replay(tmp_path / "plans.jsonl")


def test_report_explains_and_never_changes_a_size() -> None:
    controller = Controller(256, 4, "report")
    plans = drive(lambda _: UNEVEN, controller, intervals=8, seed=0)
    assert set(plans) == {(64, 64, 64, 64)}
    assert "rank 3: fetch 0.00 ms" in controller.explain(verbose=True)
    assert "rank 3: fetch" not in controller.explain()
    assert "only reports" in controller.explain()


def test_an_impossible_batch_fails_at_the_start() -> None:
    with pytest.raises(PlanError, match="backward_passes_per_step=2"):
        Controller(256, 4, max_batch=40)
    with pytest.raises(ArgumentError, match="2 entries for 4 ranks"):
        Controller(256, 4, max_batch=[64, 64])


def says_next(controller: Controller) -> str:
    """Return on which times the policy is said to decide next."""
    line = controller.explain().splitlines()[-1]
    told = re.fullmatch("the policy decides next on times measured (.*)", line)
    assert told is not None, line
    return told[1]


def test_the_times_that_the_policy_is_said_to_decide_on_next_are_those_it_is_asked_on() -> None:
    controller = Controller(256, 4)
    assert says_next(controller) == "with plan 0"
    rows, step_s = rows_of(UNEVEN, controller)
    observe(controller, rows, step=19, step_s=step_s)
    controller.decide(40)
    assert says_next(controller) == "with plan 1"
    observe(controller, rows, step=39, step_s=step_s)  # the plan is on its way
    assert controller.decide(60) is None
    assert says_next(controller) == "with plan 1"
    controller.quarantine.hold([3])
    for step in (59, 79):
        rows, step_s = rows_of(UNEVEN, controller)
        observe(controller, rows, step=step, step_s=step_s)
        controller.decide(step + 1)
        assert says_next(controller) == "after the quarantine"
    controller.quarantine.hold([])
    assert says_next(controller) == "after the quarantine"
    observe(controller, rows, step=99, step_s=step_s)
    controller.decide(100)
    assert says_next(controller) == "with plan 3"


def test_times_before_a_plan_that_no_rank_had_when_a_run_was_saved_are_not_decided_on() -> None:
    first, second = Controller(256, 4), Controller(256, 4)
    drive(lambda _: UNEVEN, first, intervals=1, seed=0)
    second.load_state_dict(first.state_dict())
    second.send_again_after(0)
    assert says_next(second) == "with plan 1"


def test_a_policy_that_makes_no_plans_is_not_said_to_decide() -> None:
    assert "decides next" not in Controller(256, 4, "uniform").explain()


def test_nothing_to_win_is_said() -> None:
    controller = Controller(256, 4)
    drive(lambda _: EVEN, controller, intervals=6, seed=0)
    assert "nothing to win" in controller.explain()

"""The verdict of a run log: the right rank, the right cause, the weightiest first."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from loft_hvd.balance.interval import RankTimes
from loft_hvd.errors import DataError
from loft_hvd.pipeline.suspicion.report import NotFinite, SameData, WorkerReport
from loft_hvd.report.entries import read_lines
from loft_hvd.report.page import render_page
from loft_hvd.report.text import render_text
from loft_hvd.report.verdict import judge
from loft_hvd.runlog import read_run_log

LOGS = Path(__file__).parent / "logs"
# Written by ``report_mode.py KIND loft`` on 3 ranks, the faulty worker's on 5, on two cores.
PREPARED = {
    "slow_cpu": "Rank 2 costs 33% of a step by computing",
    "slow_link": "Plan 1 made steps 41% shorter than the first sizes did (104 ms, now 61.3 ms); "
    "rank 2 cost 46% by fetching, and no rank is slow now.",
    "faulty_worker": "Rank 2 sends gradients that are off",
}


def times(step: int, *ranks: dict[str, float], step_s: float = 0.4) -> dict[str, Any]:
    """Return a line of times, of ranks with these seconds of stall, compute and queue."""
    made = [
        RankTimes(
            rank,
            steps=20,
            samples=8,
            local=8,
            remote=0,
            fetch_s=each.get("stall_s", 0.0),
            stall_s=each.get("stall_s", 0.0),
            compute_s=each.get("compute_s", 0.1),
            queued_s=each.get("queued_s", 0.0),
            wait_s=0.0,
            other_s=0.0,
            wall_s=step_s,
        )
        for rank, each in enumerate(ranks)
    ]
    return {"kind": "times", "step": step, "ranks": [asdict(each) for each in made]}


def plan(plan_id: int, first_step: int, *sizes: int) -> dict[str, Any]:
    return {
        "kind": "plan",
        "step": first_step,
        "plan_id": plan_id,
        "first_step": first_step,
        "sizes": list(sizes),
    }


def suspicion(step: int, *named: int) -> dict[str, Any]:
    workers = [
        asdict(WorkerReport((rank,), 0.9 * (rank in named), 0, 1, 0, 20, is_named=rank in named))
        for rank in range(4)
    ]
    return {"kind": "suspicion", "step": step, "num_steps": step, "workers": workers}


def first(*entries: dict[str, Any]) -> str:
    return judge(read_lines(entries))[0]


@pytest.mark.parametrize("name", PREPARED)
def test_first_line_of_a_prepared_run_names_rank_and_cause(name: str) -> None:
    entries = read_run_log(LOGS / f"{name}.jsonl")
    assert render_text(entries).splitlines()[0].startswith(PREPARED[name])
    page = render_page(entries, title=name)
    body = page.partition("<body>\n")[2]
    assert body.startswith(f"<h1>{PREPARED[name]}")


def test_ranks_that_read_the_same_data_come_before_who_is_off() -> None:
    groups = [asdict(SameData((0, 2), 4, num_steps=24, num_equal=23))]
    line = {"kind": "same_data", "step": 24, "groups": groups}
    asked, off, *_ = judge(read_lines([line, suspicion(40, 2)]))
    assert asked.startswith("Do ranks 0 and 2 read the same data? In the first 24 steps their ")
    assert off.startswith("Rank 2 sends gradients that are off")


def test_the_first_nan_in_a_mean_comes_first_of_all() -> None:
    lost = [
        {"kind": "not_finite", "step": 6, "found": asdict(NotFinite(7, (2,), 4, "fc.bias", True))},
        {"kind": "not_finite", "step": 8, "found": asdict(NotFinite(9, (1,), 4, "fc.bias", True))},
    ]
    first_of_all, *others = judge(read_lines(lost))
    assert first_of_all.startswith("Step 7: gradients of rank 2 are not finite, ")
    assert "NaN in parameter 'fc.bias'. " in first_of_all
    assert not others


def test_a_damaged_line_that_names_no_ranks_is_refused_by_its_number() -> None:
    found = asdict(NotFinite(7, (2,), 4, "fc.bias", True)) | {"ranks": []}
    group = asdict(SameData((0, 2), 4, num_steps=24, num_equal=23)) | {"ranks": [0]}
    for line in ({"kind": "not_finite", "found": found}, {"kind": "same_data", "groups": [group]}):
        with pytest.raises(DataError, match=r"line 1.*: ranks needs [12] or more of them"):
            read_lines([{"step": 6, **line}])


@pytest.mark.parametrize(("part", "does"), [("stall_s", "fetching"), ("compute_s", "computing")])
def test_slow_rank_is_told_with_its_cost_and_cause(part: str, does: str) -> None:
    entry = times(20, {}, {part: 0.3}, {}, step_s=0.4)
    cost = {"stall_s": 75, "compute_s": 50}[part]  # 0.3 + 0.1 against 0.1, or 0.3 against 0.1
    assert first(entry).startswith(f"Rank 1 costs {cost}% of a step by {does}: ")


def test_second_slow_rank_is_told_by_what_it_adds() -> None:
    sentences = judge(read_lines([times(20, {}, {"compute_s": 0.3}, {"compute_s": 0.2}, {}, {})]))
    assert sentences[0].startswith("Rank 1 costs 25% of a step by computing")
    assert sentences[1].startswith("Rank 2 costs another 25% of a step by computing")


def test_ranks_as_slow_as_each_other_are_told_together() -> None:
    each = {"compute_s": 0.3}
    sentences = judge(read_lines([times(20, {}, each, {}, each, {"compute_s": 0.2}, {}, {})]))
    assert sentences[0] == (
        "Ranks 1 3 cost 25% of a step by computing together: the own work of each takes 3.00x the "
        "median of the others' or more."
    )
    assert sentences[1].startswith("Rank 4 costs another 25% of a step by computing")


def test_slow_rank_behind_one_whose_times_vary_costs_nothing_for_sure() -> None:
    line = times(20, {}, {"compute_s": 0.3}, {"compute_s": 0.25}, {}, {})
    line["ranks"][1]["busy_s2"] = 0.28  # a standard error of 0.1 s
    assert judge(read_lines([line])) == [
        "Rank 2 is slow: its own work takes 2.50x the median of the others'. Another takes longer, "
        "but its times vary too much to say whether it is slow."
    ]


def test_rank_that_queues_for_a_cpu_is_told() -> None:
    sentences = judge(read_lines([times(20, {}, {"queued_s": 0.2}, {})]))
    assert "Rank 1 queues for a CPU 50% of a step" in sentences[0]


def test_what_plans_won_is_told_with_whom_they_relieved() -> None:
    before = times(20, {}, {"compute_s": 0.3}, {}, step_s=0.4)
    after = times(60, {}, {}, {}, step_s=0.3)
    told = first(plan(0, 0, 8, 8, 8), before, plan(1, 40, 9, 6, 9), after)
    assert told == (
        "Plan 1 made steps 25% shorter than the first sizes did (400 ms, now 300 ms); rank 1 cost "
        "50% by computing, and no rank is slow now."
    )


def test_interval_that_ends_as_a_plan_begins_does_not_show_it() -> None:
    before, last = times(20, {}, {}, step_s=0.4), times(40, {}, {}, step_s=0.1)
    assert "Plan" not in first(plan(0, 0, 8, 8), before, plan(1, 40, 9, 7), last)


def test_plan_that_made_steps_longer_is_told() -> None:
    before, after = times(20, {}, {}, step_s=0.4), times(60, {}, {}, step_s=0.5)
    told = first(plan(0, 0, 8, 8), before, plan(1, 40, 9, 7), after)
    assert told == "Steps are 25% longer than with the first sizes (400 ms, now 500 ms)."


def test_plan_of_batches_begins_at_the_step_that_they_belong_to() -> None:
    # 4 passes a step: the plan from batch 100 holds from step 25 on, so only step 20 is before it.
    run = {"kind": "run", "step": 0, "world_size": 2, "num_passes": 1}
    schedule = {"kind": "schedule", "step": 0, "times_at": 20, "num_passes": 4}
    before = times(20, {}, {"compute_s": 0.3}, {}, step_s=0.4)
    after = [times(step, {}, {}, {}, step_s=0.3) for step in range(40, 140, 20)]
    log = [run, plan(0, 0, 8, 8, 8), schedule, before, plan(1, 100, 9, 6, 9), *after]
    assert first(*log).startswith("Plan 1 made steps 25% shorter than the first sizes did")
    assert "plan 1 from step 25: sizes [9, 6, 9]" in render_text(log)
    made = {"plan_id": 1, "first_step": 100, "sizes": [9, 6, 9], "reason": "", "measured_s": 0.4}
    page = render_page([*log, {"kind": "decision", "step": 20, **made}], title="x")
    assert "<td>1, from step 25</td><td>400</td><td>-</td><td>300</td>" in page
    assert "step 25</text>" in page  # of the picture of plans


def passes(step: int, next_batch: int, num_passes: int) -> dict[str, Any]:
    head = {"kind": "schedule", "step": step, "times_at": step + 20}
    return head | {"next_batch": next_batch, "num_passes": num_passes}


def test_plans_before_a_change_of_passes_are_told_by_the_passes_of_their_time() -> None:
    run = {"kind": "run", "step": 0, "world_size": 2, "num_passes": 1, "next_batch": 0}
    plans = [plan(0, 0, 8, 8), plan(1, 60, 9, 7), plan(2, 100, 10, 6), plan(3, 181, 11, 5)]
    log = [run, *plans[:2], passes(100, 100, 4), *plans[2:], times(200, {}, {})]
    text = render_text(log)
    # 100 steps of a batch each, then of 4: batch 181 is in step 120, so 121 is the plan's first.
    for number, step in enumerate((0, 60, 100, 121)):
        assert f"plan {number} from step {step}: " in text
        assert f"step {step}</text>" in render_page(log, title="x") or not step


@pytest.mark.parametrize("optimizer_comes_first", [True, False])
def test_plans_from_before_a_loaded_state_are_told_by_its_passes(
    *, optimizer_comes_first: bool
) -> None:
    run = {"kind": "run", "step": 0, "world_size": 2, "num_passes": 1, "next_batch": 0}
    made, loaded = passes(0, 0, 4), passes(1000, 4000, 4)
    if not optimizer_comes_first:  # it says its passes when the state is loaded already
        made, loaded = passes(1000, 4000, 1), passes(1000, 4000, 4)
    log = [run, made, plan(0, 0, 8, 8), plan(1, 3000, 9, 7), loaded, plan(2, 4100, 10, 6)]
    for number, step in enumerate((0, 750, 1025)):
        assert f"plan {number} from step {step}: " in render_text(log)


def test_each_world_has_its_own_passes() -> None:
    run = {"kind": "run", "step": 0, "world_size": 2, "num_passes": 1, "next_batch": 0}
    log = [run, plan(0, 40, 8, 8), run | {"num_passes": 4}, plan(0, 40, 9, 7)]
    text = render_text(log)
    assert "plan 0 from step 40: sizes [8, 8]" in text
    assert "plan 0 from step 10: sizes [9, 7]" in text


def test_fault_comes_before_workers_and_workers_before_times() -> None:
    slow = times(20, {}, {"compute_s": 0.3}, {})
    fault = {"kind": "fault", "step": 30, "error": "PeerError", "text": "rank 1 is gone\nnote"}
    sentences = judge(read_lines([slow, suspicion(20, 3), fault]))
    assert sentences[0] == "The run ended at step 30 with PeerError: rank 1 is gone."
    assert sentences[1].startswith("Rank 3 sends gradients that are off: suspicion 0.90")
    assert sentences[2].startswith("Rank 1 costs")


def test_error_that_the_script_has_caught_has_not_ended_the_run() -> None:
    fault = {"kind": "fault", "step": 20, "error": "PlanError", "text": "too large"}
    assert first(fault, times(20, {}, {})).startswith("The run ended at step 20")
    went_on = first(times(20, {}, {}), fault, times(40, {}, {}))
    assert went_on == "PlanError at step 20: too large. The run went on to step 40."


def test_only_the_newest_world_is_judged() -> None:
    old = [
        {"kind": "run", "step": 0, "world_size": 4},
        suspicion(20, 3),
        {"kind": "fault", "step": 30, "error": "PeerError", "text": "gone"},
    ]
    new = {"kind": "run", "step": 30, "world_size": 3, "policy": "loft", "times_at": 50}
    assert first(*old, new) == (
        "Nothing has gone wrong so far; times are not measured yet, first at step 50."
    )


def test_all_that_wait_for_data_are_told_so() -> None:
    sentences = judge(read_lines([times(20, {"stall_s": 0.2}, {"stall_s": 0.2})]))
    assert sentences[0] == "No rank is slow: ranks wait for the longest 0.0% of a step."
    assert "More than half of the ranks wait for their data 50% of a step or more" in sentences[1]


def test_even_ranks_leave_nothing_to_say_but_that() -> None:
    assert judge(read_lines([times(20, {}, {}, {}), suspicion(20)])) == [
        "No rank is slow: ranks wait for the longest 0.0% of a step."
    ]


@pytest.mark.parametrize("last_s", [0.38, 0.42])
def test_a_plan_that_was_undone_has_neither_won_nor_lost(last_s: float) -> None:
    log = [
        plan(0, 0, 8, 8),
        times(20, {}, {}),
        plan(1, 40, 9, 7),
        times(60, {}, {}, step_s=0.5),
        plan(2, 80, 8, 8),
        times(120, {}, {}, step_s=last_s),
    ]
    assert not any("first sizes" in each for each in judge(read_lines(log)))


def test_what_was_known_of_an_earlier_world_is_not_told_of_this_one() -> None:
    old = [
        {"kind": "run", "step": 0, "world_size": 4},
        times(20, {}, {}, {}, {"compute_s": 0.3}),
        suspicion(20, 3),
    ]
    text = render_text([*old, {"kind": "run", "step": 30, "world_size": 3, "times_at": 50}])
    assert "rank 3" not in text
    assert "STANDS OUT" not in text
    assert "first at step 50" in text


def test_a_verdict_on_some_ranks_of_many_says_so() -> None:
    line = times(20, *[{}] * 24, *[{"compute_s": 0.2}] * 8) | {"num_ranks": 1000}
    assert any("32 of 1000 ranks" in each for each in judge(read_lines([line])))


def test_a_quarantine_after_a_resume_is_told_in_the_steps_of_the_log() -> None:
    line = suspicion(5039, 3) | {"num_steps": 40}
    line["workers"][3]["in_quarantine_until"] = 540
    assert "in quarantine until step 5540" in first(line)
    assert "in quarantine until step 540" not in render_text([line])


def test_a_slow_rank_that_moves_from_interval_to_interval_is_told() -> None:
    slow, plain = {"compute_s": 0.3}, {"compute_s": 0.1}
    moving = [
        times(20 * at, *[slow if at % 3 == r else plain for r in range(3)]) for at in range(8)
    ]
    said = " ".join(judge(read_lines([{"kind": "run", "step": 0, "world_size": 3}, *moving])))
    assert "The slow rank moves: in the last 8 intervals it was 0, 1, 2, 0, 1, 2, 0, 1" in said
    steady = [times(20 * at, plain, slow, plain) for at in range(8)]
    said = " ".join(judge(read_lines([{"kind": "run", "step": 0, "world_size": 3}, *steady])))
    assert "moves" not in said


def test_ranks_that_share_cores_are_told_so_first() -> None:
    line = times(20, *[{"queued_s": 0.075}] * 4, step_s=0.15)
    line["crowd"] = {"num_ranks": 4, "cpus": 2, "queued_s": 0.075, "share": 0.5}
    said = judge(read_lines([{"kind": "run", "step": 0, "world_size": 4}, line]))
    assert said == ["4 ranks share 2 cores: each waits 75 ms a step for a core, 50% of it."]


def test_ranks_that_are_slow_by_turns_are_told_in_place_of_none() -> None:
    line = times(20, *[{"compute_s": 0.1}] * 4)
    line["turns"] = {
        "ranks": [0, 1, 2, 3],
        "cause": "fetch",
        "share": 0.25,
        "steps": 30,
        "num_steps": 32,
    }
    said = judge(read_lines([{"kind": "run", "step": 0, "world_size": 4}, line]))
    assert said == [
        "Ranks 0 1 2 3 are slow by turns: in 30 of the last 32 steps one of them alone takes long "
        "by fetching, which costs 25% of a step."
    ]


@pytest.mark.parametrize(
    ("part", "words"),
    [("queued", "queueing for a core"), ("other", "what it does between its passes")],
)
def test_a_rank_that_is_slow_beside_its_own_work_is_named(part: str, words: str) -> None:
    line = times(20, *[{"compute_s": 0.1}] * 4)
    for each in line["ranks"]:
        is_slow = each["rank"] == 2
        each[f"typical_{part}_s"] = each[f"{part}_s"] = 0.15 if is_slow else 0.01
        each["wait_s"] = 0.02 if is_slow else 0.15
    run = {"kind": "run", "step": 0, "world_size": 4}
    first, *others = judge(read_lines([run, line]))
    assert first.startswith(f"Rank 2 costs 35% of a step by {words}: its ")
    assert others == []
    for each in line["ranks"]:
        each["wait_s"] = 0.0  # nobody waits for it: then it may be what it waits for itself
    assert not any("costs" in each for each in judge(read_lines([run, line])))

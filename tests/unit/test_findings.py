"""From what ranks noted to what was forgotten: the right line, the right reason, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from loft_hvd.check.findings import find
from loft_hvd.check.notes import (
    JOIN,
    STANDSTILL_S,
    STEP,
    BalancerNote,
    Call,
    ErrorNote,
    LoaderNote,
    LossNote,
    Notes,
    OptimizerNote,
    Round,
    WaitNote,
)
from loft_hvd.check.run import judge

SCRIPT = """\
for epoch in range(3):
    for x in loader:
        step()
        if odd:
            branch()
        for part in x:
            inner()
    after()
"""
LINES = {"step": 3, "branch": 5, "inner": 7, "after": 8}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def notes(script: str, rank: int, calls: str, *, ended: str = "stopped") -> Notes:
    """Return the notes of a rank with calls such as "step step after"; "|" begins an epoch."""
    made = [
        Call(STEP if name == "step" else f"hvd.{name}", [f"{script}:{LINES[name]}"], round=number)
        for number, epoch in enumerate(calls.split("|"))
        for name in epoch.split()
    ]
    balancer = BalancerNote(f"{script}:1", "loft", True, sizes=[16, 8])
    return Notes(rank, ended=ended, calls=made, balancers=[balancer])


@pytest.mark.parametrize(
    ("one", "other", "line", "what"),
    [
        ("step branch", "step step", "branch", "unequal collectives: rank 0 calls hvd.branch"),
        ("step step", "step branch", "branch", "unequal collectives: rank 1 calls hvd.branch"),
        ("branch step", "step", "branch", "unequal collectives: rank 0"),
        ("step step step", "step step after", "step", "a loop whose length follows"),
        ("step step after", "step step step", "step", "a loop whose length follows"),
        ("step step after", "step step | step", "after", "unequal collectives: rank 0"),
        ("step step | step", "step step after", "after", "unequal collectives: rank 1"),
        ("step inner inner", "step inner step", "inner", "a loop whose length follows"),
        ("step after step inner", "step after step step", "inner", "unequal collectives: rank 0"),
    ],
)
def test_where_two_ranks_part(script: str, one: str, other: str, line: str, what: str) -> None:
    (finding,) = find([notes(script, 0, one), notes(script, 1, other)])
    assert finding.place == f"{script}:{LINES[line]}"
    assert finding.what.startswith(what)


def test_a_rank_that_left_the_script_parts_from_one_that_goes_on(script: str) -> None:
    done = notes(script, 0, "step step", ended="done")
    (finding,) = find([done, notes(script, 1, "step step step")])
    assert finding.what.startswith("a loop whose length follows the local batch: rank 1 takes more")
    assert "local batches of 8 and 16" in finding.what


@pytest.mark.parametrize("ended", ["stopped", "error"])
def test_a_rank_that_is_behind_may_be_on_its_way(script: str, ended: str) -> None:
    ranks = [notes(script, 0, "step step after"), notes(script, 1, "step step", ended=ended)]
    assert find(ranks) == []


def test_named_calls_beside_the_script_may_come_in_any_order(script: str) -> None:
    ranks = [notes(script, 0, "branch inner step"), notes(script, 1, "inner branch step")]
    assert find(ranks) != []
    for each in ranks:
        for call in each.calls[:2]:
            call.is_ordered = False
    assert find(ranks) == []


def test_every_rank_is_compared_with_the_first(script: str) -> None:
    ranks = [notes(script, rank, "step step") for rank in (0, 1)]
    (finding,) = find([*ranks, notes(script, 2, "step branch")])
    assert "rank 2 calls hvd.branch" in finding.what


def test_other_parameters_and_other_options_are_two_findings(script: str) -> None:
    ranks = [notes(script, rank, "step") for rank in (0, 1, 2)]
    for each, digest, lr in zip(ranks, (7, 8, 9), ("0.1", "0.1", "0.2"), strict=True):
        each.optimizers = [OptimizerNote(f"{script}:1", digest, {"lr of group 0": lr})]
    parameters, options = find(ranks)
    assert "those of ranks 1, 2 are not rank 0's" in parameters.what
    assert "lr of group 0 is 0.1 on rank 0 and 0.2 on rank 2" in options.what


@pytest.mark.parametrize(
    ("rounds", "says", "num_found"),
    [
        ([Round(0, 4, True), Round(0, 4, True)], True, 1),  # said once, too early
        ([Round(0, 4, True), Round(1, 4, True)], True, 0),
        ([Round(0, 4, True)], False, 0),  # a script of one epoch
        ([Round(None, 4, True), Round(None, 4, True)], True, 0),  # a sampler without .epoch
        ([Round(None, 4, True), Round(None, 4, True)], False, 1),
        ([Round(0, 1, False), Round(0, 4, True)], True, 0),  # a look at the first batch
        ([Round(0, 4, True)], True, 0),
        ([Round(0, 4, False), Round(0, 4, False)], False, 0),  # evaluation
    ],
)
def test_missing_set_epoch(script: str, rounds: list[Round], says: bool, num_found: int) -> None:
    one = notes(script, 0, "")
    one.says_set_epoch = says
    one.loaders = [LoaderNote("loft", f"{script}:1", shuffles=True, rounds=rounds)]
    found = find([one, notes(script, 1, "")])
    assert ["missing set_epoch" in each.what for each in found] == [True] * num_found
    one.loaders[0].shuffles = False
    assert find([one, notes(script, 1, "")]) == []


@pytest.mark.parametrize(
    ("policy", "is_adaptive", "batch_size", "has_steps", "is_found"),
    [
        ("loft", True, 16, False, True),
        ("loft", True, 16, True, False),
        ("report", False, 12, False, False),
        ("fixed", False, 16, False, False),  # as planned
        ("fixed", False, 12, False, True),
    ],
)
def test_a_loader_beside_the_balancer(
    script: str, policy: str, is_adaptive: bool, batch_size: int, has_steps: bool, is_found: bool
) -> None:
    one = notes(script, 0, "")
    one.balancers = [BalancerNote(f"{script}:1", policy, is_adaptive, [16, 8], has_steps)]
    one.loaders = [LoaderNote("torch", f"{script}:2", batch_size, rounds=[Round(None, 4, True)])]
    found = find([one, notes(script, 1, "")])
    assert ["beside the balancer" in each.what for each in found] == [True] * is_found


@pytest.mark.parametrize(
    ("sizes", "is_adaptive", "is_found"),
    [([16, 8], False, True), ([12, 12], False, False), ([12, 12], True, True)],
)
def test_a_mean_over_ranks(
    script: str, sizes: list[int], is_adaptive: bool, is_found: bool
) -> None:
    ranks = [notes(script, rank, "after") for rank in (0, 1)]
    for each in ranks:
        each.calls[0].is_mean_of_one = True
        each.balancers = [BalancerNote(f"{script}:1", "fixed", is_adaptive, sizes)]
    found = find(ranks)
    assert ["averaged by rank" in each.what for each in found] == [True] * is_found


def test_a_minute_too_short_for_a_second_epoch_may_show_a_missing_set_epoch(script: str) -> None:
    one = notes(script, 0, "")
    this = Round(0, 4, is_trained=True, begun=[f"{script}:2"])  # a loop in the loop over epochs
    one.loaders = [LoaderNote("loft", f"{script}:1", shuffles=True, rounds=[this])]
    ranks = [one, notes(script, 1, "")]
    (finding,) = find(ranks)
    assert finding.what == "missing set_epoch: nothing calls it"
    this.begun = [f"{script}:1"]  # around it there is no loop
    assert find(ranks) == []
    this.begun, one.ended = [f"{script}:2"], "done"  # it had one epoch
    assert find(ranks) == []
    one.ended = "error"  # it would have had more
    assert len(find(ranks)) == 1


def test_an_error_of_ours_is_told_where_nothing_explains_it(script: str) -> None:
    one, other = notes(script, 0, "step"), notes(script, 1, "step")
    other.error = ErrorNote("MismatchError", "ranks differ; give the same", f"{script}:3", True)
    (finding,) = find([one, other])
    assert (finding.place, finding.mend) == (f"{script}:3", "ranks differ; give the same")
    other.error.is_ours = False
    assert find([one, other]) == []


def stand(notes: Notes, place: str, seconds: float = STANDSTILL_S) -> Notes:
    """Let a rank wait at a line, with its newest call unfinished; all others have returned."""
    notes.wait = WaitNote([place], seconds)
    for call in notes.calls:
        call.is_done = True
    if notes.calls and notes.calls[-1].place == place:
        notes.calls[-1].is_done = False
    return notes


def test_a_rank_whose_call_the_others_never_make_is_found_where_all_stand_still(
    script: str,
) -> None:
    # `if hvd.rank() == 0: hvd.allreduce(loss)`, while the others are in state.commit().
    ranks = [
        stand(notes(script, 0, "step step after"), f"{script}:8"),
        stand(notes(script, 1, "step step"), f"{script}:5"),
    ]
    (finding,) = find(ranks)
    assert finding.place == f"{script}:8"
    assert finding.what == (
        "unequal collectives: rank 0 calls hvd.after here, while rank 1 is at "
        f"{script}:5, where it waits for other ranks"
    )


def test_nothing_is_said_to_be_alike_while_a_call_is_unfinished(script: str) -> None:
    one = stand(notes(script, 0, "step step after"), f"{script}:8", seconds=STANDSTILL_S / 2)
    other = notes(script, 1, "step step")  # it may be on its way
    one.num_steps = other.num_steps = 2
    checked = judge([one, other], "")
    assert checked.is_fine
    assert "alike" not in checked.verdict
    assert f"rank 0 was in hvd.after ({script}:8), and rank 1 had not come to it" in checked.verdict
    one.calls[-1].is_done = True
    assert judge([one, other], "").verdict == "Nothing found: 2 steps, all ranks alike."


def test_a_standstill_without_a_watched_call_is_found(script: str) -> None:
    ranks = [
        stand(notes(script, rank, "step"), f"{script}:{line}") for rank, line in ((0, 5), (1, 7))
    ]
    (finding,) = find(ranks)
    assert finding.place == f"{script}:5"
    assert f"a standstill: rank 0 waits here for other ranks, rank 1 at {script}:7" in finding.what
    ranks[1].wait = WaitNote([f"{script}:7"], STANDSTILL_S / 2)
    assert find(ranks) == []


def test_a_rank_that_waits_for_one_that_is_done_is_found(script: str) -> None:
    ranks = [
        stand(notes(script, 0, "step"), f"{script}:5"),
        notes(script, 1, "step", ended="done"),
    ]
    (finding,) = find(ranks)
    assert finding.what.endswith("waits here for ranks that have left the script")


def test_a_call_by_name_that_only_one_rank_makes_is_found_where_all_stand_still(
    script: str,
) -> None:
    ranks = [stand(notes(script, rank, "step branch inner"), f"{script}:8") for rank in (0, 1)]
    for each in ranks:
        for call in each.calls[1:]:
            call.is_ordered, call.name = False, call.what
    ranks[1].calls.reverse()  # in any order
    (finding,) = find(ranks)
    assert finding.what.startswith("a standstill")
    ranks[1].calls[0].name = "another"
    (finding,) = find(ranks)
    assert (finding.place, "by the name 'hvd.inner'" in finding.what) == (f"{script}:7", True)


def test_ranks_may_meet_in_a_collective_from_two_lines(script: str) -> None:
    # `if rank != 0: hvd.barrier()` ... `if rank == 0: hvd.barrier()`
    ranks = [notes(script, 0, "step branch step"), notes(script, 1, "step after step")]
    for each in ranks:
        each.calls[1].what = "hvd.barrier"
    assert find(ranks) == []
    for each in ranks:  # neither comes back: they wait in two of them
        stand(each, each.calls[1].place).calls[1].is_done = False
    (finding,) = find(ranks)
    assert "rank 0 calls hvd.barrier here, while rank 1 is at hvd.barrier" in finding.what


def test_without_a_step_nothing_is_fine(script: str) -> None:
    checked = judge([notes(script, 0, "after"), notes(script, 1, "after")], "its end")
    assert not checked.is_fine
    assert "loft.DistributedOptimizer" in checked.failure
    assert "raise --seconds" in checked.failure


def test_backward_passes_without_an_optimizer_that_reduces_are_found(script: str) -> None:
    ranks = [notes(script, rank, "after after") for rank in (0, 1)]
    for each in ranks:
        each.num_backward = each.num_plain_steps = 2
        each.first_backward = f"{script}:3"
    (finding,) = find(ranks)
    assert (finding.place, finding.what[:24]) == (f"{script}:3", "no distributed optimizer")
    for each in ranks:  # gradients that it averages itself
        for call in each.calls:
            call.what, call.num_values = "hvd.allreduce_", 9
    assert judge(ranks, "").is_fine
    assert judge(ranks, "").num_steps == 2
    for each in ranks:  # the loss of each step
        for call in each.calls:
            call.num_values = 1
    assert len(find(ranks)) == 1
    for each in ranks:
        each.has_reducer = True
    assert find(ranks) == []


def test_an_error_is_told_beside_what_is_found(script: str) -> None:
    ranks = [notes(script, 0, "step branch"), notes(script, 1, "step after")]
    ranks[1].error = ErrorNote("ValueError", "no such file", f"{script}:8", is_ours=False)
    checked = judge(ranks, "")
    assert len(checked.findings) == 1
    assert (
        checked.failure == f"The script failed: rank 1 at {script}:8 with ValueError: no such file"
    )


def test_ranks_are_compared_in_the_calls_of_their_process_sets(script: str) -> None:
    ranks = [notes(script, rank, "step") for rank in range(3)]
    (extra,) = notes(script, 1, "branch").calls
    extra.members = [1, 2]
    for each in ranks[1:]:
        each.calls.insert(0, extra)
        each.optimizers = [OptimizerNote(f"{script}:1", 8, {}, [1, 2])]
    ranks[0].optimizers = [OptimizerNote(f"{script}:1", 7, {}, [0])]
    assert find(ranks) == []
    ranks[2].calls.remove(extra)
    (finding,) = find(ranks)
    assert "rank 1 calls hvd.branch here, while rank 2 is at" in finding.what


def test_parameters_that_differ_on_purpose_are_no_finding(script: str) -> None:
    ranks = [notes(script, rank, "step") for rank in (0, 1)]
    for each in ranks:
        each.optimizers = [OptimizerNote(f"{script}:1", each.rank, {})]
    assert len(find(ranks)) == 1
    for each in ranks:
        each.ignores_copies = True
    assert find(ranks) == []


def test_a_rank_that_has_joined_needs_no_partner(script: str) -> None:
    ranks = [notes(script, 0, "step after step"), notes(script, 1, "step step step after step")]
    for each, at in ((ranks[0], 1), (ranks[1], 3)):
        each.calls[at].what = JOIN
    assert find(ranks) == []
    ranks[1].calls[-1].what = "hvd.barrier"  # after the join all must meet again
    assert len(find(ranks)) == 1


TWO_OPTIMIZERS = """\
for x in loader:
    for opt in optimizers:
        opt.step()
    if hvd.rank() == 0:
        loft.average(value, count)
    hvd.allreduce(b)
"""


def _calls(script: str, lines: list[int]) -> list[Call]:
    what = {3: STEP, 5: "loft.average", 6: "hvd.allreduce"}
    return [Call(what[line], [f"{script}:{line}"], is_done=True) for line in lines]


def test_a_call_in_a_branch_is_blamed_and_not_the_loop_of_the_other_rank(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(TWO_OPTIMIZERS)
    one = Notes(0, calls=_calls(str(path), [3, 3, 5, 3, 3]))
    other = Notes(1, calls=_calls(str(path), [3, 3, 3, 3]))
    (finding,) = find([one, other])
    assert finding.place == f"{path}:5"
    assert finding.what.startswith("unequal collectives: rank 0 calls loft.average")


@pytest.mark.parametrize("odd", [0, 1])
def test_an_extra_all_reduce_is_blamed_and_not_the_next_of_the_other_rank(
    tmp_path: Path, odd: int
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TWO_OPTIMIZERS)
    ranks = [Notes(rank, calls=_calls(str(path), [3, 3, 6, 3, 3])) for rank in (0, 1)]
    ranks[odd].calls.insert(2, Call("hvd.allreduce", [f"{path}:5"], is_done=True))
    (finding,) = find(ranks)
    assert finding.place == f"{path}:5"
    assert finding.what.startswith(f"unequal collectives: rank {odd} calls hvd.allreduce")


def test_of_two_lines_in_no_branch_both_are_named(script: str) -> None:
    (finding,) = find([notes(script, 0, "step after"), notes(script, 1, "step inner")])
    assert f"hvd.after here, while rank 1 is at hvd.inner at {script}:7" in finding.what
    assert "one of the two lines" in finding.mend


def of_labels(script: str, *seen: tuple[int, int]) -> list[Notes]:
    """Return a rank for each of these: labels that count, and samples, of all its batches."""
    ranks = [notes(script, rank, "step step") for rank in range(len(seen))]
    for each, pair in zip(ranks, seen, strict=True):
        each.losses = [LossNote(f"{script}:7", pair, pair)]
    return ranks


def test_a_mean_over_unequally_many_labels_is_told_with_both(script: str) -> None:
    (finding,) = find(of_labels(script, (8, 16), (7, 8)))
    assert finding.place == f"{script}:7"
    assert finding.what.startswith("a mean of means: the loss is the mean over 8 labels of 16")
    assert "over 7 of 8 in another" in finding.what
    assert finding.mend.startswith("balancer.count(")


def test_as_many_labels_a_sample_everywhere_are_samples(script: str) -> None:
    assert find(of_labels(script, (160, 16), (80, 8))) == []


def test_who_counts_knows(script: str) -> None:
    ranks = of_labels(script, (8, 16), (7, 8))
    ranks[1].says_counts = True
    assert find(ranks) == []


def _crashed(script: str, rank: int, calls: str) -> Notes:
    """Return the draft of a rank that was ended in its newest call."""
    left = notes(script, rank, calls, ended="crashed")
    for call in left.calls[:-1]:
        call.is_done = True
    left.is_torchrun = left.has_reducer = True
    return left


def test_a_call_that_has_ended_the_processes_is_found(script: str) -> None:
    ranks = [_crashed(script, 0, "step step branch"), _crashed(script, 1, "step step")]
    (finding,) = find(ranks)
    assert finding.place == f"{script}:{LINES['branch']}"
    assert finding.what.startswith("unequal collectives: rank 0 calls hvd.branch here")
    assert finding.what.endswith("while rank 1 is at its next step")
    assert "dist.get_rank()" in finding.mend


def test_a_crash_between_two_steps_is_no_finding_but_told(script: str) -> None:
    ranks = [_crashed(script, 0, "step step step"), _crashed(script, 1, "step step")]
    assert find(ranks) == []
    checked = judge(ranks, "the end of the output")
    assert not checked.is_fine
    assert "ranks 0, 1 ended without a word" in checked.failure

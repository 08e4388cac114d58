"""From what ranks noted to what was forgotten: the right line, the right reason, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from loft_hvd.check.findings import find
from loft_hvd.check.notes import (
    STEP,
    BalancerNote,
    Call,
    ErrorNote,
    LoaderNote,
    Notes,
    OptimizerNote,
    Round,
)

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
        ([Round(0, 4, True)], False, 1),  # a minute was too short for a second epoch
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


def test_an_error_of_ours_is_told_where_nothing_explains_it(script: str) -> None:
    one, other = notes(script, 0, "step"), notes(script, 1, "step")
    other.error = ErrorNote("MismatchError", "ranks differ; give the same", f"{script}:3", True)
    (finding,) = find([one, other])
    assert (finding.place, finding.mend) == (f"{script}:3", "ranks differ; give the same")
    other.error.is_ours = False
    assert find([one, other]) == []

"""What was filled is no evidence: it names nobody, and hides nobody who is wrong elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd import attacks
from loft_hvd.aggregation.compute import decide, measure_rows
from loft_hvd.aggregation.diagnostics import Diagnostics, diagnose, diagnose_filled
from loft_hvd.aggregation.fallback import BLOCK
from loft_hvd.aggregation.filling import Holes, fill_holes
from loft_hvd.aggregation.rule_text import parse_rule
from loft_hvd.aggregation.rules import Rule
from loft_hvd.pipeline.ring import ExchangeSpec, Rows, Stage, apply_rule, run_rule
from loft_hvd.pipeline.suspicion.tracker import Evidence, Suspicion, SuspicionTracker
from loft_hvd.pipeline.suspicion.watch import WorkerWatch
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Channel, Lane
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.gradients import assert_same_bits
from tests.support.holes import draw_holes, expected_filled, is_filled, least_rows

RULES = [
    parse_rule(text) for text in ("trimmed_mean:f=1", "median", "robust:f=1", "multi_krum:f=1")
]


def filled_rows(
    rows: Tensor, rule: Rule, shares: float | list[float], *, block_numel: int, own: int, seed: int
) -> Holes:
    """Fill holes that are drawn, in place."""
    least = least_rows(rule)
    shape = (rows.shape[0], rows.shape[1])
    holes = draw_holes(
        shape, block_numel=block_numel, shares=shares, own=own, least=least, seed=seed
    )
    fill_holes(rows, holes, rule, own=own)
    return holes


# --- what is looked at


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.usefixtures("both_paths")
def test_blocks_without_a_hole_are_looked_at_and_no_others(rule: Rule, every: int) -> None:
    numel = 2 * BLOCK + 1000
    rows = torch.randn(5, numel, generator=torch.Generator().manual_seed(0))
    holes = filled_rows(rows, rule, 0.05, block_numel=320, own=1, seed=1)
    out = torch.empty(numel)
    found = diagnose_filled(rows, rule, holes, out=out, every=every)
    assert_same_bits(out, loft.aggregate(rows, rule))
    is_seen = ~is_filled(holes, numel).any(dim=0)
    if every == 2:
        is_seen[BLOCK : 2 * BLOCK] = False
    wanted = diagnose(rows[:, is_seen], rule, every=1)[1]
    assert found == wanted
    assert found.num_seen == (int(is_seen.sum()),) * 5


@pytest.mark.parametrize("is_by_weight", [False, True])
def test_a_hole_of_an_absent_row_hides_nothing(is_by_weight: bool) -> None:
    rows = torch.randn(5, 100)
    holes = Holes(torch.zeros(5, 10, dtype=torch.uint8), 10)
    holes.missing[4] = holes.missing[1, 3] = 1
    there = [True, True, True, True, False]
    how = {"weights": [int(row) for row in there]} if is_by_weight else {"present": there}
    rule, out = loft.TrimmedMean(1), torch.empty(100)
    fill_holes(rows, holes, rule, own=0, **how)
    found = diagnose_filled(rows, rule, holes, out=out, every=1, **how)
    assert found.num_seen == (90, 90, 90, 90, 0)


def test_a_shard_of_holes_shows_nothing() -> None:
    rows = torch.randn(4, 50)
    holes = Holes(torch.tensor([[0], [0], [0], [1]], dtype=torch.uint8), 320)
    fill_holes(rows, holes, loft.TrimmedMean(1), own=0)
    out = torch.empty(50)
    found = diagnose_filled(rows, loft.TrimmedMean(1), holes, out=out, every=1)
    assert found == Diagnostics.empty(4)
    assert_same_bits(out, loft.aggregate(rows, loft.TrimmedMean(1)))


def test_nothing_is_seen_of_no_values() -> None:
    holes = Holes(torch.zeros(4, 0, dtype=torch.uint8), 320)
    rows, out = torch.empty(4, 0), torch.empty(0)
    assert diagnose_filled(rows, loft.Median(), holes, out=out, every=1) == Diagnostics.empty(4)


def test_rows_that_were_filled_alike_are_no_copies() -> None:
    rows = torch.randn(6, 300)
    holes = Holes(torch.zeros(6, 3, dtype=torch.uint8), 100)
    holes.missing[4:, 1:] = 1
    rows[4, :100] = rows[5, :100] = 0.0  # of an embedding two batches may use nothing
    fill_holes(rows, holes, loft.Robust(1), own=0)
    assert torch.equal(rows[4], rows[5])
    assert diagnose(rows, loft.Robust(1), every=1)[1].copied[4] > 0
    found = diagnose_filled(rows, loft.Robust(1), holes, out=torch.empty(300), every=1)
    assert found.copied == (0.0,) * 6


def test_copies_are_found_by_what_came() -> None:
    rows = torch.randn(6, 300)
    rows[5] = rows[4]
    holes = Holes(torch.zeros(6, 3, dtype=torch.uint8), 100)
    holes.missing[4, 1] = 1  # one of the two lacks a block, in which they differ then
    fill_holes(rows, holes, loft.Robust(1), own=0)
    found = diagnose_filled(rows, loft.Robust(1), holes, out=torch.empty(300), every=1)
    assert found.copied == (0.0, 0.0, 0.0, 0.0, 200.0, 200.0)


def test_a_rule_that_has_decided_over_the_model_says_what_it_has_decided() -> None:
    rows, rule = torch.randn(5, 400), loft.Robust(1)
    decided = decide(rule, measure_rows(list(rows)), None, precision=torch.float32)
    holes = filled_rows(rows, rule, 0.1, block_numel=20, own=0, seed=2)
    found = diagnose_filled(rows, decided, holes, out=torch.empty(400), every=1)
    num_seen = found.num_seen[0]
    assert 0 < num_seen < 400
    assert found.left_out == tuple(num_seen * share for share in decided.verdicts.left_out)


# --- whom it names


Change = Callable[[Tensor], None]  # of [n, n * NUMEL], what workers send in a step
BLOCK_NUMEL, NUMEL = 16, 128  # of a shard: 8 blocks


def watch(
    rule: Rule,
    shares: float | list[float],
    *,
    world_size: int,
    num_steps: int,
    change: Change = lambda rows: None,
    block_numel: int = BLOCK_NUMEL,
    seed: int = 0,
) -> tuple[SuspicionTracker, set[int]]:
    """Let every rank own a shard, of which blocks are lost; return who was warned of."""
    settings = Suspicion()
    source = torch.Generator().manual_seed(seed)
    losses = np.random.default_rng(seed)
    owners = [Evidence(world_size, settings) for _ in range(world_size)]
    tracker, out, warned = SuspicionTracker(world_size, settings), torch.empty(NUMEL), set()
    for step in range(1, num_steps + 1):
        sent = torch.randn(world_size * NUMEL, generator=source) * 0.5
        sent = sent + torch.randn(world_size, world_size * NUMEL, generator=source)
        change(sent)
        for own, (owner, shard) in enumerate(zip(owners, sent.chunk(world_size, 1), strict=True)):
            rows = shard.contiguous()
            holes = draw_holes(
                (world_size, NUMEL),
                block_numel=block_numel,
                shares=shares,
                own=own,
                least=least_rows(rule),
                seed=losses,
            )
            fill_holes(rows, holes, rule, own=own)
            owner.add(diagnose_filled(rows, rule, holes, out=out, every=1))
            owner.step_reduced(rule)
        if step % settings.interval == 0:
            warned |= set(tracker.observe(np.stack([owner.take() for owner in owners])))
    return tracker, warned


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("rule", "shares"),
    [
        *[(rule, 0.1) for rule in RULES],
        (RULES[2], [0.0, 0.1, 0.1, 0.1, 0.1]),  # one link is clean
        (RULES[0], [0.02, 0.02, 0.02, 0.02, 0.4]),  # one is bad
    ],
    ids=str,
)
def test_honest_workers_that_lose_blocks_are_not_named(
    rule: Rule, shares: float | list[float]
) -> None:
    expect_nobody(*watch(rule, shares, world_size=5, num_steps=200), num_steps=200)


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_honest_workers_that_lose_blocks_are_not_named_in_ten_thousand_steps(
    rule: Rule, seed: int
) -> None:
    shares = np.random.default_rng(seed).uniform(0.02, 0.1, 5).tolist()
    expect_nobody(
        *watch(rule, shares, world_size=5, num_steps=2000, seed=seed),
        num_steps=2000,
    )


def expect_nobody(tracker: SuspicionTracker, warned: set[int], *, num_steps: int) -> None:
    assert warned == set()
    assert max(worker.suspicion for worker in tracker.workers) < 0.35
    assert [worker.share_copied for worker in tracker.workers] == [0.0] * 5
    assert min(worker.num_steps for worker in tracker.workers) > 0.9 * num_steps


def test_shards_of_one_block_that_two_workers_lose_are_no_copies() -> None:
    tracker, warned = watch(loft.Robust(1), 0.3, world_size=5, num_steps=100, block_numel=NUMEL)
    assert warned == set()
    assert [worker.share_copied for worker in tracker.workers] == [0.0] * 5


@pytest.mark.every(4)
@pytest.mark.parametrize("rule", RULES[:3], ids=str)
@pytest.mark.parametrize("attack", [attacks.Scaled(), attacks.NaN(), attacks.Gaussian(10.0)])
def test_a_wrong_worker_is_named_though_blocks_are_lost(rule: Rule, attack: attacks.Attack) -> None:
    def change(rows: Tensor) -> None:
        rows[4] = attack(rows[4:].clone(), num_rows=1)[0]

    assert watch(rule, 0.1, world_size=5, num_steps=60, change=change)[1] == {4}


def test_a_worker_that_copies_is_named_with_whom_it_copies_though_blocks_are_lost() -> None:
    def change(rows: Tensor) -> None:
        rows[7] = rows[0]

    assert watch(loft.Robust(2), 0.06, world_size=8, num_steps=60, change=change)[1] == {0, 7}


# --- on the way over the wire


def owner_of(rule: Rule, world_size: int, numel: int) -> ExchangeSpec:
    """Return what rank 1 is told of an exchange."""
    (spec,) = (
        found
        for found in run_ranks(
            world_size,
            lambda end: ExchangeSpec(Lane(end), "x", numel, torch.float32, "cpu", rule),
        )
        if found.lane.rank == 1
    )
    return spec


@pytest.mark.parametrize("rule", [loft.Mean(reproducible=True), *RULES], ids=str)
def test_an_owner_fills_holes_before_anything_looks_at_rows(rule: Rule) -> None:
    rows = torch.randn(5, 100, generator=torch.Generator().manual_seed(3))
    weights = PassWeights((1, 2, 3, 4, 5), (True, True, True, False, True), 1.0)
    holes = draw_holes((5, 100), block_numel=8, shares=0.3, own=1, least=4, seed=4)
    wanted = expected_filled(
        rows, holes, rule, own=1, weights=[1, 2, 3, 4, 5], present=list(weights.present)
    )
    seen: list[Holes | None] = []
    stages: list[Stage] = []

    def run(
        rows: Rows, rule: Rule, weights: PassWeights | None, out: Tensor, holes: Holes | None = None
    ) -> None:
        seen.append(holes)
        run_rule(rows, rule, weights, out, holes)

    out, spec = torch.empty(100), owner_of(rule, 5, 500)
    assert list(apply_rule(spec, run, stages.append, rows, weights, out, holes)) == []
    assert_same_bits(rows.view(-1), wanted.view(-1))
    run_rule(wanted, rule, weights, again := torch.empty(100))
    assert_same_bits(out, again)
    assert seen == [holes]
    assert stages == [Stage.FILL, Stage.AGGREGATE]


def test_an_owner_without_holes_runs_the_rule_as_ever() -> None:
    seen: list[Holes | None] = []
    stages: list[Stage] = []

    def run(
        rows: Rows, rule: Rule, weights: PassWeights | None, out: Tensor, holes: Holes | None = None
    ) -> None:
        seen.append(holes)

    spec, none = owner_of(loft.Median(), 3, 30), Holes(torch.zeros(3, 1, dtype=torch.uint8), 320)
    rows, out = torch.randn(3, 10), torch.empty(10)
    list(apply_rule(spec, run, stages.append, rows, None, out, none))
    list(apply_rule(spec, run, stages.append, rows, None, out))
    assert seen == [None, None]
    assert stages == [Stage.AGGREGATE] * 2


def test_the_watch_leaves_out_what_was_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Diagnostics] = []
    monkeypatch.setattr(Evidence, "add", lambda self, each: found.append(each))

    def make(end: LocalTransport) -> WorkerWatch:
        return WorkerWatch(
            Channel(end, "x"), loft.Robust(1), groups=None, settings=Suspicion(), quarantine=None
        )

    made = run_ranks(4, make)[0]
    rows, out = torch.randn(4, 96), torch.empty(96)
    holes = Holes(torch.zeros(4, 3, dtype=torch.uint8), 32)
    holes.missing[2, 1] = 1
    fill_holes(rows, holes, loft.Robust(1), own=0)
    made.run(rows, loft.Robust(1), None, out, holes)
    made.run(rows, loft.Robust(1), None, out)
    made.run(rows, loft.Mean(), None, out, holes)  # looks at nothing
    assert [each.num_seen for each in found] == [(64,) * 4, (96,) * 4]

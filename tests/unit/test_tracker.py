"""Who was off: honest workers are never named, and what each attack looks like to the owners."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from loft_hvd import attacks
from loft_hvd.aggregation.diagnostics import diagnose
from loft_hvd.aggregation.row_rules import MultiKrum, Robust
from loft_hvd.aggregation.rules import MeanAroundMedian, Median, Phocas, Rule, TrimmedMean
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.pipeline.suspicion.tracker import Evidence, Suspicion, SuspicionTracker, score_rows

NUMEL = 256  # of a shard
SETTINGS = Suspicion()

Draw = Callable[[int, torch.Generator], Tensor]  # step -> [world_size, world_size * NUMEL]


def watch(
    draw: Draw,
    rule: Rule,
    *,
    world_size: int,
    num_steps: int = 100,
    weights: list[int] | None = None,
    change: Callable[[int, np.ndarray], np.ndarray] = lambda owner, wire: wire,
    seed: int = 0,
    settings: Suspicion = SETTINGS,
    are_apart: bool = False,
    bucket_sizes: tuple[int, ...] = (NUMEL,),
) -> tuple[SuspicionTracker, list[tuple[int, int]]]:
    """Let every rank own a shard of each bucket; return warnings as (step, worker)."""
    generator = torch.Generator().manual_seed(seed)
    owners = [Evidence(world_size, settings) for _ in range(world_size)]
    tracker = SuspicionTracker(world_size, settings)
    warned = []
    for step in range(1, num_steps + 1):
        rows = draw(step, generator)
        for owner, shard in zip(owners, rows.chunk(world_size, dim=1), strict=True):
            used = None if isinstance(rule, Median) else weights
            for part in shard.split(bucket_sizes, dim=1):
                owner.add(diagnose(part, rule, weights=used, every=1)[1])
            owner.step_reduced(rule, weights=weights, are_apart=are_apart)
        if step % settings.interval == 0:
            table = np.stack([change(at, owner.take()) for at, owner in enumerate(owners)])
            warned += [(step, row) for row in tracker.observe(table)]
    return tracker, warned


def honest(world_size: int, *, signal: float = 0.5, noise: Sequence[float] | float = 1.0) -> Draw:
    """Rows that share a direction, each with noise of its own."""

    def draw(step: int, generator: torch.Generator) -> Tensor:
        common = torch.randn(world_size * NUMEL, generator=generator) * signal
        own = torch.randn(world_size, world_size * NUMEL, generator=generator)
        return common + own * torch.as_tensor(noise).reshape(-1, 1)

    return draw


def attacked(world_size: int, attack: attacks.Attack, *, num_rows: int = 1, signal: float) -> Draw:
    """Let the last workers send what ``attack`` makes of a row of their own."""
    draw_honest = honest(world_size, signal=signal)

    def draw(step: int, generator: torch.Generator) -> Tensor:
        rows = draw_honest(step, generator)
        for row in range(world_size - num_rows, world_size):
            rows[row] = attack(rows[row : row + 1].clone(), num_rows=1)[0]
        return rows

    return draw


@pytest.mark.parametrize(
    ("world_size", "rule", "num_steps"),
    [
        (4, TrimmedMean(f=1), 200),
        pytest.param(4, TrimmedMean(f=1), 1000, marks=pytest.mark.long),
        pytest.param(3, Median(), 1000, marks=pytest.mark.long),
        pytest.param(5, TrimmedMean(f=2), 1000, marks=pytest.mark.long),
        pytest.param(5, MeanAroundMedian(f=1), 1000, marks=pytest.mark.long),
        pytest.param(4, Phocas(f=1), 1000, marks=pytest.mark.long),
        pytest.param(8, MultiKrum(f=2), 1000, marks=pytest.mark.long),
    ],
)
def test_honest_workers_are_not_named_in_a_thousand_steps(
    world_size: int, rule: Rule, num_steps: int
) -> None:
    tracker, warned = watch(honest(world_size), rule, world_size=world_size, num_steps=num_steps)
    assert warned == []
    assert max(worker.suspicion for worker in tracker.workers) < 0.2
    assert [worker.num_steps for worker in tracker.workers] == [num_steps] * world_size


@pytest.mark.long
def test_honest_workers_of_wildly_changing_length_are_not_named() -> None:
    # Close to a minimum one batch may give a gradient many times as long as the others'.
    def draw(step: int, generator: torch.Generator) -> Tensor:
        rows = honest(4, signal=0.0)(step, generator)
        return rows * torch.exp(3 * torch.randn(4, 1, generator=generator))

    assert watch(draw, TrimmedMean(f=1), world_size=4, num_steps=1000)[1] == []


@pytest.mark.parametrize("rule", [TrimmedMean(f=1), Median(), Robust(f=1)])
def test_a_worker_with_a_small_batch_is_not_named(rule: Rule) -> None:
    weights = [1, 8, 8, 8]
    draw = honest(4, signal=0.2, noise=[weight**-0.5 for weight in weights])
    tracker, warned = watch(draw, rule, world_size=4, weights=weights)
    assert warned == []
    assert tracker.workers[0].suspicion < 0.2


def test_a_worker_twice_as_noisy_is_not_named() -> None:
    draw = honest(4, noise=[1, 1, 1, 2])
    assert watch(draw, TrimmedMean(f=1), world_size=4)[1] == []


def test_equal_rows_accuse_nobody() -> None:
    tracker, warned = watch(
        lambda step, _: torch.full((4, 4 * NUMEL), float(step)), TrimmedMean(f=1), world_size=4
    )
    assert warned == []
    assert all(worker.suspicion == 0 and worker.num_steps == 0 for worker in tracker.workers)


SEEN = [
    (attacks.NaN(), 0.0),
    (attacks.Scaled(), 0.1),
    (attacks.SignFlip(10), 0.1),
    (attacks.Gaussian(10.0), 0.5),
    (attacks.SignFlip(), 2.0),  # needs gradients that agree
    (attacks.Zero(), 10.0),
]


@pytest.mark.parametrize(("attack", "signal"), SEEN, ids=lambda value: str(value))
@pytest.mark.parametrize(
    ("world_size", "rule", "num_rows"),
    [
        (4, TrimmedMean(f=1), 1),
        pytest.param(3, Median(), 1, marks=pytest.mark.long),
        pytest.param(5, TrimmedMean(f=2), 2, marks=pytest.mark.long),
        pytest.param(5, Phocas(f=2), 2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_wrong_worker_is_named_and_no_honest_one(
    attack: attacks.Attack, signal: float, world_size: int, rule: Rule, num_rows: int
) -> None:
    draw = attacked(world_size, attack, num_rows=num_rows, signal=signal)
    _, warned = watch(draw, rule, world_size=world_size, num_steps=60)
    byzantine = set(range(world_size - num_rows, world_size))
    assert {row for _, row in warned} == byzantine, warned


@pytest.mark.parametrize(
    ("attack", "signal"),
    [
        (attacks.HugeValue(), 0.5),  # one coordinate: one owner sees it, who might be lying
        (attacks.SignFlip(), 0.1),  # among gradients that are nearly all noise
        (attacks.Zero(), 0.5),  # nearer to the others than they are to each other
    ],
    ids=str,
)
def test_what_a_coordinate_wise_rule_cannot_see_names_nobody(
    attack: attacks.Attack, signal: float
) -> None:
    draw = attacked(4, attack, signal=signal)
    assert watch(draw, TrimmedMean(f=1), world_size=4)[1] == []


def test_a_huge_value_is_counted_by_its_owner_all_the_same() -> None:
    rows = attacked(4, attacks.HugeValue(float("inf")), signal=0.5)
    tracker, warned = watch(rows, TrimmedMean(f=1), world_size=4)
    assert warned == []
    assert [worker.num_non_finite for worker in tracker.workers] == [0, 0, 0, 100]


@pytest.mark.parametrize(("world_size", "num_liars"), [(3, 1), (4, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("framed", [0, 1])
def test_half_of_the_owners_cannot_frame_a_worker(
    world_size: int, num_liars: int, framed: int
) -> None:
    def lie(owner: int, wire: np.ndarray) -> np.ndarray:
        if owner >= world_size - num_liars:
            wire = wire.copy()
            wire[framed] = wire[world_size + framed]  # score 1 in every step
        return wire

    rule: Rule = TrimmedMean(f=1)
    tracker, warned = watch(honest(world_size), rule, world_size=world_size, change=lie)
    assert warned == []
    assert tracker.workers[framed].suspicion < 0.3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
def test_an_owner_that_claims_nonsense_abstains(value: float) -> None:
    def spoil(owner: int, wire: np.ndarray) -> np.ndarray:
        return np.full_like(wire, value) if owner == 0 else wire

    draw = attacked(4, attacks.NaN(), signal=0.5)
    _, warned = watch(draw, TrimmedMean(f=1), world_size=4, change=spoil)
    assert {row for _, row in warned} == {3}


def test_overflow_on_half_of_the_ranks_accuses_nobody() -> None:
    def draw(step: int, generator: torch.Generator) -> Tensor:
        rows = honest(4)(step, generator)
        rows[[step % 4, (step + 1) % 4]] = float("inf")
        return rows

    tracker, warned = watch(draw, TrimmedMean(f=1), world_size=4)
    assert warned == []
    assert all(worker.suspicion == 0 for worker in tracker.workers)


@pytest.mark.long
def test_overflow_on_one_rank_after_the_other_names_nobody() -> None:
    def draw(step: int, generator: torch.Generator) -> Tensor:
        rows = honest(4)(step, generator)
        rows[int(torch.randint(4, (1,), generator=generator))] = float("inf")
        return rows

    assert watch(draw, TrimmedMean(f=1), world_size=4, num_steps=1000)[1] == []


def test_warnings_come_at_doubling_intervals() -> None:
    draw = attacked(4, attacks.NaN(), signal=0.5)
    tracker, warned = watch(draw, TrimmedMean(f=1), world_size=4, num_steps=400)
    steps = [step for step, row in warned if row == 3]
    assert len(steps) == len(warned) == 5
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert gaps == [20, 40, 80, 160]
    assert tracker.named() == [3]


def test_a_worker_that_mends_its_ways_is_no_longer_named() -> None:
    wrong, right = attacked(4, attacks.NaN(), signal=0.5), honest(4)

    def draw(step: int, generator: torch.Generator) -> Tensor:
        return (wrong if step <= 100 else right)(step, generator)

    tracker, warned = watch(draw, TrimmedMean(f=1), world_size=4, num_steps=250)
    assert {row for _, row in warned} == {3}
    assert tracker.named() == []
    assert tracker.workers[3].suspicion < 0.1


def copied(world_size: int, *, of: int, by: Sequence[int]) -> Draw:
    """Let some workers send what another one sends."""
    draw_honest = honest(world_size)

    def draw(step: int, generator: torch.Generator) -> Tensor:
        rows = draw_honest(step, generator)
        rows[list(by)] = rows[of].clone()
        return rows

    return draw


def test_a_copying_worker_and_whom_it_copies_are_named() -> None:
    draw = copied(8, of=0, by=[6, 7])
    tracker, warned = watch(draw, Robust(f=2), world_size=8, num_steps=60)
    assert {row for _, row in warned} == {0, 6, 7}
    shares = [worker.share_copied for worker in tracker.workers]
    assert shares == pytest.approx([1, 0, 0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("world_size", "rule", "by"),
    [
        (4, Robust(f=1), [3]),
        (8, Robust(f=2), [6, 7]),
        (5, MultiKrum(f=1), [4]),
        # Of 2f+1 most are equal: what is not lies far from the result, and is honest.
        (3, Robust(f=1), [2]),
        (5, Robust(f=2), [3, 4]),
        (7, Robust(f=3), [4, 5, 6]),
        (5, MultiKrum(f=2), [3, 4]),
    ],
    ids=str,
)
def test_copies_alone_put_nobody_at_fault(world_size: int, rule: Rule, by: list[int]) -> None:
    tracker, warned = watch(copied(world_size, of=0, by=by), rule, world_size=world_size)
    assert {row for _, row in warned} == {0, *by}
    assert tracker.named() == [0, *by]
    assert tracker.at_fault() == []


def changed(world_size: int, change: Callable[[Tensor], None]) -> Draw:
    """Let ``change`` spoil honest rows."""
    draw_honest = honest(world_size)

    def draw(step: int, generator: torch.Generator) -> Tensor:
        rows = draw_honest(step, generator)
        change(rows)
        return rows

    return draw


@pytest.mark.parametrize("rule", [Robust(f=2), MultiKrum(f=2)], ids=str)
def test_a_worker_that_is_far_off_is_at_fault_beside_one_that_copies(rule: Rule) -> None:
    def change(rows: Tensor) -> None:
        rows[3] = rows[0]
        rows[4] *= -10

    tracker, _ = watch(changed(5, change), rule, world_size=5)
    assert tracker.named() == [0, 3, 4]
    assert tracker.at_fault() == [4]


def test_two_workers_that_copy_two_others_are_named_with_them() -> None:
    def change(rows: Tensor) -> None:
        rows[3:] = rows[:2]

    tracker, _ = watch(changed(5, change), Robust(f=2), world_size=5)
    assert tracker.named() == [0, 1, 3, 4]
    assert tracker.at_fault() == []


def test_equal_workers_that_are_far_off_are_at_fault() -> None:
    def change(rows: Tensor) -> None:
        rows[3:] = -10 * rows[3]

    tracker, _ = watch(changed(5, change), Robust(f=2), world_size=5)
    assert tracker.named() == tracker.at_fault() == [3, 4]


@pytest.mark.parametrize("world_size", [4, 6])
def test_where_right_rows_are_equal_the_one_that_is_not_stands_out(world_size: int) -> None:
    def change(rows: Tensor) -> None:
        rows[:-1] = rows[0]

    tracker, _ = watch(changed(world_size, change), Robust(f=1), world_size=world_size)
    assert tracker.named() == tracker.at_fault() == [world_size - 1]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("world_size", "f", "num_copied"),
    [
        *(
            (world_size, f, 141)
            for world_size, f in [(3, 1), (4, 1), (5, 2), (6, 2), (7, 3), (8, 3)]
        ),
        *((world_size, f, 230) for world_size, f in [(3, 1), (4, 1), (6, 2)]),
    ],
)  # 55 % and 90 % of 256
def test_workers_that_copy_one_bucket_and_are_far_off_in_the_other_are_at_fault(
    world_size: int, f: int, num_copied: int
) -> None:
    wrong = list(range(world_size - f, world_size))

    def change(rows: Tensor) -> None:
        shards = rows.view(world_size, world_size, NUMEL)  # [worker, owner, value]
        shards[wrong, :, :num_copied] = shards[:f, :, :num_copied]
        shards[wrong, :, num_copied:] *= -10

    tracker, _ = watch(
        changed(world_size, change),
        Robust(f=f),
        world_size=world_size,
        bucket_sizes=(num_copied, NUMEL - num_copied),
    )
    assert tracker.at_fault() == wrong
    assert set(wrong) <= set(tracker.named()) <= {*range(f), *wrong}  # who is copied, by that


@pytest.mark.parametrize(("world_size", "f"), [(5, 2), (7, 3)])
def test_workers_that_copy_in_turn_and_are_far_off_in_turn_are_at_fault(
    world_size: int, f: int
) -> None:
    wrong = list(range(world_size - f, world_size))
    size = NUMEL // f

    def change(rows: Tensor) -> None:
        buckets = rows.view(world_size, world_size, NUMEL)[..., : f * size].chunk(f, dim=2)
        for turn, bucket in enumerate(buckets):
            for worker in wrong:
                if worker == wrong[turn]:
                    bucket[worker] *= -10
                else:
                    bucket[worker] = bucket[0]

    sizes = (*[size] * f, NUMEL - f * size)
    tracker, _ = watch(
        changed(world_size, change),
        Robust(f=f),
        world_size=world_size,
        num_steps=60,
        bucket_sizes=tuple(size for size in sizes if size),
    )
    assert tracker.at_fault() == wrong


@pytest.mark.parametrize("num_copied", [128, 141, 230])
def test_a_worker_that_copies_one_bucket_puts_nobody_at_fault(num_copied: int) -> None:
    def change(rows: Tensor) -> None:
        shards = rows.view(3, 3, NUMEL)  # [worker, owner, value]
        shards[2, :, :num_copied] = shards[0, :, :num_copied]

    sizes = (num_copied, NUMEL - num_copied)
    tracker, _ = watch(
        changed(3, change), Robust(f=1), world_size=3, num_steps=60, bucket_sizes=sizes
    )
    assert max(worker.fault for worker in tracker.workers) < 0.25


def test_a_worker_that_copies_and_is_far_off_is_at_fault_alone() -> None:
    def draw(step: int, generator: torch.Generator) -> Tensor:
        rows = honest(6)(step, generator)
        if step % 2:
            rows[5] = rows[0].clone()
        else:
            rows[5] = float("nan")
        return rows

    settings = Suspicion(threshold=0.3)
    tracker, _ = watch(draw, Robust(f=1), world_size=6, settings=settings)
    assert tracker.named() == [0, 5]
    assert tracker.at_fault() == [5]


@pytest.mark.parametrize(
    ("world_size", "rule", "by"), [(4, TrimmedMean(f=1), [3]), (6, TrimmedMean(f=2), [4, 5])]
)
def test_a_copied_row_does_not_make_the_other_honest_ones_stand_out(
    world_size: int, rule: Rule, by: list[int]
) -> None:
    tracker, warned = watch(copied(world_size, of=0, by=by), rule, world_size=world_size)
    assert warned == []
    assert max(worker.suspicion for worker in tracker.workers) < 0.58


def test_shards_of_zeros_are_no_copies() -> None:
    def draw(step: int, generator: torch.Generator) -> Tensor:
        rows = honest(5)(step, generator)
        rows[:2, NUMEL:] = 0.0  # all but the first owner's shard
        return rows

    tracker, _ = watch(draw, Robust(f=1), world_size=5)
    assert all(worker.share_copied == 0 for worker in tracker.workers)


def test_a_copy_in_a_part_of_the_values_counts_by_that_part() -> None:
    rows = honest(5)(0, torch.Generator().manual_seed(1))
    evidence = Evidence(5, SETTINGS)
    for span, is_copy in ((slice(0, 300), False), (slice(300, 400), True)):
        part = rows[:, span].clone()
        if is_copy:
            part[4] = part[0]
        evidence.add(diagnose(part, Robust(f=1), every=1)[1])
    evidence.step_reduced(Robust(f=1))
    tracker = SuspicionTracker(5, SETTINGS)
    tracker.observe(evidence.take()[None, :])
    assert [worker.share_copied for worker in tracker.workers] == [0.25, 0, 0, 0, 0.25]


@pytest.mark.parametrize(
    ("rule", "least"),
    [(Robust(f=1), 0.5), (MultiKrum(f=1), 0.95)],  # clipped first, or not
    ids=str,
)
def test_a_worker_that_is_always_left_out_is_shown_and_not_named_by_that_alone(
    rule: Rule, least: float
) -> None:
    own = torch.randn(6 * NUMEL, generator=torch.Generator().manual_seed(9))

    def draw(step: int, generator: torch.Generator) -> Tensor:
        rows = honest(6)(step, generator)
        rows[5] += own  # a kind of samples that the others do not have
        return rows

    tracker, warned = watch(draw, rule, world_size=6, num_steps=200)
    assert warned == []
    assert tracker.workers[5].share_left_out > least
    assert max(worker.share_left_out for worker in tracker.workers[:5]) < 0.2
    assert 0.3 < tracker.workers[5].suspicion < 0.6


def test_where_workers_are_apart_distances_name_nobody() -> None:
    rows = attacked(5, attacks.Scaled(), signal=0.5)(0, torch.Generator().manual_seed(1))
    rows[0] = float("nan")
    for rule in (TrimmedMean(f=2), Robust(f=2)):
        found = diagnose(rows, rule, every=1)[1]
        scores = score_rows(found, rule)
        assert scores is not None
        assert (scores[0], scores[4]) == (1.0, 1.0)
        scores = score_rows(found, rule, are_apart=True)
        assert scores is not None
        assert (scores[0], scores[4]) == (1.0, 0.5)


@pytest.mark.parametrize("threshold", [0.05, 0.3])
@pytest.mark.parametrize("rule", [TrimmedMean(f=1), Robust(f=1), MultiKrum(f=1)], ids=str)
def test_where_workers_are_apart_distances_name_nobody_at_any_threshold(
    rule: Rule, threshold: float
) -> None:
    own = 3 * torch.randn(6 * NUMEL, generator=torch.Generator().manual_seed(9))

    def draw(step: int, generator: torch.Generator) -> Tensor:
        rows = honest(6)(step, generator)
        rows[5] += own  # a kind of samples that the others do not have
        return rows

    settings = Suspicion(threshold=threshold)
    tracker, warned = watch(draw, rule, world_size=6, settings=settings, are_apart=True)
    assert warned == []
    assert tracker.workers[5].suspicion > 0.4 * threshold


def test_a_long_row_is_seen_to_be_clipped() -> None:
    draw = attacked(6, attacks.Scaled(3.0), signal=0.5)
    tracker, warned = watch(draw, Robust(f=1), world_size=6)
    assert {row for _, row in warned} <= {5}
    assert tracker.workers[5].share_clipped > 0.95


@pytest.mark.parametrize("num_rows", [1, 2])
def test_of_fewer_than_three_rows_nobody_is_accused(num_rows: int) -> None:
    rows = torch.randn(num_rows, NUMEL)
    rows[0] = float("nan")
    found = diagnose(rows, Median(), every=1)[1]
    assert score_rows(found, Median()) is None


def test_absent_rows_get_no_score() -> None:
    rows = torch.randn(5, NUMEL, generator=torch.Generator().manual_seed(1))
    found = diagnose(rows, Median(), present=[True, True, True, True, False], every=1)[1]
    scores = score_rows(found, Median())
    assert scores is not None
    assert scores[4] == 0.0


@pytest.mark.parametrize("what", ["every", "interval", "patience"])
def test_settings_are_checked(what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        Suspicion(**{what: 0})
    with pytest.raises(ArgumentTypeError, match=what):
        Suspicion(**{what: 1.5})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="threshold"):
        Suspicion(threshold=1.0)


def test_steps_in_which_a_worker_was_left_out_say_nothing_of_it() -> None:
    evidence, rule = Evidence(5, SETTINGS), TrimmedMean(f=1)
    tracker = SuspicionTracker(5, SETTINGS)
    rows = honest(5)(0, torch.Generator().manual_seed(3))
    rows[4] = float("nan")
    for interval in range(8):
        for step in range(10):
            present = [True] * 4 + [interval < 5 or step == 0]
            evidence.add(diagnose(rows, rule, present=present, every=1)[1])
            evidence.step_reduced(rule)
        tracker.observe(evidence.take()[None, :])
    assert tracker.named() == [4]
    assert tracker.workers[4].num_steps == 53
    assert tracker.workers[4].suspicion > 0.9


def test_a_closed_step_is_scored_by_itself_whenever_that_is_asked_for() -> None:
    """By what it was closed with, though another thread has begun to add the next one's buckets."""
    rows = honest(5)(0, torch.Generator().manual_seed(4))
    rows[4] *= -10
    steps: list[tuple[Rule, list[int] | None, bool]] = [
        (Robust(f=1), None, False),
        (TrimmedMean(f=1), [4, 4, 4, 4, 1], False),
        (Robust(f=1), None, True),
        (MultiKrum(f=1), [1, 2, 3, 4, 5], False),
    ]

    def taken(*, scores_at_once: bool, num_steps: int) -> np.ndarray:
        evidence = Evidence(5, SETTINGS)
        for rule, weights, are_apart in steps[:num_steps]:
            evidence.add(diagnose(rows, rule, every=1)[1])
            if not scores_at_once:
                evidence.score()  # the step before, with a bucket of this one there
            evidence.step_reduced(rule, weights=weights, are_apart=are_apart)
            if scores_at_once:
                evidence.score()
        return evidence.take().reshape(-1, 5)

    for num_steps in range(1, len(steps) + 1):
        at_once = taken(scores_at_once=True, num_steps=num_steps)
        later = taken(scores_at_once=False, num_steps=num_steps)
        np.testing.assert_array_equal(later, at_once)
        assert at_once[1].tolist() == [num_steps] * 5


@pytest.mark.parametrize("factor", [1e100, 1e200])
def test_a_float64_worker_too_long_to_be_squared_is_named(factor: float) -> None:
    draw_honest = honest(4)

    def draw(step: int, generator: torch.Generator) -> Tensor:
        rows = draw_honest(step, generator).double()
        rows[3] *= factor
        return rows

    tracker, warned = watch(draw, TrimmedMean(f=1), world_size=4, num_steps=60)
    assert {row for _, row in warned} == {3}
    assert all(np.isfinite(worker.distance) for worker in tracker.workers)

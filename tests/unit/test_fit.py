"""Laws of the fit: what it learns from intervals, and what it says it cannot tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from loft_hvd.balance.explain import describe_fit, fit_record
from loft_hvd.balance.fit import Fit, Fitter, Past
from loft_hvd.balance.interval import COLUMNS, COMPUTE, FETCH, Interval
from loft_hvd.balance.latency import StepModel
from loft_hvd.codec import decode, encode
from tests.support.clusters import OVERLAPS, measure, random_model

modes = pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=OVERLAPS.keys())


def feed(
    fitter: Fitter, model: StepModel, plans: list[list[int]], *, noise: float = 0.0, seed: int = 0
) -> None:
    """Add an interval a plan."""
    for number, sizes in enumerate(plans):
        rows, step_s = measure(
            model, tuple(sizes), seed=[seed, number, len(plans)], noise=noise, steps=20
        )
        add(fitter, rows, sizes, step_s)


def add(
    fitter: Fitter, rows: npt.NDArray[np.float64], sizes: list[int], step_s: float = 1.0
) -> None:
    fitter.add(Interval(0, np.array(sizes), rows, np.ones(len(sizes), bool), step_s))


@modes
def test_the_fit_predicts_sizes_it_has_not_seen(overlap: float | None) -> None:
    for seed in range(10):
        model = replace(random_model(seed, 4, overlap), plateau_s=np.zeros(4))
        plans = [[64] * 4, [90, 38, 90, 38], [38, 90, 38, 90], [80, 48, 70, 58], [120, 20, 96, 20]]
        fitter = Fitter(4)
        feed(fitter, model, plans)
        fit = fitter.fit()
        assert fit is not None
        sizes = [70.0, 60.0, 75.0, 51.0]
        assert fit.model.times(sizes) == pytest.approx(model.times(sizes), rel=0.08), f"seed {seed}"


def test_what_sizes_saved_is_judged_by_the_speeds_of_their_own_interval() -> None:
    model = StepModel.build(3, compute_s=[1e-3, 2e-3, 3e-3], aggregate_s=0.02)
    before, now = [60, 60, 60], [96, 50, 34]
    fitter = Fitter(3)
    feed(fitter, model, [before, [80, 60, 40], before, [80, 60, 40]], noise=0.01)
    fit = fitter.fit()
    assert fit is not None
    # All ranks have become three times as slow since: a step is longer, and would have been longer
    # by more.
    slow = replace(model, compute_s=3 * model.compute_s)
    rows, step_s = measure(slow, tuple(now), seed=[9], noise=0.01, steps=20)
    interval = Interval(0, np.array(now), rows, np.ones(3, bool), step_s)
    assert step_s > model.step_s(before)
    saved = 1 - slow.step_s(now) / slow.step_s(before)
    assert fit.saved(interval, before) == pytest.approx(saved, abs=0.03)
    assert fit.saved(interval, now) == pytest.approx(0, abs=1e-9)


def test_errors_that_both_sides_of_a_gain_share_cancel() -> None:
    model = StepModel.build(3, compute_s=[1e-3, 2e-3, 3e-3], aggregate_s=0.02)
    fitter = Fitter(3)
    feed(fitter, model, [[60, 60, 60], [80, 60, 40], [60, 60, 60], [80, 60, 40]], noise=0.05)
    fit = fitter.fit()
    assert fit is not None
    same, near, far = (
        fit.gain([80, 60, 40], sizes) for sizes in ([80, 60, 40], [78, 61, 41], [110, 50, 20])
    )
    assert same.error_s == 0.0
    assert 0.0 < near.error_s < far.error_s
    assert near.error_s < 0.2 * np.linalg.norm(fit.stderr([80, 60, 40]))


def test_one_size_cannot_tell_fixed_from_per_sample_and_says_so() -> None:
    model = StepModel.build(2, compute_fixed_s=0.05, compute_s=1e-3)
    fitter = Fitter(2)
    feed(fitter, model, [[64, 64]] * 6, noise=0.02)
    fit = fitter.fit()
    assert fit is not None
    assert all("compute_fixed_s" in terms for terms in fit.unclear)
    assert fit.model.times([64, 64]) == pytest.approx(model.times([64, 64]), rel=0.02)
    feed(fitter, model, [[32, 96], [96, 32], [48, 80], [80, 48]] * 4, noise=0.02)
    fit = fitter.fit()
    assert fit is not None
    assert fit.unclear == ((), ())
    assert fit.model.compute_fixed_s == pytest.approx([0.05, 0.05], rel=0.1)


def test_one_wild_interval_does_not_bend_the_fit() -> None:
    model = StepModel.build(3, compute_fixed_s=0.01, compute_s=1e-3)
    fitter = Fitter(3)
    feed(fitter, model, [[64, 64, 64], [80, 60, 52], [60, 72, 60]] * 3, noise=0.02)
    feed(fitter, model, [[64, 64, 64]] * 4, noise=0.02, seed=1)
    rows, _ = measure(model, (64, 64, 64), seed=[9], noise=0.02, steps=20)
    rows[1, COMPUTE] *= 0.3  # a rank cannot be this fast for once
    add(fitter, rows, [64, 64, 64])
    feed(fitter, model, [[64, 64, 64]] * 2, noise=0.02, seed=2)
    fit = fitter.fit()
    assert fit is not None
    assert fit.model.times([64, 64, 64]) == pytest.approx(model.times([64, 64, 64]), rel=0.05)


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_a_changed_rank_is_known_after_two_intervals(factor: float) -> None:
    model = StepModel.build(3, compute_fixed_s=0.01, compute_s=1e-3)
    slower = np.array([1.0, factor, 1.0])
    changed = replace(
        model,
        compute_fixed_s=model.compute_fixed_s * slower,
        compute_s=model.compute_s * slower,
    )
    fitter = Fitter(3)
    feed(fitter, model, [[64, 64, 64], [80, 60, 52], [60, 72, 60], [64, 64, 64]] * 3, noise=0.02)
    feed(fitter, changed, [[64, 64, 64]] * 2, noise=0.02, seed=1)
    fit = fitter.fit()
    assert fit is not None
    assert fit.model.times([64, 32, 64])[1] == pytest.approx(
        changed.times([64, 32, 64])[1], rel=0.1
    )


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_counts_tell_home_first_reading_from_a_hit_rate(share: float) -> None:
    model = StepModel.build(
        2,
        local_s=1e-4,
        remote_s=2e-3,
        hit_share=share,
        hits=20.0 if share == 1.0 else np.inf,
        compute_s=1e-3,
    )
    fitter = Fitter(2)
    feed(fitter, model, [[64, 64], [90, 38], [38, 90], [80, 48]])
    fit = fitter.fit()
    assert fit is not None
    sizes = np.array([50.0, 110.0])
    assert fit.model.local(sizes) == pytest.approx(model.local(sizes))


@modes
def test_overlap_is_measured(overlap: float | None) -> None:
    model = random_model(3, 4, overlap)
    fitter = Fitter(4)
    feed(fitter, model, [[64] * 4, [70, 58, 70, 58]] * 3)
    fit = fitter.fit()
    assert fit is not None
    assert fit.model.overlap == pytest.approx(model.overlap, abs=0.03)


def paced(paces: Sequence[float], *, ranks: int = 3, of: int = 1) -> Fit:
    """Fit intervals at one size in which the first ``of`` ranks take ``pace`` times as long."""
    fitter, model = Fitter(ranks), StepModel.build(ranks, compute_s=1e-3)
    for pace in paces:
        factors = np.where(np.arange(ranks) < of, pace, 1.0)
        feed(fitter, replace(model, compute_s=factors * model.compute_s), [[60] * ranks])
    fit = fitter.fit()
    assert fit is not None
    return fit


def test_a_rank_that_shifts_again_and_again_is_expected_to() -> None:
    chances, factors = paced([1, 1, 1, 2, 2, 1, 1, 2, 1, 1]).shifts
    # Six intervals were at today's pace before another one, and two of these at the other pace.
    assert chances[1] == pytest.approx([2 / (6 + 12), 0, 0], abs=1e-9)
    assert factors[1, 0] == pytest.approx(2, rel=0.05)
    assert not chances[0].any()


def test_shifts_to_a_faster_and_to_a_slower_pace_are_kept_apart() -> None:
    chances, factors = paced([1, 2, 1, 0.5, 1, 2, 1, 0.5, 1]).shifts
    assert chances[:, 0] == pytest.approx([2 / (4 + 12)] * 2)
    assert factors[:, 0] == pytest.approx([0.5, 2], rel=0.05)


@pytest.mark.parametrize("paces", [[1] * 10, [1, 1.1] * 5, [1, 1.17] * 5, [1]], ids=str)
def test_a_rank_that_wobbles_does_not_shift(paces: list[float]) -> None:
    assert not paced(paces).shifts[0].any()


def test_a_shift_of_pace_at_other_sizes_is_none() -> None:
    fitter = Fitter(2)
    model = StepModel.build(2, compute_fixed_s=0.05, compute_s=1e-3)
    feed(fitter, model, [[60, 60], [20, 100]] * 5)
    fit = fitter.fit()
    assert fit is not None
    assert not fit.shifts[0].any()


def test_a_step_counts_what_ranks_take_when_they_shift() -> None:
    fit = paced([1, 1, 2, 1, 1, 2, 1, 1, 2, 1, 1, 1])
    chance, factor = fit.shifts[0][1, 0], fit.shifts[1][1, 0]
    assert chance > 0.1
    stays = replace(fit, shifts=(np.zeros((2, 3)), np.ones((2, 3))))
    slow = fit.model.compute_s * np.array([factor, 1, 1])
    shifted = replace(stays, model=replace(fit.model, compute_s=slow))
    for sizes in ([60, 60, 60], [30, 75, 75]):
        due = [each.promise(sizes, with_errors=False)[0] for each in (stays, shifted)]
        found, _ = fit.promise(sizes, with_errors=False)
        assert found == pytest.approx((1 - chance) * due[0] + chance * due[1], rel=1e-3)


def test_shifts_of_many_ranks_count_up_to_a_bound() -> None:
    chances, _ = paced([1, 2] * 8 + [1], ranks=40, of=30).shifts
    assert np.count_nonzero(chances) == 16
    assert chances.sum() == pytest.approx(0.9)


def cut(
    paces: Sequence[float],
    sizes: Sequence[int],
    *,
    knee: float = 0.0,
    fixed_s: float = 0.0,
    most: int = 0,
    noise: float = 0.003,
) -> Fitter:
    """Return what two ranks of 1 ms a sample show, the second paced and with a knee as given.

    Where it is paced by 0 nothing is heard of it. A pass has ``most`` samples at most, 0 for any.
    """
    fitter = Fitter(2, pass_size=most or np.inf)
    for number, (pace, size) in enumerate(zip(paces, sizes, strict=True)):
        model = StepModel.build(
            2,
            compute_s=[1e-3, max(pace, 1.0) * 1e-3],
            compute_fixed_s=[0, fixed_s],
            plateau_s=[0, pace * knee * 1e-3],
            pass_size=most or np.inf,
        )
        rows, step_s = measure(model, (60, size), seed=[number], noise=noise, steps=20)
        heard = np.array([True, pace > 0])
        fitter.add(Interval(0, np.array([60, size]), rows, heard, step_s))
    return fitter


def known(fitter: Fitter) -> Fit:
    fit = fitter.fit()
    assert fit is not None
    return fit


# Above the knee of 40 twice, then below.
CUTS = [64, 64, 50, 40, 34, 28]


def test_a_knee_is_found_by_two_cuts_in_vain() -> None:
    assert not known(cut([1] * 5, CUTS[:5], knee=40)).knee.any()
    fit = known(cut([1] * 6, CUTS, knee=40))
    assert fit.knee.tolist() == [0, 40]
    assert fit.model.times([60, 6])[1] == pytest.approx(0.040, rel=0.03)
    assert fit.model.times([60, 64])[1] == pytest.approx(0.064, rel=0.1)
    assert "a sample, no less below 40 in a pass;" in "".join(describe_fit(fit))


def test_what_is_logged_of_a_rank_with_a_knee_makes_up_what_is_foretold() -> None:
    [logged] = fit_record(known(cut([1] * 6, CUTS, knee=40)), [1], sizes=[60, 28])
    samples = max(28, logged["knee"])
    due = logged["compute_fixed_s"] + logged["compute_s"] * samples
    assert logged["predicted_s"] == pytest.approx(due)
    assert due == pytest.approx(0.040, rel=0.03)


def test_a_knee_is_of_a_pass() -> None:
    fit = known(cut([1] * 8, [160, 160, 128, 100, 80, 64, 54, 44], knee=40, most=32))
    assert fit.knee[1] == pytest.approx(32, abs=2)


@pytest.mark.parametrize(
    ("paces", "sizes"),
    [
        ([1] * 6, CUTS),  # nothing happens but the cuts
        ([1, 1, 1.2, 1.6, 2.2, 2.4], CUTS),  # slower in each
        # As much slower as it is cut, twice, and as fast as ever between.
        ([1, 1, 1.25, 1, 1, 1, 1, 1.2], [200, 200, 160, 144, 129, 116, 104, 88]),
    ],
)
def test_who_computes_in_proportion_has_no_knee(paces: list[float], sizes: list[int]) -> None:
    assert not known(cut(paces, sizes)).knee.any()


def test_a_rank_that_is_fixed_by_four_fifths_has_no_knee() -> None:
    assert not known(cut([1] * 6, CUTS, fixed_s=0.25)).knee.any()


@pytest.mark.parametrize(("pace", "size"), [(0.7, 28), (1.5, 28), (1.5, 38)])
def test_a_knee_is_forgotten_once_the_pace_changes(pace: float, size: int) -> None:
    assert not known(cut([1] * 6 + [pace], [*CUTS, size], knee=40)).knee.any()


@pytest.mark.parametrize("sizes", [[64], [64, 50], [64, 38], [52, 40], [64, 50, 38, 34, 28]])
def test_a_knee_stays_while_its_rank_goes_above_it_and_back(sizes: list[int]) -> None:
    fit = known(cut([1] * (6 + len(sizes)), [*CUTS, *sizes], knee=40))
    assert fit.knee[1] == pytest.approx(40, rel=0.06)


@pytest.mark.parametrize(
    ("paces", "sizes"),
    [
        # One cut in vain each time, and another pace, or a larger batch, between.
        ([1, 1.25, 1.4, 1.75], [100, 80, 80, 64]),
        ([1, 1.25, 1, 1.25], [100, 80, 120, 96]),
    ],
)
def test_cuts_in_vain_count_only_on_end(paces: list[float], sizes: list[int]) -> None:
    assert not known(cut(paces, sizes)).knee.any()


def test_a_cut_that_times_could_hide_shows_no_knee() -> None:
    assert known(cut([1] * 6, CUTS, knee=40)).knee[1] == 40
    assert known(cut([1] * 6, CUTS, knee=40, noise=0.3)).knee[1] == 0


def test_a_knee_fades_while_its_rank_is_heard_of_until_it_is_tried_again() -> None:
    heard = cut([1] * 30, CUTS + [28] * 24, knee=40)
    silent = cut([1] * 6 + [0] * 24, CUTS + [28] * 24, knee=40)
    assert known(heard).knee[1] == pytest.approx(40 * 0.99**24)
    assert known(silent).knee[1] == 40
    assert not known(cut([1] * 400, CUTS + [28] * 394, knee=40)).knee.any()


def test_a_state_from_before_shifts_and_knees_were_kept_goes_on() -> None:
    fitter = Fitter(2)
    feed(fitter, StepModel.build(2, compute_s=1e-3), [[60, 60]] * 3)
    state = encode(fitter.past)
    for name in ("tracks", "knees"):
        del state[name]
    fitter.past = decode(Past, state, what="past")
    feed(fitter, StepModel.build(2, compute_s=1e-3), [[60, 60]])
    fitter.past.tracks = []
    fit = fitter.fit()
    assert fit is not None
    assert not fit.shifts[0].any()


def test_a_state_goes_on_as_the_fit_did() -> None:
    model = random_model(5, 4, None)
    first, second = Fitter(4), Fitter(4)
    feed(first, model, [[64] * 4, [90, 38, 90, 38], [40, 88, 40, 88]], noise=0.03)
    second.past = decode(Past, encode(first.past), what="past")
    for fitter in (first, second):
        feed(fitter, model, [[60, 70, 60, 66]] * 3, noise=0.03, seed=1)
    one, two = first.fit(), second.fit()
    assert one is not None
    assert two is not None
    assert one.model.times([64.0] * 4) == pytest.approx(two.model.times([64.0] * 4), rel=1e-6)


def test_rows_have_the_documented_columns() -> None:
    assert COLUMNS[FETCH] == "fetch_s"
    assert COLUMNS[COMPUTE] == "compute_s"

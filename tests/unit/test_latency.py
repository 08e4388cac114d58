"""Laws of the latency model and of its fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from loft_hvd.balance.fit import Fitter, Past
from loft_hvd.balance.interval import COLUMNS, COMPUTE, FETCH, Interval
from loft_hvd.balance.latency import StepModel, queued_samples
from loft_hvd.codec import decode, encode
from loft_hvd.errors import ArgumentError
from tests.support.clusters import OVERLAPS, measure, random_model

modes = pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=OVERLAPS.keys())


def feed(
    fitter: Fitter, model: StepModel, plans: list[list[int]], *, noise: float = 0.0, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Add an interval a plan; returns how often each rank changed, [world_size]."""
    num_changes = np.zeros(model.world_size, np.int64)
    for number, sizes in enumerate(plans):
        rows, step_s = measure(
            model, tuple(sizes), seed=[seed, number, len(plans)], noise=noise, steps=20
        )
        num_changes += add(fitter, rows, sizes, step_s)
    return num_changes


def add(
    fitter: Fitter, rows: npt.NDArray[np.float64], sizes: list[int], step_s: float = 1.0
) -> npt.NDArray[np.bool_]:
    changed = fitter.add(Interval(0, np.array(sizes), rows, np.ones(len(sizes), bool), step_s))
    fitter.fit()
    return changed


@modes
def test_times_never_fall_as_a_batch_grows(overlap: float | None) -> None:
    for seed in range(50):
        model = random_model(seed, 6, overlap)
        times = model.times(np.arange(200.0)[:, None] * np.ones(6))
        assert (np.diff(times, axis=0) >= -1e-12).all(), f"seed {seed}"


@modes
def test_curves_are_the_model(overlap: float | None) -> None:
    for seed in range(50):
        model = random_model(seed, 6, overlap)
        curves = model.curves(np.ones(6), np.full(6, 300.0))
        for size in (1, 7, 33, 64.5, 150, 299):
            sizes = np.full(6, float(size))
            assert curves.times(sizes) == pytest.approx(model.times(sizes)), f"seed {seed}"


@pytest.mark.parametrize(("overlap", "expected"), [(0.0, 0.5), (1.0, 0.3), (0.25, 0.45)])
def test_overlap_hides_its_share_of_the_shorter_part(overlap: float, expected: float) -> None:
    model = StepModel.build(1, fetch_fixed_s=0.2, compute_fixed_s=0.3, overlap=overlap)
    assert model.times([1.0])[0] == pytest.approx(expected)


def test_a_shared_source_serves_everybody_alike() -> None:
    rng = np.random.default_rng(0)
    remote = rng.integers(0, 9, (5, 7)).astype(float)
    source = np.array([0, 1, 0, -1, 1, 0, -1])
    queued, sharing = queued_samples(remote, source)
    for i in range(7):
        peers = [j for j in range(7) if source[j] == source[i]]
        served = sum(np.minimum(remote[:, i], remote[:, j]) for j in peers)
        still = sum((remote[:, j] >= remote[:, i]).astype(float) for j in peers)
        assert (queued[:, i] == (served if source[i] >= 0 else 0)).all()
        if source[i] >= 0:
            assert (sharing[:, i] == still).all()


def test_less_from_a_shared_source_is_faster_for_all() -> None:
    model = StepModel.build(3, shared_s=1e-3, hits=0.0, source=0, compute_s=1e-3)
    assert (model.times([10, 20, 20]) <= model.times([10, 20, 30])).all()


@pytest.mark.parametrize("terms", [{"overlap": 1.5}, {"compute_s": -1.0}, {"speed": 1.0}])
def test_impossible_terms_are_refused(terms: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match="StepModel"):
        StepModel.build(2, **terms)


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


def test_one_size_cannot_tell_fixed_from_per_sample_and_says_so() -> None:
    model = StepModel.build(2, compute_fixed_s=0.05, compute_s=1e-3)
    fitter = Fitter(2)
    feed(fitter, model, [[64, 64]] * 6, noise=0.02)
    fit = fitter.fit()
    assert fit is not None
    assert all("compute_fixed_s" in terms for terms in fit.unclear)
    assert fit.model.times([64, 64]) == pytest.approx(model.times([64, 64]), rel=0.02)
    feed(fitter, model, [[32, 96], [96, 32], [48, 80], [80, 48]] * 2, noise=0.02)
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
    num_changes = feed(fitter, changed, [[64, 64, 64]] * 2, noise=0.02, seed=1)
    fit = fitter.fit()
    assert fit is not None
    assert num_changes[1] >= 1
    assert fit.model.times([64, 32, 64])[1] == pytest.approx(
        changed.times([64, 32, 64])[1], rel=0.1
    )


def test_evidence_chooses_the_saturating_form() -> None:
    knee = np.array([0.0, 48.0])
    model = StepModel.build(
        2,
        compute_fixed_s=0.01,
        compute_s=1e-3,
        plateau_s=np.where(knee > 0, 0.01 + 1e-3 * knee, 0.0),
    )
    fitter = Fitter(2)
    plans = [[size, 128 - size] for size in (64, 16, 112, 32, 96, 48, 80, 24, 104)]
    feed(fitter, model, plans, noise=0.01)
    fit = fitter.fit()
    assert fit is not None
    assert fit.knee[0] == 0
    assert fit.knee[1] == pytest.approx(48, abs=12)
    for size in (20.0, 48.0, 100.0):
        sizes = [size, size]
        assert fit.model.times(sizes) == pytest.approx(model.times(sizes), rel=0.06)


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

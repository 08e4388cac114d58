"""Laws of the latency model."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.balance.interval import skewness, typical
from loft_hvd.balance.latency import StepModel, queued_samples, typical_longest
from loft_hvd.errors import ArgumentError
from tests.support.clusters import OVERLAPS, random_model

modes = pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=OVERLAPS.keys())


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


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 128])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("skew", [0.0, 0.5, 1.1])
def test_the_longest_of_noisy_ranks_takes_longer_than_the_longest_mean(
    num_ranks: int, spread: float, skew: float
) -> None:
    rng = np.random.default_rng(num_ranks)
    scale = 0.05 * (1.0 + spread * rng.random(num_ranks))
    normal = rng.normal(size=(8_000, num_ranks))
    drawn = 20.0 * scale + scale * (np.expm1(skew * normal) / skew if skew else normal)
    means, variances = typical(drawn)
    value, chance = typical_longest(means, np.sqrt(variances), skew)
    longest = drawn.max(axis=1)
    usual, variance = typical(longest)
    assert value == pytest.approx(float(usual), abs=0.05 * np.sqrt(float(variance)))
    low, high = np.quantile(longest, (0.2, 0.8))
    kept = drawn[(longest > low) & (longest < high)]
    often = np.bincount(kept.argmax(axis=1), minlength=num_ranks) / len(kept)
    assert chance == pytest.approx(often, abs=0.02)


@pytest.mark.parametrize("num_ranks", [8, 128])
def test_the_longest_of_times_with_the_tails_of_a_pareto_distribution(num_ranks: int) -> None:
    rng = np.random.default_rng(7)
    drawn = 1.0 + 0.1 * rng.pareto(2.5, (8_000, num_ranks))
    means, variances = typical(drawn)
    skew = float(np.log(np.median(skewness(drawn))) / 0.8416)
    usual, _ = typical(drawn.max(axis=1))
    chance_adds = typical_longest(means, np.sqrt(variances), skew)[0] - means[0]
    assert chance_adds == pytest.approx(float(usual) - means[0], rel=0.15)
    normal_adds = typical_longest(means, np.sqrt(variances), 0.0)[0] - means[0]
    assert normal_adds < 0.5 * chance_adds


def test_without_noise_the_longest_is_the_longest_mean() -> None:
    value, chance = typical_longest(np.array([1.0, 3.0, 2.0]), np.zeros(3), 0.0)
    assert value == pytest.approx(3.0, rel=1e-3)
    assert chance == pytest.approx([0.0, 1.0, 0.0])

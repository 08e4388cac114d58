"""Laws of the latency model."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.balance.latency import StepModel, queued_samples
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

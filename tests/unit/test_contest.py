"""Laws of the contest: the mixture is not behind its best predictor, and what each one is for."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.balance.contest import PREDICTORS, Contest
from loft_hvd.balance.plan import Floats

ONE = np.ones(1, bool)


def show(contest: Contest, size: float, seconds: float, *, noise: float = 0.01) -> None:
    """Let a rank compute ``size`` samples in so many seconds."""
    contest.observe(
        np.array([[1.0, size]]),
        np.array([seconds]),
        errors=np.array([noise * seconds]),
        valid=ONE,
        start=np.array([[0.0, seconds / size]]),
    )


def foretold(contest: Contest, size: float) -> float:
    return float(contest.foretell().predict(np.array([[1.0, size]]))[0])


def densities(contest: Contest, size: float, seconds: float, noise: float) -> Floats:
    """Return how likely each predictor held these seconds."""
    shown = np.array([1.0, size, 0.0])
    mean = contest.states[:, 0] @ shown
    variance = np.einsum("kij,i,j->k", contest.covariance[:, 0], shown, shown)
    variance += (noise * seconds) ** 2 + (0.01 * seconds) ** 2
    unit = np.exp(-0.5 * (seconds - mean) ** 2 / variance)
    density: Floats = unit / np.sqrt(2 * np.pi * variance)
    return density


def course(kind: str, rng: np.random.Generator) -> Floats:
    """Return the seconds of 200 intervals."""
    at = np.arange(200)
    level = {
        "steady": np.ones(200),
        "wave": 1.4 ** np.sin(at / 8),
        "jumps": np.exp(np.cumsum(np.where(rng.random(200) < 0.05, rng.normal(0, 0.7, 200), 0))),
        "walk": np.exp(np.cumsum(rng.normal(0, 0.05, 200))),
    }[kind]
    seconds: Floats = 0.2 * level * rng.normal(1.0, 0.01, 200)
    return seconds


@pytest.mark.parametrize("kind", ["steady", "wave", "jumps", "walk"])
def test_the_mixture_is_behind_its_best_predictor_by_a_tenth_of_a_nat_an_interval(
    kind: str,
) -> None:
    contest, rng = Contest.of(1, 2), np.random.default_rng(5)
    of_each, of_all = np.zeros(len(PREDICTORS)), 0.0
    for number, seconds in enumerate(course(kind, rng)):
        size = 64.0 + 16 * (number % 3)
        seconds *= size / 64
        if number:
            held = densities(contest, size, seconds, 0.01)
            of_each -= np.log(held)
            of_all -= float(np.log(contest.weights[:, 0] @ held))
        show(contest, size, seconds)
    assert contest.weights.sum() == pytest.approx(1.0)
    # The fixed share: ln 6 at the start, and ln(1 / 0.9) an interval.
    lasting = np.delete(of_each, PREDICTORS.index("last"))
    assert of_all <= lasting.min() + np.log(6) + 200 * np.log(1 / 0.9)


def test_a_jump_is_followed_at_once() -> None:
    contest = Contest.of(1, 2)
    for _ in range(20):
        show(contest, 64, 0.2)
    show(contest, 64, 0.6)
    assert foretold(contest, 64) == pytest.approx(0.6, rel=0.05)


def test_a_trend_is_foretold_beyond_the_last_interval() -> None:
    contest, seconds = Contest.of(1, 2), 0.2
    for _ in range(30):
        seconds *= 1.04
        show(contest, 64, seconds)
    assert foretold(contest, 64) == pytest.approx(1.04 * seconds, rel=0.02)


def test_a_speed_that_wanders_while_sizes_follow_it_teaches_no_wrong_shape() -> None:
    # A batch is as the speed was one interval before, so that its time hardly changes.
    contest, size = Contest.of(1, 2), 64.0
    for level in 1.5 ** np.sin(np.arange(100) / 8):
        show(contest, size, level * (0.02 + 3e-3 * size))
        size = 64 / level
    truth = (0.02 + 3e-3 * size / 2) / (0.02 + 3e-3 * size)
    assert foretold(contest, size / 2) / foretold(contest, size) == pytest.approx(truth, rel=0.2)


@pytest.mark.parametrize(("factor", "most"), [(0.5, 2.0), (2.0, 1.1), (4.0, 1.1)])
def test_what_is_not_known_of_a_shape_stays_so_after_a_jump(factor: float, most: float) -> None:
    contest = Contest.of(1, 2)

    def unknown() -> float:
        fixed_s = float(np.sqrt(contest.foretell().covariance[0, 0, 0]))
        return fixed_s / foretold(contest, 64)

    for _ in range(20):
        show(contest, 64, 0.1)
    before = unknown()
    for _ in range(2):
        show(contest, 64, 0.1 * factor)
    assert before > 0.2
    assert 0.9 * before < unknown() < most * before


@pytest.mark.parametrize("factor", [0.0, 1e-3, 0.01, 0.05])
def test_a_time_that_was_short_for_a_while_comes_back(factor: float) -> None:
    contest = Contest.of(1, 2)
    for seconds in [0.1] * 10 + [0.1 * factor] * 3 + [0.1] * 4:
        show(contest, 64, seconds)
    assert foretold(contest, 64) == pytest.approx(0.1, rel=0.02)


def test_after_a_drop_no_more_is_known_than_was_measured() -> None:
    contest = Contest.of(1, 2)
    for _ in range(10):
        show(contest, 64, 0.1)
    show(contest, 64, 0.05, noise=0.1)
    assert contest.foretell().level_error[0] > 0.08


def test_sizes_that_vary_tell_what_is_fixed() -> None:
    contest = Contest.of(1, 2)
    for size in (64, 32, 96, 48, 80, 40, 64):
        show(contest, size, 0.1 + 1e-3 * size)
    terms = contest.foretell().terms[0]
    assert terms == pytest.approx([0.1, 1e-3], rel=0.1)


def test_a_rank_without_a_measurement_keeps_what_is_known_of_it() -> None:
    contest = Contest.of(2, 2)
    for valid in (np.array([True, True]), np.array([True, False])):
        contest.observe(
            np.array([[1.0, 64.0], [1.0, 64.0]]),
            np.array([0.2, 0.3]) if valid.all() else np.array([0.2, 0.0]),
            errors=np.zeros(2),
            valid=valid,
            start=np.array([[0.0, 0.2 / 64], [0.0, 0.3 / 64]]),
        )
    features = np.array([[1.0, 64.0], [1.0, 64.0]])
    assert contest.foretell().predict(features) == pytest.approx([0.2, 0.3], rel=0.02)
    assert contest.num_rows.tolist() == [2, 1]

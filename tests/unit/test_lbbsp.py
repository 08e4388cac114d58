"""Laws of LB-BSP, as published in kind, and of its predictors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from loft_hvd.balance.controller import Controller
from loft_hvd.balance.latency import StepModel
from loft_hvd.balance.lbbsp import PREDICTORS, ExponentialAverage, Narx, Predictor
from loft_hvd.codec import decode, encode
from tests.support.clusters import drive


def errors_of(predictor: Predictor, speeds: np.ndarray, use: np.ndarray) -> float:
    """Return the root mean square relative error of one-ahead predictions, first 100 left out."""
    misses = []
    for number, speed in enumerate(speeds):
        if number >= 100:
            misses.append((predictor.predict() - speed) / speed)
        predictor.observe(speed, use[number], np.ones(len(speed), bool))
    return float(np.sqrt(np.mean(np.square(misses))))


def loaded_speeds(seed: int, *, is_informative: bool) -> tuple[np.ndarray, np.ndarray]:
    """Draw speeds under bursts of load; ``use`` shows the load of the next interval, or nothing."""
    rng = np.random.default_rng(seed)
    num, ranks = 400, 4
    load = np.zeros((num + 1, ranks))
    for step in range(1, num + 1):
        switch = rng.random(ranks) < 0.15
        load[step] = np.where(switch, rng.uniform(0.0, 0.7, ranks), load[step - 1])
    speeds = 1000 * (1 - load[:-1]) * rng.normal(1, 0.03, (num, ranks))
    seen = load[1:] if is_informative else rng.uniform(0, 0.7, (num, ranks))
    return speeds, np.stack([seen, np.zeros_like(seen)], axis=-1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_narx_beats_the_average_where_load_tells(seed: int) -> None:
    speeds, use = loaded_speeds(seed, is_informative=True)
    narx, plain = (
        errors_of(Narx.of(4), speeds, use),
        errors_of(ExponentialAverage.of(4), speeds, use),
    )
    assert narx <= 0.95 * plain, f"{narx:.4f} against {plain:.4f}"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["load tells nothing", "steady"])
def test_narx_is_never_much_worse_than_the_average(seed: int, kind: str) -> None:
    speeds, use = loaded_speeds(seed, is_informative=False)
    if kind == "steady":
        speeds = 1000 * np.random.default_rng(seed).normal(1, 0.05, speeds.shape)
    narx, plain = (
        errors_of(Narx.of(4), speeds, use),
        errors_of(ExponentialAverage.of(4), speeds, use),
    )
    assert narx <= 1.05 * plain, f"{narx:.4f} against {plain:.4f}"


@pytest.mark.parametrize("kind", sorted(PREDICTORS))
@pytest.mark.parametrize("stop", [0, 2, 10, 90])
def test_a_resumed_predictor_predicts_the_same(kind: str, stop: int) -> None:
    speeds, use = loaded_speeds(3, is_informative=True)
    whole, first, second = (PREDICTORS[kind](speeds.shape[1]) for _ in range(3))
    for row in range(110):
        valid = np.arange(speeds.shape[1]) != row % 7
        if row == stop:
            state = json.loads(json.dumps(encode(first), allow_nan=False))
            second = decode(type(first), state, what=kind)
        whole.observe(speeds[row], use[row], valid)
        (first if row < stop else second).observe(speeds[row], use[row], valid)
    np.testing.assert_array_equal(second.predict(), whole.predict())


def test_last_predicts_the_last_speed() -> None:
    predictor = PREDICTORS["last"](2)
    for speed in ([1.0, 2.0], [3.0, 5.0]):
        predictor.observe(np.array(speed), np.zeros((2, 2)), np.ones(2, bool))
    assert predictor.predict().tolist() == [3.0, 5.0]


@pytest.mark.parametrize("policy", ["lbbsp-cpu", "lbbsp-cpu:last", "lbbsp-cpu:ema"])
@pytest.mark.parametrize("seed", range(5))
def test_lbbsp_cpu_is_near_a_clairvoyant_split(policy: str, seed: int) -> None:
    rates = np.random.default_rng(seed).uniform(1e-3, 4e-3, 8)
    model = StepModel.build(8, compute_s=rates)
    controller = Controller(512, 8, policy)
    plans = drive(lambda _: model, controller, intervals=30, seed=seed)[10:]
    ideal = float((512 / (1 / rates).sum()) / 1)  # seconds when all finish together
    times = [model.step_s(sizes) for sizes in plans]
    assert np.mean(times) <= 1.05 * ideal


def test_lbbsp_cpu_nearly_halves_a_compute_bound_step() -> None:
    model = StepModel.build(8, compute_s=np.array([1, 1, 1, 1, 4, 4, 4, 4]) * 1e-3)
    plans = drive(lambda _: model, Controller(512, 8, "lbbsp-cpu"), intervals=12, seed=0)
    assert model.step_s(plans[-1]) <= 0.55 * model.step_s([64] * 8)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(6))
def test_lbbsp_gpu_evens_out_and_comes_to_rest(seed: int, noise: float) -> None:
    rates = np.random.default_rng(seed).uniform(5e-4, 2e-3, 8)
    model = StepModel.build(8, compute_fixed_s=0.01, compute_s=rates, plateau_s=0.02)
    controller = Controller(512, 8, "lbbsp-gpu")
    plans = drive(lambda _: model, controller, intervals=120, seed=seed, noise=noise)
    times = model.times(np.array(plans[40:]))
    ratios = times.max(axis=1) / times.min(axis=1)
    assert ratios[0] <= 1.1
    assert ratios[-1] <= 1.1
    if noise == 0.0:
        assert len(set(plans[80:])) == 1, "a limit cycle"


def test_lbbsp_gpu_respects_memory() -> None:
    model = StepModel.build(4, compute_s=np.array([1, 4, 4, 4]) * 1e-3)
    controller = Controller(256, 4, "lbbsp-gpu", max_batch=[80, None, None, None], grain=8)
    plans = np.array(drive(lambda _: model, controller, intervals=40, seed=0, noise=0.0))
    assert plans[:, 0].max() == 80
    assert (plans.sum(axis=1) == 256).all()
    assert (plans % 8 == 0).all()

"""The published claim on training loss: trainings in equal time, with a faulty worker or none."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import loft_hvd as loft
from benchmarks import published_loss
from benchmarks.published_loss import Timed, Training, equal_time, lower, train
from loft_hvd.bench.attacked import MODELS, load_digits
from loft_hvd.data.draws import epoch_order

pytest.importorskip("sklearn", reason="the digits ship inside scikit-learn")

EQUAL, UNEQUAL = (32,) * 8, (4, 20, 30, 60, 6, 26, 40, 70)
GUESSING = math.log(10)
CASE = "xavier/shufflenet_v2_x1_0/imagenet/serial"


def loss(training: Training, steps: int = 60, seed: int = 3) -> float:
    (found,) = train(training, seed=seed, looks=[steps], network="mlp")
    return found


def test_a_step_is_that_of_sgd_with_momentum_on_the_global_batch() -> None:
    """Three steps under the mean, written out with torch's modules; sizes do not show."""
    data = load_digits()
    torch.manual_seed(3)
    model = MODELS["mlp"]()
    order = torch.from_numpy(epoch_order(len(data.labels), seed=3, epoch=0)).long()
    averages = [torch.zeros_like(parameter) for parameter in model.parameters()]
    weight = 0.0
    for step in range(3):
        batch = order[256 * step : 256 * (step + 1)]
        model.zero_grad()
        F.cross_entropy(model(data.images[batch]), data.labels[batch]).backward()
        weight = 0.9 * weight + 1
        for average, parameter in zip(averages, model.parameters(), strict=True):
            assert parameter.grad is not None
            average.mul_(0.9).add_(parameter.grad)
            parameter.data.sub_(0.5 * average / weight)
    with torch.no_grad():
        expected = float(F.cross_entropy(model(data.images), data.labels))
    for sizes in (EQUAL, UNEQUAL, (256,)):
        assert loss(Training(sizes), steps=3) == pytest.approx(expected, rel=1e-5)


def test_sizes_change_nothing_where_ranks_count_by_their_samples() -> None:
    assert loss(Training(UNEQUAL)) == pytest.approx(loss(Training(EQUAL)), rel=1e-2)


def test_small_batches_do_harm_where_ranks_count_alike() -> None:
    by_samples = [loss(Training(UNEQUAL), seed=seed) for seed in range(3)]
    alike = [loss(Training(UNEQUAL, counts_alike=True), seed=seed) for seed in range(3)]
    assert sum(alike) > 1.02 * sum(by_samples)


def test_more_steps_have_less_loss_and_looks_are_those_of_runs_that_end_there() -> None:
    looks = train(Training(UNEQUAL), seed=3, looks=[20, 60], network="mlp")
    assert looks == [loss(Training(UNEQUAL), steps=20), loss(Training(UNEQUAL))]
    assert looks[1] < 0.7 * looks[0]


def test_a_loud_worker_ruins_the_mean_and_no_robust_rule() -> None:
    fault = "sign flip x10"
    assert loss(Training(UNEQUAL, fault=fault)) > GUESSING
    for rule in (loft.TrimmedMean(1), loft.Robust(1)):
        assert loss(Training(UNEQUAL, rule, fault)) < 0.5 * GUESSING


@pytest.mark.parametrize("fault", [name for name in published_loss.FAULTS if name != "none"])
def test_every_fault_changes_what_the_mean_learns(fault: str) -> None:
    right, wrong = loss(Training(EQUAL)), loss(Training(EQUAL, fault=fault))
    assert abs(wrong / right - 1) > 0.01
    assert wrong > right or fault == "ALIE z=1"  # which is made against trimming rules


def test_the_faulty_rank_is_the_seed_s() -> None:
    sizes = (2, 254)  # of two ranks, rank 1 is faulty with seed 3, and has almost all samples
    assert loss(Training(sizes, fault="zeros"), seed=3) > 0.9 * GUESSING
    assert loss(Training(sizes, fault="zeros"), seed=2) < 0.5 * GUESSING


def test_weights_are_those_of_training() -> None:
    assert Training((8, 8, 240)).weights == (8, 8, 240)
    assert Training((8, 8, 240), loft.TrimmedMean(1)).weights != (8, 8, 240)  # capped
    assert Training((8, 8, 240), loft.TrimmedMean(1), counts_alike=True).weights is None


def test_equal_time_counts_the_exchange_unless_told_not_to() -> None:
    rival, ours = Timed((), 3.0, 1.0), Timed((), 1.0, 1.0)
    assert equal_time(100, rival, ours) == 200
    assert equal_time(100, rival, ours, counts_exchange=False) == 300
    assert equal_time(100, ours, rival) == 50


def test_a_loss_is_compared_with_the_rival_s_of_the_same_seed() -> None:
    found = lower([1.0, 3.0, 1.0, math.inf], [4.0, 2.0, math.inf, math.inf])
    assert found == [75.0, -50.0, 100.0, 0.0]


def test_a_run_prints_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "loss.json"
    arguments = f"--cases {CASE} --steps 6 --seeds 2 --simulated-steps 100 --json {file} --faults"
    monkeypatch.setattr(sys, "argv", ["loss", *arguments.split(), "sign flip x10"])
    published_loss.main()
    out = capsys.readouterr().out
    assert "a simulation" in out
    assert "up to 67" in out
    kept = json.loads(file.read_text())[CASE]
    plans, tables = kept["plans"], kept["small batch only"]
    assert [sum(plan["sizes"]) for plan in plans.values()] == [256, 256]
    ratio = 1 + (plans["LB-BSP"]["step_s"] - plans["LOFT"]["step_s"]) / (
        plans["LOFT"]["step_s"] + plans["LOFT"]["exchange_s"]
    )
    assert tables["LOFT, mean, equal time"]["steps"] == int(6 * ratio)
    assert tables["LOFT, mean, as many steps"]["steps"] == 6
    assert len(kept["faulty worker: sign flip x10"]["LB-BSP, mean"]["loss"]) == 2


def test_a_case_that_does_not_exist_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["loss", "--cases", "vgg16/imagenet"])
    with pytest.raises(SystemExit):
        published_loss.main()
    assert "must be cluster/model/dataset/loader" in capsys.readouterr().err

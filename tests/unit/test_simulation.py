"""Laws of the simulator: runs repeat, and the table of regimes comes out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import loft_hvd.simulate
from loft_hvd.simulate.build import Draws
from loft_hvd.simulate.cluster import Chance
from loft_hvd.simulate.compare import random_scenario
from loft_hvd.simulate.plots import plot
from loft_hvd.simulate.scenario import RankTraits, Scenario, read_scenario
from loft_hvd.simulate.simulation import rows, simulate

SHIPPED = sorted((Path(loft_hvd.simulate.__file__).parent / "scenarios").glob("*.toml"))


def shipped(name: str) -> Scenario:
    return read_scenario(next(path for path in SHIPPED if path.stem == name))


def test_loft_costs_nothing_on_equal_ranks() -> None:
    results = simulate(replace(shipped("homogeneous"), policies=("uniform", "loft"), steps=800))
    assert results.run("loft").mean_s <= 1.01 * results.run("uniform").mean_s


def test_a_slow_link_with_a_serial_loader_is_loft_s_case() -> None:
    scenario = replace(
        shipped("link-325-serial"), policies=("lbbsp-cpu", "loft"), steps=300, draws="sampled"
    )
    results = simulate(scenario)
    assert results.run("loft").settled_s <= 0.6 * results.run("lbbsp-cpu").settled_s
    assert results.run("loft").settled_s <= 1.01 * results.run("oracle").settled_s


def test_there_is_a_scenario_for_every_regime_and_control() -> None:
    names = {path.stem for path in SHIPPED}
    assert names >= {"link-325-serial", "local-copy", "homogeneous", "drifting", "nfs-8-ranks"}
    assert names >= {"two-nodes", "cold-then-warm", "thousand-ranks", "gpus"}


def test_a_run_repeats_to_the_bit_and_is_json() -> None:
    scenario = random_scenario(3, steps=200)
    first, second = (json.dumps(simulate(scenario).to_dict()) for _ in range(2))
    assert first == second
    content = json.loads(first)["policies"]["loft"]
    assert {"mean_step_s", "p95_step_s", "settled_step_s", "plans"} <= set(content)
    assert content["plans"][1]["predicted_gain"] > 0
    assert content["plans"][1]["realised_gain"] is not None


def test_the_table_has_a_row_a_policy_and_the_oracle() -> None:
    table = rows(simulate(random_scenario(2, steps=100)))
    assert table[0][0] == "policy"
    policies = {"uniform", "lbbsp-cpu", "lbbsp-gpu", "lbbsp-cpu:busy", "loft", "oracle"}
    assert {row[0] for row in table[1:]} == policies


def test_fixed_sizes_are_told_apart() -> None:
    scenario = Scenario("fixed", 2, 64, steps=40, policies=((48, 16), (16, 48)))
    found = simulate(scenario).to_dict()["policies"]
    assert set(found) == {"[48, 16]", "[16, 48]", "oracle"}
    assert found["[48, 16]"]["plans"][0]["sizes"] == (48, 16)


@pytest.mark.parametrize("sampler", ["locality", "blind"])
def test_drawn_local_samples_average_to_the_expected_ones(sampler: str) -> None:
    scenario = replace(shipped("link-325-serial"), sampler=sampler, draws="sampled")
    sizes = np.array([126, 46, 126, 46, 69, 37, 36, 26])
    drawn = Draws(scenario).local(0, 300, sizes)
    expected = Draws(replace(scenario, draws="expected")).local(0, 300, sizes)
    assert (drawn <= sizes).all()
    assert drawn.mean(axis=0) == pytest.approx(expected[0], abs=2.0)


@pytest.mark.parametrize("tail", [0.0, 2.5, 5.0])
def test_noise_has_mean_1_and_the_deviation_asked_for_and_a_tail_is_far_from_both(
    tail: float,
) -> None:
    drawn = Chance(0.05, seed=1, tail=tail).factors((20_000, 8))
    assert drawn.mean() == pytest.approx(1.0, abs=1e-3)
    assert drawn.std() == pytest.approx(0.05, rel=0.05 if tail != 2.5 else 0.3)
    assert (drawn > 0.9 if tail else drawn > 0.7).all()
    # Ten standard deviations: never in normal noise, some 25 times here with an index of 2.5.
    assert (drawn > 1.5).any() == bool(tail)


def test_hiccups_and_stalls_come_as_often_and_as_long_as_asked() -> None:
    probability, size = np.array([0.0, 0.01]), np.array([8.0, 8.0])
    chance = Chance(0.0, seed=2, hiccups=(probability, size), stalls=(probability, size))
    factors, stalls = chance.factors((50_000, 2)), chance.stall_s((50_000, 2))
    assert stalls is not None
    for drawn, usual in ((factors[0], 1.0), (stalls, 0.0)):
        assert (drawn[:, 0] == usual).all()
        assert (drawn[:, 1] > usual).mean() == pytest.approx(0.01, rel=0.2)
    assert set(np.unique(factors)) == {1.0, 8.0}
    assert stalls[:, 1][stalls[:, 1] > 0].mean() == pytest.approx(8.0, rel=0.2)


def test_a_run_has_no_more_sizes_of_a_rank_than_the_scenario_allows() -> None:
    ranks = RankTraits(compute_s=[1e-3, 1e-3, 2e-3, 4e-3])
    scenario = Scenario(
        "few", 4, 256, steps=400, noise=0.1, max_sizes=2, policies=("lbbsp-cpu",), ranks=ranks
    )
    plans = np.array([made.sizes for made in simulate(scenario).run("lbbsp-cpu").decisions])
    assert len(plans) > 1
    assert max(len(set(column)) for column in plans.T.tolist()) <= 2


def test_the_plot_shows_every_policy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(simulate(random_scenario(2, steps=100)), tmp_path / "run.svg")
    assert "loft" in (tmp_path / "run.svg").read_text()

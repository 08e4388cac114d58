"""Laws of the simulator: runs repeat, and the table of regimes comes out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import loft_hvd.simulate
from loft_hvd.simulate.build import Draws
from loft_hvd.simulate.compare import random_scenario
from loft_hvd.simulate.plots import plot
from loft_hvd.simulate.scenario import Scenario, read_scenario
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
    assert {row[0] for row in table[1:]} == {"uniform", "lbbsp-cpu", "lbbsp-gpu", "loft", "oracle"}


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


def test_the_plot_shows_every_policy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(simulate(random_scenario(2, steps=100)), tmp_path / "run.svg")
    assert "loft" in (tmp_path / "run.svg").read_text()

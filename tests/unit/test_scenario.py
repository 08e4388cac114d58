"""Scenarios are checked: what is wrong is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loft_hvd.errors import ArgumentError
from loft_hvd.simulate.build import _disturb
from loft_hvd.simulate.scenario import (
    Event,
    RankTraits,
    Scenario,
    read_scenario,
    scenario_from_dict,
)

BASE: dict[str, Any] = {"name": "x", "world_size": 2, "global_batch_size": 64}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"step": 5}, r"\['step'\]; keys are"),
        ({"step": 5, 7: 8}, r"\['step', 7\]; keys are"),
        ({"ranks": {"speed": 1}}, r"\[ranks\]: \['speed'\]"),
        ({"events": [{"kind": "change", "rank": 0}]}, r"\[\[events\]\]: \['rank'\]"),
        ({"events": [{"kind": "melt", "ranks": [0]}]}, "kind='melt' is not one of"),
        ({"events": [{"kind": "change", "ranks": [7]}]}, r"ranks \[7\] are not in 0..1"),
        ({"events": [{"kind": "change"}]}, "needs kind and ranks"),
        ({"sources": [{"name": "nfs"}]}, "a key is missing"),
        ({"ranks": {"source": "nfs"}}, "reads from source 'nfs'"),
        ({"policies": ["best"]}, "policy 'best' is not one of"),
        ({"sampler": "random"}, "sampler='random' must be one of"),
        ({"world_size": 0}, "world_size=0 must be a whole number >= 1"),
        ({"noise": -1}, "noise=-1 must be a number >= 0"),
        ({"steps": "many"}, "steps='many' must be a whole number >= 1"),
        ({"grain": 0}, "grain=0 must be a whole number >= 1"),
        ({"max_sizes": -1}, "max_sizes=-1 must be a whole number >= 0"),
        ({"noise_tail": 1.5}, "noise_tail=1.5 with noise=0.0 must be 0"),
        ({"noise_tail": 2.5, "noise": 1}, "noise_tail=2.5 with noise=1 must be 0"),
        ({"ranks": {"hiccup_probability": 2}}, r"ranks.hiccup_probability must be in \[0, 1\]"),
        ({"aggregate_s": float("nan")}, "aggregate_s=nan must be a number >= 0"),
        ({"events": [{"kind": "change", "ranks": 1}]}, r"ranks=1 must be a list"),
        ({"interval": 20.5}, "interval=20.5 must be a whole number"),
        ({"steps": 10**12}, "steps=1000000000000 must be a whole number >= 1 and <= 5e.06"),
        ({"num_samples": 10**12}, "num_samples=1000000000000 must be .* <= 1e.08"),
        ({"knows_sources": "no"}, "knows_sources='no' must be a bool"),
        ({"ranks": {"source": [["nfs"], ""]}}, "each must be a name"),
        ({"grain": 1.5}, "grain=1.5 must be a whole number"),
        ({"num_samples": 1000.5}, "num_samples=1000.5 must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number >= 0"),
        ({"noise": True}, "noise=True must be a number"),
        ({"max_batch": 3.5}, "max_batch=3.5 must be"),
        ({"max_batch": [40, "x"]}, "max_batch='x' must be a whole number"),
        ({"max_batch": "x"}, "max_batch='x' must be"),
        ({"first_steps_factor": -3}, "first_steps_factor=-3 must be a number >= 0"),
        ({"ranks": 3}, r"ranks=3 must be a table"),
        ({"sources": 3}, r"sources=3 must be tables"),
        ({"events": [3]}, r"events=\[3\] must be tables"),
        ({"policies": "loft"}, "policies='loft' must be a list"),
        ({"policies": [["loft"]]}, r"policies=\[\['loft'\]\] must be a list"),
        ({"sources": [{"name": "nfs", "bytes_per_s": 0}]}, "source 'nfs'=0 must be a number > 0"),
        ({"sources": [{"name": "nfs", "bytes_per_s": "x"}]}, "source 'nfs'='x' must be a number"),
        ({"ranks": {"source": ["", "", ""]}}, "ranks.source has 3 names for world_size=2"),
        ({"ranks": {"source": 3}}, "ranks.source=3"),
        ({"ranks": {"local_bytes_per_s": 0}}, "ranks.local_bytes_per_s must be > 0"),
        ({"ranks": {"overlap": 2}}, r"ranks.overlap must be in \[0, 1\]"),
        ({"events": [{"kind": "change", "ranks": ["x"]}]}, "rank='x' must be a whole number"),
        ({"events": [{"kind": "change", "ranks": [0], "factor": "a"}]}, "factor='a' must be"),
        ({"events": [{"kind": "wave", "ranks": [0], "period_steps": 9.5}]}, "period_steps=9.5"),
    ],
)
def test_a_wrong_scenario_is_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        scenario_from_dict({**BASE, **change})


def test_a_scenario_needs_its_basics() -> None:
    with pytest.raises(ArgumentError, match=r"\['world_size', 'global_batch_size'\] must be given"):
        scenario_from_dict({"name": "x"})


@pytest.mark.parametrize(
    "value",
    [
        [1.0],
        {"gauss": [1, 2]},
        {"uniform": [1]},
        -1.0,
        "x",
        ["x", 1.0],
        {"cycle": [1e-3, "x"]},
        {"uniform": ["x", 1]},
        {"loguniform": [-1, 1]},
        {"uniform": 3},
        {"uniform": [np.zeros((1,) * 61).tolist(), 1.0]},  # NumPy iterates over 32 dimensions
        {"loguniform": [1.0, np.ones((1,) * 61).tolist()]},
    ],
)
def test_a_wrong_rank_value_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"ranks.compute_s"):
        scenario_from_dict({**BASE, "ranks": {"compute_s": value}})


def test_rank_values_may_be_drawn_and_cycled() -> None:
    scenario = Scenario("x", 5, 64, ranks=RankTraits(compute_s={"cycle": [1.0, 2.0]}, overlap=0.5))
    assert scenario.values("compute_s").tolist() == [1, 2, 1, 2, 1]
    assert scenario.values("overlap").tolist() == [0.5] * 5
    drawn = replace(scenario, ranks=RankTraits(compute_s={"loguniform": [1.0, 9.0]}))
    assert (drawn.values("compute_s") == drawn.values("compute_s")).all()
    assert 1 <= drawn.values("compute_s").min() < drawn.values("compute_s").max() <= 9


def test_text_that_is_not_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("name =")
    with pytest.raises(ArgumentError, match=r"bad.toml: not TOML"):
        read_scenario(tmp_path / "bad.toml")


def test_a_rank_may_lie_twice() -> None:
    lies = (
        Event("lie", (1,), report="half", to_step=20),
        Event("lie", (1,), report="nan", from_step=60),
    )
    report = _disturb(Scenario("x", 2, 8, steps=100, events=lies)).report
    assert report[10, 1] == 0.5
    assert report[40, 1] == 1.0
    assert np.isnan(report[70, 1])


def test_interference_is_seen_beside_another() -> None:
    busy: dict[str, Any] = {"part": "compute", "quiet_steps": 1, "busy_steps": 10**6}
    first = Event("interference", (0,), to_step=40, **busy)
    later = Event("interference", (0,), from_step=60, **busy)
    use = _disturb(Scenario("x", 2, 8, steps=100, events=(first, later))).use
    assert use[20:40, 0].max() > 0
    assert use[80:, 0].max() > 0

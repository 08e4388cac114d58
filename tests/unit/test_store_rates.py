"""The benchmark of the store measures what it says, on few samples."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")

from benchmarks import store_rates
from benchmarks.store_rates import PARTS, Found, Goal, Images, Scale, Spent

FEW = Scale(num_samples=32, batch=8, rounds=2)


def test_a_round_has_samples_that_no_other_round_of_its_pass_has() -> None:
    batches = list(Scale(num_samples=32, batch=8, rounds=6).batches())
    assert sorted(chain(*batches[:4])) == list(range(32))
    assert all(len(set(batch)) == 8 for batch in batches)


@pytest.mark.parametrize("name", ["local", "loopback"])
def test_a_part_measures_each_contestant_in_each_round(name: str) -> None:
    goals, spent = PARTS[name](FEW)
    assert len(goals) == {"local": 4, "loopback": 1}[name]
    assert all(goal.value > 0 for goal in goals)
    assert {len(rounds) for rounds in spent.values()} == {2}


def test_a_step_is_timed_with_and_without_a_store() -> None:
    pytest.importorskip("horovod.torch")
    pytest.importorskip("sklearn", reason="the digits ship inside scikit-learn")
    goals, spent = PARTS["step"](FEW)
    assert [goal.unit for goal in goals] == ["%", "%"]
    assert list(spent) == [
        "tensors",
        "tensors, kept",
        "a mapped file",
        "a mapped file, kept",
    ]


def test_a_store_that_returns_another_sample_ends_the_run() -> None:
    data = Images.random(2)
    with pytest.raises(SystemExit, match="sample 1 is wrong"):
        store_rates.check([data[0], data[0]], [0, 1], data)


@pytest.mark.parametrize(
    ("value", "is_most", "is_met"),
    [(3.1, True, False), (3.0, True, True), (2.9, False, False), (float("nan"), False, False)],
)
def test_a_goal_is_met_on_the_right_side_of_its_limit(
    value: float, is_most: bool, is_met: bool
) -> None:
    assert Goal("part", "what", value, 3.0, "%", is_most=is_most).is_met == is_met


def test_a_run_prints_keeps_and_judges_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(scale: Scale) -> Found:
        assert scale.rounds == 7
        return [Goal("local", "from memory", 1.5, 2.0, "GB/s")], {"memory": [Spent(3.0, 1.0)] * 3}

    monkeypatch.setitem(PARTS, "local", part)
    file = tmp_path / "rates.json"
    assert store_rates.main(["--parts", "local", "--rounds", "7", "--json", str(file)]) == 1
    assert "MISSED local" in capsys.readouterr().out
    kept = json.loads(file.read_text())
    assert kept["goals"][0]["is_met"] is False
    assert kept["local"]["seconds"]["memory"] == {"wall_s": [3.0] * 3, "cpu_s": [1.0] * 3}
    assert kept["command"].startswith("python -m benchmarks.store_rates --parts local")


@pytest.mark.parametrize(
    ("parts", "why"), [("local,remote", "no part remote; there are local"), ("link", "needs root")]
)
def test_what_cannot_be_measured_is_an_error_that_says_why(
    parts: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store_rates, "why_not", lambda: "a testbed needs root")
    with pytest.raises(SystemExit):
        store_rates.main(["--parts", parts])
    assert why in capsys.readouterr().err

"""The benchmark that has policies contest on random clusters."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import contest
from benchmarks.contest import Outcome
from loft_hvd.bench.record import current_commit
from loft_hvd.errors import DataError
from tests.support.scenarios import rough_scenario


def outcome(above: float, *, promised: float = 0.1, saved: float = 0.1) -> Outcome:
    return Outcome("rough 1 wave", 0, above, "uniform", -0.01, 10, 1, promised, saved)


def test_a_summary_counts_what_is_asked_for() -> None:
    found = [outcome(-0.05), outcome(0.0), outcome(0.015, saved=0.05), outcome(0.03, saved=0.09)]
    told = contest.summarise([*found, outcome(0.0, promised=0.01, saved=-0.01)])
    assert told["within_1_percent"] == pytest.approx(60)
    assert told["within_2_percent"] == pytest.approx(80)
    assert told["above_most"] == pytest.approx(3)
    assert told["plans_longer"] == pytest.approx(10)
    assert told["promises_kept"] == pytest.approx(75)  # of those that promised 2 % of a step


def test_runs_that_a_file_has_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = replace(rough_scenario(4, steps=100), name="rough 4 thermal")
    monkeypatch.setattr(contest, "entries", lambda: iter([(scenario, 0), (scenario, 1)]))
    runs, summary = tmp_path / "runs.jsonl", tmp_path / "contest.json"
    made_by = {"commit": current_commit(), "steps": contest.STEPS}
    first = asdict(replace(outcome(0.5), name=scenario.name))
    runs.write_text(json.dumps(made_by | first) + "\n")
    for _ in range(2):
        assert contest.main([str(runs), "--json", str(summary)]) == 0
    told = [json.loads(line) for line in runs.read_text().splitlines()]
    assert all(made_by.items() <= each.items() for each in told)
    lines = [Outcome(**{k: v for k, v in each.items() if k not in made_by}) for each in told]
    assert [(each.name, each.seed) for each in lines] == [(scenario.name, 0), (scenario.name, 1)]
    assert lines[0].above == 0.5
    assert abs(lines[1].above) < 0.2
    record = json.loads(summary.read_text())
    assert record["percent"]["all"]["num_runs"] == 2
    assert record["worst"][0]["above"] == 0.5


@pytest.mark.parametrize("other", [{"commit": "0123abc"}, {"steps": 7}, {"commit": None}])
def test_runs_of_another_commit_or_length_are_refused(
    other: dict[str, object], tmp_path: Path
) -> None:
    made_by = {"commit": current_commit(), "steps": contest.STEPS} | other
    runs = tmp_path / "runs.jsonl"
    runs.write_text(json.dumps(made_by | asdict(outcome(0.5))) + "\n")
    with pytest.raises(DataError, match=r"has runs of .* name another file"):
        contest.main([str(runs), "--minutes", "0"])


def test_no_run_in_time_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run was begun in --minutes 0"):
        contest.main([str(tmp_path / "runs.jsonl"), "--minutes", "0"])

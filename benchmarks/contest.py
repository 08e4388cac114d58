"""LOFT against every other policy on random clusters that drift, wave, and lose time to others.

    python -m benchmarks.contest runs.jsonl --minutes 3 --json benchmarks/results/contest.json

160 hosts that somebody else uses too (waves, interference, stolen time, leaks, throttling, caches,
changes at once) and 40 clusters of ``loft-hvd simulate --random``, each with 5 seeds of noise,
events and samples. Runs go into a file as they end, with their commit and number of steps. Those
that it has are not made again: call it until none is left. Runs of another commit are refused.

What a plan saved is the share of a step between its sizes and those before it, in the same steps
with the same noise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loft_hvd.bench.record import check_writable, current_commit, write_record
from loft_hvd.errors import DataError
from loft_hvd.simulate.compare import random_scenario
from loft_hvd.simulate.scenario import Scenario
from loft_hvd.simulate.simulation import ORACLE, simulate
from tests.support.scenarios import rough_scenario

__all__ = ["Outcome", "entries", "run", "summarise"]

NUM_ROUGH, NUM_RANDOM, NUM_SEEDS, STEPS = 160, 40, 5, 1000
_FIRST = 1000  # seed of a scenario: of none that the policy was tuned on
_APART = 100_000  # between two seeds of one scenario
_TOLD = 0.02  # of a step, in sum of a run: less is no promise to hold anybody to
_NEAR = 1.3  # so near a promise is kept

COLUMNS = [
    "LOFT's step above the best other policy's, %",
    "runs",
    "mean",
    "95th percentile",
    "most",
    "the oracle's, mean",
    "runs within 1 %",
    "plans that lengthen",
    "promises kept within 1.3",
]


@dataclass(frozen=True)
class Outcome:
    """One run."""

    name: str  # of the scenario
    seed: int
    above: float  # LOFT's mean step over that of the best other policy, less 1
    best: str  # that policy
    oracle: float  # likewise of the oracle, which knows the true times
    num_plans: int  # that took the place of others
    num_longer: int  # of them, that made their first interval longer than the sizes before
    promised: float  # by plans, in sum, as shares of a step
    saved: float  # likewise


def entries() -> Iterator[tuple[Scenario, int]]:
    """Yield every scenario with its seed, all scenarios of one seed first."""
    drawn = [
        *(rough_scenario(_FIRST + at, steps=STEPS) for at in range(NUM_ROUGH)),
        *(random_scenario(_FIRST + at, steps=STEPS) for at in range(NUM_RANDOM)),
    ]
    for seed in range(NUM_SEEDS):
        for scenario in drawn:
            yield replace(scenario, seed=scenario.seed + seed * _APART), seed


def run(scenario: Scenario, seed: int) -> Outcome:
    """Run all policies of a scenario."""
    results = simulate(scenario)
    loft, oracle = results.run("loft"), results.run(ORACLE)
    others = [run for run in results.runs if run not in (loft, oracle)]
    best = min(others, key=lambda run: run.mean_s)
    plans = [
        (made.predicted_gain or 0.0, gain)
        for made, gain in zip(loft.decisions, loft.realised_gain, strict=True)
        if gain is not None
    ]
    return Outcome(
        name=scenario.name,
        seed=seed,
        above=loft.mean_s / best.mean_s - 1,
        best=best.name,
        oracle=oracle.mean_s / best.mean_s - 1,
        num_plans=len(plans),
        num_longer=sum(gain < 0 for _, gain in plans),
        promised=sum(promised for promised, _ in plans),
        saved=sum(gain for promised, gain in plans if promised > 0),
    )


def summarise(found: Sequence[Outcome]) -> dict[str, float]:
    """Return what all runs show, in per cent."""
    above = 100 * np.array([each.above for each in found])
    held = [each for each in found if each.promised > _TOLD]
    is_near = [each.saved / _NEAR <= each.promised <= each.saved * _NEAR for each in held]
    num_plans = sum(each.num_plans for each in found)
    return {
        "num_runs": len(found),
        "above_mean": float(above.mean()),
        "above_median": float(np.median(above)),
        "above_p95": float(np.percentile(above, 95)),
        "above_most": float(above.max()),
        "within_1_percent": float(100 * (above <= 1).mean()),
        "within_2_percent": float(100 * (above <= 2).mean()),
        "oracle_mean": float(100 * np.mean([each.oracle for each in found])),
        "num_plans": num_plans,
        "plans_longer": 100 * sum(each.num_longer for each in found) / max(num_plans, 1),
        "promised": 100 * sum(each.promised for each in found),
        "saved": 100 * sum(each.saved for each in found),
        "promises_kept": float(100 * np.mean(is_near)) if held else 100.0,
    }


def _read_runs(path: Path, made_by: dict[str, Any]) -> dict[tuple[str, int], Outcome]:
    """Return the runs of a file, all of one commit and number of steps."""
    found: dict[tuple[str, int], Outcome] = {}
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        maker = {name: told.pop(name, None) for name in made_by}
        if maker != made_by:
            raise DataError(
                f"contest: {str(path)!r} has runs of {maker}, and this is {made_by}; name another "
                "file, or check that commit out"
            )
        outcome = Outcome(**told)
        found[outcome.name, outcome.seed] = outcome
    return found


def _kind(outcome: Outcome) -> str:
    return outcome.name.split()[2] if outcome.name.startswith("rough") else "random"


def _row(kind: str, numbers: dict[str, float]) -> list[str]:
    """Return the line of a table."""
    signed = ("above_mean", "above_p95", "above_most", "oracle_mean")
    plain = ("within_1_percent", "plans_longer", "promises_kept")
    cells = [f"{numbers[name]:+.1f}" for name in signed]
    cells += [f"{numbers[name]:.0f}" for name in plain]
    return [kind, str(numbers["num_runs"]), *cells]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make runs that are left until time is up, and sum up all that are there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("runs", type=Path, help="the file of runs, a JSON object a line")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="to begin runs in")
    parser.add_argument("--json", help="the file for the summary")
    asked = parser.parse_args(arguments)
    check_writable(asked.runs, asked.json)
    made_by = {"commit": current_commit(), "steps": STEPS}
    found = _read_runs(asked.runs, made_by)
    until = time.monotonic() + 60 * asked.minutes
    with asked.runs.open("a", encoding="utf-8") as file:
        for scenario, seed in entries():
            if (scenario.name, seed) in found:
                continue
            if time.monotonic() > until:
                break
            outcome = found[scenario.name, seed] = run(scenario, seed)
            file.write(json.dumps(made_by | asdict(outcome)) + "\n")
            file.flush()
    if not found:
        raise DataError(f"contest: no run was begun in --minutes {asked.minutes:g}; give more")
    kinds = dict.fromkeys(_kind(each) for each in found.values())
    summary = {kind: summarise([v for v in found.values() if _kind(v) == kind]) for kind in kinds}
    summary["all"] = summarise(list(found.values()))
    for kind, numbers in summary.items():
        said = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        print(f"{kind}: {said}", flush=True)  # noqa: T201 - a command's output
    if asked.json:
        worst = sorted(found.values(), key=lambda each: -each.above)[:10]
        results = {
            "columns": COLUMNS,
            "rows": [_row(kind, numbers) for kind, numbers in summary.items()],
            "percent": summary,
            "worst": [asdict(each) for each in worst],
        }
        command = ["python", "-m", "benchmarks.contest", *(arguments or sys.argv[1:])]
        write_record(asked.json, results, command=command)
    return 0


if __name__ == "__main__":
    sys.exit(main())

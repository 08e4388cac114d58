"""The kernels' benchmark: it times what it says, checks results first, and judges by the goals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from loft_hvd._native import extension
from loft_hvd.aggregation.rules import Median
from loft_hvd.bench import kernels
from loft_hvd.bench.cuda import COPY, judge_cuda, measure_cuda
from loft_hvd.bench.gate import Goal, judge_kernels
from loft_hvd.bench.kernels import KernelBench, Timing, check_rules, measure_kernels
from loft_hvd.cli import build_app
from loft_hvd.errors import AggregationError

pytestmark = pytest.mark.skipif(extension() is None, reason="the extension is not built here")

SMALL = KernelBench(rows=(4,), numel=50_000, repeats=2)


def test_every_contestant_of_a_row_count_is_timed() -> None:
    (timings,) = measure_kernels(SMALL)
    names = [timing.contestant for timing in timings]
    assert {"pass", "pass again", "median", "trimmed_mean f=1", "torch.median"} <= set(names)
    assert len(names) == len(set(names))
    assert all(timing.seconds > 0 for timing in timings)
    best = min(t.seconds for t in timings if t.contestant.startswith("pass"))
    for timing in timings:
        if timing.level:
            assert timing.passes == pytest.approx(timing.seconds / best)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
def test_rules_pass_the_check_on_poisoned_rows(rows: int) -> None:
    check_rules(rows)


def test_a_wrong_rule_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(gradients: torch.Tensor, rule: object, *, out: torch.Tensor) -> None:
        torch.mean(gradients[:-1], dim=0, out=out)

    monkeypatch.setattr(kernels, "aggregate", wrong)
    with pytest.raises(AggregationError, match=f"{Median()} of 8 rows differs"):
        check_rules(8)


def made_up(**passes: float) -> list[Timing]:
    """Return timings at 16 rows and AVX-512 with these passes, all others on their goals."""
    named = {
        "pass": 1.0,
        "pass again": 1.0,
        "median": 1.15,
        "trimmed_mean f=4": 1.15,
        "mean_around_median f=4": 1.4,
        "phocas f=4": 1.4,
        "median bfloat16": 0.69,
        "median float16": 0.69,
        "trimmed_mean weighted": 3.0,
        "trimmed_mean diagnosed 1/16": 1.26,
    } | passes
    return [Timing(name, "avx512", 16, 1000, ratio, ratio, 1) for name, ratio in named.items()]


def test_timings_on_their_goals_meet_them() -> None:
    goals = judge_kernels(made_up())
    assert len(goals) == 8
    assert {goal.verdict for goal in goals} == {"met"}


@pytest.mark.parametrize(
    ("name", "factor"),
    [("median", 1.2), ("trimmed_mean weighted", 1.01), ("phocas f=4", 1.1)],
)
def test_a_goal_that_is_missed_is_said(name: str, factor: float) -> None:
    timings = made_up()
    slower = [
        replace(t, seconds=t.seconds * factor, passes=t.passes * factor)
        if t.contestant == name
        else t
        for t in timings
    ]
    assert "missed" in {goal.verdict for goal in judge_kernels(slower)}


def test_a_pass_that_differs_from_itself_judges_nothing() -> None:
    assert {g.verdict for g in judge_kernels(made_up(**{"pass again": 1.2}))} == {"too noisy"}


@pytest.mark.parametrize(
    ("two_passes", "two_medians", "verdict"),
    [(0.5, 0.57, "met"), (0.5, 0.6, "missed"), (0.8, 0.85, "met"), (0.8, 0.95, "missed")],
)
def test_two_threads_are_judged_by_the_scaling_of_the_pass(
    two_passes: float, two_medians: float, verdict: str
) -> None:
    named = {"one thread: pass": 1.0, "one thread: median": 1.0}
    named |= {"two threads: pass": two_passes, "two threads: median": two_medians}
    (goal,) = (g for g in judge_kernels(made_up(**named)) if g.what.startswith("two threads"))
    assert goal.verdict == verdict
    named["one thread: pass"] = 1.2  # not the pass's time a moment ago
    (goal,) = (g for g in judge_kernels(made_up(**named)) if g.what.startswith("two threads"))
    assert goal.verdict == "too noisy"


def test_gate_is_for_goals_missed_by_more_than_15_percent() -> None:
    assert not Goal("", 1.0, 1.14).is_far
    assert Goal("", 1.0, 1.16).is_far
    assert Goal("", 50.0, 40.0, is_floor=True).is_far
    assert not Goal("", 50.0, 45.0, is_floor=True).is_far
    assert not Goal("", 1.0, 9.0, is_judged=False).is_far


def test_command_writes_json_and_plot(tmp_path: Path) -> None:
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    options = ["--rows", "3,4", "--numel", "20000", "--repeats", "1"]
    files = ["--json", str(found), "--plot", str(picture)]
    result = CliRunner().invoke(build_app(), ["bench", "kernels", *options, *files])
    assert result.exit_code == 0, result.output
    record = json.loads(found.read_text())
    assert {timing["rows"] for timing in record["timings"]} == {3, 4}
    assert {goal["verdict"] for goal in record["goals"]} <= {"met", "missed", "too noisy"}
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_device_bench_times_rules_against_a_copy() -> None:
    small = KernelBench(rows=(4,), numel=20_000, repeats=1)
    (timings,) = measure_cuda(small, torch.device("cpu"))  # timed by the CPU
    names = [timing.contestant for timing in timings]
    assert {COPY, "median", "trimmed_mean f=1", "median bfloat16", "torch.median"} <= set(names)
    copy = timings[names.index(COPY)]
    assert copy.passes == pytest.approx(1.0)
    for timing in timings:
        assert timing.passes == pytest.approx(copy.gb_per_s / timing.gb_per_s)


def test_device_goals_are_shares_of_the_copy() -> None:
    named = {COPY: 1.0, "median": 1.1, "trimmed_mean f=4": 1.2, "torch.median": 60.0}
    timings = [Timing(name, "", 16, 1000, ratio, ratio, 1) for name, ratio in named.items()]
    verdicts = {goal.what: goal.verdict for goal in judge_cuda(timings)}
    assert verdicts == {
        "median by a copy's bandwidth, 16 rows": "met",
        "trimmed_mean f=4 by a copy's bandwidth, 16 rows": "missed",
        "torch.median / median, 16 rows": "met",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_bench_says_that_there_is_no_cuda_device() -> None:
    result = CliRunner().invoke(build_app(), ["bench", "kernels", "--device", "cuda"])
    assert result.exit_code != 0
    assert "needs a CUDA device" in f"{result.output} {result.exception}"

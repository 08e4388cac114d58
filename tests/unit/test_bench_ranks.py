"""What benchmarks conclude from their samples."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loft_hvd.bench import commands, scopes
from loft_hvd.bench.collectives import PEER
from loft_hvd.bench.gate import exit_status
from loft_hvd.bench.kernels import Clock, Rounds, interleaved_minimum
from loft_hvd.bench.models import MODELS
from loft_hvd.bench.ranks import (
    BenchJob,
    allreduce_goal,
    goals_of,
    judge,
    judge_peer,
    paired_ratios,
    ratio_goal,
    run_bench,
    step_goal,
    table,
)
from loft_hvd.bench.record import check_writable, write_record
from loft_hvd.bench.steps import DDP, StepBench
from loft_hvd.errors import ArgumentError, DataError


def drifting(factor: float, seed: int, rounds: int = 41) -> list[float]:
    """Return times on a machine that gets three times slower, with 1 % noise."""
    drift = np.linspace(1, 3, rounds)
    noise = np.random.default_rng(seed).normal(1, 0.01, rounds)
    times: list[float] = (factor * drift * noise).tolist()
    return times


def test_ratios_hold_on_a_machine_that_slows_down() -> None:
    samples = {"a": drifting(1, 0), "again": drifting(1, 1), "b": drifting(1.25, 2)}
    ratios = paired_ratios(samples, baseline="a", again="again")
    assert ratios["b"].ratio == pytest.approx(1.25, rel=0.01)
    assert ratios["again"].ratio == pytest.approx(1, rel=0.01)
    assert ratios["a"].ratio == 1
    assert 0 < ratios["b"].spread < 0.1


@pytest.mark.parametrize(
    ("ratio", "noise", "verdict"),
    [
        (1.09, 0.0, "met"),
        (1.12, 0.04, "met"),
        (1.121, 0.04, "missed"),
        (1.0, 0.051, "too noisy"),
        (9.0, 0.06, "too noisy"),
    ],
)
def test_goal_is_met_within_half_the_noise_or_not_judged(
    ratio: float, noise: float, verdict: str
) -> None:
    assert ratio_goal("", 1.10, ratio, noise=noise).verdict == verdict


def test_judged_samples_carry_goals_noise_and_verdicts() -> None:
    samples = {
        "horovod": [1.0, 2.0, 3.0],
        "horovod again": [1.0, 2.0, 3.0],
        "mean": [2.0, 4.0, 6.0],
    }
    judged = judge(samples, {"mean": 1.03})
    assert judged["noise"] == 0
    assert judged["contestants"]["mean"]["ratio"] == 2
    assert judged["contestants"]["mean"]["verdict"] == "missed"
    assert "goal" not in judged["contestants"]["horovod"]
    header, *rows = table("here", judged)
    assert header == ["here", "ms", "x horovod", "spread", "goal", "verdict"]
    assert ["mean", "4000.0", "2.00", "0.00", "1.03", "missed"] in rows


@pytest.mark.parametrize(
    ("hook_s", "again_s", "verdict", "status"),
    [
        (1.0, 1.0, "met", 0),
        (1.1, 1.0, "missed", 0),
        (1.2, 1.0, "missed", 1),
        (1.0, 1.2, "too noisy", 2),
    ],
)
def test_steps_are_judged_and_gated_by_what_they_are_compared_with(
    hook_s: float, again_s: float, verdict: str, status: int
) -> None:
    seconds = {"ddp": 1.0, "ddp again": again_s, "horovod": 9.0, "hook mean": hook_s}
    samples = {name: [taken] * 3 for name, taken in seconds.items()}
    bench = StepBench(engine=DDP)
    judged = judge(samples, {name: step_goal(name, bench) for name in samples}, baseline=DDP)
    assert judged["contestants"]["hook mean"]["verdict"] == verdict
    assert table("", judged, baseline=DDP)[0][2] == "x ddp"
    (goal,) = goals_of(judged)
    assert (goal.what, goal.limit, goal.verdict) == ("hook mean", 1.01, verdict)
    assert exit_status([goal]) == status


def test_goals_are_those_of_the_ranks_and_rules_they_were_set_for() -> None:
    four, two, two_mpi = BenchJob(4), BenchJob(2), BenchJob(2, "mpi")
    assert allreduce_goal("trimmed_mean f=1", 25.0, four) == 1.10
    assert allreduce_goal("trimmed_mean f=1", 4.0, four) == 1.4
    assert allreduce_goal("median", 100.0, two) == 1.10
    assert allreduce_goal("median", 100.0, two_mpi) == 1.3
    assert allreduce_goal("mean", 100.0, four) is None
    assert allreduce_goal("trimmed_mean f=1", 1.0, four) is None


@pytest.mark.parametrize(
    ("engine", "limits"),
    [
        ("horovod", {"mean": 1.03, "trimmed_mean f=1": 1.10, "median": None, "hook mean": None}),
        ("ddp", {"hook mean": 1.01, "hook trimmed_mean f=1": 1.00, "hook robust f=1": 1.15}),
        ("ddp", {"optimizer mean": 1.00, "optimizer robust f=1": None, "horovod": None}),
        ("fsdp", {"hook mean": 1.01, "hook trimmed_mean f=1": 1.10, "hook robust f=1": 1.15}),
    ],
)
def test_goals_of_steps_are_those_of_the_contestant_and_the_engine(
    engine: str, limits: dict[str, float | None]
) -> None:
    bench = StepBench(engine=engine)
    assert {name: step_goal(name, bench) for name in limits} == limits


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "nccl"}, "engine='nccl' is not one of horovod, ddp, fsdp"),
        ({"model": "vgg"}, "model='vgg' is not one of resnet18, transformer, mlp"),
        ({"engine": "ddp", "scopes": True}, "scopes=True and trace=None go with engine='horovod'"),
        ({"engine": "fsdp", "scopes": True}, "go with engine='horovod', not with 'fsdp'"),
        ({"engine": "ddp", "trace": "t.json"}, "trace='t.json' go with engine='horovod'"),
    ],
)
def test_steps_that_no_bench_takes_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        StepBench(**options)


@pytest.mark.parametrize(("what", "engine"), [("allreduce", None), ("step", "horovod")])
def test_torchrun_starts_only_what_does_without_horovod(what: str, engine: str | None) -> None:
    with pytest.raises(ArgumentError, match=f"bench {what}: controller='torchrun'"):
        run_bench(what, {"engine": engine}, BenchJob(2, "torchrun"))


@pytest.mark.parametrize(("model", "millions"), [("resnet18", 11.7), ("mlp", 12.6)])
def test_models_have_the_parameters_that_figures_are_given_for(model: str, millions: float) -> None:
    assert sum(p.numel() for p in MODELS[model]().parameters()) == pytest.approx(
        1e6 * millions, rel=0.01
    )


@pytest.mark.parametrize(("num_ranks", "controller"), [(1, "gloo"), (4, "nccl")])
def test_a_job_that_cannot_be_is_refused(num_ranks: int, controller: str) -> None:
    with pytest.raises(ArgumentError, match=f"num_ranks={num_ranks}"):
        BenchJob(num_ranks, controller)


def test_fastest_round_of_each_call_counts_and_the_first_does_not() -> None:
    ticks = iter([0.0, 5.0, 10.0, 11.0, 20.0, 22.0, 30.0, 39.0])
    clock = Clock("fake", lambda: next(ticks))
    best = interleaved_minimum({"a": list, "b": dict}, clock=clock, rounds=Rounds(2))
    assert best == {"a": 2.0, "b": 1.0}


@pytest.mark.parametrize(("rounds", "timed"), [(Rounds(1, 5.0), 3), (Rounds(4, 5.0), 4)])
def test_rounds_go_on_until_they_are_enough_and_have_taken_long_enough(
    rounds: Rounds, timed: int
) -> None:
    ticks = itertools.count(0.0, 1.0)  # a call takes one second
    done = []
    calls = {name: lambda: done.append(1) for name in "ab"}
    interleaved_minimum(calls, clock=Clock("fake", lambda: next(ticks)), rounds=rounds)
    assert len(done) == 2 * (1 + timed)


def test_record_says_machine_command_commit_and_date(tmp_path: Path) -> None:
    target = tmp_path / "results" / "x.json"
    write_record(target, {"found": 3}, command=["loft-hvd", "bench"])
    record = json.loads(target.read_text())
    assert record["found"] == 3
    assert record["command"] == "loft-hvd bench"
    assert record["machine"]["allowed_cpus"] >= 1
    assert record["commit"]
    assert record["date"].endswith("UTC")


@pytest.mark.parametrize(
    ("controller", "goal", "verdict"), [("gloo", 2.5, "met"), ("mpi", 5.0, "missed")]
)
def test_a_blocking_exchange_is_compared_round_by_round(
    controller: str, goal: float, verdict: str
) -> None:
    samples = {"median": [1.0, 2.0, 1.0], PEER: [3.0, 6.0, 100.0]}
    found = judge_peer(samples, BenchJob(2, controller))
    assert found == {"ratio": 3.0, "goal": goal, "verdict": verdict}


@pytest.mark.parametrize(("all_to_all_s", "formula_s"), [(0.1, 0.22), (0.9, 0.3 + 0.22)])
def test_the_whole_model_hides_rows_behind_the_backward_pass_and_nothing_else(
    all_to_all_s: float, formula_s: float
) -> None:
    seconds = {
        scopes.COMPUTING: 1.0,
        scopes.FORWARD: 0.4,  # so 0.6 of backward pass
        scopes.ALL_TO_ALL: all_to_all_s,
        scopes.TABLE: 0.02,
        scopes.MIXING: 0.05,
        scopes.ALL_GATHER: 0.15,
        scopes.MODEL: 2.44,
        scopes.SHARDS: 1.1,
        scopes.MODEL_EXPOSED: 0.33,
        scopes.SHARDS_EXPOSED: 0.1,
    }
    samples = {name: [9.0, taken, 0.001] for name, taken in seconds.items()}
    cost = scopes.cost_of({**samples, "trimmed": [3.0, 1.0, 0.1]}, "trimmed")
    assert cost.exposed_formula_s == pytest.approx(formula_s)
    assert cost.step_formula_s == pytest.approx(1.0 + formula_s)
    assert cost.exposed_ratio == pytest.approx(0.33 / formula_s)
    assert (cost.step_s, cost.shards_step_s) == (2.44, 1.1)
    assert (cost.exposed_s, cost.shards_exposed_s) == (0.33, 0.1)
    assert cost.over_trimmed_mean == pytest.approx(1.1)  # of 3, 1.1 and 0.01


def test_a_record_that_cannot_be_written_is_refused_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "run_bench", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(DataError, match="cannot be written"):
        commands.bench_step(
            StepBench(), job=BenchJob(), json_file=str(tmp_path), show=lambda _: None
        )
    check_writable(tmp_path / "new" / "file.json")
    assert list((tmp_path / "new").iterdir()) == []

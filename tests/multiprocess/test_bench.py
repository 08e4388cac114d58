"""Benchmarks over ranks run, check what they time, and write what they found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loft_hvd.bench.commands import bench_step
from loft_hvd.bench.gate import exit_status
from loft_hvd.bench.ranks import BenchJob, goals_of, run_bench
from loft_hvd.bench.scopes import cost_of
from loft_hvd.bench.steps import DDP, StepBench
from loft_hvd.cli import build_app
from loft_hvd.errors import LoftError

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]


def test_bench_allreduce_writes_every_contestant(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    options = ["--ranks", "2", "--mb", "2,4", "--rounds", "3", "--peer", "--json", str(found)]
    done = CliRunner().invoke(build_app(), ["bench", "allreduce", *options])
    assert done.exit_code == 0, done.output[-4000:]
    record = json.loads(found.read_text())
    assert set(record["allreduce"]) == {"2 MB", "4 MB"}
    for judged in record["allreduce"].values():
        names = set(judged["contestants"])
        assert {"horovod", "horovod again", "mean", "median"} < names
        assert all(entry["seconds"] > 0 for entry in judged["contestants"].values())
        assert judged["against_peer"]["ratio"] > 0
    # What is piped is the tables; how far it is comes while it runs, and once from rank 0.
    assert "trimmed_mean f=0" in done.stdout
    assert "rounds" not in done.stdout
    told = [f"bench: {size} MB, {n} of 3 rounds" for size in ("2", "4") for n in (1, 2, 3)]
    assert [line for line in done.stderr.splitlines() if " of 3 rounds" in line] == told


@pytest.mark.long
def test_bench_step_times_whole_steps_and_traces_their_stages(tmp_path: Path) -> None:
    options = {"model": "resnet18", "batch": 2, "rounds": 3, "trace": str(tmp_path / "t.json")}
    options |= {"scopes": True, "steps_before": 2}
    told: list[str] = []
    found = run_bench("step", options, BenchJob(2), progress=told.append)
    assert told[0] == "resnet18, 2 steps of each rule before the first round"
    assert told[1:] == [f"resnet18, {n} of 3 rounds" for n in (1, 2, 3)]
    cost = cost_of(found["resnet18"], "trimmed_mean f=0")
    assert 0 < cost.exposed_formula_s < cost.step_formula_s < 10
    assert min(cost.step_s, cost.exposed_s, cost.shards_step_s, cost.shards_exposed_s) > 0
    assert 11e6 < found["parameters"] < 12e6
    assert len(found["resnet18"]["trimmed_mean f=0"]) == 3
    assert {"pack", "all-to-all", "aggregate", "all-gather", "unpack"} < set(found["stages"])
    assert all(spent > 0 for spent in found["stages"].values())
    for rank in range(2):
        events = json.loads((tmp_path / f"t.{rank}.json").read_text())["traceEvents"]
        assert sum(each["name"] == "aggregate" for each in events) >= 6


HOOKS = ["hook mean", "hook trimmed_mean f=0", "hook robust f=0"]
OPTIMIZERS = ["optimizer mean", "optimizer trimmed_mean f=0", "optimizer robust f=0"]


@pytest.mark.long
def test_bench_step_times_ddp_horovod_and_ours_in_one_job() -> None:
    bench = StepBench("mlp", batch=1, rounds=1, engine=DDP, steps_before=1)
    tables: list[Sequence[Sequence[str]]] = []
    assert bench_step(bench, job=BenchJob(2), json_file=None, show=tables.append) == 0
    ((header, *rows),) = tables
    assert header == ["mlp, 2 ranks, gloo", "ms", "x ddp", "spread", "goal", "verdict"]
    assert [row[0] for row in rows] == ["ddp", "ddp again", *HOOKS, "horovod", *OPTIMIZERS]
    assert all(float(ms) > 0 and float(ratio) > 0 for _, ms, ratio, *_ in rows)
    limits = {row[0]: row[4] for row in rows if row[4]}
    assert limits == dict(zip(HOOKS, ("1.01", "1.00", "1.15"), strict=True)) | {
        OPTIMIZERS[0]: "1.00"
    }
    assert {row[5] for row in rows if row[4]} <= {"met", "missed", "too noisy"}


@pytest.mark.whole
def test_bench_step_gates_ranks_of_torchrun_without_horovod(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    options = ["--engine", "ddp", "--controller", "torchrun", "--ranks", "3", "--rounds", "3"]
    options += ["--model", "mlp", "--batch", "1"]
    files = ["--json", str(found)]
    done = CliRunner().invoke(build_app(), ["bench", "step", *options, *files, "--gate"])
    assert found.exists(), done.output[-4000:]
    judged = json.loads(found.read_text())["mlp"]
    assert list(judged["contestants"]) == [
        "ddp",
        "ddp again",
        *(name.replace("0", "1") for name in HOOKS),
    ]
    assert "x ddp" in done.stdout
    assert done.exit_code == exit_status(goals_of(judged))


@pytest.mark.long
def test_bench_that_fails_shows_what_its_ranks_said() -> None:
    with pytest.raises(LoftError, match="unexpected keyword argument 'speed'"):
        run_bench("step", {"speed": 2}, BenchJob(2))

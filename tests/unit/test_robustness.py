"""The matrix of rules, attacks and skews: what is run, summed up and judged."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import loft_hvd as loft
from loft_hvd.bench.attacked import AttackTrial, Setting
from loft_hvd.bench.defences import DEFENCES, PEER_DEFENCES, Defence, find_defences
from loft_hvd.bench.gate import goal_rows
from loft_hvd.bench.peers import Untimed
from loft_hvd.bench.robustness import (
    Cell,
    KeptRuns,
    RobustnessBench,
    cell_rows,
    judge_robustness,
    matrix_rows,
    measure_robustness,
)
from loft_hvd.errors import ArgumentError, DataError, MissingDependencyError
from tests.support.processes import arguments_of

QUICK = RobustnessBench(
    defences=("mean", "robust", "bulyan"),
    attacks=("none", "IPM 0.1"),
    skews=("shuffled", "sorted"),
    counts=((4, 1),),
    seeds=2,
    steps=4,
)


def cells_of(numbers: dict[tuple[str, str, str], float], workers: int = 8) -> list[Cell]:
    """Return cells by (rule, skew, attack)."""
    return [
        Cell("mlp", workers, 2, rule, attack, skew, (a - 1, a + 1))
        for (rule, skew, attack), a in numbers.items()
    ]


CELLS = cells_of(
    {
        ("mean", "shuffled", "none"): 97.0,
        ("robust", "shuffled", "none"): 96.5,
        ("robust", "shuffled", "mimic"): 95.0,
        ("robust", "shuffled", "ALIE z=1"): 92.0,
        ("robust, scope auto", "shuffled", "none"): 96.0,
        ("robust, scope auto", "shuffled", "ALIE z=1"): 94.0,
        ("robust in shards", "shuffled", "ALIE z=1"): 93.0,
        ("robust in shards", "sorted", "ALIE z=1"): 90.0,
        ("robust", "sorted", "ALIE z=1"): 44.0,
        ("trimmed_mean", "shuffled", "ALIE z=1"): 60.0,
        ("trimmed_mean", "shuffled", "mimic"): 61.0,
        ("trimmed_mean", "sorted", "ALIE z=1"): 46.5,
    }
)


def test_the_matrix_runs_every_cell_and_reports_what_does_not_fit() -> None:
    pytest.importorskip("sklearn", reason="the digits ship inside scikit-learn")
    untimed: list[Untimed] = []
    done: list[tuple[int, int]] = []
    cells = measure_robustness(QUICK, report=untimed.append, progress=lambda *at: done.append(at))
    assert {(c.defence, c.attack, c.skew) for c in cells} == {
        (rule, attack, skew)
        for rule in ("mean", "robust")
        for attack in QUICK.attacks
        for skew in QUICK.skews
    }
    assert {len(cell.by_seed) for cell in cells} == {2}
    assert [one.contestant for one in untimed] == ["bulyan"]  # of 4f + 3 rows
    assert done[-1] == (16, 16)


def test_runs_that_are_kept_are_not_run_again(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the digits ship inside scikit-learn")
    file = tmp_path / "runs"
    first = measure_robustness(QUICK, report=lambda _: None, kept=KeptRuns(file))
    lines = file.read_text().splitlines()
    assert len(lines) == 16
    file.write_text("\n".join([*lines[:10], lines[10][:20], ""]))  # cut off by a kill
    started: list[tuple[int, int]] = []
    again = measure_robustness(
        QUICK,
        report=lambda _: None,
        kept=KeptRuns(file),
        progress=lambda *at: started.append(at),
    )
    assert [at[1] for at in started] == [16] * len(started)
    assert started[-1] == (16, 16)
    assert len(file.read_text().splitlines()) == 10 + 1 + 6
    for one, other in zip(first, again, strict=True):
        assert one.by_seed == pytest.approx(other.by_seed, abs=2.0)
        assert (one.defence, one.attack, one.skew) == (other.defence, other.attack, other.skew)


@pytest.mark.parametrize(
    ("attack", "said", "found"),
    [
        ("none", "", None),  # while the last ranks attacked
        ("none", '"ranks by seed", ', 0.5),
        ("optimised IPM", '"ranks by seed", ', None),  # while it had fewer strengths
        ("optimised IPM", '"ranks by seed, 12 strengths", ', 0.5),
    ],
)
def test_runs_that_were_made_another_way_are_run_anew(
    tmp_path: Path, attack: str, said: str, found: float | None
) -> None:
    setting, trial = Setting("mlp", 8, 2), AttackTrial(Defence("mean"), attack, "sorted", 3)
    line = f'["mlp", 8, 2, 400, 256, "mean", "{attack}", "sorted", 3, {said}0.5]'
    (tmp_path / "runs").write_text(line)
    assert KeptRuns(tmp_path / "runs").get(setting, trial) == found


def test_kept_runs_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        KeptRuns(tmp_path)


def test_a_table_has_none_mean_and_worst() -> None:
    (table,) = matrix_rows(CELLS)
    assert table[0] == ["mlp, n=8 f=2: none/mean/worst", "shuffled", "sorted"]
    assert ["robust", "96.5/93.5/92.0", "-/44.0/44.0"] in table
    assert ["mean", "97.0/-/-", "-/-/-"] in table


def test_cells_of_one_rule() -> None:
    rows = cell_rows(CELLS, "robust")
    assert rows[0] == ["", "shuffled", "capped", "dirichlet", "sorted"]
    assert ["robust, mlp, n=8 f=2, ALIE z=1", "92.0", "-", "-", "44.0"] in rows


def test_goals_are_of_the_default_scope_and_of_the_whole_model() -> None:
    goals = {goal.what: (round(goal.found, 1), goal.verdict) for goal in judge_robustness(CELLS)}
    assert goals == {
        "mlp, n=8 f=2, shuffled, robust, scope auto: points lost unattacked": (1.0, "missed"),
        "mlp, n=8 f=2, shuffled, robust, scope auto: worst of 1 attacks (ALIE z=1), points": (
            3.0,
            "met",
        ),
        "mlp, n=8 f=2, shuffled, robust: points lost unattacked": (0.5, "met"),
        "mlp, n=8 f=2, shuffled, robust: worst of 2 attacks (ALIE z=1), points": (5.0, "missed"),
        "mlp, n=8 f=2, sorted, robust: worst of 1 attacks (ALIE z=1)": (44.0, "missed"),
        "mlp, n=8 f=2: points that trimmed_mean is better in its worst case than robust": (
            2.5,
            "missed",
        ),
        # Of what the default met, one attack.
        "mlp, n=8 f=2: points that trimmed_mean is better in its worst case than robust, scope "
        "auto": (-34.0, "met"),
    }
    rows = goal_rows(judge_robustness(CELLS), digits=1)
    assert [row[3] for row in rows[1:]].count("met") == 3


def test_others_are_judged_against_the_default_too() -> None:
    """Of rules that met the same the best one counts; it may be 2 points better."""
    worst = {"robust, scope auto": 66.0, "median": 60.0, "bulyan": 67.9, "mean": 68.1}
    cells = cells_of({(rule, "sorted", "mimic"): a for rule, a in worst.items()})
    (goal,) = (one for one in judge_robustness(cells) if "better" in one.what)
    assert goal.what.endswith("mean is better in its worst case than robust, scope auto")
    assert (round(goal.found, 1), goal.verdict) == (2.1, "missed")
    for skew, attack in (("capped", "mimic"), ("sorted", "IPM 0.1")):  # which no other met
        more = cells_of({("robust, scope auto", skew, attack): 90.0})
        assert not any("better" in one.what for one in judge_robustness([*cells, *more]))


def test_what_another_is_ahead_has_a_standard_error_over_seeds() -> None:
    ours, other = cells_of({(rule, "sorted", "mimic"): 0.0 for rule in ("robust", "median")})
    cells = [replace(ours, by_seed=(60.0, 70.0)), replace(other, by_seed=(66.0, 72.0))]
    (goal,) = (one for one in judge_robustness(cells) if "better" in one.what)
    assert goal.standard_error == pytest.approx(2.0)  # of 6 and 2
    assert goal_rows([goal], digits=1)[1][1] == "4.0 (se 2.0)"
    # The worst cells of both count, which may be others.
    better = [
        replace(cell, skew="capped", by_seed=(99.0, 10.0 * at)) for at, cell in enumerate(cells, 9)
    ]
    assert judge_robustness([*cells, *better])[-1] == goal
    alone = [replace(cell, by_seed=cell.by_seed[:1]) for cell in cells]
    (goal,) = (one for one in judge_robustness(alone) if "better" in one.what)
    assert goal_rows([goal], digits=1)[1][1] == "6.0"


def test_clean_runs_are_made_along_where_goals_are_judged_by_them() -> None:
    pytest.importorskip("sklearn", reason="the digits ship inside scikit-learn")
    few = replace(QUICK, skews=("sorted",), attacks=("IPM 0.1",), seeds=1)

    def runs(*rules: str) -> list[tuple[str, str, str]]:
        cells = measure_robustness(replace(few, defences=rules), report=lambda _: None)
        return [(cell.defence, cell.attack, cell.skew) for cell in cells]

    attacked = ("robust", "IPM 0.1", "sorted")
    assert runs("robust") == [attacked, ("mean", "none", "shuffled")]
    assert runs("median") == [("median", "IPM 0.1", "sorted")]


@pytest.mark.parametrize(("accuracy", "verdict"), [(96.1, "met"), (95.9, "missed")])
def test_who_is_honest_every_other_step_may_cost_a_point(accuracy: float, verdict: str) -> None:
    numbers = {
        ("mean", "shuffled", "none"): 97.0,
        ("robust, scope auto", "shuffled", "odd steps x10"): accuracy,
        ("robust, scope auto", "capped", "odd steps x10"): 95.0,
    }
    goals = [one for one in judge_robustness(cells_of(numbers)) if "odd" in one.what]
    (under,) = (one for one in goals if "points lost under odd steps x10" in one.what)
    assert (under.what.split(",")[2], under.verdict) == (" shuffled", verdict)


def test_goals_over_dirichlet_data_depend_on_the_number_of_workers() -> None:
    numbers = {("robust", "dirichlet", "mimic"): 75.0}
    assert [goal.verdict for goal in judge_robustness(cells_of(numbers))] == ["met"]
    assert [goal.verdict for goal in judge_robustness(cells_of(numbers, workers=16))] == ["missed"]


@pytest.mark.parametrize("name", DEFENCES)
def test_every_defence_of_ours_is_a_rule(name: str) -> None:
    defence = Defence(name)
    assert defence.rule(3).f in (0, 3)
    begins_in_shards = name == "robust in shards"
    assert defence.shards(16) == (16 if begins_in_shards else 1)
    assert defence.is_auto == (name == "robust, scope auto")
    assert defence.has_sgd_momentum == name.endswith("in SGD")


def test_the_advised_rule_is_what_its_name_says() -> None:
    assert Defence("robust in shards").rule(2) == loft.Robust(2)
    assert Defence("mean, momentum in SGD").rule(2) == loft.Mean()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("bucketing:size=2+median", "bucketing:size=2+median:kind=midpoint"),
        ("clip:norm=1.0+mean in shards", "clip:norm=1.0+mean"),
        ("median:kind=lower, momentum in SGD", "median:kind=lower"),
        ("clip:norm=1.0+trimmed_mean", "clip:norm=1.0+trimmed_mean:f=2"),
        ("mean:reproducible=true", "mean:reproducible=true"),
    ],
)
def test_f_is_given_to_rules_that_take_it(name: str, wanted: str) -> None:
    assert Defence(name).rule(2) == loft.parse_rule(wanted)


def test_peers_that_are_not_installed_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "byzfl", None)
    missing = Defence("byzfl Absent")
    with pytest.raises(MissingDependencyError, match="pip install byzfl"):
        missing.rule(1)
    untimed: list[Untimed] = []
    found = find_defences(("byzfl AbsentToo", "robust"), ((8, 2),), untimed.append)
    assert [each.name for each in found[8, 2]] == ["robust"]
    assert [one.contestant for one in untimed] == ["byzfl AbsentToo"]


def test_peers_rules_are_called_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Double:
        def __init__(self, f: int) -> None:
            self.f = f

        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            rows *= 2  # as its ARC, it writes to what it is given
            return rows

    class Median:
        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.median(dim=0).values

    module = SimpleNamespace(Double=Double, Median=Median)
    monkeypatch.setitem(sys.modules, "byzfl", module)
    rows = torch.tensor([[1.0], [2.0], [9.0]])
    rule = Defence("byzfl Double+Median").rule(1)
    assert loft.aggregate(rows, rule).tolist() == [4.0]
    assert rows.tolist() == [[1.0], [2.0], [9.0]]
    with pytest.raises(ArgumentError, match="byzfl has no Mean"):
        Defence("byzfl Mean").rule(1)


def test_peer_names_are_read() -> None:
    assert all(name.startswith("byzfl ") for name in PEER_DEFENCES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ("mlq",)}, "models"),
        ({"attacks": ("noone",)}, "attacks"),
        ({"skews": ("sort",)}, "skews"),
        ({"seeds": 0}, "seeds=0"),
        ({"counts": ((4, 4),)}, "4:4"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RobustnessBench(**options)  # type: ignore[arg-type]  # wrong on purpose


KILLED = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from loft_hvd.bench.robustness import end_with_parent

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 60).result()
"""


def is_running(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return bool(arguments_of(pid))  # one that nobody has waited for has none
    return False


def test_processes_of_a_bench_that_is_killed_end_with_it(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        worker = int(bench.stdout.readline())
        bench.kill()
        bench.wait(10)
        deadline = time.monotonic() + 10
        while is_running(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not is_running(worker)

"""Rules against attacks: accuracy of a matrix of simulated runs, beside the goals.

A cell is a rule, an attack, a skew and (workers, f), averaged over seeds. Runs go to processes in
chunks that are computed together; what comes back is the same for any number of processes.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from loft_hvd.bench.attacked import (
    ATTACKS,
    MODELS,
    NONE,
    ODD_STEPS,
    AttackTrial,
    Setting,
    count_computing,
    train,
)
from loft_hvd.bench.defences import DEFENCES, Defence, find_defences
from loft_hvd.bench.gate import Goal
from loft_hvd.bench.peers import Untimed
from loft_hvd.bench.skews import SKEWS
from loft_hvd.errors import ArgumentError, DataError

__all__ = [
    "Cell",
    "KeptRuns",
    "RobustnessBench",
    "cell_rows",
    "end_with_parent",
    "judge_robustness",
    "matrix_rows",
    "measure_robustness",
]

# How runs are made, in files of kept ones: those that say something else are run anew. Until
# 2026-11-26 the last ranks attacked in every seed, and lines had no such word; until 2026-11-29
# optimised attacks had 5 or 6 strengths.
_MADE, _MADE_OPTIMISED = "ranks by seed", "ranks by seed, 12 strengths"
_CHUNK = 10  # runs that are computed together: their gradients stay in the caches
_CLEAN = "mean"  # what "clean" accuracy is that of: worker momentum, shuffled, nobody attacking
_ADVISED, _DEFAULT, _IN_SHARDS = "robust", "robust, scope auto", "robust in shards"
_JUDGED = (_DEFAULT, _ADVISED)


@dataclass(frozen=True)
class RobustnessBench:
    """What is run."""

    models: tuple[str, ...] = ("mlp",)
    defences: tuple[str, ...] = DEFENCES
    attacks: tuple[str, ...] = ATTACKS
    skews: tuple[str, ...] = SKEWS
    counts: tuple[tuple[int, int], ...] = ((8, 2), (16, 3))  # workers, and f of them
    seeds: int = 5
    steps: int = 400
    jobs: int = 1  # processes, of one thread each

    def __post_init__(self) -> None:
        for what, given, known in (
            ("models", self.models, tuple(MODELS)),
            ("attacks", self.attacks, ATTACKS),
            ("skews", self.skews, SKEWS),
        ):
            if unknown := [name for name in given if name not in known]:
                raise ArgumentError(f"{what} {unknown} are unknown; there are {', '.join(known)}")
        if self.seeds < 1 or self.steps < 1 or self.jobs < 1:
            raise ArgumentError(
                f"seeds={self.seeds}, steps={self.steps} and jobs={self.jobs} must be >= 1"
            )
        for num_workers, f in self.counts:
            if not 1 <= f < num_workers or num_workers > 128:
                raise ArgumentError(
                    f"{num_workers}:{f}: give workers:f with 1 <= f < workers <= 128"
                )


@dataclass(frozen=True)
class Cell:
    """Accuracy of one rule under one attack and skew, in percent of the test images, by seed."""

    model: str
    num_workers: int
    f: int
    defence: str
    attack: str
    skew: str
    by_seed: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.by_seed)


class KeptRuns:
    """Runs that have ended, in a file of a line each, so that a matrix can be gone on with.

    A line that was cut off, as by a kill, is left out.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)
        self._found: dict[str, float] = {}
        if self._path is None or not self._path.exists():
            return
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"runs kept in {path} cannot be read ({error})") from error
        for line in lines:
            try:
                *key, accuracy = json.loads(line)
                self._found[json.dumps(key)] = float(accuracy)
            except (ValueError, TypeError):
                continue

    @staticmethod
    def _key(setting: Setting, trial: AttackTrial) -> list[object]:
        """Return all that decides a run's result; of the code what its last word says."""
        of_trial = (trial.defence.name, trial.attack, trial.skew, trial.seed)
        made = _MADE_OPTIMISED if trial.attack.startswith("optimised") else _MADE
        return [*astuple(setting), *of_trial, made]

    def get(self, setting: Setting, trial: AttackTrial) -> float | None:
        """Return a run's accuracy, or None if it has not been run."""
        return self._found.get(json.dumps(self._key(setting, trial)))

    def add(
        self, setting: Setting, trials: Sequence[AttackTrial], accuracies: Sequence[float]
    ) -> None:
        """Keep runs, on disk before this returns."""
        lines = []
        for trial, accuracy in zip(trials, accuracies, strict=True):
            key = self._key(setting, trial)
            self._found[json.dumps(key)] = accuracy
            lines.append(json.dumps([*key, accuracy]) + "\n")
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.writelines(lines)
            except OSError as error:
                raise DataError(
                    f"runs cannot be kept in {self._path} ({error}); with room there, the same "
                    "command goes on with those that are"
                ) from error


def _trials(
    bench: RobustnessBench, found: Mapping[tuple[int, int], Sequence[Defence]]
) -> Iterator[tuple[Setting, AttackTrial]]:
    """Yield all runs, the seeds of a cell in their order."""
    for model, (num_workers, f) in itertools.product(bench.models, bench.counts):
        setting = Setting(model, num_workers, f, steps=bench.steps)
        cells = list(itertools.product(found[num_workers, f], bench.attacks, bench.skews))
        clean = (Defence(_CLEAN), NONE, SKEWS[0])
        if clean not in cells and any(one.name in _JUDGED for one in found[num_workers, f]):
            cells.append(clean)  # goals are points lost of it
        for cell, seed in itertools.product(cells, range(bench.seeds)):
            yield setting, AttackTrial(*cell, seed)


def _chunks(
    runs: Sequence[tuple[Setting, AttackTrial]],
) -> Iterator[tuple[Setting, list[AttackTrial]]]:
    """Yield runs that are computed together."""
    together: dict[tuple[Setting, int], list[AttackTrial]] = defaultdict(list)
    for setting, trial in runs:
        together[setting, count_computing(trial.attack, setting)].append(trial)
    for (setting, _), trials in together.items():
        for begin in range(0, len(trials), _CHUNK):
            yield setting, trials[begin : begin + _CHUNK]


def _run_chunk(setting: Setting, trials: Sequence[AttackTrial]) -> list[float]:
    torch.set_num_threads(1)  # a process a core
    return train(trials, setting)


def measure_robustness(
    bench: RobustnessBench,
    *,
    report: Callable[[Untimed], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
    kept: KeptRuns | None = None,
) -> list[Cell]:
    """Run the matrix.

    Args:
        bench: what is run.
        report: told of rules that are left out, and why.
        progress: told how many runs have ended, of how many, after each chunk.
        kept: runs that need not be run again, and where others go.

    Returns:
        One cell for each rule, attack, skew, (workers, f) and model.

    Raises:
        ArgumentError: a rule has no such name.
        MissingDependencyError: no scikit-learn.
    """
    kept = KeptRuns(None) if kept is None else kept
    runs = list(_trials(bench, find_defences(bench.defences, bench.counts, report)))
    chunks = list(_chunks([run for run in runs if kept.get(*run) is None]))
    done = len(runs) - sum(len(trials) for _, trials in chunks)

    def keep(chunk: tuple[Setting, list[AttackTrial]], accuracies: Sequence[float]) -> None:
        nonlocal done
        kept.add(*chunk, accuracies)
        done += len(accuracies)
        progress(done, len(runs))

    if bench.jobs == 1:
        for chunk in chunks:
            keep(chunk, _run_chunk(*chunk))
    else:
        # Spawned: a fork would copy torch's threads' locks.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            bench.jobs, mp_context=context, initializer=end_with_parent
        ) as pool:
            futures = {pool.submit(_run_chunk, *chunk): chunk for chunk in chunks}
            for future in as_completed(futures):
                keep(futures[future], future.result())
    return _cells(runs, kept)


def end_with_parent() -> None:
    """Have this process end when the one that started it does, however that ends.

    Else it goes on with what it was given, for nobody.
    """

    def wait() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _cells(runs: Sequence[tuple[Setting, AttackTrial]], kept: KeptRuns) -> list[Cell]:
    seeds: dict[tuple[Setting, Defence, str, str], list[float]] = defaultdict(list)
    for setting, trial in runs:
        accuracy = kept.get(setting, trial)
        assert accuracy is not None  # run, or kept
        seeds[setting, trial.defence, trial.attack, trial.skew].append(100 * accuracy)
    return [
        Cell(
            setting.model, setting.num_workers, setting.f, defence.name, attack, skew, tuple(found)
        )
        for (setting, defence, attack, skew), found in seeds.items()
    ]


@dataclass(frozen=True)
class _Summary:
    """A rule on one skew, in percent; None where no such run was asked for."""

    by_attack: Mapping[str, float]

    @property
    def none(self) -> float | None:
        """Nobody attacking."""
        return self.by_attack.get(NONE)

    @property
    def attacked(self) -> dict[str, float]:
        return {attack: found for attack, found in self.by_attack.items() if attack != NONE}

    @property
    def worst_attack(self) -> str:
        """Return the attack that leaves least, "" where there was none."""
        return min(self.attacked, key=self.attacked.__getitem__, default="")

    @property
    def worst(self) -> float | None:
        return self.attacked.get(self.worst_attack)

    def __str__(self) -> str:
        mean = statistics.fmean(self.attacked.values()) if self.attacked else None
        numbers = (self.none, mean, self.worst)
        return "/".join("-" if number is None else f"{number:.1f}" for number in numbers)


_NOT_RUN = _Summary({})
_Key = tuple[str, int, int, str, str]  # model, workers, f, rule, skew


def _summaries(cells: Sequence[Cell]) -> dict[_Key, _Summary]:
    by_key: dict[_Key, dict[str, float]] = defaultdict(dict)
    for cell in cells:
        key = (cell.model, cell.num_workers, cell.f, cell.defence, cell.skew)
        by_key[key][cell.attack] = cell.accuracy
    return {key: _Summary(accuracies) for key, accuracies in by_key.items()}


def matrix_rows(cells: Sequence[Cell]) -> list[list[list[str]]]:
    """Return a table for each model and (workers, f), with a header: a rule a row, a skew a column.

    A cell has none/mean/worst: percent with nobody attacking, the mean of all attacks, the worst.
    """
    found = _summaries(cells)
    tables = []
    for model, num_workers, f in dict.fromkeys(key[:3] for key in found):
        own = [key for key in found if key[:3] == (model, num_workers, f)]
        skews = [skew for skew in SKEWS if any(key[4] == skew for key in own)]
        title = f"{model}, n={num_workers} f={f}: none/mean/worst"
        body = [
            [
                name,
                *(str(found.get((model, num_workers, f, name, skew), _NOT_RUN)) for skew in skews),
            ]
            for name in dict.fromkeys(key[3] for key in own)
        ]
        tables.append([[title, *skews], *body])
    return tables


def cell_rows(cells: Sequence[Cell], defence: str) -> list[list[str]]:
    """Return one rule's accuracy by attack, a skew a column, with a header."""
    rows = [["", *SKEWS]]
    own = [cell for cell in cells if cell.defence == defence]
    by_place = {(c.model, c.num_workers, c.f, c.attack, c.skew): c.accuracy for c in own}
    for model, num_workers, f, attack in dict.fromkeys(
        (c.model, c.num_workers, c.f, c.attack) for c in own
    ):
        numbers = [by_place.get((model, num_workers, f, attack, skew)) for skew in SKEWS]
        name = f"{defence}, {model}, n={num_workers} f={f}, {attack}"
        rows.append([name, *("-" if a is None else f"{a:.1f}" for a in numbers)])
    return rows


# Skew and the most points that the worst attack may cost, or the least percent that it must leave,
# of (8, 2) and (16, 3); and the most points with nobody attacking.
_MOST_LOST = {"shuffled": 4.0, "capped": 6.0}
_LEAST_LEFT = {"dirichlet": {8: 70.0, 16: 78.0}, "sorted": {8: 45.0, 16: 45.0}}
_MOST_LOST_UNATTACKED = {"shuffled": 0.7, "capped": 0.7, "dirichlet": 4.0, "sorted": 4.0}
_MOST_LOST_IN_ODD_STEPS = 1.0  # shuffled
_MOST_BEHIND = 2.0  # points that another rule's worst case may be better by


def judge_robustness(cells: Sequence[Cell]) -> list[Goal]:
    """Judge what can be judged of these cells."""
    found = _summaries(cells)
    goals = []
    for model, num_workers, f in dict.fromkeys(key[:3] for key in found):
        place = f"{model}, n={num_workers} f={f}"
        clean = found.get((model, num_workers, f, _CLEAN, "shuffled"))
        for skew, name in itertools.product(SKEWS, _JUDGED):
            ours = found.get((model, num_workers, f, name, skew))
            if ours is None:
                continue
            say = f"{place}, {skew}, {name}"
            if ours.none is not None and clean is not None and clean.none is not None:
                lost = clean.none - ours.none
                limit = _MOST_LOST_UNATTACKED[skew]
                goals.append(Goal(f"{say}: points lost unattacked", limit, lost))
            if ours.worst is None:
                continue
            worst = f"{say}: worst of {len(ours.attacked)} attacks ({ours.worst_attack})"
            if skew in _MOST_LOST and clean is not None and clean.none is not None:
                lost = clean.none - ours.worst
                goals.append(Goal(f"{worst}, points", _MOST_LOST[skew], lost))
                if skew == "shuffled" and ODD_STEPS in ours.attacked:
                    lost = clean.none - ours.attacked[ODD_STEPS]
                    what = f"{say}: points lost under {ODD_STEPS}"
                    goals.append(Goal(what, _MOST_LOST_IN_ODD_STEPS, lost))
            if num_workers in _LEAST_LEFT.get(skew, {}):
                limit = _LEAST_LEFT[skew][num_workers]
                goals.append(Goal(worst, limit, ours.worst, is_floor=True))
        own = [c for c in cells if (c.model, c.num_workers, c.f) == (model, num_workers, f)]
        goals += _against_others(own, place)
    return goals


def _against_others(cells: Sequence[Cell], place: str) -> list[Goal]:
    """Compare worst cases over all skews and attacks of ours: no rule may be much better.

    The standard error over seeds is of the difference of two worst cells. That the same seeds have
    chosen these cells as the worst is not in it.
    """
    found: dict[str, dict[tuple[str, str], Cell]] = defaultdict(dict)  # by rule: of skew, attack
    for cell in cells:
        if cell.attack != NONE:
            found[cell.defence][cell.skew, cell.attack] = cell
    goals = []
    for ours in (name for name in _JUDGED if found.get(name)):
        met = found[ours]
        # Only rules that met all that ours met.
        others = {
            name: _worst(own[at] for at in met)
            for name, own in found.items()
            if name not in (*_JUDGED, _IN_SHARDS) and own.keys() >= met.keys()
        }
        if not others:
            continue
        best = max(others, key=lambda name: others[name].accuracy)
        what = f"{place}: points that {best} is better in its worst case than {ours}"
        worst = _worst(met.values())
        ahead = [a - b for a, b in zip(others[best].by_seed, worst.by_seed, strict=True)]
        error = statistics.stdev(ahead) / len(ahead) ** 0.5 if len(ahead) > 1 else None
        points = others[best].accuracy - worst.accuracy
        goals.append(Goal(what, _MOST_BEHIND, points, standard_error=error))
    return goals


def _worst(cells: Iterable[Cell]) -> Cell:
    return min(cells, key=lambda cell: cell.accuracy)

"""What ``loft-hvd top`` shows of a run: a few lines and a table, made anew at each look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loft_hvd.balance.interval import RankTimes
from loft_hvd.report.entries import (
    Line,
    Plans,
    Run,
    Scalars,
    SuspicionLine,
    Times,
    newest_of,
    of_kind,
)
from loft_hvd.report.verdict import judge, newest_world, rules_of, step_s, when_measured

__all__ = ["PARTS", "RankRow", "Screen", "make_screen", "throughput"]

PARTS = ("stall", "compute", "queued", "wait", "other")  # of a step, in its order
_MOST_ROWS = 24  # ranks, a choice
_MOST_SAID = 3  # sentences of the verdict


@dataclass(frozen=True)
class RankRow:
    """A line of the table."""

    rank: int
    samples: float
    seconds: tuple[float, ...]  # of each of PARTS
    samples_per_s: float
    suspicion: float | None  # None where nobody looks at its gradients


@dataclass(frozen=True)
class Screen:
    """One look at a run."""

    verdict: tuple[str, ...]
    facts: str  # what is trained, where
    state: str  # step, its length, throughput, plan, the script's own numbers
    rows: tuple[RankRow, ...]
    note: str  # why there are no rows, or what they are of


def make_screen(
    lines: Sequence[Line],
    *,
    now_s: float,
    most_rows: int = _MOST_ROWS,
    most_said: int = _MOST_SAID,
) -> Screen:
    """Return what to show of a log's lines, at ``now_s`` seconds since 1970.

    Of more than ``most_rows`` ranks those whose gradients are off come first, then those that
    worked longest; of more than ``most_said`` sentences the weightiest. What is left out is told.
    """
    world = newest_world(lines)
    times = newest_of(Times, world)
    rows: tuple[RankRow, ...] = ()
    note = when_measured(world)
    if times is not None:
        suspicion, named = _suspicions(world)
        worst = sorted(times.ranks, key=lambda each: (each.rank not in named, -each.busy_s))
        ranks = worst[:most_rows]
        rows = tuple(_row(each, suspicion) for each in sorted(ranks, key=lambda each: each.rank))
        num_ranks = times.num_ranks or len(times.ranks)
        note = f"an average batch up to step {times.step}"
        if len(rows) < num_ranks:
            note += f", {len(rows)} of {num_ranks} ranks"
    said = judge(lines)
    verdict = said[:most_said]
    if len(said) > len(verdict):
        verdict[-1] += f" ({len(said) - len(verdict)} more: loft-hvd report)"
    return Screen(
        verdict=tuple(verdict),
        facts=_facts(world),
        state=_state(world, times, now_s=now_s),
        rows=rows,
        note=note,
    )


def throughput(times: Times) -> float | None:
    """Return samples a second of all ranks; None where no step has been counted."""
    whole_s = step_s(times.ranks)  # 0 where there are no ranks
    if not whole_s > 0:
        return None
    # Of a large world some ranks are logged, evenly spaced: they stand for all.
    num_ranks = times.num_ranks or len(times.ranks)
    samples = sum(each.samples for each in times.ranks) * num_ranks / len(times.ranks)
    return samples / whole_s


def _row(times: RankTimes, suspicion: dict[int, float]) -> RankRow:
    seconds = tuple(float(getattr(times, f"{part}_s")) for part in PARTS)
    return RankRow(
        times.rank, times.samples, seconds, times.samples_per_s, suspicion.get(times.rank)
    )


def _suspicions(world: Sequence[Line]) -> tuple[dict[int, float], set[int]]:
    """Return the suspicion of each rank, and which ranks are warned of."""
    newest = newest_of(SuspicionLine, world)
    workers = [] if newest is None else newest.workers
    known = {rank: worker.suspicion for worker in workers for rank in worker.ranks}
    return known, {rank for worker in workers if worker.is_named for rank in worker.ranks}


def _facts(world: Sequence[Line]) -> str:
    run = newest_of(Run, world)
    if run is None:
        return ""
    found = [run.script, *run.facts, rules_of(world)]
    if run.host is not None:
        found.append(f"on {run.host}")
    return ", ".join(each for each in found if each)


def _state(world: Sequence[Line], times: Times | None, *, now_s: float) -> str:
    found = [f"step {max((line.step for line in world), default=0)}"]
    if times is not None:
        rate = throughput(times)
        if rate is not None:
            found += [f"{1e3 * step_s(times.ranks):.4g} ms a step", f"{rate:.4g} samples/s"]
    plans = of_kind(Plans, world)
    if plans:
        found.append(f"plan {plans[-1].plan_id}")
    scalars = newest_of(Scalars, world)
    if scalars is not None:
        found += [f"{name} {value:.4g}" for name, value in scalars.values.items()]
    stamp = world[-1].time_s if world else math.nan
    if math.isfinite(stamp):
        found.append(f"{max(now_s - stamp, 0.0):.0f} s ago")
    return ", ".join(found)

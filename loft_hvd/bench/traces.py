"""Made-up jobs that arrive at a cluster, as PD-ORS and GADGET were measured, and all policies.

Neither the papers' traces nor their code are here. The ranges of GADGET's setting are those that it
prints; those of PD-ORS' are as far as they are known, with our own for what is not: a job takes 5
to 80 workers' slots of work. Arrivals are drawn, not the Google trace's.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np

from loft_hvd.balance.plan import Floats
from loft_hvd.errors import ArgumentError
from loft_hvd.fleet.bounds import fluid_bound, gang_optimum
from loft_hvd.fleet.policies import POLICIES, Options, plan_all
from loft_hvd.fleet.prices import RESERVE
from loft_hvd.fleet.solvers import PACKING_SOLVERS, noting
from loft_hvd.fleet.speeds import ParameterServers, Ring
from loft_hvd.fleet.timeline import Demand, Ints, Outcome, Value, Workload
from loft_hvd.report.html import table, whole_page
from loft_hvd.report.svg import bars

__all__ = [
    "SETTINGS",
    "TraceBench",
    "make_trace",
    "measure_traces",
    "summarise_traces",
    "trace_rows",
    "traces_page",
    "warnings_of",
]

_GB, _SLOT_S = 1e9, 3600.0
_PROOF_S = 60.0  # that HiGHS has to prove an optimum
_MOST_TIERS = 4  # rates of links, that machines are chosen by
RESOURCES = ("GPUs", "CPUs", "memory")


@dataclass(frozen=True)
class TraceSetting:
    """A cluster, and the jobs that come to it."""

    num_machines: int
    num_jobs: int
    num_slots: int
    is_ring: bool = False  # GADGET's speeds, machines and jobs; else PD-ORS'
    is_equal: bool = True  # links
    has_optimum: bool = False  # whether rows have ``gang_optimum``


SETTINGS = {
    "20x4-50": TraceSetting(20, 50, 100),
    "20x4-100": TraceSetting(20, 100, 100),
    "20x4-50-links": TraceSetting(20, 50, 100, is_equal=False),
    "20x4-100-links": TraceSetting(20, 100, 100, is_equal=False),
    "gadget": TraceSetting(50, 200, 200, is_ring=True, is_equal=False),
    # Small enough for HiGHS to prove the most that jobs which keep their workers can be worth.
    "gadget-small": TraceSetting(10, 24, 60, is_ring=True, is_equal=False, has_optimum=True),
    "large": TraceSetting(100, 100, 200, is_equal=False),
}


@dataclass(frozen=True)
class _TraceMachines:
    """Where jobs run; arrays are [H]."""

    capacity: Floats  # [H, R]
    link: Floats  # bytes a second
    inside: Floats
    rack: Ints
    rack_link: Floats  # of each machine's rack


def make_trace(setting: TraceSetting, seed: int) -> Workload:
    """Return machines and jobs, the same for the same seed."""
    rng = np.random.default_rng([seed, setting.num_jobs, setting.num_machines])
    machines = _ring_machines(rng, setting) if setting.is_ring else _machines(rng, setting)
    make = _ring_job if setting.is_ring else _server_job
    last = 0.8 * setting.num_slots
    arrivals = np.sort(np.floor(rng.uniform(0, last, setting.num_jobs)))
    demands = tuple(
        make(rng, f"job{at:03d}", float(arrival), machines) for at, arrival in enumerate(arrivals)
    )
    return Workload(machines.capacity, RESOURCES, setting.num_slots, demands)


def _machines(rng: np.random.Generator, setting: TraceSetting) -> _TraceMachines:
    count = setting.num_machines
    capacity = np.tile([4.0, 40.0, 128.0], (count, 1))
    rates = [100 * _GB / 8] if setting.is_equal else [10 * _GB / 8, 25 * _GB / 8, 100 * _GB / 8]
    link = rng.choice(rates, count)
    return _TraceMachines(
        capacity, link, np.full(count, 32 * _GB), np.zeros(count, int), np.full(count, np.inf)
    )


def _ring_machines(rng: np.random.Generator, setting: TraceSetting) -> _TraceMachines:
    count, num_racks = setting.num_machines, int(rng.integers(2, 6))
    gpus = rng.choice([1.0, 2.0, 4.0, 8.0], count)
    capacity = np.stack([gpus, 10.0 * gpus, 32.0 * gpus], axis=1)
    rack = np.sort(rng.integers(num_racks, size=count))
    racks = rng.uniform(200, 3200, num_racks) * _GB / 8
    link = rng.uniform(10, 100, count) * _GB / 8
    return _TraceMachines(capacity, link, np.full(count, 32 * _GB), rack, racks[rack])


def _value(rng: np.random.Generator, fastest: float) -> Value:
    """Return a worth after PD-ORS: a tenth never urgent, a half somewhat, a third very much."""
    kind = rng.random()
    top, wished = float(rng.uniform(1, 100)), float(rng.uniform(1, 15))
    # A job that cannot be done by then at all would be worth nothing to anybody.
    wished = max(wished, fastest)
    if kind < 0.1:
        return Value(top / 2.0, is_whole=True)
    urgency = rng.uniform(0.01, 1.0) if kind < 0.65 else rng.uniform(4.0, 6.0)
    return Value(top, float(urgency), wished, is_whole=True)


def _server_job(
    rng: np.random.Generator, name: str, arrival: float, machines: _TraceMachines
) -> Demand:
    """Return a job with parameter servers."""
    batch = float(rng.integers(8, 201))
    most = int(min(batch, rng.choice([4, 8, 16])))
    gpus = float(rng.integers(1, 5)) if rng.random() < 0.5 else 1.0
    worker = np.array([gpus, float(rng.integers(1, 11)), float(rng.uniform(2, 32))])
    worker = np.minimum(worker, machines.capacity[0])
    server = np.array([0.0, float(rng.integers(1, 5)), float(rng.uniform(2, 16))])
    gamma = float(rng.integers(1, 11))
    samples = float(rng.uniform(50, 200) * rng.uniform(2e4, 5e5))
    sample_s = float(rng.uniform(5, 80)) * _SLOT_S / samples
    model = ParameterServers(sample_s, float(rng.uniform(30e6, 575e6)), batch, gamma)

    def slots(workers: float, bytes_per_s: float) -> float:
        return samples / (model.samples_per_s(int(workers), bytes_per_s) * _SLOT_S)

    needs = np.stack([worker, server])
    return _demand(rng, name, arrival, machines, needs, _counts(most), slots, 1.0 / gamma)


def _ring_job(
    rng: np.random.Generator, name: str, arrival: float, machines: _TraceMachines
) -> Demand:
    """Return a job on a ring, with reserved bandwidth of 0.1 to 5 Gb/s."""
    most = int(rng.integers(1, 6))
    gbits = float(rng.uniform(0.1, 5.0))
    work, batch = float(rng.uniform(5, 80)), 32.0
    forward_s = float(rng.uniform(1e-4, 2e-3))
    model = Ring(forward_s, 2.0 * forward_s * batch, float(rng.uniform(30e6, 575e6)))
    steps = work * _SLOT_S / model.step_s(1, batch, math.inf)

    def slots(workers: float, bytes_per_s: float) -> float:
        rate = bytes_per_s if bytes_per_s >= 32 * _GB else min(bytes_per_s, gbits * _GB / 8)
        return steps * model.step_s(int(workers), batch, rate) / (workers * _SLOT_S)

    gpus = float(min(rng.integers(1, 5), machines.capacity[:, 0].max()))
    needs = np.array([[gpus, float(rng.integers(1, 11)), float(rng.uniform(2, 32))]])
    return _demand(rng, name, arrival, machines, needs, tuple(range(1, most + 1)), slots, 0.0)


def _counts(most: int) -> tuple[int, ...]:
    return tuple(count for count in (1, 2, 3, 4, 6, 8, 12, 16) if count <= most)


# Slots that a job takes with so many workers and so many bytes a second between them.
Pace = Callable[[float, float], float]


def _demand(
    rng: np.random.Generator,
    name: str,
    arrival: float,
    machines: _TraceMachines,
    needs: Floats,
    counts: tuple[int, ...],
    pace: Pace,
    servers: float,
) -> Demand:
    def slots(placement: Ints) -> float:
        used = np.flatnonzero(placement.any(axis=0))
        if len(used) == 1:
            return pace(placement[0].sum(), machines.inside[used[0]])
        rate = machines.link[used].min()
        racks = machines.rack[used]
        if np.any(racks != racks[0]):
            rate = min(rate, machines.rack_link[used].min())
        return pace(placement[0].sum(), rate)

    _, kinds = np.unique(np.c_[machines.capacity, machines.inside], axis=0, return_inverse=True)
    rates = np.unique(machines.link)
    thresholds = rates if len(rates) <= _MOST_TIERS else rates[:1]
    tiers = tuple(machines.link >= rate for rate in thresholds)
    draft = Demand(
        name, arrival, Value(0.0), needs, counts, counts[0], slots, tiers, kinds.ravel(), ()
    )
    draft = replace(draft, servers=servers)
    least = tuple(_least(draft, machines, count, pace) for count in counts)
    return replace(
        draft,
        value=_value(rng, min(least)),
        wanted=int(rng.choice(counts)),
        least_slots=least,
    )


def _least(demand: Demand, machines: _TraceMachines, count: int, pace: Pace) -> float:
    """Return the least slots of so many workers anywhere, a bound."""
    together = np.array(demand.processes(count)) @ demand.needs
    fits_one = bool(np.any(np.all(together <= machines.capacity, axis=1)))
    return pace(count, machines.inside.max() if fits_one else machines.link.max())


# All policies on all seeds.


@dataclass(frozen=True)
class TraceBench:
    """What is measured."""

    settings: tuple[str, ...]
    seeds: int = 20
    policies: tuple[str, ...] = tuple(POLICIES)
    reserve: float = RESERVE  # of the prices, and what they are multiplied by
    scale: float = 1.0
    solver: str = "fill"

    def __post_init__(self) -> None:
        for what, names, known in (
            ("settings", self.settings, SETTINGS),
            ("policies", self.policies, POLICIES),
            ("solver", (self.solver,), PACKING_SOLVERS),
        ):
            for name in names:
                if name not in known:
                    raise ArgumentError(f"bench plan: {what} {name!r} is none of {list(known)}")


def measure_traces(
    bench: TraceBench, *, progress: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Return what each policy came to, by setting: a row a seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in bench.settings:
        progress(f"{name}, {bench.seeds} seeds")
        found[name] = [_measure(bench, SETTINGS[name], seed) for seed in range(bench.seeds)]
    return found


def _measure(bench: TraceBench, setting: TraceSetting, seed: int) -> dict[str, Any]:
    workload = make_trace(setting, seed)
    with noting() as warned:
        row: dict[str, Any] = {"seed": seed, "bound": fluid_bound(workload), "policies": {}}
        if setting.has_optimum:
            row["optimum"] = gang_optimum(workload, limit_s=_PROOF_S)
    row["warnings"] = dict(warned)
    options = Options(
        PACKING_SOLVERS[bench.solver], reserve=bench.reserve, scale=bench.scale, explains=False
    )
    for policy in bench.policies:
        before = time.perf_counter()
        with noting() as warned:
            outcomes = plan_all(policy, workload, options)
        seconds = time.perf_counter() - before
        row["policies"][policy] = _summary(outcomes, row["bound"], seconds)
        row["policies"][policy]["warnings"] = dict(warned)
    return row


def _summary(outcomes: Sequence[Outcome], bound: float, seconds: float) -> dict[str, Any]:
    worth = sum(outcome.worth for outcome in outcomes)
    ended = [each.end - each.demand.asked for each in outcomes if each.end is not None]
    return {
        "worth": worth,
        "share": worth / bound if bound > 0 else 0.0,
        "admitted": len(ended),
        "median_slots": float(np.median(ended)) if ended else None,
        "planning_s": seconds,
    }


# Over the seeds.


def summarise_traces(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return what each policy comes to over all seeds of a setting."""
    found: dict[str, dict[str, float | None]] = {}
    first = next(iter(rows[0]["policies"]))
    firsts = np.array([row["policies"][first]["worth"] for row in rows])
    proven = [row for row in rows if row.get("optimum")]
    for policy in rows[0]["policies"]:
        mine = [row["policies"][policy] for row in rows]
        shares = [each["share"] for each in mine]
        ratios = firsts / np.maximum([each["worth"] for each in mine], 1e-9)
        ended = [each["median_slots"] for each in mine if each["median_slots"] is not None]
        of_optimum = [row["policies"][policy]["worth"] / row["optimum"] for row in proven]
        found[policy] = {
            "share": float(np.mean(shares)),
            "least_share": float(np.min(shares)),
            "of_optimum": float(np.mean(of_optimum)) if proven else None,
            "first_over_it": float(np.median(ratios)),
            "least_first_over_it": float(np.min(ratios)),
            "admitted": float(np.mean([each["admitted"] for each in mine])),
            "median_slots": float(np.median(ended)) if ended else None,
            "planning_s": float(np.max([each["planning_s"] for each in mine])),
        }
    return found


def warnings_of(rows: Sequence[dict[str, Any]]) -> Counter[str]:
    """Count what solvers warned of, for bounds and for policies."""
    warned = Counter[str]()
    for row in rows:
        for each in (row, *row["policies"].values()):
            warned.update(each["warnings"])
    return warned


def trace_rows(name: str, rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a header, then a row for each policy."""
    summary = summarise_traces(rows)
    first = next(iter(summary))
    columns = ["share", "least", "optimum", f"{first}/it", "least", "ended", "slots", "s"]
    table = [[name, *columns]]
    for policy, each in summary.items():
        shown = [
            _show(each["share"], 3),
            _show(each["least_share"], 3),
            _show(each["of_optimum"], 3),
            _show(each["first_over_it"], 2),
            _show(each["least_first_over_it"], 2),
            _show(each["admitted"], 1),
            _show(each["median_slots"], 0),
            _show(each["planning_s"], 1),
        ]
        table.append([policy, *shown])
    return table


def traces_page(found: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Return a page with what each policy came to: of the bound on worth, and in time."""
    parts = ["<h1>Policies on made-up jobs</h1>"]
    for name, rows in found.items():
        summary = summarise_traces(rows)
        titles, *cells = trace_rows(name, rows)
        parts += [
            f"<h2>{escape(name)}, {len(rows)} draws</h2>",
            "<p>Worth as a share of one that no policy can exceed: mean, then the least.</p>",
            bars(_percents(summary, "share"), ["mean"], unit="%"),
            bars(_percents(summary, "least_share"), ["least"], unit="%"),
            table(titles, cells),
        ]
        warned = warnings_of(rows).items()
        parts += [f"<p>{number} times: {escape(text)}</p>" for text, number in warned]
    return whole_page("\n".join(parts), title="loft-hvd bench plan")


def _percents(
    summary: Mapping[str, Mapping[str, float | None]], what: str
) -> list[tuple[str, list[float]]]:
    return [(policy, [100.0 * (each[what] or 0.0)]) for policy, each in summary.items()]


def _show(number: float | None, digits: int) -> str:
    return "-" if number is None else f"{number:.{digits}f}"

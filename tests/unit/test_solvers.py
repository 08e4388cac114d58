"""Placements of each solver: against all placements there are, and where HiGHS errs."""

from __future__ import annotations

import itertools
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from loft_hvd.errors import MissingDependencyError
from loft_hvd.fleet import solvers
from loft_hvd.fleet.policies import Options, plan_all
from loft_hvd.fleet.solvers import Packing, fill, milp, rounded
from loft_hvd.fleet.speeds import ParameterServers, Ring
from loft_hvd.fleet.timeline import Ints, Stretch, Timeline
from tests.support.demands import random_workload

pytest.importorskip("scipy", reason="the solvers are the extra [plan]")


def _random_packing(seed: int, *, kinds: int = 2, machines: int = 3) -> Packing:
    rng = np.random.default_rng(seed)
    room = rng.integers(1, 6, (machines, 2)).astype(float)
    needs = np.array([[1.0, float(rng.integers(0, 3))], [0.0, float(rng.integers(1, 3))]])[:kinds]
    counts = tuple(int(each) for each in rng.integers(1, 4, kinds))
    return Packing(room, rng.uniform(0.1, 3.0, room.shape), needs, counts)


def _splits(count: int, machines: int) -> Iterator[tuple[int, ...]]:
    for split in itertools.product(range(count + 1), repeat=machines):
        if sum(split) == count:
            yield split


def _cheapest(packing: Packing) -> float:
    """Return the least cost of all placements; infinite where none fits."""
    ways = [_splits(count, len(packing.room)) for count in packing.counts]
    costs = [
        packing.cost(placement)
        for rows in itertools.product(*ways)
        if packing.fits(placement := np.array(rows))
    ]
    return min(costs, default=math.inf)


def _cost(packing: Packing, placement: Ints | None) -> float:
    if placement is None:
        return math.inf
    assert packing.fits(placement)
    return packing.cost(placement)


@pytest.mark.parametrize("seed", range(12))
def test_milp_is_the_cheapest_of_all_placements(seed: int) -> None:
    packing = _random_packing(seed)
    assert _cost(packing, milp(packing)) == pytest.approx(_cheapest(packing))


@pytest.mark.parametrize("seed", range(30))
def test_fill_is_the_cheapest_for_one_kind(seed: int) -> None:
    packing = _random_packing(seed, kinds=1)
    assert _cost(packing, fill(packing)) == pytest.approx(_cheapest(packing))


def _check_rounding(num_seeds: int) -> None:
    ratios = []
    for seed in range(num_seeds):
        packing = _random_packing(seed, machines=8)
        best = _cost(packing, milp(packing))
        found = _cost(packing, rounded(packing))
        assert math.isfinite(found) == math.isfinite(best), f"seed {seed}"
        if math.isfinite(best):
            ratios.append(found / best)
    assert len(ratios) > num_seeds // 2
    assert np.mean(ratios) <= 1.25
    assert min(ratios) >= 1.0 - 1e-9


def test_rounding_fits_and_costs_at_most_a_quarter_more_on_average() -> None:
    _check_rounding(8)


@pytest.mark.long
def test_rounding_on_200_draws_fits_and_costs_at_most_a_quarter_more_on_average() -> None:
    _check_rounding(200)


def test_rounding_is_the_same_for_the_same_seed() -> None:
    packing = _random_packing(7, machines=8)
    one, other = rounded(packing, seed=3), rounded(packing, seed=3)
    assert one is not None
    assert other is not None
    assert np.array_equal(one, other)


def _too_dear(x: np.ndarray) -> np.ndarray:
    """Move workers to the dearest machine."""
    return np.roll(x.reshape(2, -1), 1, axis=1).ravel()


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda x: x * 0.0, "does not fit"),
        (lambda x: x + 0.3, "is not whole"),
        (lambda x: x + 1.0, "does not fit"),
        (_too_dear, "costs more than sorting"),
    ],
)
def test_an_answer_of_highs_that_is_spoiled_is_refused(
    spoil: types.FunctionType, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both kinds on one machine, the cheapest; the second would cost ten times as much.
    prices = np.array([[1.0, 1.0], [10.0, 10.0], [20.0, 20.0]])
    packing = Packing(np.full((3, 2), 8.0), prices, np.array([[1.0, 1.0], [0.0, 1.0]]), (2, 1))
    honest = solvers.solve

    def lying(
        program: solvers.Program, *, what: str, is_whole: bool = False
    ) -> tuple[float, np.ndarray | None]:
        found, x = honest(program, what=what, is_whole=is_whole)
        assert x is not None
        return (found, spoil(x)) if is_whole else (found, x)

    monkeypatch.setattr(solvers, "solve", lying)
    with pytest.warns(RuntimeWarning, match=fault):
        found = milp(packing)
    assert found is not None
    assert found.tolist() == [[2, 0, 0], [1, 0, 0]]


def test_a_cost_below_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = _random_packing(0)
    honest = solvers.solve

    def lying(
        program: solvers.Program, *, what: str, is_whole: bool = False
    ) -> tuple[float, np.ndarray | None]:
        found, x = honest(program, what=what, is_whole=is_whole)
        return (found, x) if is_whole else (found + 100.0, x)

    monkeypatch.setattr(solvers, "solve", lying)
    with pytest.warns(RuntimeWarning, match="below the bound"):
        milp(packing)


def test_without_scipy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingDependencyError, match=r"loft-hvd\[plan\]"):
        milp(_random_packing(0))
    assert fill(_random_packing(0, kinds=1)) is not None
    workload = random_workload(0)
    with pytest.raises(MissingDependencyError, match="--policy dorm, alone of all policies, needs"):
        plan_all("dorm", workload, Options())
    assert len(plan_all("drf", workload, Options())) == len(workload.demands)


def test_what_fits_a_machine_s_room_can_be_promised_on_it() -> None:
    demand = replace(random_workload(1, has_servers=False).demands[0], needs=np.array([[1.0]]))
    timeline = Timeline(np.array([[3.0 * (1.0 - 1e-10)]]), 1)
    packing = Packing(timeline.free(0, 1), np.ones((1, 1)), demand.needs, (3,))
    found = fill(packing)
    assert found is not None
    assert packing.fits(found)
    timeline.take(demand, Stretch(0, 1, found))
    nothing = Packing(timeline.free(0, 1), np.ones((1, 1)), demand.needs, (0,))
    assert nothing.fits(0 * found)


def test_what_cannot_be_promised_on_a_machine_does_not_fit() -> None:
    demand = replace(random_workload(1, has_servers=False).demands[0], needs=np.array([[1.0]]))
    timeline, placement = Timeline(np.array([[3.0 * (1.0 - 1e-8)]]), 1), np.array([[3]])
    packing = Packing(timeline.free(0, 1), np.ones((1, 1)), demand.needs, (3,))
    assert not packing.fits(placement)
    with pytest.raises(AssertionError):
        timeline.take(demand, Stretch(0, 1, placement))


@pytest.mark.parametrize("policy", ["price", "fifo", "oasis"])
def test_policies_place_by_the_solver_that_is_chosen(policy: str) -> None:
    asked: list[Packing] = []

    def solver(packing: Packing) -> Ints | None:
        asked.append(packing)
        return fill(packing)

    plan_all(policy, random_workload(3, has_servers=True), Options(solver, explains=False))
    assert asked


def test_parameter_servers_do_as_many_samples_as_their_closed_form_says() -> None:
    # A worker does 1 / (2 ms + 2 * 4 * 100 MB / (1 GB/s * 50)) = 1 / 18 ms samples a second.
    model = ParameterServers(2e-3, 100e6, 50.0, workers_per_server=4.0)
    assert model.samples_per_s(9, 1e9) == pytest.approx(500.0, rel=1e-9)
    assert model.samples_per_s(9, 2e9) == pytest.approx(900.0, rel=1e-9)


def test_a_ring_takes_as_long_as_its_closed_form_says() -> None:
    # 75 MB * (2 / 1 GB/s + 1 / 3 GB/s) = 175 ms, 32 samples of 1 ms, 60 ms back, 3 ms of latency.
    ring = Ring(1e-3, 60e-3, 100e6, latency_s=3e-3, reduced_bytes_per_s=3e9)
    assert ring.step_s(4, 32.0, 1e9) == pytest.approx(0.270, rel=1e-9)
    assert ring.step_s(1, 32.0, 1e9) == pytest.approx(0.095, rel=1e-9)

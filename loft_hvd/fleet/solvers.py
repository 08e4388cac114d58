"""The cheapest places for a job's processes on machines with room: three ways, one protocol.

``fill`` takes the cheapest machines first, which is the cheapest of all for one kind of processes.
``milp`` asks HiGHS for the cheapest whole numbers, for workers and servers together. ``rounded``
rounds the solution in fractions at random, after PD-ORS (arXiv 2108.02917). HiGHS errs at times
(scipy issue 24141, HiGHS issue 2980), so each of its answers is checked here.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from loft_hvd.balance.plan import Floats
from loft_hvd.errors import MissingDependencyError
from loft_hvd.fleet.timeline import ROUNDING, Ints

__all__ = [
    "PACKING_SOLVERS",
    "Packing",
    "Program",
    "Solver",
    "SolverWarning",
    "evenly",
    "fill",
    "milp",
    "noting",
    "rounded",
    "solve",
    "sparse_rows",
]

_NEAR = 1e-6  # of costs, as HiGHS has it
_LIMIT_S = 20.0  # of one program
_OUT_OF_TIME = 1  # HiGHS' status, as scipy.optimize.milp has it
_TRIES, _FAILURE = 50, 0.5  # of the rounding; the chance of a bad draw that scales are made for


class SolverWarning(RuntimeWarning):
    """HiGHS had no answer in time, or a wrong one: it is not used."""


@contextmanager
def noting() -> Iterator[Counter[str]]:
    """Count what solvers warn of, in place of showing it; other warnings are shown."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", SolverWarning)
        yield found
    for each in told:
        if issubclass(each.category, SolverWarning):
            found[str(each.message)] += 1
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


@dataclass(frozen=True)
class Packing:
    """Processes of a job, and machines that could take them."""

    room: Floats  # [H, R]
    prices: Floats  # of a unit of each resource, [H, R]
    needs: Floats  # of a process, [K, R]
    counts: tuple[int, ...]  # processes of each kind, [K]

    @functools.cached_property
    def costs(self) -> Floats:
        """Of a process on each machine, [K, H]."""
        costs: Floats = self.needs @ self.prices.T
        return costs

    def cost(self, placement: Ints | Floats) -> float:
        """Return what a placement costs."""
        return float((self.costs * placement).sum())

    def fits(self, placement: Ints) -> bool:
        """Say whether all processes are placed, and no machine is over its room."""
        uses = placement.T @ self.needs  # [H, R]
        is_whole = np.array_equal(placement.sum(axis=1), self.counts) and placement.min() >= 0
        return bool(is_whole and np.all(uses <= self.room * (1.0 + ROUNDING)))

    def program(self) -> Program:
        """Return it in the form of ``solve``; variables are the placement, row by row."""
        kinds, machines = self.costs.shape
        resources = self.room.shape[1]
        covers = np.kron(np.eye(kinds), np.ones(machines))
        packs = np.zeros((machines * resources, kinds * machines))
        for kind in range(kinds):
            for at in range(machines):
                rows = slice(at * resources, (at + 1) * resources)
                packs[rows, kind * machines + at] = self.needs[kind]
        counts = np.array(self.counts, dtype=np.float64)
        return Program(
            self.costs.ravel(),
            np.vstack([covers, packs]),
            np.concatenate([counts, np.full(len(packs), -np.inf)]),
            np.concatenate([counts, self.room.ravel()]),
            np.repeat(counts, machines),
        )


@dataclass(frozen=True)
class Program:
    """Least ``costs @ x`` with ``low <= rows @ x <= high`` and ``0 <= x <= most``."""

    costs: Floats
    rows: Any  # [num_rows, num_variables], an array or sparse
    low: Floats
    high: Floats
    most: Floats


class Solver(Protocol):
    """A way to place processes; None where it finds no room for them."""

    def __call__(self, packing: Packing) -> Ints | None:
        """Return the placement, [K, H]."""


def fill(packing: Packing) -> Ints | None:
    """Take the cheapest machines first, kind by kind."""
    placement = np.zeros(packing.costs.shape, dtype=np.int64)
    free = packing.room.copy()
    for kind, count in enumerate(packing.counts):
        needs = packing.needs[kind]
        asked = needs > 0
        rooms = np.floor(np.min(free[:, asked] / needs[asked] * (1.0 + ROUNDING), axis=1))
        left = count
        for at in np.argsort(packing.costs[kind], kind="stable"):
            taken = min(left, max(int(rooms[at]), 0))
            placement[kind, at] = taken
            left -= taken
            if not left:
                break
        if left:
            return None
        free -= placement[kind][:, None] * needs
    return placement


def evenly(packing: Packing, *, each: int, solver: Solver = fill) -> Ints | None:
    """Place ``each`` processes on every machine that is taken; with 0 as many as are cheapest.

    Processes are of one kind then. A machine with room for so many is one with room for one that
    needs as much.
    """
    if not each:
        return solver(packing)
    (count,), needs = packing.counts, each * packing.needs
    if count % each:
        return None
    fits = np.all(packing.room * (1.0 + ROUNDING) >= needs, axis=1)
    placement = solver(
        Packing(np.where(fits[:, None], needs, 0.0), packing.prices, needs, (count // each,))
    )
    return None if placement is None else each * placement


def milp(packing: Packing) -> Ints | None:
    """Ask HiGHS; where its answer is none, or fails a check, ``fill`` counts."""
    known = fill(packing)
    if len(packing.counts) == 1:  # ``fill`` is exact
        return known
    program = packing.program()
    bound, _ = solve(program, what="--solver milp")
    found, x = solve(program, what="--solver milp", is_whole=True)
    if x is None:
        return known  # none fits, or it was out of time, which ``solve`` tells
    placement = np.rint(x).astype(np.int64).reshape(packing.costs.shape)
    cost = packing.cost(placement)
    size = _NEAR * max(1.0, abs(cost))
    faults = [
        fault
        for fault, is_so in (
            ("is not whole", np.abs(x - np.rint(x)).max() > 1e-4),
            ("does not fit", not packing.fits(placement)),
            (f"costs {found:g}, below the bound {bound:g}", cost < bound - size),
            ("costs more than sorting", known is not None and cost > packing.cost(known) + size),
        )
        if is_so
    ]
    if faults:
        warnings.warn(
            f"an answer of HiGHS {' and '.join(faults)}: it is not used, sorting counts; try "
            "another release of scipy",
            SolverWarning,
            stacklevel=2,
        )
        return known
    return placement


def rounded(packing: Packing, *, seed: int = 0) -> Ints | None:
    """Round fractions up at random until all fits; where it never does, ``milp`` counts.

    Fractions are scaled up first, so that enough are drawn: by the scale that Chernoff's bound asks
    for, with the smallest count over a coefficient of 1. Those that are too many are taken off
    where they cost most.
    """
    if len(packing.counts) == 1:
        return fill(packing)
    _, x = solve(packing.program(), what="--solver round")
    if x is None:
        return milp(packing)
    fractions = np.maximum(x.reshape(packing.costs.shape), 0.0)
    least = max(min(packing.counts), 1)
    share = math.log(3.0 * len(packing.counts) / _FAILURE) / least
    scaled = fractions * (1.0 + share + math.sqrt(share * share + 2.0 * share))
    rng = np.random.default_rng(seed)
    best: Ints | None = None
    for scale in (fractions, scaled):
        for _ in range(_TRIES // 2):
            drawn = np.floor(scale) + (rng.random(scale.shape) < scale % 1.0)
            placement = _trimmed(packing, drawn.astype(np.int64))
            if packing.fits(placement) and (
                best is None or packing.cost(placement) < packing.cost(best)
            ):
                best = placement
    return milp(packing) if best is None else best


def _trimmed(packing: Packing, placement: Ints) -> Ints:
    """Take processes off where they are too many, the dearest first."""
    for kind, count in enumerate(packing.counts):
        over = int(placement[kind].sum()) - count
        for at in np.argsort(-packing.costs[kind], kind="stable"):
            taken = min(max(over, 0), int(placement[kind, at]))
            placement[kind, at] -= taken
            over -= taken
    return placement


PACKING_SOLVERS: dict[str, Solver] = {"fill": fill, "milp": milp, "round": rounded}


def _scipy(what: str) -> tuple[Any, Any]:
    """Return scipy.optimize and scipy.sparse; ``what`` needs them."""
    try:
        return importlib.import_module("scipy.optimize"), importlib.import_module("scipy.sparse")
    except ImportError as error:
        raise MissingDependencyError(
            f"{what} needs scipy ({error}): pip install 'loft-hvd[plan]', or '.[plan]' in a "
            "checkout"
        ) from error


def solve(
    program: Program,
    *,
    what: str,
    is_whole: bool | Floats = False,
    limit_s: float = _LIMIT_S,
) -> tuple[float, Floats | None]:
    """Return the least cost and its ``x``, by HiGHS; infinite and None where there is none.

    Args:
        program: what to solve.
        what: for whom, as the user calls it; of an error.
        is_whole: whether variables are whole numbers, all or one by one.
        limit_s: longest time; a solution that is not proven by then is none.

    Raises:
        MissingDependencyError: scipy is not installed.
    """
    optimize, _ = _scipy(what)
    found = optimize.milp(
        program.costs,
        constraints=optimize.LinearConstraint(program.rows, program.low, program.high),
        bounds=optimize.Bounds(0.0, program.most),
        integrality=np.broadcast_to(np.asarray(is_whole, dtype=np.int64), program.costs.shape),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-9},
    )
    if found.status == _OUT_OF_TIME:
        warnings.warn(
            f"{what}: HiGHS proved no answer within {limit_s:g} s, and what it had by then is not "
            "used",
            SolverWarning,
            stacklevel=2,
        )
    if found.status != 0 or found.x is None:
        return math.inf, None
    return float(found.fun), np.asarray(found.x)


def sparse_rows(
    cells: Sequence[tuple[Ints, Ints, Floats]], shape: tuple[int, int], *, what: str
) -> Any:
    """Return a matrix of rows, columns and values; 0 elsewhere."""
    rows, columns, values = (np.concatenate(each) for each in zip(*cells, strict=True))
    return _scipy(what)[1].csr_matrix((values, (rows, columns)), shape=shape)

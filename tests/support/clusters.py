"""Random clusters for the balance tests: models, and a slow but plain way to the best sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.controller import Controller
from loft_hvd.balance.interval import (
    COLUMNS,
    COMPUTE,
    COMPUTE_ERROR,
    FETCH,
    FETCH_ERROR,
    LOCAL,
    REMOTE,
    SIZE,
    STALL,
    STEPS,
    WAIT,
    screen,
    typical,
    usual_stall,
)
from loft_hvd.balance.latency import Curves, StepModel
from loft_hvd.balance.plan import Bounds

OVERLAPS = {"serial": 0.0, "full": 1.0, "partial": None}


def random_model(seed: int, world_size: int, overlap: float | None) -> StepModel:
    """Draw a cluster: 4:1 computing, 20:1 links, any locality; None draws the overlap too."""
    rng = np.random.default_rng(seed)
    compute = rng.uniform(1e-3, 4e-3, world_size)
    fixed = rng.uniform(0.0, 0.02, world_size)
    knee = np.where(rng.random(world_size) < 0.3, rng.uniform(4, 40, world_size), 0.0)
    drawn = rng.uniform(0.1, 0.9, world_size) if overlap is None else overlap
    return StepModel.build(
        world_size,
        aggregate_s=float(rng.uniform(0.0, 0.05)),
        fetch_fixed_s=rng.uniform(0.0, 5e-3, world_size),
        local_s=rng.uniform(1e-4, 5e-4, world_size),
        remote_s=np.exp(rng.uniform(np.log(3e-4), np.log(6e-3), world_size)),
        hits=rng.uniform(0, 80, world_size),
        compute_fixed_s=fixed,
        compute_s=compute,
        plateau_s=np.where(knee > 0, fixed + compute * knee, 0.0),
        overlap=drawn,
    )


def tabulate(functions: Sequence[Callable[[int], float]], *, low: int, high: int) -> Curves:
    """Tabulate any nondecreasing functions of the batch size at low, low + 1, ..., high."""
    sizes = np.arange(low, high + 1)
    times = [[function(int(size)) for size in sizes] for function in functions]
    return Curves(np.broadcast_to(sizes.astype(float), (len(times), len(sizes))), np.array(times))


def least_step_s(model: StepModel, total: int, bounds: Bounds) -> float:
    """Return the shortest possible slowest-rank time of a separable model, by giving out grains.

    Each grain goes to the rank that is fastest with it: optimal because times never fall.
    """
    table = model.times(np.arange(total + 1)[:, None] * np.ones(model.world_size))
    sizes: npt.NDArray[np.int64] = -(-bounds.floor // bounds.grain) * bounds.grain
    ranks = np.arange(model.world_size)
    while sizes.sum() < total:
        then = sizes + bounds.grain
        after = np.where(then <= bounds.cap, table[np.minimum(then, total), ranks], np.inf)
        sizes[int(np.argmin(after))] += bounds.grain
    return float(table[sizes, ranks].max())


def drive(
    models: Callable[[int], StepModel],
    controller: Controller,
    *,
    intervals: int,
    seed: int,
    noise: float = 0.05,
    steps: int = 20,
) -> list[tuple[int, ...]]:
    """Let a controller plan for a cluster; returns the sizes in force in each interval.

    Args:
        models: the true model in each interval, by its number.
        controller: decides at the end of each interval.
        intervals: how many.
        seed: of the noise.
        noise: relative standard deviation of each fetch and compute time.
        steps: steps in an interval.
    """
    sizes, in_force = controller.plan.sizes, []
    for number in range(intervals):
        in_force.append(sizes)
        rows, step_s = measure(models(number), sizes, seed=[seed, number], noise=noise, steps=steps)
        observe(controller, rows, step=(number + 1) * steps - 1, step_s=step_s)
        plan = controller.decide((number + 1) * steps)
        sizes = sizes if plan is None else plan.sizes
    return [*in_force, sizes]


def observe(
    controller: Controller, rows: npt.ArrayLike, *, step: int, step_s: float = float("nan")
) -> None:
    """Screen what ranks report of the plan in force at ``step``, and let a controller see it."""
    sizes = controller.plan_at(step).sizes
    controller.observe(screen(rows, step=step, sizes=sizes, step_s=step_s))


def measure(
    model: StepModel, sizes: tuple[int, ...], *, seed: list[int], noise: float, steps: int
) -> tuple[npt.NDArray[np.float64], float]:
    """Return what honest ranks report of an interval, and rank 0's time of a step."""
    batch = np.array(sizes, dtype=np.float64)
    rng = np.random.default_rng(seed)
    spread = rng.normal(1.0, noise, (2, steps, len(batch))).clip(0.5, 1.5)
    local = np.broadcast_to(model.local(batch), (steps, len(batch)))
    fetch = model.fetch(local, batch - local) * spread[0]
    compute = model.compute(batch) * spread[1]
    busy = model.combine(fetch, compute)
    step_s = float(typical(busy.max(axis=1))[0]) + model.aggregate_s
    rows = np.zeros((len(batch), len(COLUMNS)))
    rows[:, SIZE], rows[:, LOCAL], rows[:, REMOTE] = batch, local[0], batch - local[0]
    for values, column, error in ((fetch, FETCH, FETCH_ERROR), (compute, COMPUTE, COMPUTE_ERROR)):
        rows[:, column], variance = typical(values)
        rows[:, error] = np.sqrt(variance / steps)
    stall = (busy - compute).mean(axis=0)
    rows[:, STALL] = usual_stall(rows[:, FETCH], fetch.mean(axis=0), stall)
    rows[:, STEPS] = steps
    rows[:, WAIT] = np.maximum(step_s - rows[:, STALL] - rows[:, COMPUTE], 0.0)
    return rows, step_s

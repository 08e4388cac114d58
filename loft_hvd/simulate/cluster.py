"""The simulated cluster: true times of every rank and step, and what the ranks report of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.interval import (
    COLUMNS,
    COMPUTE,
    COMPUTE_ERROR,
    CPU,
    FETCH,
    FETCH_ERROR,
    LOCAL,
    REMOTE,
    SIZE,
    SKEW,
    STALL,
    STEPS,
    WAIT,
    skewness,
    typical,
    usual_stall,
)
from loft_hvd.balance.latency import StepModel

__all__ = ["Block", "Chance", "Cluster", "Disturbance", "Served"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_OWN = [
    FETCH,
    STALL,
    COMPUTE,
    FETCH_ERROR,
    COMPUTE_ERROR,
]  # what a rank may report wrongly: its own times


class Served(NamedTuple):
    """Samples of each rank that come from near by, each [num_steps, world_size]."""

    local: Floats
    peer: Floats  # from other ranks; all further ones come from their source


@dataclass(frozen=True)
class Disturbance:
    """What multiplies the model's times, step by step; each [steps, world_size]."""

    fetch: Floats
    compute: Floats
    use: Floats  # of the CPU by others, as ranks report it
    report: Floats  # of the times a rank reports; 0 for its very first report, for ever; or NaN


@dataclass(frozen=True)
class Chance:
    """What is left to chance in each step; that of a step is the same under every plan."""

    noise: float  # relative standard deviation of each fetch and compute time
    seed: int
    tail: float = 0.0  # Pareto index of the noise, above 2; 0 for log-normal
    # Probability that a rank's step takes longer, [world_size], and the factor on its times,
    # likewise; and that it stands still, and the average seconds.
    hiccups: tuple[Floats, Floats] | None = None
    stalls: tuple[Floats, Floats] | None = None

    def factors(self, shape: tuple[int, int]) -> Floats:
        """Draw factors on fetch and compute, [2, *shape] for a shape [steps, world_size]."""
        rng = np.random.default_rng([self.seed, 77])  # 77 keeps it apart from the seed's others
        if not self.noise:
            drawn: Floats = np.ones((2, *shape))
        elif self.tail:
            # A Lomax variable of index a has mean 1 / (a - 1) and standard deviation
            # mean * sqrt(a / (a - 2)): scaled to mean 1 and the noise asked for, it is never
            # below 1 - noise and far above 1 at times.
            mean = 1.0 / (self.tail - 1.0)
            deviation = mean * np.sqrt(self.tail / (self.tail - 2.0))
            drawn = rng.pareto(self.tail, (2, *shape))  # in place from here on: it is large
            drawn -= mean
            drawn *= self.noise
            drawn /= deviation
            drawn += 1.0
        else:
            spread = float(np.sqrt(np.log1p(self.noise**2)))  # log-normal with mean 1
            drawn = rng.normal(-0.5 * spread**2, spread, (2, *shape))
            np.exp(drawn, out=drawn)
        if self.hiccups is not None and self.hiccups[0].any():
            probability, factor = self.hiccups
            rng = np.random.default_rng([self.seed, 78])
            for step in range(shape[0]):
                drawn[:, step] *= np.where(rng.random(shape[1]) < probability, factor, 1.0)
        return drawn

    def stall_s(self, shape: tuple[int, int]) -> Floats | None:
        """Draw the seconds that ranks stand still, [steps, world_size]; None where none does."""
        if self.stalls is None or not self.stalls[0].any():
            return None
        probability, mean_s = self.stalls
        rng = np.random.default_rng([self.seed, 79])
        is_stalled = rng.random(shape) < probability
        seconds: Floats = rng.exponential(1.0, shape)
        seconds *= mean_s
        seconds[~is_stalled] = 0.0
        return seconds


@dataclass(frozen=True)
class Block:
    """Consecutive steps under one plan; arrays but for sizes are [num_steps, world_size]."""

    first: int  # number of the first step
    sizes: Ints  # the plan, [world_size]
    local: Floats  # local samples
    fetch_s: Floats  # the true times
    compute_s: Floats
    busy_s: Floats  # of each rank's own work
    step_s: Floats  # of each step, [num_steps]


@dataclass(frozen=True)
class BlockReport:
    """What is told of a block."""

    rows: Floats  # of each rank, [world_size, len(COLUMNS)]
    step_s: float  # what a step usually took, by rank 0's own clock
    step_error_s: float  # and its standard error


class Cluster:
    """A latency model with chance and disturbances.

    ``slow_start`` has the steps at new sizes that are slower, and the factor on their compute time.
    """

    def __init__(
        self,
        model: StepModel,
        disturbance: Disturbance,
        chance: Chance,
        *,
        slow_start: tuple[int, float] = (0, 1.0),
    ) -> None:
        self.model = model
        self._disturbance = disturbance
        shape = (len(disturbance.fetch), model.world_size)
        self._noise = chance.factors(shape)
        self._stall_s = chance.stall_s(shape)
        self._slow_start = slow_start
        self._first_report: Floats | None = None

    def mean_model(self, first: int, last: int) -> StepModel:
        """Return the true model of steps first..last-1, their disturbances averaged."""
        fetch = self._disturbance.fetch[first:last].mean(axis=0)
        compute = self._disturbance.compute[first:last].mean(axis=0)
        factors = dict.fromkeys(("fetch_fixed_s", "local_s", "remote_s", "shared_s"), fetch)
        factors |= dict.fromkeys(("compute_fixed_s", "compute_s", "plateau_s"), compute)
        terms = {name: getattr(self.model, name) * factor for name, factor in factors.items()}
        return replace(self.model, **terms)

    def run(
        self,
        first: int,
        sizes: Ints,
        served: Served,
        *,
        steps_at_sizes: int,
        peer_s: Floats | None = None,
    ) -> Block:
        """Take steps with one plan, in force for ``steps_at_sizes`` steps before ``first``.

        ``peer_s``, [world_size], is what a sample from a peer takes, where some come from there.
        """
        local, peer = served
        steps = slice(first, first + len(local))
        noise = self._noise[:, steps]
        # [num_steps, world_size] from here on: the mean times, disturbed, with noise.
        batch = sizes.astype(np.float64)
        fetch = self.model.fetch(local, batch - local - peer)
        if peer_s is not None:
            fetch += peer_s * peer
        fetch = fetch * self._disturbance.fetch[steps] * noise[0]
        compute = self.model.compute(batch) * self._disturbance.compute[steps] * noise[1]
        slow, factor = self._slow_start
        compute[: max(slow - steps_at_sizes, 0)] *= factor
        if self._stall_s is not None:
            compute += self._stall_s[steps]
        busy = self.model.combine(fetch, compute)
        step_s = busy.max(axis=1) + self.model.aggregate_s
        return Block(first, sizes, local, fetch, compute, busy, step_s)

    def report(self, block: Block, counts: Callable[[int], bool]) -> BlockReport:
        """Return what the ranks report of a block, of the steps that count, or of all."""
        numbers = range(block.first, block.first + len(block.step_s))
        chosen = np.array([counts(step) for step in numbers])
        chosen = chosen if chosen.any() else ~chosen
        last, num_steps = block.first + len(block.step_s) - 1, int(chosen.sum())
        step_s, step_variance = typical(block.step_s[chosen])
        fetch, compute = block.fetch_s[chosen], block.compute_s[chosen]
        stall = block.busy_s[chosen] - compute
        rows = np.zeros((len(block.sizes), len(COLUMNS)))
        local = block.local[chosen].mean(axis=0)
        rows[:, SIZE], rows[:, LOCAL], rows[:, REMOTE] = block.sizes, local, block.sizes - local
        for values, column, error in (
            (fetch, FETCH, FETCH_ERROR),
            (compute, COMPUTE, COMPUTE_ERROR),
        ):
            rows[:, column], variance = typical(values)
            rows[:, error] = np.sqrt(variance / num_steps)
        rows[:, STALL] = usual_stall(rows[:, FETCH], fetch.mean(axis=0), stall.mean(axis=0))
        rows[:, STEPS], rows[:, SKEW] = num_steps, skewness(block.busy_s[chosen])
        factor = self._disturbance.report[last]  # [world_size]; NaN makes the report NaN
        if self._first_report is None:
            self._first_report = rows[:, _OWN].copy()
        rows[:, _OWN] = np.where(
            (factor == 0)[:, None], self._first_report, rows[:, _OWN] * factor[:, None]
        )
        rows[:, WAIT] = np.maximum(step_s - rows[:, STALL] - rows[:, COMPUTE], 0.0)
        rows[:, CPU] = self._disturbance.use[last]
        return BlockReport(rows, float(step_s), float(np.sqrt(step_variance / num_steps)))

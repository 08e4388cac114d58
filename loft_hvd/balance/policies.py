"""Policies: from what the ranks reported to the sizes they should have, behind one interface.

LB-BSP (arXiv 1806.02508) is here as the baseline. It balances computing only, so its times are
``compute_s``; ``lbbsp-cpu:busy`` gives its CPU rule the whole of a rank's own time instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.interval import COMPUTE, CPU, MEMORY, SIZE, Interval
from loft_hvd.balance.predictors import PREDICTORS, Predictor
from loft_hvd.balance.search import Bounds, equal_within, round_to_lattice
from loft_hvd.errors import PlanError

__all__ = ["Fixed", "LbBspCpu", "LbBspGpu", "Policy", "Proposal", "Task", "Uniform"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """What must be divided.

    Attributes:
        global_batch_size: samples of all ranks in one backward pass.
        bounds: each rank's limits.
    """

    global_batch_size: int
    bounds: Bounds

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.bounds.floor)

    def equal(self) -> tuple[int, ...]:
        """Return sizes as equal as the bounds allow."""
        return equal_within(self.global_batch_size, self.bounds)

    def rounded(self, wanted: Floats) -> tuple[int, ...]:
        """Return legal sizes near ``wanted`` [world_size]."""
        return round_to_lattice(wanted, self.global_batch_size, self.bounds)


@dataclass(frozen=True)
class Proposal:
    """Sizes that a policy wants from the next plan on.

    Attributes:
        sizes: samples of each rank, [world_size].
        reason: why, in plain words.
        predicted_s: seconds of a step with them; NaN when the policy does not predict.
        instead_of_s: predicted seconds of a step without the change; NaN likewise.
    """

    sizes: tuple[int, ...]
    reason: str
    predicted_s: float = float("nan")
    instead_of_s: float = float("nan")


class Policy(Protocol):
    """Decides sizes for one task; the controller feeds it and numbers its plans."""

    name: str

    def start(self, task: Task) -> tuple[int, ...]:
        """Return the first sizes of a run."""

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Take in an interval and return new sizes, or None to keep those in force.

        Args:
            interval: what the ranks reported, under the sizes in force.
            first_step: the step from which new sizes would hold.
        """

    def explain(self) -> list[str]:
        """Say what the policy knows, a sentence a line."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, JSON-able."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""


class Uniform:
    """Equal sizes for ever."""

    name = "uniform"

    def start(self, task: Task) -> tuple[int, ...]:
        """Return sizes as equal as the bounds allow."""
        return task.equal()

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Keep the sizes."""
        del interval, first_step
        return None

    def explain(self) -> list[str]:
        """Say that nothing changes."""
        return [f"policy {self.name}: sizes stay as they are"]

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is nothing to learn."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""
        del state


class Fixed(Uniform):
    """The user's own sizes for ever.

    Args:
        sizes: samples of each rank, [world_size], adding up to the global batch.
    """

    name = "fixed"

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(int(size) for size in sizes)

    def start(self, task: Task) -> tuple[int, ...]:
        """Return the user's sizes.

        Raises:
            PlanError: they are not one a rank, adding up to the global batch.
        """
        fits = len(self.sizes) == task.world_size and sum(self.sizes) == task.global_batch_size
        if not fits or min(self.sizes) < 0:
            raise PlanError(
                f"sizes {list(self.sizes)} add up to {sum(self.sizes)}; they must be "
                f"{task.world_size} counts >= 0, one a rank, adding up to "
                f"global_batch_size={task.global_batch_size}"
            )
        return self.sizes


class LbBspCpu:
    """LB-BSP for CPU clusters: sizes in proportion to predicted speeds, at every interval.

    Args:
        predictor: "last", "ema" or "narx".
        clock: "compute" for LB-BSP's own reading, "busy" for fetch and compute together.
    """

    def __init__(
        self,
        predictor: Literal["last", "ema", "narx"] = "narx",
        *,
        clock: Literal["compute", "busy"] = "compute",
    ) -> None:
        self.name = "lbbsp-cpu" + (f":{predictor}" if predictor != "narx" else "")
        self.name += ":busy" if clock == "busy" else ""
        self._kind, self._clock = predictor, clock

    def start(self, task: Task) -> tuple[int, ...]:
        """Return equal sizes: the first iterations measure speeds."""
        self._task = task
        self._predictor: Predictor = PREDICTORS[self._kind](task.world_size)
        return task.equal()

    def recall(self, intervals: Sequence[Interval]) -> None:
        """Learn the speeds of intervals, also from before this world."""
        for interval in intervals:
            seconds = interval.rows[:, COMPUTE] if self._clock == "compute" else interval.busy_s
            valid = interval.valid & (seconds > 0)
            speed = interval.rows[:, SIZE] / np.where(valid, seconds, 1.0)
            self._predictor.observe(speed, interval.rows[:, [CPU, MEMORY]], valid)

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Divide the batch by predicted speeds."""
        del first_step
        self.recall([interval])
        speeds = self._predictor.predict()
        if np.isnan(speeds).all():
            return None
        speeds = np.where(np.isnan(speeds), np.nanmean(speeds), speeds)
        sizes = self._task.rounded(self._task.global_batch_size * speeds / speeds.sum())
        if sizes == tuple(interval.sizes):
            return None
        return Proposal(sizes, "in proportion to predicted speeds")

    def explain(self) -> list[str]:
        """Give the predicted speeds."""
        speeds = ", ".join(f"{speed:.0f}" for speed in self._predictor.predict())
        return [f"policy {self.name}: predicted speeds {speeds} samples/s"]

    def state_dict(self) -> dict[str, Any]:
        """Return the predictor's state."""
        return self._predictor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self._predictor.load_state_dict(state)


class LbBspGpu:
    """LB-BSP for GPU clusters: samples move from the straggler to the leader, window by window.

    The leader is the fastest rank with memory to spare. When a rank that lately gave now takes, or
    the other way round, the step is halved and the window doubled; at the smallest step such a
    pair is left alone until its imbalance grows.
    """

    name = "lbbsp-gpu"
    even = 1.05  # slowest over fastest at which nothing moves
    longest_window = 8
    memory = 4  # moves within which a reversal counts as oscillation

    def start(self, task: Task) -> tuple[int, ...]:
        """Return equal sizes."""
        self._task = task
        grain = task.bounds.grain
        share = task.global_batch_size // task.world_size
        self._state: dict[str, Any] = {
            "step": max(share // 4 // grain, 1) * grain,
            "window": 1,
            "seen": 0,
            "sums": [0.0] * task.world_size,
            "moves": [],
            "held_at": 0.0,
        }
        return task.equal()

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Move samples at the end of a window."""
        del first_step
        state, bounds = self._state, self._task.bounds
        if not interval.valid.any():
            return None
        middle = float(np.median(interval.rows[interval.valid, COMPUTE]))
        seconds = np.where(interval.valid, interval.rows[:, COMPUTE], middle)
        state["sums"] = (np.array(state["sums"]) + seconds).tolist()
        state["seen"] += 1
        if state["seen"] < state["window"]:
            return None
        times = np.array(state["sums"]) / state["seen"]
        state.update(seen=0, sums=[0.0] * len(times))
        sizes = interval.sizes.copy()
        giver = int(np.argmax(np.where(sizes - bounds.grain >= bounds.floor, times, -np.inf)))
        taker = int(np.argmin(np.where(sizes + bounds.grain <= bounds.cap, times, np.inf)))
        ratio = float(times[giver] / max(times[taker], 1e-12))
        if ratio <= max(self.even, 1.1 * state["held_at"]):
            return None
        self._damp(giver, taker, ratio)
        if state["held_at"]:
            return None
        room = min(sizes[giver] - bounds.floor[giver], bounds.cap[taker] - sizes[taker])
        moved = min(state["step"], int(room) // bounds.grain * bounds.grain)
        sizes[giver] -= moved
        sizes[taker] += moved
        state["moves"] = [*state["moves"], [giver, taker]][-self.memory :]
        return Proposal(
            tuple(sizes.tolist()), f"{moved} samples from straggler {giver} to leader {taker}"
        )

    def _damp(self, giver: int, taker: int, ratio: float) -> None:
        """Halve the step and double the window when a move takes back an earlier one."""
        state, grain = self._state, self._task.bounds.grain
        gave = {move[0] for move in state["moves"]}
        took = {move[1] for move in state["moves"]}
        if giver not in took and taker not in gave:
            state["held_at"] = 0.0
        elif state["step"] > grain:
            state["step"] = max(state["step"] // 2 // grain, 1) * grain
            state["window"] = min(2 * state["window"], self.longest_window)
            state["moves"], state["held_at"] = [], 0.0
        else:
            state["held_at"], state["moves"] = ratio, []

    def explain(self) -> list[str]:
        """Give the step and the window."""
        return [
            f"policy {self.name}: moves {self._state['step']} samples at a time, every "
            f"{self._state['window']} intervals"
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return step, window and recent moves."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self._state = dict(state)

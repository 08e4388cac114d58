"""LB-BSP (arXiv 1806.02508), the baseline: it balances computing only.

On CPUs it divides the batch in proportion to the speeds that it predicts, on GPUs it moves samples
from the straggler to the leader. The paper's sizes, windows and steps are not public: the numbers
here are this library's own, and ``tests/unit/test_policies.py`` holds what they must achieve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np

from loft_hvd.balance.interval import COMPUTE, CPU, MEMORY, SIZE, Interval
from loft_hvd.balance.plan import Bools, Floats, Rank, RankFloats, RankNumbers, Sizes
from loft_hvd.balance.policy import Policy, Proposal, Task
from loft_hvd.codec import Count, Shape, Within

__all__ = ["PREDICTORS", "ExponentialAverage", "LbBspCpu", "LbBspGpu", "Narx", "Predictor"]

_GAIN = 0.3  # of the average: a speed counts for about three intervals

# NARX. The paper gives no sizes; tests hold these to 5 % less error than the average where load
# tells the speed, and to 5 % more at most where it tells nothing.
_LAGS = 3
_FEATURES = 3  # of an interval: speed, and the use of CPU and memory by others
_WIDTH = _LAGS * _FEATURES  # of the network's input
_HIDDEN = 10
_RING = 64  # intervals that it learns from
_EPOCHS = 12  # training steps on the whole ring for each new interval
_LEAST_ROWS = 16  # before it is trained at all
_BETTER = 0.85  # of the average's squared error: the network answers only below

_EVEN = 1.05  # slowest over fastest at which nothing moves: 5 % noise does as much
_LONGEST_WINDOW = 8  # intervals
_MEMORY = 4  # moves within which a reversal counts as oscillation


@dataclass
class ExponentialAverage:
    """Averages past speeds."""

    mean: RankFloats  # NaN before the first speed
    gain: Annotated[float, Within(0, 1)] = _GAIN  # of the newest speed; with 1 it is predicted

    @classmethod
    def of(cls, world_size: int, *, gain: float = _GAIN) -> ExponentialAverage:
        """Return one that has seen nothing."""
        return cls(np.full(world_size, np.nan), gain)

    def observe(self, speed: Floats, use: Floats, valid: Bools) -> None:
        """Take in the speeds of an interval, samples a second, of the ranks that are ``valid``.

        All are [world_size]; ``use``, of CPU and memory by others at its end, is [world_size, 2].
        """
        del use
        mixed = self.mean + self.gain * (speed - self.mean)
        self.mean = np.where(valid, np.where(np.isnan(self.mean), speed, mixed), self.mean)

    def predict(self) -> Floats:
        """Return samples a second in the next interval, [world_size]; NaN where never measured."""
        return self.mean


# Into the hidden layer, its bias, out of it, straight past it, and an offset.
_Weights = tuple[
    Annotated[Floats, Shape("world_size", _WIDTH, _HIDDEN)],
    Annotated[Floats, Shape("world_size", _HIDDEN)],
    Annotated[Floats, Shape("world_size", _HIDDEN)],
    Annotated[Floats, Shape("world_size", _WIDTH)],
    RankFloats,
]


def _no_weights(world_size: int) -> _Weights:
    into, hidden = np.zeros((world_size, _WIDTH, _HIDDEN)), np.zeros((world_size, _HIDDEN))
    return into, hidden, hidden.copy(), np.zeros((world_size, _WIDTH)), np.zeros(world_size)


@dataclass
class Narx:
    """A nonlinear autoregression with exogenous inputs: a small network a rank, trained online.

    Past speeds, and present and past use of CPU and memory by others, go through one hidden layer.
    It answers only while its predictions have lately been better than the exponential average's.
    """

    plain: ExponentialAverage
    weights: _Weights
    means: _Weights  # Adam's mean of each weight's gradient
    squares: _Weights  # and its mean square
    window: Annotated[Floats, Shape("world_size", _LAGS, _FEATURES)]  # newest first, NaN before
    rows: Annotated[Floats, Shape("num_rows", "world_size", _WIDTH)]  # inputs learnt from
    targets: Annotated[Floats, Shape("num_rows", "world_size")]  # what followed on each
    usable: Annotated[Bools, Shape("num_rows", "world_size")]  # which of them were measured
    # Rolling squared errors of the average and of the network.
    misses: Annotated[Floats, Shape(2, "world_size")]
    scale: RankFloats  # each rank's first speed, the unit of its inputs; NaN before
    num_updates: Count = 0  # training steps so far

    @classmethod
    def of(cls, world_size: int) -> Narx:
        """Return one that has seen nothing."""
        into = np.random.default_rng(0).normal(0, _WIDTH**-0.5, (world_size, _WIDTH, _HIDDEN))
        weights, means, squares = (_no_weights(world_size) for _ in range(3))
        return cls(
            plain=ExponentialAverage.of(world_size),
            weights=(into, *weights[1:]),
            means=means,
            squares=squares,
            window=np.full((world_size, _LAGS, _FEATURES), np.nan),
            rows=np.zeros((0, world_size, _WIDTH)),
            targets=np.zeros((0, world_size)),
            usable=np.zeros((0, world_size), bool),
            misses=np.ones((2, world_size)),
            scale=np.full(world_size, np.nan),
        )

    def observe(self, speed: Floats, use: Floats, valid: Bools) -> None:
        """Take in an interval: score the last predictions, remember, train."""
        before = self.plain.predict()
        self.scale = np.where(np.isnan(self.scale), np.where(valid, speed, np.nan), self.scale)
        known = ~np.isnan(self.window).any(axis=(1, 2)) & valid
        inputs, guess = self._inputs(), self._network(self._inputs()[None])[1][0]
        target = np.where(known, speed / self.scale - 1.0, 0.0)
        plain_guess = np.where(known, before / self.scale - 1.0, 0.0)
        for k, predicted in enumerate((plain_guess, guess)):
            miss = np.minimum(np.square(predicted - target), 1.0)
            kept = 0.9 * self.misses[k] + 0.1 * miss
            self.misses[k] = np.where(known, kept, self.misses[k])
        self.rows = np.concatenate([self.rows, inputs[None]])[-_RING:]
        self.targets = np.concatenate([self.targets, target[None]])[-_RING:]
        self.usable = np.concatenate([self.usable, known[None]])[-_RING:]
        if len(self.rows) >= _LEAST_ROWS:
            self._train()
        entry = np.column_stack([speed / self.scale - 1.0, use])  # [world_size, features]
        newer = np.concatenate([entry[:, None], self.window[:, :-1]], axis=1)
        self.window = np.where(valid[:, None, None], newer, self.window)
        self.plain.observe(speed, use, valid)

    def predict(self) -> Floats:
        """Return the network's answer where it has lately been better, else the average."""
        plain = self.plain.predict()
        network = (1.0 + self._network(self._inputs()[None])[1][0]) * self.scale
        known = ~np.isnan(self.window).any(axis=(1, 2))
        within = (network > 0.25 * plain) & (network < 4.0 * plain)
        better = self.misses[1] < _BETTER * self.misses[0]
        return np.where(known & within & better, network, plain)

    def _inputs(self) -> Floats:
        flat = self.window.reshape(len(self.window), -1)  # [world_size, width]
        return np.where(np.isnan(flat), 0.0, flat)

    def _network(self, inputs: Floats) -> tuple[Floats, Floats]:
        """Return hidden units [rows, n, hidden] and outputs [rows, n] for [rows, n, width]."""
        into, bias, out, skip, offset = self.weights
        hidden = np.tanh(np.einsum("rnd,ndh->rnh", inputs, into) + bias)
        output: Floats = (hidden * out).sum(-1) + (inputs * skip).sum(-1) + offset
        return hidden, output

    def _train(self) -> None:
        count = np.maximum(self.usable.sum(axis=0), 1)
        for _ in range(_EPOCHS):
            hidden, output = self._network(self.rows)
            error = np.where(self.usable, output - self.targets, 0.0) / count
            back = error[..., None] * self.weights[2] * (1.0 - np.square(hidden))
            self._adam(
                [
                    np.einsum("rnd,rnh->ndh", self.rows, back),
                    back.sum(axis=0),
                    (error[..., None] * hidden).sum(axis=0),
                    (error[..., None] * self.rows).sum(axis=0),
                    error.sum(axis=0),
                ]
            )

    def _adam(self, gradients: list[Floats]) -> None:
        """Take Adam's step: rate 0.02, betas 0.9 and 0.99, and a weak weight decay."""
        self.num_updates += 1
        for weight, mean, square, gradient in zip(
            self.weights, self.means, self.squares, gradients, strict=True
        ):
            pulled = gradient + 1e-4 * weight
            mean += 0.1 * (pulled - mean)
            square += 0.01 * (np.square(pulled) - square)
            rate = 0.02 * (1 - 0.99**self.num_updates) ** 0.5 / (1 - 0.9**self.num_updates)
            weight -= rate * mean / (np.sqrt(square) + 1e-8)


Predictor = ExponentialAverage | Narx
PREDICTORS: dict[str, Callable[[int], Predictor]] = {
    "last": partial(ExponentialAverage.of, gain=1.0),
    "ema": ExponentialAverage.of,
    "narx": Narx.of,
}


class LbBspCpu(Policy):
    """LB-BSP for CPU clusters: sizes in proportion to predicted speeds, at every interval.

    A ``clock`` of "compute" is LB-BSP's own reading, "busy" is fetch and compute together.
    """

    state: Predictor
    task: Task

    def __init__(self, predictor: str = "narx", *, clock: str = "compute") -> None:
        self.name = "lbbsp-cpu" + (f":{predictor}" if predictor != "narx" else "")
        self.name += ":busy" if clock == "busy" else ""
        self._kind, self._clock = predictor, clock

    def start(self, task: Task) -> Sizes:
        self.task = task
        self.state = PREDICTORS[self._kind](task.world_size)
        return task.equal()

    def recall(self, intervals: Sequence[Interval]) -> bool:
        for interval in intervals:
            seconds = interval.rows[:, COMPUTE] if self._clock == "compute" else interval.busy_s
            valid = interval.valid & (seconds > 0)
            speed = interval.rows[:, SIZE] / np.where(valid, seconds, 1.0)
            self.state.observe(speed, interval.rows[:, [CPU, MEMORY]], valid)
        return True

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        del first_step
        self.recall([interval])
        speeds = self.state.predict()
        if np.isnan(speeds).all():
            return None
        speeds = np.where(np.isnan(speeds), np.nanmean(speeds), speeds)
        sizes = self.task.rounded(self.task.global_batch_size * speeds / speeds.sum())
        if sizes == tuple(interval.sizes):
            return None
        return Proposal(sizes, "in proportion to predicted speeds")

    def explain(self) -> list[str]:
        speeds = ", ".join(f"{speed:.0f}" for speed in self.state.predict())
        return [f"policy {self.name}: predicted speeds {speeds} samples/s"]


@dataclass
class _Moves:
    """What ``LbBspGpu`` remembers."""

    step: Annotated[int, Within(1)]  # samples that move at a time
    sums: RankNumbers  # compute seconds of the window so far
    window: Annotated[int, Within(1)] = 1  # intervals between two moves
    seen: Count = 0  # intervals of the window so far
    moves: list[tuple[Rank, Rank]] = field(default_factory=list)  # the last (giver, taker) pairs
    held_at: float = 0.0  # imbalance at which a pair was left alone; 0 for none


class LbBspGpu(Policy):
    """LB-BSP for GPU clusters: samples move from the straggler to the leader, window by window.

    The leader is the fastest rank with memory to spare. When a rank that lately gave now takes, or
    the other way round, the step is halved and the window doubled; at the smallest step such a
    pair is left alone until its imbalance grows.
    """

    name = "lbbsp-gpu"
    state: _Moves
    task: Task

    def start(self, task: Task) -> Sizes:
        self.task = task
        grain, share = task.bounds.grain, task.global_batch_size // task.world_size
        self.state = _Moves(max(share // 4 // grain, 1) * grain, [0.0] * task.world_size)
        return task.equal()

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Move samples at the end of a window."""
        del first_step
        state, bounds = self.state, self.task.bounds
        if not interval.valid.any():
            return None
        compute = interval.rows[:, COMPUTE]
        seconds = np.where(interval.valid, compute, float(np.median(compute[interval.valid])))
        state.sums = (np.array(state.sums) + seconds).tolist()
        state.seen += 1
        if state.seen < state.window:
            return None
        times = np.array(state.sums) / state.seen
        state.seen, state.sums = 0, [0.0] * len(times)
        sizes = interval.sizes.copy()
        giver = int(np.argmax(np.where(sizes - bounds.grain >= bounds.floor, times, -np.inf)))
        taker = int(np.argmin(np.where(sizes + bounds.grain <= bounds.cap, times, np.inf)))
        ratio = float(times[giver] / max(times[taker], 1e-12))
        if ratio <= max(_EVEN, 1.1 * state.held_at):
            return None
        self._damp(giver, taker, ratio)
        if state.held_at:
            return None
        room = min(sizes[giver] - bounds.floor[giver], bounds.cap[taker] - sizes[taker])
        moved = min(state.step, int(room) // bounds.grain * bounds.grain)
        sizes[giver] -= moved
        sizes[taker] += moved
        state.moves = [*state.moves, (giver, taker)][-_MEMORY:]
        reason = f"{moved} samples from straggler {giver} to leader {taker}"
        return Proposal(tuple(sizes.tolist()), reason)

    def _damp(self, giver: int, taker: int, ratio: float) -> None:
        """Halve the step and double the window when a move takes back an earlier one."""
        state, grain = self.state, self.task.bounds.grain
        gave, took = {move[0] for move in state.moves}, {move[1] for move in state.moves}
        if giver not in took and taker not in gave:
            state.held_at = 0.0
        elif state.step > grain:
            state.step = max(state.step // 2 // grain, 1) * grain
            state.window = min(2 * state.window, _LONGEST_WINDOW)
            state.moves, state.held_at = [], 0.0
        else:
            state.held_at, state.moves = ratio, []

    def explain(self) -> list[str]:
        return [
            f"policy {self.name}: moves {self.state.step} samples at a time, every "
            f"{self.state.window} intervals"
        ]

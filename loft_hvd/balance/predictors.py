"""Predict every rank's speed in the next interval: what LB-BSP's CPU rule divides the batch by.

NARX, a nonlinear autoregression with exogenous inputs, follows LB-BSP (arXiv 1806.02508, v1) in
kind: past speeds, and present and past use of CPU and memory by others, through one hidden layer.
Its sizes are not public; ours are three lags and ten tanh units. It answers only while its own
predictions have lately been better than the exponential average's.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["PREDICTORS", "ExponentialAverage", "Last", "Narx", "Predictor"]

Floats = npt.NDArray[np.float64]


class Predictor(Protocol):
    """Learns from speeds as they come and predicts the next ones."""

    def observe(self, speed: Floats, use: Floats, valid: npt.NDArray[np.bool_]) -> None:
        """Take in an interval.

        Args:
            speed: samples a second, [world_size].
            use: of CPU and memory by others at the interval's end, in [0, 1], [world_size, 2].
            valid: ranks with a measurement, [world_size].
        """

    def predict(self) -> Floats:
        """Return samples a second in the next interval, [world_size]; NaN where never measured."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, JSON-able."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""


class ExponentialAverage:
    """Averages past speeds, the newest counting ``gain``.

    Args:
        world_size: number of ranks.
        gain: weight of the newest speed, in (0, 1].
    """

    def __init__(self, world_size: int, *, gain: float = 0.3) -> None:
        self._gain = gain
        self._mean = np.full(world_size, np.nan)

    def observe(self, speed: Floats, use: Floats, valid: npt.NDArray[np.bool_]) -> None:
        """Take in an interval."""
        del use
        mixed = self._mean + self._gain * (speed - self._mean)
        self._mean = np.where(valid, np.where(np.isnan(self._mean), speed, mixed), self._mean)

    def predict(self) -> Floats:
        """Return the averages."""
        mean: Floats = self._mean.copy()
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return the averages; -1 where there is none."""
        return {"mean": np.where(np.isnan(self._mean), -1.0, self._mean).tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        mean = np.array(state["mean"])
        self._mean = np.where(mean < 0, np.nan, mean)


class Last(ExponentialAverage):
    """Predicts that the next speed is the last one."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size, gain=1.0)


class Narx:
    """One small network a rank, trained online on a ring of past intervals.

    Args:
        world_size: number of ranks.
        seed: of the first weights.
    """

    lags = 3
    hidden = 10
    ring = 64
    epochs = 12  # training steps on the whole ring for each new interval
    least_rows = 16
    _with_gaps = ("window", "rows", "targets", "scale")  # arrays that may hold NaN

    def __init__(self, world_size: int, *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        width = 3 * self.lags
        self._plain = ExponentialAverage(world_size)
        self._weights: list[Floats] = [
            rng.normal(0, width**-0.5, (world_size, width, self.hidden)),
            np.zeros((world_size, self.hidden)),
            np.zeros((world_size, self.hidden)),
            np.zeros((world_size, width)),  # a straight way past the hidden layer
            np.zeros(world_size),
        ]
        self._moments = [[np.zeros_like(w), np.zeros_like(w)] for w in self._weights]
        self._num_updates = 0
        self._window = np.full((world_size, self.lags, 3), np.nan)  # newest first
        self._rows = np.zeros((0, world_size, width))
        self._targets = np.zeros((0, world_size))
        self._usable = np.zeros((0, world_size), bool)
        self._misses = np.ones((2, world_size))  # rolling squared error: plain, network
        self._scale = np.full(world_size, np.nan)

    def observe(self, speed: Floats, use: Floats, valid: npt.NDArray[np.bool_]) -> None:
        """Take in an interval: score the last predictions, remember, train."""
        before = self._plain.predict()
        self._scale = np.where(np.isnan(self._scale), np.where(valid, speed, np.nan), self._scale)
        known = ~np.isnan(self._window).any(axis=(1, 2)) & valid
        inputs, guess = self._inputs(), self._network(self._inputs()[None])[1][0]
        target = np.where(known, speed / self._scale - 1.0, 0.0)
        plain_guess = np.where(known, before / self._scale - 1.0, 0.0)
        for k, predicted in enumerate((plain_guess, guess)):
            miss = np.minimum(np.square(predicted - target), 1.0)
            kept = 0.9 * self._misses[k] + 0.1 * miss
            self._misses[k] = np.where(known, kept, self._misses[k])
        self._rows = np.concatenate([self._rows, inputs[None]])[-self.ring :]
        self._targets = np.concatenate([self._targets, target[None]])[-self.ring :]
        self._usable = np.concatenate([self._usable, known[None]])[-self.ring :]
        if len(self._rows) >= self.least_rows:
            self._train()
        entry = np.column_stack([speed / self._scale - 1.0, use])
        newer = np.concatenate([entry[:, None], self._window[:, :-1]], axis=1)
        self._window = np.where(valid[:, None, None], newer, self._window)
        self._plain.observe(speed, use, valid)

    def predict(self) -> Floats:
        """Return the network's answer where it has lately been better, else the average."""
        plain = self._plain.predict()
        network = (1.0 + self._network(self._inputs()[None])[1][0]) * self._scale
        known = ~np.isnan(self._window).any(axis=(1, 2))
        within = (network > 0.25 * plain) & (network < 4.0 * plain)
        better = self._misses[1] < 0.85 * self._misses[0]
        return np.where(known & within & better, network, plain)

    def _inputs(self) -> Floats:
        flat = self._window.reshape(len(self._window), -1)
        return np.where(np.isnan(flat), 0.0, flat)

    def _network(self, inputs: Floats) -> tuple[Floats, Floats]:
        """Return hidden units [rows, n, hidden] and outputs [rows, n] for [rows, n, width]."""
        into, bias, out, skip, offset = self._weights
        hidden = np.tanh(np.einsum("rnd,ndh->rnh", inputs, into) + bias)
        output: Floats = (hidden * out).sum(-1) + (inputs * skip).sum(-1) + offset
        return hidden, output

    def _train(self) -> None:
        count = np.maximum(self._usable.sum(axis=0), 1)
        for _ in range(self.epochs):
            hidden, output = self._network(self._rows)
            error = np.where(self._usable, output - self._targets, 0.0) / count
            back = error[..., None] * self._weights[2] * (1.0 - np.square(hidden))
            gradients = [
                np.einsum("rnd,rnh->ndh", self._rows, back),
                back.sum(axis=0),
                (error[..., None] * hidden).sum(axis=0),
                (error[..., None] * self._rows).sum(axis=0),
                error.sum(axis=0),
            ]
            self._adam(gradients)

    def _adam(self, gradients: list[Floats]) -> None:
        self._num_updates += 1
        for weight, (mean, square), gradient in zip(
            self._weights, self._moments, gradients, strict=True
        ):
            pulled = gradient + 1e-4 * weight
            mean += 0.1 * (pulled - mean)
            square += 0.01 * (np.square(pulled) - square)
            rate = 0.02 * (1 - 0.99**self._num_updates) ** 0.5 / (1 - 0.9**self._num_updates)
            weight -= rate * mean / (np.sqrt(square) + 1e-8)

    def state_dict(self) -> dict[str, Any]:
        """Return averages, networks and the past they learn from, JSON-able: a few 1,000 a rank."""
        return {
            "plain": self._plain.state_dict(),
            "weights": [weight.tolist() for weight in self._weights],
            "moments": [[moment.tolist() for moment in pair] for pair in self._moments],
            "num_updates": self._num_updates,
            "usable": self._usable.tolist(),
            "misses": self._misses.tolist(),
            **{name: _listed(getattr(self, f"_{name}")) for name in self._with_gaps},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken: the next predictions are the same."""
        self._plain.load_state_dict(state["plain"])
        self._weights = [np.array(weight) for weight in state["weights"]]
        self._moments = [[np.array(moment) for moment in pair] for pair in state["moments"]]
        self._num_updates = int(state["num_updates"])
        self._misses = np.array(state["misses"])
        num_ranks = len(self._scale)
        self._usable = np.array(state["usable"], dtype=bool).reshape(-1, num_ranks)
        for name in self._with_gaps:
            shape = (-1, *getattr(self, f"_{name}").shape[1:])
            setattr(self, f"_{name}", np.array(state[name], dtype=np.float64).reshape(shape))


def _listed(values: Floats) -> list[Any]:
    """Return nested lists with None for NaN, which JSON does not know."""
    listed = values.astype(object)
    listed[np.isnan(values)] = None
    nested: list[Any] = listed.tolist()
    return nested


PREDICTORS: dict[str, type[ExponentialAverage] | type[Narx]] = {
    "last": Last,
    "ema": ExponentialAverage,
    "narx": Narx,
}

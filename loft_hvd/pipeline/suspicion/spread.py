"""How much ranks' gradients differ in the long run: what a robust rule would take for faults.

Where each rank reads samples of its own kind (shards sorted by class, say), its gradients differ
from the others' in the same way step after step. A mean over ranks does not mind; a robust rule
drops such gradients and loses real signal. In the first steps of a run each rank notes how a few
coordinates of its gradient differ from the aggregate, and one small exchange compares the averages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loft_hvd.pipeline.suspicion.report import FEWEST_WATCHED
from loft_hvd.pipeline.suspicion.tracker import Floats
from loft_hvd.transport.base import Channel

__all__ = [
    "COMPARED_AFTER",
    "JUDGE_IN_SHARDS_BELOW",
    "WARN_ABOVE",
    "ShardSpreadWatch",
    "Spread",
    "SpreadWatch",
    "lasting_differences",
    "looked_at",
    "tell_scope",
]

# Measured on digits (docs/rules.md): shards sorted by class give 1 to 1.5, shuffled ones below 0.2.
WARN_ABOVE = 0.8
# Where scope="auto" goes over to shards, which lose more above it: between what sorted shards give
# under a strata cap of 1.5, 0.47 to 0.82, and under one of 1.0, at most 0.20 (docs/rules.md).
JUDGE_IN_SHARDS_BELOW = 0.35
COMPARED_AFTER = 50  # steps
_NUM_VALUES = 512  # two sums of float64 for each make one exchange of 8 kB a rank
# The variance of the median of n normal values about one mean, of deviations d, is this times
# n / (sum of 1 / d) ** 2: by their density there, for many of them.
_MEDIAN_EFFICIENCY = np.pi / 2
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spread:
    """What the first steps showed."""

    # Of each rank, its gradients' lasting difference from the other ranks' over their own noise
    # from step to step, [world_size]; 0 for ranks alike, NaN where unknown.
    ratios: tuple[float, ...]
    usual: float  # the median rank's: one faulty rank of four or more moves it little


def lasting_differences(counts: Floats, sums: Floats, squares: Floats) -> Spread:
    """Compare what ranks noted, coordinate by coordinate.

    ``counts`` are the steps that each rank noted, [world_size]; ``sums`` and ``squares`` add up the
    differences from the aggregate and their squares, [world_size, num_values]. The result has the
    same bits on every machine: ranks decide by it.
    """
    with np.errstate(all="ignore"):
        steps = counts[:, None]  # [world_size, 1]
        means = sums / steps
        # The variance of one step, by steps - 1 (the mean is estimated, too), over all values.
        noise = _row_sums((squares / steps - means**2) * steps / (steps - 1))
        usable = np.isfinite(noise) & (noise > 0) & (counts > 1)
        if usable.sum() < 2:
            return Spread((float("nan"),) * len(counts), float("nan"))
        # From the median rank: the aggregate itself may lean towards a faulty one.
        apart = _row_sums((means - np.median(means[usable], axis=0)) ** 2)
        # What would lie between them without a lasting difference: both means are uncertain. The
        # median's error is that of normal values of these deviations: one rank's noise, however
        # much, moves it by little, as it moves the median.
        error = noise / counts
        certain = math.fsum(1 / np.sqrt(error[usable]))
        by_chance = error + _MEDIAN_EFFICIENCY * usable.sum() / certain / certain
        ratios = np.sqrt(np.maximum(apart - by_chance, 0.0) / noise)
    ratios = np.where(usable, ratios, np.nan)
    return Spread(tuple(ratios.tolist()), float(np.median(ratios[usable])))


def tell_scope(found: Spread, *, is_model: bool) -> None:
    """Say by which values scope="auto" judges rows from the next step on, and why."""
    fixed = 'scope="shard" or scope="model" fixes it'
    if math.isnan(found.usual):
        _logger.warning(
            'scope="auto": ranks could not be compared, as a parameter had no gradient, or no '
            "finite one, or all of them equal ones, in their first %d steps; workers are judged "
            "%s as before; %s",
            COMPARED_AFTER,
            "by their whole gradients" if is_model else "shard by shard",
            fixed,
        )
    elif is_model:
        _logger.warning(
            'scope="auto": ranks\' gradients differ lastingly, by %.2f times their noise, so '
            "workers are judged by their whole gradients, which tell lasting differences from "
            "faults better than shards do; results travel after the backward pass; %s",
            found.usual,
            fixed,
        )
    else:
        _logger.info(
            'scope="auto": ranks\' gradients are alike, so from the next step on workers are '
            "judged shard by shard, and results travel during the backward pass"
        )


def _row_sums(rows: Floats) -> Floats:
    """Return each row's sum, rounded once; NaN where a value is not finite."""
    # numpy adds in an order of its own for each instruction set.
    return np.array([_sum(row) if np.isfinite(row).all() else math.nan for row in rows])


def _sum(row: Floats) -> float:
    try:
        return math.fsum(row)
    except OverflowError:
        return math.inf


class SpreadWatch:
    """Notes some coordinates of this rank's gradients for 50 steps, then compares ranks once.

    A step calls ``sent`` for each parameter, in any order, and ``step_reduced`` in the end.
    ``layout`` is the numel of each. Equal on every rank.
    """

    def __init__(self, channel: Channel, layout: Sequence[int]) -> None:
        self._channel = channel.sub("spread")
        self._layout = list(layout)
        self._places = [looked_at(numel, max(1, sum(layout))) for numel in layout]
        self._own: list[Tensor | None] = [None] * len(layout)
        self._sums, self._squares = np.zeros((2, sum(map(len, self._places))))
        self._num_steps = self._num_noted = 0
        # Nothing more is noted: ranks are compared, or too few.
        self.has_ended = channel.world_size < FEWEST_WATCHED or sum(layout) == 0

    def sent(self, at: int, values: Tensor | None) -> None:
        """Note what this rank sends of parameter ``at``; that of a step that failed goes."""
        if not self.has_ended:
            self._own[at] = self._look(at, values)

    def step_reduced(self, reduced: Sequence[Tensor | None]) -> Spread | None:
        """Note a step whose gradients are reduced by now; after the last one, compare ranks.

        A step that lacks some is counted, but not noted: a parameter took no part, or its gradient
        is sparse.
        """
        if self.has_ended:
            return None
        return self.step_looked([self._look(at, values) for at, values in enumerate(reduced)])

    @property
    def places(self) -> Sequence[Tensor]:
        """The coordinates of each parameter that are looked at, ascending."""
        return self._places

    def step_looked(self, looked: Sequence[Tensor | None]) -> Spread | None:
        """Note a step, as ``step_reduced``, given the results at ``places``, float64."""
        own, self._own = self._own, [None] * len(self._layout)
        pairs = [(a, b) for a, b in zip(own, looked, strict=True) if not (a is None or b is None)]
        if len(pairs) == len(own):
            self._note(torch.cat([(a - b.to(a.device)).cpu() for a, b in pairs]).numpy())
        self._num_steps += 1
        return None if self._num_steps < COMPARED_AFTER else self._compare()

    def _look(self, at: int, values: Tensor | None) -> Tensor | None:
        """Return the coordinates of a parameter that are looked at, float64, on its device."""
        places = self._places[at]
        if values is None or values.layout != torch.strided or values.numel() != self._layout[at]:
            return None
        if places.device != values.device:  # once: parameters stay where they are
            places = self._places[at] = places.to(values.device)
        return values.detach().reshape(-1)[places].to(torch.float64)

    def _note(self, apart: Floats) -> None:
        if np.isfinite(apart).all():  # a step that overflows says nothing of lasting differences
            self._sums += apart
            self._squares += apart**2
            self._num_noted += 1

    def _compare(self) -> Spread:
        self.has_ended = True
        row = torch.from_numpy(np.array([self._num_noted, *self._sums, *self._squares]))
        table = self._channel.allgather_rows(row).numpy()  # [world_size, 1 + 2 * num_values]
        counts, sums, squares = np.split(table, [1, 1 + len(self._sums)], axis=1)
        found = lasting_differences(counts[:, 0], sums, squares)
        if found.usual > WARN_ABOVE and self._channel.rank == 0:
            _logger.warning(
                "in the first %d steps ranks' gradients differ lastingly, by %.2f times their "
                "noise from step to step (0 for ranks that draw from the same data; by rank %s): "
                "a robust rule takes that for faults and loses real signal, 3 to 40 points of "
                "accuracy on digits. Give the placement strata, or a lower cap: "
                "Placement.with_strata(labels, cap=1.5). Or shuffle the shards, or use Mean(). "
                "From here on a worker that sends its gradients flipped, scaled or with noise "
                "cannot be told from an honest one, and is not named; NaN and copies are",
                COMPARED_AFTER,
                found.usual,
                ", ".join(f"{ratio:.2f}" for ratio in found.ratios),
            )
        return found


class ShardSpreadWatch:
    """A ``SpreadWatch`` where each rank keeps its own shard of results, and nobody all of them.

    Results at the coordinates that are looked at travel to all: in each of the steps that are noted
    an all-gather of 4 kB a rank. ``layout`` is the numel of each bucket, [world_size * shard].
    """

    def __init__(self, channel: Channel, layout: Sequence[int]) -> None:
        self._watch = SpreadWatch(channel, layout)
        self._channel = channel.sub("looked")
        pairs = zip(self._watch.places, layout, strict=True)
        self._owners = [places // max(1, numel // channel.world_size) for places, numel in pairs]

    def sent(self, at: int, values: Tensor) -> None:
        """Note what this rank sends of bucket ``at``, [world_size * shard]."""
        self._watch.sent(at, values)

    def step_reduced(self, shards: Mapping[int, Tensor]) -> Spread | None:
        """Note a step, given this rank's shards of results; after the last one, compare ranks."""
        if self._watch.has_ended:
            return None
        parts = [torch.zeros(len(owners), dtype=torch.float64) for owners in self._owners]
        rank = self._channel.rank
        for at, shard in shards.items():
            is_own = self._owners[at] == rank
            places = self._watch.places[at].cpu()[is_own] - rank * len(shard)
            parts[at][is_own] = shard.detach()[places.to(shard.device)].to("cpu", torch.float64)
        rows = self._channel.allgather_rows(torch.cat(parts))  # [world_size, looked at]
        found = rows.gather(0, torch.cat(self._owners).unsqueeze(0))[0]
        looked = found.split([len(owners) for owners in self._owners])
        return self._watch.step_looked(
            [part if at in shards else None for at, part in enumerate(looked)]
        )


def looked_at(numel: int, total: int) -> Tensor:
    """Return the coordinates of a parameter of ``total`` that are looked at, spread evenly over it.

    Of 512 in all, a parameter has its share, rounded up: every one is looked at.
    """
    count = min(numel, -(-_NUM_VALUES * numel // total))
    # float64: float32 rounds numel - 1 up to numel beyond 2**24.
    places = torch.linspace(0, max(numel - 1, 0), count, dtype=torch.float64)
    return places.round().to(torch.int64)

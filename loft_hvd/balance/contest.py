"""A contest of predictors: what a part of every rank's time will be, foretold and scored.

A *part* is a rank's fetch or its computing. Its time is a sum of terms: so many seconds for one of
each feature (1 for the fixed term, samples for the others). The predictors differ in how they think
that times change from one interval to the next:

    calm    hardly: a long average
    last    by anything: only the last interval counts
    trend   on and on by the same per cent: a line through the last intervals
    plain   a short average, and all of the time comes with the samples: the one-line rule that
            makes batches proportional to speeds

Each is a Kalman filter on the terms. What changes is, for all of them, mostly the *level*: all
terms by one factor. So an interval at an unchanged size moves the level alone, and only sizes that
vary teach how much of a time is fixed, whatever the rank's speed does meanwhile.

Every interval is foretold by every predictor before it is seen, at the sizes that were in force.
Weights follow the likelihood of what came, which are exponential weights with logarithmic loss, and
a share of them is dealt out anew each interval (the fixed share of Herbster and Warmuth, Machine
Learning 32, 1998): over any stretch of intervals the mixture's loss is above that of the stretch's
best predictor by a constant at most, whatever the times did. A predictor that is dealt weight
starts from what those know that it came from (the interacting multiple models of Blom and
Bar-Shalom, IEEE TAC 33(8), 1988): after a jump that only ``last`` could follow, the others go on
from there. All of it is done for each rank by itself, and for all ranks at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from loft_hvd.balance.plan import Bools, Floats, RankFloats, RankInts
from loft_hvd.codec import Shape

__all__ = ["PREDICTORS", "Contest", "Outlook"]

PREDICTORS = ("calm", "last", "trend", "plain")
_CALM, _LAST, _TREND, _PLAIN = range(4)
_NUM = len(PREDICTORS)

# Standard deviations of what may change in an interval, as shares of the time.
_LEVEL = np.array([0.01, 0.5, 0.02, 0.1])  # by predictor
_SHAPE = 0.003  # each term by itself
_PACE, _PACE_LASTS = 0.01, 0.95  # a trend, and what stays of it
# Likewise, of what is not known.
_FIRST = 0.3  # a term, before sizes have varied
_MODEL_ERROR = 0.01  # no sum of terms is nearer to the truth
_USUAL = 0.05  # the next interval, where nothing jumps: an error that plans should hedge against

# Of the weights, dealt out anew each interval; of ``last`` most, since a jump is over at once.
_SHARED, _SHARED_LAST = 0.1, 0.9
_TELLS = 0.1  # so many samples more or fewer, as a share, teach what comes with the samples
_TINY_S = 1e-6  # no clock resolves less
_MOST_GROWTH = 10.0  # of a level, in an interval, with which errors grow


@dataclass(frozen=True)
class Outlook:
    """What the mixture foretells of one part for the next interval."""

    terms: Floats  # seconds for one of each feature, >= 0, [world_size, num_terms]
    covariance: Floats  # of these, [world_size, num_terms, num_terms]
    level_error: Floats  # standard error of the time at sizes as now, as a share, [world_size]

    def predict(self, features: Floats) -> Floats:
        """Return seconds for features [..., world_size, num_terms]."""
        seconds: Floats = (features * self.terms).sum(axis=-1)
        return seconds


@dataclass
class Contest:
    """The predictors of one part, for all ranks."""

    # Of every predictor and rank, as foretold for the next interval: terms, and the logarithm by
    # which the level goes on growing (0 but in ``trend``).
    states: Annotated[Floats, Shape(_NUM, "world_size", "num_states")]
    covariance: Annotated[Floats, Shape(_NUM, "world_size", "num_states", "num_states")]
    # That add up to 1: by what was foretold so far, and with the share that is dealt out anew.
    merits: Annotated[Floats, Shape(_NUM, "world_size")]
    weights: Annotated[Floats, Shape(_NUM, "world_size")]
    level_error: RankFloats  # as of ``Outlook``
    samples: RankFloats  # of each batch
    num_rows: RankInts

    @classmethod
    def of(cls, world_size: int, num_terms: int) -> Contest:
        """Return one that knows nothing."""
        return cls(
            states=np.zeros((_NUM, world_size, num_terms + 1)),
            covariance=np.zeros((_NUM, world_size, num_terms + 1, num_terms + 1)),
            merits=np.repeat(_FIRST_WEIGHTS[:, None], world_size, axis=1),
            weights=np.repeat(_FIRST_WEIGHTS[:, None], world_size, axis=1),
            level_error=np.ones(world_size),
            samples=np.zeros(world_size),
            num_rows=np.zeros(world_size, np.int64),
        )

    def foretell(self) -> Outlook:
        """Return the mixture's word on the next interval."""
        terms, covariance = self.states[..., :-1], self.covariance[..., :-1, :-1]
        mean = np.einsum("kn,kni->ni", self.merits, terms)
        apart = terms - mean
        spread = np.einsum("kn,knij->nij", self.merits, covariance)
        spread += np.einsum("kn,kni,knj->nij", self.merits, apart, apart)
        return Outlook(mean, spread, self.level_error.copy())

    def observe(
        self,
        features: Floats,
        seconds: Floats,
        *,
        errors: Floats,
        valid: Bools,
        start: Floats,
    ) -> None:
        """Score what was foretold of an interval, and learn from it.

        Args:
            features: of each rank's batch, >= 0, the fixed one first, [world_size, num_terms].
            seconds: what the part took, [world_size].
            errors: their standard errors, 0 where unknown, likewise.
            valid: ranks that have a measurement, likewise.
            start: the terms to begin with, of ranks that had none so far, as ``features``.
        """
        self._begin(valid & (self.num_rows == 0), features, seconds, start)
        shown = np.concatenate([features, np.zeros((len(features), 1))], axis=1)  # of a state
        noise = np.square(errors) + np.square(_MODEL_ERROR * seconds) + _TINY_S**2
        gain = np.einsum("knij,nj->kni", self.covariance, shown)  # [NUM, world_size, num_states]
        variance = np.einsum("kni,ni->kn", gain, shown) + noise
        miss = seconds - (self.states * shown).sum(axis=-1)
        loss = 0.5 * (np.log(variance) + np.square(miss) / variance)
        merits = self.weights * np.exp(loss.min(axis=0) - loss)
        merits /= merits.sum(axis=0)
        samples = features[:, 1:].sum(axis=1)
        known = np.maximum(self.samples, 1.0)
        tells = (self.num_rows < 2) | (np.abs(samples - self.samples) > _TELLS * known)
        # What else a row says is of the level: sizes follow it, so a small change goes with it.
        share = np.einsum("kni,ni->kn", gain, shown) / np.maximum(seconds - miss, _TINY_S)
        of_level = self.states * share[..., None]
        of_level[..., -1] = gain[..., -1]
        used = np.where(tells[:, None], gain, of_level)
        states = self.states + used * (miss / variance)[..., None]
        both = used[..., :, None] * gain[..., None, :]
        twice = used[..., :, None] * used[..., None, :]
        told = both + np.swapaxes(both, -1, -2) - twice
        covariance = self.covariance - told / variance[..., None, None]
        # Terms have grown by this factor, and with them what is not known of them; but for what is
        # left of this row's own error. When they shrink, it stays: none is known too well.
        growth = np.where(tells, 1.0, np.clip(1.0 + share * miss / variance, 1.0, _MOST_GROWTH))
        scale = np.ones_like(states)  # a pace stays what it is
        scale[..., :-1] = growth[..., None]
        own = twice * (noise / np.square(variance))[..., None, None]
        covariance = scale[..., :, None] * scale[..., None, :] * (covariance - own) + own
        states = _keep_positive(states, covariance)
        states, covariance, weights = _deal_out(states, covariance, merits, shown)
        states, covariance = _advance(states, covariance, shown)
        error = _level_error(states, covariance, merits, shown)
        self.states = np.where(valid[:, None], states, self.states)
        self.covariance = np.where(valid[:, None, None], covariance, self.covariance)
        self.merits = np.where(valid, merits, self.merits)
        self.weights = np.where(valid, weights, self.weights)
        self.level_error = np.where(valid, error, self.level_error)
        self.samples = np.where(valid, samples, self.samples)
        self.num_rows = self.num_rows + valid

    def _begin(self, ranks: Bools, features: Floats, seconds: Floats, start: Floats) -> None:
        """Let all predictors of ``ranks`` start at ``start``, each term uncertain."""
        if not ranks.any():
            return
        # The unit of a term that no row shows is one sample.
        deviation = _FIRST * seconds[:, None] / np.maximum(features, 1.0)
        num_terms = features.shape[1]
        covariance = np.zeros_like(self.covariance)
        covariance[..., range(num_terms), range(num_terms)] = np.square(deviation)
        covariance[_TREND, :, -1, -1] = _PACE**2
        _forget(covariance[_PLAIN], 0)
        states = np.concatenate([start, np.zeros((len(start), 1))], axis=1)
        self.covariance = np.where(ranks[:, None, None], covariance, self.covariance)
        self.states = np.where(ranks[:, None], states, self.states)


def _forget(covariance: Floats, at: int) -> None:
    """Make one part of a state certain, and free of the others."""
    covariance[..., at, :] = 0.0
    covariance[..., :, at] = 0.0


def _keep_positive(states: Floats, covariance: Floats) -> Floats:
    """Hold each term that has fallen below 0 at 0, and move those that it goes with."""
    for at in range(states.shape[-1] - 1):
        below = np.minimum(states[..., at], 0.0)
        if below.any():
            variance = np.maximum(covariance[..., at, at], 1e-300)
            states = states - covariance[..., :, at] * (below / variance)[..., None]
    states[..., :-1] = np.maximum(states[..., :-1], 0.0)
    return states


def _moves() -> Floats:
    """Return the shares of weight that go from each predictor to each, [from, to]."""
    shared = np.full(_NUM, _SHARED)
    shared[_LAST] = _SHARED_LAST
    moves: Floats = np.diag(1.0 - shared)
    moves += (shared / (_NUM - 1))[:, None] * (1.0 - np.eye(_NUM))
    return moves


_MOVES = _moves()
_FIRST_WEIGHTS = np.where(np.arange(_NUM) == _CALM, 0.5, 0.5 / (_NUM - 1))


def _deal_out(
    states: Floats, covariance: Floats, weights: Floats, shown: Floats
) -> tuple[Floats, Floats, Floats]:
    """Deal out a share of the weights anew; who gets some starts from what others know."""
    joint = _MOVES[..., None] * weights[:, None]  # [from, to, world_size]
    after = joint.sum(axis=0)
    origin = joint / after
    mixed = np.einsum("ftn,fns->tns", origin, states)
    apart = states[:, None] - mixed[None]  # [from, to, world_size, num_states]
    spread = np.einsum("ftn,fnij->tnij", origin, covariance)
    spread += np.einsum("ftn,ftni,ftnj->tnij", origin, apart, apart)
    has_no_pace = np.arange(_NUM) != _TREND
    mixed[has_no_pace, :, -1] = 0.0
    spread[has_no_pace, :, -1, :] = 0.0
    spread[has_no_pace, :, :, -1] = 0.0
    # The plain one has no fixed term: the others make up for it at the batch in force.
    level = (mixed[_PLAIN] * shown).sum(axis=-1)
    mixed[_PLAIN, :, 0] = 0.0
    rest = (mixed[_PLAIN] * shown).sum(axis=-1)
    mixed[_PLAIN] *= np.where(rest > 0.1 * level, level / np.maximum(rest, _TINY_S), 1.0)[:, None]
    _forget(spread[_PLAIN], 0)
    return mixed, spread, after


def _advance(states: Floats, covariance: Floats, shown: Floats) -> tuple[Floats, Floats]:
    """Foretell the next interval's states, and how uncertain they have become."""
    growth = np.exp(np.clip(states[..., -1], -0.2, 0.2))
    then = states * growth[..., None]
    then[..., -1] = _PACE_LASTS * states[..., -1]
    level = then.copy()  # the direction in which all terms move alike
    level[..., -1] = 0.0
    diagonal = range(states.shape[-1])
    jacobian = np.zeros_like(covariance)
    jacobian[..., diagonal, diagonal] = growth[..., None]
    jacobian[..., :, -1] = level
    jacobian[..., -1, -1] = _PACE_LASTS
    covariance = jacobian @ covariance @ np.swapaxes(jacobian, -1, -2)
    moved = _LEVEL[:, None, None] * level
    covariance += moved[..., :, None] * moved[..., None, :]
    total = (then * shown).sum(axis=-1)
    own = np.where(shown > 0, _SHAPE * total[..., None] / np.where(shown > 0, shown, 1.0), 0.0)
    own[_PLAIN, :, 0] = 0.0
    own[_TREND, :, -1] = _PACE
    covariance[..., diagonal, diagonal] += np.square(own)
    return then, 0.5 * (covariance + np.swapaxes(covariance, -1, -2))


def _level_error(states: Floats, covariance: Floats, weights: Floats, shown: Floats) -> Floats:
    """Return the standard error of the mixture where no level jumps, as a share, [world_size]."""
    foretold = (states * shown).sum(axis=-1)
    mean = (weights * foretold).sum(axis=0)
    own = np.einsum("knij,ni,nj->kn", covariance, shown, shown)
    own[_LAST] -= (_LEVEL[_LAST] ** 2 - _USUAL**2) * np.square(foretold[_LAST])
    spread = (weights * (np.maximum(own, 0.0) + np.square(foretold - mean))).sum(axis=0)
    error: Floats = np.minimum(np.sqrt(spread) / np.maximum(mean, _TINY_S), 1.0)
    return error

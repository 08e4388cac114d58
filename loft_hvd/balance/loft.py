"""The LOFT policy: observe, fit, search, accept past a dead band, judge by rank 0's clock.

After LOFT (IEEE TCC 12(2):370-387, 2024), whose formulas are not public: the model, the search and
the rules for accepting a plan are this library's own.

A change has a price, the dead band. What the present sizes cost more than the best ones known is
added up, interval by interval, as far as it is sure (the gain less two of its standard errors);
when the sum reaches the price, sizes change. So what is lost by waiting is never more than what a
change costs, as with the rent of skis that one might buy. A change that has not brought what it
promised was made on a wrong model: then the next one is free.

``Verdicts`` judges the plans that came of it. Ranks may report wrong times, by mistake or on
purpose. Their reports choose a plan; whether it was any good is read off the step's own length. A
plan that turns out worse than the one before it, or than equal sizes, is in force for one interval.
What it replaced is then measured anew: when it is no better, the cluster changed and the plan comes
back; otherwise it was a miss, and the next change has twice the price, until one brings what it
promised. From the second miss against equal sizes on, the rank that most likely misled the model is
pinned at its equal share for a time that grows eightfold; misses that a rank did admit to are
forgiven with time, since neighbours on a machine come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.explain import describe_fit, summarise_fit
from loft_hvd.balance.fit import Fit, Fitter, Gain, Past
from loft_hvd.balance.interval import Interval
from loft_hvd.balance.latency import Held, StepModel, typical_longest
from loft_hvd.balance.plan import (
    Bools,
    Bounds,
    Ints,
    RankFloats,
    RankNumbers,
    Sizes,
)
from loft_hvd.balance.policy import Allowed, Policy, Proposal, Task
from loft_hvd.balance.search import SOLVERS, least_s, round_to_lattice
from loft_hvd.codec import Count, Shape, Within
from loft_hvd.errors import ArgumentError, PlanError

__all__ = ["DEAD_BAND", "Forecast", "Loft", "Measured", "Verdicts"]

# "Measured" as in regression.py: docs/balance.md, "The constants".

# When to change sizes.
DEAD_BAND = 0.03  # of the step, as Cannikin's (an AdaptDL for unequal GPUs); docs/balance.md
# Standard errors: of a gain, that are taken off it; of two steps, that tell the longer. One in 44
# comparisons of equals is beyond.
_SIGMAS = 2.0
# A batch is at most so many times the largest proven, and at least the present one over so many: a
# wrong time cannot cost more. Measured: growing by 1.5 or 4 changes little.
_GROWTH, _SHRINKING = 2, 4
# Shares of the way to the best sizes by mean times, which are tried too.
_LESS = (0.5, 0.25)
# A rank that stays slowest although its batch is thought not to matter gets an eighth less, to
# see. Measured: rarely needed; a rank that was changing when its shape was fitted needs it.
_PROBE_AFTER, _LONGEST_PROBE = 4, 64  # intervals without a remedy; doubled when nothing came of it
_PROBED = 0.875

# When to take a plan back.
_MARGIN = 0.02  # of the step, beside its error: docs/balance.md promises it. Measured
_UNEXPLAINED = 0.10  # of the step that no rank says it was busy for: then somebody's word is wrong
_DEAREST = 64.0  # dead bands that a change may cost; doubling from 1, the sixth miss reaches it
_PINNING_STRIKES = 1.5  # so that the second miss pins, unless the first was forgiven in part
# Intervals that the first pin lasts, and the factor on each next one: a rank that admits may be
# honest. A rank is pinned that much longer at once when nobody admits to the long step.
_PINNED, _PINNED_LONGER = 8, 8
_LONGEST_PIN = 4096  # intervals: no run lasts as long
_FADE = 0.9  # of strikes and suspicion, an interval: the first of two is forgiven after seven
_MOST_DRIFT = 4.0  # how much slower ranks may say the cluster has become

# Ranks and sources up to which ``explain`` proves how good sizes are: it takes 0.05 s a source.
_MOST_BOUNDED = 64, 4
# Ranks that ``explain`` names whose budget is worth enlarging, and what it must save of a step: as
# much as the dead band asks of a change.
_MOST_BUDGETS, _WORTH_A_BUDGET = 3, 0.03

_PerRank = Annotated[list[Count], Shape("world_size")]


@dataclass(frozen=True)
class Measured:
    """Sizes, and what a step with them took: others are judged by it."""

    sizes: Sizes
    step_s: float = float("nan")  # NaN before it was measured
    error_s: float = 0.0  # its standard error
    model_s: float = float("nan")  # what the model said of it then


@dataclass(frozen=True)
class Forecast:
    """What the model said before a plan came into force."""

    sizes: Sizes
    times: RankFloats  # predicted seconds of each rank with them
    before: Measured  # the sizes that they replaced
    gain: float = 0.0  # share of the step that they should save


@dataclass(frozen=True)
class Trial:
    """A plan that was undone."""

    sizes: Sizes
    step_s: float  # that a step with it took
    instead: Sizes  # in force until it is known whether they are any better


@dataclass
class Verdicts:
    """The verdicts so far."""

    equal: Measured  # the equal sizes of the run, as last measured
    aggregate_s: float = 0.0  # of a step with them that the ranks' reports left over
    suspicion: RankNumbers = field(default_factory=list)  # how much each rank misled the model
    pins: _PerRank = field(default_factory=list)  # intervals that each rank's pin still lasts
    pin_length: Count = _PINNED  # of the next one
    num_misses: Count = 0  # plans that were worse than equal sizes, or than those before them
    strikes: float = 0.0  # of the first kind; they fade if a rank admitted the last one
    is_admitted: bool = False  # a rank said that it was busy for as long as the step last undone
    price: Annotated[float, Within(1, _DEAREST)] = 1.0  # of the next change, in dead bands
    proven: _PerRank = field(default_factory=list)  # largest batch of each rank that passed
    on_trial: Trial | None = None  # a plan that was undone, until what replaces it is measured
    misled: RankNumbers = field(default_factory=list)  # how much each rank may have misled it

    def __post_init__(self) -> None:
        equal = self.equal.sizes
        self.proven = self.proven or list(equal)
        self.pins = self.pins or [0] * len(equal)
        self.suspicion = self.suspicion or [0.0] * len(equal)
        self.misled = self.misled or [0.0] * len(equal)

    @property
    def pinned(self) -> list[int]:
        """Ranks held at their equal share."""
        return [rank for rank, left in enumerate(self.pins) if left]

    def pass_interval(self) -> None:
        """Let pins run out."""
        self.pins = [max(left - 1, 0) for left in self.pins]

    def is_explained(self, interval: Interval, busy_s: float) -> bool:
        """Say whether ranks admit, with ``busy_s`` of a step, that it took as long as it did."""
        return interval.step_s <= (busy_s + self.aggregate_s) * (1 + _UNEXPLAINED)

    def measure_equal(self, interval: Interval, busy_s: float, *, model_s: float) -> None:
        """Take in an interval with equal sizes, of which the model says ``model_s``.

        Ranks say that they were busy for ``busy_s`` of a step, the longest of them in each.
        """
        step_s, error_s = interval.step_s, interval.step_error_s
        if self.on_trial is None and self.equal.step_s > 0:  # NaN is not
            step_s = 0.5 * (self.equal.step_s + step_s)
            error_s = 0.5 * float(np.hypot(self.equal.error_s, error_s))
        # Else the cluster may have changed: only this interval tells.
        self.equal = Measured(self.equal.sizes, step_s, error_s, model_s)
        left_over = max(interval.step_s - busy_s, 0.0)
        self.aggregate_s = left_over if self.num_misses == 0 else min(self.aggregate_s, left_over)

    def comes_back(self, trial: Trial, interval: Interval) -> bool:
        """Say whether the plan on trial comes back, after an interval with what replaced it."""
        if interval.step_s >= trial.step_s * (1 - 0.5 * _MARGIN):
            return True
        self._count_miss(trial)
        return False

    def is_worse(
        self, interval: Interval, busy_s: float, than: Measured, *, is_new: bool, drift: float
    ) -> bool:
        """Judge the plan in force by the step it took.

        A new plan is judged whatever the reason; one that passed before only when no rank says it
        was busy that long, since a slow rank that says so is the model's business.

        Args:
            interval: what was measured with it.
            busy_s: how long ranks say that they were busy in a step, the longest of them in each.
            than: the sizes that it should be no worse than.
            is_new: it is the plan's first interval.
            drift: how much longer those should take now than when they were measured, by what the
                ranks report; believed only while their reports explain the step.
        """
        explained_s = busy_s + self.aggregate_s
        error_s = float(np.hypot(interval.step_error_s, than.error_s))
        # What is surely longer, and by more than the margin.
        step_s = interval.step_s - _SIGMAS * error_s
        if step_s > explained_s * (1 + _UNEXPLAINED):  # only rank 0's own clock counts
            return step_s > than.step_s * (1 + _MARGIN)
        held_up = interval.valid & (interval.busy_s > 0.95 * interval.busy_s.max())
        has_less = (interval.sizes[held_up] <= np.array(than.sizes)[held_up]).all()
        if has_less and step_s <= explained_s * (1 + _MARGIN):
            return False  # with those sizes these ranks would have had more to do, not less
        return is_new and step_s > than.step_s * max(drift, 1.0) * (1 + _MARGIN)

    def undo(
        self, interval: Interval, busy_s: float, forecast: Forecast, *, instead: Sizes
    ) -> None:
        """Put the plan on trial, and note which rank's reports may have misled the model."""
        self.on_trial = Trial(forecast.sizes, interval.step_s, instead)
        misses = np.abs(interval.busy_s / np.maximum(forecast.times, 1e-9) - 1.0)
        misses = np.where(interval.valid, np.minimum(misses, 1.0), 0.0)
        self.is_admitted = self.is_explained(interval, busy_s)
        if not self.is_admitted:
            # Nobody admits to the long step: suspect those who were given the most on their word.
            growth = np.array(forecast.sizes) / np.maximum(self.equal.sizes, 1) - 1.0
            misses = misses + np.maximum(growth, 0.0)
        self.misled = misses.tolist()

    def _count_miss(self, trial: Trial) -> None:
        self.on_trial = None
        self.num_misses += 1
        self.price = min(2.0 * self.price, _DEAREST)
        if trial.instead != self.equal.sizes:
            return  # only what is worse than sizes that rest on no rank's word may be a lie
        suspicion = np.array(self.suspicion) + np.array(self.misled)
        self.strikes += 1.0
        if self.strikes > _PINNING_STRIKES:
            free = suspicion.copy()
            free[self.pinned] = -1.0
            length = self.pin_length * (1 if self.is_admitted else _PINNED_LONGER)
            self.pins[int(np.argmax(free))] = length
            self.pin_length = min(self.pin_length * _PINNED_LONGER, _LONGEST_PIN)
            suspicion[self.pinned] = 0.0
        self.suspicion = suspicion.tolist()

    def passed(self, sizes: Ints) -> None:
        """Note that a plan was no worse than what it replaced: its batches are proven."""
        self.proven = np.maximum(self.proven, sizes).tolist()
        self.on_trial = None
        if self.is_admitted:
            self.strikes *= _FADE
            self.suspicion = (_FADE * np.array(self.suspicion)).tolist()


@dataclass
class LoftState:
    """What LOFT has learnt."""

    past: Past  # of the fit
    verdicts: Verdicts  # on its plans
    forecast: Forecast | None = None  # of the plan under watch; None once it was judged
    is_let_down: bool = False  # the last change has not brought what it promised
    aggregate_s: float = float("nan")  # what steps lately took beyond the slowest rank
    # Surely, by not changing sizes so far, as a share of one interval; below the dead band.
    lost: Annotated[float, Within(0, _DEAREST)] = 0.0
    stuck: Count = 0  # intervals that a rank has been slowest without a remedy
    probe_after: Count = _PROBE_AFTER  # so many of these
    note: str = "nothing has been measured"  # why sizes are what they are


def _sure(gain: Gain) -> float:
    """Return the share of the step that is saved surely; negative where nothing is."""
    return gain.share - _SIGMAS * gain.error


def _is_let_down(forecast: Forecast, interval: Interval) -> bool:
    """Say whether a change has surely brought less than it promised."""
    before = forecast.before
    if not before.step_s > 0 or forecast.gain <= 0:
        return False
    brought = 1.0 - interval.step_s / before.step_s
    error = float(np.hypot(interval.step_error_s, before.error_s)) / before.step_s
    return brought + _SIGMAS * error < forecast.gain


def _why_not(
    best: Gain, left: Gain, bars: Sequence[str], *, lost: float, dead_band: float, times: float
) -> str:
    """Say in a sentence why sizes stay.

    Args:
        best: what the best sizes known would bring.
        left: what the sizes that are left by ``bars`` would.
        bars: what bars the best ones, in plain words.
        lost: what waiting has cost so far, as a share of an interval.
        dead_band: what it may cost while no plan was undone, likewise.
        times: the factor on ``dead_band`` that plans which were undone have brought.
    """
    if not best.share >= 0.001:  # also where a model of odd times predicts nothing
        return "nothing to win: no sizes known would make the step shorter"
    if not _sure(best) > 0:
        return (
            f"nothing to win that is sure: other sizes might save {best.share:.1%} of the step, "
            f"which is within the error of the times ({_SIGMAS * best.error:.1%})"
        )
    barred = f"other sizes would surely save {_sure(best):.1%} of the step"
    others = f"{barred}; they"
    if bars:
        barred += f", but are barred ({'; '.join(bars)})"
        if not _sure(left) > 0:
            return f"{barred}, and what is left saves nothing that is sure"
        others = f"{barred}; those left surely save {_sure(left):.1%}, and"
    price = dead_band * times
    waits = max(int(np.ceil((price - lost) / _sure(left))), 1)
    undone = f", {times:.0f} times over since plans were undone" if times > 1 else ""
    return (
        f"{others} are taken when waiting has cost as much as a change may, the dead band of "
        f"{dead_band:.0%} of an interval{undone}: so far it has cost {lost:.1%}, so that is "
        f"about {waits} intervals away"
    )


class Loft(Policy):
    """Sizes that even out fetch and compute together.

    Args:
        dead_band: the price of a change, as a share of the step over an interval: a change is made
            once waiting has surely cost as much. 0 takes any gain that is sure.
        solver: "grid" (LOFT's adaptive grid search) or "exact" (bisection).
        source: number of the shared source each rank fetches from, -1 for none, [world_size];
            None takes what a loader's ``Placement`` says.
        acts: False only fits and explains, and never changes a size (policy "report").
    """

    state: LoftState
    task: Task

    def __init__(
        self,
        *,
        dead_band: float = DEAD_BAND,
        solver: str = "grid",
        source: npt.ArrayLike | None = None,
        acts: bool = True,
    ) -> None:
        if solver not in SOLVERS or not 0 <= dead_band < 1:
            raise ArgumentError(
                f"Loft: solver={solver!r} must be one of {sorted(SOLVERS)}, and "
                f"dead_band={dead_band} in [0, 1)"
            )
        self.name, self.is_adaptive = "loft" if acts else "report", acts
        self._dead_band, self._solver = dead_band, solver
        self._source = None if source is None else np.asarray(source)
        self._told: Sequence[int] = ()  # of each rank, by a loader
        self._held: Held | None = None  # likewise
        self._allowed: Callable[[Sizes], Allowed] = Allowed  # what a controller lets come of sizes

    def share_sources(self, source: Sequence[int]) -> None:
        self._told = source

    def share_held(self, held: Held) -> None:
        self._held = held

    def share_bars(self, allowed: Callable[[Sizes], Allowed]) -> None:
        self._allowed = allowed

    def _holding(self, model: StepModel) -> StepModel:
        """Return the model with what ranks are known to keep, if they are those of this world."""
        if self._held is None or len(self._held.shares) != model.world_size:
            return model
        return model.holding(np.array(self._held.shares) * self.task.global_batch_size)

    @property
    def _shared(self) -> npt.ArrayLike:
        """The shared source of each rank: the user's word, else that of a loader of this world."""
        if self._source is not None:
            return self._source
        return self._told if len(self._told) == self.task.world_size else -1

    def start(self, task: Task) -> Sizes:
        given = self._source
        if given is not None and given.ndim and given.shape != (task.world_size,):
            raise PlanError(
                f"Loft: source={given.tolist()} has {len(given)} entries, but world_size="
                f"{task.world_size}; give one a rank for the ranks there are now, or none: a "
                "loader with a Placement tells which ranks share a source, in a world of any size"
            )
        self.task, equal = task, task.equal()
        self._fit: Fit | None = None
        self._found: tuple[Sizes, Bounds] | None = None  # by the newest search, and its limits
        self.state = LoftState(Past.of(task.world_size), Verdicts(Measured(equal)))
        return equal

    @property
    def _fitter(self) -> Fitter:  # of what is learnt: nothing to keep beside the state
        return Fitter(
            self.task.world_size,
            source=self._shared,
            pass_size=self.task.pass_size,
            past=self.state.past,
        )

    @property
    def fit(self) -> Fit | None:
        return self._fit

    def recall(self, intervals: Sequence[Interval]) -> bool:
        """Learn from other worlds; sizes that a device has computed there count as proven."""
        verdicts = self.state.verdicts
        for interval in intervals:
            self._fitter.add(interval)
            verdicts.proven = np.maximum(verdicts.proven, interval.sizes).tolist()
        return True

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Fit, judge the plan in force, and search for a better one."""
        del first_step
        state, fitter = self.state, self._fitter
        fitter.add(interval)
        fit = fitter.fit()
        if fit is None or not interval.valid.any():
            state.note = "no rank has reported times that can be used"
            return None
        # By chance another rank is the longest in each step: the mean of the longest is above the
        # longest mean.
        busy_s, _ = typical_longest(interval.busy_s, fit.deviation(interval.sizes), fit.skew)
        left_over = max(interval.step_s - busy_s, 0.0)
        before = left_over if np.isnan(state.aggregate_s) else state.aggregate_s
        state.aggregate_s = before + 0.3 * (left_over - before)  # over about three intervals
        model = self._holding(replace(fit.model, aggregate_s=state.aggregate_s))
        fit = replace(fit, model=model)
        self._fit = fit
        if not self.is_adaptive:
            state.note = self._say_what_it_would_do(interval, fit)
            return None
        state.verdicts.pass_interval()
        num_misses = state.verdicts.num_misses
        verdict = self._judge(interval, fit, busy_s)
        if verdict is not None:
            return self._announce(verdict, interval, fit)
        if state.verdicts.num_misses > num_misses:
            # One interval more tells what the model did not know; "drifting" is 3.6 % faster by it.
            state.note = "sizes wait for one interval, since a plan was undone"
            return None
        return self._search(interval, fit)

    def _say_what_it_would_do(self, interval: Interval, fit: Fit) -> str:
        """Say which sizes would be chosen in the end, and what they would save."""
        text, now = "sizes are not changed, as the policy only reports", interval.sizes
        if fit.is_poor.any():  # as after a few steps: sizes by what a sample takes now
            if not (interval.valid.all() and (now > 0).all() and (interval.busy_s > 0).all()):
                return f"{text}; the times of some ranks fit no model, by which to choose others"
            sample_s = interval.busy_s / now
            found = self.task.rounded(now.sum() / sample_s / (1 / sample_s).sum())
            now_s = interval.step_s
            then_s = now_s - float(interval.busy_s.max() - (sample_s * np.array(found)).max())
            is_sure = now_s - then_s > self._dead_band * now_s
        else:
            found = SOLVERS[self._solver](fit.model, int(now.sum()), self.task.bounds)
            found = self._choose(fit, now, found, self.task.bounds)
            gain = fit.gain(now, found)
            then_s, now_s, is_sure = gain.then_s, gain.now_s, _sure(gain) > 0
        if not is_sure or found == tuple(now.tolist()):
            return f"{text}; no others would surely make a step shorter"
        return (
            f'{text}; policy="loft" would choose {list(found)}, for a step of '
            f"{1e3 * then_s:.3g} ms in place of {1e3 * now_s:.3g} ms, {1 - then_s / now_s:.1%} less"
        )

    def _legal(self, sizes: Sizes, reason: str) -> Proposal:
        """Return what comes into force when these sizes are proposed."""
        allowed = self._allowed(sizes)
        return Proposal(allowed.sizes, "; ".join((reason, *allowed.bars)))

    def _announce(
        self, proposal: Proposal, interval: Interval, fit: Fit, *, gain: float = 0.0
    ) -> Proposal | None:
        """Remember what is expected of a legal proposal, so that it can be judged.

        One of the sizes that are in force is none: something barred what was wanted.
        """
        state, now = self.state, tuple(interval.sizes.tolist())
        if proposal.sizes == now:
            state.note = f"sizes stay, though others are wanted ({proposal.reason})"
            return None
        before = Measured(now, interval.step_s, interval.step_error_s, fit.model.step_s(now))
        state.forecast = Forecast(proposal.sizes, fit.model.times(proposal.sizes), before, gain)
        state.note, state.lost, state.is_let_down = proposal.reason, 0.0, False
        return proposal

    def _judge(self, interval: Interval, fit: Fit, busy_s: float) -> Proposal | None:
        """Return what undoes the plan in force, or brings one back; None where it may stay."""
        state, verdicts, sizes = self.state, self.state.verdicts, tuple(interval.sizes.tolist())
        trial, model = verdicts.on_trial, fit.model
        if sizes == verdicts.equal.sizes:
            verdicts.measure_equal(interval, busy_s, model_s=model.step_s(sizes))
        if trial is not None and sizes == trial.instead and verdicts.comes_back(trial, interval):
            verdicts.passed(np.array(trial.sizes))
            return self._legal(trial.sizes, "other sizes were no better: the cluster has changed")
        if sizes == verdicts.equal.sizes:
            return None
        forecast = state.forecast
        rivals = {"equal sizes": verdicts.equal}
        # A promise is judged by the sizes that it was for: a quarantine brings others.
        is_new = forecast is not None and forecast.sizes == sizes
        if is_new and forecast is not None:
            if forecast.before.sizes != verdicts.equal.sizes:
                rivals = {"the sizes before": forecast.before, **rivals}
            is_explained = verdicts.is_explained(interval, busy_s)
            is_let_down = _is_let_down(forecast, interval)
            state.is_let_down = is_explained and is_let_down
            if forecast.gain > 0 and not is_let_down:
                verdicts.price = 1.0
        if forecast is None or not is_new:
            forecast = Forecast(sizes, model.times(sizes), verdicts.equal)
        is_barred = False  # it is worse, but what it replaced may not come back
        for name, rival in rivals.items():
            drift = model.step_s(rival.sizes) / rival.model_s if rival.model_s > 0 else 1.0
            drift = min(drift, _MOST_DRIFT)
            if not verdicts.is_worse(interval, busy_s, rival, is_new=is_new, drift=drift):
                continue
            reason = f"undone: a step took {interval.step_s:.3g} s, but {rival.step_s:.3g} s"
            instead = self._legal(rival.sizes, f"{reason} with {name}")
            if instead.sizes != sizes:
                verdicts.undo(interval, busy_s, forecast, instead=instead.sizes)
                return instead
            is_barred = True  # a cap has come between, and these are the nearest
        if is_barred:
            return None  # it stays under watch: neither undone nor proven
        verdicts.passed(interval.sizes)
        state.forecast = None
        return None

    def _search(self, interval: Interval, fit: Fit) -> Proposal | None:
        """Return the best sizes known if they are worth a change, or a probe."""
        state, verdicts, task, now = self.state, self.state.verdicts, self.task, interval.sizes
        held = fit.is_poor.copy()
        held[verdicts.pinned] = True
        if held.sum() > len(held) // 2:
            reason = "the times of most ranks fit no model"
            if tuple(now.tolist()) == verdicts.equal.sizes:
                state.note = f"sizes stay equal: {reason}"
                return None
            proposal = self._legal(verdicts.equal.sizes, f"equal sizes, since {reason}")
            return self._announce(proposal, interval, fit)
        limits = self._limits(now, held)
        found = SOLVERS[self._solver](fit.model, task.global_batch_size, limits)
        found = self._choose(fit, now, found, limits)
        self._found = found, limits
        best, allowed = fit.gain(now, found), self._allowed(found)
        left = fit.gain(now, allowed.sizes) if allowed.bars else best
        sure, times = _sure(left), verdicts.price
        state.lost = state.lost + sure if sure > 0 else 0.0
        price = 0.0 if state.is_let_down else self._dead_band * times
        if sure > 0 and state.lost >= price:
            state.probe_after = _PROBE_AFTER
            reason = "; ".join((f"{left.share:.1%} less predicted", *allowed.bars))
            proposal = Proposal(allowed.sizes, reason, left.then_s, left.now_s)
            return self._announce(proposal, interval, fit, gain=left.share)
        lost, dead_band = state.lost, self._dead_band
        state.note = _why_not(best, left, allowed.bars, lost=lost, dead_band=dead_band, times=times)
        probe = self._probe(interval, limits)
        return None if probe is None else self._announce(probe, interval, fit)

    def _choose(self, fit: Fit, now: Ints, found: Sizes, limits: Bounds) -> Sizes:
        """Return ``found`` or, where a step should take less, sizes nearer ``now`` or equal ones.

        The search evens out mean times, and knows nothing of chance. Sizes far off may make ranks
        as long as others whose times vary much: then less is more.
        """
        step = np.array(found) - now
        others = [self.task.rounded(now + share * step) for share in _LESS]
        others.append(self.state.verdicts.equal.sizes)
        legal = [sizes for sizes in others if limits.allow(sizes).all()]
        return min((found, *legal), key=lambda sizes: fit.promise(sizes)[0])

    def _limits(self, now: Ints, held: Bools) -> Bounds:
        """Return the bounds of the next sizes: no rank far from what it has proven.

        Ranks that are ``held`` stay at their equal share, or a grain beside it. All [world_size].
        """
        bounds, verdicts = self.task.bounds, self.state.verdicts
        equal, grain = np.array(verdicts.equal.sizes), bounds.grain
        grown = np.maximum(_GROWTH * np.array(verdicts.proven), equal)
        shrunk = np.minimum(now // _SHRINKING, equal) // grain * grain
        low = np.where(held, equal // grain * grain, np.maximum(bounds.floor, shrunk))
        high = np.minimum(np.where(held, -(-equal // grain) * grain, grown), bounds.cap)
        return Bounds(np.minimum(low, high), high, grain)

    def _probe(self, interval: Interval, limits: Bounds) -> Proposal | None:
        """Relieve a rank that stays slowest although its batch is thought not to matter."""
        state, busy, now = self.state, interval.busy_s, interval.sizes
        slowest = int(np.argmax(busy))
        others = np.delete(busy, slowest)[np.delete(interval.valid, slowest)]
        is_stuck = len(others) and busy[slowest] > (1 + 2 * self._dead_band) * others.max()
        state.stuck = state.stuck + 1 if is_stuck else 0
        if state.stuck < state.probe_after:
            return None
        wanted, total, grain = now.astype(np.float64), int(now.sum()), limits.grain
        wanted[slowest] *= _PROBED
        wanted *= total / wanted.sum()
        cap = limits.cap.copy()  # so that rounding cannot give back what was taken
        cap[slowest] = min(int(wanted[slowest]), cap[slowest]) // grain * grain
        if cap[slowest] >= now[slowest]:
            return None
        try:
            sizes = round_to_lattice(wanted, total, replace(limits, cap=cap))
        except PlanError:  # the others cannot take what it would give
            return None
        reason = f"rank {slowest} stays slowest: does it depend on its batch?"
        probe = self._legal(sizes, reason)
        if probe.sizes[slowest] >= now[slowest]:  # barred: other sizes would tell nothing of it
            return None
        state.stuck, state.probe_after = 0, min(2 * state.probe_after, _LONGEST_PROBE)
        return probe

    def explain(self) -> list[str]:
        verdicts = self.state.verdicts
        lines = [f"policy {self.name}: {self.state.note}"]
        if self._fit is not None:
            lines.append(summarise_fit(self._fit))
        lines += self._say_bound() + self._say_kept() + self._say_budgets()
        if verdicts.num_misses:
            lines.append(f"{verdicts.num_misses} plans made steps longer and were undone")
        lines += [
            f"rank {rank} is pinned at its equal share of {verdicts.equal.sizes[rank]} for "
            f"{verdicts.pins[rank]} more intervals: plans that trusted its times were worse "
            "than equal sizes"
            for rank in verdicts.pinned
        ]
        return lines

    def _say_bound(self) -> list[str]:
        """Say how much better other sizes could be, where no search finds the best surely."""
        if self._fit is None or self._found is None or not self._fit.model.is_coupled:
            return []
        (found, limits), model = self._found, self._fit.model
        longest = float(model.times(found).max())
        line = (
            f"ranks share sources: with the best sizes found the slowest rank takes {longest:.3g} s"
        )
        most_ranks, most_sources = _MOST_BOUNDED
        if model.world_size > most_ranks or len(set(model.source) - {-1}) > most_sources:
            return [line]
        least = least_s(model, self.task.global_batch_size, limits)
        return [f"{line}, and no sizes within the present limits bring it below {least:.3g} s"]

    def _say_kept(self) -> list[str]:
        """Say what ranks are to keep beside what they compute, and why."""
        held = self._held
        if held is None or held.keeping is None or len(held.shares) != self.task.world_size:
            return []
        return held.keeping.describe(held.num_samples)

    def _say_budgets(self) -> list[str]:
        """Say which ranks would save most if they could keep all samples that they compute."""
        held, found = self._held, self._found
        if held is None or self._fit is None or found is None:
            return []
        model, (sizes, limits) = self._fit.model, found
        if len(held.shares) != model.world_size or model.world_size > _MOST_BOUNDED[0]:
            return []
        batch = np.array(sizes, dtype=np.float64)
        local, now_s = model.local(batch), model.step_s(sizes)
        saved: list[tuple[float, str]] = []
        for rank in np.flatnonzero(local < batch - 0.5).tolist():
            is_it = np.arange(model.world_size) == rank
            more = replace(
                model,
                hits=np.where(is_it, np.inf, model.hits),
                hit_share=np.where(is_it, 1.0, model.hit_share),
            )
            then = SOLVERS[self._solver](more, self.task.global_batch_size, limits)
            share = 1.0 - more.step_s(then) / now_s
            if share < _WORTH_A_BUDGET:
                continue
            per_batch = then[rank] - local[rank]
            num_more = per_batch / self.task.global_batch_size * held.num_samples
            size = num_more * held.sample_bytes / 2**20
            room = f"{num_more:,.0f} samples" + (f", {size:,.1f} MiB" if size > 0 else "")
            line = (
                f"rank {rank} keeps {local[rank]:.0f} of the {sizes[rank]} samples that it "
                f"computes in a step: a budget for {room} more would make a step {share:.0%} "
                "shorter"
            )
            saved.append((share, line))
        return [line for _, line in sorted(saved, reverse=True)[:_MOST_BUDGETS]]

    def details(self) -> list[str]:
        return [] if self._fit is None else describe_fit(self._fit, acts=self.is_adaptive)

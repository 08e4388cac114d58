"""The LOFT policy: observe, foretell, search, and change sizes where the forecast says it pays.

After LOFT (IEEE TCC 12(2):370-387, 2024), whose formulas are not public: the model, the search and
the rules for accepting a plan are this library's own.

``fit`` foretells what every size will cost each rank in the next interval. The plan is what makes
the expected step shortest, chance and the forecast's own errors included. A change has a price, the
dead band: what the present sizes are expected to lose against the best is added up, interval by
interval, and sizes change when the sum reaches the price. So of gains that are large and sure
enough to count no more is lost by waiting than a change costs, as with the rent of skis that one
might buy.

Sizes stay within a *trust region*: a batch is at most twice the largest that has proven itself,
and at least a quarter of the present one. A rank that grows beyond what is proven and takes longer
than foretold is held at what is proven, for a time that doubles. What ranks report is checked by
rank 0's own clock: a plan whose step is longer than any report explains, and longer than with equal
sizes or those before, is taken back at once, and ranks that grew by it are held likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    Sizes,
)
from loft_hvd.balance.policy import Allowed, Policy, Proposal, Task
from loft_hvd.balance.search import SOLVERS, least_s
from loft_hvd.codec import Count, Shape, Within
from loft_hvd.errors import ArgumentError, PlanError

__all__ = ["DEAD_BAND", "Forecast", "Loft", "LoftState", "Measured"]

DEAD_BAND = 0.01  # of the step: docs/balance.md
# Of the step, and of its own standard error: a gain that is smaller is none.
_LEAST_GAIN, _LEAST_ERRORS = 0.006, 1.1
# The trust region: a batch is at most so many times the largest proven, and at least the present
# one over so many, so a wrong forecast cannot cost more.
_GROWTH, _SHRINKING = 2, 4
_KEPT = 0.10  # of a rank's time: so near a forecast has proven itself, or within two errors
# Intervals that a rank is held at what is proven, and the most: they double each time.
_HELD, _LONGEST = 8, 4096
# Gains are promised as plans so far have kept what models said. Trust in models is that of a plan
# which kept so much of a step; and so much less or more of what they say is promised at most.
_TRUST, _LEAST_KEPT, _MOST_KEPT = 0.1, 0.3, 2.0
# Shares of the way to the best sizes by mean times, which are tried too.
_LESS = (0.5, 0.25)

# When to take a plan back: two steps differ beyond two standard errors once in 44 times.
_SIGMAS = 2.0
_MARGIN = 0.02  # of the step, beside its error
_UNEXPLAINED = 0.10  # of the step that no rank says it was busy for: then somebody's word is wrong
# Ranks and sources up to which ``explain`` proves how good sizes are: it takes 0.05 s a source.
_MOST_BOUNDED = 64, 4
# Ranks that ``explain`` names whose budget is worth enlarging, and what it must save of a step.
_MOST_BUDGETS, _WORTH_A_BUDGET = 3, 0.03

_PerRank = Annotated[list[Count], Shape("world_size")]


@dataclass(frozen=True)
class Measured:
    """Sizes, and what a step with them took."""

    sizes: Sizes
    step_s: float = float("nan")  # NaN before it was measured
    error_s: float = 0.0  # its standard error
    rest_s: float = 0.0  # of it, that no rank reported to be busy for


@dataclass(frozen=True)
class Forecast:
    """What was foretold of a plan before it came into force."""

    sizes: Sizes
    times: RankFloats  # seconds of each rank with them
    errors: RankFloats  # their standard errors
    before: Measured  # the sizes that they replaced
    gain: float = 0.0  # share of the step that the models said they would save; 0 for not said


@dataclass
class LoftState:
    """What LOFT has learnt."""

    past: Past  # of the fit
    equal: Measured  # the equal sizes of the run, as last measured
    proven: _PerRank  # largest batch of each rank that took what was foretold
    held: _PerRank  # intervals that each rank is held there
    next_held: _PerRank  # and of the next time
    forecast: Forecast | None = None  # of the newest plan; None once it was judged
    num_undone: Count = 0  # plans
    aggregate_s: float = float("nan")  # what steps lately took beyond the slowest rank
    # Of all plans in sum, as shares of a step: what models said that they save, what they saved.
    foretold: float = 0.0
    saved: float = 0.0
    # Expected, by not changing sizes so far, as a share of one interval; below the dead band.
    lost: Annotated[float, Within(0, 1)] = 0.0
    note: str = "nothing has been measured"  # why sizes are what they are

    @classmethod
    def of(cls, equal: Sizes) -> LoftState:
        """Return that of a run which begins with ``equal`` sizes."""
        ranks = len(equal)
        proven, held = list(equal), [0] * ranks
        return cls(Past.of(ranks), Measured(equal), proven, held, next_held=[_HELD] * ranks)

    @property
    def kept(self) -> float:
        """How much of what models say is promised."""
        kept = (_TRUST + self.saved) / (_TRUST + self.foretold)
        return float(np.clip(kept, _LEAST_KEPT, _MOST_KEPT))

    def hold(self, ranks: Bools) -> None:
        """Let ``ranks`` not grow beyond what is proven for a while."""
        held, longer = np.array(self.held), np.array(self.next_held)
        self.held = np.where(ranks, longer, held).tolist()
        self.next_held = np.where(ranks, np.minimum(2 * longer, _LONGEST), longer).tolist()


def _is_longer(interval: Interval, rival: Measured) -> bool:
    """Say whether a step is surely longer than it was with other sizes."""
    error_s = float(np.hypot(interval.step_error_s, rival.error_s))
    return interval.step_s - _SIGMAS * error_s > rival.step_s * (1 + _MARGIN)


def _counts(gain: Gain) -> bool:
    """Say whether a gain counts; never one that is NaN, as a model of odd times may have it."""
    return gain.share >= max(_LEAST_GAIN, _LEAST_ERRORS * gain.error)


def _why_not(best: Gain, left: Gain, bars: Sequence[str], *, lost: float, dead_band: float) -> str:
    """Say in a sentence why sizes stay.

    Args:
        best: what the best sizes known would bring.
        left: what the sizes that are left by ``bars`` would.
        bars: what bars the best ones, in plain words.
        lost: what waiting has cost so far, as a share of an interval.
        dead_band: what it may cost, likewise.
    """
    if not best.share >= _LEAST_GAIN:  # also where it is no number
        return "nothing to win: no sizes known would make the step shorter"
    others = f"other sizes should save {best.share:.1%} of the step"
    if bars:
        others += f", but are barred ({'; '.join(bars)})"
        if not left.share >= _LEAST_GAIN:
            return f"{others}, and what is left saves nothing"
        others += f"; those left should save {left.share:.1%}"
    if not _counts(left):
        return f"nothing sure to win: {others}, with a standard error of {left.error:.1%}"
    waits = max(int(np.ceil((dead_band - lost) / left.share)), 1)
    return (
        f"{others}; they are taken when waiting has cost as much as a change may, the dead band of "
        f"{dead_band:.0%} of an interval: so far it has cost {lost:.1%}, so that is about {waits} "
        "intervals away"
    )


class Loft(Policy):
    """Sizes that even out fetch and compute together.

    Args:
        dead_band: the price of a change, as a share of the step over an interval: a change is made
            once waiting should have cost as much. 0 takes any gain of 0.6 % that is above 1.1 of
            its own standard error.
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
        self._realised: float | None = None
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
        self._realised = None
        self._found: tuple[Sizes, Bounds] | None = None  # by the newest search, and its limits
        self.state = LoftState.of(equal)
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

    @property
    def realised(self) -> float | None:
        return self._realised

    def recall(self, intervals: Sequence[Interval]) -> bool:
        """Learn from other worlds; sizes that a device has computed there count as proven."""
        state = self.state
        for interval in intervals:
            self._fitter.add(interval)
            state.proven = np.maximum(state.proven, interval.sizes).tolist()
        return True

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Fit, judge the plan in force, and search for a better one."""
        del first_step
        self._realised = None
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
        state.held = [max(left - 1, 0) for left in state.held]
        undone = self._judge(interval, fit, busy_s)
        return self._search(interval, fit) if undone is None else undone

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
            found = self._choose(fit, now, self.task.bounds)
            gain = fit.gain(now, found)
            then_s, now_s = gain.then_s, gain.now_s
            is_sure = _counts(gain) and gain.share > self._dead_band
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
        before = Measured(now, interval.step_s, interval.step_error_s)
        sizes = proposal.sizes
        state.forecast = Forecast(sizes, fit.model.times(sizes), fit.stderr(sizes), before, gain)
        state.note, state.lost = proposal.reason, 0.0
        return proposal

    def _judge(self, interval: Interval, fit: Fit, busy_s: float) -> Proposal | None:
        """Compare a new plan with its forecast; return what takes it back, None where it stays.

        Ranks say that they were busy for ``busy_s`` of a step, the longest of them in each.
        """
        state, sizes = self.state, tuple(interval.sizes.tolist())
        forecast, state.forecast = state.forecast, None
        rivals = [("equal sizes", state.equal)]
        failed = np.zeros(len(sizes), bool)
        if forecast is not None and forecast.sizes == sizes:
            rivals.append(("the sizes before", forecast.before))
            self._realised = fit.saved(interval, forecast.before.sizes)
            if forecast.gain > 0:
                state.foretold += forecast.gain
                state.saved += max(self._realised, -1.0)  # whatever a rank has claimed
            errors = np.maximum(_KEPT * forecast.times, _SIGMAS * forecast.errors)
            failed = interval.valid & (interval.busy_s > forecast.times + errors)
        if sizes == state.equal.sizes:
            rest_s = max(interval.step_s - busy_s, 0.0)
            state.equal = Measured(sizes, interval.step_s, interval.step_error_s, rest_s)
        is_explained = interval.step_s <= (busy_s + state.equal.rest_s) * (1 + _UNEXPLAINED)
        worse = [] if is_explained else [each for each in rivals if _is_longer(interval, each[1])]
        for name, rival in worse:
            reason = f"undone: a step took {interval.step_s:.3g} s, but {rival.step_s:.3g} s"
            instead = self._legal(rival.sizes, f"{reason} with {name}; no rank says why")
            if instead.sizes == sizes:
                continue  # a cap has come between, and these are the nearest
            grew = np.array(sizes) > rival.sizes
            state.proven = np.where(grew, rival.sizes, state.proven).tolist()
            state.hold(grew)
            state.num_undone += 1
            state.note, state.lost = instead.reason, 0.0
            return instead
        if worse:
            return None  # neither undone nor proven
        grew = np.array(sizes) > state.proven
        state.hold(failed & grew)
        state.proven = np.where(grew & ~failed, sizes, state.proven).tolist()
        return None

    def _search(self, interval: Interval, fit: Fit) -> Proposal | None:
        """Return the best sizes known if they are worth a change."""
        state, now = self.state, interval.sizes
        if fit.is_poor.sum() > len(now) // 2:
            reason = "the times of most ranks are not known"
            if tuple(now.tolist()) == state.equal.sizes:
                state.note = f"sizes stay equal: {reason}"
                return None
            proposal = self._legal(state.equal.sizes, f"equal sizes, since {reason}")
            return self._announce(proposal, interval, fit)
        limits = self._limits(now, fit.is_poor)
        found = self._choose(fit, now, limits)
        self._found = found, limits
        best, allowed = fit.gain(now, found), self._allowed(found)
        left = fit.gain(now, allowed.sizes) if allowed.bars else best
        is_gain = _counts(left)
        state.lost = min(state.lost + left.share, 1.0) if is_gain else 0.0
        if is_gain and state.lost >= self._dead_band:
            # Errors are reasons to choose with care, but no time that the step takes.
            likely = fit.gain(now, allowed.sizes, with_errors=False)
            promised = likely.scaled(state.kept)
            reason = "; ".join((f"{promised.share:.1%} less predicted", *allowed.bars))
            proposal = Proposal(allowed.sizes, reason, promised.then_s, promised.now_s)
            return self._announce(proposal, interval, fit, gain=likely.share)
        state.note = _why_not(best, left, allowed.bars, lost=state.lost, dead_band=self._dead_band)
        return None

    def _choose(self, fit: Fit, now: Ints, limits: Bounds) -> Sizes:
        """Return the sizes with which a step should take least, of a few that are near the best.

        The search evens out mean times, and knows nothing of chance. Sizes far off may make ranks
        as long as others whose times vary much: then less is more. And a rank of which less is
        known may have to get less.
        """
        task, model = self.task, fit.model
        solve, total = SOLVERS[self._solver], task.global_batch_size
        found = solve(model, total, limits)
        step = np.array(found) - now
        error = fit.stderr(found) / np.maximum(model.times(found), 1e-9)
        others = [
            solve(model.slower(1.0 + error, 1.0 + error), total, limits),
            *(task.rounded(now + share * step) for share in _LESS),
            self.state.equal.sizes,
        ]
        legal = [sizes for sizes in others if limits.allow(sizes).all()]
        return min((found, *legal), key=lambda sizes: fit.promise(sizes)[0])

    def _limits(self, now: Ints, is_poor: Bools) -> Bounds:
        """Return the bounds of the next sizes: no rank far from what it has proven.

        Ranks whose times are not known stay at their equal share, or a grain beside it. All
        [world_size].
        """
        bounds, state = self.task.bounds, self.state
        equal, grain, proven = np.array(state.equal.sizes), bounds.grain, np.array(state.proven)
        times = np.where(np.array(state.held) > 0, 1, _GROWTH)
        most = np.where(is_poor, -(-equal // grain) * grain, np.maximum(times * proven, equal))
        least = np.where(is_poor, equal, np.minimum(now // _SHRINKING, equal)) // grain * grain
        # The present sizes are legal, whatever was proven: some must be.
        low = np.minimum(np.maximum(bounds.floor, least), now)
        high = np.minimum(np.maximum(most, now), bounds.cap)
        return Bounds(np.minimum(low, high), high, grain)

    def explain(self) -> list[str]:
        state = self.state
        lines = [f"policy {self.name}: {state.note}"]
        if self._fit is not None:
            lines.append(summarise_fit(self._fit))
        lines += self._say_bound() + self._say_kept() + self._say_budgets()
        if state.foretold > 0:
            lines.append(
                f"plans so far saved {state.saved:.1%} of a step in sum, where models had said "
                f"{state.foretold:.1%}: {state.kept:.2f} times what they say is promised"
            )
        if state.num_undone:
            lines.append(f"{state.num_undone} plans made steps longer and were undone")
        lines += [
            f"rank {rank} has at most {max(state.proven[rank], state.equal.sizes[rank])} samples "
            f"for {left} more intervals: with more, steps were longer than its times foretold"
            for rank, left in enumerate(state.held)
            if left
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

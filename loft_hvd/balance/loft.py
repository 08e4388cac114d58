"""The LOFT policy: observe, fit, search, accept past a dead band, plan.

After LOFT (IEEE TCC 12(2):370-387, 2024), whose formulas are not public: the model, the search and
the rules for accepting a plan are this library's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.explain import describe_fit
from loft_hvd.balance.fit import Fit, Fitter
from loft_hvd.balance.guard import Forecast, Guard
from loft_hvd.balance.interval import Interval
from loft_hvd.balance.policies import Proposal, Task
from loft_hvd.balance.search import SOLVERS, Bounds, round_to_lattice
from loft_hvd.errors import ArgumentError

__all__ = ["Loft"]

_EARLY = 3  # times the dead band: what the first interval alone must promise
_GROWTH = 2  # a batch is at most this many times the largest one proven
_SHRINKING = 4  # and at least the present one over this
_SMALL = 0.25  # of the dead band: a smaller gain is taken when it has lasted
_PATIENCE = 3  # intervals that a small gain must last
_SIGMAS = 2.0
_PROBE_AFTER = 4  # intervals that a rank must have been slowest without a remedy


class Loft:
    """Sizes that even out fetch and compute together.

    Args:
        dead_band: predicted gain, as a share of the step, that a change must bring at once; a
            quarter of it must have lasted for three intervals. 0 takes any gain.
        solver: "grid" (LOFT's adaptive grid search) or "exact" (bisection).
        source: number of the shared source each rank fetches from, -1 for none, [world_size].
        hits: samples of a global batch that each rank holds, if known, [world_size].
        acts: False only fits and explains, and never changes a size (policy "report").
    """

    def __init__(
        self,
        *,
        dead_band: float = 0.03,
        solver: str = "grid",
        source: npt.ArrayLike = -1,
        hits: npt.ArrayLike = np.nan,
        acts: bool = True,
    ) -> None:
        if solver not in SOLVERS or not 0 <= dead_band < 1:
            raise ArgumentError(
                f"Loft: solver={solver!r} must be one of {sorted(SOLVERS)}, and "
                f"dead_band={dead_band} in [0, 1)"
            )
        self.name = "loft" if acts else "report"
        self._dead_band, self._solver, self._acts = dead_band, solver, acts
        self._source, self._hits = source, hits

    def start(self, task: Task) -> tuple[int, ...]:
        """Return equal sizes: LOFT acts after the first fit."""
        self._task = task
        self._fitter = Fitter(task.world_size, source=self._source, hits=self._hits)
        self._guard = Guard(task.equal())
        self._fit: Fit | None = None
        self._aggregate_s = float("nan")
        self._forecast: Forecast | None = None
        self._before = self._guard.equal  # sizes in force when the forecast was made
        self._equal_model_s = float("nan")  # predicted when equal sizes were measured
        self._lasted, self._stuck, self._probe_after = 0, 0, _PROBE_AFTER
        self._note = "no times yet"
        return self._guard.equal

    def recall(self, intervals: Sequence[Interval]) -> None:
        """Learn from what was measured of these ranks' devices before, in other worlds.

        Sizes that a device has computed count as proven.
        """
        for interval in intervals:
            self._fitter.add(interval)
            self._guard.proven = np.maximum(self._guard.proven, interval.sizes).tolist()

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Fit, judge the plan in force, and search for a better one."""
        del first_step
        self._fitter.add(interval)
        fit = self._fitter.fit()
        if fit is None or not interval.valid.any():
            return None
        left_over = max(interval.step_s - float(interval.busy_s.max()), 0.0)
        first = np.isnan(self._aggregate_s)
        self._aggregate_s += 0.0 if first else 0.3 * (left_over - self._aggregate_s)
        self._aggregate_s = left_over if first else self._aggregate_s
        self._fit = replace(fit, model=replace(fit.model, aggregate_s=self._aggregate_s))
        if not self._acts:
            self._note = "sizes are not changed: the policy only reports"
            return None
        verdict = self._judge(interval, self._fit)
        now = tuple(interval.sizes.tolist())
        if verdict is not None:
            return self._announce(verdict, now)
        if self._guard.pause > 0:
            self._guard.pause = max(self._guard.pause - 1, 0)
            return None
        return self._announce(self._search(interval, self._fit), now)

    def _announce(self, proposal: Proposal | None, now: tuple[int, ...]) -> Proposal | None:
        if proposal is not None and self._fit is not None:
            self._before = now
            self._forecast = Forecast(proposal.sizes, self._fit.model.times(proposal.sizes))
            self._note, self._lasted = proposal.reason, 0
        return proposal

    def _judge(self, interval: Interval, fit: Fit) -> Proposal | None:
        guard, sizes = self._guard, tuple(interval.sizes.tolist())
        equal_s = fit.model.step_s(guard.equal)
        if sizes == guard.equal:
            on_trial = guard.on_trial
            self._equal_model_s = equal_s
            if guard.measure_equal(interval) and on_trial is not None:
                guard.passed(np.array(on_trial[0]))
                return Proposal(on_trial[0], "equal sizes were no better: the cluster has changed")
            return None
        # The controller may have put nearby sizes into force instead of those proposed.
        is_new = self._forecast is not None and sizes != self._before
        forecast = self._forecast
        if forecast is None or forecast.sizes != sizes:
            forecast = Forecast(sizes, fit.model.times(sizes))
        drift = equal_s / self._equal_model_s if self._equal_model_s > 0 else 1.0
        if guard.is_worse(interval, is_new=is_new, drift=min(drift, 4.0)):
            guard.undo(interval, forecast)
            reason = (
                f"undone: a step took {interval.step_s:.3g} s, but {guard.equal_s:.3g} s with "
                "equal sizes"
            )
            return Proposal(guard.equal, reason)
        guard.passed(interval.sizes)
        self._forecast = None
        return None

    def _search(self, interval: Interval, fit: Fit) -> Proposal | None:
        guard, task = self._guard, self._task
        equal, now = np.array(guard.equal), interval.sizes
        held = fit.is_poor.copy()
        held[guard.pinned] = True
        if held.sum() > len(held) // 2:
            self._note = "equal sizes: the times of most ranks fit no model"
            is_equal = tuple(now.tolist()) == guard.equal
            return None if is_equal else Proposal(guard.equal, self._note)
        bounds = task.bounds
        cap = np.minimum(bounds.cap, np.maximum(_GROWTH * np.array(guard.proven), equal))
        grain = bounds.grain
        shrunk = np.minimum(now // _SHRINKING, equal) // grain * grain
        floor = np.maximum(bounds.floor, shrunk)
        low = np.where(held, equal // grain * grain, floor)
        high = np.where(held, np.minimum(-(-equal // grain) * grain, bounds.cap), cap)
        limits = Bounds(np.minimum(low, high), high, grain)
        found = SOLVERS[self._solver](fit.model, task.global_batch_size, limits)
        if guard.scale < 1.0:
            found = task.rounded(now + guard.scale * (np.array(found) - now))
        now_s, then_s = fit.model.step_s(now), fit.model.step_s(found)
        slowest = int(np.argmax(fit.model.times(now)))
        error_s = float(fit.stderr(now)[slowest])
        gain = 1.0 - then_s / now_s
        is_clear = now_s - then_s > _SIGMAS * error_s
        lasts = is_clear and gain > _SMALL * self._dead_band
        self._lasted = self._lasted + 1 if lasts else 0
        needed = self._dead_band * (_EARLY if fit.num_rows.max() < 2 else 1)
        if is_clear and (gain > needed or self._lasted >= _PATIENCE):
            self._probe_after = _PROBE_AFTER
            return Proposal(found, f"{gain:.1%} less predicted", then_s, now_s)
        self._note = (
            f"nothing to win: the best sizes known would save {max(gain, 0.0):.1%}, the dead band "
            f"is {self._dead_band:.0%}"
        )
        return self._probe(interval, fit, limits)

    def _probe(self, interval: Interval, fit: Fit, limits: Bounds) -> Proposal | None:
        """Relieve a rank that stays slowest although its batch is thought not to matter.

        The belief may come from a time in which the rank was changing; an eighth less shows. When
        nothing came of it, the next try waits twice as long.
        """
        busy, now = interval.busy_s, interval.sizes
        slowest = int(np.argmax(busy))
        others = np.delete(busy, slowest)[np.delete(interval.valid, slowest)]
        is_stuck = len(others) and busy[slowest] > (1 + 2 * self._dead_band) * others.max()
        self._stuck = self._stuck + 1 if is_stuck else 0
        if self._stuck < self._probe_after:
            return None
        wanted = now.astype(np.float64)
        wanted[slowest] *= 0.875
        wanted *= now.sum() / wanted.sum()
        cap = limits.cap.copy()
        eased = min(int(wanted[slowest]), cap[slowest])
        cap[slowest] = eased // limits.grain * limits.grain
        lowered, total = replace(limits, cap=cap), int(now.sum())
        if cap[slowest] >= now[slowest] or not lowered.admits(total):
            return None
        sizes = round_to_lattice(wanted, total, lowered)
        self._stuck, self._probe_after = 0, min(2 * self._probe_after, 64)
        return Proposal(sizes, f"rank {slowest} stays slowest: does it depend on its batch?")

    def explain(self) -> list[str]:
        """Say what the models are, what they cannot tell, and what the last decision was."""
        guard = self._guard
        lines = [f"policy {self.name}: {self._note}"]
        if self._fit is not None:
            lines += describe_fit(self._fit, acts=self._acts)
        if guard.num_misses:
            lines.append(f"{guard.num_misses} plans were worse than equal sizes and undone")
        lines += [
            f"rank {rank} is pinned at its equal share of {guard.equal[rank]}: plans that trusted "
            "its times were worse than equal sizes"
            for rank in guard.pinned
        ]
        return lines

    @property
    def fit(self) -> Fit | None:
        """The newest models, or None before the first interval."""
        return self._fit

    def state_dict(self) -> dict[str, Any]:
        """Return rows, verdicts and the plan under watch, JSON-able."""
        forecast = self._forecast
        return {
            "fitter": self._fitter.state_dict(),
            "guard": self._guard.state_dict(),
            "aggregate_s": self._aggregate_s if self._aggregate_s >= 0 else -1.0,
            "equal_model_s": self._equal_model_s if self._equal_model_s >= 0 else -1.0,
            "forecast": None if forecast is None else [forecast.sizes, forecast.times.tolist()],
            "before": self._before,
            "lasted": [self._lasted, self._stuck, self._probe_after],
            "note": self._note,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self._fitter.load_state_dict(state["fitter"])
        self._guard = Guard.from_state_dict(state["guard"])
        self._aggregate_s, self._equal_model_s = (
            state[name] if state[name] >= 0 else float("nan")
            for name in ("aggregate_s", "equal_model_s")
        )
        forecast = state["forecast"]
        if forecast is not None:
            self._forecast = Forecast(tuple(forecast[0]), np.array(forecast[1]))
        self._before = tuple(state["before"])
        self._lasted, self._stuck, self._probe_after = state["lasted"]
        self._note = str(state["note"])

"""The policy of ``Balancer("auto")``: the global batch and its shares, chosen together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loft_hvd.balance.fit import Fit
from loft_hvd.balance.goodput import BatchWorth, GradientNoise, candidates, weigh
from loft_hvd.balance.interval import Interval
from loft_hvd.balance.latency import Held
from loft_hvd.balance.plan import Bounds, Sizes
from loft_hvd.balance.policy import Allowed, Policy, Proposal, Task
from loft_hvd.balance.search import SOLVERS, round_to_lattice
from loft_hvd.codec import Count, decode, encode
from loft_hvd.errors import PlanError

__all__ = ["AutoBatch"]

_KEPT = 16  # intervals from which shares are known when the global batch changes
_GROWTH = 2.0  # on the largest batch that a rank has computed, where its memory is unknown


@dataclass
class AutoState:
    """What is learnt of the global batch."""

    global_batch_size: Count
    seen: list[Count]  # global batches that have been measured
    lost: float = 0.0  # surely, by not changing it so far, as a share of one interval
    shares: dict[str, Any] | None = None  # the state of the policy that shares it out
    note: str = "nothing has been measured"


class AutoBatch(Policy):
    """Lets the global batch follow the gradients' noise, and another policy share it out.

    Args:
        make: makes the policy for the shares of one global batch.
        least: fewest samples of a global batch.
        most: most samples of it.
        dead_band: what a change may cost, as a share of one interval.
    """

    name = "auto"
    state: AutoState

    def __init__(
        self, make: Callable[[], Policy], *, least: int, most: int, dead_band: float
    ) -> None:
        self._make, self.least = make, least
        self.most: int = most
        self._dead_band = dead_band
        self._allowed: Callable[[Sizes], Allowed] = Allowed
        self._told: Sequence[int] = ()
        self._held: Held | None = None
        self._noise: GradientNoise | None = None
        self._realised: float | None = None
        self._intervals: deque[Interval] = deque(maxlen=_KEPT)

    @property
    def text(self) -> str:
        return f"auto, {self.least} to {self.most}"

    @property
    def fit(self) -> Fit | None:
        return self._shares.fit

    @property
    def realised(self) -> float | None:
        return self._realised

    def share_sources(self, source: Sequence[int]) -> None:
        self._told = source
        self._shares.share_sources(source)

    def share_held(self, held: Held) -> None:
        self._held = held
        self._shares.share_held(held)

    def share_bars(self, allowed: Callable[[Sizes], Allowed]) -> None:
        self._allowed = allowed
        self._shares.share_bars(allowed)

    def share_noise(self, noise: GradientNoise | None) -> None:
        self._noise = noise

    def start(self, task: Task) -> Sizes:
        self._intervals.clear()
        self.state = AutoState(task.global_batch_size, [])
        return self._share_out(task)

    def _share_out(self, task: Task) -> Sizes:
        """Begin with another global batch: what was measured of its ranks stays."""
        self.task, self._shares = task, self._make()
        sizes = self._shares.start(task)
        self._shares.share_bars(self._allowed)
        if self._told:
            self._shares.share_sources(self._told)
        if self._held is not None:
            self._shares.share_held(self._held)
        self._shares.recall(list(self._intervals))
        return sizes

    def recall(self, intervals: Sequence[Interval]) -> bool:
        self._intervals.extend(intervals)
        return self._shares.recall(intervals)

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Choose another global batch where that is worth it, else let the shares be chosen."""
        self._realised = None
        state, total = self.state, int(interval.sizes.sum())
        if total != state.global_batch_size:
            return None  # of a plan before, or of a quarantine
        self._intervals.append(interval)
        if total not in state.seen:
            state.seen.append(total)
        proposal = self._shares.propose(interval, first_step=first_step)
        self._realised = self._shares.realised
        best = self._best(interval)
        if best is None:
            return proposal
        worth, sizes, is_known = best
        if not worth.sure > 0:
            state.lost = 0.0
            state.note = (
                f"the global batch stays at {total}: {worth.global_batch_size} would bring "
                f"{worth.share:+.1%} (+- {2 * worth.error:.1%}) of progress a second"
            )
            return proposal
        state.lost += worth.sure
        if state.lost < self._dead_band:
            state.note = (
                f"{worth.global_batch_size} samples a step would surely bring {worth.sure:.1%} of "
                f"progress a second: waiting has cost {state.lost:.1%} of an interval so far"
            )
            return proposal
        state.note = (
            f"global batch {total} -> {worth.global_batch_size}: {worth.share:.1%} more progress "
            f"a second {'predicted' if is_known else 'at best: what a step takes is to be seen'}"
        )
        self._change(worth.global_batch_size)
        return Proposal(sizes, state.note)

    def _change(self, total: int) -> None:
        assert self.task is not None
        self.state = replace(self.state, global_batch_size=total, lost=0.0, shares=None)
        self._share_out(replace(self.task, global_batch_size=total))

    def _best(self, interval: Interval) -> tuple[BatchWorth, Sizes, bool] | None:
        """Return the best other global batch, its sizes, and whether what it takes is known."""
        noise, fit, now = self._noise, self._shares.fit, tuple(interval.sizes.tolist())
        if noise is None or not interval.step_s > 0:
            self.state.note = "the global batch stays: the gradients' noise is not known so far"
            return None
        is_known = len(self.state.seen) > 1 and fit is not None and not fit.is_poor.any()
        found: list[tuple[BatchWorth, Sizes, bool]] = []
        for total in candidates(sum(now), self.least, self.most):
            sizes = self._sizes(total, interval, fit if is_known else None)
            if sizes is None:
                continue
            if is_known and fit is not None:
                gain = fit.gain(now, sizes)
                times = {"now_s": gain.now_s, "then_s": gain.then_s, "error_s": gain.error_s}
            elif total < sum(now):
                continue
            else:  # at best, a larger one takes no longer: one interval shows what it takes
                times = {"now_s": interval.step_s, "then_s": interval.step_s, "error_s": 0.0}
            found.append((weigh(noise, sum(now), total, **times), sizes, is_known))
        return max(found, key=lambda each: each[0].share, default=None)

    def _sizes(self, total: int, interval: Interval, fit: Fit | None) -> Sizes | None:
        """Return the sizes of another global batch; None where limits leave none."""
        assert self.task is not None
        bounds = self.task.bounds
        largest = np.max([each.sizes for each in self._intervals], axis=0)
        cap = np.minimum(bounds.cap, np.maximum(_GROWTH * largest, 1).astype(np.int64))
        within = Bounds(np.minimum(bounds.floor, cap), cap, bounds.grain)
        try:
            if fit is None:
                wanted = interval.sizes * (total / interval.sizes.sum())
                sizes = round_to_lattice(wanted, total, within)
            else:
                sizes = SOLVERS["exact"](fit.model, total, within)
        except PlanError:
            return None
        return None if self._allowed(sizes).bars else sizes

    def explain(self) -> list[str]:
        return [self.state.note, *self._shares.explain()]

    def details(self) -> list[str]:
        return self._shares.details()

    def state_dict(self) -> dict[str, Any]:
        return encode(replace(self.state, shares=self._shares.state_dict()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.task is not None
        loaded = decode(AutoState, state, what=f"policy {self.name}")
        self._intervals.clear()
        self._share_out(replace(self.task, global_batch_size=loaded.global_batch_size))
        if loaded.shares is not None:
            self._shares.load_state_dict(loaded.shares)
        self.state = loaded

"""The decisions of rank 0: intervals in, numbered plans out. Pure: no ranks, no clock.

The controller hands what ranks report to a policy, numbers the plans that come back, and can say
and repeat what it did. Who exchanges and screens the times and broadcasts the plan is the
balancer's business; in the simulator it is the scenario's.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from loft_hvd.balance.interval import Interval
from loft_hvd.balance.leaving import Leaving, LeavingState
from loft_hvd.balance.plan import (
    MIN_BATCH,
    Bounds,
    Plan,
    QuarantineSizes,
    Rank,
    Sizes,
    check_history,
    check_sizes,
    choose_used,
)
from loft_hvd.balance.policies import make_policy
from loft_hvd.balance.policy import Allowed, Policy, Proposal, Task
from loft_hvd.balance.search import round_to_lattice
from loft_hvd.codec import Count, decode, encode
from loft_hvd.errors import ArgumentError, PlanError
from loft_hvd.files import write_whole

__all__ = ["SETTLE_STEPS", "Controller", "ControllerState", "Decision", "write_decisions"]

_logger = logging.getLogger(__name__)

SETTLE_STEPS = 3  # the first steps of a run, and of a plan, are slower than the rest

# A rank whose memory is unknown stays at its first size so long: a batch that has been computed
# twice fits, while the largest one that fits is known only once it was too large.
_WARM_UP_INTERVALS = 2

_BAR_OF_CAPS = "no rank above its cap"


@dataclass(frozen=True)
class Decision:
    """A plan and why it was made: one line of ``plans.jsonl``."""

    plan_id: Count
    first_step: Count
    sizes: Sizes
    reason: str  # in plain words
    predicted_s: float | None = None  # of a step with it; None when not predicted
    predicted_gain: float | None = None  # share of the step that it should save; None likewise
    measured_s: float | None = None  # of a step before it, by rank 0's clock; None when not known
    # Share of the step that it saved in its first interval, against the sizes before it at the
    # ranks' speeds of then, by the policy's models; None when that was not found out.
    realised_gain: float | None = None

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return Plan(self.plan_id, self.first_step, self.sizes)


def write_decisions(path: str | os.PathLike[str], decisions: Iterable[Decision]) -> None:
    """Write decisions, one JSON object a line; ``Replay`` reads them."""
    text = "".join(json.dumps(asdict(made)) + "\n" for made in decisions)
    write_whole(path, text, what="the plans")


@dataclass(frozen=True)
class MadeFor:
    """What a controller's state is of."""

    world_size: int
    global_batch_size: int  # of the newest plan, where the policy chooses it
    policy: str


@dataclass(frozen=True)
class ControllerState:
    """What a controller goes on from."""

    made_for: MadeFor
    history: list[Decision]  # of all plans, the newest last
    num_intervals: Count
    quarantine: QuarantineSizes
    discarded: list[tuple[Rank, str, Count]]  # rank, reason and number of reports not believed
    learnt: dict[str, Any]  # the policy's state
    leaving: LeavingState | None = None  # where ranks may be left out

    def __post_init__(self) -> None:
        check_history([made.plan for made in self.history])
        num_ranks = self.made_for.world_size
        if self.leaving is not None and len(self.leaving.waits) != num_ranks:
            raise PlanError(
                f"leaving has {len(self.leaving.waits)} ranks, but the state is of {num_ranks}"
            )
        before = self.quarantine.before
        for sizes in (self.history[-1].sizes, *([] if before is None else [before])):
            check_sizes(
                sizes,
                world_size=self.made_for.world_size,
                global_batch_size=self.made_for.global_batch_size,
                what="sizes",
            )


class Controller:
    """Observes intervals and decides plans; lives on rank 0.

    Args:
        global_batch_size: samples of all ranks in one backward pass.
        world_size: number of ranks.
        policy: a name of ``POLICIES``, every rank's samples, or a policy object.
        min_batch: least samples of a rank (the accuracy guard); 0 where a rank may have none; as
            all numbers here, checked where a user gives it.
        max_batch: most samples of a rank (its memory): one number, one a rank (None for no
            limit), or None.
        grain: sizes are multiples of this, but for one rank when the global batch is not.
        settle_steps: first steps of a plan that should not be counted (see ``is_settled``).
        max_sizes: distinct sizes that a rank may have in a run, from then on the nearest of those
            it has had; None for any number.

        pass_caps: most samples of one backward pass of each rank, where ``max_batch`` is that of
            all its micro-batches, [world_size]; None where a rank computes its share in one.
        first_sizes: sizes to start from in place of the policy's own, or the nearest legal ones,
            [world_size]; none where empty.

    Raises:
        PlanError: no sizes within the bounds add up to ``global_batch_size``.
        ArgumentError: ``max_batch`` is a list for another number of ranks.
    """

    def __init__(
        self,
        global_batch_size: int,
        world_size: int,
        policy: str | Sequence[int] | Policy = "loft",
        *,
        min_batch: int = MIN_BATCH,
        max_batch: int | Sequence[int | None] | None = None,
        grain: int = 1,
        settle_steps: int = SETTLE_STEPS,
        max_sizes: int | None = None,
        pass_caps: Sequence[int | None] | None = None,
        first_sizes: Sizes = (),
    ) -> None:
        policy = make_policy(policy)
        most = policy.most or global_batch_size
        caps = [max_batch] * world_size if isinstance(max_batch, int | None) else list(max_batch)
        if len(caps) != world_size:
            raise ArgumentError(
                f"Controller: max_batch={caps} has {len(caps)} entries for {world_size} ranks"
            )
        highest = [most if cap is None else min(cap, most) for cap in caps]
        # With 0 a rank may have no samples, but no fewer than usual if it has any.
        floor = min_batch or max(min(MIN_BATCH, global_batch_size // world_size), 1)
        bounds = Bounds.of(world_size, floor=floor, cap=highest, grain=grain)
        self._bounds = bounds  # of ranks that have samples
        self.leaving = None if min_batch or policy.most else Leaving(world_size)
        self.task = Task(global_batch_size, bounds, pass_caps)
        self.policy = policy
        self.settle_steps, self.max_sizes = settle_steps, max_sizes
        sizes, why = self.policy.start(self.task), f"start: {self.policy.name}"
        if first_sizes and sum(first_sizes) == global_batch_size:
            sizes, why = self._legal_first(first_sizes), f"{why}, from sizes given or by memory"
        self.history = [Decision(0, 0, sizes, why)]
        self.discarded: Counter[tuple[int, str]] = Counter()
        self._is_capped = [True] * world_size
        self.policy.share_bars(self.allowed)
        self.quarantine = QuarantineSizes()
        self._num_intervals = 0
        self._hindrance: str | None = None  # no legal sizes, or a bar: of the newest interval
        self._interval: Interval | None = None
        self.judged: Decision | None = None  # of which the newest interval showed what it saved
        self._unsent: Decision | None = None  # of a loaded state, whose plan no rank had by then

    def _legal_first(self, wanted: Sizes) -> Sizes:
        """Return the legal sizes nearest to those to start from."""
        bounds = self.task.bounds
        is_whole = sum(size % bounds.grain > 0 for size in wanted) <= 1  # one carries the rest
        if is_whole and bounds.allow(wanted).all():
            return wanted
        return self.task.rounded(np.array(wanted, dtype=np.float64))

    @property
    def plan(self) -> Plan:
        """The newest plan."""
        return self.history[-1].plan

    def plan_at(self, step: int) -> Plan:
        """Return the plan in force at a step, counted over epochs."""
        return next(made.plan for made in reversed(self.history) if made.first_step <= step)

    def warm_up(self, is_capped: Sequence[bool]) -> None:
        """Keep ranks at their first size, or below, until two intervals have been seen.

        Those that ``is_capped`` [world_size] may grow at once: what their memory holds is known.
        """
        self._is_capped = list(is_capped)

    def recall(self, intervals: Sequence[Interval]) -> None:
        """Show the policy what was measured of these ranks' devices before, if it can use it.

        A rank of which two intervals are known does not need to warm up.
        """
        if intervals and self.policy.recall(intervals):
            num_known = np.sum([interval.valid for interval in intervals], axis=0)
            self._is_capped = ((num_known >= _WARM_UP_INTERVALS) | self._is_capped).tolist()

    def is_settled(self, step: int) -> bool:
        """Whether a step's times count: the first steps at new sizes are slower than the rest."""
        plan = self.plan_at(step)  # of plan 0 nothing is new but the run: all count
        return plan.plan_id == 0 or step >= plan.first_step + self.settle_steps

    def observe(self, interval: Interval) -> None:
        """Take in what every rank measured in an interval, as screened."""
        for reason, ranks in interval.discarded.items():
            self.discarded.update((rank, reason) for rank in ranks)
        self._num_intervals += 1
        self._interval = interval

    def decide(self, step: int) -> Plan | None:
        """Return a plan to come into force at ``step``, or None to keep the one that is.

        Each interval is used once; while an older plan is still on its way into force, or nothing
        was observed since the last call, nothing is decided.
        """
        interval, self._interval = self._interval, None
        self.judged = None
        if interval is not None:
            self._hindrance = None
        if interval is not None and self._unsent is not None:  # the policy counts on it
            made, self._unsent = replace(self._unsent, first_step=step), None
            return self._add(made)
        if interval is None or self.plan_at(interval.step) != self.plan:
            return None
        if self.quarantine.is_active:  # the policy waits: it knows nothing of quarantines
            return self._plan_quarantine(step)
        proposal = self._propose(interval, step)
        if self.policy.realised is not None:
            self.history[-1] = replace(self.history[-1], realised_gain=self.policy.realised)
            self.judged = self.history[-1]
        if (other := self._consider_leaving(interval, step)) is not None:
            return other
        if proposal is None or proposal.sizes == self.plan.sizes:
            return None
        allowed = self.allowed(proposal.sizes)
        if allowed.bars:
            proposal = Proposal(allowed.sizes, "; ".join((proposal.reason, *allowed.bars)))
        if proposal.sizes == self.plan.sizes:
            self._hindrance = f"no new plan at step {step}, sizes stay: {proposal.reason}"
            return None
        then_s, now_s = proposal.predicted_s, proposal.instead_of_s
        is_predicted = then_s > 0 and now_s > 0
        return self._add(
            Decision(
                self.plan.plan_id + 1,
                step,
                proposal.sizes,
                proposal.reason,
                predicted_s=then_s if is_predicted else None,
                predicted_gain=1.0 - then_s / now_s if is_predicted else None,
                measured_s=interval.step_s if interval.step_s > 0 else None,
            )
        )

    def _add(self, made: Decision) -> Plan:
        self.history.append(made)
        self.task = replace(self.task, global_batch_size=sum(made.sizes))
        self._restrict(made.sizes)
        return made.plan

    def take_caps(
        self, caps: Sequence[int | None], *, pass_caps: Sequence[int | None] | None
    ) -> None:
        """Take the most samples that ranks' memory holds by now, [world_size]; None: no limit."""
        total, bounds = self.policy.most or self.task.global_batch_size, self._bounds
        cap = np.array([total if each is None else min(each, total) for each in caps], np.int64)
        # What is in force has been computed.
        cap = np.maximum(cap, np.maximum(bounds.floor, self.plan.sizes))
        self._bounds = Bounds(bounds.floor, cap, bounds.grain)
        within = cap if self.leaving is None else np.where(self.task.bounds.cap > 0, cap, 0)
        limits = Bounds(self.task.bounds.floor, within, bounds.grain)
        self.task = self.policy.task = replace(self.task, bounds=limits, pass_caps=pass_caps)

    def _restrict(self, sizes: Sizes) -> None:
        """Let the policy plan for the ranks that have samples; it knows nothing of others."""
        if self.leaving is None or self.quarantine.is_active:
            return
        bounds = self._bounds.only(np.array(sizes) > 0)
        self.task = self.policy.task = replace(self.task, bounds=bounds)

    def _consider_leaving(self, interval: Interval, step: int) -> Plan | None:
        """Return a plan for other ranks than those that have samples now, or None."""
        leaving, fit = self.leaving, self.policy.fit
        if leaving is None or fit is None or self._num_intervals < _WARM_UP_INTERVALS:
            return None
        largest = np.max([made.sizes for made in self.history], axis=0)
        try:
            found = leaving.consider(interval, fit, self._bounds, largest=largest)
            if found is None:
                return None
            self._restrict(found.sizes)
            allowed = self.allowed(found.sizes)
        except PlanError as error:  # must not end training
            self._hindrance = f"no rank is left out or comes back at step {step}: {error}"
            self._restrict(self.plan.sizes)
            return None
        if allowed.sizes == self.plan.sizes:
            self._restrict(self.plan.sizes)
            return None
        return self._add(
            Decision(
                self.plan.plan_id + 1,
                step,
                allowed.sizes,
                "; ".join((found.reason, *allowed.bars)),
                predicted_s=found.then_s,
                predicted_gain=1.0 - found.then_s / found.now_s,
                measured_s=interval.step_s if interval.step_s > 0 else None,
            )
        )

    def _propose(self, interval: Interval, step: int) -> Proposal | None:
        """Ask the policy; one that finds no legal sizes must not end training: sizes stay."""
        try:
            return self.policy.propose(interval, first_step=step)
        except PlanError as error:
            self._hindrance = f"no new plan at step {step}, sizes stay: {error}"
            _logger.warning("policy %s: %s", self.policy.name, self._hindrance)
            return None

    def _plan_quarantine(self, step: int) -> Plan | None:
        sizes = self.quarantine.next_sizes(self.plan.sizes, self.task.bounds)
        if sizes is None:
            return None
        reason = "no samples for ranks in quarantine" if 0 in sizes else "as before the quarantine"
        legal = self._within_caps(sizes)
        if legal == self.plan.sizes:
            return None
        reason += "" if legal == sizes else f"; {_BAR_OF_CAPS}"
        return self._add(Decision(self.plan.plan_id + 1, step, legal, reason))

    def allowed(self, wanted: Sizes) -> Allowed:
        """Return the sizes that may come into force now in place of ``wanted``, and why."""
        sizes, bars = wanted, []
        for restrict, bar in (
            (self._within_caps, _BAR_OF_CAPS),
            (self._while_warm, "warm-up: no rank above its first size before two intervals"),
            (self._with_few_sizes, f"no rank may have more sizes than max_sizes={self.max_sizes}"),
        ):
            legal = restrict(sizes)
            if legal != sizes:
                sizes = legal
                bars.append(bar)
        return Allowed(sizes, tuple(bars))

    def _within_caps(self, sizes: Sizes) -> Sizes:
        """Replace sizes beyond a cap by the nearest legal ones.

        A state may be of a run with higher caps: policies and quarantines remember its sizes.
        """
        if (np.array(sizes) <= self.task.bounds.cap).all():
            return sizes
        return round_to_lattice(np.array(sizes, np.float64), sum(sizes), self.task.bounds)

    def _while_warm(self, sizes: Sizes) -> Sizes:
        """Hold ranks whose memory is unknown at their first size in the first intervals."""
        if self._num_intervals >= _WARM_UP_INTERVALS:
            return sizes
        first, bounds = np.array(self.history[0].sizes), self.task.bounds
        cap = np.where(self._is_capped, bounds.cap, first)
        if (np.array(sizes) <= cap).all():
            return sizes
        held = Bounds(np.minimum(bounds.floor, cap), cap, bounds.grain)
        wanted = np.array(sizes, dtype=np.float64)
        return round_to_lattice(wanted, sum(sizes), held)

    def _with_few_sizes(self, sizes: Sizes) -> Sizes:
        """Replace sizes that would be too many for a rank by the nearest that it has had."""
        if self.max_sizes is None:
            return sizes
        used = [made.sizes for made in self.history]
        return choose_used(sizes, used, max_sizes=self.max_sizes, bounds=self.task.bounds)

    def send_again_after(self, plan_id: int) -> None:
        """Have a plan that never reached the ranks come with the next interval.

        A state was saved while it was on its way. One beyond limits found since is dropped.
        """
        unsent = [made for made in self.history if made.plan_id > plan_id]
        self.history = [made for made in self.history if made.plan_id <= plan_id]
        caps = self.task.bounds.cap.tolist()
        fitting = [
            made
            for made in unsent
            if all(size <= cap for size, cap in zip(made.sizes, caps, strict=True))
        ]
        self._unsent = fitting[0] if fitting else None

    def know(self, plans: Sequence[Plan]) -> None:
        """Go on from the plans that ranks have, which may not all be this controller's own."""
        made = {each.plan: each for each in self.history}
        self.history = [
            made.get(plan, Decision(**plan.fields(), reason="of an earlier run")) for plan in plans
        ]
        self._restrict(self.plan.sizes)

    def explain(self, *, verbose: bool = False) -> str:
        """Say in plain words what is planned, why, and what was not believed.

        ``verbose`` adds what the policy knows of each rank.
        """
        made = self.history[-1]
        line = (
            f"plan {made.plan_id} from step {made.first_step}: sizes {list(made.sizes)} of "
            f"global_batch_size={sum(made.sizes)} ({made.reason})"
        )
        if made.predicted_s is not None and made.predicted_gain is not None:
            line += f"; a step should take {made.predicted_s:.3g} s, {made.predicted_gain:.1%} less"
        if made.realised_gain is not None:
            line += f"; in its first interval it saved {made.realised_gain:.1%}"
        lines = [line, *self.policy.explain(), *(self.policy.details() if verbose else [])]
        lines += [self.leaving.note] if self.leaving is not None and self.leaving.note else []
        lines += [] if self._hindrance is None else [self._hindrance]
        lines += [
            f"rank {rank}: {count} reports discarded ({reason})"
            for (rank, reason), count in sorted(self.discarded.items())
        ]
        lines += [self._say_next()] if self.policy.is_adaptive else []
        return "\n".join(lines)

    def _say_next(self) -> str:
        """Say on which times the policy decides next."""
        if self.quarantine.is_active:
            return "the policy decides next on times measured after the quarantine"
        newest = self._unsent or self.history[-1]
        return f"the policy decides next on times measured with plan {newest.plan_id}"

    @property
    def _made_for(self) -> MadeFor:
        return MadeFor(self.task.world_size, self.task.global_batch_size, self.policy.name)

    def state_dict(self) -> dict[str, Any]:
        """Return history, counts and what the policy learnt, JSON-able."""
        return encode(self.state())

    def state(self) -> ControllerState:
        """Return what ``state_dict`` says."""
        return ControllerState(
            made_for=self._made_for,
            history=[*self.history, *([] if self._unsent is None else [self._unsent])],
            num_intervals=self._num_intervals,
            quarantine=self.quarantine,
            discarded=[(rank, why, n) for (rank, why), n in sorted(self.discarded.items())],
            learnt=self.policy.state_dict(),
            leaving=None if self.leaving is None else self.leaving.state,
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; a PlanError for another world, batch or policy."""
        self.go_on(decode(ControllerState, state, what="controller"))

    def go_on(self, saved: ControllerState) -> None:
        """Go on from what was saved; one that is refused changes nothing."""
        was, here = asdict(saved.made_for), asdict(self._made_for)
        given = [name for name in here if self.policy.most is None or name != "global_batch_size"]
        wrong = [
            f"{name}={was[name]!r} instead of {here[name]!r}"
            for name in given
            if was[name] != here[name]
        ]
        if wrong:
            raise PlanError(
                f"load_state_dict: the state is of a controller with {', '.join(wrong)}; make "
                "this one with the same, or start it afresh"
            )
        self.policy.load_state_dict(saved.learnt)  # first: it refuses what it cannot read
        self.task = replace(self.task, global_batch_size=saved.made_for.global_batch_size)
        self.history, self._num_intervals = list(saved.history), saved.num_intervals
        self.quarantine, self._unsent = saved.quarantine, None
        self.discarded = Counter({(rank, why): n for rank, why, n in saved.discarded})
        if self.leaving is not None and saved.leaving is not None:
            self.leaving.state = saved.leaving
        self._restrict(self.plan.sizes)

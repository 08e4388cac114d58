"""Watches the workers of one optimizer: looks at rows, exchanges evidence, warns, quarantines.

Looking happens in the engine's thread, where it aggregates. Every ``interval`` steps one small
all-gather (8 (1 + 10 n) bytes a rank) travels beside the step's last buckets: it is there when
they are, and never in flight between steps. Every rank reads the same numbers at the same step,
and so comes to the same decisions without another message.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loft_hvd.aggregation.diagnostics import diagnose, diagnose_filled
from loft_hvd.aggregation.filling import Holes
from loft_hvd.aggregation.rules import Custom, Mean, Rule
from loft_hvd.errors import ArgumentError, ArgumentTypeError, MismatchError
from loft_hvd.pipeline.levels import group_weights
from loft_hvd.pipeline.ring import Rows, run_rule
from loft_hvd.pipeline.suspicion.report import (
    SameData,
    SuspicionReport,
    WorkerReport,
    tell_limits,
    tell_ranks,
)
from loft_hvd.pipeline.suspicion.tracker import (
    Evidence,
    Suspicion,
    SuspicionTracker,
    WorkerState,
)
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Channel, Work
from loft_hvd.transport.groups import Groups

__all__ = ["Quarantine", "Unwatched", "WorkerWatch"]

_logger = logging.getLogger(__name__)

# Bits that a float64 holds exactly, as a whole number below 2**52: one for each worker, in turn.
_MARK_BITS = 52


@dataclass(frozen=True)
class Quarantine:
    """How long a named worker's gradients are left out; equal on every rank.

    A worker is left out only while 2f+1 others remain, and not for copies: nobody can know which
    of two equal rows was first. After ``probation`` steps it is let in again, with a clean sheet;
    each further quarantine of the same worker lasts twice as long.

    Attributes:
        probation: optimizer steps of a worker's first quarantine, >= 1.
    """

    probation: int = 500

    def __post_init__(self) -> None:
        if not isinstance(self.probation, int) or isinstance(self.probation, bool):
            raise ArgumentTypeError(
                f"Quarantine: probation={self.probation!r} must be a whole number of steps"
            )
        if self.probation < 1:
            raise ArgumentError(f"Quarantine: probation={self.probation} must be >= 1")


class Unwatched:
    """In place of a ``WorkerWatch`` where nobody is watched; ``why`` is what the report says."""

    absent_ranks: tuple[int, ...] = ()

    def __init__(self, why: str) -> None:
        self._why = why

    def run(
        self,
        rows: Rows,
        rule: Rule,
        weights: PassWeights | None,
        out: Tensor,
        holes: Holes | None = None,
    ) -> None:
        run_rule(rows, rule, weights, out, holes)

    def mask(self, weights: PassWeights) -> PassWeights:
        return weights  # nobody is in quarantine

    def _ignore(self, weights: PassWeights | None = None) -> None:
        """Send nothing, read nothing."""

    computing_ended = score = step_reduced = _ignore

    def ranks_compared(self, *, are_apart: bool) -> None:
        """Judge nobody, whatever data ranks have."""

    def same_data_found(self, groups: Sequence[SameData]) -> None:
        """Judge nobody, whoever reads the same data."""

    def report(self) -> SuspicionReport:
        return SuspicionReport(0, (), note=self._why)


def _tell_judgement(known: WorkerState, rule: Rule) -> str:
    """Say what the rule makes of a worker's values."""
    if not rule.sees_rows:
        return f"{100 * known.share_outside:.0f} % of its values are outside the rule's window"
    if isinstance(rule, Custom):
        return "its rule says nothing of single workers"
    # Rules that see rows have no window.
    return (
        f"the others' neighbourhoods lack it to {100 * known.share_left_out:.0f} %, "
        f"{100 * known.share_clipped:.0f} % of its values are clipped"
    )


def _tell_copies(share: float, *, is_asked: bool) -> str:
    """Say that a worker's values are found twice; which of the two was first nobody can know.

    ``is_asked``: whether it is asked already if both read the same data.
    """
    if share < 0.005:
        return ""
    why = "" if is_asked else ": one of them copies the other"
    return f"; {share:.0%} equal another worker's bit for bit{why}"


class WorkerWatch:
    """What one optimizer knows of its workers: all ranks, or ``groups`` of them.

    Rows are judged by the window of ``rule``, whose ``min_rows`` bound quarantines.
    """

    def __init__(
        self,
        channel: Channel,
        rule: Rule,
        *,
        groups: Groups | None,
        settings: Suspicion,
        quarantine: Quarantine | None,
    ) -> None:
        self._channel = channel.sub("evidence")
        self._rule = rule
        self._groups = groups
        self._settings = settings
        self._quarantine = quarantine
        members = groups.members if groups else [(rank,) for rank in range(channel.world_size)]
        self._members = tuple(members)  # [num_workers, group_size]
        self._evidence = Evidence(len(self._members), settings)
        self._tracker = SuspicionTracker(len(self._members), settings)
        self._num_steps = 0
        self._are_apart = False
        self._limits = ""
        self._same_data: tuple[SameData, ...] = ()
        # In flight between ``computing_ended`` and ``step_reduced``: what is sent, what arrives.
        self._exchange: tuple[Work, Tensor, Tensor] | None = None
        self._until: dict[int, int] = {}  # worker in quarantine -> the step that ends it
        self._refused: set[int] = set()
        self._num_quarantines = [0] * len(self._members)

    # In the engine's thread.

    def run(
        self,
        rows: Rows,
        rule: Rule,
        weights: PassWeights | None,
        out: Tensor,
        holes: Holes | None = None,
    ) -> None:
        """Apply a rule to rows, as ``run_rule``, and look at them on the way."""
        if isinstance(rule, Mean):  # it keeps every value: no row could be outside
            run_rule(rows, rule, weights, out, holes)
            return
        by = None if weights is None else weights.weights
        present, every = None if weights is None else weights.present, self._settings.every
        if holes is None:
            _, found = diagnose(rows, rule, weights=by, present=present, out=out, every=every)
        else:
            found = diagnose_filled(
                rows, rule, holes, weights=by, present=present, out=out, every=every
            )
        self._evidence.add(found)

    # In the user's thread.

    @property
    def absent_ranks(self) -> tuple[int, ...]:
        """The ranks that are in quarantine, ascending; the same on every rank."""
        return tuple(sorted(rank for worker in self._until for rank in self._members[worker]))

    def mask(self, weights: PassWeights) -> PassWeights:
        """Return a step's weights without who is in quarantine, as far as the rule can spare them.

        Where others have no samples in it, those least off count again: 2f+1 rows bound f wrong
        ones, and fewer none.
        """
        held = sorted(self._until, key=lambda row: (-self._tracker.excess_fault(row), row))
        while held:
            absent = {rank for worker in held for rank in self._members[worker]}
            pairs = enumerate(weights.present)
            present = tuple(is_there and rank not in absent for rank, is_there in pairs)
            masked = replace(weights, present=present)
            by_worker = masked if self._groups is None else group_weights(masked, self._groups)
            if sum(by_worker.present) >= self._rule.min_rows:
                return masked
            held.pop()
        return weights

    @property
    def rule(self) -> Rule:
        """The rule by which rows are judged."""
        return self._rule

    def judge_by(self, rule: Rule) -> None:
        """Judge rows by another rule from the next step on; every rank calls it alike."""
        self._rule = rule

    def computing_ended(self) -> None:
        """Send evidence when it is time to, beside buckets in flight; every rank calls it alike."""
        if self._num_steps == 0 or self._num_steps % self._settings.interval:
            return
        # Who is held by this rank's count goes in front: ranks that differ must not go on.
        held = float(sum(1 << worker % _MARK_BITS for worker in self._until))
        row = torch.cat(
            [torch.tensor([held], dtype=torch.float64), torch.from_numpy(self._evidence.take())]
        )
        rows = torch.zeros(self._channel.world_size, row.numel(), dtype=torch.float64)
        work = self._channel.transport.allgather(row, rows.view(-1), name=self._channel.name)
        self._exchange = (work, row, rows)

    def score(self) -> None:
        """Score the rows of the step before, while this step's are on their way.

        It takes about a millisecond, and more where ranks have new batch sizes. Without this call
        ``step_reduced`` does it, or the next exchange.
        """
        self._evidence.score()

    def step_reduced(self, weights: PassWeights) -> None:
        """Close a step, in which no bucket is in flight any more; every rank calls it alike."""
        by_worker = weights if self._groups is None else group_weights(weights, self._groups)
        counts = None if by_worker is None else by_worker.counts
        self._evidence.step_reduced(self._rule, weights=counts, are_apart=self._are_apart)
        self._num_steps += 1
        # What was sent before this step's last buckets is read now: decisions hold from the next.
        self._read()
        self._release()

    def ranks_compared(self, *, are_apart: bool) -> None:
        """Take what comparing ranks has shown; every rank calls it alike, between two steps.

        Where ranks draw from different data (``are_apart``) distances name nobody from here on.
        """
        self._are_apart = are_apart
        if are_apart:
            named = [rank for worker in self._tracker.named() for rank in self._members[worker]]
            self._limits = tell_limits(named, self._num_steps)

    def same_data_found(self, groups: Sequence[SameData]) -> None:
        """Take which ranks read the same data: of those, copies are no sign of a wrong worker."""
        self._same_data = tuple(groups)

    def _read(self) -> None:
        if self._exchange is None:
            return
        (work, _, rows), self._exchange = self._exchange, None
        self._channel.wait(work, what="exchange of evidence")
        if not bool((rows[:, 0] == rows[0, 0]).all()):
            raise MismatchError(
                f"ranks differ about who is in quarantine (marks by rank: {rows[:, 0].tolist()}); "
                "every rank must run the same code on the same settings"
            )
        for worker in self._tracker.observe(rows[:, 1:].numpy()):
            known = self._tracker.workers[worker]
            question = self._ask_of_data(worker) if known.share_copied >= 0.005 else ""
            self._say(
                logging.WARNING,
                "%s%s stands out for %d steps: suspicion %.2f; %s, %d were not finite, and the "
                "finite ones are %.3g times as far from the result as usual%s; see "
                "optimizer.report()",
                question,
                self._label(worker),
                known.steps_out,
                known.suspicion,
                _tell_judgement(known, self._rule),
                known.num_non_finite,
                known.distance**0.5,
                _tell_copies(known.share_copied, is_asked=bool(question)),
            )
        if self._quarantine is not None:
            self._hold(self._quarantine)

    def _hold(self, quarantine: Quarantine) -> None:
        """Leave workers out that are at fault, the farthest off first, while 2f+1 remain.

        Copies do not count: else a worker could have any other one left out by copying its rows.
        """
        wrong = [worker for worker in self._tracker.at_fault() if worker not in self._until]
        # Those equally far off by number: the order must be the same on every rank.
        for worker in sorted(wrong, key=lambda row: (-self._tracker.excess_fault(row), row)):
            num_left = len(self._members) - len(self._until) - 1
            # 2f+1 rows bound f wrong ones; f stays what it is, whoever is left out.
            if num_left < self._rule.min_rows:
                if worker not in self._refused:  # said once a worker
                    self._say(
                        logging.WARNING,
                        "%s is not put in quarantine: %d workers would remain, but %s needs %d",
                        self._label(worker),
                        num_left,
                        self._rule,
                        self._rule.min_rows,
                    )
                self._refused.add(worker)
                return
            num_steps = quarantine.probation * 2 ** self._num_quarantines[worker]
            self._num_quarantines[worker] += 1
            self._until[worker] = self._num_steps + num_steps
            self._say(
                logging.WARNING,
                "%s is in quarantine for %d steps: its gradients are left out",
                self._label(worker),
                num_steps,
            )

    def _release(self) -> None:
        for worker in [w for w, until in self._until.items() if until <= self._num_steps]:
            del self._until[worker]
            self._tracker.forgive(worker)
            self._say(logging.INFO, "%s is let in again, on probation", self._label(worker))

    def _say(self, level: int, text: str, *values: object) -> None:
        """Log it once for all ranks: they come to the same decisions."""
        if self._channel.rank == 0:
            _logger.log(level, text, *values)

    def _ask_of_data(self, worker: int) -> str:
        """Ask first whether it reads another rank's data, where that has been found."""
        members = set(self._members[worker])
        for group in self._same_data:
            if members & set(group.ranks):
                return f"do ranks {tell_ranks(group.ranks)} read the same data? "
        return ""

    def _label(self, worker: int) -> str:
        members = self._members[worker]
        return f"rank {members[0]}" if len(members) == 1 else f"group of ranks {list(members)}"

    def report(self) -> SuspicionReport:
        """Return what is known of every worker; the same on every rank."""
        named = self._tracker.named()
        return SuspicionReport(
            num_steps=self._num_steps,
            limits=self._limits,
            workers=tuple(
                WorkerReport(
                    ranks=self._members[worker],
                    suspicion=known.suspicion,
                    share_outside=known.share_outside,
                    distance=known.distance,
                    num_non_finite=known.num_non_finite,
                    num_steps=known.num_steps,
                    is_named=worker in named,
                    in_quarantine_until=self._until.get(worker),
                    share_left_out=known.share_left_out,
                    share_clipped=known.share_clipped,
                    share_copied=known.share_copied,
                )
                for worker, known in enumerate(self._tracker.workers)
            ),
        )

"""What is found out about the workers of one world, and what follows from it.

Every front end has one ``Judgement``, the same on every rank. It watches whose gradients are off
(``watch.py``) and leaves out who is in quarantine; finds ranks that read the same data
(``same_data.py``), and who sends NaN into a mean (``finite.py``); compares ranks once, after 50
steps (``spread.py``), by which scope="auto" chooses how rules judge rows; looks at what a rule
takes from parameters (``zeroed.py``); and writes all of it into the run log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from loft_hvd.aggregation.filling import Holes
from loft_hvd.aggregation.row_rules import Robust, RowRule
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.goodput import GradientNoise
from loft_hvd.pipeline.buckets import Bucket
from loft_hvd.pipeline.gradients import sum_up
from loft_hvd.pipeline.noise import NoiseMeter, StepSamples
from loft_hvd.pipeline.ring import Rows
from loft_hvd.pipeline.selection import Scope
from loft_hvd.pipeline.suspicion.finite import FiniteWatch
from loft_hvd.pipeline.suspicion.report import FEWEST_WATCHED, SameData, SuspicionReport
from loft_hvd.pipeline.suspicion.same_data import NUM_SUMS, SameDataWatch
from loft_hvd.pipeline.suspicion.spread import (
    JUDGE_IN_SHARDS_BELOW,
    WARN_ABOVE,
    Spread,
    SpreadWatch,
    tell_scope,
)
from loft_hvd.pipeline.suspicion.tracker import Suspicion
from loft_hvd.pipeline.suspicion.watch import Quarantine, Unwatched, WorkerWatch
from loft_hvd.pipeline.suspicion.zeroed import ZeroedWatch, is_not_zero
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.runlog import MOST_ROWS, RunLog
from loft_hvd.transport.base import Channel
from loft_hvd.transport.groups import Groups, Over

__all__ = ["Judgement", "Watching"]

_logger = logging.getLogger(__name__)

# Steps between two looks at who is off: evidence is not exchanged more often by default.
_LOOK_EVERY = 10
# Steps after which the run log has who is off even though nothing has changed.
_WRITE_EVERY = 100
_FIRST_NOISE = 50  # steps after which that of gradients is written first


@dataclass(frozen=True)
class Watching:
    """How workers are judged, as a user asks for it; equal on every rank.

    Attributes:
        scope: by which values rules that see rows judge them.
        diagnostics: whether to watch who is off; None where that is cheap.
        quarantine: whether to leave out who is.
        over: the groups of ranks that are workers, as the user gave them.
    """

    scope: Scope = "shard"
    diagnostics: bool | Suspicion | None = None
    quarantine: bool | Quarantine = False
    over: Over = None


class Judgement:
    """Who is off among some workers, and by which values rules judge them.

    Every rank makes it, and calls it, alike.

    Args:
        channel: the ranks.
        rules: of all parameters.
        asked: what the user wants.
        groups: of ranks, each a worker; None where each rank is one.
        is_on_cpu: whether this rank's gradients are on a CPU.
        knows_sizes: somebody says how many samples gradients are of, so that noise is measured.
        log: the run log.

    Attributes:
        num_workers: ranks, or groups of them.
        watch: who is watched, and left out.
        is_model: whether rules that see rows judge them over the whole model, from the next step.
    """

    def __init__(
        self,
        channel: Channel,
        rules: Sequence[Rule],
        asked: Watching,
        *,
        groups: Groups | None = None,
        is_on_cpu: bool,
        knows_sizes: bool,
        log: RunLog,
    ) -> None:
        self._channel = channel
        self._asked = asked
        self._groups = groups
        self.num_workers = groups.num_groups if groups else channel.world_size
        self._log = log
        self._num_steps = 0
        self._noise = None
        if knows_sizes and channel.world_size > 1:
            self._noise = NoiseMeter(channel, rules, groups)
        self._rules: tuple[Rule, ...] = ()  # in the log
        self._told: tuple[object, ...] = ()  # each worker's standing in the newest line
        watches = self._watches(is_on_cpu)
        self.watch: WorkerWatch | Unwatched = self._make_watch(rules, watches=watches)
        # Under every rule, means included, unless nobody is to be watched.
        self._finite = FiniteWatch(channel) if watches else None
        self._same = None if asked.diagnostics is False else SameDataWatch(channel)
        self._same_data: tuple[SameData, ...] = ()
        self._names: Sequence[str] = ()  # of all parameters
        self._spread: SpreadWatch | None = None
        self._zeroed: ZeroedWatch | None = None
        self._robust: dict[int, int] = {}  # places of parameters under a rule that drops values
        self._own: list[Tensor | None] = []  # by place, where this rank's gradients are not zero
        self._is_compared = False
        self.is_model = self._begins_by_model(rules)
        self._write_rules(rules)

    # Who is watched.

    def _watches(self, is_on_cpu: bool) -> bool:
        """Say whether somebody looks at values step after step."""
        if self._channel.world_size == 1:
            return False
        # On a GPU every look waits for the device: only where it was asked for.
        are_on_cpu, asked = self._are_all_on_cpu(is_on_cpu), self._asked.diagnostics
        return are_on_cpu if asked is None else bool(asked)

    def _make_watch(self, rules: Sequence[Rule], *, watches: bool) -> WorkerWatch | Unwatched:
        """Return what watches the workers, or says why nobody does."""
        if self._channel.world_size == 1:
            return Unwatched("nobody is watched: this rank reduces alone")
        if self.num_workers < FEWEST_WATCHED:
            return Unwatched(
                f"nobody is watched: of {self.num_workers} workers nobody can say which one is off"
            )
        # A mean keeps every row: nobody can be outside, and nobody is looked at.
        robust = [rule for rule in rules if not isinstance(rule, Mean)]
        if not robust:
            return Unwatched(
                "nobody is watched: that takes a robust rule; a mean keeps every value"
            )
        diagnostics, quarantine = self._asked.diagnostics, self._asked.quarantine
        if not (watches or quarantine):
            return Unwatched(
                "nobody is watched: diagnostics=False was given"
                if diagnostics is False
                else "nobody is watched: where gradients are on a GPU that takes diagnostics=True, "
                "and each bucket then waits for the device"
            )
        return WorkerWatch(
            self._channel,
            # The rule that needs most rows says whom it can spare.
            max(robust, key=lambda rule: rule.min_rows),
            groups=self._groups,
            settings=diagnostics if isinstance(diagnostics, Suspicion) else Suspicion(),
            quarantine=Quarantine() if quarantine is True else quarantine or None,
        )

    def _are_all_on_cpu(self, mine: bool) -> bool:
        """Say whether gradients are on a CPU on every rank."""
        if not self._channel.transport.can.mixes_devices:
            return mine  # ranks have agreed on the kind of their devices
        # One on a GPU that watches nobody would not come to where the others exchange evidence.
        return bool(self._channel.sub("cpu").allgather_rows(torch.tensor([int(mine)])).all())

    def take_rules(self, rules: Sequence[Rule], *, is_on_cpu: bool) -> None:
        """Judge by the rules that there are now; what is known of workers stays."""
        watches = self._watches(is_on_cpu)
        if watches != (self._finite is not None):
            self._finite = FiniteWatch(self._channel) if watches else None
        fresh = self._make_watch(rules, watches=watches)
        if isinstance(self.watch, Unwatched):
            self.watch = fresh
        elif isinstance(fresh, WorkerWatch):
            self.watch.judge_by(fresh.rule)
        if self._noise is not None and not self._noise.suits(rules):
            self._noise = NoiseMeter(self._channel, rules, self._groups)
        self._write_rules(rules)

    # A step, in the engine's thread.

    def run(
        self,
        rows: Rows,
        rule: Rule,
        weights: PassWeights | None,
        out: Tensor,
        holes: Holes | None = None,
    ) -> None:
        """Apply a rule to rows, as ``run_rule``, and look at them on the way."""
        self.watch.run(rows, rule, weights, out, holes)
        if self._noise is not None:
            self._noise.look(rows, out)

    def packed(self, bucket: Bucket, values: Tensor, rule: Rule, *, num_owners: int = 1) -> None:
        """Look at what this rank is about to send of a bucket, [numel]; it may mark it.

        ``num_owners`` is more than 1 where each keeps its shard of the result to itself.
        """
        # A robust rule lets no such value through, and looks at rows by itself.
        if self._finite is not None and isinstance(rule, Mean):
            self._finite.packed(bucket, values, num_owners=num_owners)

    # A step, in the user's thread.

    def _begins_by_model(self, rules: Sequence[Rule]) -> bool:
        """Say whether ranks are judged over the model before they are compared."""
        if self._asked.scope != "auto":
            return self._asked.scope == "model"
        # In shards from the start where nobody will compare.
        can_compare = self._channel.world_size >= FEWEST_WATCHED
        return can_compare and not all(isinstance(rule, Mean) for rule in rules)

    def look_at(
        self, parameters: Sequence[Tensor], names: Sequence[str], rules: Sequence[Rule], advice: str
    ) -> None:
        """Take the parameters there are from the next gradient on, each under its rule.

        ``advice`` is what to do about a parameter that a rule zeroes; see ``ZeroedWatch``.
        """
        self._names = names
        # A mean over ranks does not mind that they draw from different data.
        chosen = [at for at, rule in enumerate(rules) if not isinstance(rule, Mean)]
        self._robust = {at: place for place, at in enumerate(chosen)}
        if len(self._own) != len(chosen):
            self._own = [None] * len(chosen)
        self._spread = SpreadWatch(self._channel, [parameters[at].numel() for at in chosen])
        self._zeroed = ZeroedWatch(
            [parameters[at] for at in chosen],
            [names[at] for at in chosen],
            self._channel,
            advice=advice,
        )
        if self._asked.scope == "auto" and not self._is_compared:
            self.is_model = not self._spread.has_ended

    def sent(self, at: int, gradient: Tensor | None) -> None:
        """Note the gradient of a parameter, as this rank has it, before anything changes it."""
        if gradient is None:
            return
        if self._noise is not None:
            self._noise.sent(at, gradient)
        if self._same is not None and not self._same.has_ended:
            self._same.sent(at, sum_up(gradient, NUM_SUMS))
        if self._zeroed is None or self._spread is None:
            # The first step of a front end that learns of parameters as their gradients come.
            if self._channel.world_size >= FEWEST_WATCHED:
                self._own += [None] * (at + 1 - len(self._own))
                self._own[at] = is_not_zero(gradient)
            return
        if (place := self._robust.get(at)) is None:
            return
        self._spread.sent(place, gradient)
        if self._zeroed.is_due:
            self._own[place] = is_not_zero(gradient)

    def computing_ended(self) -> None:
        """Send evidence when it is time to, beside buckets in flight."""
        self.watch.computing_ended()
        if self._noise is not None:
            self._noise.computing_ended()

    def score(self) -> None:
        """Score the rows of the step before, while this step's are on their way."""
        self.watch.score()

    def step_reduced(self, weights: PassWeights) -> None:
        """Close a step on the wire: no bucket is in flight any more."""
        self.watch.step_reduced(weights)
        if self._same is None:
            return
        rank = self._channel.rank
        num_samples = 1 if weights.counts is None else weights.counts[rank]
        found = self._same.step_reduced(num_samples if weights.present[rank] else 0)
        if found:
            self._same_data = found
            self.watch.same_data_found(found)
            self._log.write("same_data", groups=[asdict(group) for group in found])

    def gradients_reduced(
        self, results: Sequence[Tensor | None], samples: StepSamples | None
    ) -> bool:
        """Look at a step's results, by parameter; say whether ``is_model`` has changed.

        ``samples`` are what they are of, where somebody says so.
        """
        before, found = self.is_model, None
        if self._noise is not None:
            self._take_noise(self._noise.step_reduced(samples, results))
        if self._finite is not None:
            marked = [results[at] for at in self._finite.parameters]
            lost = self._finite.step_reduced(self._log.step + 1, marked, self._names)
            if lost is not None:
                self._log.write("not_finite", found=asdict(lost))
        reduced = [results[at] for at in self._robust]
        if self._zeroed is not None:
            own, self._own = self._own, [None] * len(self._own)
            self._zeroed.step_reduced(own, reduced)
        if self._spread is not None and (found := self._spread.step_reduced(reduced)) is not None:
            self.ranks_compared(found)
        self._write_standing()
        if found is not None:
            self._judge_by(found)
        return self.is_model != before

    def ranks_compared(self, found: Spread) -> None:
        """Take how far ranks' gradients are apart in the long run; every rank calls it alike."""
        self._log.write("spread", **asdict(found))
        self.watch.ranks_compared(are_apart=found.usual > WARN_ABOVE)

    def _judge_by(self, found: Spread) -> None:
        """Take the scope that suits ranks so far apart, if that is left to us."""
        if self._asked.scope != "auto" or not any(
            isinstance(rule, RowRule) for rule in self._rules
        ):
            return
        if not math.isnan(found.usual):
            was_model, self._is_compared = self.is_model, True
            self.is_model = found.usual > JUDGE_IN_SHARDS_BELOW
            if self.is_model != was_model:
                self._log.write("scope", scope="model" if self.is_model else "shard")
        if self._channel.rank == 0:
            tell_scope(found, is_model=self.is_model)

    # The gradients' noise.

    @property
    def noise(self) -> GradientNoise | None:
        """What is known of the gradients' noise by now; the same on every rank."""
        return None if self._noise is None else self._noise.newest

    def _take_noise(self, found: GradientNoise | None) -> None:
        is_due = self._num_steps == _FIRST_NOISE or self._num_steps % _WRITE_EVERY == 0
        if found is not None and is_due:
            self._log.write("noise", **asdict(found), scale=found.scale)

    # The run log.

    def _write_rules(self, rules: Sequence[Rule]) -> None:
        """Write the rules from here on, if they are new, and when somebody looks at gradients."""
        if tuple(rules) == self._rules:
            return
        if self._channel.rank == 0:
            _advise_fewer([rule for rule in rules if rule not in self._rules], self.num_workers)
        self._rules = tuple(rules)
        note = self.watch.report().note
        self._log.write(
            "rules",
            rules=[str(rule) for rule in rules],
            over=None if self._asked.over is None else str(self._asked.over),
            watched_from=None if note else self._log.step + _LOOK_EVERY,
            note=note,
        )

    def _write_standing(self) -> None:
        """Write who is off, if it is time to and somebody's standing is new."""
        self._num_steps += 1
        if self._log.path is None or self._num_steps % _LOOK_EVERY:
            return
        report = self.watch.report()
        standing = tuple((worker.is_named, worker.in_quarantine_until) for worker in report.workers)
        if report.workers and (standing != self._told or self._num_steps % _WRITE_EVERY == 0):
            self._told = standing
            # The most suspicious of many, in the order of ranks.
            most = sorted(report.workers, key=lambda each: (not each.is_named, -each.suspicion))
            shown = sorted(most[:MOST_ROWS], key=lambda each: each.ranks)
            workers = [asdict(worker) for worker in shown]
            self._log.write("suspicion", num_steps=report.num_steps, workers=workers)

    def report(self) -> SuspicionReport:
        """Return what is known of every worker, and of parameters; the same on every rank."""
        found = () if self._zeroed is None else self._zeroed.found
        lost = () if self._finite is None else self._finite.found
        return replace(
            self.watch.report(), zeroed=found, same_data=self._same_data, not_finite=lost
        )


def _advise_fewer(rules: Sequence[Rule], num_workers: int) -> None:
    """Say where the advised rule expects more wrong workers than it can do well with."""
    # Bound from the papers: the error grows with f / (n - 2f) times the workers' differences.
    for f in sorted({rule.f for rule in rules if isinstance(rule, Robust)}):
        if 4 * f > num_workers > 1:  # alone nothing is aggregated
            _logger.warning(
                "robust:f=%d expects more than a quarter of %d workers to be wrong: that costs "
                "accuracy even if none is, and most where workers draw from different data. With "
                "a quarter, the worst attack on digits sorted by class left 75 %% right, where "
                'nobody attacks 96 %% (8 workers, scope="model", docs/attacks.md). '
                "First give the placement strata: Placement.with_strata(labels, cap=1.5); then "
                "use %d workers or more%s",
                f,
                num_workers,
                4 * f,
                f", or f <= {num_workers // 4}" if num_workers >= 4 else "",
            )
